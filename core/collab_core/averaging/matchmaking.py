"""How a round finds its group.

hivemind's matchmaking looks for leaders in the DHT and closes a group when a fixed number came or the time is up. Our
peer records already say who is alive at which epoch, so everyone ranks the possible leaders alike, asks the best one,
and the leader closes the group the moment everyone expected is there. The messages are hivemind's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from collab_core.averaging.group import (
    GROUP_ID_BYTES,
    MAX_MEMBERS,
    Group,
    Member,
    check_weight,
    close_group,
    name_group,
)
from collab_core.averaging.norms import check_norm
from collab_core.swarm.record import Sentence

logger = logging.getLogger(__name__)

T = TypeVar("T")
Message = Any  # averaging_pb2.MessageFromLeader

ANSWER_TIMEOUT_S = 4.0  # a leader that does not even answer is not one
POLL_S = 0.1
DOOR_S = 1.5  # time to fetch a small state and do a first batch
LEADING = b"leading"  # in an acceptance: our window has begun


class NoGroup(Exception):
    """No group came together; try again or look around first."""


class KeptOut(NoGroup):
    """The leader keeps us out for some epochs, and says why."""

    def __init__(self, leader: str, sentence: Sentence) -> None:
        super().__init__(f"{leader} keeps us out until epoch {sentence.until_epoch}: {sentence.reason}")
        self.leader, self.sentence = leader, sentence


class Behind(Exception):
    """Somebody already finished this epoch without us."""


@dataclass(frozen=True, slots=True)
class Call:
    """A peer's wish to average now."""

    key: bytes
    me: Member
    leaders: Callable[[], list[str]]
    """Peers that could lead, best first, this peer among them if others can reach it."""
    expected: Callable[[], set[str]]
    """Everybody a leader should wait for; asked again and again, as people come and go."""
    latecomers: Callable[[], set[str]]
    """Newcomers and peers that missed an epoch: the door is held open for them for a moment."""
    should_stop: Callable[[], bool]
    is_patient: bool = False
    """An auxiliary waits for the first trainer as long as it takes."""


@dataclass(slots=True, eq=False)
class Follower:
    key: bytes
    member: Member
    answer: asyncio.Future[Message]
    noticed: asyncio.Event
    """Set when we lead the round it waits for, so that it knows our window has begun."""


class Matchmaking:
    """Leads or follows, one call at a time. Requests that come before our own call are kept until we get there."""

    def __init__(
        self,
        *,
        me: str,
        stub_of: Callable[[str], Any],
        weight_cap: float,
        matchmaking_time_s: float,
        on_refused: Callable[[str, str, bool], None],
        sentence_of: Callable[[str], Sentence | None] = lambda peer_id: None,
    ) -> None:
        self._me, self._stub_of, self._weight_cap = me, stub_of, weight_cap
        self._window_s, self._on_refused, self._sentence_of = matchmaking_time_s, on_refused, sentence_of
        self._epoch = 0
        self._call: Call | None = None
        self._leader: str | None = None
        self._is_leading = False
        self._ask_again_until = 0.0
        self._running: bytes | None = None
        self._followers: dict[str, Follower] = {}
        self._unfit: dict[bytes, set[str]] = {}
        """Peers that did not lead a round to its begin, by round: they are not asked a second time."""
        self._refused: set[str] = set()
        """Peers refused in this epoch: nobody waits for them any more."""
        self._joined = asyncio.Event()

    def set_epoch(self, epoch: int) -> None:
        """We are now at this epoch; whoever still waits for an earlier one is told that it is over."""
        self._epoch = epoch
        self._refused.clear()
        self._unfit.clear()
        for follower in list(self._followers.values()):
            if follower.member.epoch < epoch:
                self._answer(follower, averaging_pb2.MessageFromLeader(code=averaging_pb2.BAD_SCHEMA_HASH))

    def is_awaited(self, key: bytes) -> bool:
        """Whether somebody has come to us with work for this round; auxiliaries come early and wait."""
        return any(follower.key == key and follower.member.weight > 0 for follower in list(self._followers.values()))

    async def find_group(self, call: Call) -> Group:
        """The group for this call. Raises NoGroup or Behind."""
        assert self._call is None, "one round at a time"
        self._call = call
        for follower in list(self._followers.values()):
            if follower.member.epoch == call.me.epoch and follower.key != call.key:  # same epoch, another history
                self._answer(follower, averaging_pb2.MessageFromLeader(code=averaging_pb2.BAD_GROUP_KEY))
        tried = set(self._unfit.get(call.key, ()))
        self._ask_again_until = asyncio.get_running_loop().time() + 2 * self._window_s + ANSWER_TIMEOUT_S
        try:
            while not call.should_stop():
                leader = self._better_leader(call, tried)
                if leader is not None:
                    tried.add(leader)
                    group = await self._follow(leader, call, tried)
                elif call.me.can_reduce:
                    group = await self._lead(call, tried)
                else:
                    raise NoGroup("no peer that others can reach leads this round")
                if group is not None:
                    self._running = call.key
                    return group
            raise NoGroup("stopped")
        finally:
            self._call = self._leader = None
            self._is_leading = False

    def _better_leader(self, call: Call, tried: set[str]) -> str | None:
        """The best peer above us that we have not asked yet."""
        leaders = call.leaders()
        above = leaders[: leaders.index(self._me)] if self._me in leaders else leaders
        return next((peer_id for peer_id in above if peer_id not in tried), None)

    def finished(self) -> None:
        """The round of the last group is over, well or not."""
        self._running = None

    # --- following ---

    async def _follow(self, leader: str, call: Call, tried: set[str]) -> Group | None:
        """Ask a peer to lead us; None if neither it nor the one it sends us to does."""
        self._leader = leader
        suggestion = PeerID.from_base58(leader).to_bytes()
        for follower in list(self._followers.values()):
            if follower.key == call.key:
                self._answer(
                    follower,
                    averaging_pb2.MessageFromLeader(code=averaging_pb2.GROUP_DISBANDED, suggested_leader=suggestion),
                )
        request = averaging_pb2.JoinRequest(
            schema_hash=call.key, gather=call.me.to_bytes(), client_mode=not call.me.can_reduce
        )
        stream = None
        suggested, is_following = self._me, False
        loop = asyncio.get_running_loop()
        latest = loop.time() + 2 * self._window_s + 2 * ANSWER_TIMEOUT_S  # whatever the leader says in between
        try:
            stream = await asyncio.wait_for(self._stub_of(leader).rpc_join_group(request), ANSWER_TIMEOUT_S)
            message = await asyncio.wait_for(anext(stream), ANSWER_TIMEOUT_S)
            while message is not None and message.code == averaging_pb2.ACCEPTED:
                # The leader may still have to finish its own work: it gets one window for that, and then, once it
                # says that it leads, the whole window of the round.
                patience_s = self._window_s + (ANSWER_TIMEOUT_S if message.group_id == LEADING else 0.0)
                patience_s = min(patience_s, latest - loop.time())
                message = await self._unless_stopped(anext(stream), call, None if call.is_patient else patience_s)
            if message is None:
                return None
            if message.code == averaging_pb2.BEGIN_ALLREDUCE:
                return self._read_group(message, call)
            if message.code in (averaging_pb2.BAD_SCHEMA_HASH, averaging_pb2.PROTOCOL_VIOLATION):
                self._unfit.setdefault(call.key, set()).add(leader)
                if message.code == averaging_pb2.BAD_SCHEMA_HASH:
                    raise Behind
                sentence = Sentence.from_bytes(message.gathered[0]) if message.gathered else None
                raise NoGroup(f"refused by {leader}") if sentence is None else KeptOut(leader, sentence)
            is_following = message.code == averaging_pb2.NOT_A_LEADER
            suggested = PeerID(message.suggested_leader).to_base58() if message.suggested_leader else self._me
        except (Behind, NoGroup):
            raise
        except Exception as error:  # noqa: BLE001 - a stranger's bytes: whatever they break, this is not our leader
            logger.info("%s does not lead us: %r", leader, error)
            return None
        finally:
            self._leader = None
            if stream is not None:
                with contextlib.suppress(RuntimeError):  # it is busy being cancelled, and closes by itself
                    await stream.aclose()
        if suggested in tried or suggested == self._me or suggested not in call.leaders():
            if is_following and loop.time() < self._ask_again_until:
                tried.discard(leader)  # it follows somebody who does not lead us; it may soon lead itself
                await asyncio.sleep(POLL_S)
            return None
        tried.add(suggested)
        return await self._follow(suggested, call, tried)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T], call: Call, timeout_s: float | None) -> T | None:
        """Wait for a message, but look up now and then whether there is still a reason to."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        task = asyncio.ensure_future(work)
        try:
            while not call.should_stop() and (deadline is None or loop.time() < deadline):
                await asyncio.wait({task}, timeout=POLL_S)
                if task.done():
                    return task.result()
            return None
        finally:
            task.cancel()

    def _read_group(self, message: Message, call: Call) -> Group | None:
        """A leader's group, believed only if it makes sense and says of us what we said."""
        if len(message.gathered) > MAX_MEMBERS or len(message.group_id) != GROUP_ID_BYTES:
            return None
        members = [Member.from_bytes(data) for data in message.gathered]
        peer_ids = [PeerID(data).to_base58() for data in message.ordered_peer_ids]
        if len(members) != len(peer_ids) or len(set(peer_ids)) != len(peer_ids) or self._me not in peer_ids:
            return None
        good = []
        for member, peer_id in zip(members, peer_ids, strict=True):
            if member is None or member.peer_id != peer_id or self._fault(member):
                return None
            if member.epoch != call.me.epoch or (peer_id == self._me and not _is_same(member, call.me)):
                return None
            good.append(member)
        return name_group(message.group_id, good) if any(member.can_reduce for member in good) else None

    def _fault(self, member: Member) -> str:
        """Why what somebody declares is refused; empty if it is fine."""
        return check_weight(member.weight, self._weight_cap) or check_norm(member.norm)

    # --- leading ---

    async def _lead(self, call: Call, tried: set[str]) -> Group | None:
        """Wait for those who are expected, at most for the matchmaking window, then close the group.

        None if a better leader turns up meanwhile: we and our followers go to it.
        """
        loop = asyncio.get_running_loop()
        deadline = None if call.is_patient else loop.time() + self._window_s
        self._is_leading = True
        for follower in self._followers.values():
            if follower.key == call.key:
                follower.noticed.set()
        door: float | None = None
        while not call.should_stop() and self._better_leader(call, tried) is None:
            present = self._present(call)
            members = [call.me, *(self._followers[peer_id].member for peer_id in present)]
            has_work = len(members) > 1 and any(member.weight > 0 for member in members)
            if deadline is None and has_work:
                deadline = loop.time() + self._window_s
            if len(members) >= MAX_MEMBERS:
                return self._close(members[:MAX_MEMBERS])
            if has_work and door is None:
                door = loop.time() + min(DOOR_S, self._window_s)
            is_complete = has_work and call.expected() - {self._me} - self._refused <= present
            if is_complete and (door is None or loop.time() >= door or not call.latecomers() - present):
                return self._close(members)
            if deadline is not None and loop.time() >= deadline:
                if has_work:
                    return self._close(members)
                if not call.is_patient:
                    raise NoGroup("nobody else came")
                deadline = None
            self._joined.clear()
            try:
                await asyncio.wait_for(self._joined.wait(), POLL_S)
            except TimeoutError:
                continue
        return None

    def _present(self, call: Call) -> set[str]:
        """Who waits for this round."""
        waiting = {peer_id: follower for peer_id, follower in self._followers.items() if follower.key == call.key}
        for peer_id, follower in waiting.items():
            if follower.member.epoch != call.me.epoch:  # the others would refuse the whole group for it
                self._refused.add(peer_id)
                self._on_refused(peer_id, "asked to join the round of one epoch and declared another", True)
                self._answer(follower, averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION))
        return waiting.keys() & self._followers.keys()

    def _close(self, members: list[Member]) -> Group:
        token = secrets.token_bytes(GROUP_ID_BYTES)
        group = close_group(token, self._me, members)
        message = averaging_pb2.MessageFromLeader(
            code=averaging_pb2.BEGIN_ALLREDUCE,
            group_id=token,
            ordered_peer_ids=[PeerID.from_base58(member.peer_id).to_bytes() for member in group.members],
            gathered=[member.to_bytes() for member in group.members],
        )
        for member in group.members:
            if member.peer_id != self._me:
                self._answer(self._followers[member.peer_id], message)
        return group

    def _answer(self, follower: Follower, message: Message) -> None:
        if not follower.answer.done():
            follower.answer.set_result(message)
        if self._followers.get(follower.member.peer_id) is follower:
            del self._followers[follower.member.peer_id]

    async def serve_join(self, request: Any, remote: str) -> AsyncIterator[Message]:
        """Somebody asks us to lead it."""
        member = Member.from_bytes(request.gather)
        reason = (
            "asked to join a round with an unreadable request"
            if member is None or len(request.schema_hash) != 32
            else "asked to join a round in another peer's name"
            if member.peer_id != remote
            else self._fault(member)
        )
        if reason or member is None:
            self._refused.add(remote)
            self._on_refused(remote, reason, member is not None)  # what we cannot read may be of another version
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        if (sentence := self._sentence_of(remote)) is not None:
            self._refused.add(remote)
            code = averaging_pb2.PROTOCOL_VIOLATION
            yield averaging_pb2.MessageFromLeader(code=code, gathered=[sentence.to_bytes()])
            return
        if member.epoch < self._epoch:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.BAD_SCHEMA_HASH)
            return
        if self._leader is not None:
            suggestion = PeerID.from_base58(self._leader).to_bytes()
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_A_LEADER, suggested_leader=suggestion)
            return
        if self._running == request.schema_hash:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.GROUP_IS_FULL)
            return
        if self._call is not None and self._call.me.epoch == member.epoch and self._call.key != request.schema_hash:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.BAD_GROUP_KEY)  # same epoch, another history
            return
        answer = asyncio.get_running_loop().create_future()
        follower = Follower(request.schema_hash, member, answer, asyncio.Event())
        if self._is_leading and self._call is not None and self._call.key == follower.key:
            follower.noticed.set()
        if (earlier := self._followers.get(remote)) is not None:
            self._answer(earlier, averaging_pb2.MessageFromLeader(code=averaging_pb2.DUPLICATE_PEER_ID))
        self._followers[remote] = follower
        self._joined.set()
        accepted = averaging_pb2.ACCEPTED
        try:
            if not follower.noticed.is_set():
                yield averaging_pb2.MessageFromLeader(code=accepted)
                noticed = asyncio.create_task(follower.noticed.wait())
                try:
                    await asyncio.wait({noticed, answer}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    noticed.cancel()
            if not answer.done():
                yield averaging_pb2.MessageFromLeader(code=accepted, group_id=LEADING)
            yield await answer
        finally:
            if self._followers.get(remote) is follower:
                del self._followers[remote]


def _is_same(theirs: Member, ours: Member) -> bool:
    """Whether a leader passed on what we declared. It may only have taken away our part in reducing."""
    return theirs.model_copy(update={"can_reduce": ours.can_reduce}) == ours
