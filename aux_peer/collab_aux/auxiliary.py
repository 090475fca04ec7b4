"""The auxiliary's loop: no work of its own, the other three moves as everyone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from collab_aux.archivist import Archivist, Evaluate, Facts
from collab_aux.checkpointer import Checkpointer
from collab_aux.sampler import Sampler, Write
from collab_aux.telling import tell_swarm
from collab_core.averaging.round import RoundRequest
from collab_core.checkpoints.statement import may_checkpoint
from collab_core.overview import Overview, survey
from collab_core.peer import Peer
from collab_core.state.snapshot import Snapshot

IDLE_S = 0.2
NEWS_S = 2.0  # after a round somebody publishes what came of it, or everyone tries again


class Auxiliary(Peer):
    """A peer without a GPU that reduces for others, keeps and serves the state, and watches the run."""

    def __init__(
        self,
        *,
        files: Mapping[str, bytes],
        evaluate: Evaluate | None = None,
        write: Write | None = None,
        **peer: Any,
    ) -> None:
        """
        Args:
            files: what belongs to the model beside its weights.
            evaluate: the loss of a state on held-out data.
            write: what a state has to say, if people look on.
            **peer: as of every peer.
        """
        super().__init__(**peer)
        self._archivist: Archivist | None = None
        self._sampler: Sampler | None = None
        wanted = self.settings.checkpoints
        if not self.config.is_active:
            return
        self.holding.on_snapshot = self._keep
        if write is not None:
            self._sampler = Sampler(write, self.events)
        if not (wanted.every or wanted.remote):
            return
        session = peer["session"]
        checkpointer = Checkpointer(session, files, self._is_our_turn) if wanted.remote else None
        self._archivist = Archivist(session, self._trainers_loss, files, evaluate, checkpointer)

    def _keep(self, snapshot: Snapshot, facts: Facts) -> None:
        if self._archivist is not None:
            self._archivist.offer(snapshot, facts, self.replica.history, self.holding.history_samples)
        if self._sampler is not None:
            self._sampler.offer(snapshot)

    def _is_our_turn(self) -> bool:
        """Of several who may upload checkpoints, the first one does."""
        swarm = self.swarm
        if not may_checkpoint(swarm.peer_id, swarm.grant, self.manifest):
            return False
        others = (peer for peer in self.outlook.others() if peer.record.role == "aux" and peer.record.root is not None)
        rivals = (peer for peer in others if may_checkpoint(peer.peer_id, peer.record.grant, self.manifest))
        return all(swarm.peer_id < rival.peer_id for rival in rivals)

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
        if self._sampler is not None:
            self._sampler.close()
        if self._archivist is not None:
            self._archivist.close()

    def _survey(self) -> Overview:
        return survey(self.outlook.others(), self.manifest)

    def _trainers_loss(self) -> float | None:
        return self._survey().loss

    def run_epoch(self) -> None:
        """Average (sending nothing), update, verify: each epoch's state without downloading it."""
        average = self.average(None, 0.0)
        if average is None:
            self.catch_up(f"the swarm went on without us ({self.holding.standing().value})")
            return
        self.update(average)
        self.verify()
        tell_swarm(self.events, self._survey(), epoch=self.replica.epoch, samples=self.holding.history_samples)

    def assist(self) -> None:
        """Reduce in one round of whatever epoch the others are at, keeping nothing."""
        tip = self.holding.winning_tip(self.holding.mine())
        if tip.epoch < 0:
            time.sleep(IDLE_S)
            self.swarm.check_alive()
            return
        self.averager.set_epoch(tip.epoch)

        def is_over() -> bool:
            return self.stop.is_set() or self.holding.winning_tip(self.holding.mine()).root != tip.root

        outcome = self.averager.round(
            RoundRequest(
                epoch=tip.epoch,
                parent_root=tip.root,
                wants_average=False,
                companions=lambda: self.outlook.companions(tip.epoch, tip.root),
                is_missing=self.swarm.is_missing,
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
            seen = self._survey()
            tell_swarm(self.events, seen, epoch=seen.epoch, samples=seen.samples)
        elif outcome.failure:
            self.stop.wait(IDLE_S)
