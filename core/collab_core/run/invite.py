"""One string that is enough to join, made to survive being copied through chats, mails and terminals."""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

import msgpack
from blake3 import blake3

from collab_core.errors import Code, ConfigError
from collab_core.run.keys import FINGERPRINT_BYTES
from collab_core.run.manifest import RUN_HASH_BYTES

PREFIX = "collab1_"
MAX_PEERS = 16
MAX_ADDRESS_CHARS = 256
MAX_INVITE_CHARS = 8192

_CHECKSUM_BYTES = 4
# A line may be broken inside the prefix too. What stands before it must not be a path: ./collab1_x/ is a folder.
_ANY_PREFIX = re.compile(r"(?<![A-Za-z0-9/\\.-])" + r"[\s>]*".join("collab") + r"[\s>]*([0-9]+)[\s>]*_", re.IGNORECASE)
_TOKEN = re.compile(r"[^A-Za-z0-9_-]*([A-Za-z0-9_-]*)(.*)", re.DOTALL)
_ADDRESS = re.compile(r"/[!-~]+/p2p/[1-9A-HJ-NP-Za-km-z]+")
_NAME = re.compile(r"([a-z0-9][a-z0-9-]{0,47})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Invite:
    """Where the first peers are, which run, and whose signature to trust."""

    run_hash: bytes
    fingerprint: bytes
    initial_peers: tuple[str, ...]
    """Multiaddresses that end in /p2p/ and the peer's id; 1 to 16."""
    name: str = ""
    """The run's name, for people only: nothing is decided by it."""

    def __post_init__(self) -> None:
        if len(self.run_hash) != RUN_HASH_BYTES or len(self.fingerprint) != FINGERPRINT_BYTES:
            raise ValueError("the run's hash or the key's fingerprint has a wrong length")
        if not 1 <= len(self.initial_peers) <= MAX_PEERS:
            raise ValueError(f"an invite has 1 to {MAX_PEERS} peers, not {len(self.initial_peers)}")
        for address in self.initial_peers:
            if len(address) > MAX_ADDRESS_CHARS or not _ADDRESS.fullmatch(address):
                raise ValueError(f"not a multiaddress that ends in /p2p/…: {address[:MAX_ADDRESS_CHARS]!r}")
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"not a run's name: {self.name[:48]!r}")

    def encode(self) -> str:
        """The string to give to people."""
        packed = msgpack.packb([self.run_hash, self.fingerprint, list(self.initial_peers), self.name])
        body = base64.urlsafe_b64encode(packed + blake3(packed).digest()[:_CHECKSUM_BYTES])
        return PREFIX + body.decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> Invite:
        """Find the invite in what was pasted: wrapped, quoted, with the command around it or a greeting after it.

        Raises:
            ConfigError: BAD_INVITE, CUT_INVITE or NEWER_INVITE.
        """
        text = _visible(text)
        found = list(_ANY_PREFIX.finditer(text))
        if not found:
            raise ConfigError(
                Code.BAD_INVITE,
                f"{text.strip()[:40]!r} is not an invite: an invite begins with {PREFIX}.",
                fix="Copy the invite that `collab aux` printed for the organiser.",
            )
        ours = next((match for match in found if match[1] == "1"), None)
        if ours is None:
            raise ConfigError(
                Code.NEWER_INVITE,
                f"The invite begins with collab{found[0][1][:8]}_, and this version of Collab reads {PREFIX}.",
                fix="Update Collab (`pip install -U collab-train`), or ask for an invite made by this version.",
            )
        num_chars = len(PREFIX)
        for body in _bodies(text[ours.end() :]):
            if (invite := _decode_body(body)) is not None:
                return invite
            num_chars = len(PREFIX) + len(body)
        raise ConfigError(
            Code.CUT_INVITE,
            f"The invite is incomplete or damaged: {num_chars} characters were seen, and their checksum is wrong.",
            fix=f"Copy it again, whole, from {PREFIX} to its last character, as plain text.",
        )


def looks_like_invite(text: str) -> bool:
    """Whether this was meant as an invite (of any version) and not as a path; it may still be damaged."""
    return _ANY_PREFIX.search(_visible(text)) is not None


def _visible(text: str) -> str:
    """Without zero-width spaces, soft hyphens, byte order marks and text direction marks."""
    return "".join(char for char in text if unicodedata.category(char) != "Cf")


def _bodies(text: str) -> Iterator[str]:
    """What the invite may be: the first word, the first two joined, … A wrapped invite has many, its end is unknown.

    Quote marks, `>` of quoted mail and other signs around a word are left out; the checksum says which join is right.
    """
    body = ""
    for word in text.split():
        match = _TOKEN.fullmatch(word)
        assert match is not None
        body += match[1]
        if len(body) > MAX_INVITE_CHARS:
            return
        if match[1]:
            yield body
        if re.search(r"[A-Za-z0-9]", match[2]):  # the invite's word went on with something foreign: it ended here
            return


def _decode_body(body: str) -> Invite | None:
    """The invite, or None if these are not exactly the characters `encode` wrote."""
    try:
        data = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
        packed, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if blake3(packed).digest()[:_CHECKSUM_BYTES] != checksum:
            return None
        invite = _from_fields(msgpack.unpackb(packed))
    except (ValueError, msgpack.UnpackException):
        return None
    return invite if invite.encode() == PREFIX + body else None


def _from_fields(fields: object) -> Invite:
    match fields:
        case [bytes() as run_hash, bytes() as fingerprint, [*peers], str() as name]:
            initial_peers = tuple(peer for peer in peers if isinstance(peer, str))
            if len(initial_peers) == len(peers):
                return Invite(run_hash=run_hash, fingerprint=fingerprint, initial_peers=initial_peers, name=name)
    raise ValueError("these are not the fields of an invite")
