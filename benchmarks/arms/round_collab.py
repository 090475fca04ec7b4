"""Our trainer, all of it, with emulated work."""

from __future__ import annotations

import threading

import torch

from benchmarks.arms.emulated import Emulated, EpochClock
from benchmarks.round_trip import BATCH_SIZE, NUM_BATCHES, NUM_EPOCHS
from benchmarks.team import LOOPBACK, Team
from collab_core.run import Invite, Prepared, RunFolder
from collab_core.session import open_session
from collab_core.swarm import SwarmConfig
from collab_trainer import Trainer, TrainerConfig, new_replica


class Timed(Trainer):
    """Tells a clock when an epoch begins."""

    clock: EpochClock

    def run_epoch(self) -> None:
        self.clock.begin(self.replica.epoch)
        super().run_epoch()


def main() -> None:
    team, _ = Team.from_argv()
    torch.set_num_threads(1)
    task = Emulated()
    source: Invite | RunFolder
    if team.rank == 0:
        batch = team.size * NUM_BATCHES * BATCH_SIZE
        text = f'name = "round"\n[strategy]\ntarget_batch_size = {batch}\ncodec = "fp16"\n'
        source = RunFolder.create(team.folder / "run", text)
    else:
        source = Invite.decode(team.hear("invite", 0))
    with open_session(
        source,
        SwarmConfig(role="trainer", host_maddrs=(LOOPBACK,)),
        state_dir=team.folder / f"state-{team.rank}",
        prepare=lambda settings, _: Prepared(new_replica(settings, task.build_model()).freeze().root),
    ) as session:
        if team.rank == 0:
            team.tell("invite", session.invite().encode())
        model = task.build_model()
        peer = Timed(
            task=task,
            model=model,
            device=torch.device("cpu"),
            session=session,
            replica=new_replica(session.manifest.settings, model),
            config=TrainerConfig(backup_every=0, max_epochs=NUM_EPOCHS, batch_size=BATCH_SIZE),
            stop=threading.Event(),
        )
        peer.clock = EpochClock()
        peer.enter()
        while len(session.swarm.peers()) < team.size - 1:
            session.swarm.refresh()
        team.meet("ready")
        peer.run()
        peer.clock.begin(NUM_EPOCHS)
        peer.clock.report(team)


main()
