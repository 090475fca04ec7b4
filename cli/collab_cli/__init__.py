"""The `collab` command: parse, build config, call, map errors to exit codes. One file per command."""
