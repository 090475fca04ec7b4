"""A run at a glance, drawn again and again: where it is, whether the loss falls, who does what, and what you gave."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from collab_cli.chart import Curve, draw
from collab_cli.lines import EventLines

if TYPE_CHECKING:
    from collab_core.overview import Overview
    from collab_core.session import Session
    from collab_core.swarm import Peer

BAR_CHARS = 32
LABEL_CHARS = 9
MIN_CHART, MAX_CHART = 3, 18
FIXED_LINES = 10  # all but the chart and the peers
ABOVE_LINES = 4  # where there is room: what was said last stays in sight above the view
LOOKS_PER_SECOND = 4
IN_VIEW = frozenset({"epoch", "round", "fetching"})
SHOWN_WHILE_FETCHING_S = 3.0


class RunView:
    """What rich shows; each drawing is a new look at the records.

    Args:
        session: our place in the run.
        state: the epoch of our own model, which may be ahead of what was verified; None for whoever only looks.
        past: events of earlier visits of this peer to this run.
    """

    def __init__(
        self, session: Session, state: Callable[[], int] | None = None, past: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self._session, self._state = session, state
        self._settings = session.manifest.settings
        self._curve = Curve()
        self._latest: dict[str, Mapping[str, Any]] = {}
        """The newest event of each kind."""
        self._num_epochs = 0
        self._samples_before: int | None = None
        self._is_gossip = self._settings.strategy.name == "gossip"
        self._seen: Overview | None = None
        self._reached: tuple[int, float] = (-1, 0.0)
        """The epoch that was seen last, and since when."""
        for event in past:
            if event["event"] in ("epoch", "round") and event.get("loss") is not None:
                self._curve.add(event["epoch"], event["loss"])

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take an event of this peer."""
        kind = event["event"]
        self._latest[kind] = event
        if kind == "joined":
            self._samples_before = self._session.swarm.record.samples
        if kind in ("epoch", "round"):
            self._latest.pop("waiting", None)
            self._num_epochs += self._own_share(event) > 0
            if event["loss"] is not None:
                self._curve.add(event["epoch"], event["loss"])

    def look(self) -> Overview:
        """The run now, ourselves among the others."""
        from collab_core.overview import survey
        from collab_core.swarm import Peer

        swarm = self._session.swarm
        peers = swarm.peers()
        if self._state is not None:
            peers.insert(0, Peer(swarm.peer_id, swarm.record, expires=0.0))
        seen = self._seen = survey(peers, self._session.manifest, self._seen)
        if self._state is None and seen.loss is not None and seen.epoch > 0:
            self._curve.add(seen.epoch, seen.loss)
        return seen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        seen = self.look()
        width, height = options.max_width, console.height
        chart, rows = share_height(height, len(seen.peers))
        yield self._title(seen, width)
        yield ""
        values = self._curve.values() if self._curve.has_shape else []
        yield Text(
            "\n".join(draw(values, width, chart)) or "The curve of the loss begins with the second epoch.", "cyan"
        )
        yield ""
        yield from self._lines(seen, width)
        yield ""
        yield self._table(seen, rows)
        if (num_more := len(seen.peers) - rows) > 0:
            yield Text(f"and {num_more} more: collab status INVITE", "dim")

    # --- its parts ---

    def _title(self, seen: Overview, width: int) -> Table:
        what = "round" if self._is_gossip else "epoch"
        title = Table.grid(expand=True)
        title.add_column(no_wrap=True, overflow="ellipsis")
        title.add_column(justify="right", no_wrap=True)
        where = f"[bold]{escape(self._settings.name)}[/bold]  {what} {seen.epoch}"
        end = self._settings.limits.max_epochs
        where += f" of {end}" if end else ""
        loss = "" if seen.loss is None else f"  loss [bold]{seen.loss:.3f}[/bold]"
        me = "" if self._state is None else f"[dim]you are[/dim] {escape(self._session.swarm.name)}"
        title.add_row(where + loss, me if width > 60 else "")
        return title

    def _lines(self, seen: Overview, width: int) -> Iterator[Text]:
        yield _line("now", self.phase() if self._state is not None else self._situation(seen))
        bar_chars = min(BAR_CHARS, width - 46)
        of = f" of {seen.target:,}" if seen.target else ""
        speed = f"{seen.samples_per_second:,.0f}/s"
        yield _line("swarm", _bar(seen.collected, seen.target, bar_chars), f"{seen.collected:,}{of} samples, {speed}")
        if self._state is None:
            yield _line("given", f"{seen.samples:,} samples by everyone, so far")
            return
        mine = self._session.swarm.record
        share = f", {mine.samples_per_second / seen.samples_per_second:.0%}" if seen.samples_per_second else ""
        target = seen.target or mine.epoch_target
        mine_now = f"{mine.epoch_samples:,} samples, {mine.samples_per_second:,.0f}/s{share}"
        yield _line("you", _bar(mine.epoch_samples, target, bar_chars), mine_now)
        yield _line("link", self._link())
        yield _line("given", self._given(mine.samples))

    def _situation(self, seen: Overview) -> str:
        """What the swarm does, in words."""
        from collab_core.situation import state_in_words

        if seen.epoch != self._reached[0]:
            self._reached = seen.epoch, time.monotonic()
        return state_in_words(seen, self._settings, time.monotonic() - self._reached[1])[1]

    def phase(self) -> str:
        """What this machine does, in words."""
        record = self._session.swarm.record
        fetching, waiting = self._latest.get("fetching"), self._latest.get("waiting")
        match record.phase:
            case "joining" if fetching and time.time() - fetching["time"] < SHOWN_WHILE_FETCHING_S:
                done, total = fetching["bytes"] / 1e6, fetching["total_bytes"] / 1e6
                return (
                    f"fetching the state: {done:.1f} of {total:.1f} MB, {fetching['bytes_per_second'] / 1e6:.1f} MB/s"
                )
            case "joining":
                return "joining"
            case "averaging" if waiting:
                return f"waiting: {waiting['reason']}"
            case "averaging":
                return "meeting a partner" if self._is_gossip else "averaging with the others"
            case "left":
                return "leaving"
        if record.samples_per_second == 0:
            return "warming up"
        is_verified = self._state is None or self._is_gossip or self._state() <= record.epoch
        return "working" if is_verified else f"working, and verifying epoch {record.epoch + 1}"

    def _link(self) -> str:
        last = self._latest.get("met" if self._is_gossip else "epoch")
        if last is None:
            return "nothing sent yet"
        what = "the last meeting" if self._is_gossip else "the last epoch"
        took = last["seconds"] if self._is_gossip else last["matchmaking_s"] + last["reducing_s"]
        of = "" if self._is_gossip else f" of {last['seconds']:.1f} s"
        sent, received = last["bytes_sent"] / 1e6, last["bytes_received"] / 1e6
        return f"↑ {sent:.2f} MB  ↓ {received:.2f} MB  in {took:.1f} s{of}, {what}"

    def _given(self, samples: int) -> str:
        now = samples - (self._samples_before or 0)
        epochs = (
            "1 epoch" if self._num_epochs == 1 else f"{self._num_epochs:,} {'rounds' if self._is_gossip else 'epochs'}"
        )
        before = f"; {samples:,} with your earlier visits" if self._samples_before else ""
        return f"{now:,} samples in {epochs}{before}"

    def _own_share(self, event: Mapping[str, Any]) -> int:
        if event["event"] == "round":
            return int(event["samples"])
        swarm = self._session.swarm
        return int(event["members"].get(swarm.name_of(swarm.peer_id), 0))

    def _table(self, seen: Overview, rows: int) -> Table:
        table = Table(box=None, pad_edge=False, expand=False, header_style="dim")
        headings = ("peer", "role", "link", "doing", "epoch", "samples", "per s", "loss")
        for heading in (*headings, "distance" if self._is_gossip else "root"):
            justify = "left" if heading in ("peer", "role", "link", "doing", "root") else "right"
            is_name = heading == "peer"
            table.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis" if is_name else "crop")  # type: ignore[arg-type]
        for peer in _most_first(seen.peers, self._session.swarm.peer_id)[:rows]:
            table.add_row(*self._row(peer, seen), style="bold" if peer.peer_id == self._session.swarm.peer_id else "")
        return table

    def _row(self, peer: Peer, seen: Overview) -> tuple[str, ...]:
        record = peer.record
        is_trainer = record.role == "trainer"
        last = (record.root or "")[:6]
        if self._is_gossip:
            last = "" if record.gossip is None or record.gossip.distance is None else f"{record.gossip.distance:.1e}"
        return (
            escape(record.name),
            record.role,
            record.mode,
            "[red]kept out[/red]" if peer.peer_id in seen.kept_out else record.phase,
            str(record.epoch),
            f"{record.samples:,}" if is_trainer else "",
            f"{record.samples_per_second:,.0f}" if is_trainer else "",
            "" if record.loss is None else f"{record.loss:.3f}",
            last,
        )


def share_height(height: int, num_peers: int) -> tuple[int, int]:
    """How many lines of a terminal the chart gets, and how many the peers: the view must not be higher than it."""
    free = height - FIXED_LINES
    rows = min(num_peers, max(2, min(free // 2, free - MIN_CHART - 1)))
    num_more_lines = 1 if num_peers > rows else 0
    return min(max(free - rows - num_more_lines - ABOVE_LINES, MIN_CHART), MAX_CHART), rows


@contextlib.contextmanager
def showing(session: Session, console: Console, lines: EventLines, state: Callable[[], int]) -> Iterator[None]:
    """On a terminal: the view at its end, and above it what happens besides epochs. Elsewhere lines are enough."""
    if not console.is_terminal:
        yield
        return
    view = RunView(session, state, session.events.past(session.manifest.run_id))
    session.events.listen(view)
    lines.hidden = IN_VIEW
    with Live(view, console=console, refresh_per_second=LOOKS_PER_SECOND, transient=True):
        yield


def _most_first(peers: Iterable[Peer], own: str) -> list[Peer]:
    """Ourselves, then those who gave most, then those who help."""
    return sorted(peers, key=lambda peer: (peer.peer_id != own, peer.record.role != "trainer", -peer.record.samples))


def _line(label: str, *parts: str | Text) -> Text:
    return Text.assemble((f"{label:<{LABEL_CHARS}}", "dim"), *(part for each in parts for part in (each, "  ")))


def _bar(done: int, total: int, width: int) -> Text:
    filled = round(width * min(done / total, 1.0)) if total else 0
    return Text.assemble(("━" * filled, "green"), ("─" * (width - filled), "dim")) if total else Text("")
