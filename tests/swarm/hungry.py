"""A task for which memory runs out: it takes much for every sample, of a process that may not take much more."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from collab_trainer import Batch
from collab_trainer.tiny_gpt import TinyGPT, TinyGPTOptions

SAMPLE_VALUES = 2**24  # 64 MB; never touched, so it costs addresses and no time
LEFT_BYTES = 400 * 2**20


class Hungry(TinyGPT):
    """The first time it trains, the limit of this process is set: what it has then, and a little more."""

    Options = TinyGPTOptions
    has_limit = False

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        if torch.is_grad_enabled():
            if not Hungry.has_limit:
                Hungry.has_limit = True
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                _, hard = resource.getrlimit(resource.RLIMIT_AS)
                resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + LEFT_BYTES, hard))
            torch.empty(len(batch["tokens"]), SAMPLE_VALUES)
        return super().loss(model, batch)
