"""One key per peer: the libp2p identity. It names the peer, secures its connections and signs its record."""

from __future__ import annotations

from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from collab_core.errors import Code, StateError
from collab_core.files import replace_file

# libp2p's protobuf framing of an Ed25519 key. The public key is the peer ID itself ("identity multihash"), so whoever
# knows a peer's ID can check its signatures.
PRIVATE_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])
PEER_ID_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])


class Identity:
    """The private key of this peer, kept in its state folder."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        public = private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.peer_id: str = base58.b58encode(PEER_ID_PREFIX + public).decode()

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The identity in `path`; a new one is written if there is none, so a restarted peer is the same peer."""
        try:
            if not path.exists():
                key = Ed25519PrivateKey.generate()
                seed = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
                public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
                replace_file(path, PRIVATE_PREFIX + seed + public, mode=0o600)
            data = path.read_bytes()
        except OSError as error:
            raise StateError(
                Code.STATE_DIR_UNWRITABLE,
                f"The identity {path} cannot be read or written: {error.strerror or error}.",
                fix="Check the path, or give another one: --identity-path SOME/FILE",
            ) from error
        if len(data) != 68 or not data.startswith(PRIVATE_PREFIX):
            raise StateError(
                Code.BAD_BACKUP,
                f"{path} is not a peer identity made by Collab ({len(data)} bytes).",
                fix="Give the right file with --identity-path, or move it away to become a new peer.",
            )
        return cls(Ed25519PrivateKey.from_private_bytes(data[4:36]))

    def sign(self, message: bytes) -> bytes:
        return self._private_key.sign(message)


def peer_id_of(public_key: bytes) -> str:
    """The ID of the peer with this public key, in libp2p's framing."""
    return base58.b58encode(PEER_ID_PREFIX[:2] + public_key).decode()


def is_signed_by(peer_id: str, message: bytes, signature: bytes) -> bool:
    """Whether the peer with this ID made the signature. Any malformed input is simply not signed."""
    try:
        raw = base58.b58decode(peer_id)
        if len(raw) != 38 or not raw.startswith(PEER_ID_PREFIX):
            return False
        Ed25519PublicKey.from_public_bytes(raw[6:]).verify(signature, message)
    except (ValueError, InvalidSignature):
        return False
    return True
