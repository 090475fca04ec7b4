"""The auxiliary's loop: no work of its own, the other three moves as everyone."""

from __future__ import annotations

import time
from typing import Any

from collab_aux.archivist import Archivist
from collab_core.averaging import RoundRequest
from collab_core.peer import Peer

IDLE_S = 0.2
NEWS_S = 2.0  # after a round somebody publishes what came of it, or everyone tries again


class Auxiliary(Peer):
    """A peer without a GPU that reduces for others, keeps and serves the state, and watches the run."""

    def __init__(self, **peer: Any) -> None:
        super().__init__(**peer)
        self._archivist: Archivist | None = None
        if self.config.is_active and self.settings.checkpoints.every:
            self._archivist = Archivist(peer["session"], self._trainers_loss)
            self.holding.on_snapshot = self._archivist.offer

    def run(self) -> None:
        """Help until stopped; `enter` comes first."""
        try:
            while not self.stop.is_set():
                if self.config.is_active:
                    self.run_epoch()
                else:
                    self.assist()
        finally:
            self.leave()

    def leave(self) -> None:
        super().leave()
        if self._archivist is not None:
            self._archivist.close()

    def _trainers_loss(self) -> float | None:
        losses = [
            p.record.loss for p in self.outlook.others() if p.record.role == "trainer" and p.record.loss is not None
        ]
        return sum(losses) / len(losses) if losses else None

    def run_epoch(self) -> None:
        """Average (sending nothing), update, verify: each epoch's state without downloading it."""
        average = self.average(None, 0.0)
        if average is None:
            self.catch_up(f"the swarm went on without us ({self.holding.standing().value})")
            return
        self.update(average)
        self.verify()

    def assist(self) -> None:
        """Reduce in one round of whatever epoch the others are at, keeping nothing."""
        tip = self.outlook.winning_tip(self.holding.mine())
        if tip.epoch < 0:
            time.sleep(IDLE_S)
            self.swarm.check_alive()
            return
        self.averager.set_epoch(tip.epoch)

        def is_over() -> bool:
            return self.stop.is_set() or self.outlook.winning_tip(self.holding.mine()).root != tip.root

        outcome = self.averager.round(
            RoundRequest(
                epoch=tip.epoch,
                parent_root=tip.root,
                wants_average=False,
                companions=lambda: self.outlook.companions(tip.epoch, tip.root),
                should_stop=is_over,
                is_patient=True,
            ),
            self.stop,
        )
        if outcome.members and not outcome.failure:
            names = {self.swarm.name_of(peer_id): int(weight) for peer_id, weight in outcome.members.items()}
            self.events.write("assisted", epoch=tip.epoch, members=names, bytes_sent=outcome.bytes_sent)
            deadline = time.monotonic() + NEWS_S
            while not is_over() and time.monotonic() < deadline:
                time.sleep(IDLE_S)
