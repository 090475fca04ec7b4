"""How often peers tell each other how far they are: rarely while no round is near, at once when something turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from collab_core.outlook import Outlook
from collab_core.swarm import directory
from collab_core.swarm.directory import MAX_CALM_S, READ_PERIOD_S
from swarm.in_process import ToyPeer, ToySwarm, settings

WATCHED_S = 6.0


@pytest.fixture
def toys(short_folder: Path) -> Iterator[ToySwarm]:
    made = ToySwarm(short_folder, num_values=8)
    yield made
    made.close()


def seen_of(watcher: ToyPeer, peer: ToyPeer) -> tuple[str, int]:
    record = next(one.record for one in watcher.others() if one.peer_id == peer.swarm.peer_id)
    return record.phase, record.epoch_samples


def num_told(watcher: ToyPeer, worker: ToyPeer) -> int:
    """How often the watcher heard of a worker's progress, which is all the time."""
    seen = set()
    begun = time.monotonic()
    for step in range(10**9):
        if time.monotonic() > begun + WATCHED_S:
            break
        worker.swarm.publish(phase="working", epoch_samples=step, samples_per_second=20.0)
        seen.add(seen_of(watcher, worker))
        time.sleep(0.05)
    return len(seen)


def wait_until(happened: Callable[[], bool]) -> float:
    begun = time.monotonic()
    while not happened():
        assert time.monotonic() < begun + 10
        time.sleep(0.02)
    return time.monotonic() - begun


def test_progress_is_told_rarely_while_no_round_is_near_and_a_turn_at_once(toys: ToySwarm) -> None:
    auxiliary, trainer = toys.add("aux"), toys.add("trainer")
    toys.meet()
    often = num_told(auxiliary, trainer)
    trainer.swarm.seconds_left = lambda: 60.0
    rarely = num_told(auxiliary, trainer)
    # what was known before, one piece of news for every while and one on its way, and what is read in the DHT
    assert rarely <= 1 + (WATCHED_S / MAX_CALM_S + 1) + (WATCHED_S / READ_PERIOD_S + 1)
    assert often > rarely
    trainer.swarm.publish(phase="averaging")
    assert wait_until(lambda: seen_of(auxiliary, trainer)[0] == "averaging") < MAX_CALM_S


def test_whom_the_neighbour_keeps_back_stays_in_view_through_the_dht(
    toys: ToySwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in {"RECORD_LIFETIME_S": 4.0, "HEARTBEAT_S": 1.0, "STORE_PERIOD_S": 2.0, "FADING_S": 2.0}.items():
        monkeypatch.setattr(directory, name, seconds)  # a third of what they are
    neighbour, one, other = toys.add("aux"), toys.add(), toys.add()
    toys.meet()
    hidden = other.swarm.peer_id
    news = neighbour.swarm._news
    keep = news.keep
    monkeypatch.setattr(news, "keep", lambda note: None if note.peer_id == hidden else keep(note))
    news._notes.pop(hidden, None)
    begun = time.monotonic()
    while time.monotonic() < begun + 3 * directory.RECORD_LIFETIME_S:
        assert hidden in {peer.peer_id for peer in one.others()}
        time.sleep(0.05)
    assert "peer_left" not in {event["event"] for event in one.log}


def test_a_round_is_as_far_away_as_the_trainers_speed_says(toys: ToySwarm) -> None:
    slow, quick, auxiliary = toys.add(), toys.add(), toys.add("aux")
    toys.meet()
    run = settings(target_batch_size=600)
    outlook = Outlook(auxiliary.swarm, SimpleNamespace(settings=run))  # type: ignore[arg-type]
    assert outlook.seconds_left() == 0, "nobody has begun"
    slow.swarm.publish(phase="working", epoch_samples=50, samples_per_second=5.0)
    quick.swarm.publish(phase="working", epoch_samples=250, samples_per_second=25.0)
    wait_until(lambda: outlook.seconds_left() == pytest.approx(10.0))
    slow.swarm.publish(phase="averaging")
    wait_until(lambda: outlook.seconds_left() == 0)


@pytest.mark.parametrize("is_rumoured", [False, True])  # whoever gives a run folder joins through rumours
def test_who_looks_around_hears_how_far_the_others_are_now(
    toys: ToySwarm, monkeypatch: pytest.MonkeyPatch, is_rumoured: bool
) -> None:
    for name in ("NEWS_PERIOD_S", "DHT_PERIOD_S"):
        monkeypatch.setattr(directory, name, 60.0)  # nobody says anything unasked
    auxiliary, newcomer = toys.add("aux"), toys.add(is_rumoured=is_rumoured)
    toys.meet()
    auxiliary.swarm.publish(epoch=7)
    assert newcomer.others()[0].record.epoch == 0, "this test needs a record that is old by now"
    newcomer.swarm.look_around(lambda: len(newcomer.others()) > 0, newcomer.stop)
    assert newcomer.others()[0].record.epoch == 7
