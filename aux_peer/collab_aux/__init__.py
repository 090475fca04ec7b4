"""Auxiliary peers: reduce for others, hold and serve the state, watch the run."""

from collab_aux.auxiliary import Auxiliary

__all__ = ["Auxiliary"]
