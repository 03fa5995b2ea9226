"""Runs the collectives of one group on tensors that lie in shared memory and compares the results with numpy.

The checks are those of `collective_checks`, for the operations that use shared memory: what differs is where the
tensors lie (`placements`), and with them the memory that is watched, which the other ranks can write to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from axonmpi import ProcessGroup, ReduceOp
from helpers.collective_checks import CollectiveChecks, Watched
from helpers.numpy_reference import Shape
from helpers.placements import Places


def pairwise(**values: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Choose settings, as few as are soon found, in which any two values of different settings meet."""
    names = list(values)
    missing = {
        ((one, i), (other, j))
        for one, other in combinations(range(len(names)), 2)
        for i in range(len(values[names[one]]))
        for j in range(len(values[names[other]]))
    }
    while missing:
        chosen = dict(min(missing))
        for name in range(len(names)):
            if name not in chosen:
                new = [
                    sum(tuple(sorted(((name, i), pair))) in missing for pair in chosen.items())
                    for i in range(len(values[names[name]]))
                ]
                chosen[name] = new.index(max(new))
        missing.difference_update(combinations(sorted(chosen.items()), 2))
        yield {names[name]: values[names[name]][i] for name, i in chosen.items()}


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
