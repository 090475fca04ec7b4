"""A trainer that lies (HOSTILE=nan, weight or size), started like the real command: `hostile_peer.py train INVITE`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import torch
from hivemind.proto import averaging_pb2, runtime_pb2

from collab_cli.app import main
from collab_core.averaging.reduction import Reduction
from collab_trainer.trainer import Trainer

LIE = os.environ["HOSTILE"]


async def send_lies(self: Reduction, parts: list[Any]) -> AsyncIterator[Any]:
    async for honest in honest_outgoing(self, parts):
        if not honest.tensor_part.buffer:
            yield honest
            continue
        values = torch.full((len(honest.tensor_part.buffer) // 2,), float("nan"), dtype=torch.float16)
        buffer = values.numpy().tobytes() if LIE == "nan" else honest.tensor_part.buffer + b"\0\0"
        yield averaging_pb2.AveragingData(tensor_part=runtime_pb2.Tensor(buffer=buffer), weight=honest.weight)


def average_with_huge_weight(self: Trainer, contribution: Any, weight: float) -> Any:
    return honest_average(self, contribution, 1e30 if weight else 0.0)


honest_outgoing = Reduction._outgoing
honest_average = Trainer.average
if LIE in ("nan", "size"):
    Reduction._outgoing = send_lies  # type: ignore[method-assign]
else:
    Trainer.average = average_with_huge_weight  # type: ignore[method-assign]
main()
