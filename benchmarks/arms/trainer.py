"""A trainer of ours in a benchmark's process: all of it, in a run that the first process makes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TypeVar

import torch

from benchmarks.team import Team
from collab_core.run import Invite, Prepared, RunFolder
from collab_core.session import open_session
from collab_core.swarm import SwarmConfig
from collab_trainer import Task, Trainer, TrainerConfig, new_replica

Kind = TypeVar("Kind", bound=Trainer)


@contextlib.contextmanager
def open_trainer(
    kind: type[Kind], team: Team, task: Task, run: str, config: TrainerConfig, address: str
) -> Iterator[Kind]:
    """Not entered yet: see `enter_together`.

    Args:
        kind: of trainer.
        team: of processes.
        task: what the run trains.
        run: text of its run file.
        config: of this trainer.
        address: where it listens.
    """
    torch.set_num_threads(1)
    is_first = team.rank == 0
    with open_session(
        RunFolder.create(team.folder / "run", run) if is_first else Invite.decode(team.hear("invite", 0)),
        SwarmConfig(role="trainer", host_maddrs=(address,)),
        state_dir=team.folder / f"state-{team.rank}",
        prepare=lambda settings, _: Prepared(new_replica(settings, task.build_model()).freeze().root),
    ) as session:
        if is_first:
            team.tell("invite", session.invite().encode())
        model = task.build_model()
        yield kind(
            task=task,
            model=model,
            device=torch.device("cpu"),
            session=session,
            replica=new_replica(session.manifest.settings, model),
            config=config,
            stop=threading.Event(),
        )


def enter_together(peer: Trainer, team: Team) -> None:
    """Take part, and go on when everybody knows everybody."""
    peer.enter()
    while len(peer.swarm.peers()) < team.size - 1:
        peer.swarm.refresh()
    team.meet("ready")
