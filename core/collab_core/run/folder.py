"""The organiser's folder: `run.toml`, `organiser.key` beside it, and `manifest.json` once the run was signed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from collab_core.errors import Code, ConfigError, StateError, SwarmError
from collab_core.files import create_file, replace_file
from collab_core.run.keys import OrganiserKey, fingerprint
from collab_core.run.manifest import MAX_MANIFEST_BYTES, Manifest, SignedManifest, difference
from collab_core.run.runfile import RUN_FILE, load_run_file
from collab_core.run.settings import RunSettings

KEY_FILE = "organiser.key"
MANIFEST_FILE = "manifest.json"


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

    def signed_manifest(self, initial_root: Callable[[RunSettings], str]) -> SignedManifest:
        """The run, signed: the kept manifest while the run file says the same, otherwise a new one.

        Args:
            initial_root: computes the root of the initial state; slow, so it is called only to sign anew.

        Raises:
            ConfigError: the run file is wrong, or NO_ORGANISER_KEY and nothing valid is kept.
        """
        settings = self.settings()
        key = self.key() if os.path.lexists(self.key_file) else None
        kept = self._kept(key)
        if kept is not None and _says(kept[1], settings):
            return kept[0]
        if key is None:
            raise self._no_key(settings, kept[1] if kept else None)
        manifest = Manifest(settings=settings, initial_root=initial_root(settings), organiser=key.public.hex())
        signed = SignedManifest.sign(manifest, key)
        with _said_in_words(self.path):
            replace_file(self.manifest_file, signed.to_bytes())
        return signed

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
    return Manifest(settings=settings, initial_root=manifest.initial_root, organiser=manifest.organiser)


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
