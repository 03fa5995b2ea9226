"""Gradients laid end to end, to be reduced together.

    bucket 0  | grad of head.weight | grad of head.bias |          first to become ready in backward
    bucket 1  | grad of block3.w    | grad of block2.w  | ...

`param.grad` is a view of its bucket (with `gradient_as_bucket_view`), so nothing is copied on the way back. On the
way in a gradient that autograd allocated itself is copied once; one that accumulates into the view is not copied.
The views have the strides of their parameters, so that optimizers find both laid out alike.

A large gradient is not copied at all: it is a `LargeGradient`, reduced where autograd has put it. Copying it into a
bucket would cost as much as reducing it does. That of a linear layer's weight is computed in memory that the ranks
of a node share, where reducing it is quickest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..backends import by_dtype
from ..collectives.agreement import gradient_strides
from ..groups.world import ProcessGroup
from ..types import ReduceOp
from ..utils.memory import ReusedMemory, flat_zeros, set_gradient_memory
from ..utils.partition import bucket_by_size

__all__ = ["Bucket", "LargeGradient", "make_buckets", "share_memory"]

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that its reduction begins early in backward (Li et al. 2020, section 3.2.3)."""
LARGE_BYTES = 512 << 10
"""From this size on a gradient is reduced by itself: the meeting of the ranks costs less than copying it."""


class Bucket:
    """Some parameters' gradients in one flat tensor.

    Attributes:
        members: Positions of the parameters in the reducer's list.
        numel: Elements of all of them.
        device: Where they are.
        flat: [numel] the gradients, end to end.
        wire: [numel] what is reduced: `flat` itself, or a copy in the dtype chosen for communication.
        pending: Members whose gradients are not in yet.
        launched: Whether the reduction of this backward has begun.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        members: Sequence[int],
        reduce_dtype: torch.dtype | None,
        group: ProcessGroup,
    ) -> None:
        self.members = list(members)
        self._parameters = [parameters[member] for member in members]
        first = self._parameters[0]
        sizes = [parameter.numel() for parameter in self._parameters]
        converts = _converts(first, reduce_dtype)
        self.numel, self.device = sum(sizes), first.device
        self.flat = _zeros(self.numel, first.dtype, first.device, None if converts else group)
        self._parts = torch.split(self.flat, sizes)
        self._views = [_shaped_like(part, p) for part, p in zip(self._parts, self._parameters, strict=True)]
        self._addresses = [view.data_ptr() for view in self._views]
        self.wire = self.flat
        if converts:
            assert reduce_dtype is not None
            self.wire = _zeros(self.numel, reduce_dtype, first.device, group)
        self._slot = {member: position for position, member in enumerate(self.members)}
        self.pending: set[int] = set()
        self.launched = False

    def reset(self) -> None:
        """Expect all gradients anew."""
        self.pending = set(self.members)
        self.launched = False

    def clear(self) -> None:
        """Take in zeros for all members."""
        self.flat.zero_()

    def put(self, member: int, *, as_view: bool) -> None:
        """Take in the gradient of one member, zero if it has none."""
        slot = self._slot[member]
        parameter, view = self._parameters[slot], self._views[slot]
        if view.data_ptr() != self._addresses[slot]:  # the module was converted, and its gradients with it
            view = self._views[slot] = _shaped_like(self._parts[slot], parameter)
        grad = parameter.grad
        if grad is None:
            view.zero_()
        elif grad is not view:
            view.copy_(grad.detach())
            if as_view and not grad.requires_grad:
                parameter.grad = view
        self.pending.discard(member)

    def adopt(self) -> None:
        """Make the gradients that there are views of this bucket, with the values they have."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not None and not parameter.grad.requires_grad:
                view.copy_(parameter.grad)
                parameter.grad = view

    def pack(self) -> None:
        """Convert what was taken in to the dtype of communication."""
        if self.wire is not self.flat:
            self.wire.copy_(self.flat)

    def unpack(self, used: Sequence[bool], *, as_view: bool, scale: float) -> None:
        """Bring the reduced values into the gradients of the members that are used on any rank."""
        if self.wire is not self.flat:
            self.flat.copy_(self.wire)
        if scale != 1.0:
            self.flat.mul_(scale)
        for member, parameter, view in zip(self.members, self._parameters, self._views, strict=True):
            if not used[member]:
                continue
            _set_gradient(parameter, view, as_view=as_view)


class LargeGradient:
    """One parameter's gradient, reduced in its own memory.

    Attributes:
        members: The position of the parameter in the reducer's list.
        numel: Its elements.
        device: Where it is.
        pending: The same position, until the gradient is in.
        launched: Whether the reduction of this backward has begun.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], member: int) -> None:
        self.members = [member]
        self._parameter = parameters[member]
        self.numel, self.device = self._parameter.numel(), self._parameter.device
        self._gradient: Tensor | None = None
        self.pending: set[int] = set()
        self.launched = False

    @property
    def wire(self) -> Tensor:
        """What is reduced: the gradient, zeros if there is none."""
        if self._gradient is None:
            self._gradient = torch.zeros_like(self._parameter, requires_grad=False)
        return self._gradient

    def reset(self) -> None:
        """Expect the gradient anew."""
        self.pending = set(self.members)
        self.launched = False
        self._gradient = None

    def clear(self) -> None:
        """Take in zeros."""
        self._gradient = None

    def put(self, member: int, *, as_view: bool) -> None:
        """Take in the gradient, zero if there is none."""
        grad = self._parameter.grad
        self._gradient = grad.detach().clone() if grad is not None and grad.requires_grad else grad
        self.pending.discard(member)

    def adopt(self) -> None:
        """A gradient stays where it is."""

    def pack(self) -> None:
        """Nothing has to be converted."""

    def unpack(self, used: Sequence[bool], *, as_view: bool, scale: float) -> None:
        """Make what was reduced the parameter's gradient, if it is used on any rank."""
        if scale != 1.0:
            self.wire.mul_(scale)
        if used[self.members[0]]:
            _set_gradient(self._parameter, self.wire, as_view=True)


def _zeros(numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup | None) -> Tensor:
    """Make [numel] zeros, shared by the ranks of a node if they are to be reduced over `group`; collective then."""
    if group is None or device.type != "cpu":
        return flat_zeros(numel, dtype, device)
    return group.symmetric_empty((numel,), dtype).zero_()


def _set_gradient(parameter: nn.Parameter, average: Tensor, *, as_view: bool) -> None:
    """Make an average the parameter's gradient; one that has a history keeps it.

    Backward through such a gradient gives each rank its part of the next one, which is averaged in its turn.
    """
    if parameter.grad is not None and (parameter.grad.requires_grad or not as_view):
        parameter.grad.copy_(average)
    else:
        parameter.grad = average if as_view else average.clone()


def _shaped_like(part: Tensor, parameter: Tensor) -> Tensor:
    return part.as_strided(parameter.shape, gradient_strides(parameter), part.storage_offset())


def make_buckets(
    parameters: Sequence[nn.Parameter],
    order: Sequence[int],
    cap_bytes: int | None,
    reduce_dtype: torch.dtype | None,
    group: ProcessGroup,
    *,
    in_place: bool,
) -> list[Bucket | LargeGradient]:
    """Pack gradients into buckets, one dtype each, in the given order; collective.

    Args:
        parameters: All parameters.
        order: Their positions, in the order in which gradients are expected.
        cap_bytes: Largest bucket in bytes (a larger gradient gets one of its own); None: one bucket a dtype.
        reduce_dtype: Dtype of communication, None for the gradients' own.
        group: The ranks to reduce over.
        in_place: Whether large gradients are reduced in their own memory.
    """
    large = [member for member in order if in_place and is_large(parameters[member], reduce_dtype)]
    groups: list[list[int]] = []
    small = [member for member in order if member not in set(large)]
    ordered = [parameters[position] for position in small]
    for positions in by_dtype(ordered).values():
        members = [small[position] for position in positions]
        groups += [members] if cap_bytes is None else _cut(parameters, members, cap_bytes)
    # A bucket can go when its last gradient is ready: that, not the dtype, is the order of the buckets.
    rank_in_order = {member: place for place, member in enumerate(order)}
    buckets: list[Bucket | LargeGradient] = [Bucket(parameters, members, reduce_dtype, group) for members in groups]
    buckets += [LargeGradient(parameters, member) for member in large]
    return sorted(buckets, key=lambda bucket: rank_in_order[bucket.members[-1]])


def share_memory(
    parameters: Sequence[nn.Parameter],
    wanted: Sequence[bool],
    reduce_dtype: torch.dtype | None,
    group: ProcessGroup,
) -> list[ReusedMemory]:
    """Have large gradients computed where the ranks of a node can reduce them without a copy; collective.

    Args:
        parameters: All parameters.
        wanted: For each whether its gradient is put where `set_gradient_memory` says.
        reduce_dtype: As for `make_buckets`.
        group: The ranks to reduce over.

    Returns:
        The memory, which has to be kept.
    """
    if group.size == 1 or any(parameter.device.type != "cpu" for parameter in parameters):
        return []
    shared = torch.tensor(wanted, dtype=torch.uint8)
    group.all_reduce(shared, ReduceOp.MIN)
    memories = []
    for parameter, is_shared in zip(parameters, shared.tolist(), strict=True):
        if is_shared and is_large(parameter, reduce_dtype):
            memory = ReusedMemory(group.symmetric_empty((parameter.nbytes,), torch.uint8).numpy().data)
            set_gradient_memory(parameter, memory)
            memories.append(memory)
    return memories


def is_large(parameter: nn.Parameter, reduce_dtype: torch.dtype | None) -> bool:
    """Say whether a gradient may be reduced in its own memory; local.

    Args:
        parameter: Whose gradient.
        reduce_dtype: As for `make_buckets`.
    """
    return parameter.nbytes >= LARGE_BYTES and not _converts(parameter, reduce_dtype)


def _converts(parameter: nn.Parameter, reduce_dtype: torch.dtype | None) -> bool:
    """Say whether a gradient travels in another dtype than its own; complex ones never do."""
    return reduce_dtype is not None and reduce_dtype != parameter.dtype and not parameter.dtype.is_complex


def _cut(parameters: Sequence[nn.Parameter], members: list[int], cap_bytes: int) -> list[list[int]]:
    sizes = [parameters[member].nbytes for member in members]
    first = bucket_by_size(sizes, min(FIRST_BUCKET_BYTES, cap_bytes))[0]
    rest = bucket_by_size(sizes[len(first) :], cap_bytes)
    cut = [first] + [[len(first) + entry for entry in bucket] for bucket in rest]
    return [[members[entry] for entry in bucket] for bucket in cut]
