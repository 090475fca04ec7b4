"""The replicated update: right compared with torch, and equal to the last bit whatever the machine does."""

from __future__ import annotations

import functools
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from collab_core.errors import ConfigError
from collab_core.run.settings import OptimizerSettings
from collab_core.update import Optimizer, Segment, learning_rate
from collab_core.update.exact import (
    BLOCK,
    cosine,
    float32,
    keeps_denormals,
    new_scratch,
    norm,
    power,
    square_root,
    square_sum,
)
from collab_core.update.lamb import trust_ratio
from collab_core.update.segments import cut_into_pieces

Floats = NDArray[np.float32]
SIZES = {"embedding": (3000, True), "bias": (17, False), "norm": (64, False), "empty": (0, True), "head": (1100, True)}


def make_segments(sizes: dict[str, tuple[int, bool]] = SIZES) -> list[Segment]:
    segments: list[Segment] = []
    for name, (size, decays) in sizes.items():
        segments.append(Segment(name, segments[-1].stop if segments else 0, size, decays))
    return segments


def make_settings(name: str, **changes: Any) -> OptimizerSettings:
    plain: dict[str, Any] = {"name": name, "lr": 0.01, "clip_norm": 0.0, "warmup_epochs": 0}
    return OptimizerSettings(**{**plain, **changes})


def make_vectors(num_vectors: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(make_segments()[-1].stop, generator=generator) for _ in range(num_vectors)]


def bits(values: Tensor | Floats) -> NDArray[np.uint32]:
    array = values.numpy() if isinstance(values, Tensor) else values
    return array.view(np.uint32)


# Right: the same numbers as torch, within rounding


def as_torch_groups(params: Tensor, weight_decay: float) -> list[dict[str, Any]]:
    parts = [(segment, params[segment.start : segment.stop].clone()) for segment in make_segments()]
    return [
        {"params": [part.requires_grad_()], "weight_decay": weight_decay if segment.decays else 0.0}
        for segment, part in parts
    ]


def run_torch(optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> Tensor:
    parts = [group["params"][0] for group in optimizer.param_groups]
    for gradient in gradients:
        for segment, part in zip(make_segments(), parts, strict=True):
            part.grad = gradient[segment.start : segment.stop].clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts])


def run_ours(settings: OptimizerSettings, params: Tensor, gradients: list[Tensor]) -> Tensor:
    optimizer = Optimizer(settings, make_segments(), params.numel())
    params, state = params.clone(), optimizer.new_state()
    for epoch, gradient in enumerate(gradients):
        assert optimizer.step(params, gradient.clone(), state, epoch).is_finite
    return params


def test_adamw_agrees_with_torch() -> None:
    params, *gradients = make_vectors(21)
    groups = as_torch_groups(params, weight_decay=0.1)
    expected = run_torch(torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8), gradients)
    torch.testing.assert_close(run_ours(make_settings("adamw", weight_decay=0.1), params, gradients), expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_agrees_with_torch(momentum: float) -> None:
    params, *gradients = make_vectors(21)
    expected = run_torch(torch.optim.SGD(as_torch_groups(params, 0.0), lr=0.01, momentum=momentum), gradients)
    settings = make_settings("sgd", momentum=momentum, weight_decay=0.0)
    torch.testing.assert_close(run_ours(settings, params, gradients), expected)


def test_sgd_decays_weights_but_not_biases() -> None:
    params, gradient = make_vectors(2)
    after = run_ours(make_settings("sgd", weight_decay=0.5), params, [gradient * 0])
    for segment in make_segments():
        here = slice(segment.start, segment.stop)
        torch.testing.assert_close(after[here], params[here] * (1 - 0.01 * 0.5 if segment.decays else 1))


def test_lamb_agrees_with_a_float64_reference() -> None:
    params, *gradients = make_vectors(21)
    params[3000:3017] = 0  # a fresh bias: trust ratio 1
    expected = params.double()
    exp_avg, exp_avg_sq = torch.zeros_like(expected), torch.zeros_like(expected)
    for num_updates, gradient in enumerate(gradients, start=1):
        exp_avg = 0.9 * exp_avg + 0.1 * gradient.double()
        exp_avg_sq = 0.95 * exp_avg_sq + 0.05 * gradient.double() ** 2
        direction = exp_avg / (1 - 0.9**num_updates) / ((exp_avg_sq / (1 - 0.95**num_updates)).sqrt() + 1e-8)
        for segment in make_segments():
            here = slice(segment.start, segment.stop)
            update = direction[here] + (0.1 * expected[here] if segment.decays else 0)
            weight_norm, update_norm = float(expected[here].norm()), float(update.norm())
            ratio = weight_norm / update_norm if segment.decays and weight_norm and update_norm else 1.0
            expected[here] -= 0.01 * ratio * update
    ours = run_ours(make_settings("lamb", weight_decay=0.1), params, gradients)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


def test_trust_ratio_is_one_where_norms_say_nothing() -> None:
    assert trust_ratio(6.0, 3.0) == 2.0
    for params_norm, update_norm in [(0.0, 3.0), (3.0, 0.0), (math.inf, 1.0), (1.0, math.inf), (math.nan, 1.0)]:
        assert trust_ratio(params_norm, update_norm) == 1.0


# Exact: the same bits everywhere

NUM_VALUES = 300_001


def patterned(seed: int, lowest_exponent: int, num_exponents: int, size: int = NUM_VALUES) -> Floats:
    """Floats made of integers only, so that every machine starts from the same ones; exponent 0 means denormal."""
    mixed = (np.arange(size, dtype=np.uint64) + np.uint64(seed * 1_000_003 + 1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    exponent = np.uint64(lowest_exponent) + (mixed >> np.uint64(40)) % np.uint64(num_exponents)
    pattern = (mixed & np.uint64(0x807FFFFF)) | (exponent << np.uint64(23))
    return np.asarray(pattern, np.uint32).view(np.float32)


@functools.cache
def patterned_gradient(epoch: int) -> Floats:
    gradient = patterned(epoch + 1, 110, 12)
    gradient[1::3] = patterned(epoch + 101, 0, 8)[1::3]  # denormals, here and in the first moment
    gradient[2::3] = patterned(epoch + 201, 48, 20)[2::3]  # denormals in the second moment
    if epoch % 10 == 3:
        gradient[::100_000] = patterned(epoch + 301, 180, 6)[::100_000]  # up to 1e18
    return gradient


def run_patterned(name: str, num_epochs: int = 30) -> list[Tensor]:
    settings = OptimizerSettings.model_validate(
        {
            "name": name,
            "momentum": 0.9 if name == "sgd" else 0.0,
            "weight_decay": 0.05,
            "decay": "cosine",
            "decay_epochs": 20,
        }
    )
    segments = make_segments({"table": (270_000, True), "bias": (1_001, False), "head": (29_000, True)})
    optimizer = Optimizer(settings, segments, NUM_VALUES)
    params, state = torch.from_numpy(patterned(0, 100, 30)), optimizer.new_state()
    for epoch in range(num_epochs):
        stats = optimizer.step(params, torch.from_numpy(patterned_gradient(epoch).copy()), state, epoch)
        assert stats.is_finite
        assert stats.clipped
    return [params, *state.values()]


def digest(name: str) -> str:
    import blake3

    hasher = blake3.blake3()
    for vector in run_patterned(name):
        hasher.update(vector.numpy().tobytes())
    return hasher.hexdigest()[:32]


PINNED = {
    "adamw": "1f969a13527e57491d035822f574da74",
    "lamb": "688847b0346f88dca88a7cf1985d0fde",
    "sgd": "7801d4ff19775544531d093563d53784",
}
"""Every machine must get these. They change only with the arithmetic itself, and then no old run can go on."""


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_every_instruction_set_and_thread_count_gives_the_same_bits(capability: str) -> None:
    script = (
        "import test_update, torch\n"
        "print(torch.backends.cpu.get_cpu_capability())\n"
        "for num_threads in (1, 2, 4):\n"
        "    torch.set_num_threads(num_threads)\n"
        "    for name in test_update.PINNED:\n"
        "        print(num_threads, name, test_update.digest(name))\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": path}
    output = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    used, *found = output.splitlines()
    assert found == [f"{n} {name} {PINNED[name]}" for n in (1, 2, 4) for name in PINNED]
    if used.lower() != capability:
        pytest.skip(f"right, but with {used}: this processor, or this torch, has no {capability}")


def test_adamw_is_ieee_arithmetic_to_the_last_bit() -> None:
    """Whoever rounds every operation as IEEE 754 says gets our bits, so a processor we never saw does too."""
    f, num_epochs = np.float32, 6
    params, exp_avg, exp_avg_sq = patterned(0, 100, 30), np.zeros(NUM_VALUES, f), np.zeros(NUM_VALUES, f)
    optimizer = Optimizer(make_settings("adamw"), [Segment("all", 0, NUM_VALUES, True)], NUM_VALUES)
    ours, state = torch.from_numpy(params.copy()), optimizer.new_state()
    for epoch in range(num_epochs):
        gradient = patterned(epoch + 1, 0, 130)
        optimizer.step(ours, torch.from_numpy(gradient.copy()), state, epoch)
        params = params * f(1 - 0.01 * 0.01)
        exp_avg = exp_avg * f(0.9) + gradient * f(1 - 0.9)
        exp_avg_sq = exp_avg_sq * f(0.95) + gradient * gradient * f(1 - 0.95)
        root_correction = f(math.sqrt(1 - power(0.95, epoch + 1)))
        step = exp_avg * f(0.01 / (1 - power(0.9, epoch + 1)))
        params = params - step / (np.sqrt(exp_avg_sq) / root_correction + f(1e-8))
    assert (bits(ours) == bits(params)).all()
    assert (bits(state["exp_avg_sq"]) == bits(exp_avg_sq)).all()


def test_square_root_is_rounded_correctly_where_torch_is_not() -> None:
    num_mantissas = 2**23
    for exponent in (0, 126, 127):  # all denormals; all mantissas with an even and with an odd exponent
        first = exponent * num_mantissas
        values = np.arange(first, first + num_mantissas, dtype=np.uint32).view(np.float32)
        ours = square_root(torch.from_numpy(values), out=torch.empty(num_mantissas))
        # √ in double has more than twice the digits, so rounding it once more cannot go wrong
        assert (bits(ours) == bits(np.sqrt(values.astype(np.float64)).astype(np.float32))).all()


def test_norm_follows_one_tree_whatever_the_padding() -> None:
    scratch, values = new_scratch(), patterned(1, 110, 20, size=1000)
    padded = np.concatenate([values, np.zeros(24, np.float32)])
    squares = padded * padded
    while squares.size > 1:
        squares = squares[: squares.size // 2] + squares[squares.size // 2 :]
    assert square_sum(torch.from_numpy(values), scratch) == squares[0]
    assert square_sum(torch.from_numpy(padded), scratch) == squares[0]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_norm_is_accurate_for_every_length(size: int) -> None:
    values = patterned(size, 115, 8, size=size)
    expected = math.sqrt(float((values.astype(np.float64) ** 2).sum()))
    assert norm(torch.from_numpy(values), new_scratch()) == pytest.approx(expected, rel=1e-6)


def test_pieces_cover_every_value_once_and_keep_decay_apart() -> None:
    segments = make_segments({"a": (5, True), "b": (BLOCK, True), "c": (3, False), "d": (0, True), "e": (2, False)})
    pieces = cut_into_pieces(segments)
    spans = [(piece.start, piece.stop, piece.decays) for piece in pieces]
    assert spans == [(0, BLOCK, True), (BLOCK, BLOCK + 5, True), (BLOCK + 5, BLOCK + 10, False)]


# Guards


def test_gradient_is_clipped_to_the_norm() -> None:
    params, gradient = make_vectors(2)
    settings = make_settings("sgd", clip_norm=1.0, weight_decay=0.0)
    optimizer = Optimizer(settings, make_segments(), params.numel())
    before, length = params.clone(), float(gradient.norm())
    stats = optimizer.step(params, gradient.clone(), {}, 0)
    assert stats.clipped
    assert stats.gradient_norm == pytest.approx(length, rel=1e-6)
    assert float((before - params).norm()) == pytest.approx(settings.lr, rel=1e-4)
    assert not optimizer.step(params, gradient / (2 * length), {}, 1).clipped


def test_clipping_can_be_turned_off() -> None:
    params, gradient = make_vectors(2)
    optimizer = Optimizer(make_settings("sgd", clip_norm=0.0), make_segments(), params.numel())
    assert not optimizer.step(params, gradient * 1e6, {}, 0).clipped


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_gradient_that_is_not_finite_changes_nothing(name: str, value: float) -> None:
    params, gradient = make_vectors(2)
    settings = make_settings(name, momentum=0.9 if name == "sgd" else 0.0, clip_norm=1.0)
    optimizer = Optimizer(settings, make_segments(), params.numel())
    state = optimizer.new_state()
    optimizer.step(params, gradient.clone(), state, 0)
    before = [vector.clone() for vector in (params, *state.values())]
    gradient[5] = value
    stats = optimizer.step(params, gradient, state, 1)
    assert not stats.is_finite
    assert not stats.clipped
    assert all(torch.equal(old, new) for old, new in zip(before, (params, *state.values()), strict=True))


def test_step_refuses_to_run_where_denormals_are_flushed() -> None:
    params, gradient = make_vectors(2)
    optimizer = Optimizer(make_settings("sgd"), make_segments(), params.numel())
    assert keeps_denormals(new_scratch())
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        with pytest.raises(RuntimeError, match="denormals"):
            optimizer.step(params, gradient, {}, 0)
    finally:
        torch.set_flush_denormal(False)


def test_state_names_follow_the_rule() -> None:
    for settings, names in [
        (make_settings("adamw"), ("exp_avg", "exp_avg_sq")),
        (make_settings("lamb"), ("exp_avg", "exp_avg_sq")),
        (make_settings("sgd", momentum=0.9), ("momentum",)),
        (make_settings("sgd"), ()),
    ]:
        optimizer = Optimizer(settings, make_segments(), make_segments()[-1].stop)
        assert optimizer.state_names == names == tuple(optimizer.new_state())


def test_wrong_vectors_and_segments_are_refused() -> None:
    params, gradient = make_vectors(2)
    optimizer = Optimizer(make_settings("adamw"), make_segments(), params.numel())
    with pytest.raises(ValueError, match="gradient must be"):
        optimizer.step(params, gradient.double(), optimizer.new_state(), 0)
    with pytest.raises(ValueError, match="params must be"):
        optimizer.step(params[1:], gradient, optimizer.new_state(), 0)
    with pytest.raises(ValueError, match="'exp_avg'"):
        optimizer.step(params, gradient, {}, 0)
    with pytest.raises(ValueError, match="cover"):
        Optimizer(make_settings("adamw"), make_segments(), params.numel() + 1)
    with pytest.raises(ValueError, match="should start at 2"):
        Optimizer(make_settings("sgd"), [Segment("a", 0, 2, True), Segment("b", 3, 1, True)], 4)


def test_eps_that_vanishes_in_float32_is_refused() -> None:
    with pytest.raises(ConfigError, match="COLLAB-104"):
        Optimizer(make_settings("adamw", eps=1e-60), [Segment("a", 0, 2, True)], 2)


# Schedules


def test_learning_rate_warms_up_then_stays() -> None:
    settings = OptimizerSettings(lr=1.0, warmup_epochs=4)
    assert [learning_rate(settings, epoch) for epoch in (0, 1, 3, 4, 10_000)] == [0.25, 0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.6), ("cosine", 0.6)])
def test_learning_rate_decays_to_its_final_fraction(decay: str, middle: float) -> None:
    settings = OptimizerSettings.model_validate(
        {"lr": 2.0, "warmup_epochs": 5, "decay": decay, "decay_epochs": 100, "final_lr_fraction": 0.2}
    )
    rates = [learning_rate(settings, epoch) for epoch in range(5, 206)]
    assert rates[0] == pytest.approx(2.0, abs=1e-12)
    assert rates[50] == pytest.approx(2.0 * middle)
    assert rates[100:] == [2.0 * 0.2] * 101
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[:101]))
    if decay == "cosine":
        assert rates[25] == pytest.approx(2.0 * (0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2))


def test_cosine_is_accurate() -> None:
    assert all(abs(cosine(k / 10_000) - math.cos(math.pi * k / 10_000)) < 1e-14 for k in range(10_001))


def test_power_is_accurate() -> None:
    for base in (0.0, 0.5, 0.9, 0.95, 0.999, 0.99999):
        for n in (0, 1, 2, 3, 10, 999, 12_345, 1_000_000):
            assert power(base, n) == pytest.approx(base**n, rel=1e-9, abs=1e-300)


def test_float32_rounds_once_and_stays_finite() -> None:
    assert float32(0.1) == float(np.float32(0.1))
    assert float32(1e300) == -float32(-1e300) == float(np.finfo(np.float32).max)
    assert math.isinf(float32(math.inf))
    assert float32(1e-60) == 0.0
