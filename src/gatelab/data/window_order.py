"""In which order windows are read, and from which of several sources: pure functions of a seed and a position."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

MOST_DRAWN = 1 << 24  # windows of an epoch whose order is kept as a table, of eight bytes each
ROUNDS = 6
BLOCK = 4096


def window_order(num_windows: int, seed: int, epoch: int) -> Sequence[int] | np.ndarray:
    """The windows of an epoch in the order in which they are read: a permutation of range(num_windows).

    Up to 16,777,216 windows it is drawn and kept. Above that it is computed where it is asked for and takes no memory:
    see :class:`KeyedPermutation`.
    """
    if num_windows <= MOST_DRAWN:
        return np.random.default_rng([seed, epoch]).permutation(num_windows)
    return KeyedPermutation(num_windows, f"{seed} {epoch}")


class KeyedPermutation(Sequence[int]):
    """A permutation of range(size) of which any entry is computed alone.

    A balanced Feistel network of 6 rounds permutes the numbers of 2 b bits, b as small as will hold ``size``; a number
    outside of range(size) is put through again until it falls inside (cycle walking; less than 4 passes on average).
    """

    def __init__(self, size: int, key: str):
        self._size = size
        self._half = max(1, -(-(size - 1).bit_length() // 2))
        self._keys = [f"{key} {number} ".encode() for number in range(ROUNDS)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - no slices
        if not 0 <= index < self._size:
            raise IndexError(index)
        while (index := self._permuted(index)) >= self._size:
            pass
        return index

    def _permuted(self, number: int) -> int:
        mask = (1 << self._half) - 1
        left, right = number >> self._half, number & mask
        for key in self._keys:
            drawn = hashlib.blake2b(key + right.to_bytes(8, "big"), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(drawn, "big") & mask)
        return left << self._half | right


class Mixture:
    """Which source each position of an endless sequence comes from, and how many of that source came before it.

    Every block of 4,096 positions holds the sources in the same numbers, their shares of it rounded by largest
    remainder, in an order drawn from (seed, block). Raises ``ValueError`` for a weight that is not above 0, or so
    small that a block would have nothing of its source.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float], seed: int):
        assert len(names) == len(weights) > 0
        for name, weight in zip(names, weights, strict=True):
            if not 0 < weight < float("inf"):
                raise ValueError(f"{name} has the weight {weight} in the mixture; a weight is a number above 0")
        self.per_block = _apportioned(weights)
        for name, count in zip(names, self.per_block, strict=True):
            if not count:
                raise ValueError(
                    f"{name} has so small a weight in the mixture that not one of {BLOCK} windows is its own; raise "
                    "it, or leave the source out"
                )
        self._seed = seed
        self._drawn = lru_cache(maxsize=2)(self._draw)

    def at(self, position: int) -> tuple[int, int]:
        """The number of the source at a position, and the number of that source's entries before it."""
        block, place = divmod(position, BLOCK)
        sources, earlier = self._drawn(block)
        source = int(sources[place])
        return source, block * self.per_block[source] + int(earlier[place])

    def counts(self, num_positions: int) -> list[int]:
        """How many of the first positions each source has."""
        blocks, places = divmod(num_positions, BLOCK)
        rest = np.bincount(self._drawn(blocks)[0][:places], minlength=len(self.per_block))
        return [blocks * count + int(more) for count, more in zip(self.per_block, rest, strict=True)]

    def _draw(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """For each place of a block its source, and the number of places before it that have the same."""
        ordered = np.repeat(np.arange(len(self.per_block)), self.per_block)
        # Three numbers, so that no epoch's order, drawn from two, comes from the same stream.
        sources = np.random.default_rng([self._seed, block, BLOCK]).permutation(ordered)
        earlier = np.empty(BLOCK, dtype=np.int64)
        for source, count in enumerate(self.per_block):
            earlier[sources == source] = np.arange(count)
        return sources, earlier


def _apportioned(weights: Sequence[float]) -> list[int]:
    """``BLOCK`` divided by weight into whole numbers: rounded down, then one more each by largest remainder."""
    total = sum(weights)
    exact = [BLOCK * (weight / total) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda number: counts[number] - exact[number])
    for number in by_remainder[: BLOCK - sum(counts)]:
        counts[number] += 1
    return counts
