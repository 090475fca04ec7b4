"""A trainer that lies, started like the real command: `HOSTILE=LIE hostile_peer.py train INVITE`.

nan      sends values that are not finite
size     sends too much
weight   claims 1e30 samples
norm     declares a hundredth of its norm, until it is caught: then it behaves, and is let in again
flip     sends the opposite of its gradient, ten times as large
random   sends noise, ten times as large
hidden   sends the opposite, ten times as large, and declares the norm of an honest one; again and again
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from collab_cli.app import main
from collab_core.averaging.quarantine import Quarantine
from collab_core.averaging.reduction import Reduction
from collab_core.averaging.toolbox import Toolbox
from collab_core.averaging.wire import Frame
from collab_core.swarm.record import Sentence
from collab_trainer.trainer import Trainer

LIE = os.environ["HOSTILE"]
LOUDNESS = 10.0


def send_lies(self: Reduction, parts: list[Any]) -> Iterator[Frame]:
    for honest in honest_outgoing(self, parts):
        values = torch.full((len(honest.payload) // 2,), float("nan"), dtype=torch.float16)
        payload = bytearray(values.numpy().tobytes()) if LIE == "nan" else honest.payload + b"\0\0"
        yield replace(honest, payload=payload)


def average_with_huge_weight(self: Trainer, contribution: Any, weight: float, **more: Any) -> Any:
    return honest_average(self, contribution, 1e30 if weight else 0.0, **more)


def average_what_harms(self: Trainer, contribution: Any, weight: float, **more: Any) -> Any:
    if contribution is not None:
        noise = torch.randn_like(contribution)
        harmful = noise * (contribution.norm() / noise.norm()) if LIE == "random" else -contribution
        contribution = LOUDNESS * harmful
    return honest_average(self, contribution, weight, **more)


def declare_what_is_usual(self: Toolbox, *contribution: Any) -> float:
    return honest_norm(self, *contribution) / LOUDNESS


def declare_little_until_caught(self: Toolbox, *contribution: Any) -> float:
    return honest_norm(self, *contribution) / (1 if was_caught else 100)


def note_that_we_are_caught(self: Quarantine, sentence: Sentence, by: str) -> None:
    was_caught.append(sentence)
    honest_told_us(self, sentence, by)


was_caught: list[Sentence] = []
honest_told_us = Quarantine.told_us
honest_norm = Toolbox.norm
honest_outgoing = Reduction._outgoing
honest_average = Trainer.average
if LIE == "norm":
    Toolbox.norm = declare_little_until_caught  # type: ignore[method-assign]
    Quarantine.told_us = note_that_we_are_caught  # type: ignore[method-assign]
elif LIE in ("nan", "size"):
    Reduction._outgoing = send_lies  # type: ignore[method-assign]
elif LIE == "weight":
    Trainer.average = average_with_huge_weight  # type: ignore[method-assign]
else:
    Trainer.average = average_what_harms  # type: ignore[method-assign]
if LIE == "hidden":
    Toolbox.norm = declare_what_is_usual  # type: ignore[method-assign]
main()
