"""The run as everybody sees it: canonical JSON whose hash is the run's identity, signed by the organiser."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from blake3 import blake3

from collab_core.errors import Code, ConfigError, SwarmError
from collab_core.run.assets import Asset, check_assets
from collab_core.run.keys import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, OrganiserKey, fingerprint, verify
from collab_core.run.problems import dotted, show_value
from collab_core.run.runfile import parse_settings
from collab_core.run.settings import RunSettings

FORMAT = 1
MAX_MANIFEST_BYTES = 256 * 1024
RUN_HASH_BYTES = 32
ROOT_BYTES = 32

# Signatures of one kind must never pass for another, so each signed message begins with its kind.
_MANIFEST_KIND = b"collab manifest v1\0"
_GRANT_KIND = b"collab grant v1\0"

_ASK_AGAIN = (
    "Ask the organiser for a fresh invite; if it is the same one, the peer that sent this is not to be trusted."
)
_UPDATE = "Update Collab (`pip install -U collab-train`), or ask the organiser which version the run needs."


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What the run is. Two peers with the same `run_hash` agree on all of it."""

    settings: RunSettings
    initial_root: str
    """Root of the state at epoch 0, in hex."""
    organiser: str
    """The organiser's public key, in hex."""
    assets: Mapping[str, Asset] = field(default_factory=dict)
    """Files that every peer needs, by name."""
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT or isinstance(self.format, bool):
            raise ValueError(f"format {self.format!r} is not {FORMAT}")
        _from_hex(self.initial_root, ROOT_BYTES, "initial_root")
        _from_hex(self.organiser, PUBLIC_KEY_BYTES, "organiser")
        check_assets(self.assets)

    def canonical(self) -> bytes:
        """The one way to write this manifest down: defaults included, so the hash does not tell which were typed."""
        fields: dict[str, object] = {
            "format": self.format,
            "initial_root": self.initial_root,
            "organiser": self.organiser,
            "settings": self.settings.model_dump(),
        }
        if self.assets:  # a run without files is written as before there were any
            fields["assets"] = {name: asdict(asset) for name, asset in self.assets.items()}
        return _canonical_json(fields)

    @property
    def run_hash(self) -> bytes:
        """32 bytes: the run's identity."""
        return blake3(self.canonical()).digest()

    @property
    def run_id(self) -> str:
        """`run_hash` in hex."""
        return self.run_hash.hex()


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest as it travels: the exact bytes that were signed. Nothing in it is trusted before `open`."""

    document: bytes
    signature: bytes

    @classmethod
    def sign(cls, manifest: Manifest, key: OrganiserKey) -> SignedManifest:
        """Sign with the key whose public half the manifest names.

        Raises:
            ConfigError: BAD_VALUE, the manifest would be larger than peers accept.
        """
        if manifest.organiser != key.public.hex():
            raise ValueError("the manifest names another organiser than the key that signs it")
        document = manifest.canonical()
        signed = cls(document, key.sign(_MANIFEST_KIND + document))
        if (size := len(signed.to_bytes())) > MAX_MANIFEST_BYTES:
            raise ConfigError(
                Code.BAD_VALUE,
                f"The run's manifest has {size} bytes, and peers accept at most {MAX_MANIFEST_BYTES}.",
                fix="Shorten [task.options] in run.toml.",
            )
        return signed

    @property
    def run_hash(self) -> bytes:
        """Hash of the document as it is; says nothing about whether it is valid."""
        return blake3(self.document).digest()

    @property
    def claimed_organiser(self) -> bytes:
        """The public key the document names; anybody can name any key.

        Raises:
            SwarmError: WRONG_MANIFEST, there is none in it.
        """
        try:
            return _from_hex(_object(_parse_json(self.document)).get("organiser"), PUBLIC_KEY_BYTES, "organiser")
        except ValueError as error:
            raise _wrong(f"is not one: {error}.") from None

    def to_bytes(self) -> bytes:
        """For the wire and for `manifest.json`."""
        return _canonical_json({"manifest": self.document.decode(), "signature": self.signature.hex()})

    @classmethod
    def from_bytes(cls, data: bytes) -> SignedManifest:
        """Read what `to_bytes` wrote, and nothing else.

        Raises:
            SwarmError: WRONG_MANIFEST.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise _wrong(f"has {len(data)} bytes, and at most {MAX_MANIFEST_BYTES} are allowed.")
        try:
            envelope = _object(_parse_json(data))
            if set(envelope) != {"manifest", "signature"} or not isinstance(envelope["manifest"], str):
                raise ValueError("it must hold a text `manifest` and a `signature`, and nothing else")
            signature = _from_hex(envelope["signature"], SIGNATURE_BYTES, "signature")
            signed = cls(envelope["manifest"].encode(), signature)
            if signed.to_bytes() != data:  # doubled keys, other spacing: one content has one form
                raise ValueError("it is not written in the canonical form")
        except ValueError as error:
            raise _wrong(f"is not one: {error}.") from None
        return signed

    def open(self, run_hash: bytes | None, fingerprint: bytes) -> Manifest:
        """Check everything, then read it.

        Args:
            run_hash: the run we were invited to; None if any run of this organiser will do.
            fingerprint: of the organiser's key, as the invite has it.

        Raises:
            SwarmError: WRONG_MANIFEST or BAD_SIGNATURE.
        """
        if run_hash is not None and self.run_hash != run_hash:
            raise _wrong(f"is of run {self.run_hash.hex()[:16]}…, and the invite is for {run_hash.hex()[:16]}….")
        _check_signature(self, fingerprint)
        try:
            manifest = _read_manifest(_object(_parse_json(self.document)))
            if manifest.canonical() != self.document:
                raise ValueError("it is not written in the canonical form")
        except ConfigError as error:
            raise _wrong(f"cannot be used by this version of Collab: {error.message}", fix=_UPDATE) from None
        except ValueError as error:
            raise _wrong(f"cannot be used by this version of Collab: {error}.", fix=_UPDATE) from None
        return manifest


def difference(a: Manifest, b: Manifest) -> list[str]:
    """What differs between our own manifest `a` and the run's `b`, one line each, in words."""
    here, there = dict(_leaves(a)), dict(_leaves(b))
    return [
        f"{key}: {_shown(here, key)} here, {_shown(there, key)} in the run"
        for key in here | there
        # as JSON: for Python 1, 1.0 and true are equal, for the run's hash they are not
        if key not in here or key not in there or _canonical_json(here[key]) != _canonical_json(there[key])
    ]


def grant(key: OrganiserKey, run_hash: bytes, peer_id: str) -> str:
    """The organiser's word, in hex, that this peer speaks for the run (which history wins, who serves state)."""
    return key.sign(_grant_message(run_hash, peer_id)).hex()


def is_granted(public: bytes, run_hash: bytes, peer_id: str, grant: str) -> bool:
    """Whether `grant` is the organiser's for this peer and this run. It comes from a peer: junk is a plain no."""
    try:
        return _is_granted(public, run_hash, peer_id, grant)
    except (ValueError, TypeError, AttributeError):
        return False


@functools.lru_cache(4096)  # everybody's record is looked at many times a second
def _is_granted(public: bytes, run_hash: bytes, peer_id: str, grant: str) -> bool:
    return verify(public, _grant_message(run_hash, peer_id), _from_hex(grant, SIGNATURE_BYTES, "grant"))


def _grant_message(run_hash: bytes, peer_id: str) -> bytes:
    if len(run_hash) != RUN_HASH_BYTES:  # a fixed length, or hash and peer could be cut apart in another place
        raise ValueError(f"a run hash has {RUN_HASH_BYTES} bytes, not {len(run_hash)}")
    return _GRANT_KIND + run_hash + peer_id.encode()


def _check_signature(signed: SignedManifest, expected: bytes) -> None:
    public = signed.claimed_organiser
    if fingerprint(public) != expected:
        what = f"names the key {fingerprint(public).hex()}, and the organiser's is {expected.hex()}"
    elif not verify(public, _MANIFEST_KIND + signed.document, signed.signature):
        what = f"has a signature that the key {expected.hex()} did not make"
    else:
        return
    raise SwarmError(
        Code.BAD_SIGNATURE,
        f"The manifest {what}.",
        fix="Do not join. Ask the organiser for a fresh invite, by a road you trust.",
    )


def _read_manifest(fields: Mapping[str, object]) -> Manifest:
    if fields.get("format") != FORMAT:
        raise ValueError(f"its format is {show_value(fields.get('format'))}, and {FORMAT} is the one known here")
    if set(fields) - {"assets"} != {"format", "initial_root", "organiser", "settings"}:
        raise ValueError(f"it has the keys {show_value(sorted(fields))}")
    initial_root, organiser = fields["initial_root"], fields["organiser"]
    if not isinstance(initial_root, str) or not isinstance(organiser, str):
        raise ValueError("initial_root and organiser must be text")
    settings = parse_settings(_object(fields["settings"]), "the manifest")
    assets = {name: _read_asset(value) for name, value in _object(fields.get("assets", {})).items()}
    return Manifest(settings=settings, initial_root=initial_root, organiser=organiser, assets=assets)


def _read_asset(value: object) -> Asset:
    match value:
        case {"hash": str() as digest, "size": int() as size, **more} if not more:
            return Asset(digest, size)
    raise ValueError("a file must have a hash and a size, and nothing else")


def _shown(values: Mapping[str, object], key: str) -> str:
    return show_value(values[key]) if key in values else "not set"


def _leaves(manifest: Manifest) -> Iterator[tuple[str, object]]:
    def walk(path: tuple[str, ...], value: object) -> Iterator[tuple[str, object]]:
        if isinstance(value, dict):
            for name, below in value.items():
                yield from walk((*path, name), below)
        else:
            yield dotted(path), value

    yield from walk((), manifest.settings.model_dump())
    yield from walk(("assets",), {name: asset.hash for name, asset in manifest.assets.items()})
    yield "initial_root", manifest.initial_root
    yield "organiser", manifest.organiser


def _canonical_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _parse_json(data: bytes) -> object:
    """JSON from a stranger; every way it can fail is a ValueError without the stranger's text in it."""
    try:
        value: object = json.loads(data.decode())
    except (ValueError, RecursionError):
        raise ValueError(f"its {len(data)} bytes are not JSON") from None
    return value


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{show_value(value)} stands where a JSON object must be")
    return value


def _from_hex(value: object, num_bytes: int, what: str) -> bytes:
    """Lower-case hex of exactly this length: one value, one spelling."""
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{2 * num_bytes}}}", value):
        raise ValueError(f"{what} must be {2 * num_bytes} hex digits, not {show_value(value)}")
    return bytes.fromhex(value)


def _wrong(what: str, *, fix: str = _ASK_AGAIN) -> SwarmError:
    return SwarmError(Code.WRONG_MANIFEST, f"The manifest {what}", fix=fix)
