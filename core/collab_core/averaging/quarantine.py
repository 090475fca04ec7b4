"""Quarantine: who lied is kept out of rounds for some epochs. Everyone says whom it caught, in its signed record."""

from __future__ import annotations

import threading
from collections.abc import Callable

from collab_core.averaging.verdicts import Voice, verdicts, voices_of
from collab_core.swarm import Peer
from collab_core.swarm.directory import Directory
from collab_core.swarm.record import MAX_REASON_CHARS, MAX_SENTENCES, Sentence

MAX_DOUBLINGS = 6
MAX_REMEMBERED = 256
MAX_TOLD_PER_EPOCH = 64  # of what others say: whoever makes up sentences does not fill our log


class Quarantine:
    """Whom we caught, and whom else we believe to have lied. Safe from any thread.

    Args:
        num_epochs: how long the first time; doubled with every time after that. 0 keeps nobody out.
        is_trusted: whether the organiser vouches for a peer.
    """

    def __init__(
        self, swarm: Directory, num_epochs: int, is_trusted: Callable[[Peer], bool] = lambda peer: False
    ) -> None:
        self._swarm, self._num_epochs, self._is_trusted = swarm, num_epochs, is_trusted
        self._epoch = 0
        self._caught: dict[str, Sentence] = {}
        self._times: dict[str, tuple[int, int]] = {}
        """How often we caught somebody, and in which epoch the last time; the latest last."""
        self._told: set[tuple[str, str, int]] = set()
        self._num_told = 0
        self._lock = threading.Lock()

    def set_epoch(self, epoch: int) -> None:
        """We are now at this epoch: some sentences may be over."""
        with self._lock:
            self._epoch, self._num_told = epoch, 0
            over = [peer_id for peer_id, sentence in self._caught.items() if sentence.until_epoch <= epoch]
            for peer_id in over:
                del self._caught[peer_id]
            self._told = {told for told in self._told if told[2] > epoch}
        if over:
            self._publish()

    def caught(self, peer_id: str, reason: str) -> None:
        """We saw it lie: keep it out, and say so. Once per epoch, as a lie is often told to us several times."""
        with self._lock:
            times, last = self._times.pop(peer_id, (0, -1))
            self._times[peer_id] = (times, last)
            if not self._num_epochs or last == self._epoch:
                return
            self._times[peer_id] = (times + 1, self._epoch)
            while len(self._times) > MAX_REMEMBERED:
                del self._times[next(iter(self._times))]
            until = self._epoch + self._num_epochs * 2 ** min(times, MAX_DOUBLINGS)
            sentence = Sentence(peer_id=peer_id, until_epoch=until, reason=_printable(reason))
            self._caught.pop(peer_id, None)
            self._caught[peer_id] = sentence
        self._publish()
        self._tell(sentence, self._swarm.peer_id, is_believed=True)

    def _publish(self) -> None:
        with self._lock:
            sentences = list(self._caught.values())[-MAX_SENTENCES:]
        self._swarm.publish(sentences=[sentence.model_dump() for sentence in sentences])

    def verdicts(self) -> dict[str, Sentence]:
        """Everyone who is kept out, ourselves included if the others do so; tells of whatever is new."""
        voices = voices_of(self._swarm.peers(), self._is_trusted)
        if not self._caught and not any(voice.sentences for voice in voices):
            self._swarm.ignored = frozenset()
            return {}
        with self._lock:
            caught = tuple(self._caught.values())
        is_trainer = self._swarm.record.role == "trainer"
        me = Voice(peer_id=self._swarm.peer_id, is_trainer=is_trainer, sentences=caught)
        out = verdicts(voices, self._epoch, me)
        self._swarm.ignored = frozenset(out)
        for voice in voices:
            for sentence in voice.sentences:
                self._hear(voice.peer_id, sentence, is_believed=sentence.peer_id in out)
        return out

    def sentence_of(self, peer_id: str) -> Sentence | None:
        """Why somebody is kept out; None if it is not."""
        return self.verdicts().get(peer_id)

    def _hear(self, by: str, sentence: Sentence, *, is_believed: bool) -> None:
        if sentence.peer_id == self._swarm.peer_id and is_believed:
            self.told_us(sentence, by)
        elif sentence.until_epoch > self._epoch and self._is_new(by, sentence):
            self._tell(sentence, by, is_believed=is_believed)

    def told_us(self, sentence: Sentence, by: str) -> None:
        """Somebody keeps us out: say so in words, once."""
        if self._is_new(self._swarm.peer_id, sentence.model_copy(update={"peer_id": self._swarm.peer_id})):
            self._swarm.events.write(
                "kept_out",
                epoch=self._epoch,
                until_epoch=sentence.until_epoch,
                reason=sentence.reason,
                said_by=self._swarm.name_of(by),
            )

    def _is_new(self, by: str, sentence: Sentence) -> bool:
        told = (by, sentence.peer_id, sentence.until_epoch)
        with self._lock:
            if told in self._told or self._num_told >= MAX_TOLD_PER_EPOCH:
                return False
            self._told.add(told)
            self._num_told += 1
            return True

    def _tell(self, sentence: Sentence, by: str, *, is_believed: bool) -> None:
        self._swarm.events.write(
            "quarantined",
            peer_id=sentence.peer_id,
            name=self._swarm.name_of(sentence.peer_id),
            until_epoch=sentence.until_epoch,
            reason=sentence.reason,
            said_by=self._swarm.name_of(by),
            is_believed=is_believed,
        )


def _printable(reason: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in reason)[:MAX_REASON_CHARS]
