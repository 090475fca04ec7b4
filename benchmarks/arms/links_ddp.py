"""Synchronous data parallelism over gloo in float32: what torch's DDP does, with all gradients in one bucket."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from benchmarks.arms.device import Device, batches, make_task
from benchmarks.team import Team

PORT = 29500


def main() -> None:
    team, (arm, *ips) = Team.from_argv()
    device = Device(team, arm)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=f"tcp://{ips[0]}:{PORT}", rank=team.rank, world_size=team.size)
    task = make_task()
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    ending = torch.zeros(1)
    for batch in batches(task, team.rank):
        device.begin_step()
        optimizer.zero_grad(set_to_none=True)
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        device.end_step()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        # the last value says whether everyone is done, so that all stop after the same step
        ending.fill_(float(device.is_done))
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), ending])
        dist.all_reduce(flat)
        flat /= team.size
        if float(flat[-1]) == 1.0:
            break
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
        optimizer.step()
    device.report()
    dist.destroy_process_group()


main()
