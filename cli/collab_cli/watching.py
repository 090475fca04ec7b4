"""What the dashboard needs to know of a run, put together from the parts that know it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collab_core.archive import Archive
    from collab_core.session import Session
    from collab_dashboard import ArchiveView, RunWatch, TaskFacts
    from collab_trainer import Task

MAX_VERSIONS = 12


def watch_as_auxiliary(session: Session, task: Task | None, archive: Path | None) -> RunWatch:
    """The run as an auxiliary sees it: with its own part in it, its log and its archive."""
    from collab_core.swarm import Peer
    from collab_dashboard import RunWatch

    swarm = session.swarm
    watch = RunWatch(
        manifest=session.manifest,
        invite=lambda: session.invite().encode(),
        peers=swarm.peers,
        own=lambda: Peer(swarm.peer_id, swarm.record, math.inf),
        name_of=swarm.name_of,
        facts=_facts(session, task),
        archive=None if archive is None else _own_archive(archive),
    )
    watch.follow(session.events)
    return watch


def watch_as_guest(session: Session) -> RunWatch:
    """The run as somebody sees it who only looks on."""
    from collab_dashboard import RunWatch

    settings = session.manifest.settings
    task: Task | None = None
    if settings.task.name == "tiny-gpt":  # others need files that a guest does not fetch
        from collab_trainer import load_task

        task = load_task(settings.task)
    watch = RunWatch(
        manifest=session.manifest,
        invite=lambda: session.invite().encode(),
        peers=session.swarm.peers,
        facts=_facts(session, task),
        archive=_others_archive(session) if settings.checkpoints.every else None,
    )
    session.events.listen(watch.hear)
    return watch


def _facts(session: Session, task: Task | None) -> TaskFacts:
    from collab_dashboard import TaskFacts
    from collab_trainer import tokens_per_sample

    return TaskFacts(
        tokens_per_sample=tokens_per_sample(session.manifest.settings.task),
        floor=lambda: None if task is None else task.floor,
    )


def _own_archive(folder: Path) -> Callable[[], ArchiveView | None]:
    opened: Archive | None = None

    def look() -> ArchiveView | None:
        nonlocal opened
        from collab_core.archive import Archive
        from collab_dashboard import ArchiveView, VersionView

        if not folder.exists():
            return None
        opened = opened or Archive(folder)  # it remembers the versions it has read
        versions = opened.versions()
        newest = [
            VersionView(
                epoch=version.epoch,
                root=version.root,
                created=version.created,
                loss=version.provenance.loss,
                held_out_loss=version.provenance.held_out_loss,
            )
            for version in reversed(versions[-MAX_VERSIONS:])
        ]
        stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return ArchiveView(num_versions=len(versions), stored_bytes=stored, newest=newest)

    return look


def _others_archive(session: Session) -> Callable[[], ArchiveView | None]:
    from collab_core.library import Visitor

    visitor = Visitor(session.swarm)

    def look() -> ArchiveView | None:
        from collab_core.errors import ArchiveError
        from collab_core.state.claims import is_trusted
        from collab_dashboard import ArchiveView, VersionView

        for peer in session.swarm.peers():
            if not is_trusted(peer.peer_id, peer.record, session.manifest) or not peer.record.is_reachable:
                continue
            try:
                listing = visitor.versions_of(peer.peer_id)
            except ArchiveError:
                continue  # it left; the next one may tell
            newest = [
                VersionView(epoch=listing.epochs.get(root), root=root)
                for root in reversed(listing.roots[-MAX_VERSIONS:])
            ]
            return ArchiveView(num_versions=len(listing.roots), newest=newest)
        return None

    return look
