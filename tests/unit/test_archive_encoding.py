"""Encodings give back what was put in, bit for bit, or say that they cannot."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collab_core.archive.encoding import BLOCK_VALUES, BadEncoding, Kind, decode_into, encode
from collab_core.tree import ITEM_BYTES

WRITTEN = "000000008e1c0104dd0000000000060d0000330000000000000000004b800000000000000000e000"


def roundtrip(kind: Kind, dtype: str, data: bytes, base: bytes) -> bytes:
    encoded = b"".join(bytes(piece) for piece in encode(kind, dtype, memoryview(data), memoryview(base)))
    target = memoryview(bytearray(base if kind is Kind.DELTA else len(data)))
    decode_into(dtype, target, [(kind, memoryview(encoded))])
    return bytes(target)


@given(
    kind=st.sampled_from(list(Kind)),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    values=st.lists(st.tuples(st.binary(min_size=8, max_size=8), st.binary(min_size=8, max_size=8)), max_size=40),
)
def test_any_bits_come_back(kind: Kind, dtype: str, values: list[tuple[bytes, bytes]]) -> None:
    width = ITEM_BYTES[dtype]
    data, base = (b"".join(pair[i][:width] for pair in values) for i in (0, 1))
    assert roundtrip(kind, dtype, data, base) == data


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("num_values", [0, 1, BLOCK_VALUES - 1, BLOCK_VALUES, BLOCK_VALUES + 1, 2 * BLOCK_VALUES + 7])
def test_odd_sizes_and_special_floats_come_back(kind: Kind, num_values: int) -> None:
    rng = np.random.default_rng(num_values)
    values, base = (rng.standard_normal(num_values).astype(np.float32) for _ in range(2))
    for place, special in enumerate((np.nan, np.inf, -np.inf, 0.0, -0.0, np.float32(1e-45))):
        values[place::101] = special
        base[place + 1 :: 103] = special
    assert roundtrip(kind, "float32", values.tobytes(), base.tobytes()) == values.tobytes()


@given(
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    kinds=st.lists(st.sampled_from(list(Kind)), min_size=1, max_size=5),
    values=st.lists(st.binary(min_size=48, max_size=48), max_size=40),
)
def test_steps_in_any_order_lead_to_the_last_one(dtype: str, kinds: list[Kind], values: list[bytes]) -> None:
    width = ITEM_BYTES[dtype]
    versions = [b"".join(value[8 * i :][:width] for value in values) for i in range(len(kinds) + 1)]
    steps = [
        (kind, memoryview(b"".join(encode(kind, dtype, memoryview(after), memoryview(before)))))
        for kind, (before, after) in zip(kinds, pairwise(versions), strict=True)
    ]
    target = memoryview(bytearray(versions[0]))
    decode_into(dtype, target, steps)
    assert bytes(target) == versions[-1]


def test_bytes_on_the_disk_mean_what_they_always_did() -> None:
    """Archives outlive us: this was written by the first version."""
    base = np.array([1.0, -1.0, 0.0, -0.0, 3.5e-5, np.inf], np.float32)
    values = np.array([1.0001, -0.9999, -0.0, 1e-45, -3.5e-5, np.nan], np.float32)
    data, before = values.data.cast("B"), base.data.cast("B")
    assert b"".join(encode(Kind.DELTA, "float32", data, before)).hex() == WRITTEN


def test_a_small_update_is_much_smaller_than_the_tensor() -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal(2**20).astype(np.float32)
    values = base * (1 + rng.standard_normal(2**20).astype(np.float32) * np.float32(1e-3))
    size = sum(len(piece) for piece in encode(Kind.DELTA, "float32", values.data.cast("B"), base.data.cast("B")))
    assert size < 0.62 * values.nbytes  # the facts page measured 56 %
    same = sum(len(piece) for piece in encode(Kind.DELTA, "float32", base.data.cast("B"), base.data.cast("B")))
    assert same < 0.001 * values.nbytes


def test_cut_off_bytes_are_refused() -> None:
    data = np.arange(1000, dtype=np.float32).tobytes()
    encoded = b"".join(bytes(piece) for piece in encode(Kind.PLANES, "float32", memoryview(data)))
    for wrong in (encoded[:-1], encoded[:3], b"", encoded + b"\0"):
        with pytest.raises(BadEncoding):
            decode_into("float32", memoryview(bytearray(len(data))), [(Kind.PLANES, memoryview(wrong))])
    with pytest.raises(BadEncoding):
        decode_into("float32", memoryview(bytearray(len(data) + 4)), [(Kind.RAW, memoryview(data))])
