"""The site builds without a warning, has no dead links, and asks no other server for anything."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from pages import DOCS, ROOT, prose
from playwright.sync_api import Browser

from collab_core.run import RunFolder, run_template, template_files
from collab_core.templates import Template

LOADING = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("object", "data")}
LOADING_RELATIONS = {"stylesheet", "preload", "preconnect", "dns-prefetch", "icon", "modulepreload", "prefetch"}


class Html(HTMLParser):
    """What a page loads, where it links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        self.loads += [given[name] for where, name in LOADING if where == tag and name in given]
        if tag == "link" and LOADING_RELATIONS & set(given.get("rel", "").split()):
            self.loads.append(given["href"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_a_new_run_has_a_page_to_join_by(tmp_path: Path) -> None:
    files = template_files("green-otter", Template.TINY_GPT)
    run = RunFolder.create(tmp_path / "run", run_template("green-otter", Template.TINY_GPT), files)
    assert run.tell_invite("collab1_abcdef", "http://192.0.2.1:8420/")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"],
        cwd=run.path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert built.returncode == 0, built.stderr
    page = (run.path / "public" / "index.html").read_text()
    assert "Join green-otter</h1>" in page
    assert "collab train collab1_abcdef" in re.sub("<[^>]*>", "", page)
    assert '<a href="http://192.0.2.1:8420/">' in page
    for notebook in ("collab-kaggle.ipynb", "collab-colab.ipynb"):
        assert notebook in Html(page).links
        assert "collab1_abcdef" in (run.path / "public" / notebook).read_text()
    assert all(not is_external(link) for link in Html(page).loads)
    for template, needed in ((Template.CAUSAL_LM, "--data-dir"), (Template.CUSTOM, "`green-otter-task`")):
        assert needed in template_files("green-otter", template)["join.md"].decode()


@pytest.fixture(scope="module")
def html(site: Path) -> dict[Path, Html]:
    return {path: Html(path.read_text()) for path in site.rglob("*.html")}


def is_external(link: str) -> bool:
    return bool(urlsplit(link).scheme or urlsplit(link).netloc)


def test_nothing_is_loaded_from_another_server(site: Path, html: dict[Path, Html]) -> None:
    assert [(path.name, link) for path, page in html.items() for link in page.loads if is_external(link)] == []
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", path.read_text()), path.name


def test_every_internal_link_leads_somewhere(site: Path, html: dict[Path, Html]) -> None:
    dead = []
    for path, page in html.items():
        if path.name == "404.html":  # its links are absolute: it may be shown at any address
            continue
        for link in (*page.links, *page.loads):
            if is_external(link):
                continue
            where, _, anchor = unquote(link).partition("#")
            target = (path.parent / where).resolve() if where else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (anchor and target in html and anchor not in html[target].anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_relative_link_of_the_front_pages_leads_to_a_file(name: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(ROOT / name)) if not is_external(link)]
    missing = [link for link in links if not (ROOT / link.partition("#")[0]).is_file()]
    assert missing == []


def test_every_file_the_pages_name_exists() -> None:
    """Paths in backticks that begin with one of the repository's folders."""
    missing = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for name in re.findall(r"`((?:cli|core|trainer|aux_peer|tests|docs)/[\w/.]+)`", prose(page)):
            if not (ROOT / name).exists():
                missing.append(f"{page.name}: {name}")
    assert missing == []


def test_code_quoted_on_the_page_of_the_four_moves_is_the_code() -> None:
    page = (ROOT / "docs" / "concepts" / "four-moves.md").read_text()
    source = (ROOT / "trainer" / "collab_trainer" / "trainer.py").read_text()
    quoted = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert quoted
    assert all(textwrap.indent(code, "    ") in source for code in quoted)


@pytest.fixture(scope="module")
def site_url(site: Path) -> Iterator[str]:
    handler = partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing: only the browser's complaints count."""


def test_every_page_fits_a_screen_and_a_phone(browser: Browser, site: Path, site_url: str) -> None:
    page = browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("response", lambda answer: complaints.append(answer.url) if answer.status >= 400 else None)
    for path in sorted(site.rglob("index.html")):
        address = f"{site_url}/{path.parent.relative_to(site).as_posix()}/".replace("/./", "/")
        page.set_viewport_size({"width": 1440, "height": 900})
        page.goto(address)
        for width in (1440, 375):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{address} sticks out at the side"
        broken = "[...document.images].filter(one => one.complete && !one.naturalWidth).map(one => one.src)"
        assert page.evaluate(broken) == [], address
        assert complaints == [], address


def test_terminals_in_pictures_are_alive() -> None:
    for path in (DOCS / "images").glob("terminal-*.svg"):
        assert "Pane is dead" not in path.read_text(), path.name
