"""This machine beside those who are already in the run: clock, version, speed."""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from collab_core import __version__
from collab_core.doctor.check import BOTH, Check
from collab_core.swarm import PeerRecord, Swarm, friendly_name
from collab_core.swarm.directory import RECORD_LIFETIME_S
from collab_core.swarm.news import News, Note
from collab_core.swarm.record import unseal
from collab_core.swarm.speed import measure

logger = logging.getLogger(__name__)

MAX_SKEW_S = RECORD_LIFETIME_S / 4  # the rest of its life a record needs to get here
"""Records live for so long by the clock of who made them: with another clock they seem dead, or are not born yet."""
ASK_TIMEOUT_S = 4.0
SLOW = 1e6 / 8  # bytes per second


def clock_checks(swarm: Swarm) -> Iterator[Check]:
    """How far our clock is from those of the first peers, by the middle of the way there and back."""
    offsets: dict[str, float] = {}
    faults: list[str] = []
    for peer_id in swarm.bootstrap_peers:
        try:
            offsets[friendly_name(peer_id)] = swarm.reactor.run(_offset(swarm, peer_id))
        except Exception as error:  # noqa: BLE001 - a stranger that does not answer; perhaps another one does
            faults.append(f"{friendly_name(peer_id)}: {type(error).__name__}")
    if not offsets:
        raise ConnectionError(f"no peer told its time ({'; '.join(faults)})")
    ahead_s = statistics.median(offsets.values())
    words = f"{_duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} {', '.join(offsets)}"
    if abs(ahead_s) <= MAX_SKEW_S:
        yield Check(name="clock", ok=True, detail=f"within {max(abs(ahead_s), 0.1):.1f} s of {', '.join(offsets)}")
        return
    there = time.strftime("%H:%M:%S", time.gmtime(time.time() - ahead_s))
    yield Check(
        name="clock",
        ok=False,
        detail=f"this machine's clock is {words}: {time.strftime('%H:%M:%S', time.gmtime())} UTC here, {there} there. "
        "Others would take what this machine tells for old or forged, and it would see nobody",
        fix="Set the clock: `sudo timedatectl set-ntp true`, or in a virtual machine let it follow its host's. "
        "If it is yours that is right, tell the organiser.",
        rules_out=BOTH,
    )


async def _offset(swarm: Swarm, peer_id: str) -> float:
    """How many seconds our clock is ahead. Asked without saying who we are, so nobody counts on us."""
    # the class's own `get_stub` belongs to a running node, which we are not
    stub = super(DHTProtocol, DHTProtocol).get_stub(swarm.p2p, PeerID.from_base58(peer_id))
    before, start = time.time(), time.monotonic()
    reply = await stub.rpc_ping(dht_pb2.PingRequest(), timeout=ASK_TIMEOUT_S)
    return before + (time.monotonic() - start) / 2 - float(reply.dht_time)


def speed_checks(swarm: Swarm) -> Iterator[Check]:
    """Down and up between us and the first of them that lets itself be measured."""
    faults = []
    for peer_id in swarm.bootstrap_peers:
        name = friendly_name(peer_id)
        try:
            down, up = swarm.reactor.run(measure(swarm.p2p, peer_id))
        except Exception as error:  # noqa: BLE001 - the next one may have time
            faults.append(f"{name}: {str(error) or type(error).__name__}")
            continue
        detail = f"{_megabits(down)} down, {_megabits(up)} up, to {name}"
        if min(down, up) >= SLOW:
            yield Check(name="speed", ok=True, detail=detail)
        else:
            fix = "Use a cable instead of wireless, and stop other uploads; a run with `diloco` needs the least."
            yield Check(name="speed", ok=False, detail=f"{detail}: every round will take long", fix=fix)
        return
    yield Check(
        name="speed",
        ok=False,
        detail=f"nobody could be measured with ({'; '.join(faults)})",
        fix="Try again in a minute. `collab train` measures the link while it uses it.",
    )


def version_checks(swarm: Swarm, run_hash: bytes) -> Iterator[Check]:
    """Whether those in the run have our version of Collab: others may count differently, unseen."""
    records = _records(swarm, run_hash)
    counts = Counter(record.version for record in records if record.role != "observer")
    if not counts:
        yield Check(name="version", ok=True, detail=f"Collab {__version__}; nobody told theirs")
        return
    told = ", ".join(f"{version} on {count}" for version, count in counts.most_common())
    theirs = counts.most_common(1)[0][0]
    if _series(theirs) == _series(__version__):
        yield Check(name="version", ok=True, detail=f"Collab {__version__}, as in the run ({told})")
        return
    yield Check(
        name="version",
        ok=False,
        detail=f"Collab {__version__} is installed here, and the run's peers have {told}",
        fix=f"Install Collab {theirs}: the wheel your organiser gives, or pip install collab-train=={theirs}",
        rules_out=BOTH,
    )


def _records(swarm: Swarm, run_hash: bytes) -> list[PeerRecord]:
    """Everyone's records, from the first who tells; our own clock has no say in which of them count."""
    found: dict[str, PeerRecord] = {}

    def take(notes: Iterable[Note]) -> None:
        for note in notes:
            if (record := unseal(note.value, run_hash, note.peer_id, note.expires)) is not None:
                found[note.peer_id] = record

    for peer_id in swarm.bootstrap_peers:
        try:
            swarm.reactor.run(News(take).ask(swarm.p2p, peer_id, None))
        except Exception as error:  # noqa: BLE001 - a stranger's answer
            logger.info("%s does not tell who is in the run: %r", peer_id, error)
        if found:
            break
    return list(found.values())


def _series(version: str) -> tuple[str, ...]:
    """Versions that differ only in the last number work together."""
    return tuple(version.split(".")[:2])


def _megabits(rate: float) -> str:
    value = rate * 8 / 1e6
    return f"{value:.1f} Mbit/s" if value < 10 else f"{value:,.0f} Mbit/s"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
