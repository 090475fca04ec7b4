"""Records what people see: real commands in real terminals (tmux), written as SVG pictures that move.

python docs/record_terminal.py        writes docs/images/terminal-*.svg; takes two minutes, needs tmux
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

IMAGES = Path(__file__).parent / "images"
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
        self.name, self.size = f"collab-{os.getpid()}-{name}", size
        run = f"cd {shlex.quote(str(folder))} && clear && exec {command}"
        geometry = ["-x", str(size.columns), "-y", str(size.rows)]
        self._tmux("new-session", "-d", "-s", self.name, *geometry, "bash", "-c", run)
        self._tmux("set-option", "-t", self.name, "remain-on-exit", "on")
        self._tmux("set-option", "-t", self.name, "status", "off")
        self._tmux("resize-window", "-t", self.name, *geometry)

    def _tmux(self, *arguments: str) -> str:
        return subprocess.run(["tmux", *arguments], check=True, capture_output=True, text=True).stdout

    def screen(self) -> str:
        """What it shows now, with its colours."""
        return self._tmux("capture-pane", "-p", "-e", "-t", self.name)

    def wait_for(self, text: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self._tmux("capture-pane", "-p", "-t", self.name):
            assert time.monotonic() < deadline, f"{self.name} never showed {text!r}:\n{self.screen()}"
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


def main() -> None:
    collab = f"{Path(sys.executable).parent}/collab"
    small, large = Size(80, 24), Size(160, 50)
    loopback = "--host-maddrs /ip4/127.0.0.1/tcp/0"
    pictures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="collab-record-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        os.environ.update(COLLAB_HOME=f"{folder}/home", OMP_NUM_THREADS="1")

        def open_one(who: str, size: Size, command: str) -> Terminal:
            return stack.enter_context(terminal(who, size, command, folder))

        subprocess.run([collab, "new", "my-run"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        aux = open_one("aux", small, f"{collab} aux my-run {loopback} --invite-file invite.txt")
        aux.wait_for("Press Ctrl-C")
        invite = (folder / "invite.txt").read_text().strip()
        other = open_one("other", small, f"{collab} train {invite} {loopback} --name ben")
        other.wait_for("epoch")
        you = open_one("you", small, f"{collab} train {invite} {loopback} --name anna")
        pictures["train-80x24"] = svg(collect(you, 24), small, "collab train collab1_…")
        you.interrupt()
        you.wait_for("Left")
        for size in (small, large):
            watch = open_one(f"watch-{size}", size, f"{collab} watch {invite}")
            watch.wait_for("samples")
            pictures[f"watch-{size}"] = svg(collect(watch, 1)[-1:], size, "collab watch collab1_…")
            watch.interrupt()
        you = open_one("you-large", large, f"{collab} train {invite} {loopback} --name anna")
        you.wait_for("working")
        pictures[f"train-{large}"] = svg(collect(you, 8)[-1:], large, "collab train collab1_…")
        for opened in (you, other, aux):
            opened.interrupt()
        for opened in (you, other, aux):
            opened.wait_for("Left")
        for size in (small, large):
            demo = open_one(f"demo-{size}", size, f"{collab} demo --epochs 15")
            demo.wait_for("epoch")
            moving = collect(demo, 30 if size is small else 14)
            pictures[f"demo-{size}"] = svg(moving if size is small else moving[-1:], size, "collab demo")
            demo.interrupt()
            time.sleep(10)
    for name, picture in pictures.items():
        (IMAGES / f"terminal-{name}.svg").write_text(picture)
        print(f"wrote terminal-{name}.svg, {len(picture) // 1024} KiB")


if __name__ == "__main__":
    main()
