"""Where each parameter and buffer of a model lies in the flat vectors that peers average and keep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import msgpack
import torch
from blake3 import blake3

from collab_core.errors import Code, TaskError
from collab_core.update import Segment


@dataclass(frozen=True, slots=True)
class Fragment:
    """Neighbouring tensors that are averaged in one round."""

    start: int
    stop: int
    num_params: int
    """How many of its values are parameters; the rest are buffers."""
    names: tuple[str, ...]
    segments: tuple[Segment, ...]
    """Its parameters, counted from its start."""

    @property
    def num_values(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Parameters first, then the floating buffers: they travel together in the averaged vector."""

    params: tuple[tuple[str, tuple[int, ...]], ...]
    buffers: tuple[tuple[str, tuple[int, ...]], ...]
    frozen: tuple[str, ...] = ()
    """Parameters that nobody trains: they stay as they are, whatever the optimizer does to others."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> Layout:
        """Named parameters (tied ones once) and floating buffers that belong to the state."""
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32:
                raise TaskError(
                    Code.UNSUPPORTED_MODEL,
                    f"The parameter {name} is {str(parameter.dtype).removeprefix('torch.')}.",
                    fix="Build the model in float32; training may still use bf16 where the device has it.",
                )
        return cls(
            tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters()),
            tuple((name, tuple(buffer.shape)) for name, buffer in floating_buffers(model).items()),
            tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad),
        )

    @cached_property
    def num_params(self) -> int:
        return sum(_size(shape) for _, shape in self.params)

    @cached_property
    def num_values(self) -> int:
        """Length of the averaged vector."""
        return self.num_params + sum(_size(shape) for _, shape in self.buffers)

    @cached_property
    def hash(self) -> bytes:
        parts: list[object] = [[[name, list(shape)] for name, shape in part] for part in (self.params, self.buffers)]
        parts += [list(self.frozen)] if self.frozen else []
        return blake3(b"collab layout v1\0" + msgpack.packb(parts)).digest()

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Parameters for the optimizer; matrices decay, biases and norms do not, nor what is frozen."""
        segments, start, frozen = [], 0, set(self.frozen)
        for name, shape in self.params:
            segments.append(Segment(name, start, _size(shape), decays=len(shape) >= 2 and name not in frozen))
            start += _size(shape)
        return tuple(segments)

    def fragments(self, number: int) -> tuple[Fragment, ...]:
        """The vector in so many pieces of about the same size, cut between tensors; buffers go with the last one.

        Fewer, if there are not so many parameters.
        """
        cuts = [0]
        for index, segment in enumerate(self.segments[1:], start=1):
            missing, left = number - len(cuts), len(self.segments) - index
            if missing and (segment.start >= len(cuts) * self.num_params / number or left <= missing):
                cuts.append(index)
        return tuple(
            self._fragment(first, last) for first, last in zip(cuts, [*cuts[1:], len(self.segments)], strict=True)
        )

    def _fragment(self, first: int, last: int) -> Fragment:
        segments = self.segments[first:last]
        start = segments[0].start if segments else 0
        names = tuple(segment.name for segment in segments)
        stop = segments[-1].stop if segments else 0
        num_params = stop - start
        if last == len(self.segments):
            names, stop = names + tuple(name for name, _ in self.buffers), self.num_values
        shifted = tuple(replace(segment, start=segment.start - start) for segment in segments)
        return Fragment(start, stop, num_params, names, shifted)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter (and buffer, if `flat` is long enough to hold them) as a view into a flat vector."""
        views, start = {}, 0
        named = self.params if flat.numel() == self.num_params and self.buffers else self.params + self.buffers
        for name, shape in named:
            views[name] = flat[start : start + _size(shape)].view(shape)
            start += _size(shape)
        return views

    @torch.no_grad()
    def read(self, model: torch.nn.Module) -> torch.Tensor:
        """Parameters and buffers of a model as one flat vector on the CPU."""
        values = {**dict(model.named_parameters()), **floating_buffers(model)}
        flat = torch.empty(self.num_values)
        for name, view in self.views(flat).items():
            view.copy_(values[name])
        return flat

    @torch.no_grad()
    def write(self, model: torch.nn.Module, flat: torch.Tensor) -> None:
        """Put a flat vector into a model, wherever the model lives."""
        values = {**dict(model.named_parameters()), **floating_buffers(model)}
        for name, view in self.views(flat).items():
            values[name].copy_(view)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def floating_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers such as running means, which belong to the state. Those outside `state_dict` are constants."""
    kept = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in kept and buffer.is_floating_point()}
