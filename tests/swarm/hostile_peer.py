"""A trainer that lies (HOSTILE=nan, weight or size), started like the real command: `hostile_peer.py train INVITE`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import torch

from collab_cli.app import main
from collab_core.averaging.reduction import Reduction
from collab_core.averaging.wire import Frame
from collab_trainer.trainer import Trainer

LIE = os.environ["HOSTILE"]


async def send_lies(self: Reduction, parts: list[Any]) -> AsyncIterator[Frame]:
    async for honest in honest_outgoing(self, parts):
        values = torch.full((len(honest.payload) // 2,), float("nan"), dtype=torch.float16)
        payload = bytearray(values.numpy().tobytes()) if LIE == "nan" else honest.payload + b"\0\0"
        yield replace(honest, payload=payload)


def average_with_huge_weight(self: Trainer, contribution: Any, weight: float) -> Any:
    return honest_average(self, contribution, 1e30 if weight else 0.0)


honest_outgoing = Reduction._outgoing
honest_average = Trainer.average
if LIE in ("nan", "size"):
    Reduction._outgoing = send_lies  # type: ignore[method-assign]
else:
    Trainer.average = average_with_huge_weight  # type: ignore[method-assign]
main()
