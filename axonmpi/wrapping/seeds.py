"""Random numbers in blocks: one number from a generator, and a seed for each block.

Ranks that draw the same number draw the same values for a block, whichever rank has it.
"""

from __future__ import annotations

import hashlib

import torch


def draw_number(generator: torch.Generator | None) -> int:
    """Draw a number of 63 bits; of torch's default CPU generator for None."""
    device = torch.device("cpu") if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))


def block_seed(number: int, block: int) -> int:
    """Return the seed of a block; seeds of close numbers and blocks differ also in their low 32 bits."""
    return int.from_bytes(hashlib.sha256(f"{number}/{block}".encode()).digest()[:8], "little") >> 1
