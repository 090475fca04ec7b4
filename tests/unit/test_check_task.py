"""`check_task` accepts good tasks, and says what is wrong with others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from blake3 import blake3
from torch import nn

from collab_core.errors import TaskError
from collab_core.run.settings import TaskSettings
from collab_trainer import Batch, Block, NumberedBlocks, evaluating, fill_parameters, load_task
from collab_trainer.testing import check_task


class Good:
    """A line through noise."""

    floor: float | None = None

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        fill_parameters(model, seed=0)
        return model

    def blocks(self, *, seed: int, position: Mapping[str, Any] | None) -> Any:
        return NumberedBlocks(seed, position)

    def samples(self, block: Block) -> Batch:
        generator = torch.Generator().manual_seed(block.seed * 1000 + block.number)
        return {"x": torch.rand(8, 3, generator=generator)}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return (model(batch["x"]) - 1).square().mean()

    def evaluate(self, model: nn.Module) -> float:
        with evaluating(model):
            return float(self.loss(model, self.samples(Block(0, 0))))

    def sample(self, model: nn.Module) -> str:
        return f"{self.evaluate(model):.3f}"


class Unseeded(Good):
    def build_model(self) -> nn.Module:
        return nn.Linear(3, 1)


class BatchNormed(Good):
    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        fill_parameters(model, seed=0)
        return model


class Double(Good):
    def build_model(self) -> nn.Module:
        return super().build_model().double()


class Repeating(Good):
    def samples(self, block: Block) -> Batch:
        return super().samples(Block(block.seed, block.number // 2))


class SameForAll(Good):
    def samples(self, block: Block) -> Batch:
        return super().samples(Block(0, block.number))


class Forgetful(Good):
    def blocks(self, *, seed: int, position: Mapping[str, Any] | None) -> Any:
        return NumberedBlocks(seed, None)


class Ragged(Good):
    def samples(self, block: Block) -> Batch:
        return {"x": super().samples(block)["x"][:, : 3 - block.number % 2]}


class Uneven(Good):
    def samples(self, block: Block) -> Batch:
        return {**super().samples(block), "y": torch.zeros(2)}


class Empty(Good):
    def samples(self, block: Block) -> Batch:
        return {"x": torch.zeros(0, 3)}


class Summed(Good):
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return super().loss(model, batch) * len(batch["x"])


class Detached(Good):
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return super().loss(model, batch) * 0


class NotFinite(Good):
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return super().loss(model, batch) + math.inf


class Noisy(Good):
    def evaluate(self, model: nn.Module) -> float:
        with evaluating(model):
            return float(self.loss(model, {"x": torch.rand(8, 3)}))


class LeavesEvaluation(Good):
    def evaluate(self, model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            return float(self.loss(model, self.samples(Block(0, 0))))


class Changing(Good):
    def sample(self, model: nn.Module) -> str:
        with torch.no_grad():
            next(model.parameters()).add_(1)
        return ""


class HighFloor(Good):
    floor = 1e9


def test_good_tasks_pass() -> None:
    check_task(Good())
    check_task(load_task(TaskSettings(options={"width": 16, "layers": 1, "heads": 1, "sequence_length": 16})))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Unseeded(), "another model the second time"),
        (BatchNormed(), "num_batches_tracked changes and is not floating point"),
        (Repeating(), "gave the same samples"),
        (SameForAll(), "gave the same samples"),
        (Forgetful(), "do not go on where they were"),
        (Ragged(), "different names, types or shapes"),
        (Uneven(), "same number of rows"),
        (Empty(), "had no sample"),
        (Summed(), "must be the mean"),
        (Detached(), "no gradient"),
        (NotFinite(), "inf for a new model"),
        (Noisy(), "its data must be fixed"),
        (LeavesEvaluation(), "back into the mode"),
        (Changing(), "changed the model"),
        (HighFloor(), "floor is above"),
        (object(), "lacks floor, build_model, blocks, samples, loss, evaluate, sample"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_would_go_wrong_in_a_swarm_is_said(task: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_task(task)


def test_parameters_of_another_type_are_refused_as_in_a_run() -> None:
    with pytest.raises(TaskError, match="float64"):
        check_task(Double())  # type: ignore[arg-type]


def test_torchs_own_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    check_task(Good())
    assert torch.equal(torch.rand(1), expected)


def test_initial_parameters_are_scaled_by_their_inputs_and_the_same_everywhere() -> None:
    model = nn.Sequential(nn.Conv2d(4, 64, 3), nn.GroupNorm(4, 64), nn.Linear(400, 50))
    fill_parameters(model, seed=3)
    values = dict(model.named_parameters())
    assert float(values["0.weight"].detach().std()) == pytest.approx(1 / 6, rel=0.05)
    assert float(values["2.weight"].detach().std()) == pytest.approx(1 / 20, rel=0.05)
    assert bool((values["1.weight"] == 1).all())
    assert not bool(values["0.bias"].any() or values["1.bias"].any() or values["2.bias"].any())
    with torch.no_grad():
        content = b"".join(values[name].numpy().tobytes() for name in sorted(values))
    assert blake3(content).hexdigest()[:16] == "35a06950d1dd5136"  # as on any other machine

    fill_parameters(model, seed=3, std_of=lambda name, parameter: 2.0 if name == "2.weight" else 0.0)
    assert float(values["2.weight"].detach().std()) == pytest.approx(2, rel=0.05)
    assert not bool(values["0.weight"].any())
