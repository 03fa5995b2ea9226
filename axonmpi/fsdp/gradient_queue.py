"""The queue of FSDP's reduce-scatters: complete gradients go out in one order, and average into shards.

    full.grad        | weight ........ | bias |     the gradient that autograd leaves, on each rank
                          reduce-scatter
    sharded.grad         | weight |                 this rank's shard of the average over all ranks

Replicas average their shards after that. Gradients are reduced in one order on all ranks, in whatever order they
become complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..across_ranks.sharded_parameters import Axis, axes_of, mark_replicated
from ..backends import wide_dtype
from ..groups.process_group import ProcessGroup
from ..types import ReduceOp, Work
from ..utils.torch_internals import hooks_on, plain_tensors
from ..utils.waiting import network_backoff, wait_until
from ..wrapping.gradient_hooks import wait_for_all
from ..wrapping.optimizer_hooks import mark_gradients, ordinary_gradients
from ..wrapping.steps import STEP_FLAGS, Steps
from .flat_parameter import FlatParameter, ShardedParameter
from .groups import ShardingGroups
from .offload import Files, PinnedMemory
from .unit import Unit


class FlatGradient:
    """Gradient of a flat parameter, and its reduction.

    Args:
        unit: The unit of the parameter.
        flat: The flat parameter.
        sum_dtype: Dtype in which gradients are summed and rounded.
        replicas: The ranks with the same shard; None if there are no others.
        offload: Memory of the gradient's shard; None: that of the device.

    Attributes:
        shard: [S] the gradient's shard; None before the first reduction.
        launched: True if the reduction of this backward has begun.
        arrived: Parameters that backward has come to.
        defined: Parameters with a gradient when the reduction began.
        nodes: Autograd's nodes of the full parameters, which forgets nodes that nobody keeps.
        full_bytes: Size of the reduction's input.
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
        self._spans = flat.spans()
        shards = [parameter.sharded for parameter in flat.parameters]
        if replicas is not None:
            self._axis = Axis(replicas, replicas.size)  # kept: a parameter's axis lasts as long as this reference
            mark_replicated(shards, self._axis)
        self._divided = [shard for shard in shards if axes_of(shard)]
        self.full_bytes = sum(flat.sizes) * self._wire_dtype.itemsize
        self.reset()

    def reset(self) -> None:
        """Forget the gradients of a backward and their reduction; local."""
        self.launched = False
        self.arrived: set[ShardedParameter] = set()
        self.defined: set[ShardedParameter] = set()
        self._target: Tensor | None = None
        self._work: Work | None = None
        self._copied: Any = None

    @property
    def is_complete(self) -> bool:
        """True if each parameter that requires a gradient has one."""
        return all(p in self.arrived or not p.sharded.requires_grad for p in self.flat.parameters)

    def held(self) -> list[ShardedParameter]:
        """Return the parameters with a gradient that was not reduced; local."""
        return [parameter for parameter in self.flat.parameters if parameter.full.grad is not None]

    def launch(self, *, async_op: bool) -> None:
        """Begin to reduce the gradients, with zeros for missing ones; collective."""
        self.launched = True
        self.defined.update(self.held())
        self._target = self._make_target()
        self._work = self.flat.group.backend.reduce_scatter_into(
            self._target,
            [self._wire(span) if isinstance(span, ShardedParameter) else span for span in self._spans],
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
        """Return a parameter's gradient in the dtype of the reduction; if it has none, its number of elements."""
        gradient = parameter.full.grad
        return parameter.numel if gradient is None else gradient.detach().to(self._wire_dtype)

    def wait(self) -> None:
        """Wait until this thread may use the result of the reduction, if one is under way; local."""
        if self._work is not None:
            self._work.wait(self.flat.group.backend.timeout)

    def let_go(self) -> None:
        """Block this thread until the reduction, if one is under way, has read the full gradients; local."""
        self.wait()
        if self._work is not None:
            wait_until(self._work.done, network_backoff())

    def _download(self) -> None:
        """Begin to copy the reduced gradients to the CPU, if their shard lies there; local."""
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

        Users' hooks on the sharded parameters are called here, as autograd only comes to the full ones.

        Args:
            used: For each parameter, nonzero if any rank has a gradient.
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

    def _add(self, parameter: ShardedParameter, average: Tensor) -> None:
        if parameter.sharded.grad is not None:
            parameter.sharded.grad.add_(average)
            return
        home = parameter.view_in(self._shard_memory())
        if home.data_ptr() != average.data_ptr():
            home.copy_(average)
        parameter.set_gradient(home)

    @property
    def _is_fresh(self) -> bool:
        """True if there are no sharded gradients, to which the next ones would be added."""
        return all(parameter.sharded.grad is None for parameter in self.flat.parameters)

    def _make_target(self) -> Tensor:
        flat = self.flat
        if flat.pinned is None and self._is_fresh and self._sum_dtype == flat.dtype:
            return self._shard_memory()
        return torch.empty(flat.shard.shape, dtype=self._sum_dtype, device=flat.device)

    def _shard_memory(self) -> Tensor:
        if self.shard is None:
            like = self.flat.shard.detach()
            offload = self._offload
            self.shard = torch.empty_like(like) if offload is None else offload.zeros(like.shape, like.dtype)
        return self.shard


class GradientQueue:
    """The gradients of a model, in the order in which all ranks reduce them.

    Args:
        gradients: Gradients of all trained parameters.
        groups: The ranks.
        most_bytes: Largest size of full gradients in reductions under way, in bytes, for a model with gathered
            units; None for a model without.

    Attributes:
        accumulates: True if a backward has left gradients that were not averaged.
        steps: Number of the model's training step.
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
        """Reduce complete gradients of a model without gathered units; collective.

        With gathered units `launch_after` does, since all ranks gather and reduce in one order.
        """
        if self._most_bytes is None:
            self._launch_while(lambda gradient: gradient.is_complete)

    def launch_after(self, event: int) -> None:
        """Reduce gradients of units whose forward began after an event, since their backward is over; collective.

        All ranks call this at the same point of backward, also a rank without a gradient of some parameter.
        """
        self._launch_while(lambda gradient: gradient.unit.first_event > event)

    def _launch_while(self, is_ready: Callable[[FlatGradient], bool]) -> None:
        """Begin reductions in order, up to the first gradient that is not ready; collective."""
        for gradient in self.gradients:
            if gradient.launched:
                continue
            if not is_ready(gradient):
                break
            self._under_way.append(gradient)
            if self._most_bytes is not None:  # waiting is safe only if all ranks gather and reduce in one order
                while sum(each.full_bytes for each in self._under_way) > self._most_bytes:
                    self._under_way.popleft().let_go()
            gradient.launch(async_op=self._overlaps)

    def keep(self) -> None:
        """Let the gradients of a backward accumulate; local."""
        self.accumulates = True
        for gradient in self.gradients:
            gradient.arrived.clear()

    def reduce_rest(self) -> None:
        """Reduce the remaining gradients, compare which parameters have any, and add the averages; collective."""
        held = [set(gradient.held()) for gradient in self.gradients]
        # Reentrant checkpointing completes the gradient of a parameter twice, if two checkpoints share it.
        late = any(gradient.launched and holds for gradient, holds in zip(self.gradients, held, strict=True))
        used: list[int] = [
            parameter in holds or parameter in gradient.defined
            for gradient, holds in zip(self.gradients, held, strict=True)
            for parameter in gradient.flat.parameters
        ]
        try:
            self._launch_while(lambda _: True)
            wait_for_all(gradient.wait for gradient in self.gradients)
            flags = self._on_any_rank([*self.steps.reduce(), late, *used])
            self.accumulates = False
            self.steps.check(flags[:STEP_FLAGS], self._groups.both)
            is_late, *used = flags[STEP_FLAGS:]
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
