"""Whether the first peers of a run answer; and if one does not, which of the many reasons it is."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from collab_core.doctor.check import BOTH, NONE, Check
from collab_core.swarm.addresses import (
    PROBE_TIMEOUT_S,
    host_and_port,
    is_loopback,
    is_public,
    is_relayed,
    peer_of,
)
from collab_core.swarm.handshake import NotAPeer, who_answers
from collab_core.swarm.names import friendly_name


@dataclass(frozen=True, slots=True)
class Found:
    """What came of dialling one address."""

    address: str
    fault: str = ""
    """Empty: the right peer answers there."""
    fix: str = ""


def peer_checks(addresses: Sequence[str]) -> Iterator[Check]:
    """One check per peer. One of them is enough to join; a peer may well have addresses that work only elsewhere."""
    found = asyncio.run(_dial_all(addresses))
    is_cut_off = all(one.fault for one in found)
    for peer_id in dict.fromkeys(peer_of(address) for address in addresses):
        mine = [one for one in found if peer_of(one.address) == peer_id]
        name = f"peer {friendly_name(peer_id)}"
        if good := [_where(one.address) for one in mine if not one.fault]:
            yield Check(name=name, ok=True, detail=f"answers at {', '.join(good)}")
            continue
        yield Check(
            name=name,
            ok=False,
            detail="; ".join(f"{_where(one.address)}: {one.fault}" for one in mine),
            fix=" ".join(dict.fromkeys(one.fix for one in mine)),
            rules_out=BOTH if is_cut_off else NONE,
        )


async def _dial_all(addresses: Sequence[str]) -> list[Found]:
    return list(await asyncio.gather(*(_dial(address) for address in addresses)))


async def _dial(address: str) -> Found:
    place = host_and_port(address)
    if place is None:
        return Found(address)  # another kind of address: only the daemon can tell
    host, port = place
    try:
        who = await asyncio.wait_for(who_answers(host, port), PROBE_TIMEOUT_S)
    except TimeoutError:
        return Found(address, f"no answer within {PROBE_TIMEOUT_S:.0f} s", _silent(host, port))
    except NotAPeer as error:
        fix = f"Ask the organiser for a fresh invite: something else now listens on TCP port {port} of {host}."
        return Found(address, f"something answers, but {error}, so it is no peer", fix)
    except socket.gaierror:
        fix = f"Check that this machine finds names (`getent hosts {host}`), then ask the organiser about {host}."
        return Found(address, f"the name {host} has no address", fix)
    except OSError as error:
        return Found(address, *_failed(error, host, port))
    if who == peer_of(address) or is_relayed(address):
        return Found(address)
    fix = "Ask the organiser for a fresh invite: the peer that made this one got another key, or another place."
    return Found(address, f"another peer answers there ({friendly_name(who)}, …{who[-6:]})", fix)


def _silent(host: str, port: int) -> str:
    return (
        f"Ask the organiser whether the machine {host} is on and its firewall lets TCP port {port} in."
        f"{_private(host)} If others can join, it is your network that does not let you out to TCP port {port}: "
        "try another one, such as a phone's."
    )


def _failed(error: OSError, host: str, port: int) -> tuple[str, str]:
    """Fault and fix of a connection that the system refuses to make."""
    if isinstance(error, ConnectionRefusedError):
        if is_loopback(host):
            fix = f"{host} is this machine itself: ask for an invite that was made where others can reach it."
            return "nothing listens there", fix + " If you are the organiser, start it again: collab aux RUN"
        fix = (
            f"The machine {host} is there, but no peer listens on its TCP port {port}: ask the organiser to start "
            f"`collab aux` again, and for a fresh invite.{_private(host)}"
        )
        return "connection refused", fix
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.ENETUNREACH:
        fix = f"Connect this machine to the internet; `ip route get {host}` should show a way.{_private(host)}"
        return f"there is no way from here ({reason})", fix
    if error.errno in (errno.EHOSTUNREACH, errno.ETIMEDOUT):  # there is a way, but nobody at its end
        return f"no answer ({reason})", _silent(host, port)
    return reason, _silent(host, port)


def _private(host: str) -> str:
    if is_public(f"/ip{6 if ':' in host else 4}/{host}/tcp/1"):
        return ""
    return f" {host} is an address of somebody's own network: it works only there."


def _where(address: str) -> str:
    """The place in an address, for people."""
    place = host_and_port(address)
    if place is None:
        return address
    host = f"[{place[0]}]" if ":" in place[0] else place[0]
    return f"{host} port {place[1]}"
