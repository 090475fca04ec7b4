"""Whether others can reach us: we ask peers we are connected to, and they dial us back.

A peer that believes to be reachable and is not costs everyone: others send it parts to average and wait in vain. So it
is found out before we join. Asked peers open a fresh connection and check who answers (`handshake.py`).

Nobody can be made to scan others this way: only the address the asker's own connection comes from is dialled, on at
most two ports, and rarely. What remains is that an answer holds for whoever gave it: a peer of our home network tells
about that network, and a few routers let in whoever we have talked to before.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import msgpack
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext, PeerID, ServicerBase

from collab_core.swarm.addresses import host_and_port, is_relayed
from collab_core.swarm.handshake import NotAPeer, who_answers

logger = logging.getLogger(__name__)

NAMESPACE = "collab"
MAX_ASKED = 3
ASK_TIMEOUT_S = 2.9
NUM_ATTEMPTS, ATTEMPT_TIMEOUT_S = 2, 1.2  # the first packet may be lost, or the machine busy
MAX_PORTS, MAX_HOSTS = 2, 2
MIN_GAP_S = 2.0  # between two questions of the same peer
MAX_AT_ONCE = 8
MAX_ASKERS = 1000


@dataclass(frozen=True, slots=True)
class Answer:
    """What one peer found when it dialled us back."""

    asked: str
    reached: tuple[tuple[str, int], ...]
    """Places where it found us."""
    missed: tuple[tuple[str, int], ...]

    @property
    def is_good(self) -> bool:
        """Reached, and over IPv4 if that was tried: many peers have nothing else."""
        if any(_is_ipv4(place) for place in self.missed) and not any(_is_ipv4(place) for place in self.reached):
            return False
        return bool(self.reached)


def _is_ipv4(place: tuple[str, int]) -> bool:
    return ipaddress.ip_address(place[0]).version == 4


def verdict(answers: Sequence[Answer]) -> bool | None:
    """Whether everyone who tried reached us; None if nobody could tell.

    One who cannot is enough for a no: it would lose us in every round.
    """
    return all(answer.is_good for answer in answers) if answers else None


class DialBack(ServicerBase):  # type: ignore[misc]
    """Dials back whoever asks."""

    def __init__(self, p2p: Any) -> None:
        self._p2p = p2p
        self._asked: dict[str, float] = {}
        self._num_dialling = 0

    async def listen(self) -> None:
        await self.add_p2p_handlers(self._p2p, namespace=NAMESPACE)

    async def rpc_dial_back(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """Can you reach me? The request lists ports; the answer each place that was dialled, and whether it was us."""
        asker = context.remote_id.to_base58()
        ports = _read_ports(request.value)
        if not ports or not self._may_ask(asker):
            return BytesValue()
        self._num_dialling += 1
        try:
            places = [(host, port) for host in await self._hosts_of(asker) for port in ports]
            found = await asyncio.gather(*(is_there(asker, host, port) for host, port in places))
        finally:
            self._num_dialling -= 1
        answer = [[host, port, is_there] for (host, port), is_there in zip(places, found, strict=True)]
        return BytesValue(value=msgpack.packb(answer))

    def _may_ask(self, asker: str) -> bool:
        now = time.monotonic()
        if self._num_dialling >= MAX_AT_ONCE or now - self._asked.get(asker, -MIN_GAP_S) < MIN_GAP_S:
            return False
        if len(self._asked) >= MAX_ASKERS:
            self._asked = {peer: asked for peer, asked in self._asked.items() if now - asked < MIN_GAP_S}
        self._asked[asker] = now
        return True

    async def _hosts_of(self, peer_id: str) -> list[str]:
        """Where a peer's connections to us come from, as our own daemon sees it."""
        hosts = []
        for info in await self._p2p.list_peers():
            if info.peer_id.to_base58() == peer_id:
                addresses = [str(address) for address in info.addrs]
                places = [host_and_port(address) for address in addresses if not is_relayed(address)]
                hosts += [place[0] for place in places if place is not None]
        return list(dict.fromkeys(hosts))[:MAX_HOSTS]

    async def ask(self, peer_ids: Sequence[str], ports: Sequence[int], left: Set[str]) -> list[Answer]:
        """Ask a few peers at once to dial us back. Those who do not answer in time have no say.

        Args:
            peer_ids: whom to ask; the first few are.
            ports: where we listen.
            left: hosts we are at no more. Others do not know that our old connection is dead, and try there too.
        """
        asked = peer_ids[:MAX_ASKED]
        request = BytesValue(value=msgpack.packb(list(ports)[:MAX_PORTS]))

        async def ask_one(peer_id: str) -> Answer | None:
            stub = type(self).get_stub(self._p2p, PeerID.from_base58(peer_id), namespace=NAMESPACE)
            try:
                reply = await stub.rpc_dial_back(request, timeout=ASK_TIMEOUT_S)
                return _read_answer(peer_id, reply.value, ports, left)
            except Exception as error:  # noqa: BLE001 - a stranger's bytes, or no answer: it has no say
                logger.info("%s does not tell whether it can reach us: %r", peer_id, error)
                return None

        answers = await asyncio.gather(*(ask_one(peer_id) for peer_id in asked))
        return [answer for answer in answers if answer is not None]


async def is_there(peer_id: str, host: str, port: int) -> bool:
    """Whether that peer answers at that place."""
    for _ in range(NUM_ATTEMPTS):
        try:
            return await asyncio.wait_for(who_answers(host, port), ATTEMPT_TIMEOUT_S) == peer_id
        except TimeoutError:
            continue
        except (OSError, NotAPeer) as error:
            logger.info("%s is not at %s port %d: %r", peer_id, host, port, error)
            return False
    return False


def _read_ports(data: bytes) -> list[int]:
    """The ports of a request; none if it makes no sense."""
    try:
        ports = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException):
        return []
    if not isinstance(ports, list) or not 1 <= len(ports) <= MAX_PORTS:
        return []
    return ports if all(type(port) is int and 0 < port < 65536 for port in ports) else []


def _read_answer(peer_id: str, data: bytes, ports: Sequence[int], left: Set[str]) -> Answer | None:
    """An answer that makes sense, and in which something was dialled at all. May raise anything: it is a stranger's."""
    told = msgpack.unpackb(data) if data else []
    places = [(str(ipaddress.ip_address(host)), port, is_there is True) for host, port, is_there in told]
    if not 1 <= len(places) <= MAX_PORTS * MAX_HOSTS or any(port not in ports for _, port, _ in places):
        return None
    places = [place for place in places if place[0] not in left]
    if not places:
        return None
    return Answer(
        asked=peer_id,
        reached=tuple((host, port) for host, port, is_there in places if is_there),
        missed=tuple((host, port) for host, port, is_there in places if not is_there),
    )
