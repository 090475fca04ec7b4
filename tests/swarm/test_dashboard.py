"""The dashboard in a real browser, beside a real swarm."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import SwarmOfProcesses
from playwright.sync_api import Browser, Locator, Page, expect
from processes import environment, wait_until, write_run

from collab_core.run.invite import Invite

HOSTILE = Path(__file__).parent / "hostile_peer.py"
NAME = "<script>alert(1)</script>"
PEER = "12D3KooWQ1fJeFovNaRwDh47pzWPTNdRpBTBG4cEwHsVNs1Td9au"
SILENCE_MS = 30_000  # a record lives for 12 s, and this machine is busy


@pytest.mark.timeout(240)
def test_the_page_shows_a_swarm_as_it_is(swarm: SwarmOfProcesses, browser: Browser, tmp_path: Path) -> None:
    aux = swarm.aux(write_run(tmp_path, limits__quarantine_epochs=1000), "aux", "--dashboard", "127.0.0.1:0")
    wait_until(lambda: re.search(r"http://127.0.0.1:\d+/", aux.log.read_text()) is not None, "the address")
    found = re.search(r"http://127.0.0.1:\d+/", aux.log.read_text())
    assert found is not None
    url = found[0]
    swarm.trainer("first", "--name", NAME)
    second = swarm.trainer("second", "--name", "second", "--bandwidth", "80/20")
    liar = swarm.trainer("liar", "--name", "liar", env={"HOSTILE": "nan"}, program=(str(HOSTILE),))

    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    asked: list[str] = []
    faults: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("websocket", lambda socket: asked.append(socket.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    page.goto(url)

    # live
    expect(page.locator("#link")).to_have_text("live")
    wait_until(lambda: epoch_of(page) >= 3, "the third epoch", 60)
    epoch = epoch_of(page)
    wait_until(lambda: epoch_of(page) > epoch, "the next one")
    expect(page.locator("#loss")).to_have_text(re.compile(r"\d\.\d{3}"))
    expect(page.get_by_role("img", name="Loss. From")).to_be_visible()
    expect(page.locator("#loss-note")).to_contain_text("floor 0.340")
    expect(page.locator("#loss-legend")).to_contain_text("floor 0.340")
    expect(page.locator("#progress-text")).to_have_text(re.compile(r"\d+ of 192 samples · last epoch"))
    expect(page.locator("#speed-note")).to_have_text(re.compile(r"\d .* so far"))
    expect(page.locator("#board li").first).to_contain_text("samples")
    expect(page.locator("#board")).to_contain_text(NAME)
    expect(page.locator("#kept")).to_contain_text(re.compile(r"Archive\s*[1-9]\d* versions?"), timeout=30_000)
    expect(page.locator("#versions")).to_contain_text(re.compile(r"epoch \d"))
    expect(page.locator("#texts li").first).to_contain_text(re.compile(r"epoch \d+ · \d\d:\d\d"), timeout=30_000)
    over_tokens = page.locator("#loss-chart").inner_text()
    page.locator("#axis").get_by_text("time", exact=True).click()
    wait_until(lambda: page.locator("#loss-chart").inner_text() != over_tokens, "the loss over time")

    # a name is only text
    expect(page.locator("#peers tr", has_text=NAME)).to_have_count(1)
    assert page.locator("#peers script").count() == 0

    # who lies is kept out, and it says why; then it is killed, and turns grey
    row = page.locator("#peers tr", has=page.get_by_text("liar", exact=True))
    expect(row).to_contain_text("kept out until epoch", timeout=60_000)
    expect(row).to_contain_text("not finite")
    before = colour(page, row.locator("b"))
    other = page.locator("#peers tr", has=page.get_by_text("second", exact=True))
    expect(other).to_have_attribute("data-presence", "here")
    expect(other).to_contain_text("trainer · direct · ↓ 80 ↑ 20 Mbit/s")
    before_it_died = colour(page, other.locator("b"))
    liar.kill()
    second.kill()

    # meanwhile: the invite, both themes, a phone
    page.get_by_role("button", name="Copy the command").click()
    expect(page.get_by_role("status")).to_have_text("Command copied")
    assert page.evaluate("navigator.clipboard.readText()") == f"collab train {swarm.invite()}"
    wait_until(lambda: page.locator("#qr").evaluate("picture => picture.naturalWidth") > 0, "the QR code")
    assert serious(page) == []
    paper = colour(page, page.locator("body"), "background-color")
    page.get_by_role("button", name="Switch between light and dark").press("Enter")
    assert colour(page, page.locator("body"), "background-color") != paper
    assert serious(page) == []
    page.set_viewport_size({"width": 375, "height": 812})
    assert page.evaluate("document.documentElement.scrollWidth") == 375, "nothing sticks out at the side"
    told = re.compile(r"(newest|another) state · seen (now|\d+ s ago)")
    expect(page.locator("#peers tr", has_text=NAME)).to_contain_text(told)
    assert serious(page) == []
    page.get_by_role("button", name="Switch between light and dark").press("Enter")
    assert serious(page) == []
    page.get_by_role("img", name="Loss. From").press("End")
    expect(page.locator("#loss-reading")).to_contain_text("loss")

    expect(row).to_have_attribute("data-presence", "gone", timeout=SILENCE_MS)
    assert colour(page, row.locator("b")) != before
    expect(other).to_have_attribute("data-presence", "gone", timeout=SILENCE_MS)
    assert colour(page, other.locator("b")) != before_it_died
    expect(page.locator("#timeline")).to_contain_text("liar (trainer) left: silent for 12 s.")

    assert [address for address in asked if address.partition("//")[2].partition("/")[0] != url[7:-1]] == []
    assert faults == []

    about = context.new_page()
    about.goto(f"{url}api")
    assert serious(about) == []
    about.close()

    # the auxiliary ends: the page says so
    assert aux.stop() == 0
    expect(page.get_by_role("alert")).not_to_be_empty()
    context.close()


def test_a_run_that_is_not_there_does_not_hide_the_others(swarm: SwarmOfProcesses, tmp_path: Path) -> None:
    swarm.aux(write_run(tmp_path))
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
    nowhere = Invite(run_hash=bytes(32), fingerprint=bytes(16), initial_peers=(address,), name="nowhere").encode()
    command = [sys.executable, "-m", "collab_cli", "dashboard", nowhere, swarm.invite(), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as looking:
        assert looking.stdout is not None
        told = ""
        while "Showing" not in told and (line := looking.stdout.readline()):
            told += line
        looking.send_signal(signal.SIGINT)
        assert looking.wait(20) == 0
    assert "COLLAB-" in told, told
    assert "127.0.0.1" in told.partition("Showing")[0]
    assert "Showing test-run at http://127.0.0.1:" in told


def epoch_of(page: Page) -> int:
    return int(page.locator("#epoch").inner_text() or 0)


def serious(page: Page) -> list[str]:
    """Faults of the page that keep people out, as axe finds them."""
    found = Axe().run(page).response["violations"]
    return [
        f"{fault['id']}: {fault['help']}: {[node['html'][:120] for node in fault['nodes'][:3]]}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
    ]


def colour(page: Page, element: Locator, kind: str = "color") -> str:
    seen: str = element.evaluate(f"element => getComputedStyle(element).getPropertyValue('{kind}')")
    return seen
