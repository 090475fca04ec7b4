"""Events as lines on a terminal: what is going on, in words."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.control import Control
from rich.markup import escape
from rich.segment import ControlType

BAR_CHARS = 24
SAID_ONCE = ("round_failed", "gradient_dropped", "gradient_not_finite", "quarantined")


class EventLines:
    """Prints a line for each event a person wants to see. Everything from other peers is escaped."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""
        self._is_moving = False
        """The last line is a progress bar: the next line takes its place."""
        self.hidden: frozenset[str] = frozenset()
        """Events that are shown elsewhere."""

    def __call__(self, event: dict[str, Any]) -> None:
        line = None if event["event"] in self.hidden else describe(event)
        if line is None or (line == self._last and event["event"] in SAID_ONCE):
            return  # what is tried again and again is said once
        if self._console.is_terminal and self._is_moving:
            self._console.control(Control.move(0, -1), Control((ControlType.ERASE_IN_LINE, 2)))
        self._console.print(line, soft_wrap=True)
        self._last, self._is_moving = line, event["event"] == "fetching"


def describe(event: dict[str, Any]) -> str | None:
    """One event in words, or None if it is only for the log."""
    name = escape(str(event.get("name", "")))
    reason = escape(str(event.get("reason", "")))
    match event["event"]:
        case "joined":
            where = "" if event["root"] is None else f" at epoch {event['epoch']}"
            return f"Joined the run{where} as [bold]{name}[/bold]."
        case "restored":
            return f"Restored the backup of epoch {event['epoch']}."
        case "epoch":
            members = ", ".join(f"{escape(who)} {count}" for who, count in event["members"].items())
            loss = f"  loss {event['loss']:.3f}" if event["loss"] is not None else ""
            lost = f"  [yellow]lost: {escape(', '.join(event['lost']))}[/yellow]" if event["lost"] else ""
            return (
                f"[bold]epoch {event['epoch']:>4}[/bold]{loss}  {event['samples']} samples ({members})  "
                f"{event['seconds']:.1f} s  [dim]{event['root'][:12]}[/dim]{lost}"
            )
        case "gradient_dropped":
            return "[yellow]What we computed is not finite, so we bring nothing to this epoch.[/yellow]"
        case "gradient_not_finite":
            return f"[yellow]The update of epoch {event['epoch']} is not finite: everyone skips it.[/yellow]"
        case "assisted":
            return f"epoch {event['epoch']:>4}  reduced for {escape(', '.join(event['members']))}"
        case "fetching":
            done, total = event["bytes"] / 1e6, event["total_bytes"] / 1e6
            peers = "1 peer" if event["donors"] == 1 else f"{event['donors']} peers"
            bar = "━" * round(BAR_CHARS * done / max(total, done, 1e-9))
            return (
                f"[cyan]Fetching the state {bar:─<{BAR_CHARS}} {done:.1f} of {total:.1f} MB, "
                f"{event['bytes_per_second'] / 1e6:.1f} MB/s from {peers}[/cyan]"
            )
        case "resynced":
            donors = escape(", ".join(event["donors"]))
            return (
                f"[cyan]Fetched the state of epoch {event['epoch']} from {donors}: "
                f"{event['bytes'] / 1e6:.1f} MB in {event['seconds']:.1f} s[/cyan] ({reason})"
            )
        case "round":
            loss = f"  loss {event['loss']:.3f}" if event["loss"] is not None else ""
            far = f"  distance {event['distance']:.1e}" if event["distance"] is not None else ""
            what = f"{event['samples']} samples  {event['seconds']:.1f} s"
            return f"[bold]round {event['epoch']:>4}[/bold]{loss}{far}  {what}"
        case "adopted":
            return f"[cyan]Took the model of {name}, at round {event['epoch']}: {event['bytes'] / 1e6:.1f} MB[/cyan]"
        case "exchange_failed":
            return f"[yellow]The meeting with {name} came to nothing: {reason}[/yellow]"
        case "exchange_in_doubt":
            return f"[yellow]The meeting with {name} was cut off at its end: asking what became of it.[/yellow]"
        case "exchange_settled":
            return f"[cyan]The meeting with {name} that was cut off: {event['outcome']}.[/cyan]"
        case "exchange_lost":
            return f"[yellow]A meeting with {name} is lost: {reason}[/yellow]"
        case "converged":
            far = f", distance {event['distance']:.1e}" if event["distance"] is not None else ""
            return f"[green]The run has converged after {event['epoch']} rounds{far}.[/green]"
        case "reachability" if not event["is_reachable"]:
            return _hidden(event)
        case "address_changed":
            return f"[cyan]This machine moved from {event['old']} to {event['new']}: connecting again.[/cyan]"
        case "port_changed":
            return (
                f"[yellow]Port {event['old']} of the last time is taken: listening at {event['new']}. Invites that "
                f"name the old one lead nowhere; with --port {event['old']} it is that one or none.[/yellow]"
            )
        case "peer_joined":
            return f"[green]+ {name}[/green] ({event['role']}) is here"
        case "peer_left":
            return f"[yellow]- {name}[/yellow] ({event['role']}) left: {reason}"
        case "refused":
            return f"[red]Refused {name}[/red]: {reason}"
        case "quarantined" if event["is_believed"]:
            by = escape(str(event["said_by"]))
            return f"[red]{name} is kept out until epoch {event['until_epoch']}[/red], says {by}: {reason}"
        case "kept_out":
            by = escape(str(event["said_by"]))
            return (
                f"[red]The others keep this machine out of the rounds until epoch {event['until_epoch']}[/red], says "
                f"{by}: {reason}. It follows the run and joins again then; if this comes again, something here is "
                "broken (memory, overclocking) or not the same version."
            )
        case "round_failed":
            return f"[yellow]The round of epoch {event['epoch']} failed: {reason}. Trying again.[/yellow]"
        case "waiting":
            return f"[yellow]Waiting at epoch {event['epoch']}: {reason}[/yellow]"
        case "donor_failed":
            return f"[yellow]Could not fetch from {name}: {reason}[/yellow]"
        case "backup_failed":
            return f"[red]The backup of epoch {event['epoch']} could not be written: {reason}[/red]"
        case "archive_failed":
            return f"[red]Epoch {event['epoch']} is not in the archive: {reason}[/red]"
        case "evaluated":
            return f"epoch {event['epoch']:>4}  held-out loss {event['held_out_loss']:.3f}"
        case "evaluation_failed":
            return f"[yellow]The held-out loss cannot be measured here: {reason}[/yellow]"
        case "sampling_failed":
            return f"[yellow]The model cannot be asked for text here: {reason}[/yellow]"
        case "wandb_failed":
            return f"[yellow]Nothing is sent to wandb: {reason}[/yellow]"
        case "checkpoint":
            return f"[green]Checkpoint of epoch {event['epoch']}[/green] in {escape(event['place'])}"
        case "checkpoint_failed":
            return f"[red]The checkpoint of epoch {event['epoch']} could not be uploaded: {reason}[/red]"
        case "checkpoint_unreadable":
            return f"[yellow]No checkpoint could be read from {escape(event['place'])}: {reason}[/yellow]"
        case "from_checkpoint":
            return f"[cyan]Nobody else is here: went on from the checkpoint of epoch {event['epoch']}.[/cyan]"
        case "backup_damaged":
            return f"[red]{escape(str(event['detail']))}[/red] It was put aside."
        case "data_away":
            return f"[yellow]The data cannot be read now: {reason} Waiting for it.[/yellow]"
        case "settings_synced":
            return "The run's settings differ from your file and are used: " + escape("; ".join(event["differences"]))
        case "tuned":
            at_once = f", {event['rows']} at once" if event["rows"] < event["batch_size"] else ""
            speed = f"{event['samples_per_second']:,.0f}" if event["samples_per_second"] >= 10 else "less than 10"
            return f"Batch size {event['batch_size']}{at_once}: {speed} samples per second here."
        case "out_of_memory":
            return (
                f"[yellow]Memory ran out with {event['rows']} samples at once: going on with {event['next_rows']} at "
                "once, added up to the same batch.[/yellow]"
            )
        case "time_limit":
            return f"[cyan]Leaving in {_duration(event['seconds'])}: {reason}.[/cyan]"
        case "left":
            where = "" if event["root"] is None else f" at epoch {event['epoch']}"
            return f"Left{where}{_given(event)}. Thank you!"
        case _:
            return None


def _given(event: dict[str, Any]) -> str:
    """What we contributed, this time and in all."""
    if event["role"] != "trainer":
        return ""
    epochs = "1 epoch" if event["epochs_now"] == 1 else f"{event['epochs_now']} epochs"
    words = f"; contributed {event['samples_now']} samples in {epochs}"
    if event["samples"] > event["samples_now"]:
        words += f", and {event['samples']} in {event['epochs']} since you first came ({_duration(event['seconds'])})"
    return words


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _hidden(event: dict[str, Any]) -> str:
    """What it means that nobody can connect to us, and what to do about it."""
    port = f"TCP port {event['port']}"
    match event["mode"]:
        case "client":
            relay = "start again when an auxiliary can relay" if event["wants_relay"] else "try --use-relay"
            return (
                "Nobody can connect to this machine, so it only dials out (client mode) and others reduce for it. "
                f"[dim]To reduce too: open {port} in your router, or {relay}.[/dim]"
            )
        case "relay":
            return "Nobody can connect to this machine, so others reach it through an auxiliary (relay)."
        case _:
            return (
                f"[red]Others cannot connect to this machine ({escape(', '.join(event['missed']))}).[/red] "
                f"Open {port} in your router or firewall: a run needs an auxiliary that everyone can reach."
            )
