"""From whole gradients on every rank to the sum's shard on one.

    fulls' .grad   | weight ........ | bias |     what autograd leaves, on each rank
                        reduce-scatter
    parts' .grad       | weight |                 the average over all ranks: this rank's shard of it

Replicas average their shards after that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..backends import wide_dtype
from ..collectives.divided_parameters import Axis, axes_of, replicate
from ..groups.world import ProcessGroup
from ..types import ReduceOp, Work
from ..wrapping.partial import mark_gradients, ordinary_gradients
from .flat_parameter import FlatParameter
from .offload import Files
from .unit import Unit

__all__ = ["FlatGradient"]


class FlatGradient:
    """The gradient of a flat parameter.

    Args:
        unit: The unit that it belongs to.
        flat: The parameter.
        sum_dtype: Dtype in which gradients are summed and rounded.
        replicas: The ranks that hold the same shard; None if there are no others.
        files: Where the gradient's shard lies instead of memory, if anywhere.

    Attributes:
        shard: [S] memory of the gradient's shard, once there is one.
        launched: Whether the reduction of this backward has begun.
        arrived: Which parameters backward has come to.
        defined: Which of them had a gradient when the reduction began.
        nodes: Autograd's, which bring the gradients.
        whole_bytes: Size of what goes into its reduction.
    """

    def __init__(
        self,
        unit: Unit,
        flat: FlatParameter,
        sum_dtype: torch.dtype,
        replicas: ProcessGroup | None,
        files: Files | None = None,
    ) -> None:
        self.unit = unit
        self.flat = flat
        self.shard: Tensor | None = None
        self.launched = False
        self.arrived: set[int] = set()
        self.defined: set[int] = set()
        self.nodes: list[Node] = []
        self._sum_dtype = sum_dtype
        computed = flat.compute_dtype
        self._wire_dtype = computed if sum_dtype in (computed, wide_dtype(computed)) else sum_dtype
        self._replicas = replicas
        self._files = files
        self._gaps = flat.layout.gaps()
        self._order = sorted(
            range(len(flat.members)), key=lambda i: (flat.layout.offsets[i], flat.layout.numels[i])
        )
        self._axis = None if replicas is None else Axis(replicas, replicas.size)
        if self._axis is not None:
            replicate(flat.parts, self._axis)
        self._divided = [part for part in flat.parts if axes_of(part)]
        self.whole_bytes = sum(flat.sizes) * self._wire_dtype.itemsize
        self._target: Tensor | None = None
        self._work: Work | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of this backward are in."""
        return all(index in self.arrived or not part.requires_grad for index, part in enumerate(self.flat.parts))

    def holds(self) -> list[bool]:
        """Say for each parameter whether there is a gradient that was not reduced yet."""
        return [full.grad is not None for full in self.flat.fulls]

    def launch(self, *, async_op: bool) -> None:
        """Begin to reduce what gradients there are, zeros for the others; collective."""
        self.launched = True
        self.defined.update(index for index, holds in enumerate(self.holds()) if holds)
        self._target = self._make_target()
        self._work = self.flat.group.reduce_scatter_into(
            self._target,
            self._laid_out(),
            self.flat.sizes,
            ReduceOp.AVERAGE,
            dtype=self._wire_dtype,
            async_op=async_op,
        )
        for full in self.flat.fulls:
            full.grad = None

    def wait(self, timeout: float | None) -> None:
        """Wait until the reduction, if one is under way, has let go of the whole gradients; local.

        Args:
            timeout: Seconds to wait.
        """
        if self._work is not None:
            self._work.wait(timeout)

    def finish(self, used: Sequence[bool], timeout: float | None) -> None:
        """Wait for the reduction and add its result to the parts' gradients; collective among replicas.

        Hooks of users on the parts are called here, as autograd only comes to the whole parameters.

        Args:
            used: For each parameter, whether any rank has a gradient.
            timeout: Seconds to wait.
        """
        self.wait(timeout)
        assert self._target is not None
        if self._replicas is not None:
            self._replicas.all_reduce(self._target, ReduceOp.AVERAGE)
        with ordinary_gradients(self.flat.parts):
            for index, part in enumerate(self.flat.parts):
                if used[index] and part.numel():
                    self._add(index, self.flat.part_of(self._target, index))
        mark_gradients(self._divided)
        for index, part in enumerate(self.flat.parts):
            if used[index] and part.numel():
                for hook in list((part._post_accumulate_grad_hooks or {}).values()):  # they may remove themselves
                    hook(part)
        self.reset()

    def reset(self) -> None:
        """Forget what has arrived and what is under way; local."""
        self.launched, self._work, self._target = False, None, None
        self.arrived.clear()
        self.defined.clear()

    def discard(self) -> None:
        """Drop gradients that were not reduced; local."""
        self.reset()
        for full in self.flat.fulls:
            full.grad = None

    def _add(self, index: int, piece: Tensor) -> None:
        part = self.flat.parts[index]
        if part.grad is not None:
            part.grad.add_(piece)
            return
        home = self.flat.part_of(self._shard_memory(), index)
        if home.data_ptr() != piece.data_ptr():
            home.copy_(piece)
        self.flat.set_gradient(index, home)

    def _make_target(self) -> Tensor:
        size = self.flat.sizes[self.flat.group.rank]
        is_fresh = all(part.grad is None for part in self.flat.parts)
        if is_fresh and self._sum_dtype == self.flat.dtype:
            return self._shard_memory()
        return torch.empty(size, dtype=self._sum_dtype)

    def _shard_memory(self) -> Tensor:
        if self.shard is None:
            size = self.flat.sizes[self.flat.group.rank]
            files, dtype = self._files, self.flat.dtype
            self.shard = torch.empty(size, dtype=dtype) if files is None else files.own([size], dtype)
        return self.shard

    def _laid_out(self) -> list[Tensor | int]:
        laid: list[Tensor | int] = []
        for index in self._order:
            laid += [self._gaps[index]] if self._gaps[index] else []
            gradient = self.flat.fulls[index].grad
            if gradient is None:
                laid.append(self.flat.layout.numels[index])
            else:
                laid.append(gradient.detach().to(self._wire_dtype))
        return [*laid, self._gaps[-1]] if self._gaps[-1] else laid
