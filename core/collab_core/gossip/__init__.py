"""Gossip: models that differ, and meet in pairs.

mean          the arithmetic of a meeting
wire          what two peers say to each other
encounter     one exchange, from either side
doubts        exchanges that were cut off
meetings      a peer's exchanges: asking and answering
newcomers     models for those who have none yet
ledger        which exchanges were decided, and which are in the model
journal       exchanges on disk
keeping       the model on disk, with the exchanges that are in it
neighbours    the others, as their records tell
sketch        64 numbers that stand for a model
convergence   when the run is over
"""

from collab_core.gossip.convergence import NUM_ROUNDS_AT_THE_END, Agreement, Convergence, num_rounds
from collab_core.gossip.encounter import Change, Faults, Terms
from collab_core.gossip.journal import Journal
from collab_core.gossip.keeping import Keeping, Kept
from collab_core.gossip.mean import moved
from collab_core.gossip.meetings import Meetings, Outcome
from collab_core.gossip.neighbours import Neighbours
from collab_core.gossip.sketch import Sketcher

__all__ = [
    "NUM_ROUNDS_AT_THE_END",
    "Agreement",
    "Change",
    "Convergence",
    "Faults",
    "Journal",
    "Keeping",
    "Kept",
    "Meetings",
    "Neighbours",
    "Outcome",
    "Sketcher",
    "Terms",
    "moved",
    "num_rounds",
]
