"""What a peer gave to a run, over all of its visits: kept beside its key, because it belongs to who has the key."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collab_core.files import replace_file

logger = logging.getLogger(__name__)

SAVE_PERIOD_S = 2.0  # a peer that is killed loses no more than this of its credit
MAX_COUNT = 2**53 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """Samples in finished epochs, how many epochs they were in, and the seconds it took."""

    samples: int = 0
    epochs: int = 0
    seconds: int = 0

    def __add__(self, other: Contribution) -> Contribution:
        return Contribution(
            samples=self.samples + other.samples,
            epochs=self.epochs + other.epochs,
            seconds=self.seconds + other.seconds,
        )


class ContributionBook:
    """One peer's account in one run.

    Args:
        identity: the key file; the account is kept beside it, with those of other runs.
        run_id: of the run.
    """

    def __init__(self, identity: Path, run_id: str) -> None:
        self._path, self._run_id = identity.with_suffix(".contribution.json"), run_id
        self.before = _read(self._path).get(run_id, Contribution())
        """Until we came this time."""
        self._samples, self._epochs = 0, 0
        self._came = time.monotonic()
        self._saved = self._came
        self._has_failed = False

    @property
    def now(self) -> Contribution:
        """Since we came this time."""
        return Contribution(samples=self._samples, epochs=self._epochs, seconds=int(time.monotonic() - self._came))

    @property
    def total(self) -> Contribution:
        return self.before + self.now

    def remember(self, samples: int) -> None:
        """A backup knows of so many samples; take its word if it knows of more."""
        if samples > self.before.samples:
            self.before = Contribution(samples=samples, epochs=self.before.epochs, seconds=self.before.seconds)

    def add(self, samples: int) -> None:
        """An epoch is finished, and so many samples in it were ours."""
        if samples > 0:
            self._samples += samples
            self._epochs += 1
        if time.monotonic() - self._saved >= SAVE_PERIOD_S:
            self.save()

    def save(self) -> None:
        """Keep it. A disk that is full costs the credit, never the run."""
        self._saved = time.monotonic()
        accounts = {**_read(self._path), self._run_id: self.total}
        content = {run_id: asdict(account) for run_id, account in accounts.items()}
        try:
            replace_file(self._path, json.dumps(content, indent=1).encode())
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("The contribution cannot be kept: %s", error)


def _read(path: Path) -> dict[str, Contribution]:
    """All accounts of a key; a damaged file is worth as much as none."""
    try:
        content = json.loads(path.read_bytes())
        return {str(run_id): _account(fields) for run_id, fields in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _account(fields: dict[str, Any]) -> Contribution:
    account = Contribution(**fields)
    if not all(type(count) is int and 0 <= count <= MAX_COUNT for count in asdict(account).values()):
        raise ValueError("not counts")
    return account
