"""Averages of gradients over ranks for training loops that do not use `DistributedDataParallel`.

One large reduction is quicker than many small ones, so gradients are copied end to end into flat buckets:

    add_gradient(2, g2)  ┐                      bucket 0    bucket 1
    add_gradient(0, g0)  ├─ sync_all(group) ─▶ [g0 │ g1]   [g2      ] ─▶ gradients() = [g0, g1, g2]
    add_gradient(1, g1)  ┘                      └─ averaged over the ranks, one reduction each

Ranks may add their gradients in different orders: the buckets are laid out by index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..across_ranks.comparison import same_on_all_ranks
from ..backends import by_kind
from ..errors import CollectiveMismatchError, DtypeError
from ..groups.process_group import ProcessGroup
from ..groups.world import chosen_group
from ..types import GradSyncStrategy, ReduceOp, Work
from ..utils.arguments import integer, member
from ..utils.partition import bucket_by_size


class GradientBucket:
    """Tensors of one dtype and device, copied end to end into one flat tensor.

    Local. The first tensor that is added allocates memory for the full capacity.

    Args:
        capacity: Largest number of elements, at least 1.

    Attributes:
        capacity: Largest number of elements.
        size: Number of elements added.

    Raises:
        ValueError: `capacity` is below 1.
        TypeError: `capacity` is not an integer.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = integer("capacity", capacity, minimum=1)
        self.clear()

    def clear(self) -> None:
        """Drop all tensors, and the dtype and device; extracted tensors stay valid."""
        # The next tensor gets new memory: extracted tensors may still use the old.
        self._storage = torch.empty(0)
        self.size = 0
        self._shapes: list[torch.Size] = []

    @property
    def is_empty(self) -> bool:
        """Whether no tensor was added since construction or `clear()`."""
        return not self._shapes

    @property
    def is_full(self) -> bool:
        """Whether no further element fits."""
        return self.size == self.capacity

    @property
    def data(self) -> Tensor:
        """[size] the elements added so far: a view, so writes to it show in `extract()`."""
        return self._storage[: self.size]

    def add(self, t: Tensor) -> bool:
        """Copy a tensor in behind the others if it fits.

        Args:
            t: Any shape, 0-d and empty too, and any strides; not changed.

        Returns:
            True if the tensor was added; False, with nothing changed, if it has too many elements.

        Raises:
            DtypeError: The dtype differs from that of the tensors in the bucket.
            ValueError: The device differs, or the tensor is sparse.
            TypeError: `t` is not a tensor.
        """
        _check_dense("t", t)
        storage = self._storage
        if not self.is_empty and t.dtype != storage.dtype:
            raise DtypeError(
                f"t: expected {storage.dtype} as the tensors in this bucket, got {t.dtype}; use one "
                "bucket for each dtype"
            )
        if not self.is_empty and t.device != storage.device:
            raise ValueError(
                f"t: expected a tensor on {storage.device} as the tensors in this bucket, got one on "
                f"{t.device}; use one bucket for each device"
            )
        if t.numel() > self.capacity - self.size:
            return False
        if self.is_empty:
            self._storage = torch.empty(self.capacity, dtype=t.dtype, device=t.device)
        self._storage[self.size : self.size + t.numel()].view(t.shape).copy_(t.detach())
        self.size += t.numel()
        self._shapes.append(t.shape)
        return True

    def extract(self) -> list[Tensor]:
        """Return the tensors in the order and shapes in which they were added.

        They are views of `data`, so a reduction of `data` shows in them, and stay valid after `clear()`.
        """
        parts = self.data.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class GradientSynchronizer:
    """Averages gradients over ranks in buckets, independent of the order in which they become ready.

    One round is `add_gradient` for each gradient, `sync_all`, `gradients`, `clear`. Gradients are copied when they
    are added; the caller's tensors are never changed.

    Args:
        strategy: SYNCHRONOUS reduces one bucket after the other; OVERLAPPED reduces each bucket while the next is
            packed, and waits for all at the end; NO_SYNC leaves this rank's gradients as they are.
        bucket_size: Elements of a bucket, at least 1; a larger gradient gets a bucket of its own.

    Attributes:
        strategy: When gradients are averaged.

    Raises:
        ValueError: `bucket_size` is below 1.
        TypeError: `strategy` is not a `GradSyncStrategy`, or `bucket_size` is not an integer.
    """

    def __init__(
        self, strategy: GradSyncStrategy | str = GradSyncStrategy.SYNCHRONOUS, bucket_size: int = 25_000_000
    ) -> None:
        self.strategy = member("strategy", GradSyncStrategy, strategy)
        self._bucket_size = integer("bucket_size", bucket_size, minimum=1)
        self._num_params: int | None = None
        self.clear()

    def prepare(self, num_params: int) -> None:
        """Set the number of gradients that a round may have, and begin a round; local.

        Args:
            num_params: Number of gradients, the same on all ranks.

        Raises:
            ValueError: `num_params` is negative.
            TypeError: `num_params` is not an integer.
        """
        self._num_params = integer("num_params", num_params, minimum=0)
        self.clear()

    def clear(self) -> None:
        """Drop the gradients of this round and begin the next round; local."""
        self._added: dict[int, Tensor] = {}
        self._synced: list[Tensor] | None = None

    def add_gradient(self, index: int, t: Tensor) -> None:
        """Copy one gradient; local.

        Args:
            index: The gradient's number, from 0 to `num_params - 1`; each once a round, in any order.
            t: Floating-point or complex, any shape and strides; shape and dtype the same on all ranks.

        Raises:
            ValueError: The index is out of range or was added before, `prepare` was not called, the round
                has been synchronised, or the tensor is sparse.
            DtypeError: A tensor of integers or booleans cannot be averaged.
            TypeError: `index` is not an integer, or `t` not a tensor.
        """
        num_params = self._prepared()
        if self._synced is not None:
            raise ValueError("add_gradient() after sync_all(): call clear() to begin the next round")
        index = integer("index", index)
        if not 0 <= index < num_params:
            raise ValueError(f"index: expected 0 to {num_params - 1}, as prepare({num_params}) said, got {index}")
        if index in self._added:
            raise ValueError(f"index: gradient {index} was added before in this round; call clear() between rounds")
        _check_dense("t", t)
        if not (t.dtype.is_floating_point or t.dtype.is_complex):
            raise DtypeError(f"t: expected a floating-point or complex gradient, got {t.dtype}")
        self._added[index] = torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t.detach())

    def sync_all(self, group: ProcessGroup | None = None) -> None:
        """Average the gradients added in this round over the ranks of a group; collective, but local with NO_SYNC.

        Gradients may be left out if all ranks leave out the same. The ranks first compare indices, shapes and
        dtypes: a difference is an error on every rank before any reduction. After another error call `clear()`.

        Args:
            group: The ranks to average over; None means all.

        Raises:
            ValueError: `prepare` was not called, or the round has been synchronised before.
            CollectiveMismatchError: The ranks added gradients of different indices, shapes or dtypes.
        """
        num_params = self._prepared()
        if self._synced is not None:
            raise ValueError("sync_all() twice in a round: call clear() to begin the next one")
        if self.strategy is not GradSyncStrategy.NO_SYNC:
            chosen = chosen_group(group)
            same_on_all_ranks(
                chosen.backend,
                self._description(num_params),
                "the ranks of this group added different gradients, so none was reduced",
                "Add the same indices, shapes and dtypes on every rank.",
                CollectiveMismatchError,
            )
            self._average(chosen)
        elif group is not None:
            chosen_group(group)  # a wrong argument is refused all the same
        self._synced = [self._added.pop(index) for index in sorted(self._added)]

    def gradients(self) -> list[Tensor]:
        """Return the averages that `sync_all` has computed, in the order of their indices; local.

        They are owned by the caller: the next round does not change them.

        Raises:
            ValueError: `sync_all` was not called in this round.
        """
        if self._synced is None:
            raise ValueError("gradients() before sync_all(): call sync_all() first")
        return list(self._synced)

    def _prepared(self) -> int:
        if self._num_params is None:
            raise ValueError("prepare() was not called: say first how many gradients a round may have")
        return self._num_params

    def _description(self, num_params: int) -> list[str]:
        """Return a line for each argument and gradient that must agree."""
        lines = [f"num_params is {num_params}", f"bucket_size is {self._bucket_size}"]
        for index in range(num_params):
            t = self._added.get(index)
            text = "missing" if t is None else f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
            lines.append(f"gradient {index} is {text}")
        return lines

    def _average(self, group: ProcessGroup) -> None:
        """Reduce bucket by bucket and replace the gradients by views of the buckets; collective."""
        overlapped = self.strategy is GradSyncStrategy.OVERLAPPED
        started: list[Work] = []
        for indices in _layout(self._added, self._bucket_size):
            flat, parts = _pack([self._added[index] for index in indices])
            # Replacing them here frees the copies one bucket at a time.
            self._added.update(zip(indices, parts, strict=True))
            work = group.all_reduce(flat, ReduceOp.AVERAGE, async_op=overlapped)
            if work is not None:
                started.append(work)
        for work in started:
            work.wait()


def _layout(gradients: Mapping[int, Tensor], bucket_size: int) -> list[list[int]]:
    """Return the indices of each bucket in ascending order, one dtype and device a bucket."""
    indices = sorted(gradients)
    buckets: list[list[int]] = []
    for positions in by_kind([gradients[index] for index in indices]).values():
        own = [indices[position] for position in positions]
        parts = bucket_by_size([gradients[index].numel() for index in own], bucket_size)
        buckets += [[own[position] for position in part] for part in parts]
    return buckets


def _pack(gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients end to end in one flat tensor, and a view of it for each."""
    if len(gradients) == 1:  # needs no copy
        return gradients[0].view(-1), list(gradients)
    flat = torch.cat([t.view(-1) for t in gradients])
    parts = flat.split([t.numel() for t in gradients])
    return flat, [part.view(t.shape) for part, t in zip(parts, gradients, strict=True)]


def _check_dense(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
    if t.layout is not torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {t.layout}; use .to_dense()")
