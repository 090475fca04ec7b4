"""For authors of tasks: one call in a test that finds what would go wrong in a swarm.

def test_the_task_can_be_trained_together():
    check_task(Pictures(seed=0, options=Pictures.Options()))
"""

from __future__ import annotations

import json
import math
from itertools import combinations
from typing import Any

import torch

from collab_core.state.layout import Layout
from collab_trainer.custom import missing_members
from collab_trainer.guarded import checked_batch
from collab_trainer.task import Batch, Task

NUM_BLOCKS = 4  # looked at, per stream


def check_task(task: Task) -> None:
    """Check what every peer relies on.

    Raises:
        AssertionError: says what is wrong.
        TaskError: the model has parameters that cannot be averaged.
    """
    assert not (missing := missing_members(task)), f"the task lacks {', '.join(missing)}"
    with torch.random.fork_rng(devices=[]):
        model = _check_model(task)
        batch = _check_data(task)
        _check_loss(task, model, batch)
        _check_looks(task, model)


def _check_model(task: Task) -> torch.nn.Module:
    built = []
    for seed in (1, 2):  # of torch's own generator, which is different on every machine
        torch.manual_seed(seed)
        model = task.build_model()
        built.append(Layout.of(model).read(model))
    assert torch.equal(*built), "build_model() gave another model the second time: see collab_trainer.fill_parameters"
    assert len(built[0]), "build_model() gave a model without parameters"
    return model


def _check_data(task: Task) -> Batch:
    blocks = task.blocks(seed=1, position=None)
    batches, positions = [], []
    for _ in range(NUM_BLOCKS):
        batches.append(_samples(task, next(blocks)))
        positions.append(json.dumps(blocks.position))  # as on disk
    again = task.blocks(seed=1, position=json.loads(positions[-2]))
    assert _are_equal(_samples(task, next(again)), batches[-1]), (
        f"from the position {positions[-2]} the blocks do not go on where they were; or samples() gives other samples "
        "for the same block: draw what is random from the block"
    )
    other = task.blocks(seed=2, position=None)
    batches.append(_samples(task, next(other)))
    full = [batch for batch in batches if len(next(iter(batch.values())))]
    assert full, f"{NUM_BLOCKS} blocks had no sample in them"
    for one, two in combinations(full, 2):
        assert {n: (r.dtype, r.shape[1:]) for n, r in one.items()} == {
            n: (r.dtype, r.shape[1:]) for n, r in two.items()
        }, "samples() gave rows of different names, types or shapes for different blocks"
        assert not _are_equal(one, two), "two blocks, of one peer or of two, gave the same samples"
    return full[0]


def _samples(task: Task, block: Any) -> Batch:
    try:
        return checked_batch(task.samples(block))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"samples() is wrong: {error}") from error


def _are_equal(one: Batch, two: Batch) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def _check_loss(task: Task, model: torch.nn.Module, batch: Batch) -> None:
    model.eval()
    with torch.no_grad():
        once = float(task.loss(model, batch))
        twice = float(task.loss(model, {name: torch.cat([rows, rows]) for name, rows in batch.items()}))
    assert math.isfinite(once), f"loss() is {once} for a new model"
    assert math.isclose(once, twice, rel_tol=0.01), (
        f"loss() is {once:.4g} for some samples and {twice:.4g} for each of them twice; it must be the mean"
    )
    model.train()
    counters = {name: value.clone() for name, value in model.state_dict().items() if not value.is_floating_point()}
    loss = task.loss(model, batch)
    assert loss.dim() == 0, f"loss() has the shape {tuple(loss.shape)}; it must be one number"
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert any(bool(gradient.any()) for gradient in gradients), "loss() has no gradient: nothing would be learnt"
    assert all(bool(gradient.isfinite().all()) for gradient in gradients), "the gradient of loss() is not finite"
    for name, before in counters.items():
        assert torch.equal(model.state_dict()[name], before), (
            f"the buffer {name} changes and is not floating point (if it is BatchNorm's, take GroupNorm)"
        )


def _check_looks(task: Task, model: torch.nn.Module) -> None:
    before = Layout.of(model).read(model)
    looks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        looks.append((float(task.evaluate(model)), task.sample(model)))
    assert torch.equal(before, Layout.of(model).read(model)), "evaluate() or sample() changed the model"
    assert math.isfinite(looks[0][0]), f"evaluate() is {looks[0][0]}"
    assert looks[0][0] == looks[1][0], "evaluate() gave another loss the second time: its data must be fixed"
    assert isinstance(looks[0][1], str), f"sample() gave {type(looks[0][1]).__name__}, not str"
    assert looks[0][1] == looks[1][1], "sample() gave something else the second time"
    assert model.training, "evaluate() and sample() must put the model back into the mode it was in"
    assert task.floor is None or float(task.floor) <= looks[0][0], "floor is above the loss of a new model"
