"""The `archive` suite: ways to keep every epoch of a model, in bytes and seconds."""
