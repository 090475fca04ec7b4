"""A connection's two ends in one process: long and short, cut, closed and given up."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from collab_core.averaging.pipe import LONG_BYTES, PIECE_BYTES, Line, Pipe
from collab_core.swarm.reactor import Reactor

WITHIN_S = 20.0
Counts = dict[str, int]


async def open_pipe(end: socket.socket) -> tuple[Pipe, Counts]:
    reader, writer = await asyncio.open_connection(sock=end)
    counts = {"received": 0, "sent": 0}

    def count(direction: str) -> Callable[[int, float], None]:
        def add(num_bytes: int, seconds: float) -> None:
            assert seconds >= 0
            counts[direction] += num_bytes

        return add

    return Pipe(reader, writer, count("received"), count("sent")), counts


def between_two(scene: Callable[[Pipe, Pipe, Counts, Counts], Awaitable[None]]) -> None:
    """Run a scene with both ends of a connection; afterwards no descriptor of it is left."""
    one, other = socket.socketpair()
    ends = {f"socket:[{os.fstat(end.fileno()).st_ino}]" for end in (one, other)}

    async def run() -> None:
        (a, counts_a), (b, counts_b) = await open_pipe(one), await open_pipe(other)
        try:
            await asyncio.wait_for(scene(a, b, counts_a, counts_b), WITHIN_S)
        finally:
            a.close()
            b.close()

    asyncio.run(run())
    assert not ends & set(map(_target, os.listdir("/proc/self/fd")))


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # that of the listing, and other threads'
        return ""


@pytest.mark.parametrize("size", [0, 1, LONG_BYTES - 1, LONG_BYTES, PIECE_BYTES, 3 * PIECE_BYTES + 17])
def test_what_is_sent_arrives_in_both_directions_at_once_and_is_counted(size: int) -> None:
    there, back = os.urandom(size), os.urandom(size)

    async def scene(a: Pipe, b: Pipe, counts_a: Counts, counts_b: Counts) -> None:
        at_a, at_b = bytearray(size), bytearray(size)
        await asyncio.gather(
            a.send(memoryview(there)), b.send(memoryview(back)), a.fill(memoryview(at_a)), b.fill(memoryview(at_b))
        )
        assert at_b == there
        assert at_a == back
        assert counts_a == counts_b == {"received": size, "sent": size}

    between_two(scene)


def test_what_came_before_the_pipe_took_over_is_not_lost() -> None:
    async def scene() -> None:
        one, other = socket.socketpair()
        other.sendall(b"early")
        reader, writer = await asyncio.open_connection(sock=one)
        while not reader._buffer:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
        pipe = Pipe(reader, writer, lambda *_: None, lambda *_: None)
        other.sendall(b" and late")
        target = bytearray(14)
        await pipe.fill(memoryview(target))
        assert target == b"early and late"
        pipe.close()
        other.close()

    asyncio.run(asyncio.wait_for(scene(), WITHIN_S))


@pytest.mark.parametrize("size", [10, 2 * LONG_BYTES])
@pytest.mark.parametrize("who", ["this side", "the other side"])
def test_who_waits_for_bytes_hears_that_the_stream_was_closed(size: int, who: str) -> None:
    async def scene(a: Pipe, b: Pipe, *counts: Counts) -> None:
        waiting = asyncio.create_task(a.fill(memoryview(bytearray(size))))
        await b.send(memoryview(b"half"))
        await asyncio.sleep(0)
        (a if who == "this side" else b).close()
        with pytest.raises(ConnectionError):
            await waiting
        with pytest.raises(ConnectionError):
            await a.send(memoryview(bytes(size)))

    between_two(scene)


@pytest.mark.parametrize("who", ["this side", "the other side"])
def test_who_sends_to_somebody_that_does_not_read_hears_that_the_stream_was_closed(who: str) -> None:
    async def scene(a: Pipe, b: Pipe, counts: Counts, _: Counts) -> None:
        sending = asyncio.create_task(a.send(memoryview(bytes(2**23))))
        await b.fill(memoryview(bytearray(1)))
        assert not sending.done()
        (a if who == "this side" else b).close()
        with pytest.raises(ConnectionError):
            await sending
        assert counts["sent"] < 2**23

    between_two(scene)


def test_who_gives_up_receiving_can_still_send_and_wait_for_the_end() -> None:
    """As a reducer does that tells a sender why it gets nothing."""

    async def scene(a: Pipe, b: Pipe, *counts: Counts) -> None:
        receiving = asyncio.create_task(a.fill(memoryview(bytearray(2**20))))
        await b.send(memoryview(bytes(2**18)))
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        ending = asyncio.create_task(a.ended())
        await a.send(memoryview(b"no"))
        await b.send(memoryview(bytes(2**21)))  # it is thrown away
        answer = bytearray(2)
        await b.fill(memoryview(answer))
        assert answer == b"no"
        assert not ending.done()
        b.close()
        await ending

    between_two(scene)


def test_after_sending_was_given_up_nothing_more_is_read_of_the_memory() -> None:
    """Its owner may change it at once: the other side must not get a mixture."""
    data = bytearray(2**23)

    async def scene(a: Pipe, b: Pipe, *counts: Counts) -> None:
        sending = asyncio.create_task(a.send(memoryview(data)))
        await b.fill(memoryview(bytearray(1)))
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        data[:] = b"\xff" * len(data)
        rest = bytearray(len(data))
        with pytest.raises(ConnectionError):
            await b.fill(memoryview(rest))
        assert not any(rest)

    between_two(scene)


def test_a_thread_waits_no_longer_than_it_was_told_however_much_came_meanwhile() -> None:
    async def scene(a: Pipe, b: Pipe, *counts: Counts) -> None:
        async def trickle() -> None:
            while True:
                await b.send(memoryview(b"little"))
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            await a.in_thread(lambda line: line.fill(memoryview(bytearray(2**20)), 0.4))
        with pytest.raises(TimeoutError):
            await b.in_thread(lambda line: line.send(memoryview(bytes(2**23)), b"head", 0.4))
        assert 0.8 <= time.monotonic() - started < WITHIN_S / 2
        trickling.cancel()

    between_two(scene)


def test_one_thread_sends_heads_and_bodies_and_another_one_takes_them() -> None:
    bodies = [os.urandom(size) for size in (0, 3, LONG_BYTES, PIECE_BYTES + 5)]

    async def scene(a: Pipe, b: Pipe, counts_a: Counts, counts_b: Counts) -> None:
        def send(line: Line) -> None:
            for number, body in enumerate(bodies):
                line.send(memoryview(body), bytes([number]), WITHIN_S)

        def take(line: Line) -> list[bytes]:
            taken = []
            for number, body in enumerate(bodies):
                head, target = bytearray(1), bytearray(len(body))
                line.fill(memoryview(head), WITHIN_S)
                line.fill(memoryview(target), WITHIN_S)
                assert head[0] == number
                taken.append(bytes(target))
            return taken

        taken, _ = await asyncio.gather(b.in_thread(take), a.in_thread(send))
        assert taken == bodies
        assert counts_a["sent"] == counts_b["received"] == sum(map(len, bodies)) + len(bodies)

    between_two(scene)


def test_a_thread_hears_that_the_stream_was_closed() -> None:
    async def scene(a: Pipe, b: Pipe, *counts: Counts) -> None:
        waiting = asyncio.create_task(a.in_thread(lambda line: line.fill(memoryview(bytearray(10)), WITHIN_S)))
        await b.send(memoryview(b"half"))
        a.close()
        with pytest.raises(ConnectionError):
            await waiting

    between_two(scene)


def test_many_pipes_at_once_each_have_a_thread() -> None:
    """More than a loop's executor has by default: with fewer, two sides could wait for each other for ever."""

    async def all_at_once() -> None:
        ends = [socket.socketpair() for _ in range(40)]
        pipes = [[(await open_pipe(end))[0] for end in pair] for pair in ends]
        targets = [bytearray(2**20) for _ in pipes]
        receiving = [asyncio.create_task(b.fill(memoryview(t))) for (_, b), t in zip(pipes, targets, strict=True)]
        await asyncio.sleep(0)
        await asyncio.gather(*(a.send(memoryview(b"\x01" * 2**20)) for a, _ in pipes), *receiving)
        assert all(target == b"\x01" * 2**20 for target in targets)
        for pair in pipes:
            for pipe in pair:
                pipe.close()

    reactor = Reactor()
    reactor.run(all_at_once(), timeout_s=WITHIN_S)
    reactor.close()
