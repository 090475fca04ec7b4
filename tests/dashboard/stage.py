"""A run without machines: peers that only have a signed record, heard of as real ones are, and a real server."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.utils.timed_storage import get_dht_time

from collab_core.identity import Identity
from collab_core.run import Prepared, RunFolder, fingerprint, grant
from collab_core.run.invite import Invite
from collab_core.swarm.directory import Directory
from collab_core.swarm.news import Note
from collab_core.swarm.reactor import Reactor
from collab_core.swarm.record import PeerRecord, seal
from collab_core.telemetry import EventLog
from collab_dashboard import Dashboard, Place, RunWatch, TaskFacts

ROOT = "ab" * 32
LIFETIME_S = 60.0


@dataclass
class Extra:
    """A peer of the stage."""

    name: str
    role: str = "trainer"
    identity: Identity = field(default_factory=lambda: Identity(Ed25519PrivateKey.generate()))
    facts: dict[str, Any] = field(default_factory=dict)


class Stage:
    """One run and whoever is in it.

    Args:
        folder: for the run's files and the log.
        more: lines of the run file.
    """

    def __init__(self, folder: Path, name: str = "staged", more: str = "") -> None:
        run = RunFolder.create(folder / name, f'name = "{name}"\n{more}')
        signed = run.signed_manifest(lambda *_: Prepared(ROOT))
        self.key = run.key()
        self.manifest = signed.open(None, fingerprint(signed.claimed_organiser))
        self.reactor = Reactor()
        self.log = folder / f"{name}.jsonl"
        self.events = EventLog(self.log)
        me = Identity(Ed25519PrivateKey.generate())
        record = PeerRecord(
            name="guest", role="observer", mode="client", version="0", phase="joining", time=time.time()
        )
        self.directory = Directory(me, record, self.reactor, self.events)
        self.directory.run_hash = self.manifest.run_hash
        address = f"/ip4/127.0.0.1/tcp/1/p2p/{me.peer_id}"
        print_of_key = fingerprint(bytes.fromhex(self.manifest.organiser))
        self.invite = Invite(run_hash=self.manifest.run_hash, fingerprint=print_of_key, initial_peers=(address,))
        self.extras: list[Extra] = []

    def add(self, name: str, role: str = "trainer", **facts: Any) -> Extra:
        extra = Extra(name, role, facts=facts)
        self.extras.append(extra)
        return extra

    def speak(self, *extras: Extra, **facts: Any) -> None:
        """Everyone, or some, publish a record; it is checked as one from the network is."""
        expires = get_dht_time() + LIFETIME_S
        notes = []
        for extra in extras or self.extras:
            extra.facts |= facts
            granted = grant(self.key, self.manifest.run_hash, extra.identity.peer_id) if extra.role == "aux" else ""
            told = {"mode": "direct", "phase": "working", "version": "0.1.0", "epoch": 1, "root": ROOT, **extra.facts}
            fields = {"name": extra.name, "role": extra.role, "time": time.time(), "grant": granted, **told}
            record = PeerRecord.model_validate(fields)
            value = seal(record, self.manifest.run_hash, extra.identity, expires)
            notes.append(Note(extra.identity.peer_id, expires, value))
        self.directory._take(notes)

    def watch(self, **facts: Any) -> RunWatch:
        watch = RunWatch(
            manifest=self.manifest,
            invite=lambda: self.invite.encode(),
            peers=self.directory.peers,
            facts=TaskFacts(**facts),
        )
        self.events.listen(watch.hear)
        return watch

    def close(self) -> None:
        self.events.close()
        self.reactor.close()


def serve(*watches: RunWatch, is_local: bool = True) -> Dashboard:
    """At any free port of this machine."""
    return Dashboard(watches, Place("127.0.0.1", 0).bind("--listen"), is_local=is_local)


@dataclass(frozen=True)
class Answer:
    """What a server said."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def get(url: str, **headers: str) -> Answer:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return Answer(reply.status, dict(reply.headers), reply.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, dict(error.headers), error.read())


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
