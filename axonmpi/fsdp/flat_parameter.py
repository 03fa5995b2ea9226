"""A flat parameter: some of a unit's parameters, end to end, and this rank's shard of them.

    buffer   [P]  | weight ............... | bias | pad |     what the unit computes with, once a node
    shard    [S]       | this rank's |                        what this rank updates
    parts              | weight |                             what the optimizer sees: views of the shard
    fulls         | weight ............... | bias |           what forward sees: views of the buffer

Where all ranks are on one node and compute in the dtype of the parameters, the shard lies in the buffer: it is
the only copy on the node, and is never gathered. Elsewhere the buffer is filled from the shards of all ranks
when it is needed.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..collectives.divided_parameters import divide, mark_part
from ..groups.world import ProcessGroup
from ..types import Work
from .offload import Files, OffloadedParameter
from .unit_selection import Member

__all__ = ["ALIGNMENT", "COMPUTED_WITH", "FlatParameter", "Layout", "State", "by_elements", "by_parameters"]

COMPUTED_WITH = "_axonmpi_computed_with"
"""Attribute of a whole parameter that a unit computes with: its name. Optimizers are to have the parts instead."""


class State(enum.Enum):
    """Where the values of a flat parameter are.

    Attributes:
        RESIDENT: The shard lies in the buffer, which all ranks have in common; nothing is ever gathered.
        KEPT: The buffer is this flat parameter's own, filled anew for each forward.
        LENT: The buffer is lent for a unit's computation, and another unit's after that.
    """

    RESIDENT = "resident"
    KEPT = "kept"
    LENT = "lent"


class FlatParameter:
    """Some parameters of a unit, of one dtype.

    Args:
        members: The parameters.
        layout: Where each lies.
        group: The ranks that share it out.
        dtype: Dtype of the shard.
        compute_dtype: Dtype of the buffer.
        state: Where its values are.
        in_file: Whether the shard lies in a file.

    Attributes:
        sizes: Elements of each rank's shard.
        shard: [S] this rank's shard.
        buffer: [P] what the unit computes with, once there is one.
        parts: This rank's part of each parameter.
        made: Address and shape that each part was given.
        fulls: The whole parameters, views of the buffer, once there is one.
        is_valid: Whether the buffer holds the parameters' values.
        trains: Whether its parameters are trained.
    """

    def __init__(
        self,
        members: Sequence[Member],
        layout: Layout,
        group: ProcessGroup,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        state: State,
        *,
        in_file: bool = False,
    ) -> None:
        self.members = list(members)
        self.layout = layout
        self.group = group
        self.dtype = dtype
        self.compute_dtype = compute_dtype
        self.state = state
        self.sizes = list(layout.sizes)
        self.trains = members[0].parameter.requires_grad
        self.shapes = [member.parameter.shape for member in members]
        self.is_valid = state == State.RESIDENT
        self.shard: Tensor = torch.empty(0, dtype=dtype)
        self.buffer: Tensor | None = None
        self.parts: list[nn.Parameter] = []
        self.fulls: list[nn.Parameter] = []
        self.made: list[tuple[int, torch.Size]] = []
        self._wholes: Sequence[Tensor] | None = None
        self._in_file = in_file
        self._marks = [dict(member.parameter.__dict__) for member in members]

    @property
    def in_place(self) -> bool:
        """Whether the shard lies in the buffer."""
        if self._in_file:
            return self.state == State.RESIDENT
        return self.state != State.LENT and self.dtype == self.compute_dtype

    @property
    def is_resident(self) -> bool:
        """Whether the only copy of a node is computed with, and nothing is ever gathered."""
        return self.state == State.RESIDENT

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffer."""
        return self.layout.total * self.compute_dtype.itemsize

    def set_buffer(self, buffer: Tensor) -> None:
        """Use [P] elements of memory that the ranks of a node have in common to compute with; local."""
        self.buffer = buffer
        self.fulls = []
        for index, member in enumerate(self.members):
            offset = self.layout.offsets[index]
            view = buffer[offset : offset + self.layout.numels[index]].view(self.shapes[index])
            full = nn.Parameter(view, requires_grad=member.parameter.requires_grad)
            full.__dict__.update(self._marks[index])
            setattr(full, COMPUTED_WITH, member.name)
            self.fulls.append(full)
        if self.in_place:
            low, high = self.layout.bounds(self.group.rank)
            self.set_shard(buffer[low:high])

    def set_shard(self, shard: Tensor) -> None:
        """Use [S] elements of memory for the shard; local."""
        self.shard = shard
        self.parts = []
        for index, member in enumerate(self.members):
            part = nn.Parameter(self.part_of(shard, index), requires_grad=member.parameter.requires_grad)
            part.__dict__.update(self._marks[index])
            mark_part(part, *self.layout.part(index, self.group.rank), self.shapes[index])
            divide(part, self.group)
            self.parts.append(part)
        self._note_made()

    def _note_made(self) -> None:
        self.made = [(part.data_ptr(), part.shape) for part in self.parts]

    def show(self, wholes: Sequence[Tensor] | None) -> None:
        """Let the parts show whole parameters that are copies, in their shapes; None: the shard; local."""
        self._wholes = wholes
        for index, part in enumerate(self.parts):
            part.data = self.home(index)
        self._note_made()

    def set_gradient(self, index: int, gradient: Tensor) -> None:
        """Give a part a gradient that is laid out as it is in the shard, whatever it shows; local."""
        part = self.parts[index]
        shown = part.data
        if self._wholes is not None:
            part.data = self.part_of(self.shard, index)
        part.grad = gradient
        if self._wholes is not None:
            part.data = shown

    def home(self, index: int) -> Tensor:
        """Return the memory that a part shows, of the shard or of a copy of the whole parameter; local."""
        return self.part_of(self.shard, index) if self._wholes is None else self._wholes[index]

    def changed(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield which parts differ from the whole parameters that are shown: index, in the shard, new; local."""
        for index, whole in enumerate(self._wholes or ()):
            own = self.part_of(self.shard, index)
            first, last = self.layout.part(index, self.group.rank)
            new = whole.reshape(-1)[first:last].view(own.shape)
            if not torch.equal(own, new):
                yield index, own, new

    def offload_state(self, files: Files) -> None:
        """Let optimizers put their state for these parameters into files; local."""
        offloaded = []
        for part in self.parts:
            new = OffloadedParameter(part.data, requires_grad=part.requires_grad)
            new.__dict__.update(part.__dict__)
            new.files = files
            offloaded.append(new)
        self.parts = list(offloaded)

    def part_of(self, shard: Tensor, index: int) -> Tensor:
        """Return this rank's part of a parameter, a view of [S] elements laid out as the shard is; local.

        It has the shape of the parameter if it is all of it, and else as many dims, which optimizers and those who
        make groups of parameters look at: [elements, 1, ...], or [0, ...].
        """
        first, last = self.layout.part(index, self.group.rank)
        shape = self.shapes[index]
        if first == last:
            return shard[:0].view(0, *shape[1:])
        start = self.layout.offsets[index] + first - self.layout.bounds(self.group.rank)[0]
        part = shard[start : start + last - first]
        return part.view(shape if last - first == shape.numel() else (-1, *[1] * (len(shape) - 1)))

    # ---- moving values ------------------------------------------------------------------------------------

    def gather(self, *, async_op: bool = False) -> Work | None:
        """Fill the buffer from the shards of all ranks; collective, nothing to do for a resident one."""
        if self.state == State.RESIDENT:
            return None
        assert self.buffer is not None
        work = self.group.all_gather_into(
            self.buffer.data, None if self.in_place else self.shard.detach(), self.sizes, async_op=async_op
        )
        self.is_valid = True
        return work

    def load(self, value_of: Callable[[Member], Tensor | None]) -> None:
        """Take the values that rank 0 has for some or all parameters; collective.

        Args:
            value_of: Called on rank 0 for each parameter; None leaves the parameter as it is.
        """
        values = [value_of(member) for member in self.members] if self.group.rank == 0 else []
        if self.state == State.RESIDENT:
            self._load_resident(values)
        else:
            self._load_shards(values)

    def _load_resident(self, values: Sequence[Tensor | None]) -> None:
        self.group.barrier()  # nobody reads the old values any more
        for full, value in zip(self.fulls, values, strict=False):
            if value is not None:
                full.detach().copy_(value)
        self.group.barrier()

    def _load_shards(self, values: Sequence[Tensor | None]) -> None:
        given: list[bool] = self.group.broadcast_object([value is not None for value in values])
        for index, is_given in enumerate(given):
            if not is_given:
                continue
            whole = torch.empty(self.layout.numels[index], dtype=self.dtype)
            if values:
                value = values[index]
                assert value is not None
                whole.view(self.shapes[index]).copy_(value)
            self.group.broadcast(whole)
            first, last = self.layout.part(index, self.group.rank)
            part = self.part_of(self.shard.detach(), index)
            part.copy_(whole[first:last].view(part.shape))
        self.is_valid = False

    def whole(self, index: int, own: Tensor | None = None) -> Tensor:
        """Return a copy of a whole parameter, or of what is divided as it is; collective.

        Args:
            index: Which one.
            own: This rank's part; None: that of the parameter.
        """
        if own is None and self.is_resident:  # what the others have changed is there: callers have met before
            return self.fulls[index].detach().clone()
        part = (self.part_of(self.shard, index) if own is None else own).detach().reshape(-1)
        whole: Tensor = part.clone() if self.group.size == 1 else self.group.all_gather(part)
        return whole.reshape(self.shapes[index])

    def whole_on_first(self, index: int, own: Tensor | None = None) -> Tensor | None:
        """Return what `whole` does on rank 0, None elsewhere; collective."""
        if self.group.size == 1 or (own is None and self.is_resident):
            return self.whole(index, own) if self.group.rank == 0 else None
        part = (self.part_of(self.shard, index) if own is None else own).detach().reshape(-1)
        parts = self.group.gather(part, 0)
        return None if parts is None else torch.cat(parts).reshape(self.shapes[index])


ALIGNMENT = 16
"""Elements that every parameter and every shard begins at a multiple of."""


@dataclass(frozen=True)
class Layout:
    """Where parameters lie in a flat one, and which part of it is whose.

        by elements     | weight ............. | bias | norm |pad|      every parameter where it comes, cut into
                        | rank 0 | rank 1 | rank 2 | rank 3      |      equal shards
        by parameters   | weight (rank 0) | bias norm (rank 1) | ...    every parameter whole on one rank

    Everything begins at a multiple of 64 bytes or more, as memory that torch allocates does.

    Attributes:
        numels: Elements of each parameter.
        offsets: Where each begins.
        sizes: Elements of each rank's shard; their sum is that of the flat parameter.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Elements of the flat parameter, padding included."""
        return sum(self.sizes)

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return where a rank's shard begins and ends."""
        start = sum(self.sizes[:rank])
        return start, start + self.sizes[rank]

    def part(self, index: int, rank: int) -> tuple[int, int]:
        """Return which elements of a parameter, from and to, lie in a rank's shard; equal if none do."""
        low, high = self.bounds(rank)
        start, numel = self.offsets[index], self.numels[index]
        first, last = max(low, start) - start, min(high, start + numel) - start
        return (first, last) if first < last else (0, 0)

    @functools.cached_property
    def keeps_whole(self) -> bool:
        """Whether no parameter is divided."""
        parts = [[self.part(index, rank) for rank in range(len(self.sizes))] for index in range(len(self.numels))]
        return all((0, numel) in own for numel, own in zip(self.numels, parts, strict=True))

    def gaps(self) -> list[int]:
        """Return the elements of padding before each parameter, and after the last one."""
        order = sorted(range(len(self.numels)), key=lambda index: (self.offsets[index], self.numels[index]))
        gaps, at = [0] * len(self.numels), 0
        for index in order:
            gaps[index] = self.offsets[index] - at
            at = self.offsets[index] + self.numels[index]
        return [*gaps, self.total - at]


def by_elements(numels: Sequence[int], ranks: int) -> Layout:
    """Lay parameters end to end and cut the whole into equal shards; local."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end = _aligned(end + numel)
    shard = _aligned(-(-end // ranks))
    return Layout(tuple(numels), tuple(offsets), (shard,) * ranks)


def by_parameters(numels: Sequence[int], ranks: int, loads: list[int]) -> Layout:
    """Give each parameter, the largest first, to the rank that has least so far; local.

    Args:
        numels: Elements of each parameter.
        ranks: Number of ranks.
        loads: [ranks] what each has already; updated.
    """
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
        owner = min(range(ranks), key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += numels[index]
    offsets, sizes, end = [0] * len(numels), [], 0
    for rank in range(ranks):
        begin = end
        for index, numel in enumerate(numels):
            if owners[index] == rank:
                offsets[index] = end
                end = _aligned(end + numel)
        sizes.append(end - begin)
    return Layout(tuple(numels), tuple(offsets), tuple(sizes))


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
