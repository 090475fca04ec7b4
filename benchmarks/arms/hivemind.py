"""Stock hivemind as a user would set it up for these tensors: fp16, a group of everybody."""

from __future__ import annotations

import time

import hivemind
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression

from benchmarks.arms.stock import open_dht
from benchmarks.arms.tensors import Tensors, make_flat, measure_rounds, tensors_of
from benchmarks.team import Team

PAUSE_S = 0.001


def main() -> None:
    team, _ = Team.from_argv()
    with open_dht(team) as dht:
        averager = hivemind.DecentralizedAverager(
            [tensor.clone() for tensor in tensors_of(make_flat(team.rank))],
            dht,
            start=True,
            prefix="bench",
            target_group_size=team.size,
            min_group_size=team.size,
            min_matchmaking_time=5.0,
            request_timeout=3.0,
            compression=Float16Compression(),
        )

        def run_round(number: int) -> float:
            attempt = 0
            while True:  # a group that did not come together is hivemind's matchmaking: not measured here
                step = averager.step(weight=1.0, timeout=60, require_trigger=True, wait=False)
                while step.stage != AveragingStage.AWAITING_TRIGGER and not step.done():
                    time.sleep(PAUSE_S)
                attempt += 1
                team.tell(f"matched-{number}-{attempt}", str(not step.done()))
                if all(team.hear(f"matched-{number}-{attempt}", rank) == "True" for rank in range(team.size)):
                    break
                step.cancel()
            start = time.perf_counter()
            step.allow_allreduce()
            result = step.result()
            assert len(result or ()) == team.size, result
            return time.perf_counter() - start

        def tensors() -> Tensors:
            with averager.get_tensors() as averaged:
                return [tensor.clone() for tensor in averaged]

        measure_rounds(team, run_round, tensors)
        averager.shutdown()


main()
