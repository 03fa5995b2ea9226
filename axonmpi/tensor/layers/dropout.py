"""Dropout of sharded tensors, with masks that do not depend on the number of ranks.

On replicated tensors `torch.nn.Dropout` draws the same mask on each rank, as long as torch's default generators
agree. Shards of one tensor need different masks. `ShardedDropout` draws both, for any number of ranks:

    one number from the default generator          drawn on every rank, the same one
      ├─ number, block 0 -> mask of block 0 ┐ rank 0
      ├─ number, block 1 -> mask of block 1 ┘            blocks along the dimension that is divided; each rank
      ├─ number, block 2 -> mask of block 2 ┐ rank 1     draws only its own
      └─ number, block 3 -> mask of block 3 ┘

So the default generators stay in the same state on all ranks. Restoring the default generator's state (activation
checkpointing, the random numbers of a pipeline's micro-batches) restores the masks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...groups.process_group import ProcessGroup
from ...groups.world import group_of_this_rank
from ...utils.arguments import check_flags, hint, integer, number
from ...wrapping.seeds import block_seed, draw_number

BLOCKS = 192
"""The most blocks of a dimension: a multiple of the usual numbers of ranks."""


class ShardedDropout(nn.Module):
    """Dropout of a tensor that is sharded along one dimension over the ranks of a group; local.

    For the same state of the generator, the full mask is the same for any number of ranks that divides `blocks`.

    Args:
        p: The probability that an element becomes zero, from 0 to 1; the others are divided by 1 - p.
        process_group: The ranks, in the order of their shards; None means all.
        dim: The dimension that is divided; all ranks have the same size along it.
        blocks: The most blocks that the full dimension is cut into, such as the number of heads.
        replicated: Whether each rank has the full tensor instead, and gets the full mask.
        generator: Source of the number, in the same state on all ranks; None means torch's default CPU
            generator. Activation checkpointing restores default generators only. Mock ranks, threads of one
            process, have one default generator: for equal numbers give each of them a generator.

    Raises:
        TypeError: `process_group` is no group.
        ValueError: `p` is not from 0 to 1, or `blocks` is below 1.
    """

    def __init__(
        self,
        p: float = 0.5,
        process_group: ProcessGroup | None = None,
        dim: int = 1,
        blocks: int = BLOCKS,
        *,
        replicated: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= number("p", p) <= 1:
            raise ValueError(f"p: expected the chance of an element to become zero, from 0 to 1, got {p}")
        integer("blocks", blocks, minimum=1)
        self.p = p
        check_flags(replicated=replicated)
        integer("dim", dim)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator: expected a torch.Generator or None, got {generator!r}{hint(generator)}")
        self.process_group = group_of_this_rank(process_group)
        self.dim = dim
        self.blocks = blocks
        self.replicated = replicated
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with elements made zero while training, else `x` itself; local, not in place.

        Args:
            x: Any shape, floating-point: this rank's shard, or the full tensor if `replicated`.

        Raises:
            IndexError: `x` has no dimension `dim`.
        """
        if not self.training or self.p == 0:
            return x
        return x * self._mask(x)

    def _mask(self, x: Tensor) -> Tensor:
        """Draw the factors of the elements of `x`: 0 or 1 / (1 - p)."""
        moved = x.detach().movedim(self.dim, 0)
        rank, size = (0, 1) if self.replicated else (self.process_group.rank, self.process_group.size)
        # The number of blocks divides the full dimension and is a multiple of the ranks: no block is on two ranks.
        count = math.gcd(size * moved.shape[0], math.lcm(self.blocks, size)) // size
        number = draw_number(self.generator)
        mask = torch.empty(moved.shape, dtype=x.dtype, device=x.device)  # contiguous: drawn in order of memory
        generator = torch.Generator("cpu" if x.is_meta else x.device)
        for index, block in enumerate(mask.chunk(count) if mask.numel() else ()):
            block.bernoulli_(1 - self.p, generator=generator.manual_seed(block_seed(number, rank * count + index)))
        return (mask if self.p == 1 else mask.div_(1 - self.p)).movedim(0, self.dim)

    def extra_repr(self) -> str:
        """Describe the layer in `repr()`."""
        return f"p={self.p}, dim={self.dim}, {'replicated' if self.replicated else 'sharded'}"
