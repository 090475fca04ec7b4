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
from collections.abc import Iterator

import numpy as np
import zstandard

from collab_core.tree import ITEM_BYTES

LEVEL = 3
BLOCK_VALUES = 2**18
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
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    values, bases = _integers(dtype, data), None if base is None else _integers(dtype, base)
    for start in range(0, len(values), BLOCK_VALUES):
        block = values[start : start + BLOCK_VALUES]
        if kind is Kind.DELTA:
            assert bases is not None, "a difference needs a base"
            block = _zigzag(_ordered(block, dtype) - _ordered(bases[start : start + BLOCK_VALUES], dtype))
        for plane in _planes(block):
            packed = compressor.compress(plane)
            is_smaller = len(packed) < len(plane)
            yield LENGTH.pack(len(packed) if is_smaller else 0)
            yield packed if is_smaller else plane.data


def decode_into(kind: Kind, dtype: str, encoded: memoryview, target: bytearray) -> None:
    """Undo `encode`. A difference is added to the base, which `target` holds before and the tensor afterwards.

    Raises:
        BadEncoding: it does not fit the target. Whether the result is right is for its hash to say.
    """
    if kind is Kind.RAW:
        if len(encoded) != len(target):
            raise BadEncoding(f"{len(encoded)} bytes instead of {len(target)}")
        target[:] = encoded
        return
    values = _integers(dtype, memoryview(target))
    decompressor = zstandard.ZstdDecompressor()
    position = 0
    for start in range(0, len(values), BLOCK_VALUES):
        block = values[start : start + BLOCK_VALUES]
        planes = np.empty((block.itemsize, len(block)), np.uint8)
        for plane in planes:
            position = _read_plane(encoded, position, plane, decompressor)
        decoded: Array = np.ascontiguousarray(planes.T).view(block.dtype).reshape(-1)
        if kind is Kind.DELTA:
            decoded = _unordered(_ordered(block, dtype) + _unzigzag(decoded), dtype)
        block[:] = decoded
    if position != len(encoded):
        raise BadEncoding(f"{len(encoded) - position} bytes too many")


def _read_plane(encoded: memoryview, position: int, plane: Array, decompressor: zstandard.ZstdDecompressor) -> int:
    try:
        length = int(LENGTH.unpack_from(encoded, position)[0])
    except struct.error:
        raise BadEncoding("it ends too early") from None
    position += LENGTH.size
    piece = encoded[position : position + (length or len(plane))]
    if length == 0:
        if len(piece) != len(plane):
            raise BadEncoding("it ends too early")
        plane[:] = np.frombuffer(piece, np.uint8)
        return position + len(plane)
    try:
        # a plane that says it is larger than it can be is never unpacked
        if zstandard.frame_content_size(piece) != len(plane):
            raise BadEncoding("a plane of the wrong size")
        unpacked = decompressor.decompress(piece, max_output_size=len(plane))
    except zstandard.ZstdError as error:
        raise BadEncoding(str(error)) from None
    if len(unpacked) != len(plane):
        raise BadEncoding("a plane of the wrong size")
    plane[:] = np.frombuffer(unpacked, np.uint8)
    return position + length


def _integers(dtype: str, data: memoryview) -> Array:
    return np.frombuffer(data, np.dtype(f"<u{ITEM_BYTES[dtype]}"))


def _planes(block: Array) -> Array:
    planes: Array = np.ascontiguousarray(block.view(np.uint8).reshape(-1, block.itemsize).T)
    return planes


def _ordered(block: Array, dtype: str) -> Array:
    """Unsigned integers in the order of the floats: negative ones are sign and magnitude, so all their bits flip."""
    if dtype not in FLOATS:
        return block
    result: Array = block ^ (_sign_mask(block) | _top(block))
    return result


def _unordered(block: Array, dtype: str) -> Array:
    if dtype not in FLOATS:
        return block
    result: Array = block ^ (~_sign_mask(block) | _top(block))
    return result


def _sign_mask(block: Array) -> Array:
    """All bits where the top bit is set, none elsewhere."""
    mask: Array = (block.view(f"i{block.itemsize}") >> (8 * block.itemsize - 1)).view(block.dtype)
    return mask


def _top(block: Array) -> np.unsignedinteger:
    top: np.unsignedinteger = block.dtype.type(1 << (8 * block.itemsize - 1))
    return top


def _zigzag(difference: Array) -> Array:
    """Small differences of either sign become small numbers."""
    signed = difference.view(f"i{difference.itemsize}")
    result: Array = ((signed << 1) ^ (signed >> (8 * difference.itemsize - 1))).view(difference.dtype)
    return result


def _unzigzag(zigzag: Array) -> Array:
    one = zigzag.dtype.type(1)
    result: Array = (zigzag >> one) ^ (~(zigzag & one) + one)
    return result
