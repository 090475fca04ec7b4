"""`hivemind.Optimizer` with the same work, set up for speed: a short matchmaking window and a group of everybody."""

from __future__ import annotations

import hivemind
import torch
from hivemind.compression import Float16Compression

from benchmarks.arms.emulated import Device, EpochClock
from benchmarks.arms.stock import open_dht
from benchmarks.round_trip import BATCH_SIZE, NUM_BATCHES, NUM_EPOCHS, WIDTH
from benchmarks.team import Team


def main() -> None:
    team, _ = Team.from_argv()
    with open_dht(team) as dht:
        device = Device()
        model = device.build_model()
        optimizer = hivemind.Optimizer(
            dht=dht,
            run_id="round",
            target_batch_size=team.size * NUM_BATCHES * BATCH_SIZE,
            batch_size_per_step=BATCH_SIZE,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
            params=model.parameters(),
            matchmaking_time=1.5,
            averaging_timeout=30.0,
            grad_compression=Float16Compression(),
            averager_opts={"target_group_size": team.size, "request_timeout": 1.0},
            tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.3},
            load_state_timeout=5.0,
        )
        team.meet("ready")  # hivemind finds its peers in the first epochs, which are not counted
        clock = EpochClock()
        batch = torch.randn(BATCH_SIZE, WIDTH)
        while optimizer.local_epoch < NUM_EPOCHS:
            clock.begin(optimizer.local_epoch)
            device.pretend_to_work()
            (model(batch) - batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        clock.begin(NUM_EPOCHS)
        clock.report(team)
        optimizer.shutdown()


main()
