"""Small files that belong to a run: config and tokenizer of a model. Every peer has them and serves them on.

The manifest names each by its BLAKE3 hash and size, so it does not matter who they come from: a volunteer needs no
account anywhere to take part in the training of a private model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from collab_core.errors import Code, ConfigError, StateError
from collab_core.files import is_plain_name, replace_file

MAX_ASSETS = 64
MAX_ASSET_BYTES = 32 * 2**20
MAX_ASSETS_BYTES = 64 * 2**20
HASH_DIGITS = 64


@dataclass(frozen=True, slots=True)
class Asset:
    """What one file must be."""

    hash: str
    """BLAKE3 of its bytes, in hex."""
    size: int

    @classmethod
    def of(cls, data: bytes) -> Asset:
        return cls(blake3(data).hexdigest(), len(data))

    def __post_init__(self) -> None:
        if not re.fullmatch(f"[0-9a-f]{{{HASH_DIGITS}}}", self.hash):
            raise ValueError(f"a file's hash must be {HASH_DIGITS} hex digits")
        if type(self.size) is not int or not 0 <= self.size <= MAX_ASSET_BYTES:
            raise ValueError(f"a file may have at most {MAX_ASSET_BYTES} bytes")


def check_assets(assets: Mapping[str, Asset]) -> None:
    """Refuse a list of files that no peer should take.

    Raises:
        ValueError: a name that is no plain file name, too many files, or too many bytes.
    """
    if len(assets) > MAX_ASSETS:
        raise ValueError(f"a run may have at most {MAX_ASSETS} files, not {len(assets)}")
    for name in assets:
        if not is_plain_name(name):
            raise ValueError("the name of a file must be letters, digits, '_', '-' and dots between them")
    if len({name.lower() for name in assets}) < len(assets):
        raise ValueError("two files have the same name")  # on a disk that does not tell small letters from capitals
    if (total := sum(asset.size for asset in assets.values())) > MAX_ASSETS_BYTES:
        raise ValueError(f"the files of a run may have at most {MAX_ASSETS_BYTES} bytes together, not {total}")


def describe_assets(files: Mapping[str, bytes]) -> dict[str, Asset]:
    """What a manifest says about these files.

    Raises:
        ConfigError: BAD_ASSETS, peers would refuse them.
    """
    try:
        assets = {name: Asset.of(data) for name, data in sorted(files.items())}
        check_assets(assets)
    except ValueError as error:
        sizes = ", ".join(f"{name[:64]} ({len(data)} bytes)" for name, data in sorted(files.items())[:MAX_ASSETS])
        raise ConfigError(
            Code.BAD_ASSETS,
            f"The files of the run's model cannot travel to its peers: {error}. Seen: {sizes}.",
            fix="Only config and tokenizer travel this way; use a tokenizer with a smaller tokenizer.json.",
        ) from None
    return assets


class AssetFolder:
    """Files of a run on disk, by name. What is read is checked, so a damaged or foreign file counts as missing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, assets: Mapping[str, Asset]) -> dict[str, bytes]:
        """Those of the files that are here, whole."""
        found = {}
        for name, asset in assets.items():
            try:
                with open(self.path / name, "rb") as file:
                    data = file.read(asset.size + 1)
            except OSError:
                continue
            if len(data) == asset.size and Asset.of(data) == asset:
                found[name] = data
        return found

    def write(self, files: Mapping[str, bytes]) -> None:
        """Keep these files.

        Raises:
            StateError: STATE_DIR_UNWRITABLE.
        """
        try:
            if files:
                self.path.mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                replace_file(self.path / name, data)
        except OSError as error:
            raise StateError(
                Code.STATE_DIR_UNWRITABLE,
                f"The run's files cannot be kept in {self.path}: {error.strerror or error}.",
                fix="Give a folder you may write to, on a disk with space left.",
            ) from None
