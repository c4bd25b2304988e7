"""The CRC-32 of two stretches of bytes from the CRC-32 of each, as zlib's crc32_combine does it. Imports no torch.

A CRC is linear over GF(2): appending n zero bytes multiplies it by a 32 x 32 matrix of bits
(https://github.com/madler/zlib/blob/master/crc32.c, "crc32_combine").
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # of zlib and zip, lowest bit first
Matrix = tuple[int, ...]  # column n is the image of bit n


def _times(matrix: Matrix, vector: int) -> int:
    result = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            result ^= column
        vector >>= 1
    return result


@lru_cache(maxsize=64)
def _zeros(power: int) -> Matrix:
    """The matrix of appending 2**power zero bytes."""
    if power == 0:
        bit: Matrix = (_POLYNOMIAL, *(1 << n for n in range(31)))
        for _ in range(3):  # 8 bits
            bit = tuple(_times(bit, column) for column in bit)
        return bit
    half = _zeros(power - 1)
    return tuple(_times(half, column) for column in half)


@lru_cache(maxsize=256)
def _appending(length: int) -> Matrix:
    """The matrix of appending `length` zero bytes."""
    result: Matrix = tuple(1 << n for n in range(32))
    for power in range(length.bit_length()):
        if length >> power & 1:
            step = _zeros(power)
            result = tuple(_times(step, column) for column in result)
    return result


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two stretches one after the other, of which the second has `length` bytes."""
    return _times(_appending(length), first) ^ second
