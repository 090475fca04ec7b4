"""What peers share: the run as data, the swarm, exact averaging, the replicated update, state, telemetry."""

__version__ = "0.1.0"
