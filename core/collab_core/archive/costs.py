"""What a version costs, whole, as a difference or trained again: bytes to keep, bytes to send, seconds to get back.

Everything is measured on a sample of the version itself, as sizes and speeds depend on its values. The same arithmetic
decides how a tensor is kept: a second of recovery is worth so many bytes, and whoever prefers speed pays more of them.
"""

from __future__ import annotations

import enum
import functools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from collab_core.archive.encoding import Kind, decode_into, encode
from collab_core.files import sync_folder
from collab_core.tree import RawTensor, TensorEntry

if TYPE_CHECKING:
    from collab_core.archive.archive import Archive
    from collab_core.archive.version import Version

Measure = Callable[[Callable[[], object]], float]
"""How many seconds an action takes."""

SAMPLE_BYTES = 2**24
MAX_SAMPLES = 5
MIN_TRIALS, MIN_TRIAL_S = 3, 0.02


class Prefer(enum.StrEnum):
    """What an archive should be good at."""

    STORAGE = "storage"
    BALANCED = "balanced"
    SPEED = "speed"

    @property
    def max_steps(self) -> int:
        """Differences on the way to any version. Half as many cost 2 to 3 % of the raw size."""
        return 8 if self is Prefer.STORAGE else 4

    def price(self, num_bytes: int, raw_bytes: int, kind: Kind) -> float:
        """Of keeping a tensor in this way, in bytes."""
        worth = {Prefer.STORAGE: 0.0, Prefer.BALANCED: 2e7, Prefer.SPEED: 1e10}[self]  # bytes per second of recovery
        return num_bytes + worth * raw_bytes / decoding_rates()[kind]


@dataclass(frozen=True, slots=True)
class Cost:
    """One way to have a version."""

    bytes: int
    """To keep."""
    transfer_bytes: int
    """To send to somebody who has what it is based on."""
    seconds: float
    """To get back."""


@functools.cache
def decoding_rates() -> dict[Kind, float]:
    """Raw bytes per second, on values like those of a model.

    Measured once per process, and for all it will ever save: so it is what a core can do, however busy it is now.
    """
    rng = np.random.default_rng(0)
    base = rng.standard_normal(2**19).astype(np.float32)
    values = base + rng.standard_normal(2**19).astype(np.float32) * np.float32(1e-3)
    data, memory = values.data.cast("B"), base.data.cast("B")
    return {kind: len(data) / _Trial("float32", data, memory).decoding(kind, _core_seconds)[1] for kind in Kind}


def predict(archive: Archive, version: Version) -> dict[str, Cost]:
    """What a version costs as it is (`now`), and in every other way: `full`, `delta`, and `replay` if it says how.

    Differences are to the next step of its run, or to what a variant was made from.
    """
    entries = version.all_entries()
    base = _base_of(archive, version)
    changed = [entry for entry in entries if base is None or _is_changed(base, entry)]
    raw_bytes, changed_bytes = (sum(entry.num_bytes for entry in some) for some in (entries, changed))
    write_s = _write_seconds(archive.folder, raw_bytes)
    costs: dict[str, Cost] = {}

    stored = sum(_stored(archive, entry) for entry in entries if entry in changed or base is None)
    costs["now"] = Cost(stored, stored, _read_seconds(archive, entries) + write_s)

    sample = _samples(entries)[0]
    scale = raw_bytes / max(1, sum(entry.num_bytes for entry in sample))
    sizes, seconds = _trials(archive, sample, None)
    whole = Cost(round(scale * sizes), round(scale * sizes), scale * seconds + write_s)
    costs["full"] = whole
    if base is not None:
        sample = _samples(changed)[0]
        scale = changed_bytes / max(1, sum(entry.num_bytes for entry in sample))
        sizes, seconds = _trials(archive, sample, base)
        costs["delta"] = Cost(round(scale * sizes), round(scale * sizes), whole.seconds + scale * seconds)
    recipe = version.provenance.recipe
    if recipe is not None:
        size = len(repr(dict(recipe)))
        costs["replay"] = Cost(size, size, whole.seconds + float(recipe.get("seconds", 0.0)))
    return costs


class _Trial:
    """One tensor, encoded and decoded to see how large and how slow."""

    def __init__(self, dtype: str, data: memoryview, base: memoryview) -> None:
        self._dtype, self._data, self._base = dtype, data, base

    def decoding(self, kind: Kind, measure: Measure) -> tuple[int, float]:
        """Encoded bytes, and the seconds to undo it."""
        packed = memoryview(b"".join(encode(kind, self._dtype, self._data, self._base)))
        target = memoryview(bytearray(self._base))
        return len(packed), measure(lambda: decode_into(self._dtype, target, [(kind, packed)]))


def _trials(archive: Archive, sample: list[TensorEntry], base: Version | None) -> tuple[int, float]:
    """Encoded bytes of a sample, and the seconds to get it back; as differences if there is a base."""
    size, seconds = 0, 0.0
    for entry in sample:
        data = archive.store.read(entry)
        twin = base.twin(entry) if base is not None else None
        against = archive.store.read(twin) if twin is not None else memoryview(bytes(len(data)))
        kind = Kind.DELTA if twin is not None else Kind.PLANES
        found, taken = _Trial(entry.dtype, data, against).decoding(kind, _seconds)
        raw = RawTensor(entry.dtype, entry.shape, data)
        size += found
        seconds += taken + _seconds(lambda raw=raw: TensorEntry.of("", raw).digest())  # type: ignore[misc]
    return size, seconds


def _seconds(action: Callable[[], object]) -> float:
    """How long something usually takes, here and now."""
    return statistics.median(_timed(action, time.perf_counter))


def _core_seconds(action: Callable[[], object]) -> float:
    """How long something takes a core that does nothing else."""
    return min(_timed(action, time.thread_time))


def _timed(action: Callable[[], object], clock: Callable[[], float]) -> list[float]:
    trials: list[float] = []
    while len(trials) < MIN_TRIALS or sum(trials) < MIN_TRIAL_S:
        start = clock()
        action()
        trials.append(clock() - start)
    return trials


def _base_of(archive: Archive, version: Version) -> Version | None:
    versions = archive.versions()
    if version.is_variant:
        return next((one for one in versions if one.root == version.parent), None)
    line = [one for one in versions if not one.is_variant and one.provenance.run_id == version.provenance.run_id]
    following = line[[one.root for one in line].index(version.root) + 1 :]
    return following[0] if following else None


def _is_changed(base: Version, entry: TensorEntry) -> bool:
    twin = base.twin(entry)
    return twin is None or twin.digest() != entry.digest()


def _stored(archive: Archive, entry: TensorEntry) -> int:
    return min((place.item.size for place in archive.store.places(entry.digest())), default=0)


def _samples(entries: list[TensorEntry]) -> list[list[TensorEntry]]:
    """Tensors of all sizes, as far as they fit into a sample, one at least; and others like them.

    Small ones matter too: finding a tensor takes as long as reading some hundred kilobytes of it.
    """
    by_size = sorted(entries, key=lambda entry: -entry.num_bytes)
    every = max(1, math.ceil(sum(entry.num_bytes for entry in entries) / SAMPLE_BYTES))
    return [by_size[first::every] for first in range(min(every, len(by_size), MAX_SAMPLES))] or [[]]


def _read_seconds(archive: Archive, entries: list[TensorEntry]) -> float:
    """To read all of them, from samples that are each read once: what was just read is in the processor's cache."""
    samples = _samples(entries)
    if len(samples) < MIN_TRIALS:
        return _seconds(lambda: [len(archive.store.read(entry)) for entry in entries])
    start = time.perf_counter()
    num_bytes = sum(len(archive.store.read(entry)) for sample in samples for entry in sample)
    return (time.perf_counter() - start) / max(1, num_bytes) * sum(entry.num_bytes for entry in entries)


def _write_seconds(folder: Path, num_bytes: int) -> float:
    """To write a file of this size and to have it on the disk."""
    size = min(num_bytes, SAMPLE_BYTES)
    if size == 0:
        return 0.0
    sample = bytes(size)

    def write() -> None:
        # as `replace_file` does, but in a file that has no name: no writer's cleaning sees it, and no killed process
        # leaves it behind
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(sample)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)

    return _seconds(write) * num_bytes / size
