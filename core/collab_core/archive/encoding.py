"""How the bytes of a tensor are kept: as they are, in byte planes, or as the difference to another tensor.

Neighbouring bytes of a float have nothing in common, the same bytes of neighbouring floats do: exponents repeat, so
planes of equal bytes are compressed one by one. A difference is taken between integers whose order is that of the
floats: after a small update most of its upper bytes are zero. Nothing is ever computed in floating point, so what
comes back is what was put in, bit for bit.

An encoded tensor is a row of blocks, so that a difference is undone block by block, in place, in the base's memory.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import zstandard

from collab_core.tree import ITEM_BYTES

LEVEL = 3
BLOCK_VALUES = 2**18
PIECE_VALUES = 2**16  # of a block: what fits into a core's cache
LENGTH = struct.Struct("<I")
FLOATS = ("float64", "float32", "float16", "bfloat16")

Array = np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]


class Kind(enum.IntEnum):
    """The encodings. Numbers are on disk: never change one."""

    RAW = 0
    PLANES = 1
    DELTA = 2


class BadEncoding(Exception):
    """Bytes that are not an encoding of the tensor they are said to be."""


def new_memory(num_bytes: int) -> memoryview:
    """With whatever is in it: filling it with zeros would take as long as reading a tensor into it."""
    return np.empty(num_bytes, np.uint8).data


def encode(kind: Kind, dtype: str, data: memoryview, base: memoryview | None = None) -> Iterator[bytes | memoryview]:
    """The encoded bytes, piece by piece.

    Args:
        kind: how.
        dtype: what the bytes mean.
        data: the tensor.
        base: of a difference: a tensor of the same dtype and size.
    """
    if kind is Kind.RAW:
        yield data
        return
    compressor = _compressor(dtype)
    values, bases = _integers(dtype, data), None if base is None else _integers(dtype, base)
    for start in range(0, len(values), BLOCK_VALUES):
        block = values[start : start + BLOCK_VALUES]
        if kind is Kind.DELTA:
            assert bases is not None, "a difference needs a base"
            block = _reorder(block.copy(), dtype)
            block -= _reorder(bases[start : start + BLOCK_VALUES].copy(), dtype)
            _zigzag(block)
        for plane in _planes(block):
            packed = compressor.compress(plane)
            is_smaller = len(packed) < len(plane)
            yield LENGTH.pack(len(packed) if is_smaller else 0)
            yield packed if is_smaller else plane.data


def _compressor(dtype: str) -> zstandard.ZstdCompressor:
    if dtype not in FLOATS:
        return zstandard.ZstdCompressor(level=LEVEL)
    # Bytes of weights hardly ever repeat in a row. Looking for it costs time, and what is found is mostly longer to
    # say than its bytes, so that almost only the entropy coder works (measured: 1 to 4 % of the raw size less).
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, write_content_size=True
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def decode_into(dtype: str, target: memoryview, steps: Iterable[tuple[Kind, memoryview]]) -> None:
    """Undo `encode`, step by step: something whole goes into the target, a difference is added to what it holds.

    Raises:
        BadEncoding: a step does not fit the target. Whether the result is right is for its hash to say.
    """
    values = _integers(dtype, target)
    is_ordered = False  # between two differences there is no need to go back to floats
    for kind, encoded in steps:
        if (kind is Kind.DELTA) is not is_ordered:
            is_ordered = not is_ordered
            _reorder(values, dtype)
        if kind is Kind.RAW:
            if len(encoded) != len(target):
                raise BadEncoding(f"{len(encoded)} bytes instead of {len(target)}")
            target[:] = encoded
        else:
            _decode_blocks(values, encoded, is_difference=is_ordered)
    if is_ordered:
        _reorder(values, dtype)


def _decode_blocks(values: Array, encoded: memoryview, *, is_difference: bool) -> None:
    decompressor = zstandard.ZstdDecompressor()
    joined, signs = (np.empty(min(PIECE_VALUES, len(values)), values.dtype) for _ in range(2))
    position = 0
    for start in range(0, len(values), BLOCK_VALUES):
        block = values[start : start + BLOCK_VALUES]
        planes = []
        for _ in range(block.itemsize):
            plane, position = _read_plane(encoded, position, len(block), decompressor)
            planes.append(plane)
        for begin in range(0, len(block), PIECE_VALUES):
            piece = block[begin : begin + PIECE_VALUES]
            parts = [plane[begin : begin + PIECE_VALUES] for plane in planes]
            if is_difference:
                piece += _unzigzag(_join(parts, joined[: len(piece)]), signs[: len(piece)])
            else:
                _join(parts, piece)
    if position != len(encoded):
        raise BadEncoding(f"{len(encoded) - position} bytes too many")


def _read_plane(
    encoded: memoryview, position: int, size: int, decompressor: zstandard.ZstdDecompressor
) -> tuple[Array, int]:
    """A plane of this size, and where the next one begins."""
    try:
        length = int(LENGTH.unpack_from(encoded, position)[0])
    except struct.error:
        raise BadEncoding("it ends too early") from None
    position += LENGTH.size
    piece = encoded[position : position + (length or size)]
    try:
        # a plane that says it is larger than it can be is never unpacked
        if length and zstandard.frame_content_size(piece) != size:
            raise BadEncoding("a plane of the wrong size")
        plane = decompressor.decompress(piece, max_output_size=size) if length else piece
    except zstandard.ZstdError as error:
        raise BadEncoding(str(error)) from None
    if len(plane) != size:
        raise BadEncoding("a plane of the wrong size")
    return np.frombuffer(plane, np.uint8), position + len(piece)


def _integers(dtype: str, data: memoryview) -> Array:
    return np.frombuffer(data, np.dtype(f"<u{ITEM_BYTES[dtype]}"))


# Planes are shifted apart and together, which is several times as fast as transposing bytes.


def _planes(block: Array) -> Array:
    """The bytes of a block, the lowest ones first."""
    planes = np.empty((block.itemsize, len(block)), np.uint8)
    for number, plane in enumerate(planes):
        np.right_shift(block, block.dtype.type(8 * number), out=plane, casting="unsafe")
    return planes


def _join(planes: Sequence[Array], block: Array) -> Array:
    block[:] = planes[-1]
    for plane in reversed(planes[:-1]):
        block <<= block.dtype.type(8)
        block |= plane
    return block


# What follows changes a block in place: new memory would cost more than the arithmetic.


def _reorder(values: Array, dtype: str) -> Array:
    """Integers in the order of the floats, and back again: of negative ones all bits but the sign flip.

    They count as signed then; a difference is the same for both.
    """
    if dtype in FLOATS:
        for start in range(0, len(values), PIECE_VALUES):
            piece = values[start : start + PIECE_VALUES]
            flipped = _sign_mask(piece)
            flipped >>= flipped.dtype.type(1)
            piece ^= flipped
    return values


def _sign_mask(block: Array) -> Array:
    """All bits where the top bit is set, none elsewhere."""
    mask: Array = (block.view(f"i{block.itemsize}") >> (8 * block.itemsize - 1)).view(block.dtype)
    return mask


def _zigzag(block: Array) -> Array:
    """Small differences of either sign become small numbers."""
    signs = _sign_mask(block)
    block <<= block.dtype.type(1)
    block ^= signs
    return block


def _unzigzag(block: Array, signs: Array) -> Array:
    """Undo that; `signs` is memory to work in."""
    np.bitwise_and(block, block.dtype.type(1), out=signs)
    np.negative(signs, out=signs)
    block >>= block.dtype.type(1)
    block ^= signs
    return block
