"""Stock hivemind's download of the averager's state, as `hivemind.Optimizer` does it for a newcomer."""

from __future__ import annotations

import json
import time

import hivemind
import torch

from benchmarks.arms.stock import open_dht
from benchmarks.join import NUM_TENSORS, NUM_VALUES
from benchmarks.team import Team


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUM_VALUES, generator=generator) for _ in range(NUM_TENSORS)]


def main() -> None:
    team, addresses = Team.from_argv()
    is_joiner = team.rank == team.size - 1
    with open_dht(team, addresses[team.rank]) as dht:
        averager = hivemind.DecentralizedAverager(
            tensors(2 if is_joiner else 1),
            dht,
            start=True,
            prefix="bench",
            target_group_size=2,
            allow_state_sharing=not is_joiner,
        )
        report = {"seconds": 0.0, "bytes": 4 * NUM_TENSORS * NUM_VALUES}
        team.meet("ready")
        if is_joiner:
            time.sleep(5)  # the donor declares its state in the DHT
            start = time.perf_counter()
            loaded = averager.load_state_from_peers(wait=True, timeout=200)
            report["seconds"] = time.perf_counter() - start
            assert loaded is not None
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(loaded[1], tensors(1), strict=True))
        team.meet("done")
        averager.shutdown()
    print(json.dumps(report))


main()
