"""The module wrapper of data parallelism (layer 5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..bucketing import broadcast_coalesced
from ..group import ProcessGroup, default_group
from ..types import GradSyncStrategy
from .agreement import check_same_model
from .join import Join
from .reducer import Reducer

__all__ = ["DistributedDataParallel"]

_PREFIX = "module."


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _left_as_it_is(method: _Method) -> _Method:
    """Keep torch.compile from tracing communication into a model's graph, without importing the compiler."""
    method.__dict__["_torchdynamo_disable"] = True
    return method


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
        _check_options(module, sync_strategy, bucket_cap_mb, reduce_dtype)
        self.module = module
        self._group = default_group() if process_group is None else process_group
        self._broadcast_buffers = broadcast_buffers
        self._options: dict[str, Any] = {
            "strategy": sync_strategy,
            "cap_bytes": int(bucket_cap_mb * (1 << 20)),
            "as_view": gradient_as_bucket_view,
            "find_unused": find_unused_parameters,
            "reduce_dtype": reduce_dtype,
        }
        check_same_model(module, self._group)
        self.sync_parameters()
        self._reducer = self._make_reducer()
        nn.Module.register_state_dict_post_hook(self, _strip_prefix)
        nn.Module.register_load_state_dict_pre_hook(self, _add_prefix)

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
        return self._after_forward(self.module(*args, **kwargs))

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

    def sync_gradients(self) -> None:
        """Average the gradients that have changed since they were last averaged, in place; collective.

        Does nothing if backward has averaged them already. A parameter without a gradient counts as zero with
        `find_unused_parameters`, and is an error otherwise.

        Raises:
            UnusedParameterError: Naming parameters that have no gradient.
        """
        self._reducer.sync()

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
        buffers = [buffer for buffer in self.module.buffers() if buffer.numel()]
        broadcast_coalesced(self._group.backend, buffers, src)

    def broadcast_state(self, src: int) -> None:
        """Copy the parameters and buffers of rank `src` to all ranks, in place; collective."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        broadcast_coalesced(self._group.backend, [tensor.detach() for tensor in tensors if tensor.numel()], src)

    @property
    def current_reducer(self) -> Reducer:
        """What reduces the gradients at present."""
        return self._reducer

    # ---- inner workings -----------------------------------------------------------------------------------

    def _make_reducer(self) -> Reducer:
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        return Reducer(trained, self._group, **self._options)

    @_left_as_it_is
    def _before_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        self._reducer.forget_backward()
        self._follow_freezing()
        if self._broadcast_buffers and self.training and self._reducer.enabled:
            self._sync_buffers()

    def _sync_buffers(self) -> None:
        if any(buffer.numel() for buffer in self.module.buffers()):
            active = [0] if self._reducer.announce is None else self._reducer.announce("buffers")
            self.broadcast_buffers_from(active[0])

    def _follow_freezing(self) -> None:
        """Lay the gradients out anew if parameters were frozen or unfrozen since."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        reduced = self._reducer.parameters
        if len(trained) != len(reduced) or any(a is not b for a, b in zip(trained, reduced, strict=True)):
            before = self._reducer
            before.detach()
            self._reducer = self._make_reducer()
            self._reducer.enabled = before.enabled
            self._reducer.announce = before.announce

    @_left_as_it_is
    def _after_forward(self, output: Any) -> Any:
        """See to it that the end of the outermost backward is noticed, also when checkpointing nests others."""
        if torch.is_grad_enabled() and self._reducer.enabled:
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._open_backward)
        return output

    @_left_as_it_is
    def _open_backward(self, grad: Tensor) -> None:
        self._reducer.open_backward()


def _check_options(module: object, strategy: object, bucket_cap_mb: float, dtype: torch.dtype | None) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    if not isinstance(strategy, GradSyncStrategy):
        raise TypeError(f"sync_strategy: expected an axonmpi.GradSyncStrategy, got {strategy!r}")
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb: expected a positive number of MiB, got {bucket_cap_mb!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"reduce_dtype: expected a floating-point torch.dtype or None, got {dtype!r}")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("the module has no parameter that requires grad, so there is nothing to average")


def _tensors(output: Any) -> Iterator[Tensor]:
    """Find the tensors in a model's output: nested tuples, lists, dicts and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from _tensors(getattr(output, field.name))


def _strip_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give state-dict entries the names that they have in the module that was wrapped."""
    inner = prefix + _PREFIX
    for key in [key for key in state if key.startswith(inner)]:
        state[prefix + key[len(inner) :]] = state.pop(key)


def _add_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Turn the names of a state dict without the wrapper into those with it."""
    names = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    inner = {name.removeprefix(_PREFIX) for name in names}
    for key in [key for key in state if key.startswith(prefix)]:
        if key[len(prefix) :] in inner or not key[len(prefix) :].startswith(_PREFIX):
            state[prefix + _PREFIX + key[len(prefix) :]] = state.pop(key)
