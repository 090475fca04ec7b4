"""What a newcomer begins with: the model of any peer that has trained."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import torch

from collab_core.gossip.encounter import Terms, in_words
from collab_core.gossip.wire import CLOSING_S, CONNECTING_S, BadFrame, Kind, StateHead, Wire, unpack
from collab_core.state.throttle import Busy as TooMany
from collab_core.state.throttle import Throttle
from collab_core.swarm import Swarm

MAX_DONATIONS = 2  # at a time


class Newcomers:
    """Fetches a model from others, and gives ours. Runs in the reactor's thread.

    Args:
        swarm: who is there.
        terms: what to keep to.
        throttle: what newcomers get goes no faster.
        open_wire: to a peer.
        own_values: our model, as soon as the thread that trains has a moment.
        epoch: the round it is in.
    """

    def __init__(
        self,
        swarm: Swarm,
        terms: Terms,
        throttle: Throttle,
        *,
        open_wire: Callable[[str], Awaitable[Wire]],
        own_values: Callable[[], Awaitable[torch.Tensor]],
        epoch: Callable[[], int],
    ) -> None:
        self._swarm, self._terms, self._throttle = swarm, terms, throttle
        self._open, self._own_values, self._epoch = open_wire, own_values, epoch
        self._num_donations = 0

    async def fetch(self, donor: str) -> tuple[int, torch.Tensor] | None:
        """The round and the model of another peer; None if it does not give them."""
        wire: Wire | None = None
        try:
            wire = await asyncio.wait_for(self._open(donor), CONNECTING_S)
            await wire.say(Kind.FETCH)
            kind, data = await wire.hear(Kind.STATE, Kind.BUSY, within_s=self._terms.patience_s)
            if kind is Kind.BUSY:
                return None
            epoch = unpack(StateHead, data).epoch
            values = await wire.receive_vector(self._terms.num_values, self._terms.transfer_s)
            if not bool(torch.isfinite(values).all()):
                raise BadFrame("a model that is not finite")
            return epoch, values
        except Exception as error:  # noqa: BLE001 - a stranger's bytes: whatever they break, only this donor is lost
            name = self._swarm.name_of(donor)
            self._swarm.events.write("donor_failed", peer_id=donor, name=name, reason=in_words(error))
            return None
        finally:
            if wire is not None:
                wire.close()

    async def give(self, wire: Wire, *, is_leaving: bool) -> None:
        """Send our model to whoever asked for it, unless we leave."""
        if self._num_donations >= MAX_DONATIONS or is_leaving:
            await wire.say(Kind.BUSY)
        else:
            self._num_donations += 1
            try:
                values = await self._own_values()
                await wire.say(Kind.STATE, StateHead(epoch=self._epoch()))
                await asyncio.wait_for(wire.give_vector(values, self._throttle.pass_through), self._terms.transfer_s)
            except TooMany as error:
                raise ConnectionError(str(error)) from error
            finally:
                self._num_donations -= 1
        await wire.finish(CLOSING_S)
