"""The organiser's folder: `run.toml`, `organiser.key` and `join.md`; once signed, `manifest.json` and `assets/`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from collab_core.errors import Code, ConfigError, StateError, SwarmError
from collab_core.files import create_file, replace_file
from collab_core.run.assets import AssetFolder, describe_assets
from collab_core.run.invite import PREFIX
from collab_core.run.keys import OrganiserKey, fingerprint
from collab_core.run.manifest import MAX_MANIFEST_BYTES, Manifest, SignedManifest, difference
from collab_core.run.runfile import RUN_FILE, load_run_file
from collab_core.run.settings import RunSettings

KEY_FILE = "organiser.key"
MANIFEST_FILE = "manifest.json"
JOIN_FILE = "join.md"
NOTEBOOKS = "web/*.ipynb"
ASSETS_FOLDER = "assets"
LIVE_LINE = re.compile(rb"^(?:<!-- live: .*-->|\*\*Live:\*\* <http://[^>/]*:\d+/>)$", re.MULTILINE)
"""Meant for the dashboard's address, or with one that we put there: another, of a web server in front of it, stays."""
ANY_INVITE = re.compile(PREFIX.encode() + "(?:…|[A-Za-z0-9_-]+)".encode())
INVITE_FIELD = re.compile(rb'(?<="invite = \\")(?:' + PREFIX.encode() + rb'[A-Za-z0-9_-]+)?(?=\\")')
"""In a notebook, which is a JSON document."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is found out about a run before it is signed."""

    initial_root: str
    """Root of the state at epoch 0."""
    assets: Mapping[str, bytes] = field(default_factory=dict)
    """Small files that every peer needs (config, tokenizer), by name."""


Prepare: TypeAlias = Callable[[RunSettings, Path], Prepared]
"""Prepares a run from its settings and its folder. Slow: builds the model, may download."""


class RunFolder:
    """A run on the organiser's disk.

    Args:
        path: the folder, or the run file in it.
    """

    def __init__(self, path: Path) -> None:
        is_file = os.path.isfile(path) or (path.suffix == ".toml" and not os.path.isdir(path))
        self.path = path.parent if is_file else path
        self.run_file = path if is_file else path / RUN_FILE
        self.key_file = self.path / KEY_FILE
        self.manifest_file = self.path / MANIFEST_FILE
        self.join_file = self.path / JOIN_FILE
        self.assets = AssetFolder(self.path / ASSETS_FOLDER)

    @classmethod
    def create(cls, path: Path, template: str, files: Mapping[str, bytes] | None = None) -> RunFolder:
        """Make a folder with a run file and a new key, or leave nothing behind.

        Args:
            path: of the folder.
            template: text of the run file.
            files: more to write: path in the folder, content.

        Raises:
            ConfigError: FOLDER_EXISTS, or the template is not a valid run file.
            StateError: STATE_DIR_UNWRITABLE.
        """
        with _said_in_words(path), contextlib.ExitStack() as undo:
            if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
                raise FileExistsError(path)
            _make_folders(path, undo)
            folder = cls(path)
            # only what we made ourselves is taken away again: another `collab new` may be at work on the same folder
            OrganiserKey.create(folder.key_file)
            undo.callback(_undoing(folder.key_file.unlink))
            create_file(folder.run_file, template.encode())
            undo.callback(_undoing(folder.run_file.unlink))
            for name, content in (files or {}).items():
                _make_folders((path / name).parent, undo)
                create_file(path / name, content)
                undo.callback(_undoing((path / name).unlink))
            folder.settings()
            undo.pop_all()
        return folder

    def settings(self) -> RunSettings:
        """What the run file says now."""
        return load_run_file(self.run_file)

    def key(self) -> OrganiserKey:
        """The organiser's key; only the organiser's own copy of the folder has it."""
        return OrganiserKey.load(self.key_file)

    def tell_invite(self, invite: str, live: str | None = None) -> bool:
        """Put the invite wherever one stands in the page people join by, and into its notebooks; False: nothing to do.

        Args:
            invite: as people type it.
            live: address of a dashboard that everyone may see, for the line that has one or is meant for it.

        Raises:
            StateError: STATE_DIR_UNWRITABLE.
        """
        with _said_in_words(self.path):
            if not self.join_file.is_file():
                return False
            page = ANY_INVITE.sub(invite.encode(), self.join_file.read_bytes())
            if live is not None:
                page = LIVE_LINE.sub(f"**Live:** <{live}>".encode(), page)
            told = {self.join_file: page}
            for notebook in self.path.glob(NOTEBOOKS):
                told[notebook] = INVITE_FIELD.sub(invite.encode(), notebook.read_bytes())
            changed = {path: content for path, content in told.items() if content != path.read_bytes()}
            for path, content in changed.items():
                replace_file(path, content)
            return bool(changed)

    def signed_manifest(self, prepare: Prepare) -> SignedManifest:
        """The run, signed: the kept manifest while the run file says the same, otherwise a new one.

        Afterwards `assets` holds the files that it names.

        Args:
            prepare: called only to sign anew, or to get back files that are gone.

        Raises:
            ConfigError: the run file is wrong, NO_ORGANISER_KEY and nothing valid is kept, or BAD_ASSETS.
        """
        settings = self.settings()
        key = self.key() if os.path.lexists(self.key_file) else None
        kept = self._kept(key)
        if kept is not None and _says(kept[1], settings):
            self._mend_assets(kept[1], prepare)
            return kept[0]
        if key is None:
            raise self._no_key(settings, kept[1] if kept else None)
        prepared = prepare(settings, self.path)
        manifest = Manifest(
            settings=settings,
            initial_root=prepared.initial_root,
            organiser=key.public.hex(),
            assets=describe_assets(prepared.assets),
        )
        signed = SignedManifest.sign(manifest, key)
        self.assets.write(prepared.assets)
        with _said_in_words(self.path):
            replace_file(self.manifest_file, signed.to_bytes())
        return signed

    def _mend_assets(self, manifest: Manifest, prepare: Prepare) -> None:
        """Files that the kept manifest names and that are gone are made again; they must come out the same."""
        missing = manifest.assets.keys() - self.assets.read(manifest.assets).keys()
        if not missing:
            return
        made = prepare(manifest.settings, self.path).assets
        now = describe_assets(made)
        if changed := sorted(name for name in missing if now.get(name) != manifest.assets[name]):
            raise ConfigError(
                Code.BAD_ASSETS,
                f"The run was signed with other files than there are now: {', '.join(changed)}.",
                fix=f"Put back the files (in {str(self.assets.path)!r}, or where the run file points to); or remove "
                f"{MANIFEST_FILE} to sign a new run, with a new invite.",
            )
        self.assets.write({name: made[name] for name in missing})

    def _kept(self, key: OrganiserKey | None) -> tuple[SignedManifest, Manifest] | None:
        """The manifest on disk, if it is whole and signed by our key (or, without one, by the key it names)."""
        try:
            with open(self.manifest_file, "rb") as file:
                signed = SignedManifest.from_bytes(file.read(MAX_MANIFEST_BYTES + 1))
            return signed, signed.open(None, fingerprint(key.public if key else signed.claimed_organiser))
        except (OSError, SwarmError):
            return None

    def _no_key(self, settings: RunSettings, kept: Manifest | None) -> ConfigError:
        if kept is None:
            what = f"there is no valid {MANIFEST_FILE} either"
        else:
            lines = difference(_with_settings(kept, settings), kept)
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            what = f"the run file was changed since it was signed: {lines[0]}{more}"
        return ConfigError(
            Code.NO_ORGANISER_KEY,
            f"{str(self.key_file)!r} does not exist, and {what}.",
            fix=f"Copy {KEY_FILE} here from where `collab new` made it"
            + (", or undo the change." if kept else ", or begin a new run with `collab new NAME`."),
        )


def _with_settings(manifest: Manifest, settings: RunSettings) -> Manifest:
    return replace(manifest, settings=settings)


def _says(manifest: Manifest, settings: RunSettings) -> bool:
    # not `==` of the settings: for Python 1, 1.0 and true are equal, for the run's hash they are not
    return _with_settings(manifest, settings).canonical() == manifest.canonical()


def _make_folders(path: Path, undo: contextlib.ExitStack) -> None:
    for missing in [above for above in (*reversed(path.parents), path) if not above.exists()]:
        missing.mkdir(exist_ok=True)
        undo.callback(_undoing(missing.rmdir))


def _undoing(action: Callable[[], None]) -> Callable[[], None]:
    def undo() -> None:
        with contextlib.suppress(OSError):  # the failure that led here is the one to tell
            action()

    return undo


@contextlib.contextmanager
def _said_in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise ConfigError(
            Code.FOLDER_EXISTS,
            f"{str(path)!r} already exists and is not an empty folder.",
            fix="Choose another name, or remove it first if you no longer need it and its key.",
        ) from None
    except OSError as error:
        raise StateError(
            Code.STATE_DIR_UNWRITABLE,
            f"The run's folder {str(path)!r} cannot be written: {error.strerror}.",
            fix="Choose a folder you may write to, on a disk with space left.",
        ) from None
