"""Everyone who looks on gets the same bytes: what changed in a second is put into words once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from collab_dashboard.patch import merge_patch
from collab_dashboard.shapes import Document, RunView
from collab_dashboard.watch import RunWatch

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
SIDE_PERIOD_S = 10.0  # archives lie on disks, or elsewhere
MAX_CLIENTS = 200
MAX_UNSENT = 10  # messages; who is that far behind is let go, and comes back by itself


class Broadcast:
    """Looks at the runs once per second, and tells everyone who listens. Lives in one event loop."""

    def __init__(self, watches: Sequence[RunWatch]) -> None:
        self._watches = watches
        self._clients: set[asyncio.Queue[str | None]] = set()
        self.runs: dict[str, RunView] = {}
        self._document: dict[str, Any] = {}
        self._whole: str | None = None

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        """Look as long as the block lasts."""
        self._look()
        tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._look_aside())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for client in self._clients:
                client.put_nowait(None)

    async def _tick(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + PERIOD_S, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            try:
                self._look()
            except Exception:  # a view is not worth a run: the next look may succeed
                logger.exception("The run cannot be shown")

    def _look(self) -> None:
        self.runs = {view.run_id: view for view in (watch.look() for watch in self._watches)}
        document = Document(time=round(time.time(), 1), runs=self.runs).model_dump(mode="json", exclude_none=True)
        patch, self._document, self._whole = merge_patch(self._document, document), document, None
        if not self._clients:
            return
        message = _json(patch)
        for client in list(self._clients):
            if client.qsize() >= MAX_UNSENT:
                self._clients.discard(client)
                client.put_nowait(None)
            else:
                client.put_nowait(message)

    async def _look_aside(self) -> None:
        """What takes longer than a look should: the loss's floor, and the archive."""
        for watch in self._watches:
            watch.floor = await self._attempt(watch.facts.floor)
        while True:
            for watch in self._watches:
                if watch.archive is not None:
                    watch.archived = await self._attempt(watch.archive) or watch.archived
            await asyncio.sleep(SIDE_PERIOD_S)

    async def _attempt(self, question: Any) -> Any:
        try:
            return await asyncio.to_thread(question)
        except Exception as error:  # noqa: BLE001 - a task's own code, a disk, a stranger: it is just not shown
            logger.info("not known: %r", error)
            return None

    def whole(self) -> str:
        """Everything as it is now; made once, however many ask."""
        if self._whole is None:
            self._whole = _json(self._document)
        return self._whole

    def enter(self) -> asyncio.Queue[str | None] | None:
        """A place among those who listen, beginning with everything; None if it is full. None in it is the end."""
        if len(self._clients) >= MAX_CLIENTS:
            return None
        client: asyncio.Queue[str | None] = asyncio.Queue()
        client.put_nowait(self.whole())
        self._clients.add(client)
        return client

    def leave(self, client: asyncio.Queue[str | None]) -> None:
        self._clients.discard(client)


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
