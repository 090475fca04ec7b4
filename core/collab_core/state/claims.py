"""From peer records to histories: what somebody claims to hold, and whether the organiser vouches for it."""

from __future__ import annotations

from collections.abc import Iterable

from collab_core.run.manifest import Manifest, is_granted
from collab_core.state.history import Tip, winner
from collab_core.swarm import Peer, PeerRecord


def is_trusted(peer_id: str, record: PeerRecord, manifest: Manifest) -> bool:
    """Whether the organiser signed this peer as one of their auxiliaries."""
    if record.role != "aux" or not record.grant:
        return False
    return is_granted(bytes.fromhex(manifest.organiser), manifest.run_hash, peer_id, record.grant)


def claim(peer: Peer, manifest: Manifest) -> Tip:
    """The tip a peer says it holds; only for peers that hold state."""
    record = peer.record
    assert record.root is not None
    return Tip(
        epoch=record.epoch,
        root=record.root,
        samples=record.history_samples,
        peer_id=peer.peer_id,
        parent_root=record.parent_root or "",
        is_trusted=is_trusted(peer.peer_id, record, manifest),
    )


def common_tip(peers: Iterable[Peer], manifest: Manifest) -> Tip:
    """What the swarm has, seen by somebody who holds nothing."""
    tips = [claim(peer, manifest) for peer in peers if peer.record.root is not None]
    return winner(tips, Tip.none(""), 2**40)
