"""What an arm costs in the suite `links`: bytes of everything that leaves a peer, and seconds per step.

That suite trains a larger model over real links. Where it has no such arm, both are computed from the payload, which
grows with the model.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.losses.arms import LOCAL_STEPS, Arm
from benchmarks.record import Record

NUM_VALUES = 842_496  # of the model of `links`
MBIT = 10
BYTES_PER_S = MBIT * 1e6 / 8
HEADERS = 1.05
"""Of our payloads, generously; others' are counted bare."""
OURS = ("allreduce", "diloco", "gossip")
SAME_NAME = ("alone", "ddp", "hivemind", "allreduce")
MAY_BE_MISSING = "hivemind"  # which does not always get through its steps on such a link
OVERLAPPING = {("int4", LOCAL_STEPS): "diloco", ("int4", 100): "diloco-100", ("topk", LOCAL_STEPS): "diloco-topk"}


@dataclass(frozen=True)
class Cost:
    """Per step of one peer."""

    num_bytes: float
    seconds: float
    is_measured: bool
    """Otherwise the seconds are the computing and the sending, one after the other."""


@dataclass(frozen=True)
class Links:
    """What `links` measured on its slower links, by arm."""

    costs: Mapping[str, Cost]

    @classmethod
    def of(cls, record: Record) -> Links | None:
        """None if something is missing."""
        costs = {}
        for arm in (*SAME_NAME, *OVERLAPPING.values()):
            entries = [entry for entry in record.entries_of(arm=arm, size=MBIT) if "seconds" in entry]
            if not entries and arm == MAY_BE_MISSING:
                continue
            if not entries:
                return None
            num_bytes, seconds = (
                statistics.median(entry[key] for entry in entries) for key in ("bytes_sent", "seconds")
            )
            costs[arm] = Cost(num_bytes, seconds, is_measured=True)
        return cls(costs)

    def cost_of(self, arm: Arm, payload: float) -> Cost:
        """
        Args:
            arm: who.
            payload: bytes that a peer sends per step with the model of `links`.
        """
        if arm.kind in SAME_NAME and arm.kind in self.costs:
            return self.costs[arm.kind]
        if arm.overlap:
            return self.costs[OVERLAPPING[arm.codec, arm.local_steps]]
        alone = self.costs["alone"]
        # peers of an all-reduce send and receive at the same time; FedAvg's server answers when it has everything
        directions = 2 if arm.kind == "fedavg" else 1
        seconds = alone.seconds + directions * payload / BYTES_PER_S
        if arm.kind not in OURS:
            return Cost(payload, seconds, is_measured=False)
        # who is alone in `links` is in the swarm all the same: records, news, the DHT
        return Cost(HEADERS * payload + alone.num_bytes * seconds / alone.seconds, seconds, is_measured=False)
