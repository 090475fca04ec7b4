"""The state of a run in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from collab_core.overview import Overview
from collab_core.run.settings import RunSettings

Tone = Literal["good", "waiting", "bad", "plain"]

STALLED_S = 60.0
STALLED = 3.0  # times what the epoch should take at the speed that peers tell


def state_in_words(seen: Overview, settings: RunSettings, epoch_age_s: float) -> tuple[Tone, str]:
    """What is going on, and whether that is good.

    Args:
        seen: the run now.
        settings: of the run.
        epoch_age_s: since the last epoch ended.
    """
    end = settings.limits.max_epochs
    if end and seen.epoch >= end:
        return "good", f"The run is complete: {seen.epoch} of {end} epochs."
    if not seen.peers:
        return "waiting", "Nobody is here. The run goes on when the first peer comes back."
    if not seen.trainers:
        kept = f" The state of epoch {seen.epoch} is kept." if seen.tip.epoch > 0 else ""
        return "waiting", f"No trainer is here; the run waits for one.{kept}"
    who = count(len(seen.trainers), "trainer")
    if settings.strategy.name == "gossip":
        stages = [peer.record.gossip.stage for peer in seen.trainers if peer.record.gossip is not None]
        if stages and all(stage == "done" for stage in stages):
            return "good", f"The run has converged after {count(seen.epoch, 'round')}."
        return "good", f"{who} at work, each on a model of its own; two at a time meet. Round {seen.epoch + 1}."
    if all(peer.record.phase == "joining" for peer in seen.trainers):
        return "waiting", f"{who} {_verb(seen.trainers, 'is', 'are')} joining and fetching the state."
    expected_s = seen.target / seen.samples_per_second if seen.samples_per_second else 0.0
    if epoch_age_s > max(STALLED_S, STALLED * expected_s):
        minutes = int(epoch_age_s // 60)
        return "waiting", f"Epoch {seen.epoch + 1} takes long: nothing for {count(minutes, 'minute')}. {who} at work."
    if any(peer.record.phase == "averaging" for peer in seen.trainers):
        return "good", f"{who} {_verb(seen.trainers, 'is', 'are')} averaging epoch {seen.epoch + 1}."
    return "good", f"{who} {_verb(seen.trainers, 'is', 'are')} collecting samples for epoch {seen.epoch + 1}."


def count(number: int, what: str) -> str:
    """`1 trainer`, `2 trainers`."""
    return f"{number} {what}" if number == 1 else f"{number:,} {what}s"


def _verb(of: Sequence[object], one: str, many: str) -> str:
    return one if len(of) == 1 else many
