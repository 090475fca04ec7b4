"""Auxiliary peers: reduce for others, hold and serve the state, watch the run."""

from collab_aux.auxiliary import Auxiliary
from collab_aux.gossip import GossipAuxiliary

__all__ = ["Auxiliary", "GossipAuxiliary"]
