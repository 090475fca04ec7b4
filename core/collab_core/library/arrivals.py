"""What peers are giving our archive, in memory until a version is complete: so much of it, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from collab_core.archive.encoding import Kind
from collab_core.archive.packs import NewItem

MAX_ARRIVING_BYTES = 2**31  # of all peers together
ITEM_BYTES = 1000  # about what remembering a tensor takes, however small it is
PATIENCE_S = 300.0


@dataclass(slots=True)
class Arriving:
    """An encoded tensor, piece by piece."""

    kind: Kind
    base: bytes | None
    data: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class Delivery:
    """All that one peer has sent since its last version."""

    last_s: float
    items: dict[bytes, Arriving] = field(default_factory=dict)

    def num_bytes(self) -> int:
        return sum(ITEM_BYTES + len(item.data) for item in self.items.values())


class Arrivals:
    """Collects pieces by peer and tensor. To be used by one thread.

    Args:
        max_bytes: of all peers together.
        patience_s: a peer that sends nothing for so long has left, and what it sent is forgotten.
        clock: seconds.
    """

    def __init__(
        self,
        max_bytes: int = MAX_ARRIVING_BYTES,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes, self._patience_s, self._clock = max_bytes, patience_s, clock
        self._deliveries: dict[str, Delivery] = {}
        self.num_bytes = 0

    def put(self, peer_id: str, tensor: bytes, kind: Kind, base: bytes | None, start: int, piece: bytes) -> int:
        """Keep a piece; how much of the tensor there is now, and 0 if it has to be sent anew."""
        self.forget_old()
        delivery = self._deliveries.setdefault(peer_id, Delivery(self._clock()))
        delivery.last_s = self._clock()
        if start == 0:  # it begins, perhaps again
            self._drop(delivery, tensor)
            delivery.items[tensor] = Arriving(kind, base)
            self.num_bytes += ITEM_BYTES
        held = delivery.items.get(tensor)
        if held is None or start != len(held.data) or self.num_bytes + len(piece) > self._max_bytes:
            self._drop(delivery, tensor)
            return 0
        held.data += piece
        self.num_bytes += len(piece)
        return len(held.data)

    def _drop(self, delivery: Delivery, tensor: bytes) -> None:
        item = delivery.items.pop(tensor, None)
        if item is not None:
            self.num_bytes -= ITEM_BYTES + len(item.data)

    def collect(self, peer_id: str) -> list[NewItem]:
        """Everything that a peer has sent; it is not ours to remember any more."""
        delivery = self._deliveries.pop(peer_id, None)
        if delivery is None:
            return []
        self.num_bytes -= delivery.num_bytes()
        return [NewItem(tensor, item.kind, item.base, [bytes(item.data)]) for tensor, item in delivery.items.items()]

    def forget_old(self) -> bool:
        """Let go of what those who left have sent; whether something is still waiting."""
        oldest_s = self._clock() - self._patience_s
        for peer_id in [peer_id for peer_id, one in self._deliveries.items() if one.last_s < oldest_s]:
            self.num_bytes -= self._deliveries.pop(peer_id).num_bytes()
        return bool(self._deliveries)
