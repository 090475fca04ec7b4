"""Who listens at an address: a fresh TCP connection and the first half of libp2p's TLS handshake.

An open port proves nothing: behind a router's public address anybody's server may listen on it. And the daemon cannot
be asked: `P2P.connect` to a peer it is already connected to dials nobody and succeeds. In TLS 1.3 the server shows its
certificate and proves that it holds the key before the client has to show anything. libp2p puts the peer's identity
into that certificate, so we know who answers without a key of our own, and then hang up.
"""

from __future__ import annotations

import asyncio
import ssl

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from collab_core.identity import is_signed_by, peer_id_of

PROTOCOLS = (b"/multistream/1.0.0\n", b"/tls/1.0.0\n")
IDENTITY_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
SIGNED_PREFIX = b"libp2p-tls-handshake:"
MAX_HANDSHAKE_BYTES = 64 * 1024


class NotAPeer(Exception):
    """Something answers, but not a libp2p peer that proves who it is."""


async def who_answers(host: str, port: int) -> str:
    """The ID of the peer that answers at an address.

    Raises NotAPeer, or OSError if nobody answers. The caller sets the deadline.
    """
    reader, writer = await asyncio.open_connection(host, port)
    try:
        for protocol in PROTOCOLS:
            writer.write(bytes([len(protocol)]) + protocol)
        for protocol in PROTOCOLS:
            if await reader.readexactly(len(protocol) + 1) != bytes([len(protocol)]) + protocol:
                raise NotAPeer("it does not speak libp2p's TLS")
        return _identity_in(await _certificate(reader, writer))
    except (asyncio.IncompleteReadError, ssl.SSLError) as error:
        raise NotAPeer(f"the handshake broke ({type(error).__name__})") from error
    finally:
        writer.close()


async def _certificate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The certificate of a server that has proved to hold its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is signed by itself: the extension counts
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing)
    num_bytes = 0
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            data = await reader.read(MAX_HANDSHAKE_BYTES)
            num_bytes += len(data)
            if not data or num_bytes > MAX_HANDSHAKE_BYTES:
                raise NotAPeer("it ended the handshake") from None
            incoming.write(data)
            continue
        certificate = tls.getpeercert(binary_form=True)
        if certificate is None:
            raise NotAPeer("it shows no certificate")
        return certificate


def _identity_in(certificate: bytes) -> str:
    """The peer ID in a libp2p certificate, if the peer's key signed the certificate's key."""
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        extension = parsed.extensions.get_extension_for_oid(IDENTITY_EXTENSION).value
        key = parsed.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise NotAPeer("its certificate names no peer") from error
    assert isinstance(extension, x509.UnrecognizedExtension)
    # SEQUENCE { OCTET STRING public key, OCTET STRING signature }; with our Ed25519 keys every length is one byte
    data = extension.value
    if len(data) != 106 or data[:4] != b"\x30\x68\x04\x24" or data[40:42] != b"\x04\x40":
        raise NotAPeer("its certificate names no peer")
    peer_id = peer_id_of(data[4:40])
    if not is_signed_by(peer_id, SIGNED_PREFIX + key, data[42:]):
        raise NotAPeer("its certificate is not signed by the peer it names")
    return peer_id
