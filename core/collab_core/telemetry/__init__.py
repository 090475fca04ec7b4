"""What a peer tells about itself: the event log."""

from collab_core.telemetry.events import EventLog

__all__ = ["EventLog"]
