"""The exact averager: one flat vector, the same bytes for everyone, all parts or nothing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind reads the RPCs' hints and knows only typing's

import torch
from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2

from collab_core.averaging.buffers import Buffers
from collab_core.averaging.codecs import CODECS
from collab_core.averaging.faults import FailAt
from collab_core.averaging.feedback import Draft, ErrorFeedback
from collab_core.averaging.group import GROUP_ID_BYTES, MAX_LOST, MAX_RATE, Group, Member, leader_order, round_key
from collab_core.averaging.link import Bandwidth, Link
from collab_core.averaging.matchmaking import Behind, Call, Matchmaking, NoGroup
from collab_core.averaging.reducer import Tools
from collab_core.averaging.reduction import Reduction, RoundFailed
from collab_core.averaging.wire import BadFrame, Frame, Kind, PartStream, serve_streams
from collab_core.run.settings import RunSettings
from collab_core.swarm import Peer, Swarm

LEAVING_GRACE_S = 4.0  # Ctrl-C in the middle of a round: finish it if that is quick
STOP_POLL_S = 0.25
MIN_BYTES_PER_SECOND = 128 * 1024  # slower than this, a round is not worth waiting for
MAX_TOLD = 1000
SERVING_S = 1.0
GROUP_WAIT_S = 3.0  # a member's first part may overtake the leader's message that tells us of the group


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRequest:
    """What a peer brings to a round."""

    epoch: int
    parent_root: str
    contribution: torch.Tensor | None = None
    """Flat float32 on the CPU, read only; None to listen or to reduce for others."""
    weight: float = 0.0
    """Samples behind the contribution."""
    wants_average: bool = True
    """Receive the average; an auxiliary without state does not need it."""
    companions: Callable[[], list[Peer]]
    """Everyone else who should be in this round, as far as we know now."""
    latecomers: Callable[[], set[str]] = set
    """Peers that are on their way to this epoch."""
    should_stop: Callable[[], bool]
    """Asked again and again while we look for a group."""
    is_patient: bool = False
    """Wait for the first trainer as long as it takes."""
    rank: Callable[[Peer], int] = lambda peer: 0
    """Who should lead: the lowest rank. Our own is `own_rank`."""
    own_rank: int = 0
    lost: frozenset[str] = frozenset()
    """Reducers that were lost in earlier attempts at this epoch."""


@dataclass(kw_only=True, slots=True)
class RoundOutcome:
    """What came of a round: who took part, what it cost, what was lost."""

    average: torch.Tensor | None = None
    """None unless every part arrived."""
    is_behind: bool = False
    """Somebody finished this epoch without us."""
    failure: str = ""
    group: frozenset[str] = frozenset()
    """Everyone in the round, also those who sent nothing."""
    members: dict[str, float] = field(default_factory=dict)
    """Who contributed, with which weight."""
    refused: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    matchmaking_s: float = 0.0
    reducing_s: float = 0.0
    share: float = 0.0
    """The part of the vector that this peer reduced."""
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def weight(self) -> float:
        return sum(self.members.values())


class ExactAverager(ServicerBase):  # type: ignore[misc]
    """Averages one flat vector with whoever is at the same epoch of the same history.

    It finds its group with hivemind's messages over hivemind's transport, but is not a `DecentralizedAverager`: that
    class forks a process, shares memory with it, averages tensor by tensor, sends re-quantised differences and lets
    peers of any epoch into a group. What is kept of it is the butterfly: every reachable peer reduces a share for all.
    """

    def __init__(
        self,
        swarm: Swarm,
        settings: RunSettings,
        *,
        layout_hash: bytes,
        num_values: int,
        bandwidth: Bandwidth | None = None,
        fail_at: FailAt | None = None,
    ) -> None:
        self._swarm = swarm
        self._layout_hash, self.num_values = layout_hash, num_values
        self._codec = CODECS[settings.strategy.codec]
        self._weight_cap = float(settings.limits.max_samples_per_peer)
        self._timeout_s = settings.strategy.averaging_timeout_s
        self._namespace = swarm.run_hash.hex()
        self._parts_name = f"{self._namespace}::parts"
        self._feedback = ErrorFeedback(num_values)
        self._buffers = Buffers(num_values)
        self._link = Link(bandwidth)
        # one, busy: it keeps its scratch space warm, and the arithmetic is quicker than any link
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="collab-average")
        self._fail_at = fail_at
        self._rounds: dict[bytes, Reduction] = {}
        self._told: set[tuple[str, str]] = set()
        self._registered = asyncio.Condition()
        self._draining: set[asyncio.Task[None]] = set()
        self._matchmaking = Matchmaking(
            me=swarm.peer_id,
            stub_of=self._stub_of,
            weight_cap=self._weight_cap,
            matchmaking_time_s=settings.strategy.matchmaking_time_s,
            on_refused=self._on_refused,
        )
        swarm.reactor.run(self._listen(), timeout_s=10)

    async def _listen(self) -> None:
        await self.add_p2p_handlers(self._swarm.p2p, namespace=self._namespace)
        await serve_streams(self._swarm.p2p, self._parts_name, self._buffers, self._link, self._serve_parts)

    def _stub_of(self, peer_id: str) -> Any:
        return type(self).get_stub(self._swarm.p2p, PeerID.from_base58(peer_id), namespace=self._namespace)

    async def _connect(self, peer_id: str) -> PartStream:
        return await PartStream.open(self._swarm.p2p, peer_id, self._parts_name, self._buffers, self._link)

    def _on_refused(self, peer_id: str, reason: str) -> None:
        if (peer_id, reason) in self._told or len(self._told) > MAX_TOLD:
            return  # whoever knocks all day long is named once per epoch
        self._told.add((peer_id, reason))
        self._swarm.events.write("refused", peer_id=peer_id, name=self._swarm.name_of(peer_id), reason=reason)

    # --- for the peer's own thread ---

    def set_epoch(self, epoch: int) -> None:
        """Tell those who wait for an earlier epoch that it is over."""
        self._swarm.reactor.spawn(self._set_epoch(epoch))

    async def _set_epoch(self, epoch: int) -> None:
        self._told.clear()
        self._matchmaking.set_epoch(epoch)

    def is_awaited(self, epoch: int, parent_root: str) -> bool:
        """Whether somebody already asked us to lead the round of this epoch."""
        return self._matchmaking.is_awaited(round_key(self._layout_hash, epoch, parent_root))

    def round(self, request: RoundRequest, stop: threading.Event) -> RoundOutcome:
        """Find a group and average in it. Never raises for what others do: the outcome tells.

        Once `stop` is set a round under way gets a few seconds to finish, then it is left.
        """
        future = self._swarm.reactor.spawn(self._round(request))
        grace = 0.0
        while grace < LEAVING_GRACE_S:
            done, _ = concurrent.futures.wait([future], timeout=STOP_POLL_S)
            if done:
                return future.result()
            grace += STOP_POLL_S if stop.is_set() else 0.0
        future.cancel()
        return RoundOutcome(failure="left in the middle of the round")

    def give_back(self, average: torch.Tensor) -> None:
        """Nobody looks at this average of an earlier round any more: its memory may be used again."""
        self._buffers.give_back_vector(average)

    async def _round(self, request: RoundRequest) -> RoundOutcome:
        outcome = RoundOutcome()
        start = time.monotonic()
        try:
            group = await self._matchmaking.find_group(self._call(request))
        except Behind:
            outcome.is_behind, outcome.failure = True, "somebody finished this epoch already"
            return outcome
        except NoGroup as error:
            outcome.failure = str(error)
            return outcome
        finally:
            outcome.matchmaking_s = time.monotonic() - start
        start = time.monotonic()
        draft = self._feedback.draft()
        reduction = self._reduction(group, request, draft)
        self._rounds[group.group_id] = reduction
        async with self._registered:
            self._registered.notify_all()
        try:
            average = await asyncio.wait_for(reduction.run(), self._deadline_s())
            draft.commit()
            outcome.average = average if request.wants_average else None
            if not request.wants_average:  # all we do is to serve, so that is what the outcome should tell
                await reduction.served(SERVING_S)
                self.give_back(average)
        except RoundFailed as error:
            outcome.failure = str(error)
        except asyncio.TimeoutError:
            outcome.failure = f"not finished within {self._deadline_s():.0f} s"
        finally:
            self._matchmaking.finished()
            drain = asyncio.create_task(self._drain(group.group_id, reduction))
            self._draining.add(drain)
            drain.add_done_callback(self._draining.discard)
            outcome.reducing_s = time.monotonic() - start
            outcome.group, outcome.members = frozenset(group.peer_ids), group.senders
            outcome.refused, outcome.lost = dict(reduction.refused), dict(reduction.lost)
            outcome.bytes_sent, outcome.bytes_received = reduction.bytes_sent, reduction.bytes_received
            outcome.share = reduction.share
            self._link.end_round()
        return outcome

    def _deadline_s(self) -> float:
        """How long a whole round may take: nobody holds it up by sending a little now and then."""
        return 2 * self._timeout_s + self._codec.encoded_bytes(self.num_values) / MIN_BYTES_PER_SECOND

    def finish(self, timeout_s: float) -> None:
        """Give those who still fetch their averages from us a moment before we leave."""

        async def drained() -> None:
            if self._draining:
                await asyncio.wait(set(self._draining), timeout=timeout_s)

        concurrent.futures.wait([self._swarm.reactor.spawn(drained())], timeout=timeout_s + 1)

    def _call(self, request: RoundRequest) -> Call:
        key = round_key(self._layout_hash, request.epoch, request.parent_root)
        bandwidth = self._link.bandwidth
        me = Member(
            peer_id=self._swarm.peer_id,
            epoch=request.epoch,
            weight=request.weight,
            can_reduce=self._swarm.record.is_reachable,
            wants_average=request.wants_average,
            upload=min(bandwidth.upload, MAX_RATE),
            download=min(bandwidth.download, MAX_RATE),
            lost=sorted(request.lost)[:MAX_LOST],
        )

        def leaders() -> list[str]:
            ranks = {peer.peer_id: request.rank(peer) for peer in request.companions() if peer.record.is_reachable}
            if me.can_reduce:
                ranks[me.peer_id] = request.own_rank
            return leader_order(key, ranks)

        def expected() -> set[str]:
            return {peer.peer_id for peer in request.companions()}

        return Call(key, me, leaders, expected, request.latecomers, request.should_stop, request.is_patient)

    def _reduction(self, group: Group, request: RoundRequest, draft: Draft) -> Reduction:
        return Reduction(
            me=self._swarm.peer_id,
            group=group,
            contribution=request.contribution,
            num_values=self.num_values,
            epoch=request.epoch,
            tools=Tools(self._codec, draft, self._buffers, self._thread),
            weight_cap=self._weight_cap,
            timeout_s=self._timeout_s,
            connect=self._connect,
            on_refused=self._on_refused,
            fail_at=self._fail_at,
        )

    async def _drain(self, group_id: bytes, reduction: Reduction) -> None:
        """Others may still need our part; the next epoch does not wait for them."""
        try:
            await reduction.drain()
        finally:
            if self._rounds.get(group_id) is reduction:
                del self._rounds[group_id]

    # --- for others ---

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Another peer asks us to lead its round."""
        async for message in self._matchmaking.serve_join(request, context.remote_id.to_base58()):
            yield message

    async def _serve_parts(self, stream: PartStream, remote: str) -> None:
        """A member of our group sends its parts and waits for the averages."""
        try:
            hello = await asyncio.wait_for(stream.receive(GROUP_ID_BYTES), self._timeout_s)
        except (asyncio.TimeoutError, BadFrame):
            return
        if hello is None or hello.kind is not Kind.HELLO:
            return
        reduction = await self._find_round(bytes(hello.payload))
        if reduction is None:
            await stream.send(Frame(Kind.NO_GROUP))
            await stream.finish(GROUP_WAIT_S)
        else:
            await reduction.serve(stream, remote)

    async def _find_round(self, group_id: bytes) -> Reduction | None:
        try:
            async with self._registered:
                await asyncio.wait_for(self._registered.wait_for(lambda: group_id in self._rounds), GROUP_WAIT_S)
        except asyncio.TimeoutError:
            return None
        return self._rounds.get(group_id)
