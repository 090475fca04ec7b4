"""A swarm in one process: the directory, the matchmaking and the reduction are the real ones, only the network is not.

A message costs what it would cost to serialise, a stream of parts is a pair of sockets. There is no daemon, no DHT and
no encryption, so what is counted is what our own code does: bytes, messages and streams of every peer, and CPU seconds
of all of them together. Seconds on the clock mean nothing here, as all peers share one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hivemind.p2p import PeerID

from benchmarks.record import Entry
from collab_core.averaging import averager, matchmaking, reduction
from collab_core.averaging.averager import ExactAverager
from collab_core.averaging.round import RoundRequest
from collab_core.identity import Identity
from collab_core.run import RunSettings
from collab_core.run.settings import StrategySettings
from collab_core.swarm import directory
from collab_core.swarm.directory import NEWS_PERIOD_PER_PEER_S, NEWS_PERIOD_S, Directory
from collab_core.swarm.reactor import Reactor
from collab_core.swarm.record import PeerRecord
from collab_core.telemetry import EventLog

PATIENCE_S = 600.0  # one thread for everyone: whoever is slow here is not gone
STREAM_THREADS = 4 * 16  # a peer has up to 16 reducers; each stream has a thread per direction at either end
NUM_TICKS = 2  # until everybody knows everybody
RUN_HASH = bytes(range(32))
ROOT = "00" * 32


@dataclass
class MemoryNetwork:
    """One peer's end of a network that is nothing but function calls; stands in for hivemind's `P2P`."""

    peer_id: str
    ends: dict[str, MemoryNetwork]
    messages: int = 0
    message_bytes: int = 0
    streams: int = 0
    """Open at its end in one round, whoever opened them."""
    _rpcs: dict[str, tuple[Callable[..., Any], Any]] = field(default_factory=dict)
    _streams: dict[str, Callable[..., Any]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def _sent(self, message: Any) -> bytes:
        data: bytes = message.SerializeToString()
        self.messages += 1
        self.message_bytes += len(data)
        return data

    async def add_protobuf_handler(self, name: str, handler: Callable[..., Any], request: Any, **_: Any) -> None:
        self._rpcs[name] = handler, request

    def _reach(self, peer_id: Any, name: str, message: Any) -> tuple[MemoryNetwork, Any]:
        other = self.ends[peer_id.to_base58()]
        handler, request = other._rpcs[name]
        context = SimpleNamespace(remote_id=PeerID.from_base58(self.peer_id))
        return other, handler(request.FromString(self._sent(message)), context)

    async def call_protobuf_handler(self, peer_id: Any, name: str, message: Any, kind: Any) -> Any:
        other, answer = self._reach(peer_id, name, message)
        return kind.FromString(other._sent(await answer))

    async def iterate_protobuf_handler(self, peer_id: Any, name: str, message: Any, kind: Any) -> AsyncIterator[Any]:
        other, answers = self._reach(peer_id, name, message)

        async def arriving() -> AsyncIterator[Any]:
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    yield kind.FromString(other._sent(answer))

        return arriving()

    async def add_binary_stream_handler(self, name: str, handler: Callable[..., Any]) -> None:
        self._streams[name] = handler

    async def call_binary_stream_handler(self, peer_id: Any, name: str) -> tuple[None, Any, Any]:
        other = self.ends[peer_id.to_base58()]
        mine, theirs = socket.socketpair()
        self.streams += 1
        other.streams += 1
        caller = SimpleNamespace(peer_id=PeerID.from_base58(self.peer_id))
        serving = asyncio.create_task(other._streams[name](caller, *await asyncio.open_connection(sock=theirs)))
        self._tasks.add(serving)
        serving.add_done_callback(self._tasks.discard)
        return None, *await asyncio.open_connection(sock=mine)


class SimulatedPeer(Directory):
    """A directory and an averager on a memory network."""

    def __init__(self, number: int, folder: Path, reactor: Reactor, ends: dict[str, MemoryNetwork]) -> None:
        identity = Identity.load_or_create(folder / f"{number}.key")
        record = PeerRecord(
            name=f"peer-{number}",
            role="trainer" if number else "aux",
            mode="direct",
            version="0.1.0",
            phase="working",
            time=time.time(),
            root=ROOT,
            parent_root=ROOT,
            addresses=[f"/ip4/192.0.2.{number % 256}/tcp/31337/p2p/{identity.peer_id}"],
        )
        super().__init__(identity, record, reactor, EventLog(folder / f"{number}.jsonl"))
        self.run_hash = RUN_HASH
        self._p2p = self.p2p = ends[self.peer_id] = MemoryNetwork(self.peer_id, ends)

    def open_averager(self, num_values: int) -> None:
        strategy = StrategySettings(matchmaking_time_s=PATIENCE_S, averaging_timeout_s=PATIENCE_S)
        settings = RunSettings(name="growth", strategy=strategy)
        self.averager = ExactAverager(self, settings, layout_hash=bytes(32), lengths=[num_values])  # type: ignore[arg-type]

    async def average(self, values: torch.Tensor | None) -> int:
        """One round, as a trainer or as an auxiliary; bytes of values that were sent."""
        request = RoundRequest(
            epoch=0,
            parent_root=ROOT,
            contribution=values,
            weight=0.0 if values is None else 32.0,
            companions=self.peers,
            should_stop=lambda: False,
            is_patient=values is None,
            rank=self.rank,
            own_rank=0 if values is None else 1,
        )
        outcome = await self.averager._round(request)
        assert outcome.average is not None, outcome.failure
        assert len(outcome.group) == len(self.p2p.ends), f"only {len(outcome.group)} came together"
        await asyncio.gather(*self.averager._draining)
        return outcome.bytes_sent + self.averager._sent_late


class Clock:
    """Time by which records live: here it stands still while the peers, one after the other, do what they would do at
    the same time."""

    now = 1e9

    def __call__(self) -> float:
        return self.now


@contextlib.contextmanager
def one_thread_for_all() -> Iterator[Clock]:
    """Records live by a clock of their own, and nobody is given up because the others' work comes first."""
    clock = Clock()
    changes: list[tuple[Any, str, Any]] = [
        (directory, "get_dht_time", clock),
        (matchmaking, "ANSWER_TIMEOUT_S", PATIENCE_S),
        (reduction, "START_TIMEOUT_S", PATIENCE_S),
        (averager, "GROUP_WAIT_S", PATIENCE_S),
    ]
    before = [getattr(module, name) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield clock
    finally:
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)


def simulate(num_peers: int, num_values: int) -> Entry:
    """One auxiliary and trainers: some rounds of news, then one round of averaging."""
    reactor = Reactor(max_threads=STREAM_THREADS * num_peers)
    ends: dict[str, MemoryNetwork] = {}
    with tempfile.TemporaryDirectory(prefix="collab-bench-") as folder, one_thread_for_all() as clock:
        peers = [SimulatedPeer(number, Path(folder), reactor, ends) for number in range(num_peers)]
        try:
            return {**_news(peers, reactor, clock), **_round(peers, reactor, num_values)}
        finally:
            for peer in peers:
                peer.events.close()
            reactor.close()


def _news(peers: list[SimulatedPeer], reactor: Reactor, clock: Clock) -> Entry:
    """Everybody's record changes, and everybody asks for news: what a second of that costs."""
    period_s = NEWS_PERIOD_S + NEWS_PERIOD_PER_PEER_S * (len(peers) - 1)

    async def listen() -> None:
        for peer in peers:
            await peer._news.listen(peer.p2p)
            peer._contacts = [peers[0].peer_id]

    async def tick(number: int) -> None:
        clock.now += period_s
        for peer in peers:
            peer._record = peer._record.model_copy(update={"epoch_samples": number})
        for peer in peers:
            await peer._hear_news()

    reactor.run(listen())
    for number in range(NUM_TICKS):
        reactor.run(tick(number))
    assert all(len(peer.peers()) == len(peers) - 1 for peer in peers)
    before = {peer.peer_id: peer.p2p.message_bytes for peer in peers}
    cpu_before = time.process_time()
    reactor.run(tick(NUM_TICKS))
    cpu_s = time.process_time() - cpu_before
    sent = [peer.p2p.message_bytes - before[peer.peer_id] for peer in peers]
    return {
        "news_bytes_per_s": sum(sent) / len(peers) / period_s,
        "most_news_bytes_per_s": max(sent) / period_s,
        "news_cpu": cpu_s / len(peers) / period_s,
    }


def _round(peers: list[SimulatedPeer], reactor: Reactor, num_values: int) -> Entry:
    for peer in peers:
        peer.open_averager(num_values)
    before = {peer.peer_id: peer.p2p.message_bytes for peer in peers}
    generator = torch.Generator().manual_seed(0)
    values = [None, *(torch.randn(num_values, generator=generator) for _ in peers[1:])]
    cpu_before = time.process_time()

    async def average() -> list[int]:
        return await asyncio.gather(*(peer.average(own) for peer, own in zip(peers, values, strict=True)))

    value_bytes = reactor.run(average())
    cpu_s = time.process_time() - cpu_before
    control = [peer.p2p.message_bytes - before[peer.peer_id] for peer in peers]
    return {
        "seconds": cpu_s / len(peers),
        "value_bytes": sum(value_bytes) / len(peers),
        "most_value_bytes": max(value_bytes),
        "control_bytes": sum(control) / len(peers),
        "most_control_bytes": max(control),
        "most_streams": max(peer.p2p.streams for peer in peers),
    }
