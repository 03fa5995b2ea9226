"""The module wrapper of data parallelism (layer 5)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..bucketing import broadcast_coalesced
from ..errors import DtypeError
from ..group import ProcessGroup, default_group
from ..types import GradSyncStrategy
from ..wrapping.agreement import check_same_model
from ..wrapping.linear import LinearLayers
from ..wrapping.outputs import accumulates_into, leaf_below, outside_compile, tensors_in
from ..wrapping.state_names import hide_wrapper
from .join import Join
from .reducer import Reducer

__all__ = ["DistributedDataParallel"]

_REDUCE_DTYPES = (None, torch.bfloat16, torch.float16, torch.float32, torch.float64)


class DistributedDataParallel(nn.Module):
    """Trains one model on all ranks of a group: each rank computes a part of the batch, gradients are averaged.

    Parameters and buffers are copied from rank 0 when the model is wrapped. With equal parts, a step equals one of
    a single process on the joined batch, if the loss is a mean. Construction, backward and, for models with
    buffers, forward in training mode are collective: all ranks of the group must do them in the same order.

    Args:
        module: The model, built in the same way on all ranks, its parameters on devices that the group takes.
        process_group: The ranks; None means all.
        sync_strategy: When gradients are reduced.
        bucket_cap_mb: Gradients reduced together, in MiB; a larger gradient gets a bucket of its own.
        broadcast_buffers: Copy rank 0's buffers to all ranks before each forward in training mode.
        gradient_as_bucket_view: `param.grad` is a view of the bucket, which saves a copy of all gradients.
        find_unused_parameters: Parameters without a gradient in a backward count as zero on ranks that do not use
            them; unused on all ranks, their `grad` is left alone. Without this they are an error that names them.
        reduce_dtype: Dtype in which gradients are sent, torch.bfloat16 for example; sums are taken in float32.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: The model has nothing to train, or differs between ranks (naming the first parameter that does).

    Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        *,
        sync_strategy: GradSyncStrategy = GradSyncStrategy.OVERLAPPED,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_module(module)
        self._group = _checked_group(process_group)
        _check_options(sync_strategy, bucket_cap_mb, reduce_dtype)
        _check_flags(
            broadcast_buffers=broadcast_buffers,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
        )
        self.module = module
        self._broadcast_buffers = broadcast_buffers
        self._options: dict[str, Any] = {
            "strategy": sync_strategy,
            "cap_bytes": max(1, int(bucket_cap_mb * (1 << 20))),
            "as_view": gradient_as_bucket_view,
            "find_unused": find_unused_parameters,
            "reduce_dtype": reduce_dtype,
        }
        arguments = {
            "sync_strategy": sync_strategy.name,
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": broadcast_buffers,
            "find_unused_parameters": find_unused_parameters,
            "reduce_dtype": reduce_dtype,
        }
        check_same_model(module, self._group, arguments)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError("module: no parameter of it requires grad, so there is nothing to average")
        self.sync_parameters()
        self._reducer = self._make_reducer()
        hide_wrapper(self)

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks over which gradients are averaged."""
        return self._group

    @property
    def sync_strategy(self) -> GradSyncStrategy:
        """When gradients are reduced."""
        strategy: GradSyncStrategy = self._options["strategy"]
        return strategy

    @property
    def bucket_sizes(self) -> list[int]:
        """Elements of each gradient bucket, in the order in which they are reduced."""
        return self._reducer.bucket_sizes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; collective in training mode if it has buffers and they are broadcast."""
        self._before_forward()
        if torch.compiler.is_compiling():
            return self._after_forward(self.module(*args, **kwargs))
        with self._layers.direct():
            output = self.module(*args, **kwargs)
        return self._after_forward(output)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of backwards in this context accumulate on each rank; local.

        The next backward outside reduces what has accumulated, as does `sync_gradients()`.
        """
        before = self._reducer.enabled
        self._reducer.enabled = False
        try:
            yield
        finally:
            self._reducer.enabled = before

    @outside_compile
    def sync_gradients(self) -> None:
        """Average the gradients that have changed since they were last averaged, in place; collective.

        Does nothing if backward has averaged them already. A parameter without a gradient counts as zero with
        `find_unused_parameters`, and is an error otherwise.

        Raises:
            UnusedParameterError: Naming parameters that have no gradient.
        """
        self._reducer.sync()

    @outside_compile
    def sync_parameters(self) -> None:
        """Copy rank 0's parameters and buffers to all ranks, in place; collective."""
        self.broadcast_state(0)

    def join(
        self,
        *,
        enable: bool = True,
        divide_by_initial_world_size: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train with a different number of batches on each rank; collective context manager.

        A rank that leaves the loop takes part in the others' reductions with zeros until all have left, and then
        gets their parameters. Its optimizer has made fewer steps, which matters if its state is used further.

        Args:
            enable: False does nothing.
            divide_by_initial_world_size: Averages divide by the group's size; else by the ranks still training.
            throw_on_early_termination: Raise on all ranks as soon as one has left.

        Raises:
            RankFailedError: One has left, with `throw_on_early_termination`.
        """
        return Join(
            self,
            self._reducer,
            enable=enable,
            divide_by_initial=divide_by_initial_world_size,
            throw_on_early=throw_on_early_termination,
        )

    def broadcast_buffers_from(self, src: int) -> None:
        """Copy the buffers of rank `src` to all ranks, in place; collective."""
        # Through .data as batch norm itself does it, so that a backward through an earlier forward still works.
        buffers = [buffer.data for buffer in self.module.buffers() if buffer.numel()]
        broadcast_coalesced(self._group.backend, buffers, src)

    def broadcast_state(self, src: int) -> None:
        """Copy the parameters and buffers of rank `src` to all ranks, in place; collective."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        broadcast_coalesced(self._group.backend, [tensor.detach() for tensor in tensors if tensor.numel()], src)

    @property
    def current_reducer(self) -> Reducer:
        """What reduces the gradients at present."""
        return self._reducer

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """Copy the module; the copy averages over the same group. Collective: the copy has buckets of its own."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        memo[id(self._group)] = self._group
        memo[id(self._reducer)] = None
        copied.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        copied._reducer = copied._make_reducer()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "DistributedDataParallel cannot be pickled, since its group lives in this job only; "
            "save its .state_dict(), or pickle its .module"
        )

    # ---- inner workings -----------------------------------------------------------------------------------

    def _make_reducer(self) -> Reducer:
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._layers = LinearLayers(self.module)
        return Reducer(trained, self._group, **self._options, direct=self._layers.weights)

    @outside_compile
    def _before_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        self._reducer.settle()
        self._follow_changes()
        if self._broadcast_buffers and self.training and self._reducer.enabled:
            self._sync_buffers()

    def _sync_buffers(self) -> None:
        if any(buffer.numel() for buffer in self.module.buffers()):
            active = [0] if self._reducer.announce is None else self._reducer.announce("buffers")
            self.broadcast_buffers_from(active[0])

    def _follow_changes(self) -> None:
        """Lay the gradients out anew if parameters were frozen, unfrozen or converted since."""
        if not self._reducer.fits([p for p in self.module.parameters() if p.requires_grad]):
            reducer = self._make_reducer()
            reducer.take_over(self._reducer)
            self._reducer.detach()
            self._reducer = reducer

    @outside_compile
    def _after_forward(self, output: Any) -> Any:
        """See to it that the end of the outermost backward is noticed, also when checkpointing nests others."""
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad and not tensor.is_leaf:  # a leaf would gather a hook in every forward
                    tensor.register_hook(partial(self._open_backward, leaf_below(tensor)))
        return output

    @outside_compile
    def _open_backward(self, leaf: Node | None, _gradient: Tensor) -> None:
        if accumulates_into(leaf):
            self._reducer.open_backward()


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise ValueError(
                f"module: {name or 'it'} is wrapped in DistributedDataParallel already, and its gradients would be "
                "averaged twice; wrap the module inside, which is its .module"
            )


def _checked_group(group: object) -> ProcessGroup:
    if group is None:
        return default_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"process_group: expected an axonmpi.ProcessGroup or None, got {type(group).__name__}")
    _ = group.backend  # ValueError on ranks outside it
    return group


def _check_options(strategy: object, bucket_cap_mb: object, dtype: object) -> None:
    if not isinstance(strategy, GradSyncStrategy):
        raise TypeError(f"sync_strategy: expected an axonmpi.GradSyncStrategy, got {strategy!r}")
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, int | float):
        raise TypeError(f"bucket_cap_mb: expected a number of MiB, got {bucket_cap_mb!r}")
    if not 0 < bucket_cap_mb < math.inf:
        raise ValueError(f"bucket_cap_mb: expected a positive, finite number of MiB, got {bucket_cap_mb!r}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"reduce_dtype: expected a torch.dtype or None, got {dtype!r}")
    if dtype not in _REDUCE_DTYPES:
        raise DtypeError(
            "reduce_dtype: expected torch.bfloat16, torch.float16, torch.float32, torch.float64 or None, "
            f"got {dtype}"
        )


def _check_flags(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, got {value!r}")
