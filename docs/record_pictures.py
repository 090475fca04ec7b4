"""Takes the pictures of the docs: real commands in real terminals (tmux), a real browser, one live run.

python docs/record_pictures.py        writes docs/images/terminal-*.svg and dashboard-*.png; five minutes

Needs tmux and Chromium, and `make venv`.
"""

from __future__ import annotations

import contextlib
import html
import itertools
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
from rich.style import Style
from rich.terminal_theme import MONOKAI as THEME
from rich.text import Text

CONSOLE = Console(force_terminal=True, width=1000)
IMAGES = Path(__file__).parent / "images"
LOOPBACK = "--host-maddrs /ip4/127.0.0.1/tcp/0"
SERVER = f"collab-{os.getpid()}"
FRAME_S = 0.5
LAST_S = 5.0  # how long a moving picture rests at its end

CELL = (9.0, 19.0)
FONT = 15
MARGIN, TITLE_BAR = 12, 34
BLOCKS = "▁▂▃▄▅▆▇█"
PICTURE = """<svg viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{title}">
<style>
g rect {{ shape-rendering: crispEdges }}
text {{ font: {font}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }}
.b {{ font-weight: bold }}
{styles}
</style>
<rect width="100%" height="100%" rx="8" fill="{background}"/>
<circle cx="20" cy="18" r="6" fill="#ff5f57"/><circle cx="40" cy="18" r="6" fill="#febc2e"/>
<circle cx="60" cy="18" r="6" fill="#28c840"/>
<text x="50%" y="23" text-anchor="middle" fill="{foreground}">{title}</text>
<g transform="translate({margin}, {top})">
{rows}
</g>
</svg>
"""
MOVING = """.m {{ visibility: hidden; animation: {length:g}s step-end infinite }}
@media (prefers-reduced-motion: reduce) {{ .m {{ animation: none !important }} .last {{ visibility: visible }} }}
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
        self._tmux("set-option", "-t", self.name, "remain-on-exit-format", "")  # else tmux says that it is dead
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
    """One picture of several screens, shown in turn. What stays for some of them is drawn once."""
    drawn = [_rows(screen, size) for screen in screens]
    length = (len(drawn) - 1) * FRAME_S + LAST_S
    shown: dict[tuple[int, int], list[str]] = {}
    for row in range(size.rows):
        first = 0
        for number in range(1, len(drawn) + 1):
            if number == len(drawn) or drawn[number][row] != drawn[first][row]:
                shown.setdefault((first, number), []).append(drawn[first][row])
                first = number
    styles, groups = "", ""
    for (first, end), rows in sorted(shown.items()):
        is_last = end == len(drawn)
        if first == 0 and is_last:
            groups += "".join(rows)
            continue
        steps = {0: "hidden", 100 * first * FRAME_S / length: "visible"}
        if not is_last:
            steps[100 * end * FRAME_S / length] = "hidden"
        moments = " ".join(f"{moment:.3f}% {{ visibility: {what} }}" for moment, what in steps.items())
        styles += f"@keyframes f{first}-{end} {{ {moments} }}\n.f{first}-{end} {{ animation-name: f{first}-{end} }}\n"
        groups += f'<g class="m {"last " if is_last else ""}f{first}-{end}">{"".join(rows)}</g>\n'
    return PICTURE.format(
        width=size.columns * CELL[0] + 2 * MARGIN,
        height=size.rows * CELL[1] + TITLE_BAR + MARGIN,
        font=FONT,
        styles=MOVING.format(length=length) + styles if styles else "",
        background=THEME.background_color.hex,
        foreground=THEME.foreground_color.hex,
        title=html.escape(title),
        margin=MARGIN,
        top=TITLE_BAR,
        rows=groups,
    )


def _rows(screen: str, size: Size) -> list[str]:
    lines = Text.from_ansi(screen).split("\n", allow_blank=True)  # as one: colours last from line to line
    rows = [_row(line, number) for number, line in enumerate(lines[: size.rows])]
    return rows + [""] * (size.rows - len(rows))


def _row(line: Text, row: int) -> str:
    """A line of the screen. Blocks are drawn, as fonts leave gaps between them."""
    drawn, column = "", 0
    for segment in line.render(CONSOLE):
        style = segment.style or Style()
        colour = style.color.get_truecolor(THEME) if style.color else THEME.foreground_color
        look = f'fill="{colour.hex}"' + (' opacity=".6"' if style.dim else "")
        weight = ' class="b"' if style.bold else ""
        for is_block, group in itertools.groupby(segment.text, lambda char: char in BLOCKS):
            text = "".join(group)
            for char, same in itertools.groupby(text) if is_block else ():
                width, share = len(list(same)), (BLOCKS.index(char) + 1) / 8
                x, y = column * CELL[0], (row + 1 - share) * CELL[1]
                drawn += f'<rect x="{x:g}" y="{y:g}" width="{width * CELL[0]:g}" height="{share * CELL[1]:g}" {look}/>'
                column += width
            if not is_block:
                if text.strip():
                    skipped = len(text) - len(text.lstrip())
                    x, y = (column + skipped) * CELL[0], (row + 0.75) * CELL[1]
                    words = text.strip()
                    place = f'x="{x:g}" y="{y:g}" textLength="{len(words) * CELL[0]:g}"'
                    drawn += f"<text {place} {look}{weight}>{html.escape(words)}</text>"
                column += len(text)
    return drawn


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
        opened.wait_until_ended()


def record_run(stage: Stage, small: Size, large: Size) -> dict[str, str]:
    """A run with an auxiliary and some trainers, as they see it, and as the dashboard shows it."""
    pictures = {}
    aux = stage.open("aux", large, f"aux my-run {LOOPBACK} --invite-file invite.txt --dashboard 127.0.0.1:0")
    aux.wait_for("Press Ctrl-C")
    url = aux.find(r"http://127\.0\.0\.1:\d+/?")
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
        pictures[f"watch-{size}"] = svg(collect(watch, 15)[-1:], size, "collab watch collab1_…")
        watch.interrupt()
    leave(ben)
    time.sleep(10)  # the others go on
    photograph_dashboard(url)
    leave(anna, zoe)
    leave(aux)
    return pictures


def photograph_dashboard(url: str) -> None:
    """The page, wide and narrow, by day and by night, as it is now."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, width, scheme in (
            ("light", 1440, "light"),
            ("phone-light", 375, "light"),
            ("phone-dark", 375, "dark"),
        ):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.goto(url)
            page.wait_for_timeout(4000)  # it is live: some updates have come then
            page.screenshot(path=IMAGES / f"dashboard-{name}.png", full_page=True)
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
    with (
        tempfile.TemporaryDirectory(prefix="collab-record-", ignore_cleanup_errors=True) as name,
        contextlib.ExitStack() as stack,
    ):
        stage = Stage(Path(name), stack)
        pictures = record_run(stage, small, large) | record_demo(stage, small, large)
    for name, picture in pictures.items():
        (IMAGES / f"terminal-{name}.svg").write_text(picture)
        print(f"wrote terminal-{name}.svg, {len(picture) // 1024} KiB")


if __name__ == "__main__":
    main()
