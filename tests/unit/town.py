"""Others, as their signed records tell, for tests that need no network."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hivemind.utils.timed_storage import get_dht_time

from collab_core.swarm import Identity, PeerRecord
from collab_core.swarm.directory import Directory
from collab_core.swarm.news import Note
from collab_core.swarm.reactor import Reactor
from collab_core.swarm.record import seal
from collab_core.telemetry import EventLog


class Town:
    """A peer's real directory, without a network: we hand it the signed records that others would send."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, list[dict[str, Any]]()
        self._identities: dict[str, Identity] = {}
        self._expires = get_dht_time() + 10
        self._events = EventLog(folder / "events.jsonl")
        self._events.listen(self.log.append)
        self.directory = Directory(self.identity("me"), record("me"), Reactor(), self._events)

    def identity(self, name: str) -> Identity:
        if name not in self._identities:
            self._identities[name] = Identity.load_or_create(self.folder / f"{name}.key")
        return self._identities[name]

    def id_of(self, name: str) -> str:
        return self.identity(name).peer_id

    def names_of(self, peer_ids: Iterable[str]) -> set[str]:
        names = {identity.peer_id: name for name, identity in self._identities.items()}
        return {names[peer_id] for peer_id in peer_ids}

    def hears(self, name: str, **changes: Any) -> None:
        """A record arrives."""
        self._expires += 0.001
        sealed = seal(record(name, **changes), self.directory.run_hash, self.identity(name), self._expires)
        self.directory._take([Note(self.id_of(name), self._expires, sealed)])

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.log if event["event"] == kind]

    def close(self) -> None:
        self.directory.reactor.close()
        self._events.close()


def record(name: str, **changes: Any) -> PeerRecord:
    fields = {"name": name, "role": "trainer", "mode": "direct", "version": "1", "phase": "working", "time": 1.0}
    return PeerRecord.model_validate({**fields, **changes})
