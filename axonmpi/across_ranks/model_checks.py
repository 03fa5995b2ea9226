"""Checks that a wrapper makes of its model: the same on all ranks, without layers that cannot be distributed.

Ranks whose models differ would average gradients of different parameters; ranks whose arguments differ would wait
for reductions that the others do not make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from ..errors import CollectiveMismatchError
from ..groups.process_group import ProcessGroup
from .comparison import raised_on_all, same_on_all_ranks
from .sharded_parameters import check_not_sharded


def check_same_model(module: nn.Module, group: ProcessGroup, arguments: Mapping[str, object]) -> None:
    """Raise on all ranks unless names, shapes and dtypes of parameters and buffers agree; collective.

    Args:
        module: This rank's model.
        group: The ranks to compare.
        arguments: Further values that must agree, by name.

    Raises:
        ValueError: Names the first argument, parameter or buffer that differs, and the ranks; or a module whose
            parameters are sharded over them; or a `SyncBatchNorm`, an embedding with `max_norm`, or a parameter
            without a shape.
    """
    with raised_on_all(group.backend):
        check_not_sharded(module, group)
        check_batch_norms(module)
        if group.size > 1:
            _check_embeddings(module)
    problem, todo = (
        "the model is not the same on all ranks",
        "Build and wrap the model in the same way on every rank.",
    )
    same_on_all_ranks(group.backend, _description(module, arguments), problem, todo)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run one forward before wrapping the model")


def check_same_buffers(module: nn.Module, group: ProcessGroup) -> None:
    """Raise on all ranks unless names, shapes and dtypes of buffers agree; collective.

    Raises:
        CollectiveMismatchError: Names the first buffer that differs, and the ranks.
    """
    texts = [f"buffer {name!r} {_layout(buffer)}" for name, buffer in module.named_buffers()]
    todo = (
        "Call the same model on every rank, let its buffers change alike, or keep each rank's own with "
        "broadcast_buffers=False."
    )
    same_on_all_ranks(group.backend, texts, "buffers are not the same on all ranks", todo, CollectiveMismatchError)


def check_batch_norms(module: nn.Module) -> None:
    """Raise if a batch norm needs the batches of all ranks and cannot get them; local.

    Raises:
        ValueError: Names the first `torch.nn.SyncBatchNorm`; it communicates by `torch.distributed` alone.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise ValueError(
                f"module: {name or 'it'} is a torch.nn.SyncBatchNorm, which without torch.distributed is an "
                "ordinary batch norm of each rank's own batch; use torch.nn.BatchNorm1d, 2d or 3d if that is "
                "meant, and a norm that does not depend on the batch if not, such as torch.nn.GroupNorm"
            )


def _check_embeddings(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ValueError(
                f"module: {name or 'it'} is a {type(part).__name__} with max_norm={part.max_norm}, whose forward "
                "changes the rows of this rank's batch, so that ranks drift apart; use max_norm=None, and after "
                "each step weight.renorm_(norm_type, 0, max_norm) under torch.no_grad(), with FSDP within "
                "`with fsdp.full_parameters():`"
            )


def _description(module: nn.Module, arguments: Mapping[str, object]) -> Iterator[str]:
    for name, value in arguments.items():
        yield f"argument {name!r} {value}"
    for name, parameter in module.named_parameters():
        yield f"parameter {name!r} {_layout(parameter)}{'' if parameter.requires_grad else ', frozen'}"
    for name, buffer in module.named_buffers():
        yield f"buffer {name!r} {_layout(buffer)}"
    yield "no further parameter or buffer"


def _layout(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if is_lazy(tensor):
        return f"{dtype} without a shape yet"
    strides = "" if tensor.is_contiguous() else f", strides {list(gradient_strides(tensor))}"
    return f"{dtype} {list(tensor.shape)}{strides}"


def gradient_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: the parameter's own, or without its gaps the same order of dims."""
    return torch.empty_like(parameter, device="meta").stride()
