"""What trainers bring to a round: the mean gradient, or how far their own steps led."""

from __future__ import annotations

import copy
import sys
from types import ModuleType

import pytest
import torch
from pydantic import ValidationError

from collab_core.errors import Code, TaskError
from collab_core.run.settings import OptimizerSettings, RunSettings
from collab_core.state.layout import Fragment, Layout
from collab_core.state.replica import Replica
from collab_core.update.schedule import learning_rate
from collab_trainer.work import Gradients, LocalSteps, work_of


def settings(**sections: object) -> RunSettings:
    return RunSettings.model_validate({"name": "run", **sections})


DILOCO = {"strategy": {"name": "diloco"}, "optimizer": {"lr": 0.01, "warmup_epochs": 0, "weight_decay": 0.1}}


def model_and_data() -> tuple[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, [(torch.randn(4, 5, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(6)]


def whole(layout: Layout) -> Fragment:
    (piece,) = layout.fragments(1)
    return piece


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def test_gradients_are_the_mean_over_all_samples() -> None:
    model, data = model_and_data()
    layout = Layout.of(model)
    work = Gradients(model, layout)
    work.begin(0)
    for batch in data:
        work.took(loss_of(model, batch), 4, 4)
        work.end_step()
    found = torch.empty(layout.num_values)
    work.collect(whole(layout), layout.read(model), 24, found)
    model.zero_grad()
    everything = torch.cat([batch[0] for batch in data]), torch.cat([batch[1] for batch in data])
    loss_of(model, everything).backward()  # type: ignore[no-untyped-call]
    expected = torch.empty(layout.num_values)
    for name, view in layout.views(expected).items():
        view.copy_(model.get_parameter(name).grad)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_local_steps_are_those_of_torch_and_bring_how_far_they_led(accumulated: int) -> None:
    run = settings(**DILOCO)
    model, data = model_and_data()
    twin = copy.deepcopy(model)
    layout = Layout.of(model)
    work = work_of(run, model, layout)
    assert isinstance(work, LocalSteps)
    start = layout.read(model)
    work.begin(0)
    for step in range(0, 6, accumulated):
        for batch in data[step : step + accumulated]:
            work.took(loss_of(model, batch), 4, 4 * accumulated)
        work.end_step()
    found = torch.empty(layout.num_values)
    work.collect(whole(layout), start, 24, found)

    decayed = [parameter for parameter in twin.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in twin.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for step in range(0, 6, accumulated):
        optimizer.zero_grad()
        for batch in data[step : step + accumulated]:
            (loss_of(twin, batch) / accumulated).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
    torch.testing.assert_close(found, start - layout.read(twin))
    assert float(found.abs().max()) > 0.01


@pytest.mark.parametrize("strategy", ["allreduce", "diloco"])
def test_buffers_bring_how_far_they_moved_so_that_constants_stay_what_they_are(strategy: str) -> None:
    run = settings(strategy={"name": strategy})
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, momentum=0.5))
    model.register_buffer("constant", torch.tensor([1.0, 1e-4, 1 / 3]))
    layout = Layout.of(model)
    start = layout.read(model)
    replica = Replica(layout, run.update, start)
    work = work_of(run, model, layout)
    work.begin(0)
    work.took(model(torch.randn(8, 3, generator=torch.Generator().manual_seed(0))).square().mean(), 8, 8)
    work.end_step()
    found = torch.empty(layout.num_values)
    work.collect(whole(layout), start, 8, found)
    assert not layout.views(found)["constant"].any()
    replica.update(found.clone(), "0" * 64)
    after = layout.views(replica.values)
    assert torch.equal(after["constant"], torch.tensor([1.0, 1e-4, 1 / 3]))
    torch.testing.assert_close(after["1.running_mean"], model.get_buffer("1.running_mean"))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_outer_update_is_nesterovs(momentum: float) -> None:
    model, _ = model_and_data()
    layout = Layout.of(model)
    run = settings(strategy={"name": "diloco"}, outer={"lr": 0.7, "momentum": momentum})
    replica = Replica(layout, run.update, layout.read(model))
    theirs = torch.nn.Parameter(layout.read(model))
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        difference = torch.randn(layout.num_values, generator=generator)
        theirs.grad = difference.clone()
        optimizer.step()
        replica.update(difference, "0" * 64)
    torch.testing.assert_close(replica.values, theirs.detach())


def test_with_an_outer_rate_of_one_and_no_momentum_the_run_becomes_the_mean_of_everyones_models() -> None:
    run = settings(strategy={"name": "diloco"}, outer={"lr": 1.0, "momentum": 0.0})
    model, data = model_and_data()
    layout = Layout.of(model)
    start = layout.read(model)
    replica = Replica(layout, run.update, start)
    models, brought = [], []
    for batch in data[:2]:
        local = copy.deepcopy(model)
        work = work_of(run, local, layout)
        work.begin(0)
        work.took(loss_of(local, batch), 4, 4)
        work.end_step()
        found = torch.empty(layout.num_values)
        work.collect(whole(layout), start, 4, found)
        models.append(layout.read(local))
        brought.append(found)
    replica.update(0.25 * brought[0] + 0.75 * brought[1], "0" * 64)
    torch.testing.assert_close(replica.values, 0.25 * models[0] + 0.75 * models[1])


def test_what_was_done_is_still_brought_after_the_others_went_on_and_gradients_of_the_past_are_not() -> None:
    model, data = model_and_data()
    layout = Layout.of(model)
    old = layout.read(model)
    new = old + torch.randn(layout.num_values, generator=torch.Generator().manual_seed(2))
    for strategy in ("diloco", "allreduce"):
        local = copy.deepcopy(model)
        work = work_of(settings(strategy={"name": strategy}), local, layout)
        work.begin(0)
        work.took(loss_of(local, data[0]), 4, 4)
        work.end_step()
        before, after = torch.empty(layout.num_values), torch.empty(layout.num_values)
        work.collect(whole(layout), old, 4, before)
        assert before.abs().max() > 0
        work.rebase(old, new)
        if strategy == "allreduce":
            assert torch.equal(layout.read(local), new)
            continue
        work.collect(whole(layout), new, 4, after)
        torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 9])
def test_fragments_cover_every_tensor_once_and_in_order(number: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False))
    layout = Layout.of(model)
    pieces = layout.fragments(number)
    assert len(pieces) == min(number, len(layout.params))
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == layout.num_values
    assert [name for piece in pieces for name in piece.names] == [name for name, _ in layout.params + layout.buffers]
    assert sum(piece.num_params for piece in pieces) == layout.num_params


def test_an_epoch_changes_its_own_fragment_as_the_whole_update_would_and_nothing_else() -> None:
    model, _ = model_and_data()
    layout = Layout.of(model)
    run = settings(strategy={"name": "diloco", "fragments": 3}, outer={"lr": 0.7, "momentum": 0.9})
    start = layout.read(model)
    whole_replica, replica = Replica(layout, run.update, start), Replica(layout, run.update, start, 3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        difference = torch.randn(layout.num_values, generator=generator)
        for piece in replica.fragments:
            assert replica.fragment == piece
            others = torch.ones(layout.num_values, dtype=torch.bool)
            others[piece.start : piece.stop] = False
            before = replica.values.clone()
            replica.update(difference[piece.start : piece.stop].clone(), "0" * 64)
            assert torch.equal(replica.values[others], before[others])
        whole_replica.update(difference, "0" * 64)
    assert torch.equal(replica.values, whole_replica.values)


@pytest.mark.parametrize("overlap", [0, 5])
def test_who_went_on_meanwhile_keeps_a_part_of_its_own_and_only_the_round_s_fragment_moves(overlap: int) -> None:
    run = settings(strategy={"name": "diloco", "fragments": 2, "overlap_steps": overlap}, outer={"mix": 0.25})
    model, data = model_and_data()
    layout = Layout.of(model)
    work = work_of(run, model, layout)
    work.begin(0)
    work.took(loss_of(model, data[0]), 4, 4)
    work.end_step()
    own, shared = layout.read(model), torch.full((layout.num_values,), 2.0)
    piece = layout.fragments(2)[1]
    work.accept(piece, shared)
    expected = own.clone()
    kept = 0.25 if overlap else 0.0
    expected[piece.start : piece.stop] = kept * own[piece.start : piece.stop] + (1 - kept) * 2.0
    torch.testing.assert_close(layout.read(model), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outer": {"lr": 0.5}}, "[outer] is only for strategy.name = 'diloco'"),
        ({"optimizer": {"name": "adamw8bit"}}, "'adamw8bit' is only for strategy.name = 'diloco'"),
        ({"optimizer": {"name": "sgd", "nesterov": True}}, "needs optimizer.momentum > 0"),
        ({"strategy": {"codec": "topk"}}, "'topk' is only for strategy.name = 'diloco'"),
        ({"strategy": {"name": "diloco", "codec": "topk", "keep": 512}}, "needs outer.momentum = 0"),
        ({"strategy": {"name": "diloco", "keep": 64}}, "strategy.keep is only for strategy.codec = 'topk'"),
        ({"strategy": {"keep": 64}}, "strategy.keep is only for strategy.name = 'diloco'"),
        ({"strategy": {"fragments": 2}}, "strategy.fragments is only for strategy.name = 'diloco'"),
        ({"strategy": {"overlap_steps": 2}}, "strategy.overlap_steps is only for"),
        ({"strategy": {"local_steps": 2}}, "strategy.local_steps is only for"),
    ],
)
def test_what_does_not_go_together_is_said(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        settings(**changes)
    assert words in str(caught.value)


@pytest.mark.parametrize("is_installed", [False, True])
def test_what_the_optimizer_of_8_bits_needs_is_said(is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # None: Python raises ImportError, whether it is installed or not
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes") if is_installed else None)
    model, _ = model_and_data()
    run = settings(strategy={"name": "diloco"}, optimizer={"name": "adamw8bit"})
    with pytest.raises(TaskError) as caught:
        work_of(run, model, Layout.of(model))
    assert caught.value.code is Code.NO_OPTIMIZER
    assert ("CUDA device, not cpu" if is_installed else "bitsandbytes is not installed") in caught.value.message
    assert caught.value.exit_code == 2


def test_what_is_frozen_stays_as_it_is_to_the_last_bit() -> None:
    for name in ("adamw", "lamb", "sgd"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        model[0].weight.requires_grad_(False)
        layout = Layout.of(model)
        assert layout.hash != Layout(layout.params, layout.buffers).hash
        start = layout.read(model)
        replica = Replica(layout, OptimizerSettings(name=name, weight_decay=0.1), start)
        work = Gradients(model, layout)
        for epoch in range(3):
            work.start_at(replica.values)
            work.begin(epoch)
            work.took(model(torch.ones(2, 8)).square().mean(), 2, 2)
            out = torch.empty(layout.num_values)
            work.collect(layout.fragments(1)[0], replica.values, 2, out)
            replica.update(out, "ab" * 32)
        before, after = layout.views(start), layout.views(replica.values)
        assert torch.equal(before["0.weight"], after["0.weight"]), name
        assert not torch.equal(before["1.weight"], after["1.weight"])


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd"])
def test_steps_of_ones_own_follow_the_same_rule_as_the_replicated_update(name: str) -> None:
    rule = OptimizerSettings(name=name, lr=0.05, weight_decay=0.1, warmup_epochs=2)  # type: ignore[arg-type]
    alone, _ = model_and_data()
    together = copy.deepcopy(alone)
    layout = Layout.of(alone)
    start = layout.read(alone)
    local, shared = LocalSteps(alone, layout, rule), Gradients(together, layout)
    replica = Replica(layout, rule, start)
    generator = torch.Generator().manual_seed(1)
    for epoch in range(6):
        data = torch.randn(4, next(alone.parameters()).shape[1], generator=generator)
        local.begin(epoch)
        shared.start_at(replica.values)
        shared.begin(epoch)
        for work, model in ((local, alone), (shared, together)):
            work.took(model(data).square().mean(), 4, 4)
            work.end_step()
        out = torch.empty(layout.num_values)
        shared.collect(layout.fragments(1)[0], replica.values, 4, out)
        replica.update(out, "ab" * 32)
    moved = replica.values - start
    assert float(moved.norm()) > 0.01
    torch.testing.assert_close(layout.read(alone) - start, moved, rtol=1e-3, atol=1e-5)


def test_momentum_does_not_multiply_the_decay_of_weights() -> None:
    model = torch.nn.Linear(4, 4)
    layout = Layout.of(model)
    start = layout.read(model)
    work = LocalSteps(model, layout, OptimizerSettings(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.1, clip_norm=0))
    work.begin(0)
    for _ in range(10):
        work.took((model.weight * 0).sum() + (model.bias * 0).sum(), 1, 1)
        work.end_step()
    rate = learning_rate(OptimizerSettings(lr=0.1), 0)
    views = layout.views(layout.read(model))
    torch.testing.assert_close(views["weight"], layout.views(start)["weight"] * (1 - rate * 0.1) ** 10)
    assert torch.equal(views["bias"], layout.views(start)["bias"])


def test_buffers_of_double_precision_go_along_with_a_round_under_way() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
    layout = Layout.of(model)
    work = LocalSteps(model, layout, OptimizerSettings(), kept=0.5)
    work.accept(layout.fragments(1)[0], torch.ones(layout.num_values))
    assert torch.equal(model.mean, torch.full((2,), 0.5, dtype=torch.float64))  # type: ignore[arg-type]
