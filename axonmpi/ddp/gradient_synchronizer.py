"""Gradients packed into buckets and averaged over ranks, without a module around them.

For training loops that do not use `DistributedDataParallel`. One large reduction is quicker than many small
ones, so gradients are copied end to end into flat buckets, and the buckets are reduced:

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
from ..errors import CollectiveMismatchError, DtypeError
from ..groups.process_group import ProcessGroup
from ..groups.world import chosen_group
from ..types import GradSyncStrategy, ReduceOp, Work
from ..utils.arguments import integer, member
from ..utils.partition import bucket_by_size


class GradientBucket:
    """Tensors of one dtype and device, copied end to end into one flat tensor.

    Local. Memory for the whole capacity is taken when the first tensor is added.

    Args:
        capacity: How many elements fit, at least 1.

    Attributes:
        capacity: The same.
        size: How many elements were added.

    Raises:
        ValueError: `capacity` is below 1.
        TypeError: `capacity` is not an integer.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = integer("capacity", capacity, minimum=1)
        self.clear()

    def clear(self) -> None:
        """Forget all tensors, and the dtype and device; tensors that were extracted are not touched."""
        # The next round takes new memory: extracted tensors may still use the old.
        self._storage = torch.empty(0)
        self.size = 0
        self._shapes: list[torch.Size] = []

    @property
    def is_empty(self) -> bool:
        """Whether no tensor was added since construction or `clear()`."""
        return not self._shapes

    @property
    def is_full(self) -> bool:
        """Whether not a single element more fits."""
        return self.size == self.capacity

    @property
    def data(self) -> Tensor:
        """The elements added so far, [size]: a view, so what is written into it shows in `extract()`."""
        return self._storage[: self.size]

    def add(self, t: Tensor) -> bool:
        """Copy a tensor in behind the others, or say that it does not fit.

        Args:
            t: Any shape, 0-d and empty ones too, and any strides; not changed.

        Returns:
            True if it was added; False, with nothing changed, if it has more elements than are left.

        Raises:
            DtypeError: The dtype is another than that of the tensors in the bucket.
            ValueError: The device is another one, or the tensor is sparse.
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
        place = self._storage[self.size : self.size + t.numel()]
        place.view(t.shape).copy_(t.detach())
        self.size += t.numel()
        self._shapes.append(t.shape)
        return True

    def extract(self) -> list[Tensor]:
        """Return the tensors in the order and shapes in which they were added.

        They are views of `data`: a reduction of `data` shows in them. They stay valid after `clear()`.
        """
        parts = self.data.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class GradientSynchronizer:
    """Average gradients over ranks in buckets, whatever the order in which they become ready.

    One round is `add_gradient` for each gradient that there is, `sync_all`, `gradients`, `clear`. Gradients are
    copied when they are added; the tensors given are never changed.

    Args:
        strategy: SYNCHRONOUS reduces one bucket after the other; OVERLAPPED starts the reduction of each
            bucket while the next one is packed, and waits for all at the end; NO_SYNC leaves gradients as
            they are on this rank.
        bucket_size: Elements in a bucket, at least 1; a larger gradient gets a bucket of its own.

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
        """Say how many gradients a round may have, and begin one; local.

        Args:
            num_params: Number of gradients, the same on all ranks.

        Raises:
            ValueError: `num_params` is negative.
            TypeError: `num_params` is not an integer.
        """
        self._num_params = integer("num_params", num_params, minimum=0)
        self.clear()

    def clear(self) -> None:
        """Forget the gradients of this round and begin the next one; local."""
        self._added: dict[int, Tensor] = {}
        self._synced: list[Tensor] | None = None

    def add_gradient(self, index: int, t: Tensor) -> None:
        """Copy one gradient; local.

        Args:
            index: Which gradient it is, from 0 to `num_params - 1`; each one once a round, in any order.
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

        Not every gradient has to be added, but the same ones on all ranks. The ranks first compare indices, shapes
        and dtypes, so that a difference is an error on every rank and no gradient has been reduced. After any other
        error the round is void: call `clear()`.

        Args:
            group: The ranks to average over; None means all.

        Raises:
            ValueError: `prepare` was not called, or the round has been synchronised before.
            CollectiveMismatchError: The ranks added gradients of different indices, shapes or dtypes.
        """
        num_params = self._prepared()
        if self._synced is not None:
            raise ValueError("sync_all() twice in a round: call clear() to begin the next one")
        if group is not None:
            chosen_group(group)
        if self.strategy is not GradSyncStrategy.NO_SYNC:
            group = chosen_group(group)
            same_on_all_ranks(
                group.backend,
                self._description(num_params),
                "the ranks of this group added different gradients, so none was reduced",
                "Add the same indices, shapes and dtypes on every rank.",
                CollectiveMismatchError,
            )
            self._average(group)
        self._synced = [self._added.pop(index) for index in sorted(self._added)]

    def gradients(self) -> list[Tensor]:
        """Return the gradients that were added, after `sync_all`, in the order of their indices; local.

        They belong to the caller: the next round does not change them.

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
        """Return what the ranks must have in common, a line for each thing that may differ."""
        lines = [f"num_params is {num_params}", f"bucket_size is {self._bucket_size}"]
        for index in range(num_params):
            t = self._added.get(index)
            what = "missing" if t is None else f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
            lines.append(f"gradient {index} is {what}")
        return lines

    def _average(self, group: ProcessGroup) -> None:
        """Reduce bucket by bucket and put views of the buckets in the gradients' place; collective."""
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
    """Return the indices in each bucket: one dtype and device each, in the order of the indices."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index in sorted(gradients):
        kinds.setdefault((gradients[index].dtype, gradients[index].device), []).append(index)
    return [
        [indices[position] for position in bucket]
        for indices in kinds.values()
        for bucket in bucket_by_size((gradients[index].numel() for index in indices), bucket_size)
    ]


def _pack(gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients end to end in one flat tensor, and each as a view of it."""
    if len(gradients) == 1:
        return gradients[0].view(-1), list(gradients)
    bucket = GradientBucket(max(1, sum(t.numel() for t in gradients)))
    for t in gradients:
        bucket.add(t)
    return bucket.data, bucket.extract()


def _check_dense(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
    if t.layout is not torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {t.layout}; use .to_dense()")
