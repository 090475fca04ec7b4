"""The built-in task: the same first bytes on every machine, and it learns."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from transformers import AutoModelForCausalLM

from collab_core.errors import Code, TaskError
from collab_core.run.settings import TaskSettings
from collab_trainer import Task, load_task

SMALL = {"layers": 1, "heads": 2, "width": 32, "sequence_length": 64}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_task(seed: int = 0, **options: Any) -> Task:
    return load_task(TaskSettings(seed=seed, options=options))


def digest(model: torch.nn.Module) -> str:
    """A hash of every name and byte of the model's state."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        hasher.update(name.encode() + tensor.detach().numpy().tobytes())
    return hasher.hexdigest()


def test_the_initial_model_never_changes() -> None:
    """Pinned: a run's manifest pins the root of this state, so a new version of Collab must build the same bytes."""
    assert digest(make_task().build_model()) == "a27a665f679b263bca95f8fed62c96cc"


def test_the_initial_model_does_not_depend_on_threads_or_global_seeds() -> None:
    digests = set()
    for num_threads, global_seed in ((1, 0), (2, 1), (4, 12345)):
        torch.set_num_threads(num_threads)
        torch.manual_seed(global_seed)
        digests.add(digest(make_task(**SMALL).build_model()))
    assert len(digests) == 1


def test_building_a_model_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    make_task(**SMALL).build_model()
    assert torch.equal(before, torch.get_rng_state())


def test_another_seed_gives_another_model() -> None:
    assert digest(make_task(seed=1, **SMALL).build_model()) != digest(make_task(seed=2, **SMALL).build_model())


def test_the_initial_values_have_the_intended_spread() -> None:
    parameters = make_task().build_model().state_dict()
    assert float(parameters["transformer.wte.weight"].std()) == pytest.approx(1 / 8, rel=0.02)
    assert float(parameters["transformer.wpe.weight"].std()) == pytest.approx(0.02, rel=0.02)
    assert float(parameters["transformer.h.1.mlp.c_fc.weight"].std()) == pytest.approx(1 / 8, rel=0.02)
    assert float(parameters["transformer.h.1.mlp.c_proj.weight"].std()) == pytest.approx(1 / 16, rel=0.02)
    assert float(parameters["transformer.h.0.ln_1.weight"].min()) == 1
    assert all(not parameter.any() for name, parameter in parameters.items() if name.endswith(".bias"))


def test_embeddings_stay_tied_and_the_model_has_no_buffers() -> None:
    model = make_task(**SMALL).build_model()
    assert model.get_submodule("lm_head").weight is model.get_submodule("transformer.wte").weight
    assert not list(model.buffers())


def test_transformers_reads_the_model_and_computes_the_same(tmp_path: Path) -> None:
    task = make_task(layers=2, heads=4, width=32, sequence_length=64)
    model = task.build_model()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):  # biases too should make a difference
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    save_model(model, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(256, (3, 50), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_samples_have_one_byte_more_than_the_sequence_and_differ_per_seed_and_block() -> None:
    task = make_task(**SMALL)
    first, again, other = (task.samples(next(task.blocks(seed=seed, position=None)))["tokens"] for seed in (1, 1, 2))
    second = task.samples(next(task.blocks(seed=1, position={"next": 1})))["tokens"]
    assert first.shape[1] == 65
    assert first.dtype == torch.int64
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, second)


def test_evaluation_is_repeatable_and_leaves_no_trace() -> None:
    task = make_task(**SMALL)
    model = task.build_model().train()
    before = digest(model)
    assert task.evaluate(model) == task.evaluate(model)
    assert model.training
    assert digest(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_loss_starts_near_chance_and_falls_clearly() -> None:
    task = make_task()
    model = task.build_model()
    assert task.evaluate(model) == pytest.approx(math.log(256), abs=0.4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    blocks = task.blocks(seed=1, position=None)
    batches = (batch for block in iter(lambda: next(blocks), None) for batch in task.samples(block)["tokens"].split(32))
    for _ in range(60):
        optimizer.zero_grad()
        task.loss(model, {"tokens": next(batches)}).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert task.floor is not None
    assert task.floor < task.evaluate(model) < 2.2


def test_a_sample_is_printable_and_the_same_every_time() -> None:
    task = make_task(**SMALL)
    model = task.build_model()
    torch.manual_seed(1)
    first = task.sample(model)
    torch.manual_seed(2)
    assert task.sample(model) == first
    assert first.startswith("the ")
    assert all(character.isprintable() or character == "\n" for character in first)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": 0}, ["layers = 0", "whole number from 1 to 48"]),
        ({"width": "wide"}, ["width = 'wide'", "whole number from 8 to 4096"]),
        ({"heads": 2.0}, ["heads = 2.0", "whole number from 1 to 64"]),
        ({"heads": 3}, ["width = 64", "multiple of heads = 3"]),
        ({"layer": 2}, ["no option 'layer'", "Did you mean 'layers'?", "sequence_length"]),
    ],
)
def test_a_bad_option_is_refused_in_words(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TaskError) as caught:
        make_task(**options)
    assert caught.value.code is Code.BAD_TASK_OPTION
    assert all(word in str(caught.value) for word in words)


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TaskError, match="Did you mean 'tiny-gpt'") as caught:
        load_task(TaskSettings(name="tiny-gtp"))
    assert caught.value.code is Code.UNKNOWN_TASK
    assert "known: tiny-gpt" in caught.value.message
