"""Takes the pictures of the docs: real commands in real terminals (tmux), a real browser, one live run.

python docs/record_pictures.py        writes docs/images/terminal-*.svg and dashboard-*.png; five minutes

Needs tmux and Chromium, and `make venv`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

IMAGES = Path(__file__).parent / "images"
LOOPBACK = "--host-maddrs /ip4/127.0.0.1/tcp/0"
SERVER = f"collab-{os.getpid()}"
FRAME_S = 0.5
FRAME = """<g class="frame" style="animation-delay: {delay:.2f}s">{matrix}</g>"""
MOVING = """
<style>
.frame {{ opacity: 0; animation: show {length:.2f}s steps(1) infinite }}
@keyframes show {{ 0% {{ opacity: 1 }} {share:.4f}% {{ opacity: 0 }} }}
@media (prefers-reduced-motion: reduce) {{ .frame {{ animation: none }} .frame:last-of-type {{ opacity: 1 }} }}
</style>
"""


@dataclass(frozen=True)
class Size:
    columns: int
    rows: int

    def __str__(self) -> str:
        return f"{self.columns}x{self.rows}"


class Terminal:
    """A terminal of a given size in which one command runs."""

    def __init__(self, name: str, size: Size, command: str, folder: Path) -> None:
        self.name, self.size = name, size
        run = f"cd {shlex.quote(str(folder))} && clear && exec {command}"
        geometry = ["-x", str(size.columns), "-y", str(size.rows)]
        self._tmux("new-session", "-d", "-s", self.name, *geometry, "bash", "-c", run)
        self._tmux("set-option", "-t", self.name, "remain-on-exit", "on")
        self._tmux("set-option", "-t", self.name, "status", "off")
        self._tmux("resize-window", "-t", self.name, *geometry)

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-L", SERVER, *arguments]  # a server of its own has our environment
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def screen(self) -> str:
        """What it shows now, with its colours."""
        return self._tmux("capture-pane", "-p", "-e", "-t", self.name)

    def wait_for(self, text: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self._tmux("capture-pane", "-p", "-t", self.name):
            assert time.monotonic() < deadline, f"{self.name} never showed {text!r}:\n{self.screen()}"
            time.sleep(0.1)

    def find(self, pattern: str) -> str:
        found = re.search(pattern, self._tmux("capture-pane", "-p", "-t", self.name))
        assert found is not None, self.screen()
        return found[0]

    def wait_until_ended(self, timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while self._tmux("display-message", "-p", "-t", self.name, "#{pane_dead}").strip() != "1":
            assert time.monotonic() < deadline, f"{self.name} does not end"
            time.sleep(0.1)

    def interrupt(self) -> None:
        self._tmux("send-keys", "-t", self.name, "C-c")

    def close(self) -> None:
        self._tmux("kill-session", "-t", self.name)


@contextlib.contextmanager
def terminal(name: str, size: Size, command: str, folder: Path) -> Iterator[Terminal]:
    opened = Terminal(name, size, command, folder)
    try:
        yield opened
    finally:
        opened.close()


def svg(screens: list[str], size: Size, title: str) -> str:
    """One picture of several screens, shown in turn; each distinct one once."""
    frames = [_frame(screen, size, title, number) for number, screen in enumerate(screens)]
    if len(frames) == 1:
        return frames[0]
    length = len(frames) * FRAME_S
    matrices = [frame[frame.index("<!--matrix-->") : frame.index("<!--end-->")] for frame in frames]
    styles = "".join(frame[frame.index("<style>") : frame.index("</style>") + 8] for frame in frames)
    shown = "".join(
        FRAME.format(delay=number * FRAME_S - length, matrix=matrix) for number, matrix in enumerate(matrices)
    )
    head = frames[0][: frames[0].index("<!--matrix-->")]
    tail = frames[0][frames[0].index("<!--end-->") :]
    return head + styles + MOVING.format(length=length, share=100 / len(frames)) + shown + tail


def _frame(screen: str, size: Size, title: str, number: int) -> str:
    console = Console(record=True, width=size.columns, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    lines = screen.rstrip("\n").split("\n")
    for line in [*lines, *[""] * (size.rows - len(lines))]:
        console.print(Text.from_ansi(line), no_wrap=True, overflow="crop", end="\n")
    return console.export_svg(title=title, theme=MONOKAI, unique_id=f"t{number}", code_format=FORMAT)


FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
<!--matrix-->{backgrounds}<g class="{unique_id}-matrix">{matrix}</g><!--end-->
</g>
</svg>
"""


def collect(opened: Terminal, seconds: float) -> list[str]:
    screens = []
    begun = time.monotonic()
    for number in range(int(seconds / FRAME_S)):
        time.sleep(max(0.0, begun + number * FRAME_S - time.monotonic()))
        screens.append(opened.screen())
    return screens


class Stage:
    """A folder with a run in it, and the terminals of those who take part."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.collab = f"{Path(sys.executable).parent}/collab"
        os.environ.update(COLLAB_HOME=f"{folder}/home", OMP_NUM_THREADS="1")
        subprocess.run([self.collab, "new", "my-run"], cwd=folder, check=True, stdout=subprocess.DEVNULL)

    def open(self, name: str, size: Size, command: str) -> Terminal:
        return self._stack.enter_context(terminal(name, size, f"{self.collab} {command}", self._folder))

    def invite(self) -> str:
        return (self._folder / "invite.txt").read_text().strip()


def leave(*terminals: Terminal) -> None:
    for opened in terminals:
        opened.interrupt()
    for opened in terminals:
        opened.wait_for("Left")


def record_run(stage: Stage, small: Size, large: Size) -> dict[str, str]:
    """A run with an auxiliary and some trainers, as they see it, and as the dashboard shows it."""
    pictures = {}
    aux = stage.open("aux", large, f"aux my-run {LOOPBACK} --invite-file invite.txt --dashboard 127.0.0.1:0")
    aux.wait_for("Press Ctrl-C")
    train = f"train {stage.invite()} --name"
    ben = stage.open("ben", small, f"{train} ben {LOOPBACK}")
    ben.wait_for("working")
    anna = stage.open("anna", small, f"{train} anna {LOOPBACK}")
    pictures["train-80x24"] = svg(collect(anna, 24), small, "collab train collab1_…")
    zoe = stage.open("zoe", large, f"{train} zoe --client-mode")
    zoe.wait_for("working")
    pictures[f"train-{large}"] = svg(collect(zoe, 12)[-1:], large, "collab train collab1_…")
    for size in (small, large):
        watch = stage.open(f"watch-{size}", size, f"watch {stage.invite()}")
        watch.wait_for("samples, ")
        pictures[f"watch-{size}"] = svg(collect(watch, 2)[-1:], size, "collab watch collab1_…")
        watch.interrupt()
    photograph_dashboard(aux.find(r"http://127\.0\.0\.1:\d+/?"))
    leave(anna, ben, zoe)
    leave(aux)
    return pictures


def photograph_dashboard(url: str) -> None:
    """The page, wide and narrow, by day and by night, as it is now."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, width, height in (("", 1440, 1300), ("phone-", 375, 1600)):
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.goto(url)
                page.wait_for_timeout(4000)  # it is live: some updates have come then
                page.screenshot(path=IMAGES / f"dashboard-{name}{scheme}.png")
        browser.close()


def record_demo(stage: Stage, small: Size, large: Size) -> dict[str, str]:
    pictures = {}
    for size, seconds in ((large, 14), (small, 40)):
        demo = stage.open(f"demo-{size}", size, "demo --epochs 20")
        demo.wait_for("trainer")
        screens = collect(demo, seconds)
        pictures[f"demo-{size}"] = svg(screens if size is small else screens[-1:], size, "collab demo")
        demo.interrupt()
        demo.wait_until_ended()
    return pictures


def main() -> None:
    small, large = Size(80, 24), Size(160, 50)
    with tempfile.TemporaryDirectory(prefix="collab-record-") as name, contextlib.ExitStack() as stack:
        stage = Stage(Path(name), stack)
        pictures = record_run(stage, small, large) | record_demo(stage, small, large)
    for name, picture in pictures.items():
        (IMAGES / f"terminal-{name}.svg").write_text(picture)
        print(f"wrote terminal-{name}.svg, {len(picture) // 1024} KiB")


if __name__ == "__main__":
    main()
