"""An auxiliary that keeps every epoch, or none, beside a trainer with padded steps: who waits for whom.

python -m benchmarks.arms.saving FOLDER RANK SIZE EVERY: rank 0 is the auxiliary, the others are trainers.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.arms.emulated import Emulated
from benchmarks.round_trip import BATCH_SIZE, NUM_BATCHES
from benchmarks.team import LOOPBACK, Team
from collab_aux import Auxiliary
from collab_core.peer import Peer, PeerConfig
from collab_core.run import Invite, Prepared, RunFolder
from collab_core.session import Session, open_session
from collab_core.swarm import SwarmConfig
from collab_trainer import Trainer, TrainerConfig, new_replica
from collab_trainer.task import Batch

WIDTH = 2300  # two square layers: 10.6 M parameters
NUM_EPOCHS, NUM_WARM_UP = 10, 2


class Padded(Emulated):
    """Steps that are mostly sleep, as if a GPU worked; it notes how long each takes."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self._last = time.monotonic()

    def build_model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))

    def samples(self, block: Any) -> Batch:
        generator = torch.Generator().manual_seed(block.number)
        return {"x": torch.randn(NUM_BATCHES * BATCH_SIZE, WIDTH, generator=generator)}

    def begin(self) -> None:
        """An epoch begins: what was between two steps is not part of one."""
        self._last = 0.0

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        now = time.monotonic()
        if self._last:
            self.step_s.append(now - self._last)
        self._last = now
        return super().loss(model, batch)


class TimedTrainer(Trainer):
    """Notes when epochs begin."""

    padded: Padded
    begun: dict[int, float]

    def run_epoch(self) -> None:
        self.begun.setdefault(self.replica.epoch, time.monotonic())
        if self.replica.epoch == NUM_WARM_UP:
            self.padded.step_s.clear()
        self.padded.begin()
        super().run_epoch()


class TimedAuxiliary(Auxiliary):
    """Notes how long it is not ready for a round after the one before."""

    busy_s: list[float]

    def update(self, average: torch.Tensor) -> None:
        self._round_over = time.monotonic()
        super().update(average)

    def verify(self) -> None:
        super().verify()
        self.holding.root()  # what the next round begins with
        self.busy_s.append(time.monotonic() - self._round_over)


def main() -> None:
    team, (every,) = Team.from_argv()
    torch.set_num_threads(1)
    task = Padded()
    is_aux = team.rank == 0
    batch = (team.size - 1) * NUM_BATCHES * BATCH_SIZE
    text = (
        f'name = "saving"\n[strategy]\ntarget_batch_size = {batch}\ncodec = "fp16"\n'
        f"[checkpoints]\nevery = {every}\nkeep = 1000\n"
    )
    source = RunFolder.create(team.folder / "run", text) if is_aux else Invite.decode(team.hear("invite", 0))
    with open_session(
        source,
        SwarmConfig(role="aux" if is_aux else "trainer", host_maddrs=(LOOPBACK,)),
        state_dir=team.folder / f"state-{team.rank}",
        prepare=lambda settings, _: Prepared(new_replica(settings, task.build_model()).freeze().root),
    ) as session:
        if is_aux:
            team.tell("invite", session.invite().encode())
        report = (_help if is_aux else _train)(team, session, task)
        team.meet("done")
        print(json.dumps(report))


def _ready(team: Team, session: Session, peer: Peer) -> None:
    peer.enter()
    while len(session.swarm.peers()) < team.size - 1:
        session.swarm.refresh()
    team.meet("ready")


def _train(team: Team, session: Session, task: Padded) -> dict[str, float]:
    model = task.build_model()
    peer = TimedTrainer(
        task=task,
        model=model,
        device=torch.device("cpu"),
        session=session,
        replica=new_replica(session.manifest.settings, model),
        config=TrainerConfig(backup_every=0, max_epochs=NUM_EPOCHS, batch_size=BATCH_SIZE),
        stop=threading.Event(),
    )
    peer.padded, peer.begun = task, {}
    _ready(team, session, peer)
    peer.run()
    team.tell("left")
    took_s = [peer.begun[epoch + 1] - peer.begun[epoch] for epoch in range(NUM_WARM_UP, NUM_EPOCHS - 1)]
    return {"epoch_s": statistics.mean(took_s), "step_s": statistics.mean(task.step_s)}


def _help(team: Team, session: Session, task: Padded) -> dict[str, float]:
    stop = threading.Event()
    model = task.build_model()
    replica = new_replica(session.manifest.settings, model)
    peer = TimedAuxiliary(files={}, session=session, replica=replica, config=PeerConfig(backup_every=0), stop=stop)
    peer.busy_s = []
    _ready(team, session, peer)

    def stop_with_the_trainers() -> None:
        for rank in range(1, team.size):
            team.hear("left", rank)
        stop.set()

    threading.Thread(target=stop_with_the_trainers, daemon=True).start()
    peer.run()
    return {"busy_s": statistics.mean(peer.busy_s[NUM_WARM_UP:]), "num_kept": _num_kept(session.folder.archive)}


def _num_kept(folder: Path) -> int:
    return len(list(folder.glob("versions/*.json")))


main()
