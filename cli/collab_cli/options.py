"""Options that several commands share; each has its one default here or in the config class it fills."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from collab_core.averaging.link import Bandwidth as CoreBandwidth
    from collab_core.run import Invite, Prepared, RunFolder, RunSettings
    from collab_core.session import Session
    from collab_trainer import TaskContext

NETWORK = "Network"
FILES = "Files"
MAX_RATE = 1e12

Port = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port to listen on. Default: the port of the last time, or any free one.",
        rich_help_panel=NETWORK,
    ),
]
HostMaddrs = Annotated[
    list[str] | None,
    typer.Option(
        help="Address to listen on, e.g. /ip4/0.0.0.0/tcp/31330. Replaces the default; may be repeated.",
        rich_help_panel=NETWORK,
    ),
]
AnnounceMaddrs = Annotated[
    list[str] | None,
    typer.Option(
        help="Address others should use to reach us, e.g. /ip4/203.0.113.7/tcp/31330. May be repeated.",
        rich_help_panel=NETWORK,
    ),
]
Bandwidth = Annotated[
    str | None,
    typer.Option(
        help="What your connection carries, in Mbit/s, down/up: 100/20, or one number for both. Default: measured.",
        metavar="DOWN/UP",
        rich_help_panel=NETWORK,
    ),
]
MaxUpload = Annotated[
    float | None,
    typer.Option(
        min=0.6,  # 1 MiB must get through before newcomers lose their patience
        max=MAX_RATE,
        help="Mbit/s at most for newcomers who fetch the state from you; rounds give you a share that fits. "
        "Default: no limit.",
        rich_help_panel=NETWORK,
    ),
]
AcceptModels = Annotated[
    list[str] | None,
    typer.Option(
        help="Take models from this peer ID (`collab models push`), or from anyone. May be repeated.",
        metavar="PEER_ID|anyone",
        rich_help_panel=FILES,
    ),
]
InitialPeers = Annotated[
    list[str] | None,
    typer.Option(
        help="Address of a peer to join through, ending in /p2p/<peer ID>. May be repeated.", rich_help_panel=NETWORK
    ),
]
IdentityPath = Annotated[
    Path | None,
    typer.Option(help="Key file of this peer. Default: identity.key in the state folder.", rich_help_panel=FILES),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder for identity, backup and events.jsonl. Default: where this machine keeps its runs.",
        rich_help_panel=FILES,
    ),
]
InviteFile = Annotated[
    Path | None,
    typer.Option(help="Write an invite to this file once others can join.", rich_help_panel=FILES),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the data you bring, if the run trains on local files. Default with a run folder: that folder.",
        rich_help_panel=FILES,
    ),
]
Name = Annotated[str | None, typer.Option(help="What others see. Default: a friendly name made from the peer ID.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the network's own log messages.")]
BackupEvery = Annotated[
    int,
    typer.Option("--backup-every-step", min=0, help="Epochs between two backups; 0 keeps none.", rich_help_panel=FILES),
]


def check_invite_file(path: Path | None, *, is_reachable: bool = True) -> None:
    """Say before joining, not after, that an invite could not be written."""
    from collab_core.errors import Code, ConfigError, StateError

    if path is None:
        return
    if not is_reachable:
        raise ConfigError(
            Code.BAD_OPTION,
            "--invite-file makes no sense with --client-mode: nobody can join through a peer that only dials out.",
            fix="Leave one of the two out.",
        )
    folder = path.absolute().parent
    if not os.access(folder, os.W_OK) or path.is_dir():
        raise StateError(
            Code.STATE_DIR_UNWRITABLE,
            f"The invite file {path} cannot be written.",
            fix="Give a file in a folder that exists and that you may write to.",
        )


def check_url(text: str | None, option: str) -> None:
    """Something that can be opened, and written into a page; empty is fine."""
    from collab_core.errors import Code, ConfigError

    if text and not re.fullmatch(r"https?://[^\s<>\"']+", text):
        raise ConfigError(
            Code.BAD_OPTION, f"{option} {text!r} is not an address of a page.", fix="Write it like https://example.org/"
        )


def check_machine(role: Literal["train", "aux"], state_dir: Path | None) -> None:
    """The quick part of `collab doctor`: some milliseconds, before anything heavy is loaded."""
    from collab_core.doctor.quick import check_quickly

    check_quickly(role, state_dir)


def check_sync(source: Invite | RunFolder, should_sync: bool) -> None:
    """An invite has no settings of its own to insist on."""
    from collab_core.errors import Code, ConfigError
    from collab_core.run import Invite

    if isinstance(source, Invite) and not should_sync:
        raise ConfigError(
            Code.BAD_OPTION,
            "--no-sync-args insists on the settings of a run file, but an invite was given.",
            fix="Leave it out, or give the folder of the run and --initial-peers.",
        )


def prepare(settings: RunSettings, run_dir: Path) -> Prepared:
    """Everything that a manifest pins besides the settings. Only who has to sign one waits for torch."""
    from collab_trainer import prepare

    return prepare(settings, run_dir)


def read_bandwidth(text: str | None) -> CoreBandwidth | None:
    """`100/20` or `100`, in Mbit/s."""
    from collab_core.averaging.link import Bandwidth as CoreBandwidth
    from collab_core.errors import Code, ConfigError

    if text is None:
        return None
    numbers = text.split("/")
    try:
        rates = [bytes_per_second(float(number)) for number in numbers]
        if not 1 <= len(rates) <= 2 or not all(0 < rate < MAX_RATE for rate in rates):
            raise ValueError
    except ValueError:
        raise ConfigError(
            Code.BAD_OPTION,
            f"--bandwidth {text!r} is not one or two speeds in Mbit/s.",
            fix="Write it like --bandwidth 100/20 (down/up), or leave it out to have it measured.",
        ) from None
    return CoreBandwidth(download=rates[0], upload=rates[-1])


def bytes_per_second(megabits: float | None) -> float:
    """Of a speed in Mbit/s; 0 if there is none."""
    return (megabits or 0.0) * 1e6 / 8


def read_source(text: str) -> Invite | RunFolder:
    """An invite, or the folder (or run.toml) of a run. A path that exists wins."""
    from collab_core.errors import Code, ConfigError
    from collab_core.run import Invite, RunFolder, looks_like_invite

    if looks_like_invite(text) and not _is_path(text):
        return Invite.decode(text)
    if text.strip() and (_is_path(text) or "/" in text):
        folder = RunFolder(Path(text))
        folder.settings()  # a mistake in the run file is said before anything heavy is loaded
        return folder
    raise ConfigError(
        Code.BAD_INVITE,
        f"{text[:60]!r} is neither an invite nor a folder that exists.",
        fix="Paste the whole invite (it begins with collab1_), or give the folder that `collab new` made.",
    )


def task_context(
    source: Invite | RunFolder, session: Session, data_dir: Path | None = None, *, needs_data: bool = False
) -> TaskContext:
    """What the run's task may use here.

    With a run folder, data lies in it unless a flag says otherwise. With an invite there is no default: the names of
    the files are the organiser's, and nobody's files are read because a stranger guessed their names.
    """
    from collab_core.run import RunFolder
    from collab_trainer import TaskContext

    run_dir = source.path if isinstance(source, RunFolder) else None
    return TaskContext(
        assets=session.assets,
        run_dir=run_dir,
        data_dir=data_dir or run_dir,
        cache_dir=session.folder.data_cache,
        needs_data=needs_data,
    )


def _is_path(text: str) -> bool:
    """Whether there is such a file. An invite with several addresses is longer than any file name may be."""
    try:
        return Path(text).exists()
    except OSError:
        return False
