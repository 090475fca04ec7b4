"""The task of the Collab run my-run."""

from .pictures import Pictures

__all__ = ["Pictures"]
