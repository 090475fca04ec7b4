"""Meetings in pairs: asking others, answering them, and finding out what became of an exchange that was cut off.

Each side ends with exactly its old value or the average. The asked side decides; what it decided, it tells whoever asks
again. A peer takes part in one exchange at a time, and is busy for everyone else.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import enum
import logging
import secrets
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import torch
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext, PeerID, ServicerBase

from collab_core.gossip.doubts import ABORTED, COMMITTED, GONE_S, Doubts
from collab_core.gossip.encounter import BrokenRule, Busy, Change, Encounter, Faults, Terms, in_words
from collab_core.gossip.journal import ID_BYTES, Journal
from collab_core.gossip.ledger import Ledger
from collab_core.gossip.mean import Share
from collab_core.gossip.neighbours import Neighbours
from collab_core.gossip.newcomers import Newcomers
from collab_core.gossip.wire import CLOSING_S, CONNECTING_S, BadFrame, Kind, Offer, Refusal, Wire, serve, unpack
from collab_core.state.throttle import Throttle
from collab_core.swarm import Swarm

logger = logging.getLogger(__name__)

LEAVING_GRACE_S = 2.5  # Ctrl-C in the middle of an exchange: finish it if that is quick
STOP_POLL_S = 0.1
CROSSING_S = 3.0  # two that ask each other at once: until one of them has heard that it is the asked
QUESTION_S = 3.0
ENGAGED_S = 5.0  # for somebody who came before we asked
MAX_TOLD = 1000

T = TypeVar("T")


class Outcome(enum.Enum):
    """What came of an attempt to meet somebody."""

    MET = "met"
    BUSY = "busy"
    FAILED = "failed"
    IN_DOUBT = "in doubt"


class Meetings(ServicerBase):  # type: ignore[misc]
    """This peer's exchanges with others.

    The model belongs to the thread that trains. Between two steps it takes the `changes` that were decided into the
    model, and if somebody `is_waiting`, hands out the model as it is then; meanwhile it goes on training.

    Args:
        swarm: our place in the network.
        terms: what to keep to.
        journal: where exchanges are noted.
        kept: exchanges that are in the model we begin with.
        gone_s: how long a partner must be gone before an exchange in doubt is given up.
        throttle: what newcomers get goes no faster.
        faults: for tests.
    """

    def __init__(
        self,
        swarm: Swarm,
        terms: Terms,
        journal: Journal,
        *,
        throttle: Throttle | None = None,
        kept: Iterable[str] = (),
        gone_s: float = GONE_S,
        faults: Faults | None = None,
    ) -> None:
        self.epoch = 0
        """The round we are in."""
        self.is_training = True
        """Whether our round may still change."""
        self._swarm, self._terms, self._neighbours = swarm, terms, Neighbours(swarm)
        self._faults = faults
        self._namespace = f"{swarm.run_hash.hex()}::gossip"
        self._ledger = Ledger(journal, kept)
        self._current: Encounter | None = None
        self._at_hand: torch.Tensor | None = None
        """Our model, while the thread that trains waits for a meeting to end."""
        self._wish: asyncio.Future[torch.Tensor] | None = None
        """Somebody waits for our model."""
        self._doubts = Doubts(
            swarm, question=self._question, commit=self._commit, forget=self._ledger.forget, gone_s=gone_s
        )
        self._newcomers = Newcomers(
            swarm,
            terms,
            throttle or Throttle(),
            open_wire=self._open,
            own_values=self._own_values,
            epoch=lambda: self.epoch,
        )
        self._is_leaving = False
        self._told: set[tuple[str, str]] = set()
        swarm.reactor.run(self._listen(), timeout_s=10)

    async def _listen(self) -> None:
        # In client mode too: those we are connected to can ask us what became of an exchange.
        await self.add_p2p_handlers(self._swarm.p2p, namespace=self._namespace)
        await serve(self._swarm.p2p, self._namespace, self._answer)

    # --- for the thread that trains ---

    @property
    def is_waiting(self) -> bool:
        """Whether somebody waits for our model."""
        return self._wish is not None

    def hand_out(self, values: torch.Tensor) -> None:
        """Our model as it is now, a copy of its own."""
        self._swarm.reactor.call_soon(lambda: self._fulfil(values))

    def changes(self) -> list[Change]:
        """What was decided since the last call. The caller takes all of it into the model before anything else."""
        return self._ledger.take()

    @property
    def is_engaged(self) -> bool:
        """Whether an exchange is under way, so that there can be no other."""
        return self._current is not None

    @property
    def kept(self) -> list[str]:
        """Exchanges that are in the model, for its backup."""
        return self._ledger.kept

    def meet(self, partner: str, values: torch.Tensor, stop: threading.Event) -> Outcome:
        """Exchange models with one partner. Never raises for what others do."""
        outcome = self._wait_for(self._meet(partner, values), stop)
        return Outcome.FAILED if outcome is None else outcome

    def fetch(self, donor: str, stop: threading.Event) -> tuple[int, torch.Tensor] | None:
        """The round and the model of another peer; None if it does not give them."""
        return self._wait_for(self._newcomers.fetch(donor), stop)

    def finish(self) -> None:
        """Begin nothing new, end what is under way, and settle what is in doubt, if that is quick."""

        async def settle() -> None:
            self._is_leaving = True
            if self._wish is not None and not self._wish.done():
                self._wish.set_exception(TimeoutError())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._settled(), LEAVING_GRACE_S)
            if self._current is not None:
                self._current.is_dropped = True  # what we leave with must be all that we committed

        concurrent.futures.wait([self._swarm.reactor.spawn(settle())], timeout=LEAVING_GRACE_S + 1)

    async def _settled(self) -> None:
        if self._current is not None:
            await self._current.ended.wait()
        await self._doubts.settled()

    def _wait_for(self, coroutine: Coroutine[Any, Any, T], stop: threading.Event) -> T | None:
        future = self._swarm.reactor.spawn(coroutine)
        grace_s = 0.0
        while grace_s < LEAVING_GRACE_S:
            if concurrent.futures.wait([future], timeout=STOP_POLL_S).done:
                return future.result()
            grace_s += STOP_POLL_S if stop.is_set() else 0.0
        future.cancel()
        return None

    # --- asking ---

    async def _meet(self, partner: str, values: torch.Tensor) -> Outcome:
        self._fulfil(values)
        self._at_hand = values
        try:
            if (current := self._current) is not None:  # somebody came before we asked: that is our meeting
                with contextlib.suppress(asyncio.TimeoutError):  # a slow one does not keep us from our work
                    await asyncio.wait_for(current.ended.wait(), min(ENGAGED_S, self._terms.patience_s))
            if self._ledger.has_changes:
                return Outcome.MET
            if current is not None or self._doubts.concern(partner):
                return Outcome.BUSY
            if self._doubts.is_full:
                return Outcome.FAILED
            return await self._ask(partner, values)
        finally:
            self._at_hand = None

    async def _ask(self, partner: str, values: torch.Tensor) -> Outcome:
        encounter = self._begin(secrets.token_hex(ID_BYTES), partner, is_asker=True)
        change: Change | None = None
        wire: Wire | None = None
        try:
            wire = await asyncio.wait_for(self._open(partner), CONNECTING_S)
            change = await encounter.agree(wire, Share(self._swarm.peer_id, values, self._terms.weight))
            await self._ledger.note(encounter.exchange, encounter.partner)
            if await encounter.settle(wire):
                self._commit(change)
                return Outcome.MET
            self._tell_failure(partner, "it dropped the exchange")
            await self._ledger.forget(encounter.exchange)
        except Busy:
            return Outcome.BUSY
        except (BrokenRule, BadFrame) as error:
            self._refuse(partner, str(error))
        except Exception as error:  # noqa: BLE001 - whatever the network and strangers do, training goes on
            if not encounter.is_in_doubt:
                self._tell_failure(partner, in_words(error))
        finally:
            if wire is not None:
                wire.close()
            if change is not None and encounter.is_in_doubt:
                self._doubts.add(change)
            self._end(encounter)
        return Outcome.IN_DOUBT if encounter.is_in_doubt else Outcome.FAILED

    async def _open(self, partner: str) -> Wire:
        await self._swarm.reach(partner)
        return await Wire.open(self._swarm.p2p, partner, self._namespace)

    # --- answering ---

    async def _answer(self, wire: Wire, remote: str) -> None:
        try:
            kind, data = await wire.hear(Kind.OFFER, Kind.FETCH, within_s=self._terms.patience_s)
            if kind is Kind.FETCH:
                await self._newcomers.give(wire, is_leaving=self._is_leaving)
            else:
                await self._consider(wire, remote, unpack(Offer, data))
        except (BadFrame, BrokenRule) as error:
            self._refuse(remote, str(error))
            with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                await wire.say(Kind.REFUSED, Refusal(reason=str(error)[:200]))
                await wire.finish(CLOSING_S)
        except (TimeoutError, ConnectionError) as error:
            logger.info("%s left a meeting: %r", remote, error)

    async def _consider(self, wire: Wire, remote: str, offer: Offer) -> None:
        if offer.layout != self._terms.layout:
            raise BrokenRule("a model of another shape")
        await self._let_cross(remote)
        if self._current is not None or self._is_leaving:
            await wire.say(Kind.BUSY)
            await wire.finish(CLOSING_S)
            return
        encounter = self._begin(offer.exchange.hex(), remote, is_asker=False)
        try:
            encounter.check(offer)
            await self._decide(wire, encounter, offer)
        except (TimeoutError, ConnectionError) as error:
            if encounter.exchange not in self._ledger:
                self._tell_failure(remote, in_words(error))
        finally:
            self._end(encounter)

    async def _let_cross(self, remote: str) -> None:
        """Of two that ask each other at once, the one with the lower ID is the asker; the other one waits for it."""
        current = self._current
        if current is not None and current.is_asker and current.partner == remote and remote < self._swarm.peer_id:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(current.ended.wait(), CROSSING_S)

    async def _decide(self, wire: Wire, encounter: Encounter, offer: Offer) -> None:
        try:
            values = await self._own_values()
        except TimeoutError:
            await wire.say(Kind.BUSY)
            await wire.finish(CLOSING_S)
            return
        encounter.epoch, encounter.is_training = self.epoch, self.is_training  # the model's, for which we had to wait
        change = await encounter.accept(wire, Share(self._swarm.peer_id, values, self._terms.weight), offer)
        if encounter.is_dropped:
            await wire.say(Kind.ABORTED)
        else:
            self._commit(change)
            await self._ledger.note(encounter.exchange, encounter.partner)
            encounter.reached("answer-decided")
            await wire.say(Kind.COMMITTED)
            encounter.reached("answer-told")
        self._end(encounter)
        await wire.finish(CLOSING_S)

    async def _own_values(self) -> torch.Tensor:
        """Our model, as soon as the thread that trains has a moment."""
        if self._at_hand is not None:
            return self._at_hand
        if self._wish is None:
            self._wish = asyncio.get_running_loop().create_future()
        return await asyncio.wait_for(asyncio.shield(self._wish), self._terms.patience_s)

    def _fulfil(self, values: torch.Tensor) -> None:
        wish, self._wish = self._wish, None
        if wish is not None and not wish.done():
            wish.set_result(values)

    # --- what became of it ---

    async def rpc_outcome(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """An asker that was cut off asks what became of an exchange. If nothing yet, then nothing will."""
        exchange = bytes(request.value).hex()
        if exchange in self._ledger:
            return BytesValue(value=COMMITTED)
        current = self._current
        if current is not None and current.exchange == exchange and current.partner == context.remote_id.to_base58():
            current.is_dropped = True
        return BytesValue(value=ABORTED)

    async def _question(self, change: Change) -> bytes:
        await self._swarm.reach(change.partner)
        stub = self.get_stub(self._swarm.p2p, PeerID.from_base58(change.partner), namespace=self._namespace)
        request = BytesValue(value=bytes.fromhex(change.exchange))
        reply = await asyncio.wait_for(stub.rpc_outcome(request, timeout=QUESTION_S), QUESTION_S)
        return bytes(reply.value)

    def tell_lost(self) -> None:
        """Name the exchanges of an earlier life that are not in the model we restored."""
        for entry in self._ledger.lost():
            name = self._swarm.name_of(entry.partner)
            reason = "it is not in the backup we began with again"
            self._swarm.events.write(
                "exchange_lost", exchange=entry.exchange, peer_id=entry.partner, name=name, reason=reason
            )

    # --- keeping books ---

    def _begin(self, exchange: str, partner: str, *, is_asker: bool) -> Encounter:
        def reached(stage: str) -> None:
            if self._faults is not None:
                self._faults.reached(stage, self.epoch)

        assert self._current is None, "one at a time"
        self._current = Encounter(
            exchange=exchange,
            partner=partner,
            is_asker=is_asker,
            terms=self._terms,
            reached=reached,
            epoch=self.epoch,
            is_training=self.is_training,
            plausible=self._neighbours.plausible,
        )
        return self._current

    def _end(self, encounter: Encounter) -> None:
        encounter.ended.set()
        if self._current is encounter:
            self._current = None

    def _commit(self, change: Change) -> None:
        self._at_hand = None  # it is not our model any more
        self._ledger.commit(change)

    def _refuse(self, partner: str, reason: str) -> None:
        if (partner, reason) in self._told or len(self._told) > MAX_TOLD:
            return  # whoever knocks all day long is named once
        self._told.add((partner, reason))
        self._swarm.events.write("refused", peer_id=partner, name=self._swarm.name_of(partner), reason=reason)

    def _tell_failure(self, partner: str, reason: str) -> None:
        name = self._swarm.name_of(partner)
        self._swarm.events.write("exchange_failed", epoch=self.epoch, peer_id=partner, name=name, reason=reason)
