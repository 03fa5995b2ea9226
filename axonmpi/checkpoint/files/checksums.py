"""Checksums of a file's blocks, which several ranks compute together.

    file        | block 0 | block 1 | block 2 |      CRC-32 of each MiB
    ranks        0 0 0 0 0 1 1 1 0 0 2 2 2 2 2

CRC-32 is linear: the checksum of a block is the exclusive or of those of its pieces, each followed by as many zero
bytes as there are after it. So each rank computes the checksums of what it writes.

Source: Mark Adler, crc32_combine() of zlib. The sums are those of `isal`: zlib takes longer than a quick disk.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

BLOCK_BYTES = 1 << 20
crc32 = isal_zlib.crc32
_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000  # x^0; bits are reflected


def _product(a: int, b: int) -> int:
    """Multiply two polynomials modulo that of CRC-32."""
    result = 0
    while a:
        if a & _ONE:
            result ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


def _powers() -> list[int]:
    """Return x^8, x^16, x^32, ...: what 1, 2, 4, ... zero bytes multiply a checksum by."""
    power = _ONE >> 8
    powers = [power]
    for _ in range(BLOCK_BYTES.bit_length()):
        power = _product(power, power)
        powers.append(power)
    return powers


_POWERS = _powers()


def shifted(checksum: int, count: int) -> int:
    """Return the share of bytes in the checksum of them and of `count` bytes after them."""
    return _product(checksum, _power(count))


@functools.lru_cache(1 << 16)
def _power(count: int) -> int:
    """Return what `count` zero bytes multiply a checksum by."""
    result = _ONE
    for power in _POWERS:
        if count & 1:
            result = _product(result, power)
        count >>= 1
    return result


def block_count(size: int) -> int:
    """Return the number of blocks of a file of `size` bytes; the last may be shorter."""
    return -(-size // BLOCK_BYTES)


class BlockSums:
    """This rank's share of the checksums of a file's blocks.

    Args:
        size: Bytes of the file.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._shares: dict[int, int] = {}
        self._begun = self._end = 0  # bytes of a block that follow each other, whose checksum goes on
        self._checksum = 0

    def add(self, offset: int, data: memoryview) -> None:
        """Take note of bytes of the file, each once; local.

        Args:
            offset: Where they are in the file.
            data: The bytes, a view of them in format "B".
        """
        at = 0
        while at < len(data):
            if offset + at != self._end or self._end % BLOCK_BYTES == 0:
                self._close()
                self._begun = self._end = offset + at
            taken = min(len(data) - at, BLOCK_BYTES - self._end % BLOCK_BYTES)
            self._checksum = crc32(data[at : at + taken], self._checksum)
            self._end += taken
            at += taken

    def _close(self) -> None:
        if self._end > self._begun:
            block = self._begun // BLOCK_BYTES
            after = min((block + 1) * BLOCK_BYTES, self._size) - self._end
            self._shares[block] = self._shares.get(block, 0) ^ shifted(self._checksum, after)
        self._checksum = 0
        self._begun = self._end

    def shares(self) -> npt.NDArray[np.uint32]:
        """Return [2, n] numbers of blocks, and this rank's share of the checksum of each; local."""
        self._close()
        return np.array([list(self._shares), list(self._shares.values())], dtype=np.uint32)


def combined(size: int, shares: list[npt.NDArray[np.uint32]]) -> npt.NDArray[np.uint32]:
    """Return the checksums of a file's blocks, [blocks].

    Args:
        size: Bytes of the file.
        shares: What `BlockSums.shares` returned on each rank.
    """
    checksums = np.zeros(block_count(size), dtype=np.uint32)
    for blocks, values in shares:
        np.bitwise_xor.at(checksums, blocks, values)
    return checksums
