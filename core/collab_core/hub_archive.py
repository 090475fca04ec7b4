"""An archive in a repository on the Hub: as in a folder, and beside each pack its table.

    versions/ROOT.json  packs/NAME.pack  tables/NAME  tags.json

Tables are small and say what is where, so whoever wants one version downloads only the packs that it needs, and whoever
has a new one uploads a pack with what is missing. Every push is one commit: all of it is there, or nothing.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from collab_core.archive import Archive, Version
from collab_core.archive.index import Place
from collab_core.archive.mending import complete
from collab_core.archive.packs import MAX_TABLE_BYTES, SUFFIX, BadPack, parse_table, read_table_bytes
from collab_core.archive.transfer import Moved, chosen, counted, give_tags, missing_items, tag_from_elsewhere, transfer
from collab_core.errors import ArchiveError, Code, HubError
from collab_core.hub import download_folder, hub_in_words

NUM_ATTEMPTS = 5  # when others push at the same time


class _Outdated(Exception):
    """Somebody else committed since we looked."""


def push(repo: str, source: Archive, references: Sequence[str] | None) -> Moved:
    """Give a repository the versions that it lacks. It is made if there is none, private.

    Raises:
        HubError: in words; nothing of it is there then.
    """
    from huggingface_hub import HfApi

    with hub_in_words(repo):
        HfApi().create_repo(repo, private=True, exist_ok=True)
    for _ in range(NUM_ATTEMPTS):
        with contextlib.suppress(_Outdated), _mirror(repo) as (mirror, head):
            return _push(repo, head, source, mirror, chosen(source, references))
    raise HubError(Code.HUB_BROKEN, f"Others push to {repo} all the time.", fix="Try again later.")


def _push(repo: str, head: str, source: Archive, mirror: Archive, versions: Sequence[Version]) -> Moved:
    moved = Moved()
    files: dict[str, bytes | Path] = {}
    known = {version.root for version in mirror.versions()}
    for version in versions:
        if version.root not in known:
            for place in mirror.store.write(counted(item, moved) for item in missing_items(source, mirror, version)):
                path = mirror.store.path(place.pack)
                files[f"packs/{path.name}"], files[f"tables/{path.stem}"] = path, read_table_bytes(path)
            files[f"versions/{version.root}.json"] = source.version_bytes(version.root)
            moved.versions += 1
    if give_tags(source, mirror, versions):
        files["tags.json"] = mirror.folder / "tags.json"
    if files:
        _commit(repo, head, files, f"{moved.versions} versions")
    return moved


def _commit(repo: str, head: str, files: dict[str, bytes | Path], message: str) -> None:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    additions = [CommitOperationAdd(name, content) for name, content in files.items()]
    with hub_in_words(repo):
        try:
            HfApi().create_commit(repo, additions, commit_message=message, parent_commit=head)
        except HfHubHTTPError as error:
            if error.response is None or error.response.status_code != 412:
                raise
            is_outdated = True
        else:
            is_outdated = False
    if is_outdated:
        raise _Outdated


def pull(repo: str, target: Archive, references: Sequence[str] | None) -> Moved:
    """Get versions from a repository: only the packs with what we lack are downloaded.

    Raises:
        HubError: in words.
        ArchiveError: there is no such version, or it is damaged.
    """
    with _mirror(repo) as (mirror, head):
        offered = chosen(mirror, references)
        versions = [version for version in offered if _may_take(target, version, mirror.signer(version.root))]
        if references and len(versions) < len(offered):
            raise ArchiveError(
                Code.NO_TRANSFER,
                f"{repo} offers a step of a run whose history this archive keeps by itself.",
                fix="Pull it into an archive of its own: --state-dir SOME/FOLDER",
            )
        have = complete(target, {version.root for version in versions})
        packs = {place.pack for v in versions if v.root not in have for place in _needed(mirror, target, v)}
        sound = target.store.index.sizes().keys() - target.store.index.faults().keys()
        for pack in sound:  # what we have is where differences begin
            if not mirror.store.path(pack).exists():
                mirror.store.path(pack).symlink_to(target.store.path(pack).resolve())
        if packs:
            downloaded = download_folder(repo, head, [f"packs/{pack}{SUFFIX}" for pack in packs]) / "packs"
            for pack in packs:
                if (downloaded / f"{pack}{SUFFIX}").exists() and not mirror.store.path(pack).exists():
                    mirror.store.path(pack).symlink_to((downloaded / f"{pack}{SUFFIX}").resolve())
        mirror.store.index.refresh()  # what was not downloaded is not there
        moved = transfer(mirror, target, versions)
        for version in versions:
            names = [name for name, root in mirror.tags().items() if root == version.root]
            tag_from_elsewhere(target, version, names)
        return moved


def _may_take(target: Archive, version: Version, signer: str) -> bool:
    """Variants are everybody's. Nobody adds steps to a history that somebody else signs; mending one is fine."""
    if version.is_variant or any(one.root == version.root for one in target.versions()):
        return True
    run_id = version.provenance.run_id
    return not any(
        not one.is_variant and one.provenance.run_id == run_id and target.signer(one.root) != signer
        for one in target.versions()
    )


def _needed(mirror: Archive, target: Archive, version: Version) -> Iterator[Place]:
    """The fewest bytes that lead from what the target has to this version."""
    for entry in version.all_entries():
        if not target.store.has(entry.digest()):
            ways = [_unknown_part(way, target) for way in mirror.store.chains(entry.digest())]
            yield from min(ways, key=lambda way: sum(place.item.size for place in way), default=[])


def _unknown_part(way: list[Place], target: Archive) -> list[Place]:
    """The end of a way that begins with a difference to something that the target has; all of it if there is none."""
    for start in range(len(way) - 1, -1, -1):
        base = way[start].item.base
        if base is not None and target.store.has(base):
            return way[start:]
    return way


@contextlib.contextmanager
def _mirror(repo: str) -> Iterator[tuple[Archive, str]]:
    """An archive that knows all that a repository has, but holds no pack of it; and which commit that is."""
    from huggingface_hub import HfApi

    with hub_in_words(repo):
        head = str(HfApi().repo_info(repo).sha)
    source = download_folder(repo, head, ["versions/*.json", "tables/*", "tags.json"])
    with tempfile.TemporaryDirectory(prefix="collab-hub-") as name:
        folder = Path(name)
        (folder / "versions").mkdir()
        for path in [*source.glob("versions/*.json"), *source.glob("tags.json")]:
            (folder / path.relative_to(source)).symlink_to(path.resolve())
        mirror = Archive(folder)
        try:
            for path in source.glob("tables/*"):
                if not path.is_file() or path.stat().st_size > MAX_TABLE_BYTES:
                    continue
                with contextlib.suppress(BadPack):  # as if the pack were not there
                    mirror.store.index.add(path.name, 0, parse_table(path.read_bytes(), path.name))
            yield mirror, head
        finally:
            mirror.close()
