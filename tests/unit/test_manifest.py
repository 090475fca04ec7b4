"""The signed manifest: one form, one hash, and no byte of it can be changed."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from collab_core.errors import Code, CollabError, ConfigError, SwarmError
from collab_core.run import (
    Manifest,
    OrganiserKey,
    RunSettings,
    SignedManifest,
    difference,
    fingerprint,
    grant,
    is_granted,
    parse_settings,
    verify,
)
from collab_core.run.manifest import MAX_MANIFEST_BYTES

KEY = OrganiserKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
OTHER_KEY = OrganiserKey(Ed25519PrivateKey.from_private_bytes(bytes(32)))
MARK = fingerprint(KEY.public)
ROOT = "ab" * 32
PEER = "12D3KooWHHzSeKaY8xuZVzkLbKFfvNgPPeKhFBGrMbNzbm5akpqu"


def make(key: OrganiserKey = KEY, root: str = ROOT, **settings: object) -> Manifest:
    return Manifest(
        settings=parse_settings({"name": "my-run"} | settings, "test"), initial_root=root, organiser=key.public.hex()
    )


SIGNED = SignedManifest.sign(make(), KEY)


def signed_document(fields: object, key: OrganiserKey = KEY) -> SignedManifest:
    """What a dishonest organiser could publish: any document, correctly signed."""
    document = (
        fields if isinstance(fields, bytes) else json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    )
    return SignedManifest(document, key.sign(b"collab manifest v1\0" + document))


def fields() -> dict[str, object]:
    loaded: dict[str, object] = json.loads(SIGNED.document)
    return loaded


def test_a_signed_manifest_survives_the_wire() -> None:
    signed = SignedManifest.from_bytes(SIGNED.to_bytes())
    assert signed == SIGNED
    manifest = signed.open(make().run_hash, MARK)
    assert manifest == make()
    assert manifest.canonical() == SIGNED.document


def test_the_hash_does_not_depend_on_which_defaults_were_typed() -> None:
    typed = make(description="", optimizer={"lr": 0.01, "name": "adamw"}, limits={})
    assert typed.run_hash == make().run_hash
    assert make(optimizer={"lr": 1}).run_hash == make(optimizer={"lr": 1.0}).run_hash


def test_the_hash_is_blake3_of_sorted_compact_json() -> None:
    manifest = make(description="Käse")
    text = manifest.canonical().decode()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert "Käse" in text
    assert manifest.run_hash == blake3(text.encode()).digest()
    assert manifest.run_id == manifest.run_hash.hex()


def test_the_canonical_form_is_frozen() -> None:
    # If this changes, every run in the world gets a new identity: raise FORMAT then.
    assert make().run_id == "24ad696496774ae343df0acd6d0f4e65f4d9a9e3c7b476de7d047fadaf447208"


@pytest.mark.parametrize(
    "other",
    [
        make(description="x"),
        make(root="ac" * 32),
        make(key=OTHER_KEY),
        make(optimizer={"lr": 0.010000000000000002}),
        make(task={"options": {"a": 1}}),
    ],
)
def test_any_difference_gives_another_hash(other: Manifest) -> None:
    assert other.run_hash != make().run_hash


def test_options_that_python_thinks_equal_are_different_runs() -> None:
    hashes = {make(task={"options": {"a": value}}).run_hash for value in (1, 1.0, True)}
    assert len(hashes) == 3


@pytest.mark.parametrize("root", ["", "AB" * 32, "ab" * 31, "ab" * 32 + "\n", " " + "ab" * 32])
def test_a_root_that_is_not_64_hex_digits_is_a_programming_error(root: str) -> None:
    with pytest.raises(ValueError, match="initial_root"):
        make(root=root)


def test_a_manifest_of_another_run_is_refused() -> None:
    with pytest.raises(SwarmError, match="invite is for") as caught:
        SIGNED.open(bytes(32), MARK)
    assert caught.value.code is Code.WRONG_MANIFEST


@pytest.mark.parametrize(
    "signed",
    [
        SignedManifest.sign(make(key=OTHER_KEY), OTHER_KEY),
        SignedManifest(SIGNED.document, OTHER_KEY.sign(b"collab manifest v1\0" + SIGNED.document)),
        SignedManifest(SIGNED.document, KEY.sign(SIGNED.document)),
        SignedManifest(SIGNED.document, KEY.sign(b"collab grant v1\0" + SIGNED.document)),
        SignedManifest(SIGNED.document, bytes(64)),
        SignedManifest(SIGNED.document, b""),
    ],
    ids=["other organiser", "other signer", "no kind", "other kind", "zeros", "empty"],
)
def test_a_signature_that_is_not_the_organisers_is_refused(signed: SignedManifest) -> None:
    with pytest.raises(SwarmError) as caught:
        signed.open(None, MARK)
    assert caught.value.code is Code.BAD_SIGNATURE


def test_signing_for_another_organiser_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="another organiser"):
        SignedManifest.sign(make(), OTHER_KEY)


@pytest.mark.parametrize("change", [1, 0x20, 0x80])
def test_every_changed_byte_is_refused(change: int) -> None:
    data = SIGNED.to_bytes()
    for position in range(len(data)):
        mutated = bytearray(data)
        mutated[position] ^= change
        with pytest.raises(SwarmError) as caught:
            SignedManifest.from_bytes(bytes(mutated)).open(None, MARK)
        assert caught.value.code in (Code.WRONG_MANIFEST, Code.BAD_SIGNATURE)


def test_every_removed_or_doubled_byte_is_refused() -> None:
    data = SIGNED.to_bytes()
    for position in range(len(data)):
        for mutated in (
            data[:position],
            data[:position] + data[position + 1 :],
            data[: position + 1] + data[position:],
        ):
            with pytest.raises(SwarmError):
                SignedManifest.from_bytes(mutated).open(None, MARK)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"null",
        b"[]",
        b"{}",
        b'"text"',
        b'{"manifest":"","signature":""}',
        b'{"manifest":1,"signature":"' + b"0" * 128 + b'"}',
        b'{"manifest":"\\ud800","signature":"' + b"0" * 128 + b'"}',
        b'{"manifest":"","signature":null}',
        b'{"manifest":"","more":1,"signature":"' + b"0" * 128 + b'"}',
        SIGNED.to_bytes() + b"\n",
        SIGNED.to_bytes().replace(b'","signature', b'", "signature'),
        SIGNED.to_bytes()[:-1] + b',"signature":"' + SIGNED.signature.hex().encode() + b'"}',
        SIGNED.to_bytes().replace(SIGNED.signature.hex().encode(), SIGNED.signature.hex().upper().encode()),
        b"[" * 100_000,
        b"9" * 10_000,
        b" " * (MAX_MANIFEST_BYTES + 1),
    ],
)
def test_an_envelope_that_is_not_exactly_one_is_refused(data: bytes) -> None:
    with pytest.raises(SwarmError) as caught:
        SignedManifest.from_bytes(data)
    assert caught.value.code is Code.WRONG_MANIFEST
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "document",
    [
        fields() | {"format": 2},
        fields() | {"format": True},
        fields() | {"format": 1.0},
        fields() | {"more": 1},
        fields() | {"initial_root": ROOT.upper()},
        fields() | {"initial_root": None},
        fields() | {"settings": []},
        fields() | {"settings": {"name": "my-run"}},
        fields() | {"settings": {"name": "../../etc"}},
        fields() | {"settings": {"name": "my-run", "plugin": "os.system"}},
        fields() | {"settings": {"name": "my-run", "task": {"options": {"a": {"b": 1}}}}},
        fields() | {"settings": {"name": "my-run", "task": {"options": {"a": "\ud800"}}}},
        fields() | {"settings": {"name": "my-run", "\ud800": 1}},
        {key: value for key, value in fields().items() if key != "settings"},
        json.dumps(fields()).encode(),
        SIGNED.document + b"\n",
        SIGNED.document.replace(b'"lr":0.01', b'"lr":1e-2'),
        SIGNED.document.replace(b'"clip_norm":1.0', b'"clip_norm":1'),
        SIGNED.document.replace(b'"clip_norm":1.0', b'"clip_norm":Infinity'),
        SIGNED.document.replace(b'"format":1', b'"format":1,"format":1'),
    ],
)
def test_a_correctly_signed_document_that_is_no_manifest_is_refused(document: object) -> None:
    assert document != SIGNED.document
    with pytest.raises(SwarmError) as caught:
        signed_document(document).open(None, MARK)
    assert caught.value.code is Code.WRONG_MANIFEST
    assert "Update Collab" in caught.value.fix


@pytest.mark.parametrize(
    "document", [b"", b"null", b"{}", b'{"organiser":1}', b'{"organiser":"AB"}', b"[" * 100_000, b"\xff"]
)
def test_a_document_without_a_key_is_refused(document: bytes) -> None:
    with pytest.raises(SwarmError) as caught:
        signed_document(document).open(None, MARK)
    assert caught.value.code is Code.WRONG_MANIFEST


def test_a_manifest_too_large_for_peers_is_refused_before_it_is_published() -> None:
    with pytest.raises(ConfigError, match="at most 262144") as caught:
        SignedManifest.sign(make(task={"options": {"text": "x" * MAX_MANIFEST_BYTES}}), KEY)
    assert caught.value.code is Code.BAD_VALUE


def test_differences_are_told_key_by_key() -> None:
    here = make(optimizer={"lr": 0.003}, strategy={"codec": "none"}, task={"options": {"width": 64, "a": 1}})
    run = make(optimizer={"lr": 0.001}, root="cd" * 32, task={"options": {"width": 128, "b": True, "a": 1.0}})
    assert difference(here, run) == [
        "task.options.width: 64 here, 128 in the run",
        "task.options.a: 1 here, 1.0 in the run",
        "strategy.codec: 'none' here, 'fp16' in the run",
        "optimizer.lr: 0.003 here, 0.001 in the run",
        f"initial_root: '{ROOT}' here, '{'cd' * 32}' in the run",
        "task.options.b: not set here, true in the run",
    ]


def test_equal_manifests_have_no_difference() -> None:
    assert difference(make(), make(optimizer={"lr": 0.01})) == []


def test_a_difference_far_inside_a_long_text_is_still_told() -> None:
    assert len(difference(make(description="x" * 300), make(description="x" * 299 + "y"))) == 1


def test_a_grant_holds_for_one_peer_of_one_run_by_one_organiser() -> None:
    run_hash = make().run_hash
    given = grant(KEY, run_hash, PEER)
    assert is_granted(KEY.public, run_hash, PEER, given)
    assert not is_granted(OTHER_KEY.public, run_hash, PEER, given)
    assert not is_granted(KEY.public, bytes(32), PEER, given)
    assert not is_granted(KEY.public, run_hash, PEER[:-1], given)
    assert not is_granted(KEY.public, run_hash[:-1], chr(run_hash[-1]) + PEER, given)


@pytest.mark.parametrize("junk", ["", "zz", "00" * 64, "0" * 127, "é" * 128, "\ud800", "00 " * 64, None, 7, b"00", []])
def test_junk_is_not_a_grant_and_raises_nothing(junk: object) -> None:
    run_hash = make().run_hash
    given = grant(KEY, run_hash, PEER)
    assert is_granted(KEY.public, run_hash, PEER, junk) is False  # type: ignore[arg-type]
    assert is_granted(KEY.public, run_hash, junk, given) is False  # type: ignore[arg-type]
    assert is_granted(KEY.public, junk, PEER, given) is False  # type: ignore[arg-type]
    assert is_granted(junk, run_hash, PEER, given) is False  # type: ignore[arg-type]
    assert is_granted(KEY.public, run_hash, PEER, given.upper()) is False


def test_verify_says_no_to_bytes_that_are_no_key_or_no_signature() -> None:
    assert verify(KEY.public, b"x", KEY.sign(b"x"))
    for public, signature in [
        (b"", b""),
        (KEY.public, b""),
        (KEY.public[:-1], KEY.sign(b"x")),
        (b"\xff" * 32, bytes(64)),
    ]:
        assert not verify(public, b"x", signature)


def test_a_key_is_private_from_the_start_and_comes_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "organiser.key"
    key = OrganiserKey.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    again = OrganiserKey.load(path)
    assert again.public == key.public
    assert len(key.public) == 32
    assert verify(key.public, b"hello", again.sign(b"hello"))
    assert len(fingerprint(key.public)) == 16
    assert key.sign(b"").hex() not in repr(key)


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "organiser.key"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="never overwritten"):
        OrganiserKey.create(path)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]


def test_a_key_is_made_where_hard_links_are_not_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    path = tmp_path / "organiser.key"
    key = OrganiserKey.create(path)
    assert OrganiserKey.load(path).public == key.public
    with pytest.raises(ConfigError, match="never overwritten"):
        OrganiserKey.create(path)
    assert OrganiserKey.load(path).public == key.public
    assert list(tmp_path.iterdir()) == [path]


def pem(private: object, password: bytes | None = None) -> bytes:
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    data: bytes = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)  # type: ignore[attr-defined]
    return data


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"not a key",
        b"\xff\0",
        pem(Ed25519PrivateKey.generate())[:-40],
        pem(Ed25519PrivateKey.generate(), b"secret"),
        pem(generate_private_key(65537, 1024)),
    ],
    ids=["missing", "empty", "text", "bytes", "cut", "password", "RSA"],
)
def test_what_is_not_the_organisers_key_is_refused_in_words(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "organiser.key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        OrganiserKey.load(path)
    assert caught.value.code is Code.NO_ORGANISER_KEY
    assert str(path) in caught.value.message


def test_a_folder_instead_of_a_key_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(CollabError, match="COLLAB-106"):
        OrganiserKey.load(tmp_path)


def test_settings_of_an_opened_manifest_are_the_signed_ones() -> None:
    assert SIGNED.open(SIGNED.run_hash, MARK).settings == RunSettings(name="my-run")
