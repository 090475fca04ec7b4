"""What an arm would cost in the suite `links`: bytes of everything that leaves a peer, and seconds per step.

The suite `links` trains a larger model over real links; here are its figures. Payloads grow with the model, so they are
scaled from what was counted here; what comes on top of them for our own arms was measured there.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.losses.arms import Arm

NUM_VALUES = 842_496  # of the model of `links`
BYTES_PER_S = 10e6 / 8
STEP_S = 0.4015
"""A step of a peer that is alone."""
MEASURED_S = {"ddp": 5.33, "allreduce": 1.885}
"""Seconds per step at 10 Mbit/s."""
OVERLAPPING_S = 0.4026
"""Of `diloco` with int4 that goes on while a round is under way, H 50."""
OVERLAPPING_BYTES = 25_816
"""What left one peer per step then, from the counters of its interface."""
HEADERS = 1.05
"""Of our payloads, generously; others' are counted bare."""
OURS = ("allreduce", "diloco", "gossip")


@dataclass(frozen=True)
class Cost:
    """Per step of one peer."""

    num_bytes: float
    seconds: float
    is_measured: bool
    """Whether the seconds are; otherwise they are the computing and the sending, one after the other."""


def cost_of(arm: Arm, payload: float) -> Cost:
    """
    Args:
        arm: who.
        payload: bytes that a peer sends per step with the model of `links`.
    """
    seconds, is_measured = _seconds(arm, payload)
    control = _control_per_second() * seconds if arm.kind in OURS else 0.0
    return Cost(payload * (HEADERS if arm.kind in OURS else 1.0) + control, seconds, is_measured)


def _seconds(arm: Arm, payload: float) -> tuple[float, bool]:
    if arm.kind == "alone":
        return STEP_S, True
    if arm.kind in MEASURED_S:
        return MEASURED_S[arm.kind], True
    if arm.overlap:
        return OVERLAPPING_S, True
    # peers of an all-reduce send and receive at the same time; FedAvg's server answers when it has everything
    directions = 2 if arm.kind == "fedavg" else 1
    return STEP_S + directions * payload / BYTES_PER_S, False


def _control_per_second() -> float:
    """Records, news and the DHT: whatever was neither payload nor its headers."""
    payload = 2 * NUM_VALUES * 0.75 * 34 / 64 / 50
    return (OVERLAPPING_BYTES - HEADERS * payload) / OVERLAPPING_S
