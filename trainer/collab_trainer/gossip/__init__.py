"""Training by gossip: every trainer has a model of its own, and two at a time meet."""

from collab_trainer.gossip.trainer import GossipTrainer

__all__ = ["GossipTrainer"]
