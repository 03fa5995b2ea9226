"""`Domain`: the axes of a mesh that cut samples, each along one dimension.

domain = ax.Domain(mesh, {"y": 2, "x": 3})
x = domain.from_local(part, (8, 3, 721, 1440))      # part: this rank's domain.slices((8, 3, 721, 1440))
y = model(x)                                        # of the whole; each rank computes its part
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..across_ranks.comparison import raised_on_all, same_on_all_ranks
from ..backends import broadcast_object, check_rank, check_shape
from ..groups.process_group import ProcessGroup
from ..mesh import DeviceMesh
from ..utils.arguments import integer
from . import rules as _rules  # noqa: F401  fills the table
from .domain_tensor import DomainTensor, as_domain_tensor
from .layout import Layout, assembled, block_at, bounds, coordinates_along, part_shape
from .movement import own_part


class Domain:
    """Ranks that hold one sample together, each a block of it.

    A dimension is cut over the ranks of an axis as `torch.tensor_split` cuts: the first ranks may have an element
    more, and some none. Construction is collective over the mesh's world.

    Args:
        mesh: The ranks in a grid of named axes.
        dims: The dimension that each axis cuts, by its name; negative ones count from the end.

    Attributes:
        mesh: The same.
        dims: The same.
        group: The ranks that have this rank's sample.

    Raises:
        TypeError: `mesh` is no DeviceMesh, or `dims` no mapping of names to integers.
        ValueError: `dims` is empty, names an unknown axis, or differs over the ranks; on all ranks.
    """

    def __init__(self, mesh: DeviceMesh, dims: Mapping[str, int]) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh: expected an axonmpi.DeviceMesh, got {type(mesh).__name__}")
        with raised_on_all(mesh.group().backend):
            if not isinstance(dims, Mapping):
                raise TypeError(f'dims: expected the dimension that each axis cuts, as {{"y": 2}}, got {dims!r}')
            if not dims:
                raise ValueError('dims: expected at least one axis, such as {"y": 2}, got none')
            self.dims = {axis: integer(axis, dim) for axis, dim in dims.items()}
        self.mesh = mesh
        same_on_all_ranks(
            mesh.group().backend, [str(self.dims)], "dims: the domain differs", "Give all ranks the same dims."
        )
        self.group: ProcessGroup = mesh.group(*self.dims)

    def __repr__(self) -> str:
        return f"Domain({self.dims}, {self.mesh!r})"

    def slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return this rank's block of a tensor, a slice for each dimension; local.

        Args:
            shape: The whole tensor's shape.

        Raises:
            ValueError: The tensor has too few dimensions, or two axes would cut one of them.
        """
        whole = self._layout(shape)
        ranges = [bounds(self.mesh, dim[0]) if dim else (0, 1) for dim in whole.dims]
        return tuple(slice(low, high) for low, high in ranges)

    def from_local(self, part: Tensor, shape: Sequence[int]) -> DomainTensor:
        """Return a tensor that shows the shape of the whole; local.

        Args:
            part: This rank's block, the elements of `slices(shape)`; it is not copied.
            shape: The whole tensor's shape, the same on all ranks of the domain.

        Raises:
            TypeError: `part` is no tensor, or one that is cut already.
            ValueError: `part` has another shape than the block.
        """
        whole = self._layout(shape)
        if not isinstance(part, Tensor) or isinstance(part, DomainTensor):
            raise TypeError(f"part: expected an ordinary tensor, got {type(part).__name__}")
        expected = part_shape(self.mesh, whole)
        if list(part.shape) != expected:
            raise ValueError(
                f"part: expected shape {expected}, this rank's block of {list(whole.shape)}, got "
                f"{list(part.shape)}; domain.slices(shape) gives the block"
            )
        return as_domain_tensor(part.as_subclass(Tensor).view_as(part), whole, self.mesh)

    def shard(self, tensor: Tensor) -> DomainTensor:
        """Return a tensor that all ranks of the domain have, cut; local, its backward concatenates gradients.

        Args:
            tensor: The whole, the same on all ranks.
        """
        whole = self._layout(tensor.shape)
        part = tensor
        for axis in whole.axes:
            dim = whole.dim_of(axis)
            part = own_part(self.mesh, part, dim, whole.dims[dim])
        return self.from_local(part.contiguous(), tensor.shape)

    def scatter(self, tensor: Tensor | None, src: int = 0) -> DomainTensor:
        """Return a tensor that one rank of the domain has, cut, without history; collective over the domain.

        Args:
            tensor: The whole, on rank `src`; ignored elsewhere.
            src: Rank of `group` that has it.

        Raises:
            TypeError: `tensor` is none on `src`; on all ranks.
            ValueError: `src` is no rank of the group, or the tensor has too few dimensions; on all ranks.
        """
        backend = self.group.backend
        check_rank(src, "src", self.group.size)
        blocks = [torch.empty(0)] * self.group.size
        with raised_on_all(backend):
            if self.group.rank == src:
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"tensor: expected the whole tensor on rank {src}, got {type(tensor).__name__}")
                whole = self._layout(tensor.shape)
                opened = tensor.detach().reshape([factor.size for dim in whole.dims for factor in dim])
                blocks = [opened[block_at(whole, self.mesh, at)] for at in coordinates_along(self.mesh, self.dims)]
        shape = broadcast_object(backend, None if tensor is None else tuple(tensor.shape), src)
        part = backend.all_to_all(blocks)[src]
        return self.from_local(part.reshape(part_shape(self.mesh, self._layout(shape))), shape)

    def gather(self, tensor: Tensor, dst: int = 0) -> Tensor | None:
        """Return the whole tensor on one rank of the domain, without history, None elsewhere; collective.

        Args:
            tensor: A tensor of this domain; an ordinary one counts as the same on all ranks.
            dst: Rank of `group` that gets it.

        Raises:
            ValueError: `dst` is no rank of the group.
        """
        check_rank(dst, "dst", self.group.size)
        if not isinstance(tensor, DomainTensor):
            return tensor.detach() if self.group.rank == dst else None
        parts = self.group.backend.gather(tensor.to_local().reshape(-1), dst)
        if parts is None:
            return None
        others = [axis for axis in self.dims if axis not in tensor.whole.axes]
        ranks = coordinates_along(self.mesh, self.dims)
        chosen = [
            part for part, at in zip(parts, ranks, strict=True) if all(at[a] == ranks[dst][a] for a in others)
        ]
        return assembled(chosen, tensor.whole, self.mesh)

    def _layout(self, shape: Sequence[int]) -> Layout:
        sizes = check_shape(shape)
        cuts: dict[int, str] = {}
        for axis, dim in self.dims.items():
            number = dim + len(sizes) if dim < 0 else dim
            if not 0 <= number < len(sizes):
                raise ValueError(f"shape: expected a dimension {dim} for axis {axis!r} to cut, got {list(sizes)}")
            if number in cuts:
                raise ValueError(
                    f"shape: expected another dimension for each axis, but {cuts[number]!r} and {axis!r} would "
                    f"both cut dimension {number} of {list(sizes)}"
                )
            cuts[number] = axis
        return Layout.cut(sizes, cuts)
