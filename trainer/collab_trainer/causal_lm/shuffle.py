"""A shuffle of any size that needs no memory and never changes between versions of numpy."""

from __future__ import annotations

from blake3 import blake3

NUM_ROUNDS = 6
MASK = 2**64 - 1


class Shuffle:
    """A permutation of `range(size)`: a Feistel network, walked until it lands inside.

    Args:
        size: how many there are.
        key: other keys give other orders.
    """

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        digest = blake3(key.encode()).digest(8 * NUM_ROUNDS)
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(NUM_ROUNDS)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        """What stands at this place of the shuffled order."""
        if not 0 <= index < self._size:
            raise IndexError(index)
        while True:  # at most four times as many places as numbers, so this ends soon
            index = self._encrypt(index)
            if index < self._size:
                return index

    def _encrypt(self, value: int) -> int:
        mask = (1 << self._half) - 1
        left, right = value >> self._half, value & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << self._half | right


def _mix(value: int) -> int:
    """The finaliser of splitmix64."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31
