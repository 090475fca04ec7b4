"""The organiser's Ed25519 key: it signs the manifest and the grants, lies beside the run file, and is never sent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from collab_core.errors import Code, ConfigError
from collab_core.files import create_file

# `cryptography` is imported inside the functions: it takes a fifth of this package's loading time,
# and most commands neither sign nor verify.
if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
FINGERPRINT_BYTES = 16


class OrganiserKey:
    """Whoever holds this key decides what the run is."""

    __slots__ = ("_private", "public")

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public: bytes = private.public_key().public_bytes_raw()

    @classmethod
    def create(cls, path: Path) -> OrganiserKey:
        """Make a new key and write it to `path`, readable by its owner only; never over an existing file.

        Raises:
            ConfigError: FOLDER_EXISTS, something is there already.
            OSError: the file cannot be written.
        """
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        key = cls(Ed25519PrivateKey.generate())
        pem = key._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            create_file(path, pem, mode=0o600)
        except FileExistsError:
            raise ConfigError(
                Code.FOLDER_EXISTS,
                f"{str(path)!r} already exists, and a key is never overwritten.",
                fix="Use this key, or choose another folder.",
            ) from None
        return key

    @classmethod
    def load(cls, path: Path) -> OrganiserKey:
        """Read a key.

        Raises:
            ConfigError: NO_ORGANISER_KEY, it is missing, unreadable or not an Ed25519 key.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            private = load_pem_private_key(path.read_bytes(), password=None)
        except OSError as error:
            raise _no_key(path, f"cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it wants a password
            raise _no_key(path, "is not a private key in PEM form without a password") from None
        if not isinstance(private, Ed25519PrivateKey):
            raise _no_key(path, "is a key of another kind than Ed25519")
        return cls(private)

    def sign(self, message: bytes) -> bytes:
        """64 bytes; the same key and message always give the same signature."""
        return self._private.sign(message)

    def __repr__(self) -> str:
        return f"OrganiserKey(public={self.public.hex()})"


def verify(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether the owner of `public` signed `message`. Bytes that are no key or no signature are simply not valid."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def fingerprint(public: bytes) -> bytes:
    """16 bytes that stand for a public key in an invite."""
    return blake3(public).digest()[:FINGERPRINT_BYTES]


def _no_key(path: Path, what: str) -> ConfigError:
    return ConfigError(
        Code.NO_ORGANISER_KEY,
        f"The organiser's key {str(path)!r} {what}.",
        fix="Put the key back where `collab new` made it, or begin a new run with `collab new NAME`.",
    )
