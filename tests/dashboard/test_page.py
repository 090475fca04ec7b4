"""The page with many peers, and several runs side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from stage import Stage, serve

NUM_PEERS = 200
LOOK_MS = 5000


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[list[Stage]]:
    made = [Stage(tmp_path, "large"), Stage(tmp_path, "small")]
    for number in range(NUM_PEERS):
        made[0].add(f"peer {number}", loss=2.0, samples=number, samples_per_second=10.0)
    made[1].add("the only one", "aux", phase="serving")
    for stage in made:
        stage.speak()
    yield made
    for stage in made:
        stage.close()


@pytest.mark.timeout(120)
def test_two_hundred_peers_that_all_change_leave_the_page_time_for_its_reader(
    browser: Browser, stages: list[Stage]
) -> None:
    large, small = stages
    over = threading.Event()

    def talk() -> None:
        epoch = 1
        while not over.wait(1.0):
            epoch += 1
            large.speak(epoch=epoch, loss=2.0 + 1 / epoch, epoch_samples=epoch)

    speaker = threading.Thread(target=talk)
    with serve(large.watch(), small.watch()) as served:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(served.url)
        expect(page.locator("#peers tr")).to_have_count(NUM_PEERS)
        speaker.start()
        try:
            expect(page.locator("#epoch")).not_to_have_text("1")
            profiler = page.context.new_cdp_session(page)
            profiler.send("Performance.enable", {"timeDomain": "threadTicks"})
            before = busy_s(profiler.send("Performance.getMetrics"))
            page.wait_for_timeout(LOOK_MS)
            share = (busy_s(profiler.send("Performance.getMetrics")) - before) * 1000 / LOOK_MS
            assert 0 < share < 0.5, "the page keeps a core busy"

            page.get_by_role("link", name="small").click()
            expect(page.get_by_role("heading", level=1)).to_have_text("small")
            expect(page.locator("#peers tr")).to_have_count(1)
            expect(page.locator("#state")).to_contain_text("No trainer is here")
        finally:
            over.set()
            speaker.join()
            page.close()


def busy_s(metrics: dict[str, list[dict[str, float]]]) -> float:
    """What the page's thread did so far, in seconds of a processor."""
    return next(metric["value"] for metric in metrics["metrics"] if metric["name"] == "TaskDuration")
