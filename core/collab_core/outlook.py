"""What the others have, seen from here: who holds which state, whom to meet, whom to wait for, who leads."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping

from collab_core.averaging.group import MAX_MEMBERS
from collab_core.averaging.quarantine import Quarantine
from collab_core.run.manifest import Manifest
from collab_core.state.claims import claim, is_trusted
from collab_core.state.history import Tip, goes_on_from, winner
from collab_core.swarm import Peer, Swarm

LATECOMER_S = 10.0
SET_ASIDE_S = 10.0  # how long a history nobody could hand over is left alone
SET_ASIDE_PEER_S = 0.5  # and whoever told us of it: it may already hold the next one


class Outlook:
    """Everybody's records, put to use. It reads the swarm and changes nothing."""

    def __init__(self, swarm: Swarm, manifest: Manifest) -> None:
        self._swarm, self._manifest = swarm, manifest
        self._set_aside: dict[str, float] = {}
        self.quarantine = Quarantine(
            swarm,
            manifest.settings.limits.quarantine_epochs,
            lambda peer: is_trusted(peer.peer_id, peer.record, manifest),
        )
        self.last_group: frozenset[str] = frozenset()
        """Who was in our last round."""

    def others(self) -> list[Peer]:
        """Everyone else who takes part."""
        return [peer for peer in self._swarm.peers() if peer.record.role != "observer"]

    def winning_tip(self, mine: Tip, history: Mapping[int, str]) -> Tip:
        """The state everyone should have; ours, if nobody's wins over it.

        Args:
            mine: what we hold.
            history: roots of our past.
        """
        now = time.monotonic()
        claims = [claim(peer, self._manifest) for peer in self.others() if peer.record.root is not None]
        tips = [
            tip
            for tip in claims
            if max(self._set_aside.get(tip.root, 0.0), self._set_aside.get(tip.peer_id, 0.0)) < now
            and (tip.epoch > 0 or tip.root == self._manifest.initial_root)
        ]
        max_samples = self._manifest.settings.limits.max_samples_per_peer * MAX_MEMBERS
        best = winner(tips, mine, max_samples)
        if not best.is_trusted:
            return best
        out = self.quarantine.verdicts()  # who lied does not count, neither as ahead nor as behind
        ahead = [tip for tip in (*tips, mine) if tip.epoch > best.epoch and tip.peer_id not in out]
        if 2 * len(ahead) < self._num_trainers(out):
            return best
        # The organiser's auxiliaries are behind at least half of the trainers: a few are not believed.
        if best is mine and ahead:
            # Nobody but those auxiliaries may lead us, except along our own history: it goes on without us while we
            # restart. Whether it really is our history is checked when we have it.
            return min(ahead, key=lambda tip: (-tip.epoch, -tip.samples, tip.root))
        if mine in ahead and best.root != history.get(best.epoch) and goes_on_from(best, history):
            # It will follow us in a moment.
            return winner([tip for tip in tips if not tip.is_trusted], mine, max_samples)
        return best

    def _num_trainers(self, out: Container[str]) -> int:
        records = [self._swarm.record, *(peer.record for peer in self.others() if peer.peer_id not in out)]
        return sum(record.role == "trainer" for record in records)

    def put_aside(self, tip: Tip) -> None:
        """Leave a history that nobody could hand over alone for a while."""
        now = time.monotonic()
        self._set_aside = {who: until for who, until in self._set_aside.items() if until > now}
        self._set_aside |= {tip.root: now + SET_ASIDE_S, tip.peer_id: now + SET_ASIDE_PEER_S}

    def donors(self, tip: Tip) -> list[str]:
        """Peers to fetch a state from: the one that told us of it first, those nobody can dial last.

        A client-mode peer can still give what it has to those it is connected to: to an auxiliary that lost its disk.
        """
        holders = [
            peer
            for peer in self.others()
            if peer.record.root == tip.root and (peer.record.is_reachable or self._swarm.is_connected(peer.peer_id))
        ]
        holders.sort(key=lambda peer: (not peer.record.is_reachable, peer.peer_id != tip.peer_id))
        return [peer.peer_id for peer in holders]

    def newcomers(self) -> list[str]:
        """Peers that may be fetching a state, as we are, and can give what they have of it."""
        return [
            peer.peer_id
            for peer in self.others()
            if peer.record.phase == "joining" and (peer.record.is_reachable or self._swarm.is_connected(peer.peer_id))
        ]

    def companions(self, epoch: int, root: str) -> list[Peer]:
        """Everyone who should meet in this round: same epoch, same root; auxiliaries without state always.

        Those who were in the last round with us are just arriving, even if their records do not say so yet. Nobody
        waits for those who are kept out.
        """

        def is_expected(peer: Peer) -> bool:
            record = peer.record
            if record.root is None:
                return record.role == "aux" and record.phase == "serving"
            is_arriving = peer.peer_id in self.last_group and record.epoch < epoch
            return (record.epoch, record.root) == (epoch, root) or is_arriving

        out = self.quarantine.verdicts()
        return [peer for peer in self.others() if is_expected(peer) and peer.peer_id not in out]

    def latecomers(self, epoch: int, root: str) -> set[str]:
        """Peers that just came, or are catching up: they showed life a moment ago, and not at our epoch."""
        now = time.monotonic()
        late = {
            peer.peer_id
            for peer in self.others()
            if peer.record.epoch <= epoch and peer.record.root not in (root, None) and now - peer.changed < LATECOMER_S
        }
        return late - self.quarantine.verdicts().keys() if late else late

    def seconds_left(self) -> float:
        """About how long the swarm still works until its next round; 0 if that may be now, or nobody can tell."""
        strategy = self._manifest.settings.strategy
        records = [peer.record for peer in self.others()] + [self._swarm.record]
        trainers = [record for record in records if record.role == "trainer"]
        speed = sum(record.samples_per_second for record in trainers)
        if strategy.name == "gossip" or not speed or any(record.phase != "working" for record in trainers):
            return 0.0
        is_shared = strategy.name == "allreduce"
        target = strategy.target_batch_size if is_shared else sum(record.epoch_target for record in trainers)
        return max(0.0, target - sum(record.epoch_samples for record in trainers)) / speed

    def rank(self, peer: Peer) -> int:
        """Who leads first: the organiser's auxiliaries, then others. They do not train, so they answer at once."""
        return 0 if is_trusted(peer.peer_id, peer.record, self._manifest) else 1 if peer.record.role == "aux" else 2

    def own_rank(self) -> int:
        return self.rank(Peer(self._swarm.peer_id, self._swarm.record, 0.0))
