"""The exact averager: one flat vector, the same bytes for everyone, all parts or nothing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind reads the RPCs' hints and knows only typing's

import torch
from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.proto import averaging_pb2

from collab_core.averaging.faults import FailAt
from collab_core.averaging.group import GROUP_ID_BYTES, MAX_LOST, MAX_RATE, Group, Member, leader_order, round_key
from collab_core.averaging.link import Bandwidth, Link
from collab_core.averaging.matchmaking import Behind, Call, KeptOut, Matchmaking, NoGroup
from collab_core.averaging.norms import NOTABLE, clip_factors
from collab_core.averaging.part_sum import Tools
from collab_core.averaging.quarantine import Quarantine
from collab_core.averaging.reduction import Reduction, RoundFailed
from collab_core.averaging.round import RoundOutcome, RoundRequest
from collab_core.averaging.toolbox import Toolbox
from collab_core.averaging.wire import BadFrame, Frame, Kind, PartStream, serve_streams
from collab_core.run.settings import RunSettings
from collab_core.swarm import Swarm
from collab_core.swarm.streams import until_closed

LEAVING_GRACE_S = 4.0  # Ctrl-C in the middle of a round: finish it if that is quick
STOP_POLL_S = 0.25
CONNECT_SHARE, CONNECT_PAUSE_S = 0.6, 0.3  # of the time after which a reducer gives up on whoever sends nothing
MIN_BYTES_PER_SECOND = 128 * 1024  # slower than this, a round is not worth waiting for
MAX_TOLD = 1000
SERVING_S = 1.0
SLOW_EPOCHS = 50  # in which who held up a round reduces nothing for us
LAST = 1_000_000  # of those who may lead
GROUP_WAIT_S = 3.0  # a member's first part may overtake the leader's message that tells us of the group


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
        lengths: Sequence[int],
        bandwidth: Bandwidth | None = None,
        max_upload: float = 0.0,
        fail_at: FailAt | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        """
        Args:
            swarm: where we are.
            settings: of the run.
            layout_hash: what must be equal for everyone.
            lengths: of the vectors that are averaged, in turn, epoch by epoch.
            bandwidth: what the link carries; None measures it.
            max_upload: bytes per second that our share is to fit; 0: all the link carries.
            fail_at: for tests.
            quarantine: whom to keep out; by default whoever we catch ourselves.
        """
        self._swarm = swarm
        self._layout_hash = layout_hash
        self.quarantine = quarantine or Quarantine(swarm, settings.limits.quarantine_epochs)
        self._toolbox = Toolbox(settings, lengths)
        self._weight_cap = float(settings.limits.max_samples_per_peer)
        self._timeout_s = settings.strategy.averaging_timeout_s
        self._namespace = swarm.run_hash.hex()
        self._parts_name = f"{self._namespace}::parts"
        self._link = Link(bandwidth, max_upload)
        self._fail_at = fail_at
        self._rounds: dict[bytes, Reduction] = {}
        self._told: set[tuple[str, str]] = set()
        self._in_doubt: set[int] = set()
        """Epochs whose round began and did not end here: the others may have ended it with what we sent."""
        self._slow: dict[str, int] = {}
        """Who held up a round for all the time it had, and in which epoch."""
        self._registered = asyncio.Condition()
        self._draining: set[asyncio.Task[None]] = set()
        self._sent_late = 0
        """Bytes that others still fetched from us after the outcome of their round: the next outcome tells of them."""
        self._matchmaking = Matchmaking(
            me=swarm.peer_id,
            stub_of=self._stub_of,
            weight_cap=self._weight_cap,
            matchmaking_time_s=settings.strategy.matchmaking_time_s,
            on_refused=self._on_refused,
            sentence_of=self.quarantine.sentence_of,
        )
        swarm.reactor.run(self._listen(), timeout_s=10)

    async def _listen(self) -> None:
        await self.add_p2p_handlers(self._swarm.p2p, namespace=self._namespace)
        await serve_streams(self._swarm.p2p, self._parts_name, self._toolbox.buffers, self._link, self._serve_parts)

    def _stub_of(self, peer_id: str) -> Any:
        return type(self).get_stub(self._swarm.p2p, PeerID.from_base58(peer_id), namespace=self._namespace)

    async def _connect(self, peer_id: str) -> PartStream:
        deadline = asyncio.get_running_loop().time() + CONNECT_SHARE * self._timeout_s
        while True:
            try:
                return await PartStream.open(
                    self._swarm.p2p, peer_id, self._parts_name, self._toolbox.buffers, self._link
                )
            except ControlFailure:
                # libp2p does not dial again for seconds where it dialled in vain: a peer that just came back is there
                if asyncio.get_running_loop().time() > deadline or not await self._swarm.answers(peer_id):
                    raise
            await asyncio.sleep(CONNECT_PAUSE_S)

    def _on_refused(self, peer_id: str, reason: str, is_lie: bool) -> None:
        if is_lie:
            self.quarantine.caught(peer_id, reason)
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
        self.quarantine.set_epoch(epoch)
        self._matchmaking.set_epoch(epoch)

    def is_awaited(self, epoch: int, parent_root: str) -> bool:
        """Whether somebody already asked us to lead the round of this epoch."""
        return self._matchmaking.is_awaited(round_key(self._layout_hash, epoch, parent_root))

    def round(self, request: RoundRequest, stop: threading.Event) -> RoundOutcome:
        """Find a group and average in it. Never raises for what others do: the outcome tells.

        Once `stop` is set a round under way gets a few seconds to finish, then it is left.

        Raises:
            RunError: DAEMON_FAILED, our network is gone.
        """
        future = self._swarm.reactor.spawn(self._round(request))
        grace = 0.0
        try:
            while grace < LEAVING_GRACE_S:
                done, _ = concurrent.futures.wait([future], timeout=STOP_POLL_S)
                if done:
                    return future.result()
                self._swarm.check_alive()  # without a network whoever is patient would wait for ever
                grace += STOP_POLL_S if stop.is_set() else 0.0
        finally:
            future.cancel()
        return RoundOutcome(failure="left in the middle of the round")

    def save_feedback(self, path: Path) -> None:
        """We leave: keep what the codec lost, so that it can still be sent after a restart."""
        self.settle_doubts()
        self._toolbox.save_feedback(path, self._namespace)

    def forget_feedback(self) -> None:
        """Owe nobody anything any more."""
        self._toolbox.forget_feedback()

    def is_in_doubt(self, epoch: int) -> bool:
        """Whether the others may have what we brought to this epoch, although no round of it ended here."""
        return epoch in self._in_doubt

    def settle_doubts(self) -> None:
        """The others went on without us, or may have. What we owed in a round that failed here may be paid already."""
        while self._in_doubt:
            self._toolbox.forget_feedback(self._in_doubt.pop())

    def restore_feedback(self, path: Path) -> None:
        """Take up what was kept when we left, before the first round; once."""
        self._toolbox.restore_feedback(path, self._namespace)

    def give_back(self, average: torch.Tensor) -> None:
        """Nobody looks at this average of an earlier round any more: its memory may be used again."""
        self._toolbox.buffers.give_back_vector(average)

    async def _round(self, request: RoundRequest) -> RoundOutcome:
        outcome = RoundOutcome()
        known = self._known()
        start = time.monotonic()
        try:
            declared = (request.epoch, request.contribution, request.weight)
            norm = await asyncio.get_running_loop().run_in_executor(self._toolbox.thread, self._toolbox.norm, *declared)
            group = await self._matchmaking.find_group(self._call(request, norm))
        except Behind:
            outcome.is_behind, outcome.failure = True, "somebody finished this epoch already"
            return outcome
        except NoGroup as error:
            if isinstance(error, KeptOut):
                self.quarantine.told_us(error.sentence, error.leader)
            outcome.failure = str(error)
            return outcome
        finally:
            outcome.matchmaking_s = time.monotonic() - start
        start = time.monotonic()
        tools = self._toolbox.tools(request.epoch)
        reduction = self._reduction(group, request, tools, known | self._known())
        self._rounds[group.group_id] = reduction
        self._in_doubt.add(request.epoch)
        async with self._registered:
            self._registered.notify_all()
        try:
            average = await asyncio.wait_for(reduction.run(), self._deadline_s(request.epoch))
            tools.feedback.commit()
            self._in_doubt.discard(request.epoch)
            self._tell_clipped(group, request.epoch)
            outcome.average = average if request.wants_average else None
            if not request.wants_average:  # all we do is to serve, so that is what the outcome should tell
                await reduction.served(SERVING_S)
                self.give_back(average)
        except RoundFailed as error:
            outcome.failure = str(error)
        except TimeoutError:
            outcome.failure = f"not finished within {self._deadline_s(request.epoch):.0f} s"
            if (slowest := reduction.blame_the_slowest()) is not None:
                self._slow[slowest] = request.epoch
        finally:
            self._matchmaking.finished()
            sent = reduction.bytes_sent
            drain = asyncio.create_task(self._drain(group.group_id, reduction, sent))
            self._draining.add(drain)
            drain.add_done_callback(self._draining.discard)
            outcome.reducing_s = time.monotonic() - start
            outcome.group, outcome.members = frozenset(group.peer_ids), group.senders
            outcome.refused, outcome.lost = dict(reduction.refused), dict(reduction.lost)
            outcome.bytes_sent, outcome.bytes_received = sent, reduction.bytes_received
            if not outcome.failure:  # nobody tells of a failed one
                outcome.bytes_sent, self._sent_late = sent + self._sent_late, 0
            outcome.share = reduction.share
            self._link.end_round()
        return outcome

    def _tell_clipped(self, group: Group, epoch: int) -> None:
        factors = clip_factors(group.senders, group.norms, adds_up=self._toolbox.adds_up)
        clipped = {self._swarm.name_of(who): round(factor, 4) for who, factor in factors.items() if factor < NOTABLE}
        if clipped:
            self._swarm.events.write("clipped", epoch=epoch, senders=clipped)

    def _deadline_s(self, epoch: int) -> float:
        """How long a whole round may take: nobody holds it up by sending a little now and then."""
        return 2 * self._timeout_s + self.round_bytes(epoch) / MIN_BYTES_PER_SECOND

    def round_bytes(self, epoch: int) -> int:
        """About what this epoch's round moves in each direction."""
        return self._toolbox.round_bytes(epoch)

    @property
    def bandwidth(self) -> Bandwidth:
        """What our link carries, as far as we know."""
        return self._link.bandwidth

    def finish(self, timeout_s: float) -> None:
        """Give those who still fetch their averages from us a moment before we leave."""

        async def drained() -> None:
            if self._draining:
                await asyncio.wait(set(self._draining), timeout=timeout_s)

        concurrent.futures.wait([self._swarm.reactor.spawn(drained())], timeout=timeout_s + 1)

    def _call(self, request: RoundRequest, norm: float) -> Call:
        key = round_key(self._layout_hash, request.epoch, request.parent_root)
        bandwidth = self._link.bandwidth
        slow = {peer_id for peer_id, epoch in self._slow.items() if request.epoch < epoch + SLOW_EPOCHS}
        me = Member(
            peer_id=self._swarm.peer_id,
            epoch=request.epoch,
            weight=request.weight,
            norm=norm,
            can_reduce=self._swarm.record.is_reachable,
            wants_average=request.wants_average,
            upload=min(bandwidth.upload, MAX_RATE),
            download=min(bandwidth.download, MAX_RATE),
            lost=[*sorted(request.lost), *sorted(slow - request.lost)][:MAX_LOST],
        )

        def leaders() -> list[str]:
            ranks = {peer.peer_id: request.rank(peer) for peer in request.companions() if peer.record.is_reachable}
            if me.can_reduce:
                ranks[me.peer_id] = request.own_rank
            for peer_id in slow & ranks.keys():  # the organiser's only now, when everyone in its group knows
                if ranks[peer_id] > 0 or self._slow[peer_id] == request.epoch:
                    ranks[peer_id] = LAST
            return leader_order(key, ranks)

        def expected() -> set[str]:
            return {peer.peer_id for peer in request.companions() if not request.is_missing(peer.peer_id)}

        return Call(key, me, leaders, expected, request.latecomers, request.should_stop, request.is_patient)

    def _known(self) -> set[str]:
        return {peer.peer_id for peer in self._swarm.peers()}

    def _reduction(self, group: Group, request: RoundRequest, tools: Tools, known: set[str]) -> Reduction:
        """One round; of its members, who was `known` and is no more has said goodbye, or fallen silent."""
        return Reduction(
            me=self._swarm.peer_id,
            group=group,
            contribution=request.contribution,
            num_values=self._toolbox.num_values(request.epoch),
            epoch=request.epoch,
            tools=tools,
            weight_cap=self._weight_cap,
            timeout_s=self._timeout_s,
            patience_s=self._deadline_s(request.epoch) - self._timeout_s,
            connect=self._connect,
            is_gone=lambda peer_id: peer_id in known and peer_id not in self._known(),
            on_refused=self._on_refused,
            fail_at=self._fail_at,
        )

    async def _drain(self, group_id: bytes, reduction: Reduction, told_bytes: int) -> None:
        """Others may still need our part; the next epoch does not wait for them."""
        try:
            await reduction.drain()
        finally:
            self._sent_late += reduction.bytes_sent - told_bytes
            if self._rounds.get(group_id) is reduction:
                del self._rounds[group_id]

    # --- for others ---

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Another peer asks us to lead its round."""
        async for message in self._matchmaking.serve_join(request, context.remote_id.to_base58()):
            yield message
        await until_closed()

    async def _serve_parts(self, stream: PartStream, remote: str) -> None:
        """A member of our group sends its parts and waits for the averages."""
        try:
            hello = await asyncio.wait_for(stream.receive(GROUP_ID_BYTES), self._timeout_s)
        except (TimeoutError, BadFrame):
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
        except TimeoutError:
            return None
        return self._rounds.get(group_id)
