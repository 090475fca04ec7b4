"""What peers share: the run as data, the swarm, exact averaging, the replicated update, state, telemetry."""

from collab_core import lazy_hivemind

lazy_hivemind.put_off()

__version__ = "0.1.0"
