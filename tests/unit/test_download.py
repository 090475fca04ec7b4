"""Scheduling of a download, with donors of known speed and honesty."""

from __future__ import annotations

import asyncio
import time

import pytest
from blake3 import blake3

from collab_core.state.download import MAX_WINDOW, Donor, Download

CHUNKS = {blake3(data := bytes([n]) * (1000 + n)).digest(): data for n in range(60)}
SIZES = {digest: len(data) for digest, data in CHUNKS.items()}


class Donors:
    """Answers after as long as its speed needs; `dies_after` and `lies_after` count chunks."""

    def __init__(self, seconds: dict[str, float], *, dies_after: int = 1000, lies_after: int = 1000) -> None:
        self.seconds, self.dies_after, self.lies_after = seconds, dies_after, lies_after
        self.given: dict[str, int] = dict.fromkeys(seconds, 0)
        self.locks = {name: asyncio.Lock() for name in seconds}

    async def ask(self, donor: str, digest: bytes) -> bytes:
        async with self.locks[donor]:  # one link: answers come one after the other
            await asyncio.sleep(self.seconds[donor])
        self.given[donor] += 1
        if donor == "bad" and self.given[donor] > self.dies_after:
            raise ConnectionError
        if donor == "bad" and self.given[donor] > self.lies_after:
            return bytes(SIZES[digest])
        return CHUNKS[digest]


def download(donors: Donors, *partial: Donor) -> tuple[Download, dict[str, str], dict[bytes, bytes], list[str]]:
    async def run() -> tuple[Download, dict[str, str], dict[bytes, bytes], list[str]]:
        bad: dict[str, str] = {}
        kept: dict[bytes, bytes] = {}
        made = Download(SIZES, donors.ask, kept.__setitem__, bad.__setitem__)
        helped = await made.run(partial or [Donor(name) for name in donors.seconds])
        return made, bad, kept, helped

    return asyncio.run(run())


def test_everything_comes_and_the_quick_give_more() -> None:
    made, bad, kept, helped = download(donors := Donors({"quick": 0.002, "slow": 0.02}))
    assert kept == CHUNKS
    assert not bad
    assert not made.missing
    assert donors.given["quick"] > 2 * donors.given["slow"]
    assert helped == ["quick", "slow"]


@pytest.mark.parametrize("after", [0, 5, 15])
def test_a_donor_that_dies_costs_what_was_in_flight(after: int) -> None:
    _, bad, kept, _ = download(donors := Donors({"bad": 0.003, "good": 0.003}, dies_after=after))
    assert kept == CHUNKS
    assert bad == {"bad": "the connection broke (ConnectionError)"}
    assert sum(donors.given.values()) <= len(CHUNKS) + 2 * MAX_WINDOW


def test_a_liar_is_set_aside_at_its_first_lie() -> None:
    _, bad, kept, _ = download(donors := Donors({"bad": 0.002, "good": 0.002}, lies_after=3))
    assert kept == CHUNKS
    assert bad == {"bad": "sent bytes that do not match their hash"}
    assert donors.given["bad"] <= 4


def test_the_last_chunks_do_not_wait_for_the_slowest() -> None:
    start = time.monotonic()
    made, _, kept, _ = download(Donors({"quick": 0.001, "stuck": 5.0}))
    assert kept == CHUNKS
    assert time.monotonic() - start < 4
    assert made.wasted_bytes == 0


def test_what_few_have_comes_first_and_what_nobody_has_ends_it() -> None:
    digests = list(CHUNKS)
    rare = set(digests[:5])
    donors = Donors({"all": 0.002, "some": 0.002})
    order: list[bytes] = []
    ask = donors.ask

    async def noted(donor: str, digest: bytes) -> bytes:
        order.append(digest)
        return await ask(donor, digest)

    donors.ask = noted  # type: ignore[method-assign]
    _, bad, kept, _ = download(donors, Donor("all"), Donor("some", has=set(digests[5:])))
    assert kept == CHUNKS
    assert not bad
    assert sum(digest in rare for digest in order[:12]) == 5
    made, _, kept, _ = download(Donors({"some": 0.001}), Donor("some", has=set(digests[5:])))
    assert made.missing == rare
    assert kept.keys() == set(digests[5:])
