"""From whole gradients on every rank to the sum's shard on one.

    full.grad        | weight ........ | bias |     what autograd leaves, on each rank
                          reduce-scatter
    sharded.grad         | weight |                 the average over all ranks: this rank's shard of it

Replicas average their shards after that. Gradients are reduced in one order on all ranks, whatever order they come
in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..backends import wide_dtype
from ..collectives.divided_parameters import Axis, axes_of, replicate
from ..groups.process_group import ProcessGroup
from ..types import ReduceOp, Work
from ..utils.torch_internals import hooks_on, plain_tensors
from ..utils.waiting import network_backoff, wait_until
from ..wrapping.gradient_hooks import launch_in_order, wait_for_all
from ..wrapping.optimizer_hooks import mark_gradients, ordinary_gradients
from ..wrapping.steps import STEP_FLAGS, Steps
from .flat_parameter import FlatParameter, ShardedParameter
from .groups import ShardingGroups
from .offload import Files, PinnedMemory
from .unit import Unit


class FlatGradient:
    """The gradient of a flat parameter.

    Args:
        unit: The unit that it belongs to.
        flat: The parameter.
        sum_dtype: Dtype in which gradients are summed and rounded.
        replicas: The ranks that hold the same shard; None if there are no others.
        offload: Where the gradient's shard lies instead of memory of the device, if anywhere.

    Attributes:
        shard: [S] memory of the gradient's shard, once there is one.
        launched: Whether the reduction of this backward has begun.
        arrived: Parameters that backward has come to.
        defined: Those of them that had a gradient when the reduction began.
        nodes: Autograd's, which bring the gradients.
        full_bytes: Size of what goes into its reduction.
    """

    def __init__(
        self,
        unit: Unit,
        flat: FlatParameter,
        sum_dtype: torch.dtype,
        replicas: ProcessGroup | None,
        offload: Files | PinnedMemory | None = None,
    ) -> None:
        self.unit = unit
        self.flat = flat
        self.shard: Tensor | None = None
        self.nodes: list[Node] = []
        self._sum_dtype = sum_dtype
        computed = flat.compute_dtype
        self._wire_dtype = computed if sum_dtype in (computed, wide_dtype(computed)) else sum_dtype
        self._replicas = replicas
        self._offload = offload
        self._pieces = flat.pieces()
        shown = [parameter.sharded for parameter in flat.parameters]
        self._axis = None if replicas is None else Axis(replicas, replicas.size)
        if self._axis is not None:
            replicate(shown, self._axis)
        self._divided = [sharded for sharded in shown if axes_of(sharded)]
        self.full_bytes = sum(flat.sizes) * self._wire_dtype.itemsize
        self.reset()

    def reset(self) -> None:
        """Forget what has arrived and what is under way; local."""
        self.launched = False
        self.arrived: set[ShardedParameter] = set()
        self.defined: set[ShardedParameter] = set()
        self._target: Tensor | None = None
        self._work: Work | None = None
        self._copied: Any = None

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of this backward are in."""
        return all(p in self.arrived or not p.sharded.requires_grad for p in self.flat.parameters)

    def held(self) -> list[ShardedParameter]:
        """Return the parameters with a gradient that was not reduced yet; local."""
        return [parameter for parameter in self.flat.parameters if parameter.full.grad is not None]

    def launch(self, *, async_op: bool) -> None:
        """Begin to reduce the gradients, zeros where there are none; collective."""
        self.launched = True
        self.defined.update(self.held())
        self._target = self._make_target()
        self._work = self.flat.group.backend.reduce_scatter_into(
            self._target,
            [self._wire(piece) if isinstance(piece, ShardedParameter) else piece for piece in self._pieces],
            self.flat.sizes,
            ReduceOp.AVERAGE,
            dtype=self._wire_dtype,
            async_op=async_op,
            label=self.flat.label,
        )
        self._drop()
        if self._replicas is None:
            self._download()

    def _wire(self, parameter: ShardedParameter) -> Tensor | int:
        """Return what is sent of a parameter's gradient, the number of its elements if it is zero."""
        gradient = parameter.full.grad
        return parameter.numel if gradient is None else gradient.detach().to(self._wire_dtype)

    def wait(self) -> None:
        """Wait until the reduction, if one is under way, has let go of the whole gradients; local."""
        if self._work is not None:
            self._work.wait(self.flat.group.backend.timeout)

    def let_go(self) -> None:
        """Block this thread until the reduction, if one is under way, has let go of the whole gradients; local."""
        self.wait()
        if self._work is not None:
            wait_until(self._work.done, network_backoff())

    def _download(self) -> None:
        """Begin to copy the reduced gradients to memory of the CPU, if their shard lies there; local."""
        pinned, source = self.flat.pinned, self._target
        if pinned is None or self._copied is not None:
            return
        assert source is not None
        target = self._shard_memory()
        if not self._is_fresh or source.dtype != target.dtype:
            target = pinned.empty(source.shape, source.dtype)
        self._copied = pinned.download(source, target, self._work)
        self._target = target

    def finish(self, used: Sequence[int]) -> None:
        """Wait for the reduction and add its result to the sharded gradients; collective among replicas.

        Hooks of users on the sharded parameters are called here, as autograd only comes to the full ones.

        Args:
            used: For each parameter, whether any rank has a gradient.
        """
        self.wait()
        assert self._target is not None
        if self._replicas is not None:
            self._replicas.all_reduce(self._target, ReduceOp.AVERAGE)
        self._download()
        if self.flat.pinned is not None:
            self.flat.pinned.block(self._copied)
        own = [p for p, is_used in zip(self.flat.parameters, used, strict=True) if is_used]
        with plain_tensors(), ordinary_gradients(parameter.sharded for parameter in own):
            for parameter in own:
                self._add(parameter, parameter.view_in(self._target))
            hooks = [(hook, parameter.sharded) for parameter in own for hook in hooks_on(parameter.sharded)[1]]
        mark_gradients(self._divided)
        for hook, sharded in hooks:
            hook(sharded)
        self.reset()

    def discard(self) -> None:
        """Drop gradients that were not reduced; local."""
        self.reset()
        self._drop()

    def _drop(self) -> None:
        for parameter in self.flat.parameters:
            parameter.full.grad = None

    def _add(self, parameter: ShardedParameter, piece: Tensor) -> None:
        if parameter.sharded.grad is not None:
            parameter.sharded.grad.add_(piece)
            return
        home = parameter.view_in(self._shard_memory())
        if home.data_ptr() != piece.data_ptr():
            home.copy_(piece)
        parameter.set_gradient(home)

    @property
    def _is_fresh(self) -> bool:
        """Whether there are no gradients that the next ones are added to."""
        return all(parameter.sharded.grad is None for parameter in self.flat.parameters)

    def _make_target(self) -> Tensor:
        flat = self.flat
        if flat.pinned is None and self._is_fresh and self._sum_dtype == flat.dtype:
            return self._shard_memory()
        return torch.empty(flat.shard.shape, dtype=self._sum_dtype, device=flat.place)

    def _shard_memory(self) -> Tensor:
        if self.shard is None:
            like = self.flat.shard.detach()
            offload = self._offload
            self.shard = torch.empty_like(like) if offload is None else offload.zeros(like.shape, like.dtype)
        return self.shard


class GradientQueue:
    """The gradients of a model, in the order in which all ranks reduce them.

    Args:
        gradients: All that are trained.
        groups: The ranks.
        most_bytes: Whole gradients that may be under way where units are gathered, in bytes; None: they are not.

    Attributes:
        gradients: The same.
        accumulates: Whether a backward has left gradients that were not averaged.
        steps: Counts the model's steps.
    """

    def __init__(self, gradients: Sequence[FlatGradient], groups: ShardingGroups, most_bytes: int | None) -> None:
        self.gradients = list(gradients)
        self.accumulates = False
        self.steps = Steps()
        self._groups = groups
        self._overlaps = groups.memory.overlaps and groups.shard.size > 1
        self._most_bytes = most_bytes
        self._under_way: deque[FlatGradient] = deque()

    def launch_complete(self) -> None:
        """Reduce gradients that are complete, as whole gradients are large; collective.

        Not where units are gathered: all ranks have to gather and reduce in one order, see `launch_after`.
        """
        if self._most_bytes is None:
            launch_in_order(self.gradients, self._launch, lambda gradient: gradient.is_complete)

    def launch_after(self, event: int) -> None:
        """Reduce gradients of units whose forward came after an event: their backward is over; collective.

        Every rank comes here at the same time, while some may have no gradient for a parameter that others have.
        """
        launch_in_order(self.gradients, self._launch, lambda gradient: gradient.unit.first_event > event)

    def _launch(self, gradient: FlatGradient) -> None:
        self._under_way.append(gradient)
        if self._most_bytes is not None:  # else another rank may first want something else of this one
            while sum(each.full_bytes for each in self._under_way) > self._most_bytes:
                self._under_way.popleft().let_go()
        gradient.launch(async_op=self._overlaps)

    def keep(self) -> None:
        """Let the gradients of a backward accumulate; local."""
        self.accumulates = True
        for gradient in self.gradients:
            gradient.arrived.clear()

    def reduce_rest(self) -> None:
        """Reduce the rest, ask which gradients any rank has, and hand the averages out; collective."""
        held = [set(gradient.held()) for gradient in self.gradients]
        # Reentrant checkpointing hands out the gradients of a parameter that it meets twice one by one.
        late = any(gradient.launched and holds for gradient, holds in zip(self.gradients, held, strict=True))
        used: list[int] = [
            parameter in holds or parameter in gradient.defined
            for gradient, holds in zip(self.gradients, held, strict=True)
            for parameter in gradient.flat.parameters
        ]
        try:
            launch_in_order(self.gradients, self._launch)
            wait_for_all(gradient.wait for gradient in self.gradients)
            told = self._on_any_rank([*self.steps.reduce(), late, *used])
            self.accumulates = False
            self.steps.check(told[:STEP_FLAGS], self._groups.both)
            is_late, *used = told[STEP_FLAGS:]
            for gradient in self.gradients:
                count = len(gradient.flat.parameters)
                gradient.finish(used[:count])
                del used[:count]
        except BaseException:  # the next averages would be added to gradients that were not handed out
            self.discard()
            raise
        self._under_way.clear()
        if is_late:
            self.reduce_rest()

    def reduce_held(self) -> None:
        """Reduce gradients that any rank holds; collective."""
        (is_held,) = self._on_any_rank([any(gradient.held() for gradient in self.gradients)])
        if is_held:
            self.reduce_rest()

    def _on_any_rank(self, values: Sequence[int]) -> list[int]:
        """Return the maxima of flags over all ranks; collective over shards and replicas, and a barrier."""
        flags = torch.tensor(values, dtype=torch.uint8, device="cpu")
        for group in self._groups.both:
            control = group.backend.control
            flags = flags.to(control.place)
            control.all_reduce(flags, ReduceOp.MAX)
        maxima: list[int] = flags.tolist()
        return maxima

    def discard(self) -> None:
        """Drop gradients that were not averaged; local."""
        self.accumulates = False
        self.steps.restart()
        for gradient in self.gradients:
            gradient.discard()
        self._under_way.clear()
