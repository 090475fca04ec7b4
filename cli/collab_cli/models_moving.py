"""`collab models push` and `pull`: versions from one archive to another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collab_cli.guest import visit
from collab_cli.models import AsJson, StateDir, console, opened, size_of
from collab_cli.terminal import print_json

if TYPE_CHECKING:
    from collab_core.archive import Archive
    from collab_core.archive.transfer import Moved
    from collab_core.library import Visitor

Other = Annotated[
    str,
    typer.Argument(
        help="Folder of the other archive, or of a peer that has one; a repository on the Hub; or an invite.",
        metavar="DIR|OWNER/NAME|INVITE",
    ),
]
References = Annotated[list[str] | None, typer.Argument(help="Which versions. Default: all.", metavar="REF")]


def push(to: Other, references: References = None, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Give another archive what it lacks: in a folder, on the Hub, or of a peer of a run that takes models from you."""
    if _is_invite(to):
        with opened(state_dir) as archive, _peers_with_archives(to, archive) as (visitor, peers):
            from collab_core.archive.transfer import chosen

            _tell_moved(visitor.push_to_any(peers, archive, chosen(archive, references)), as_json=as_json)
    elif _is_on_hub(to):
        with opened(state_dir) as archive:
            from collab_core import hub_archive

            _tell_moved(hub_archive.push(to, archive, references), as_json=as_json)
    else:
        with opened(state_dir) as archive, opened(Path(to), may_create=True) as other:
            _move(archive, other, references, as_json=as_json)


def pull(source: Other, references: References = None, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """Get what this archive lacks from another one: in a folder, on the Hub, or from any peer of a run that has it."""
    if _is_invite(source):
        with opened(state_dir, may_create=True) as archive, _peers_with_archives(source, archive) as (visitor, peers):
            _tell_moved(visitor.pull_from_all(peers, archive, references), as_json=as_json)
    elif _is_on_hub(source):
        with opened(state_dir, may_create=True) as archive:
            from collab_core import hub_archive

            _tell_moved(hub_archive.pull(source, archive, references), as_json=as_json)
    else:
        with opened(Path(source)) as other, opened(state_dir, may_create=True) as archive:
            _move(other, archive, references, as_json=as_json)


def _is_invite(text: str) -> bool:
    from collab_core.run import looks_like_invite

    return looks_like_invite(text) and not _exists(Path(text[:200]))


def _is_on_hub(text: str) -> bool:
    from collab_core.hub import is_hub_name

    return is_hub_name(text) and not _exists(Path(text).parent)  # a folder that is to be made has a parent


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long, a folder that nobody may look into
        return False


@contextmanager
def _peers_with_archives(invite: str, archive: Archive) -> Iterator[tuple[Visitor, list[str]]]:
    """Join for a moment, as a guest that has the archive's key, and find those who could give or take."""
    from collab_cli.stopping import Stopping
    from collab_core.library import Visitor
    from collab_core.run import Invite
    from collab_core.state.claims import is_trusted

    key = archive.folder / "identity.key"
    with Stopping(), visit(Invite.decode(invite), identity_path=key) as session:
        session.swarm.refresh()
        found = {peer.peer_id: peer.record for peer in session.swarm.peers() if peer.record.role == "aux"}
        trusted = {peer_id for peer_id, record in found.items() if is_trusted(peer_id, record, session.manifest)}
        yield Visitor(session.swarm, trusted.__contains__), [*found]


def _move(source: Archive, target: Archive, references: list[str] | None, *, as_json: bool) -> None:
    from collab_core.archive.transfer import chosen, give_tags, transfer

    versions = chosen(source, references)
    moved = transfer(source, target, versions)
    give_tags(source, target, versions)
    _tell_moved(moved, as_json=as_json)


def _tell_moved(moved: Moved, *, as_json: bool) -> None:
    if as_json:
        print_json({"versions": moved.versions, "bytes": moved.bytes})
    else:
        versions = "1 version" if moved.versions == 1 else f"{moved.versions} versions"
        console.print(f"{versions} moved, {size_of(moved.bytes)}.")
