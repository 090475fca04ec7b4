"""`collab doctor`: what this machine can be in a run, and what to do about the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from collab_cli import options
from collab_cli.failures import errors_in_words
from collab_cli.stopping import Stopping
from collab_cli.terminal import Terminal, print_json
from collab_core.doctor import Check, Role, guarded, possible_roles

if TYPE_CHECKING:
    from collab_core.doctor.visit import Visit
    from collab_core.run import Invite, RunFolder
    from collab_core.swarm import Swarm

NAME_CHARS = 20  # `peer` and the longest of the friendly names
MAX_WIDTH = 110  # longer lines are hard to read
ROLES: dict[Role, str] = {"train": "a trainer", "aux": "an auxiliary"}


class Wish(StrEnum):
    """What somebody wants to be."""

    train = "train"
    aux = "aux"


def doctor(
    run: Annotated[
        str | None,
        typer.Argument(help="The run's invite, or its folder; without it only this machine.", metavar="INVITE|RUN"),
    ] = None,
    role: Annotated[
        Wish | None, typer.Option(help="What you want to be; the exit code tells whether you can. Default: either.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    port: options.Port = None,
    host_maddrs: options.HostMaddrs = None,
    initial_peers: options.InitialPeers = None,
    state_dir: options.StateDir = None,
    verbose: options.Verbose = False,
) -> None:
    """Find out what this machine can be in a run and what is in the way. Exits with 1 if it cannot be what you want."""
    with errors_in_words(verbose=verbose), Stopping():
        source = options.read_source(run) if run is not None else None
        wanted: list[Role] = [role.value] if role is not None else ["train", "aux"]
        report = Report(Terminal(stderr=as_json), run, wanted)
        examination = Examination(source, initial_peers or [], host_maddrs or [], port, device, state_dir)
        with contextlib.closing(examination.checks()) as checks:  # whatever ends it, the visit is over
            for check in checks:
                report.add(check)
        can = possible_roles(report.checks)
        if as_json:
            print_json(report.as_json(can))
        else:
            report.conclude(can)
        if not any(can[one] for one in wanted):
            raise typer.Exit(1)


class Examination:
    """All checks in an order in which each can build on those before it; heavy imports happen on the way."""

    def __init__(
        self,
        source: Invite | RunFolder | None,
        initial_peers: list[str],
        host_maddrs: list[str],
        port: int | None,
        device: str,
        state_dir: Path | None,
    ) -> None:
        self._source, self._host_maddrs, self._port, self._device = source, host_maddrs, port, device
        self._initial_peers = [*getattr(source, "initial_peers", ()), *initial_peers]
        self._state_dir = state_dir

    def checks(self) -> Generator[Check, None, None]:
        from collab_core.doctor.machine import machine_checks
        from collab_core.doctor.packages import package_checks

        yield from guarded("packages", package_checks)
        plain: list[Check] = []
        for check in guarded("machine", lambda: machine_checks(self._place())):
            if self._source is None or check.name != "disk":
                yield check
            else:
                plain.append(check)  # with a run we may get to know how much it needs
        for check in guarded("device", self._on_device, frozenset({"train"})):
            yield check
            if not check.ok:
                self._device = "cpu"  # so that the rest can be found out
        plain += guarded("memory", self._memory)
        if self._source is None:
            yield from plain
        told = set()
        for check in guarded("network", self._on_the_network):
            told.add(check.name)
            yield check
        if self._source is not None:
            yield from (check for check in plain if check.name not in told)

    def _place(self) -> Path:
        from collab_core.home import default_home

        return (self._state_dir or default_home()).expanduser().absolute()

    def _on_device(self) -> Iterator[Check]:
        from collab_trainer.fitness import device_checks

        return device_checks(self._device)

    def _memory(self) -> Iterator[Check]:
        from collab_trainer.fitness import memory_checks

        return memory_checks()

    def _on_the_network(self) -> Iterator[Check]:
        from collab_core.doctor.peers import peer_checks
        from collab_core.doctor.visit import Visit
        from collab_core.run import Invite, RunFolder
        from collab_core.swarm.addresses import parse_address

        for address in self._initial_peers:
            parse_address(address, needs_peer=True)
        found = list(guarded("peers", lambda: peer_checks(self._initial_peers)))
        yield from found
        is_anyone_there = any(check.ok for check in found)
        initial_peers = self._initial_peers if is_anyone_there else []
        with Visit(initial_peers=initial_peers, host_maddrs=self._host_maddrs, port=self._port_to_try()) as visit:
            yield from guarded("daemon", visit.start)
            if visit.swarm is not None and is_anyone_there:
                yield from self._beside_others(visit.swarm)
                if isinstance(invite := self._source, Invite):
                    yield from guarded("manifest", lambda: visit.read_manifest(invite))
            if isinstance(self._source, RunFolder) or visit.manifest is not None:
                yield from guarded("task", lambda: self._model(visit))

    def _beside_others(self, swarm: Swarm) -> Iterator[Check]:
        from collab_core.doctor.others import clock_checks, speed_checks, version_checks
        from collab_core.doctor.reach import reach_checks
        from collab_core.run import Invite

        yield from guarded("dial-back", lambda: reach_checks(swarm))
        yield from guarded("clock", lambda: clock_checks(swarm))
        yield from guarded("speed", lambda: speed_checks(swarm))
        if isinstance(source := self._source, Invite):
            yield from guarded("version", lambda: version_checks(swarm, source.run_hash))

    def _model(self, visit: Visit) -> Iterator[Check]:
        from collab_core.run import RunFolder
        from collab_trainer import TaskContext, collect_assets
        from collab_trainer.fitness import model_checks

        if isinstance(self._source, RunFolder):
            settings, path = self._source.settings(), self._source.path
            context = TaskContext(assets=collect_assets(settings.task, path), run_dir=path)
            yield Check(name="run file", ok=True, detail=f"run {settings.name}: {settings.task.name}")
        else:
            assert visit.manifest is not None
            settings, context = visit.manifest.settings, TaskContext(assets=visit.assets)
        yield from model_checks(settings, context, self._device, self._place())

    def _port_to_try(self) -> int | None:
        """The one that was asked for; or that of this peer's last time, unless it is at work right now."""
        from collab_core.home import default_home
        from collab_core.run import Invite
        from collab_core.state.folder import StateFolder
        from collab_core.swarm.daemon import is_free
        from collab_core.swarm.transport import EVERYWHERE

        if self._port is not None:
            return self._port
        folders = [self._state_dir] if self._state_dir is not None else []
        if isinstance(self._source, Invite):
            home = default_home() / self._source.run_hash.hex()[:16]
            folders += [home / "trainer", home / "aux"]
        ports = filter(None, map(StateFolder.port_in, folders))
        address = next(iter(self._host_maddrs), EVERYWHERE[0])
        return next((port for port in ports if is_free(address, port)), None)


class Report:
    """Checks as lines, as they come; then what follows from them."""

    def __init__(self, console: Console, run: str | None, wanted: Sequence[Role]) -> None:
        self._console, self._run, self._wanted = console, run, wanted
        self.checks: list[Check] = []
        self._width = min(console.width, MAX_WIDTH)

    def add(self, check: Check) -> None:
        self.checks.append(check)
        mark, style = _mark(check)
        row = Table.grid(padding=(0, 1))
        row.add_column(width=1)
        row.add_column(width=NAME_CHARS, no_wrap=True, overflow="ellipsis")
        row.add_column(ratio=1)
        row.add_row(Text(mark, style=style), Text(check.name, style="bold"), Text(check.detail))
        self._console.print(row, width=self._width)

    def conclude(self, can: Mapping[Role, bool]) -> None:
        """What you can be and why, what to do about it, and what to type next."""
        self._console.print()
        for role, name in ROLES.items():
            blame = [check.name for check in self.checks if not check.ok and role in check.rules_out]
            line = Text("  ")
            if can[role]:
                line.append(f"You can be {name}", style="bold green")
                line.append(self._how(role))
            else:
                line.append(f"You cannot be {name}", style="bold red")
                line.append(f", because of: {', '.join(dict.fromkeys(blame))}.")
            self._console.print(line, width=self._width)
        faults = [check for check in self.checks if not check.ok]
        if faults:
            self._console.print("\n[bold]What to do[/bold]", width=self._width)
        for number, check in enumerate(faults, start=1):
            row = Table.grid(padding=(0, 1))
            row.add_column(width=3, justify="right")
            row.add_column(ratio=1)
            text = Text(f"{check.name}: ", style="bold")
            text.append(check.fix, style="not bold")
            row.add_row(f"{number}.", text)
            self._console.print(row, width=self._width)
        if command := self._next(can):
            self._console.print("\nNext:\n")
            self._console.print(Text(command, style="bold cyan"), soft_wrap=True)

    def _how(self, role: str) -> str:
        is_hidden = any(check.name == "dial-back" and not check.ok and check.rules_out for check in self.checks)
        if role == "train" and is_hidden:
            return " in client mode: you dial out, and others reduce for you."
        return "."

    def _next(self, can: Mapping[Role, bool]) -> str:
        if self._run is None:
            return "collab doctor INVITE" if any(can.values()) else ""
        return next((f"collab {role} {self._run.strip()}" for role in self._wanted if can[role]), "")

    def as_json(self, can: Mapping[Role, bool]) -> dict[str, Any]:
        return {
            "checks": [
                {"name": check.name, "ok": check.ok, "detail": check.detail, "fix": check.fix} for check in self.checks
            ],
            "can": dict(can),
        }


def _mark(check: Check) -> tuple[str, str]:
    """Fine; in the way of something; in the way of training."""
    if check.ok:
        return "✓", "green"
    return ("✗", "bold red") if "train" in check.rules_out else ("!", "bold yellow")
