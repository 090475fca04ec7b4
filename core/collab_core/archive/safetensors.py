"""safetensors files, read and written tensor by tensor without torch."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from collab_core.errors import ArchiveError, Code
from collab_core.files import Buffer
from collab_core.tree import ITEM_BYTES, RawTensor

LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 10**8
NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPES = {short: name for name, short in NAMES.items()}

Form = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def write_pieces(forms: Iterable[Form], data: Iterable[Buffer], metadata: Mapping[str, str]) -> Iterator[Buffer]:
    """The bytes of a file: a header made of what the tensors look like, then the tensors as they come."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, dtype, shape in forms:
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    yield LENGTH.pack(len(packed))
    yield packed
    yield from data


def read_file(path: Path) -> dict[str, RawTensor]:
    """Every tensor of a file, as it lies on the disk.

    Raises:
        ArchiveError: BAD_CHECKPOINT, it is not such a file.
    """
    try:
        with path.open("rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        (length,) = LENGTH.unpack_from(content)
        if length > min(MAX_HEADER_BYTES, len(content)):
            raise ValueError("its header is cut off")
        header = json.loads(bytes(content[LENGTH.size : LENGTH.size + length]))
        body = content[LENGTH.size + length :]
        return {name: _tensor(fields, body) for name, fields in header.items() if name != "__metadata__"}
    except OSError as error:
        raise _bad(path, str(error.strerror or error)) from error
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise _bad(path, f"it is not a safetensors file ({error})") from error


def _tensor(fields: Mapping[str, Any], body: memoryview) -> RawTensor:
    dtype, shape = DTYPES[fields["dtype"]], tuple(int(n) for n in fields["shape"])
    start, end = fields["data_offsets"]
    data = body[start:end]
    if len(data) != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError("a tensor is cut off")
    return RawTensor(dtype, shape, data)


def _bad(path: Path, why: str) -> ArchiveError:
    return ArchiveError(
        Code.BAD_CHECKPOINT,
        f"{path} cannot be read as a checkpoint: {why}.",
        fix="Give a .safetensors file, or a folder with model.safetensors in it (`model.save_pretrained(FOLDER)`).",
    )
