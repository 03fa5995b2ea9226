"""CRC-32 checksums of the blocks of a file, which several ranks compute together.

    file        | block 0 | block 1 | block 2 |      CRC-32 of each MiB
    ranks        0 0 0 0 0 1 1 1 0 0 2 2 2 2 2

CRC-32 is linear. The checksum of a block is the exclusive or of a term for each range of bytes in it: the
checksum of the range, followed by a zero byte for each byte of the block after it. Each rank computes the terms
of the bytes that it writes.

`isal` computes the checksums, since zlib takes longer than a fast disk. Installations without it use zlib, whose
checksums are the same.

Source: Mark Adler, crc32_combine() of zlib.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

BLOCK_BYTES = 1 << 20
Checksums = npt.NDArray[np.uint32]
"""[blocks] checksums of a file's blocks."""
_ZEROS = memoryview(bytes(BLOCK_BYTES))
_ALL_BITS = 0xFFFFFFFF


def _followed_by_zeros(checksum: int, count: int) -> int:
    """Return the term of bytes with a checksum, if `count` more bytes of the block are behind them."""
    # CRC-32 inverts all bits before and after; the term is without that
    return crc32(_ZEROS[:count], checksum ^ _ALL_BITS) ^ _ALL_BITS


def block_count(size: int) -> int:
    """Return the number of blocks of a file of `size` bytes; the last may be shorter."""
    return -(-size // BLOCK_BYTES)


class BlockSums:
    """This rank's terms of the checksums of a file's blocks.

    Args:
        size: Bytes of the file.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._terms: dict[int, int] = defaultdict(int)

    def add(self, offset: int, data: memoryview) -> None:
        """Add bytes of the file, each byte once; local.

        Args:
            offset: Of the first byte in the file.
            data: The bytes, in format "B".
        """
        while len(data):
            block = offset // BLOCK_BYTES
            block_end = min((block + 1) * BLOCK_BYTES, self._size)
            inside = data[: block_end - offset]
            offset, data = offset + len(inside), data[len(inside) :]
            self._terms[block] ^= _followed_by_zeros(crc32(inside), block_end - offset)

    def terms(self) -> Checksums:
        """Return [2, n] block numbers, and this rank's term of the checksum of each; local."""
        return np.array([list(self._terms), list(self._terms.values())], dtype=np.uint32)


def combined(size: int, terms: Iterable[Checksums]) -> Checksums:
    """Return the checksums of a file's blocks.

    Args:
        size: Bytes of the file.
        terms: `BlockSums.terms()` of each rank.
    """
    checksums = np.zeros(block_count(size), dtype=np.uint32)
    for blocks, values in terms:
        np.bitwise_xor.at(checksums, blocks, values)
    return checksums


def checksums_of(data: bytes) -> Checksums:
    """Return the checksums of the blocks of a file with this content."""
    blocks = (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
    return np.array([crc32(block) for block in blocks], dtype=np.uint32)
