"""The dashboard in a real browser, beside a real swarm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import SwarmOfProcesses
from playwright.sync_api import Browser, Locator, Page, expect
from processes import wait_until, write_run

HOSTILE = Path(__file__).parent / "hostile_peer.py"
NAME = "<script>alert(1)</script>"
SILENCE_MS = 30_000  # a record lives for 12 s, and this machine is busy


@pytest.mark.timeout(240)
def test_the_page_shows_a_swarm_as_it_is(swarm: SwarmOfProcesses, browser: Browser, tmp_path: Path) -> None:
    aux = swarm.aux(write_run(tmp_path, limits__quarantine_epochs=1000), "aux", "--dashboard", "127.0.0.1:0")
    wait_until(lambda: re.search(r"http://127.0.0.1:\d+/", aux.log.read_text()) is not None, "the address")
    found = re.search(r"http://127.0.0.1:\d+/", aux.log.read_text())
    assert found is not None
    url = found[0]
    swarm.trainer("first", "--name", NAME)
    swarm.trainer("second", "--name", "second")
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

    # a name is only text
    expect(page.locator("#peers tr", has_text=NAME)).to_have_count(1)
    assert page.locator("#peers script").count() == 0

    # who lies is kept out, and it says why; then it is killed, and turns grey
    row = page.locator("#peers tr", has=page.get_by_text("liar", exact=True))
    expect(row).to_contain_text("kept out until epoch", timeout=60_000)
    expect(row).to_contain_text("not finite")
    before = colour(page, row.locator("b"))
    liar.kill()

    # meanwhile: the invite, both themes, a phone
    page.get_by_role("button", name="Copy the command").click()
    expect(page.get_by_role("status")).to_have_text("Command copied")
    assert page.evaluate("navigator.clipboard.readText()") == f"collab train {swarm.invite()}"
    wait_until(lambda: page.locator("#qr").evaluate("picture => picture.naturalWidth") > 0, "the QR code")
    assert serious(page) == []
    paper = colour(page, page.locator("body"), "background-color")
    page.get_by_role("button", name="Switch between light and dark").press("Enter")
    assert colour(page, page.locator("body"), "background-color") != paper
    page.set_viewport_size({"width": 375, "height": 812})
    assert page.evaluate("document.documentElement.scrollWidth") == 375, "nothing sticks out at the side"
    assert serious(page) == []
    page.get_by_role("button", name="Switch between light and dark").press("Enter")
    page.get_by_role("img", name="Loss. From").press("End")
    expect(page.locator("#loss-reading")).to_contain_text("loss")

    expect(row).to_have_attribute("data-presence", "gone", timeout=SILENCE_MS)
    assert colour(page, row.locator("b")) != before
    expect(page.locator("#timeline")).to_contain_text("liar (trainer) left: silent for 12 s.")

    assert [address for address in asked if address.partition("//")[2].partition("/")[0] != url[7:-1]] == []
    assert faults == []

    # the auxiliary ends: the page says so
    assert aux.stop() == 0
    expect(page.get_by_role("alert")).not_to_be_empty()
    context.close()


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
