"""Runs the collectives of one group on tensors that lie in shared memory and compares the results with numpy.

The checks are those of `collective_checks`, for the operations that use shared memory: what differs is where the
tensors lie (`placements`), and with them the memory that is watched, which the other ranks can write to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axonmpi import ProcessGroup, ReduceOp
from helpers.collective_checks import CollectiveChecks, Watched
from helpers.numpy_reference import Shape
from helpers.placements import Places


class SymmetricChecks(CollectiveChecks):
    """Runs collectives of a group and compares; the values are the same in all cases of one dtype and shape.

    Args:
        group: The calls are collective over it.
        places: Where the tensors lie.
        asynchronous: Start operations and wait for them later.
    """

    most_under_way = 2  # and one more, in one of four places

    def __init__(self, group: ProcessGroup, places: Places, *, asynchronous: bool = False) -> None:
        super().__init__(group, asynchronous=asynchronous, label=places.kind)
        self._places = places

    def every_symmetric_operation(
        self, dtype: torch.dtype, shape: Shape, op: ReduceOp = ReduceOp.SUM, which: int = 0
    ) -> None:
        """Run each operation once; `which` chooses the root and the dimension."""
        root, dim = which % self.group.size, which % max(1, len(shape))
        self.all_reduce(dtype, shape, op)
        self.reduce(dtype, shape, op, root)
        self.broadcast(dtype, shape, root)
        self.all_gather(dtype, shape, dim)
        if shape:
            self.reduce_scatter(dtype, shape, op, dim)

    def _lay(self, source: Tensor, layout: str) -> Watched:
        return self._places.put(source)

    def _case(self, operation: str, *options: object) -> str:
        return f"{operation}{options} {self._label}"
