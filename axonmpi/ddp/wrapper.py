"""The module wrapper of data parallelism, used as `torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..across_ranks.model_checks import check_same_buffers, check_same_model
from ..across_ranks.sharded_parameters import check_not_sharded, mark_sharded_layers
from ..backends import broadcast_coalesced
from ..errors import CollectiveMismatchError, DtypeError
from ..groups.process_group import ProcessGroup
from ..groups.world import group_of_this_rank
from ..record import Phase, enter_phase
from ..types import GradSyncStrategy
from ..utils.arguments import check_flags, member, number
from ..utils.torch_internals import in_backward, outside_compile
from ..wrapping.gradient_hooks import accumulating, watch_output
from ..wrapping.state_names import Wrapper
from .join import Join, Stateful
from .reducer import Reducer

_BUFFERS = "the model's buffers"
_REDUCE_DTYPES = (None, torch.bfloat16, torch.float16, torch.float32, torch.float64)


class DistributedDataParallel(Wrapper):
    """Trains one model on all ranks of a group: each rank computes a part of the batch, gradients are averaged.

    Construction copies parameters and buffers from rank 0. If the ranks' parts of a batch have equal sizes and the
    loss is a mean, a step equals the step of a single process on the full batch. Construction, backward and, for
    models with buffers, forward in training mode are collective: all ranks must call them in the same order.

    Args:
        module: The model, built in the same way on all ranks, its parameters on devices that the group takes.
        process_group: The ranks; None means all.
        sync_strategy: The time of reductions; a `GradSyncStrategy`, or its name.
        bucket_cap_mb: Size of gradients reduced together, in MiB; a larger gradient gets a bucket of its own.
        broadcast_buffers: Copy rank 0's buffers to all ranks before each forward in training mode.
        gradient_as_bucket_view: Make `param.grad` a view of the bucket, which saves a copy of all gradients.
        find_unused_parameters: Let parameters without a gradient count as zeros on a rank; unused on all ranks,
            their `grad` is left alone. If False, they are an error that names them.
        reduce_dtype: Dtype of communication, torch.bfloat16 for example; 16-bit types are summed in float32.

    Attributes:
        module: The wrapped model.
        process_group: The ranks over which gradients are averaged.
        sync_strategy: The time of reductions.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: The model has no parameter to train, or differs between ranks (names the first difference).

    Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        *,
        sync_strategy: GradSyncStrategy | str = GradSyncStrategy.OVERLAPPED,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.check_module(
            module,
            ", and its gradients would be averaged twice; wrap the module inside, which is its .module",
        )
        self.process_group = group_of_this_rank(process_group)
        self.sync_strategy = member("sync_strategy", GradSyncStrategy, sync_strategy)
        _check_options(bucket_cap_mb, reduce_dtype)
        check_flags(
            broadcast_buffers=broadcast_buffers,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
        )
        self.module = module
        self._equal_buffers: list[tuple[int, int]] | None = None  # versions after the last copy from rank 0
        self._broadcast_buffers = broadcast_buffers
        self._options: dict[str, Any] = {
            "strategy": self.sync_strategy,
            "cap_bytes": max(1, int(bucket_cap_mb * (1 << 20))),
            "as_view": gradient_as_bucket_view,
            "find_unused": find_unused_parameters,
            "reduce_dtype": reduce_dtype,
        }
        arguments = {
            "sync_strategy": self.sync_strategy.name,
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": broadcast_buffers,
            "find_unused_parameters": find_unused_parameters,
            "reduce_dtype": reduce_dtype,
        }
        check_same_model(module, self.process_group, arguments)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError("module: no parameter of it requires grad, so there is nothing to average")
        self.sync_parameters()
        mark_sharded_layers(module)
        self._reducer = Reducer(_trained(module), self.process_group, **self._options)

    @property
    def bucket_sizes(self) -> list[int]:
        """Elements of each gradient bucket, in the order in which they are reduced."""
        return self._reducer.bucket_sizes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; collective in training mode if it has buffers and they are broadcast."""
        return self._run(self.module, args, kwargs)

    def call_method(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module as its forward is called; collective as that is."""
        return self._run(getattr(self.module, name), args, kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let gradients of forwards in this context accumulate on each rank; local.

        The forward decides, as in torch: its backward may run later. The accumulated gradients are reduced by the
        next backward through a forward outside, or by `sync_gradients()`. After a call of `.module` itself, which
        the wrapper does not see, the backward must be in the context.
        """
        return accumulating(self._reducer)

    @outside_compile
    def sync_gradients(self) -> None:
        """Average the gradients that backward has changed since the last average, in place; collective.

        Does nothing after a backward that has averaged them, even if they were changed by hand since: use
        `axonmpi.sync_gradients` for these. A parameter without a gradient counts as zeros with
        `find_unused_parameters`, and is an error otherwise.

        Raises:
            UnusedParameterError: Names the parameters without a gradient.
        """
        self._reducer.sync()

    @outside_compile
    def sync_parameters(self) -> None:
        """Copy rank 0's parameters and buffers to all ranks, in place; collective."""
        self.broadcast_state(0)

    def join(
        self,
        *state: Stateful,
        enable: bool = True,
        divide_by_initial_world_size: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[object]:
        """Train with a different number of batches on each rank; collective context manager.

        A rank that leaves the loop takes part in the others' reductions with zeros until all have left. Then it
        gets the parameters, buffers and `state` of a rank that trained to the end. A stateful optimizer that is not
        in `state` refuses its next step, since the ranks' steps would differ from then on.

        Args:
            *state: Further objects that change from batch to batch, on all ranks in the same order: the optimizer,
                a learning rate scheduler, a gradient scaler, anything with `state_dict()` and `load_state_dict()`.
            enable: False does nothing.
            divide_by_initial_world_size: Divide sums by the group's size; if False, by the number of ranks still
                training.
            throw_on_early_termination: Raise on all ranks as soon as one has left.

        Raises:
            TypeError: An item of `state` has no state dict.
            RankFailedError: A rank has left, with `throw_on_early_termination`.
        """
        check_flags(
            enable=enable,
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )
        joined = Join(
            self.module,
            self._reducer,
            state,
            self.broadcast_state,
            self.broadcast_buffers_from,
            divide_by_initial=divide_by_initial_world_size,
            throw_on_early=throw_on_early_termination,
        )
        return joined if enable else nullcontext()

    def broadcast_buffers_from(self, src: int) -> None:
        """Copy the buffers of rank `src` to all ranks, in place; collective if there are any."""
        buffers = list(self.module.buffers())
        # By .data, as batch norm writes its statistics, so that a backward through an earlier forward still works.
        if sent := [buffer.data for buffer in buffers if buffer.numel()]:
            try:
                broadcast_coalesced(self.process_group.backend, sent, src, label=_BUFFERS)
            except CollectiveMismatchError as error:
                self._reducer.steps.restart()
                if error.calls and all(_BUFFERS in call for call in error.calls):
                    check_same_buffers(self.module, self.process_group)
                raise
        self._equal_buffers = _versions(buffers)

    def broadcast_state(self, src: int) -> None:
        """Copy the parameters and buffers of rank `src` to all ranks, in place; collective."""
        check_not_sharded(self.module, self.process_group)  # layers may have been divided after wrapping
        tensors = [*self.module.parameters(), *self.module.buffers()]
        broadcast_coalesced(self.process_group.backend, [t.detach() for t in tensors if t.numel()], src)
        self._equal_buffers = _versions(self.module.buffers())

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """Copy the module, with new buckets and the same group; collective."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        memo[id(self._reducer)] = None
        copied.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        copied._equal_buffers = None
        copied._reducer = Reducer(_trained(copied.module), copied.process_group, **copied._options)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "DistributedDataParallel cannot be pickled, since its group lives in this job only; "
            "save its .state_dict(), or pickle its .module"
        )

    # ---- internals ----------------------------------------------------------------------------------------

    def _run(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step, output = self._before_forward(), None
        try:
            output = method(*args, **kwargs)
        finally:
            self._after_forward(output, step)
        return output

    @outside_compile
    def _before_forward(self) -> Callable[..., None] | None:
        enter_phase(Phase.FORWARD)
        if not self.training:
            self._warn_of_own_buffers()
        if not torch.is_grad_enabled():
            return None
        self._reducer.report_failed_backward()
        self._follow_changes()
        counts = self.training and self._reducer.averages and not in_backward()
        step = self._reducer.steps.begin() if counts else None
        sends = self._broadcast_buffers and self.training and self._reducer.enabled
        if sends and any(buffer.numel() for buffer in self.module.buffers()):
            active = [0] if self._reducer.report_event is None else self._reducer.report_event("buffers")
            self.broadcast_buffers_from(active[0])
        return step

    def _warn_of_own_buffers(self) -> None:
        """Warn in the first evaluation after training if this rank's buffers differ from rank 0's."""
        equal, self._equal_buffers = self._equal_buffers, None
        if equal is None or not self._broadcast_buffers or self.process_group.rank == 0:
            return
        if equal != _versions(self.module.buffers()):
            warnings.warn(
                "this rank's buffers are no longer rank 0's, as running means of a batch norm change with each "
                "rank's own batches, so the model may give another result than on rank 0: call sync_parameters() "
                "on all ranks before evaluation, or evaluate on rank 0 alone",
                stacklevel=2,
            )

    def _follow_changes(self) -> None:
        """Make new buckets if parameters were added, frozen, unfrozen or converted since the last forward."""
        shown = list(self.module.parameters())
        if not all(isinstance(parameter, nn.Parameter) for parameter in shown):
            return  # torch.func.functional_call shows tensors in place of parameters
        if self._reducer.fits([parameter for parameter in shown if parameter.requires_grad]):
            return
        check_not_sharded(self.module, self.process_group)
        added = self._reducer.follow(_trained(self.module))
        broadcast_coalesced(self.process_group.backend, [p.detach() for p in added if p.numel()], 0)

    @outside_compile
    def _after_forward(self, output: Any, step: Callable[..., None] | None) -> None:
        """Hook the outputs, so that the reducer notices the outermost backward if checkpointing nests others."""
        enter_phase(Phase.OTHER)
        if torch.is_grad_enabled():
            is_watched = watch_output(output, partial(self._begin_backward, self._reducer.enabled, step))
            if step is not None and not is_watched:
                step(in_backward=False)

    @outside_compile
    def _begin_backward(self, reduces: bool, step: Callable[..., None] | None, accumulates: bool) -> None:
        if step is not None:
            step(in_backward=accumulates)
        if accumulates:
            enter_phase(Phase.BACKWARD)
            self._reducer.begin_backward(reduces=reduces)


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def _versions(buffers: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return numbers that differ after a buffer was changed or replaced; local."""
    return [(id(buffer), 0 if buffer.is_inference() else buffer._version) for buffer in buffers]


def _check_options(bucket_cap_mb: object, dtype: object) -> None:
    if not 0 < number("bucket_cap_mb", bucket_cap_mb) < math.inf:
        raise ValueError(f"bucket_cap_mb: expected a positive, finite number of MiB, got {bucket_cap_mb!r}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"reduce_dtype: expected a torch.dtype or None, got {dtype!r}")
    if dtype not in _REDUCE_DTYPES:
        raise DtypeError(
            "reduce_dtype: expected torch.bfloat16, torch.float16, torch.float32, torch.float64 or None, "
            f"got {dtype}"
        )
