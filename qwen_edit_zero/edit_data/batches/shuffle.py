"""Shuffles that are computed, not stored: where one position goes costs the same whatever the length of the list.

A list of `size` is laid out as a grid of about sqrt(size) rows and columns. Each of sixteen rounds moves the columns of
every row by a hash of the row, or the rows of every column by a hash of the column: a Feistel network on a grid of any
shape (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). The few cells of the grid beyond `size` are
walked through until a real one is reached. Nothing here is a library's generator, whose stream may change between
versions: a run goes on in the same order after an upgrade.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
_ROUNDS = 16  # fewer would favour some orders of lists of five or six
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64's sequence
_ROUND_KEYS = [np.uint64((i + 1) * int(_GOLDEN) % 2**64) for i in range(_ROUNDS)]


def key(*words: int | Longs) -> Keys:
    """A 64-bit hash of whole numbers in order; where one of them is an array, one hash for each of its elements."""
    state = np.zeros(1, np.uint64)
    for word in words:
        number = np.asarray(word & (2**64 - 1) if isinstance(word, int) else word).astype(np.uint64)
        state = _mix((state ^ number) + _GOLDEN)
    return state


def shuffled(positions: Longs, size: int | Longs, keys: Keys) -> Longs:
    """What comes at `positions` of the numbers 0 to `size` - 1 after a shuffle of its own for each key.

    `size` and `keys` are one for all positions, or one a position.
    """
    return _walk(positions, size, keys, range(_ROUNDS))


def positions_of(values: Longs, size: int | Longs, keys: Keys) -> Longs:
    """The inverse of `shuffled`: where each value comes."""
    return _walk(values, size, keys, range(_ROUNDS - 1, -1, -1))


def _walk(start: Longs, size: int | Longs, keys: Keys, rounds: range) -> Longs:
    sizes = np.broadcast_to(np.asarray(size, np.int64), start.shape)
    keys = np.broadcast_to(keys, start.shape)
    # Exact up to 2**52: a square root that is off by one rounding still leaves columns * rows >= size.
    columns = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.int64)
    rows = -(-sizes // columns)
    result = _rounds(start, columns, rows, keys, rounds)
    while (outside := np.flatnonzero(result >= sizes)).size:
        result[outside] = _rounds(result[outside], columns[outside], rows[outside], keys[outside], rounds)
    return result


def _rounds(cells: Longs, columns: Longs, rows: Longs, keys: Keys, rounds: range) -> Longs:
    row, column = np.divmod(cells, columns)
    backwards = rounds.step < 0
    for number in rounds:
        along, length = (row, columns) if number % 2 == 0 else (column, rows)
        hashes = _mix((keys + _ROUND_KEYS[number]) ^ _mix(along.astype(np.uint64) + _GOLDEN))
        move = (hashes % length.astype(np.uint64)).astype(np.int64)
        if number % 2 == 0:
            column = (column + (length - move if backwards else move)) % length
        else:
            row = (row + (length - move if backwards else move)) % length
    return row * columns + column


def _mix(x: Keys) -> Keys:
    """SplitMix64's finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
