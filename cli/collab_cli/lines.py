"""Events as lines on a terminal: what is going on, in words."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape


class EventLines:
    """Prints a line for each event a person wants to see. Everything from other peers is escaped."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""

    def __call__(self, event: dict[str, Any]) -> None:
        line = describe(event)
        if line is not None and (line != self._last or event["event"] != "round_failed"):
            self._console.print(line, soft_wrap=True)  # what is tried again and again is said once
            self._last = line


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
        case "assisted":
            return f"epoch {event['epoch']:>4}  reduced for {escape(', '.join(event['members']))}"
        case "resynced":
            donors = escape(", ".join(event["donors"]))
            return (
                f"[cyan]Fetched the state of epoch {event['epoch']} from {donors}: "
                f"{event['bytes'] / 1e6:.1f} MB in {event['seconds']:.1f} s[/cyan] ({reason})"
            )
        case "reachability" if not event["is_reachable"]:
            return _hidden(event)
        case "address_changed":
            return f"[cyan]This machine moved from {event['old']} to {event['new']}: connecting again.[/cyan]"
        case "peer_joined":
            return f"[green]+ {name}[/green] ({event['role']}) is here"
        case "peer_left":
            return f"[yellow]- {name}[/yellow] ({event['role']}) left: {reason}"
        case "refused":
            return f"[red]Refused {name}[/red]: {reason}"
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
        case "backup_damaged":
            return f"[red]{escape(str(event['detail']))}[/red] It was put aside."
        case "settings_synced":
            return "The run's settings differ from your file and are used: " + escape("; ".join(event["differences"]))
        case "left":
            thanks = f"; contributed {event['samples']} samples" if event["role"] == "trainer" else ""
            where = "" if event["root"] is None else f" at epoch {event['epoch']}"
            return f"Left{where}{thanks}. Thank you!"
        case _:
            return None


def _hidden(event: dict[str, Any]) -> str:
    """What it means that nobody can connect to us, and what to do about it."""
    port = f"TCP port {event['port']}"
    match event["mode"]:
        case "client":
            return (
                "Nobody can connect to this machine, so it only dials out (client mode) and others reduce for it. "
                f"[dim]To reduce too: open {port} in your router, or try --use-relay.[/dim]"
            )
        case "relay":
            return "Nobody can connect to this machine, so others reach it through an auxiliary (relay)."
        case _:
            return (
                f"[red]Others cannot connect to this machine ({escape(', '.join(event['missed']))}).[/red] "
                f"Open {port} in your router or firewall: a run needs an auxiliary that everyone can reach."
            )
