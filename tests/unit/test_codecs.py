"""Codecs lose no more than they may, whatever the values; and what they lose is not lost."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from collab_core.averaging.codecs import CODECS, Codec, TopKCodec
from collab_core.averaging.feedback import ErrorFeedback
from collab_core.averaging.group import Part

LOSSY = ["fp16", "int8", "int4", "topk"]
FLOAT_MAX = float(np.finfo(np.float32).max)
SIZES = st.sampled_from([1, 2, 3, 63, 64, 65, 255, 256, 257, 1000, 4095, 4096, 4097, 9000])
SCALES = st.sampled_from([1e-45, 1e-38, 1e-20, 1e-3, 1.0, 1e3, 1e30, 1e38])


@st.composite
def vectors(draw: st.DrawFn) -> torch.Tensor:
    """Ordinary values of any magnitude, with some of any kind among them."""
    size, scale, seed = draw(SIZES), draw(SCALES), draw(st.integers(0, 2**32 - 1))
    values = np.clip(np.random.default_rng(seed).standard_normal(size) * scale, -FLOAT_MAX, FLOAT_MAX)
    values = values.astype(np.float32)
    special = draw(
        arrays(np.float32, min(size, 5), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
    )
    values[: len(special)] = np.where(special == 0, values[: len(special)], special)
    values[draw(st.integers(0, size - 1))] = 0
    return torch.from_numpy(values)


def round_trip(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    payload = bytearray(b"\xa5" * codec.encoded_bytes(len(values)))  # whatever was in the buffer before
    told, decoded = torch.empty(len(values)), torch.empty(len(values))
    assert codec.encode(values, payload, told)
    codec.decode(payload, decoded)
    assert torch.equal(told.view(torch.int32), decoded.view(torch.int32))
    return decoded


def groups(values: torch.Tensor, length: int) -> list[torch.Tensor]:
    return list(values.split(length))


@settings(max_examples=150, deadline=None)
@given(values=vectors())
@pytest.mark.parametrize(("name", "group", "levels"), [("int8", 256, 127), ("int4", 64, 7)])
def test_integers_are_off_by_half_a_level_at_most(name: str, group: int, levels: int, values: torch.Tensor) -> None:
    decoded = round_trip(CODECS[name], values)
    assert bool(decoded.isfinite().all())
    for meant, got in zip(groups(values.double(), group), groups(decoded.double(), group), strict=True):
        # a scale is rounded up by less than 1 %; the largest numbers there are may be cut by as much
        bound = float(meant.abs().max()) / levels * 0.5 * 1.02 + 2.0**-100 * levels
        near_the_end = float(meant.abs().max()) > FLOAT_MAX / 1.2
        assert float((meant - got).abs().max()) <= (0.2 * FLOAT_MAX if near_the_end else bound)


@settings(max_examples=100, deadline=None)
@given(values=vectors())
def test_half_precision_is_off_by_its_rounding_or_its_range(values: torch.Tensor) -> None:
    decoded = round_trip(CODECS["fp16"], values).double()
    cut = values.double().clamp(-65504, 65504)
    assert float(((cut - decoded).abs() - cut.abs() * 2.0**-10).max()) <= 2.0**-24


@settings(max_examples=100, deadline=None)
@given(values=vectors())
@pytest.mark.parametrize("num_kept", [64, 512, 1024, 2048])
def test_topk_keeps_the_largest_and_makes_nothing_larger_in_sum(num_kept: int, values: torch.Tensor) -> None:
    decoded = round_trip(TopKCodec(num_kept), values)
    assert bool(decoded.isfinite().all())
    for meant, got in zip(groups(values.double(), 4096), groups(decoded.double(), 4096), strict=True):
        kept = got != 0
        assert int(kept.sum()) <= num_kept
        assert bool((got[kept].sign() * meant[kept].sign() >= 0).all())
        if bool(kept.any()) and bool((~kept).any()):
            left_out = float(meant[~kept].abs().max())
            assert left_out <= float(meant[kept].abs().min()) or left_out <= 2.0**-99
        # a few magnitudes per chunk, each the mean of those it stands for: a scale is rounded up by less than 1 %
        assert float(got.abs().sum()) <= 1.01 * float(meant.abs().sum()) + 1e-30


@pytest.mark.parametrize("name", [*CODECS])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(name: str, bad: float) -> None:
    codec, values = CODECS[name], torch.ones(300)
    values[200] = bad
    assert not codec.encode(values, bytearray(codec.encoded_bytes(300)), torch.empty(300))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("codec", [*CODECS.values(), TopKCodec(64), TopKCodec(2048)])
def test_any_bytes_decode_to_the_same_values_each_time(codec: Codec, data: st.DataObject) -> None:
    size = data.draw(SIZES)
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    payload = bytearray(rng.bytes(codec.encoded_bytes(size)))
    if codec.name == "topk" and data.draw(st.booleans()):  # positions that make sense, and anything else
        codec.encode(torch.from_numpy(rng.standard_normal(size).astype(np.float32)), payload, torch.empty(size))
        for start in range(0, len(payload), codec.encoded_bytes(1)):
            payload[start : start + 4] = rng.bytes(4)  # two of the scales
    first, second = torch.empty(size), torch.full((size,), 7.0)
    codec.decode(payload, first)
    codec.decode(payload, second)
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))


def positions_changed(codec: Codec, place: slice, content: bytes) -> torch.Tensor:
    """What a chunk decodes to after these bytes of it were overwritten."""
    payload, decoded = bytearray(codec.encoded_bytes(4096)), torch.empty(4096)
    assert codec.encode(torch.randn(4096, generator=torch.Generator().manual_seed(0)), payload, decoded)
    payload[place] = content
    codec.decode(payload, decoded)
    return decoded


def test_positions_that_nobody_chose_are_no_average() -> None:
    sparse, dense = TopKCodec(64), TopKCodec(2048)
    high = slice(4 + 48, 4 + 48 + 16)  # after two scales and 64 lowest parts of 6 bits: 128 bits that count
    one_after_the_other = bytes([0xFF] * 8 + [0] * 8)
    assert bool(positions_changed(sparse, slice(4, 68), bytes(48) + one_after_the_other).isnan().all())  # all the same
    assert bool(positions_changed(sparse, high, one_after_the_other[::-1]).isnan().all()), "beyond the end"
    assert bool(positions_changed(sparse, high, bytes(16)).isnan().all()), "fewer than there should be"
    assert bool(positions_changed(dense, slice(8, 9), bytes([0])).isnan().all()), "fewer than there should be"


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("size", [100, 5000])
def test_what_was_sent_and_what_is_left_are_what_was_meant(name: str, size: int) -> None:
    """Over rounds with different weights, and fading by exactly as much as the codec says."""
    codec, generator = CODECS[name], torch.Generator().manual_seed(0)
    feedback, part = ErrorFeedback(size, codec.feedback_decay), Part(0, size)
    owed, fresh = torch.zeros(size, dtype=torch.float64), torch.empty(size)
    for weight in (8.0, 3.0, 20.0, 1.0, 8.0):
        values = torch.randn(size, generator=generator)
        draft = feedback.draft()
        to_send = draft.with_residue(values, part, weight, out=fresh)
        decoded = torch.empty(size)
        assert codec.encode(to_send, bytearray(codec.encoded_bytes(size)), decoded)
        draft.note(part, to_send, decoded, weight)
        draft.commit()
        owed = (owed + weight * (values.double() - decoded.double())) * codec.feedback_decay
    assert feedback.residue is not None
    torch.testing.assert_close(feedback.residue.double(), owed, rtol=1e-4, atol=1e-4)


def test_sizes_on_the_wire() -> None:
    assert {name: codec.encoded_bytes(2**20) / 2**20 for name, codec in CODECS.items()} == {
        "none": 4,
        "fp16": 2,
        "int8": 1 + 2 / 256,
        "int4": 0.5 + 2 / 64,
        "topk": 1288 / 4096,
    }
    assert {kept: TopKCodec(kept).encoded_bytes(4096) for kept in (64, 256, 512, 1024, 2048)} == {
        64: 84,
        256: 260,
        512: 452,
        1024: 772,
        2048: 1288,
    }
    for kept, of_averages in ((64, 256), (512, 2048), (1024, 2048), (2048, 2048)):
        assert TopKCodec(kept).for_averages.encoded_bytes(4096) == TopKCodec(of_averages).encoded_bytes(4096)


def test_the_residue_survives_a_restart_once_and_only_as_it_was(tmp_path: Path) -> None:
    feedback, path = ErrorFeedback(100), tmp_path / "feedback"
    feedback.save(path, "run")
    assert not path.exists()
    draft = feedback.draft()
    draft.note(Part(0, 100), torch.ones(100), torch.zeros(100), 3.0)
    draft.commit()
    feedback.save(path, "run")
    saved = path.read_bytes()

    def restored(content: bytes, num_values: int = 100, run: str = "run") -> torch.Tensor | None:
        path.write_bytes(content)
        again = ErrorFeedback(num_values)
        again.restore(path, run)
        assert not path.exists(), "rounds may pay it, and then it must not come back"
        return again.residue

    taken_up = restored(saved)
    assert taken_up is not None
    assert torch.equal(taken_up, torch.full((100,), 3.0))
    assert restored(saved, run="another") is None
    assert restored(saved, num_values=50) is None
    assert restored(saved[:-1] + bytes([saved[-1] ^ 1])) is None
