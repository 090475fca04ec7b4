"""Whom to keep out of rounds, given what everyone says: nobody is believed alone, but the organiser's auxiliaries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from collab_core.swarm import Peer
from collab_core.swarm.directory import STILL_S
from collab_core.swarm.record import Sentence

MIN_VOICES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Voice:
    """Somebody in the run, and whom it caught in a lie."""

    peer_id: str
    is_trainer: bool = True
    is_trusted: bool = False
    """The organiser vouches for it."""
    sentences: tuple[Sentence, ...] = ()


def voices_of(peers: Iterable[Peer], is_trusted: Callable[[Peer], bool]) -> list[Voice]:
    """Everyone who takes part, as their records tell; a trainer that is hung is no trainer."""
    now = time.monotonic()
    return [
        Voice(
            peer_id=peer.peer_id,
            is_trainer=peer.record.role == "trainer" and now - peer.changed < STILL_S,
            is_trusted=bool(peer.record.sentences) and is_trusted(peer),
            sentences=tuple(peer.record.sentences),
        )
        for peer in peers
        if peer.record.role != "observer"
    ]


def verdicts(voices: Sequence[Voice], epoch: int, me: Voice | None = None) -> dict[str, Sentence]:
    """Whom to keep out of the round of this epoch, and why.

    We believe what we saw, what an auxiliary of the organiser says, and what more than half of all but the accused say,
    at least two. Whom we caught ourselves has no voice. If no trainer would be left, nobody is kept out: there is
    nobody to protect, and without epochs no sentence would ever end.

    Args:
        voices: of the others.
        epoch: where we are.
        me: our own voice; None if we only look.
    """
    caught = {sentence.peer_id: sentence for sentence in (me.sentences if me else ()) if sentence.until_epoch > epoch}
    heard = [voice for voice in voices if voice.peer_id not in caught]
    said: dict[str, list[tuple[Voice, Sentence]]] = {}
    for voice in heard:
        for accused, sentence in {sentence.peer_id: sentence for sentence in voice.sentences}.items():
            if sentence.until_epoch > epoch and accused != voice.peer_id:
                said.setdefault(accused, []).append((voice, sentence))
    everyone = {voice.peer_id for voice in heard} | ({me.peer_id} if me else set())
    found = {accused: _believed(claims, len(everyone - {accused})) for accused, claims in said.items()}
    out = {accused: sentence for accused, sentence in found.items() if sentence is not None} | caught
    trainers = {voice.peer_id for voice in (*voices, *((me,) if me else ())) if voice.is_trainer}
    return {} if trainers <= out.keys() else out


def _believed(claims: Sequence[tuple[Voice, Sentence]], num_voices: int) -> Sentence | None:
    """Of what is said of somebody, the sentence that holds longest; None if it is not believed."""
    latest_first = sorted((sentence for _, sentence in claims), key=lambda sentence: -sentence.until_epoch)
    needed = max(MIN_VOICES, num_voices // 2 + 1)
    believed = [sentence for voice, sentence in claims if voice.is_trusted] + latest_first[needed - 1 : needed]
    return max(believed, key=lambda sentence: sentence.until_epoch, default=None)
