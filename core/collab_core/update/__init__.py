"""The replicated global update: every peer applies the same arithmetic to the same bytes and gets the same bits.

Read in this order:

- `exact`: the only arithmetic allowed, and why torch's own is not;
- `schedule`: the learning rate of an epoch;
- `segments`: where each tensor lies in the flat vectors, and which of them decay;
- `moments`, `adamw`, `lamb`, `sgd`: the three rules;
- `optimizer`: check, clip, step.
"""

from collab_core.update.optimizer import Optimizer, UpdateStats
from collab_core.update.schedule import learning_rate
from collab_core.update.segments import Segment

__all__ = ["Optimizer", "Segment", "UpdateStats", "learning_rate"]
