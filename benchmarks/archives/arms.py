"""Ways to keep many versions of a model in a folder. Each saves one after the other, and gives any of them back."""

from __future__ import annotations

import io
import statistics
import time
from pathlib import Path
from typing import Any, Protocol

import torch
import zstandard
from blake3 import blake3
from safetensors.torch import load, save

from collab_core.archive import Archive, Prefer, Provenance, predict, recover
from collab_core.state.tensors import raw, tensor_from

Weights = dict[str, torch.Tensor]


class Arm(Protocol):
    """One way."""

    def __init__(self, folder: Path) -> None: ...

    def save(self, number: int, weights: Weights) -> None: ...

    def load(self, number: int) -> Weights: ...


class TorchSave:
    """A file per version, as everybody does it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, number: int, weights: Weights) -> None:
        torch.save(weights, self._folder / f"{number}.pt")

    def load(self, number: int) -> Weights:
        loaded: Weights = torch.load(self._folder / f"{number}.pt", weights_only=True)
        return loaded


class SafetensorsZstd:
    """A compressed file per version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, number: int, weights: Weights) -> None:
        (self._folder / f"{number}.zst").write_bytes(zstandard.ZstdCompressor(3).compress(save(weights)))

    def load(self, number: int) -> Weights:
        data = (self._folder / f"{number}.zst").read_bytes()
        loaded: Weights = load(zstandard.ZstdDecompressor().decompress(data))
        return loaded


class Dedup:
    """Every tensor once, by its hash: what MMlib's parameter update keeps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[int, dict[str, str]] = {}

    def save(self, number: int, weights: Weights) -> None:
        names = self._names[number] = {}
        for name, tensor in weights.items():
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            digest = blake3(bytes(raw(tensor).data)).hexdigest()
            names[name] = digest
            path = self._folder / digest
            if not path.exists():
                path.write_bytes(buffer.getvalue())

    def load(self, number: int) -> Weights:
        return {n: torch.load(self._folder / d, weights_only=True) for n, d in self._names[number].items()}


class ZipNN:
    """ZipNN's byte grouping and Huffman coding, version by version."""

    is_delta = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: bytes | None = None
        self._dtype = ""

    def save(self, number: int, weights: Weights) -> None:
        data = save(weights)
        self._dtype = "bfloat16" if next(iter(weights.values())).dtype is torch.bfloat16 else "float32"
        codec, against = self._codec(self._last if self.is_delta else None)
        (self._folder / f"{number}.znn").write_bytes(codec.compress(bytearray(data), **against))
        self._last = data

    def load(self, number: int) -> Weights:
        data: bytes | None = None
        for step in range(number + 1) if self.is_delta else [number]:
            codec, against = self._codec(data if self.is_delta else None)
            data = bytes(codec.decompress((self._folder / f"{step}.znn").read_bytes(), **against))
        loaded: Weights = load(data or b"")
        return loaded

    def _codec(self, base: bytes | None) -> tuple[Any, dict[str, bytes]]:
        from zipnn import ZipNN as Codec

        if base is None:
            return Codec(input_format="byte", bytearray_dtype=self._dtype), {}
        codec = Codec(input_format="byte", bytearray_dtype=self._dtype, delta_compressed_type="byte")
        return codec, {"delta_second_data": base}


class ZipNNDelta(ZipNN):
    """The same on the XOR with the version before; any version needs all before it."""

    is_delta = True


class Collab:
    """Our archive, as an auxiliary peer uses it."""

    prefer = Prefer.BALANCED

    def __init__(self, folder: Path) -> None:
        self._archive = Archive(folder, prefer=self.prefer)
        self._parent: str | None = None

    def save(self, number: int, weights: Weights) -> None:
        tensors = {name: raw(tensor) for name, tensor in weights.items()}
        provenance = Provenance(run_id="bench", epoch=number)
        self._parent = self._archive.save(tensors, provenance, parent=self._parent).root

    def load(self, number: int) -> Weights:
        entries = self._archive.find(f"epoch:{number}").entries()
        return {e.name: tensor_from(self._archive.store.read(e), e.dtype, e.shape) for e in entries}

    def costs(self, number: int, folder: Path) -> dict[str, float]:
        """What one version is said to cost as a difference and to recover; and what it does."""
        archive, version = self._archive, self._archive.find(f"epoch:{number}")
        predicted_s, measured_s = [], []
        for _ in range(5):  # in turn: the machine has moods
            predicted = predict(archive, version)
            predicted_s.append(predicted["now"].seconds)
            start = time.perf_counter()
            recover(archive, version, folder / "model.safetensors")
            measured_s.append(time.perf_counter() - start)
        places = {entry.digest(): archive.store.places(entry.digest()) for entry in version.entries()}
        stored = [min(found, key=lambda place: place.item.size) for found in places.values()]
        next_one = {entry.digest() for entry in archive.find(f"epoch:{number + 1}").entries()}
        return {
            "predicted_bytes": predicted["delta"].bytes,
            "measured_bytes": sum(place.item.size for place in stored if place.item.tensor not in next_one),
            "predicted_s": statistics.median(predicted_s),
            "measured_s": statistics.median(measured_s),
        }


class CollabStorage(Collab):
    """The same where only bytes count: twice as many differences in a row."""

    prefer = Prefer.STORAGE


ARMS: dict[str, type[Arm]] = {
    "torch.save": TorchSave,
    "safetensors + zstd": SafetensorsZstd,
    "dedup": Dedup,
    "ZipNN": ZipNN,
    "ZipNN delta": ZipNNDelta,
    "collab": Collab,
    "collab, storage": CollabStorage,
}
