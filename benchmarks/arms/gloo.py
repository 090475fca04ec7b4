"""torch.distributed over gloo: plain TCP, float32, no encryption, nobody may fail."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.arms.tensors import make_flat, measure_rounds, tensors_of
from benchmarks.team import Team


def main() -> None:
    team, _ = Team.from_argv()
    torch.set_num_threads(1)
    store = f"file://{team.folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=team.rank, world_size=team.size)
    flat = make_flat(team.rank)

    def run_round(number: int) -> None:
        dist.all_reduce(flat)
        flat.div_(team.size)

    measure_rounds(team, run_round, lambda: tensors_of(flat))
    dist.destroy_process_group()


main()
