"""Error feedback: what lossy codecs lost in finished rounds, kept at home to be sent with the next one."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import torch
from blake3 import blake3

from collab_core.averaging.group import Part
from collab_core.averaging.norms import squared_norm
from collab_core.files import replace_file

SLIGHT = 0.01  # what is owed, beside a contribution: then it is not worth a look at every value


class ErrorFeedback:
    """One residue per value, in units of samples.

    A sender's loss counts as much as its samples do, a reducer's as much as everyone's. In these units both are the
    same thing, so it does not matter whether we send a part in the next round or reduce it.

    Args:
        num_values: of the vector.
        decay: how much of a loss is kept for the next round; 1 is all of it.
    """

    def __init__(self, num_values: int, decay: float = 1.0) -> None:
        self._num_values, self._decay = num_values, decay
        self._spare: torch.Tensor | None = None
        self.residue: torch.Tensor | None = None
        self._owed: float | None = None
        """The norm of the residue, if it is known."""
        self._lock = threading.Lock()  # a round ends while the residue is being saved

    def norm(self, values: torch.Tensor, weight: float, scratch: torch.Tensor) -> float:
        """The norm of a contribution with what is owed, as it would be encoded now, or up to 2 % more than that.

        A group waits for it, and most codecs owe little: then the sum of both norms does, without a look at what is
        owed.

        Args:
            scratch: holds a block of the values.
        """
        bounds = range(0, self._num_values, len(scratch))
        blocks = [Part(start, min(start + len(scratch), self._num_values)) for start in bounds]
        if self.residue is not None and self._owed is None:
            self._owed = math.sqrt(sum(squared_norm(self.residue[part.start : part.stop]) for part in blocks))
        own = math.sqrt(sum(squared_norm(values[part.start : part.stop]) for part in blocks))
        owed = 0.0 if self._owed is None else self._owed / weight
        if owed <= SLIGHT * own:
            return own + owed
        squares = 0.0
        for part in blocks:
            block = self.with_residue(values[part.start : part.stop], part, weight, scratch[: part.num_values])
            squares += squared_norm(block)
        return math.sqrt(squares)

    def with_residue(self, values: torch.Tensor, part: Part, weight: float, out: torch.Tensor) -> torch.Tensor:
        """The values and what was lost of this part before; `weight` is what the values will count."""
        residue = self.residue
        if residue is None:
            return values
        return torch.add(values, residue[part.start : part.stop], alpha=1 / weight, out=out)

    def draft(self) -> Draft:
        """What a round would change. Only a round that arrived whole commits its draft."""
        lost, self._spare = self._spare, None  # memory that is warm already; a failed round's is not used again
        return Draft(self, torch.empty(self._num_values) if lost is None else lost)

    def save(self, path: Path, run_id: str) -> None:
        """We take part in no further round: keep it on disk, for the day this peer comes back."""
        with self._lock:
            if self.residue is None:
                return
            data = self.residue.numpy().tobytes()
        replace_file(path, [_digest(data, run_id), data])

    def restore(self, path: Path, run_id: str) -> None:
        """Take up what was saved, if it is of this run and whole; nothing is lost but precision if it is not.

        It is gone from the disk then: whoever is killed after further rounds must not send once more what they paid.
        """
        try:
            content = path.read_bytes()
            path.unlink()
        except OSError:
            return
        digest, data = content[:32], content[32:]
        if len(data) == 4 * self._num_values and digest == _digest(data, run_id):
            self.residue, self._owed = torch.frombuffer(bytearray(data), dtype=torch.float32), None

    def forget(self) -> None:
        """Nothing is owed any more."""
        with self._lock:
            self.residue = self._owed = None

    def store(self, lost: torch.Tensor, parts: list[Part], squares: float) -> None:
        """Take over what was lost of these parts; of the others, the residue stays.

        Args:
            lost: the whole vector.
            parts: where something was lost.
            squares: the sum of the squares of all that was lost.
        """
        with self._lock:
            self._store(lost, parts, squares)

    def _store(self, lost: torch.Tensor, parts: list[Part], squares: float) -> None:
        if parts:
            residue = torch.zeros(self._num_values) if self.residue is None else self.residue
            self._owed = None
            if sum(part.num_values for part in parts) == self._num_values:
                residue, lost = lost, residue
                self._owed = math.sqrt(squares) * self._decay
            else:
                for part in parts:
                    residue[part.start : part.stop] = lost[part.start : part.stop]
            if self._decay != 1:
                for part in parts:
                    residue[part.start : part.stop].mul_(self._decay)
            self.residue = residue
        self._spare = lost


def _digest(data: bytes, run_id: str) -> bytes:
    return blake3(data, key=blake3(run_id.encode()).digest()).digest()


class Draft:
    """The error feedback of one round, as it would be if the round succeeded."""

    def __init__(self, feedback: ErrorFeedback, lost: torch.Tensor) -> None:
        self._feedback, self._lost = feedback, lost
        self._parts: list[Part] = []
        self._squares = 0.0

    # --- of what we send ---

    def with_residue(self, values: torch.Tensor, part: Part, weight: float, out: torch.Tensor) -> torch.Tensor:
        """The values and what was lost of this part before; `weight` is what the values will count."""
        return self._feedback.with_residue(values, part, weight, out)

    def note(self, part: Part, values: torch.Tensor, decoded: torch.Tensor, weight: float) -> None:
        """Remember what the codec lost of a part."""
        self._note(part, torch.sub(values, decoded, out=self.sum(part)).mul_(weight))

    # --- of what we reduce ---

    def begin_sum(self, part: Part, own: torch.Tensor | None, weight: float) -> None:
        """Begin a weighted sum with what was lost before, and with our own contribution if there is one."""
        total, residue = self.sum(part), self._residue(part)
        if own is None:
            total.zero_() if residue is None else total.copy_(residue)
        elif residue is None:
            torch.mul(own, weight, out=total)
        else:
            torch.add(residue, own, alpha=weight, out=total)

    def sum(self, part: Part) -> torch.Tensor:
        return self._lost[part.start : part.stop]

    def end_sum(self, part: Part, decoded: torch.Tensor, weight: float) -> None:
        """Of the sum stays what its mean lost when it was encoded."""
        self._note(part, self.sum(part).sub_(decoded, alpha=weight))

    def _residue(self, part: Part) -> torch.Tensor | None:
        residue = self._feedback.residue
        return None if residue is None else residue[part.start : part.stop]

    def _note(self, part: Part, lost: torch.Tensor) -> None:
        self._squares += squared_norm(lost)  # now, while it is in the processor's cache
        self._parts.append(part)

    def commit(self) -> None:
        self._feedback.store(self._lost, self._parts, self._squares)
