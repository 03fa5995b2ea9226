"""How the ranks of one MPI group reach each other.

    NodeConnection     memory that all of them share, on one node
    PlainConnection    MPI, every rank alone on its node
    NetworkConnection  memory shared on each node, and MPI between nodes

`connect` chooses one when a group is made. A `Connection` begins every collective with an agreement on the call,
moves data, and says what memory the ranks of a node have in common: none, unless a subclass knows better.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..utils.memory import flat_zeros
from ..utils.partition import split_range
from .buffers import empty
from .call import Call
from .concat_view import FlatParts
from .handshake import Words

__all__ = ["Connection", "Limits", "target_of"]


class Limits(Protocol):
    """Sizes that may be changed at any time, on all ranks alike.

    Attributes:
        piece_bytes: How much of a large tensor is reduced at a time.
        max_message_bytes: The most that goes into one MPI call.
    """

    piece_bytes: int
    max_message_bytes: int


class Connection(ABC):
    """Moves the data of one group's collectives; arguments are checked, and every method agrees on the call first.

    Args:
        rank: This rank's number in the group.
        size: How many ranks there are.

    Attributes:
        path: `"node"`, `"nodes"` or `"plain"`.
        rank: The same.
        size: The same.
        obstacle: Why memory cannot be shared, the same on all ranks; empty where it is, or need not be.
        fence: A full memory barrier for memory in common, None where the processor needs none.
    """

    path: ClassVar[str]

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.obstacle = ""
        self.fence: Callable[[], None] | None = None

    @abstractmethod
    def agree(self, call: Call) -> None:
        """Return once all ranks have made this call; collective.

        Raises:
            CollectiveMismatchError: The ranks made different calls.
        """

    @abstractmethod
    def sizes(self, call: Call, own: int) -> list[int]:
        """Agree on a call and return a number of each rank; collective."""

    @abstractmethod
    def words_of_root(self, call: Call, words: Words | None) -> Words:
        """Agree on a call and return 14 integers that its root has; collective."""

    @abstractmethod
    def reduce(self, call: Call, tensor: Tensor) -> None:
        """Reduce onto the call's root, or onto all ranks if it has none, in place there; collective.

        Args:
            call: The call.
            tensor: Contiguous; of the call's shape.
        """

    def reduce_scatter(self, call: Call, tensor: Tensor, dim: int) -> Tensor:
        """Reduce a tensor of any strides and return the own slice along `dim`; collective."""
        shape = list(tensor.shape)
        start, stop = split_range(shape[dim], self.size, self.rank)
        shape[dim] = stop - start
        result = empty(shape, tensor.dtype)
        slices = tensor.tensor_split(self.size, dim)
        sizes = [part.numel() for part in slices]
        self.reduce_scatter_into(call, FlatParts(slices, tensor.dtype), result.view(-1), sizes)
        return result

    @abstractmethod
    def reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None:
        """Reduce the parts and put this rank's share of the result into `output`; collective."""

    @abstractmethod
    def broadcast(self, call: Call, flat: Tensor) -> None:
        """Copy the root's flat contiguous data to all ranks; collective."""

    @abstractmethod
    def all_gather(self, call: Call, own: Tensor, output: Tensor | None = None) -> Tensor:
        """Return the blocks of all ranks, one after the other along dim 0; collective.

        Args:
            call: The call.
            own: This rank's block, contiguous; the ranks may differ in dim 0 only.
            output: What is filled and returned, contiguous; None: a new tensor.

        Raises:
            ValueError: `output` has another size.
        """

    def symmetric_empty(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 that other ranks can reach where that is possible; collective, agreed already."""
        return flat_zeros(nbytes, torch.uint8)

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Ranks of the group that have memory in common with this one, in order, this one among them."""
        return (self.rank,)

    def node_empty(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 that those ranks have in common; collective, agreed already.

        Raises:
            MemoryError: There is not enough, on any rank.
        """
        return flat_zeros(nbytes, torch.uint8)

    def is_common(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies in memory of `node_empty`; local."""
        return True

    @abstractmethod
    def all_gather_into(self, call: Call, tensor: Tensor | None, output: Tensor, sizes: list[int]) -> None:
        """Put the parts of all ranks into the memory of each node; None: the own part is there; collective."""

    def check_node(self, what: str) -> None:  # noqa: B027
        """Raise if the process of another rank of this node has ended; local.

        Raises:
            RankFailedError: It has, and `what` waits in vain.
        """

    def set_timeout(self, timeout: float | None) -> None:  # noqa: B027
        """Change after how many seconds a rank gives up, where the connection keeps the time; local."""

    def mark_failed(self, reason: str) -> None:  # noqa: B027
        """Tell ranks that wait for this one that it does not come any more, where they can be reached; local."""

    @abstractmethod
    def free(self) -> None:
        """Release what the ranks share; collective."""


def target_of(output: Tensor | None, rows: int, own: Tensor) -> Tensor:
    """Return where blocks with so many rows in all are gathered: `output`, or a new tensor; local.

    Raises:
        ValueError: `output` has another number of rows.
    """
    if output is None:
        return empty((rows, *own.shape[1:]), own.dtype)
    if output.shape[0] != rows:
        raise ValueError(f"output: expected {rows} rows, as the ranks have in all, got {output.shape[0]}")
    return output
