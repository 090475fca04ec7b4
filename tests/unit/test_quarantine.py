"""Quarantine: who lied is kept out for a while; nobody gets an honest peer banned alone; there is a way back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from town import Town, record

from collab_core.averaging.quarantine import MAX_DOUBLINGS, MAX_TOLD_PER_EPOCH, Quarantine
from collab_core.averaging.verdicts import Voice, verdicts, voices_of
from collab_core.swarm import Peer
from collab_core.swarm.record import MAX_RECORD_BYTES, MAX_SENTENCES, Sentence, seal


def sentence(peer_id: str, until_epoch: int = 10, reason: str = "lied") -> Sentence:
    return Sentence(peer_id=peer_id, until_epoch=until_epoch, reason=reason)


def voice(peer_id: str, *accused: str | Sentence, **changes: Any) -> Voice:
    sentences = tuple(one if isinstance(one, Sentence) else sentence(one) for one in accused)
    return Voice(peer_id=peer_id, sentences=sentences, **changes)


def kept_out(*others: Voice, me: Voice | None = None, epoch: int = 0) -> set[str]:
    return set(verdicts(others, epoch, me or voice("me")))


def test_what_we_saw_ourselves_holds_until_its_epoch() -> None:
    me = voice("me", "liar")
    assert kept_out(voice("liar"), voice("b"), me=me, epoch=9) == {"liar"}
    assert kept_out(voice("liar"), voice("b"), me=me, epoch=10) == set()


def test_nobody_is_believed_alone_but_an_auxiliary_of_the_organiser() -> None:
    assert kept_out(voice("honest"), voice("slanderer", "honest")) == set()
    assert kept_out(voice("honest"), voice("slanderer", "honest", is_trainer=False)) == set()
    assert kept_out(voice("liar"), voice("aux", "liar", is_trusted=True, is_trainer=False)) == {"liar"}


@pytest.mark.parametrize("num_others", range(1, 9))
def test_it_takes_more_than_half_of_all_but_the_accused(num_others: int) -> None:
    for num_accusers in range(num_others + 1):
        others = [voice(f"p{n}", *(["accused"] if n < num_accusers else [])) for n in range(num_others)]
        is_out = 2 * num_accusers > num_others + 1  # we are one of them, and saw nothing
        assert kept_out(voice("accused"), *others) == ({"accused"} if is_out else set())


def test_who_accuses_twice_has_one_voice_and_who_accuses_itself_has_none() -> None:
    twice = voice("slanderer", sentence("honest", 10), sentence("honest", 11))
    assert kept_out(voice("honest"), twice, voice("b")) == set()
    assert kept_out(voice("fool", "fool"), me=voice("me")) == set()


def test_whom_we_caught_has_no_voice() -> None:
    me = voice("me", "liar", "liars-friend")
    others = [voice("honest"), voice("liar", "honest"), voice("liars-friend", "honest")]
    assert kept_out(*others, me=me) == {"liar", "liars-friend"}


def test_a_verdict_ends_when_no_majority_is_left() -> None:
    others = [voice("a", sentence("liar", 5)), voice("b", sentence("liar", 8)), voice("c", sentence("liar", 99))]
    everyone = (voice("liar"), *others)
    assert verdicts(everyone, 0, voice("me"))["liar"].until_epoch == 5
    assert kept_out(*everyone, epoch=4) == {"liar"}
    assert kept_out(*everyone, epoch=5) == set()


def test_the_accused_believes_it_too_but_nobody_makes_it_stop_alone() -> None:
    assert kept_out(voice("other", "me")) == set()
    assert kept_out(voice("other", "me"), voice("third")) == set()
    assert kept_out(voice("other", "me"), voice("third", "me")) == {"me"}


def test_if_no_trainer_would_be_left_nobody_is_kept_out() -> None:
    aux = voice("aux", "a", "b", is_trainer=False)
    assert kept_out(voice("a"), voice("b"), me=aux) == set()
    assert kept_out(voice("a"), voice("b"), voice("c"), me=aux) == {"a", "b"}


def test_somebody_who_only_looks_has_no_voice() -> None:
    assert set(verdicts([voice("liar"), voice("a", "liar"), voice("b")], 0)) == set()
    assert set(verdicts([voice("liar"), voice("a", "liar"), voice("b", "liar")], 0)) == {"liar"}


# --- what a peer keeps ---


class Court(Town):
    """A town that keeps some out."""

    def __init__(self, folder: Path, num_epochs: int = 10) -> None:
        super().__init__(folder)
        self.quarantine = Quarantine(self.directory, num_epochs, lambda peer: peer.record.name == "aux")

    def says(self, name: str, *accused: str, until_epoch: int = 10, role: str = "trainer") -> None:
        self.hears(name, role=role, sentences=[sentence(self.id_of(other), until_epoch) for other in accused])

    def kept_out(self) -> set[str]:
        return self.names_of(self.quarantine.verdicts())


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Court]:
    made = Court(tmp_path)
    yield made
    made.close()


def test_who_is_caught_is_kept_out_published_and_comes_back(town: Court) -> None:
    for name in ("liar", "b"):
        town.says(name)
    town.quarantine.set_epoch(5)
    town.quarantine.caught(town.id_of("liar"), "part 0 has values\x07 that are not finite")
    assert town.kept_out() == {"liar"}
    assert town.directory.ignored == {town.id_of("liar")}
    (published,) = town.directory.record.sentences
    assert (published.peer_id, published.until_epoch) == (town.id_of("liar"), 15)
    assert published.reason == "part 0 has values? that are not finite"
    (told,) = town.told("quarantined")
    assert (told["name"], told["said_by"], told["is_believed"]) == ("liar", "me", True)
    town.quarantine.set_epoch(14)
    assert town.kept_out() == {"liar"}
    town.quarantine.set_epoch(15)
    assert town.kept_out() == set()
    assert town.directory.record.sentences == []
    assert town.directory.ignored == frozenset()


def test_every_further_lie_costs_twice_as_much_up_to_a_limit(town: Court) -> None:
    for name in ("liar", "b"):
        town.says(name)
    epoch, lengths = 0, []
    for _ in range(MAX_DOUBLINGS + 3):
        town.quarantine.set_epoch(epoch)
        town.quarantine.caught(town.id_of("liar"), "lied")
        town.quarantine.caught(town.id_of("liar"), "lied to us again in the same round")
        (kept,) = town.quarantine.verdicts().values()
        lengths.append(kept.until_epoch - epoch)
        epoch = kept.until_epoch + 1
    assert lengths[:3] == [10, 20, 40]
    assert lengths[-3:] == [10 * 2**MAX_DOUBLINGS] * 3


def test_a_run_may_do_without(tmp_path: Path) -> None:
    town = Court(tmp_path, num_epochs=0)
    for name in ("liar", "b"):
        town.says(name)
    town.quarantine.caught(town.id_of("liar"), "lied")
    assert town.kept_out() == set()
    town.directory.reactor.close()


def test_a_record_full_of_sentences_still_fits(town: Court) -> None:
    names = [f"p{number}" for number in range(12)]
    for name in (*names, "b"):
        town.says(name)
    for name in names:
        town.quarantine.caught(town.id_of(name), "x" * 1000)
    published = town.directory.record
    assert [one.peer_id for one in published.sentences] == [town.id_of(name) for name in names[-MAX_SENTENCES:]]
    assert len(seal(published, b"", town.identity("me"), 1.0)) < MAX_RECORD_BYTES / 2
    assert town.kept_out() == set(names)


def test_what_others_say_is_told_once_with_who_says_so_and_acted_on_if_believed(town: Court) -> None:
    town.says("liar")
    town.says("b", "liar")
    town.says("c")
    for _ in range(3):
        assert town.kept_out() == set()
    (told,) = town.told("quarantined")
    assert (told["name"], told["said_by"], told["is_believed"]) == ("liar", "b", False)
    town.says("aux", "liar", role="aux")
    assert town.kept_out() == {"liar"}
    told = town.told("quarantined")[1]
    assert (told["said_by"], told["is_believed"]) == ("aux", True)


def test_a_slanderer_does_not_fill_the_log(town: Court) -> None:
    for until_epoch in range(10, 2 * MAX_TOLD_PER_EPOCH):
        town.says("b", "c", until_epoch=until_epoch)
        assert town.kept_out() == set()
    assert len(town.told("quarantined")) == MAX_TOLD_PER_EPOCH


def test_who_is_kept_out_says_so_in_words_once(town: Court) -> None:
    town.says("aux", "me", role="aux")
    town.says("b")
    town.quarantine.set_epoch(2)
    for _ in range(3):
        assert town.kept_out() == {"me"}
    town.quarantine.told_us(sentence(town.id_of("me"), 10), town.id_of("aux"))
    (told,) = town.told("kept_out")
    assert (told["epoch"], told["until_epoch"], told["reason"], told["said_by"]) == (2, 10, "lied", "aux")
    town.quarantine.set_epoch(10)
    assert town.kept_out() == set()


def test_who_is_kept_out_is_no_company(town: Court) -> None:
    town.says("liar")
    assert town.directory.last_sign_of_trainers == pytest.approx(time.monotonic(), abs=1)
    town.quarantine.caught(town.id_of("liar"), "lied")
    assert town.kept_out() == {"liar"}
    before = town.directory.last_sign_of_trainers
    town.says("liar")
    assert town.directory.last_sign_of_trainers == before
    town.says("honest")
    assert town.directory.last_sign_of_trainers > before


def test_hung_trainers_and_observers_are_no_voices() -> None:
    hung = Peer("hung", record("hung"), time.time() + 10, changed=time.monotonic() - 10_000)
    looking = Peer("looking", record("looking", role="observer"), time.time() + 10)
    (only,) = voices_of([hung, looking], lambda peer: True)
    assert (only.peer_id, only.is_trainer, only.is_trusted) == ("hung", False, False)


@pytest.mark.parametrize("junk", [b"", b"\xc1", b"x" * 10_000, b"\x93abc"])
def test_a_sentence_that_is_none_is_not_read(junk: bytes) -> None:
    assert Sentence.from_bytes(junk) is None
    assert Sentence.from_bytes(sentence("a").to_bytes()) == sentence("a")
