"""Ours: a whole round with its matchmaking, in fp16. The average is the tensors of the next round."""

from __future__ import annotations

import threading

import torch

from benchmarks.arms.peer import open_swarm
from benchmarks.arms.tensors import make_flat, measure_rounds, tensors_of
from benchmarks.averaging import NUM_VALUES
from benchmarks.team import Team
from collab_core.averaging.averager import ExactAverager
from collab_core.averaging.round import RoundRequest
from collab_core.run import RunSettings


def main() -> None:
    team, _ = Team.from_argv()
    torch.set_num_threads(1)
    flat = make_flat(team.rank)
    stop = threading.Event()
    with open_swarm(team) as swarm:
        averager = ExactAverager(swarm, RunSettings(name="bench"), layout_hash=bytes(32), lengths=[NUM_VALUES])
        team.meet("ready")

        def run_round(number: int) -> None:
            nonlocal flat
            request = RoundRequest(
                epoch=number,
                parent_root="00" * 32,
                contribution=flat,
                weight=1.0,
                companions=swarm.peers,
                should_stop=stop.is_set,
            )
            outcome = averager.round(request, stop)
            assert outcome.average is not None, outcome.failure
            assert len(outcome.members) == team.size
            averager.give_back(flat)
            flat = outcome.average
            averager.set_epoch(number + 1)

        measure_rounds(team, run_round, lambda: tensors_of(flat))


main()
