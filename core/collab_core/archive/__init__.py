"""Versions of a model on disk: content-addressed, delta-coded, signed, recoverable bit for bit. Needs no torch."""

from collab_core.archive.archive import Archive
from collab_core.archive.costs import Cost, Prefer, predict
from collab_core.archive.recovery import recover, verify
from collab_core.archive.retention import Keep
from collab_core.archive.version import Provenance, Version

__all__ = ["Archive", "Cost", "Keep", "Prefer", "Provenance", "Version", "predict", "recover", "verify"]
