"""Scheduling of a download, with donors of known speed and honesty."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection
from pathlib import Path

import pytest
from blake3 import blake3

from collab_core.state.download import (
    MAX_CHUNKS_PER_REQUEST,
    MAX_WINDOW,
    Chunks,
    DonorBusy,
    Download,
    pack_request,
    unpack_request,
)
from collab_core.state.pool import ChunkPool
from collab_core.tree import CHUNK_BYTES

CHUNKS = {blake3(data := bytes([n]) * (CHUNK_BYTES - n)).digest(): data for n in range(60)}
SMALL = {blake3(data := n.to_bytes(2, "big") * 50).digest(): data for n in range(3000)}
SIZES = {digest: len(data) for digest, data in CHUNKS.items()}


class Donors:
    """Answers after as long as its speed needs; `dies_after` and `lies_after` count chunks."""

    def __init__(self, seconds: dict[str, float], *, dies_after: int = 1000, lies_after: int = 1000) -> None:
        self.seconds, self.dies_after, self.lies_after = seconds, dies_after, lies_after
        self.given: dict[str, int] = dict.fromkeys(seconds, 0)
        self.locks = {name: asyncio.Lock() for name in seconds}

    async def ask(self, donor: str, wanted: Chunks) -> bytes:
        async with self.locks[donor]:  # one link: answers come one after the other
            await asyncio.sleep(self.seconds[donor])
        self.given[donor] += 1
        if donor == "bad" and self.given[donor] > self.dies_after:
            raise ConnectionError
        if donor == "bad" and self.given[donor] > self.lies_after:
            return bytes(sum(SIZES[digest] for digest in wanted))
        return b"".join(CHUNKS.get(digest) or SMALL[digest] for digest in wanted)


Result = tuple[Download, dict[str, str], dict[bytes, bytes]]


def download(donors: Donors, sizes: dict[bytes, int] = SIZES, **has: Collection[bytes]) -> Result:
    async def run() -> Result:
        bad: dict[str, str] = {}
        kept: dict[bytes, bytes] = {}
        made = Download(sizes, donors.ask, kept.__setitem__, bad.__setitem__)
        for name in donors.seconds:
            made.offer(name, has.get(name))
        await made.run()
        return made, bad, kept

    return asyncio.run(run())


def test_everything_comes_and_the_quick_give_more() -> None:
    made, bad, kept = download(donors := Donors({"quick": 0.002, "slow": 0.02}))
    assert kept == CHUNKS
    assert not bad
    assert not made.missing
    assert donors.given["quick"] > 2 * donors.given["slow"]
    assert made.helpers == ("quick", "slow")


@pytest.mark.parametrize("after", [0, 5, 15])
def test_a_donor_that_dies_costs_what_was_in_flight(after: int) -> None:
    donors = Donors({"bad": 0.003, "good": 0.003}, dies_after=after)
    under_way: dict[Chunks, int] = {}
    total_asked = 0
    ask = donors.ask

    async def noted(donor: str, wanted: Chunks) -> bytes:
        nonlocal total_asked
        size = sum(SIZES[digest] for digest in wanted)
        total_asked += size
        if donor == "bad":
            under_way[wanted] = size
        data = await ask(donor, wanted)
        if donor == "bad":
            del under_way[wanted]
        return data

    donors.ask = noted  # type: ignore[method-assign]
    made, bad, kept = download(donors)
    assert kept == CHUNKS
    assert bad == {"bad": "the connection broke (ConnectionError)"}
    assert made.lost_bytes == {"bad": sum(under_way.values())}
    assert made.lost_bytes["bad"] <= MAX_WINDOW * CHUNK_BYTES
    assert total_asked <= sum(SIZES.values()) + made.lost_bytes["bad"] + made.late_bytes


def test_a_busy_donor_is_asked_again_later_and_for_less() -> None:
    donors = Donors({"capped": 0.002})
    asked_at_once, refused = 0, 0
    ask = donors.ask

    async def one_at_a_time(donor: str, wanted: Chunks) -> bytes:
        nonlocal asked_at_once, refused
        if asked_at_once:
            refused += 1
            raise DonorBusy
        asked_at_once += 1
        try:
            return await ask(donor, wanted)
        finally:
            asked_at_once -= 1

    donors.ask = one_at_a_time  # type: ignore[method-assign]
    _, bad, kept = download(donors)
    assert kept == CHUNKS
    assert not bad
    assert 1 <= refused < MAX_WINDOW  # once it was told, it asks for one thing at a time


def test_a_donor_that_is_always_busy_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collab_core.state.download.BUSY_PATIENCE_S", 0.6)
    donors = Donors({"busy": 0.0})

    async def never(donor: str, wanted: Chunks) -> bytes:
        raise DonorBusy

    donors.ask = never  # type: ignore[method-assign]
    made, bad, _ = download(donors)
    assert made.missing == set(CHUNKS)
    assert "too busy" in bad["busy"]


def test_a_liar_is_set_aside_at_its_first_lie() -> None:
    _, bad, kept = download(donors := Donors({"bad": 0.002, "good": 0.002}, lies_after=3))
    assert kept == CHUNKS
    assert bad == {"bad": "sent bytes that do not match their hash"}
    assert donors.given["bad"] <= 3 + MAX_WINDOW


def test_the_last_chunks_do_not_wait_for_the_slowest() -> None:
    start = time.monotonic()
    made, _, kept = download(Donors({"quick": 0.001, "stuck": 5.0}))
    assert kept == CHUNKS
    assert time.monotonic() - start < 4
    assert made.wasted_bytes == 0


def test_what_few_have_comes_first_and_what_nobody_has_ends_it() -> None:
    digests = list(CHUNKS)
    rare = set(digests[:5])
    donors = Donors({"all": 0.002, "some": 0.002})
    order: list[bytes] = []
    ask = donors.ask

    async def noted(donor: str, wanted: Chunks) -> bytes:
        order.extend(wanted)
        return await ask(donor, wanted)

    donors.ask = noted  # type: ignore[method-assign]
    _, bad, kept = download(donors, some=set(digests[5:]))
    assert kept == CHUNKS
    assert not bad
    assert sum(digest in rare for digest in order[:12]) == 5
    made, _, kept = download(Donors({"some": 0.001}), some=set(digests[5:]))
    assert made.missing == rare
    assert kept.keys() == set(digests[5:])


def test_small_chunks_travel_together() -> None:
    donors = Donors({"one": 0.001, "two": 0.001})
    _, _, kept = download(donors, {digest: len(data) for digest, data in SMALL.items()})
    assert kept == SMALL
    assert sum(donors.given.values()) <= 2 * (1 + len(SMALL) // MAX_CHUNKS_PER_REQUEST)


def test_a_newcomer_that_lost_what_it_had_is_not_blamed_and_asked_again_when_it_has_something() -> None:
    async def run() -> tuple[dict[str, str], dict[bytes, bytes]]:
        bad: dict[str, str] = {}
        kept: dict[bytes, bytes] = {}
        answers = iter([b""])

        async def ask(donor: str, wanted: Chunks) -> bytes:
            if donor == "newcomer" and (empty := next(answers, None)) is not None:
                return empty
            await asyncio.sleep(0.01)
            return b"".join(CHUNKS[digest] for digest in wanted)

        made = Download(SIZES, ask, kept.__setitem__, bad.__setitem__)
        made.offer("holder")
        made.offer("newcomer", set(SIZES))
        running = asyncio.create_task(made.run())
        await asyncio.sleep(0.05)
        made.offer("newcomer")  # it has everything by now
        await running
        assert "newcomer" in made.helpers
        return bad, kept

    assert asyncio.run(run()) == ({}, CHUNKS)


def test_requests_are_read_as_they_were_written_and_nonsense_asks_for_nothing() -> None:
    digests = list(SMALL)[:MAX_CHUNKS_PER_REQUEST]
    assert unpack_request(pack_request(digests)) == digests
    assert unpack_request(pack_request(list(SMALL)[: MAX_CHUNKS_PER_REQUEST + 1])) == []
    assert unpack_request(b"x" * 33) == []


def fill_pool(path: Path, wanted: Collection[bytes], chunks: dict[bytes, bytes]) -> None:
    pool = ChunkPool(path)
    pool.open(wanted, lambda *_: None)
    for digest, chunk in chunks.items():
        pool.add(digest, chunk)
    pool.close()


def left_in(path: Path, wanted: Collection[bytes]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    pool = ChunkPool(path)
    pool.open(wanted, found.__setitem__)
    pool.close()
    return found


def test_a_pool_keeps_what_is_right_and_wanted(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    chunks = dict(list(CHUNKS.items())[:6])
    fill_pool(path, chunks, chunks)
    assert left_in(path, chunks) == chunks
    some = list(chunks)[:2]
    assert left_in(path, some).keys() == set(some)
    assert path.stat().st_size < 3 * CHUNK_BYTES  # the state moved on: what nobody wants any more is gone
    ChunkPool(path).clear()
    assert not path.exists()


def test_no_damage_to_a_pool_gives_wrong_bytes_or_stops_the_next_download(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    chunks = dict(list(SMALL.items())[:20])
    fill_pool(path, chunks, chunks)
    sound = path.read_bytes()
    rng = random.Random(0)
    for _ in range(200):
        damaged = bytearray(sound[: rng.randrange(len(sound) + 1)])
        if damaged:
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        found = left_in(path, chunks)
        assert found.items() <= chunks.items()
        rest = {digest: chunk for digest, chunk in chunks.items() if digest not in found}
        fill_pool(path, chunks, rest)
        assert left_in(path, chunks) == chunks


def test_a_full_disk_does_not_stop_a_download(tmp_path: Path) -> None:
    pool = ChunkPool(Path("/dev/full"))
    pool.open((), lambda *_: None)
    pool.add(b"d" * 32, b"chunk")
    pool.add(b"e" * 32, b"chunk")
    pool.close()
