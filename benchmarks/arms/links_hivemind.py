"""`hivemind.Optimizer` that averages the gradients of every step in fp16, with a group of everybody."""

from __future__ import annotations

import hivemind
import torch
from hivemind.compression import Float16Compression

from benchmarks.arms.device import Device, batches, make_task
from benchmarks.arms.stock import open_dht
from benchmarks.links import BATCH_SIZE
from benchmarks.team import Team


def main() -> None:
    team, (arm, *ips) = Team.from_argv()
    device = Device(team, arm)
    task = make_task()
    model = task.build_model()
    with open_dht(team, f"/ip4/{ips[team.rank]}/tcp/0") as dht:
        optimizer = hivemind.Optimizer(
            dht=dht,
            run_id="links",
            target_batch_size=team.size * BATCH_SIZE,
            batch_size_per_step=BATCH_SIZE,
            optimizer=lambda params: torch.optim.AdamW(params, lr=0.003),
            params=model.parameters(),
            matchmaking_time=1.5,
            averaging_timeout=60.0,
            grad_compression=Float16Compression(),
            state_averaging_compression=Float16Compression(),
            averager_opts={"target_group_size": team.size, "request_timeout": 1.0},
            tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.3},
            load_state_timeout=5.0,
        )
        team.meet("ready")
        for batch in batches(task, team.rank):
            device.begin_step()
            task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
            device.end_step()
            optimizer.step()
            optimizer.zero_grad()
            if device.is_done:
                break
        device.report()
        optimizer.shutdown()


main()
