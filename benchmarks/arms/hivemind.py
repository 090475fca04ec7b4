"""Stock hivemind as a user would set it up for these tensors: fp16, a group of everybody."""

from __future__ import annotations

import logging
import time

import hivemind
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression

from benchmarks.arms.tensors import Tensors, make_tensors, measure_rounds
from benchmarks.team import Team

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PAUSE_S = 0.001


def main() -> None:
    team, _ = Team.from_argv()
    torch.set_num_threads(1)
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    initial_peers = team.hear("address", 0).split() if team.rank else []
    dht = hivemind.DHT(initial_peers=initial_peers, start=True, host_maddrs=[LOOPBACK])
    averager = hivemind.DecentralizedAverager(
        make_tensors(team.rank),
        dht,
        start=True,
        prefix="bench",
        target_group_size=team.size,
        min_group_size=team.size,
        min_matchmaking_time=5.0,
        request_timeout=3.0,
        compression=Float16Compression(),
    )
    team.tell("address", str(dht.get_visible_maddrs()[0]))

    def run_round(number: int) -> float:
        attempt = 0
        while True:  # a group that did not come together is hivemind's matchmaking, which this suite does not measure
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
    dht.shutdown()


main()
