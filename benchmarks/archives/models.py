"""Real trainings whose every epoch is kept on disk, so that all arms save the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from collab_trainer.tiny_gpt import TinyGPT, TinyGPTOptions

NUM_EPOCHS = 50
BATCH_SIZE = 16
Weights = dict[str, torch.Tensor]


def epochs_of(case: str, folder: Path) -> list[Path]:
    """The checkpoints of a case, oldest first; trained now if they are not there."""
    made = folder / case
    paths = [made / f"epoch-{number:02}.safetensors" for number in range(NUM_EPOCHS)]
    if not paths[-1].exists():
        made.mkdir(parents=True, exist_ok=True)
        source = _as_bf16(epochs_of("fp32", folder)) if case == "bf16" else TRAININGS[case]()
        for path, weights in zip(paths, source, strict=False):
            save_file(weights, path)
    return paths


def _as_bf16(paths: list[Path]) -> Iterator[Weights]:
    for path in paths:
        yield {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}


def train_gpt(*, layers: int = 6, heads: int = 6, width: int = 384, num_epochs: int = NUM_EPOCHS) -> Iterator[Weights]:
    """A GPT-2, by default of 10.7 M parameters, on the built-in corpus: AdamW with warm-up, every layer trained."""
    task = TinyGPT(seed=0, options=TinyGPTOptions(layers=layers, heads=heads, width=width))
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    blocks = task.blocks(seed=1, position=None)
    tokens = torch.cat([task.samples(next(blocks))["tokens"] for _ in range(2)])
    for epoch in range(num_epochs):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (epoch + 1) / 5)
        batch = tokens[epoch * BATCH_SIZE : (epoch + 1) * BATCH_SIZE]
        optimizer.zero_grad()
        task.loss(model, {"tokens": batch}).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _train_head() -> Iterator[Weights]:
    """As many parameters as a ResNet-18, of which only the classifier is trained."""
    torch.manual_seed(0)
    widths = (64, 64, 64, 64, 64, 128, 128, 128, 128, 256, 256, 256, 256, 512, 512, 512, 512)
    layers: list[torch.nn.Module] = []
    before = 3
    for width in widths:
        stride = 2 if width != before else 1
        layers += [torch.nn.Conv2d(before, width, 3, stride, 1, bias=False), torch.nn.GroupNorm(8, width)]
        layers += [torch.nn.ReLU()]
        before = width
    body = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    head = torch.nn.Linear(512, 1000)
    pictures, labels = torch.randn(64, 3, 32, 32), torch.randint(0, 1000, (64,))
    with torch.no_grad():
        features = body(pictures)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    for _ in range(NUM_EPOCHS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(features), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        named = [*((f"body.{n}", p) for n, p in body.named_parameters())]
        named += [(f"head.{n}", p) for n, p in head.named_parameters()]
        yield {name: parameter.detach().clone() for name, parameter in named}


TRAININGS = {"fp32": train_gpt, "head": _train_head}


def relative_update(paths: list[Path]) -> float:
    """How much of itself a model changes per epoch, on average."""
    changes = []
    before = load_file(paths[0])
    for path in paths[1:]:
        after = load_file(path)
        change = sum(float((after[n].double() - before[n].double()).square().sum()) for n in after)
        norm = sum(float(tensor.double().square().sum()) for tensor in after.values())
        changes.append((change / norm) ** 0.5)
        before = after
    return float(sum(changes) / len(changes))
