"""The network of a run: joining, identity, peer records, names, the daemon underneath."""

from collab_core.identity import Identity
from collab_core.swarm.config import SwarmConfig
from collab_core.swarm.directory import Peer
from collab_core.swarm.names import friendly_name
from collab_core.swarm.record import PeerRecord
from collab_core.swarm.swarm import Swarm

__all__ = ["Identity", "Peer", "PeerRecord", "Swarm", "SwarmConfig", "friendly_name"]
