"""Which exchanges were decided, which of them are in the model, and which of them a restart has lost."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

from collab_core.gossip.encounter import Change
from collab_core.gossip.journal import MAX_REMEMBERED, Entry, Journal

logger = logging.getLogger(__name__)


class Ledger:
    """Two threads look at it: the network's decides and notes, the one that trains takes what was decided.

    Args:
        journal: on disk.
        kept: exchanges that are in the model we begin with.
    """

    def __init__(self, journal: Journal, kept: Iterable[str]) -> None:
        self._journal = journal
        self._kept = dict.fromkeys(kept)
        """In the model."""
        self._committed = dict.fromkeys(self._kept)
        """Decided. Those that are not in the model yet are among the changes."""
        self._changes: deque[Change] = deque()

    def __contains__(self, exchange: str) -> bool:
        """Whether it was committed, as far as the model we have now goes back."""
        return exchange in self._committed

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    def commit(self, change: Change) -> None:
        """From here on, whoever asks is told so."""
        self._committed[change.exchange] = None
        _shorten(self._committed)
        self._changes.append(change)

    def take(self) -> list[Change]:
        """What was decided since the last call. The caller takes all of it into the model before anything else."""
        found = []
        while self._changes:
            found.append(self._changes.popleft())
        self._kept |= dict.fromkeys(change.exchange for change in found)
        _shorten(self._kept)
        return found

    @property
    def kept(self) -> list[str]:
        """Exchanges that are in the model, for its backup."""
        return list(self._kept)

    async def note(self, exchange: str, partner: str) -> None:
        """On disk, before the partner is told."""
        await self._write(lambda: self._journal.add(exchange, partner))

    async def forget(self, exchange: str) -> None:
        """It came to nothing."""
        await self._write(lambda: self._journal.remove(exchange))

    async def _write(self, action: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(action)
        except OSError as error:  # a full disk must not stop training; all that is lost is what a restart can tell
            logger.warning("The journal of exchanges cannot be written: %s", error)

    def lost(self) -> list[Entry]:
        """Exchanges of an earlier life that are not in the model we began with; told once."""
        try:
            return self._journal.reconcile(self._kept)
        except OSError as error:
            logger.warning("The journal of exchanges cannot be written: %s", error)
            return []


def _shorten(exchanges: dict[str, None]) -> None:
    for exchange in list(exchanges)[:-MAX_REMEMBERED]:
        del exchanges[exchange]
