"""Whether all ranks have the same model.

Asked once, when a model is wrapped: ranks whose models differ would average gradients of different parameters, and
ranks whose arguments differ would wait for reductions that the others do not make.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from ..groups.world import ProcessGroup
from ..utils.text import lines_of_ranks, ranks_by_text
from .divided_parameters import check_not_divided

__all__ = ["check_batch_norms", "check_same_model", "gradient_strides"]

Entry = tuple[str, str]


def check_same_model(module: nn.Module, group: ProcessGroup, arguments: Mapping[str, object]) -> None:
    """Raise on every rank unless names, shapes and dtypes of parameters and buffers agree; collective.

    Parameters that are divided over ranks of the group have the same shapes, and are refused for all that.

    Args:
        module: This rank's model.
        group: The ranks to compare.
        arguments: What else has to agree, by name.

    Raises:
        ValueError: Naming the first argument, parameter or buffer that differs, and the ranks; or a module whose
            parameters are divided over them; or a `SyncBatchNorm`; or a parameter without a shape.
    """
    entries = _entries(module, arguments)
    digest = hashlib.sha256(repr(entries).encode()).digest()[:16]
    told = group.all_gather_object((digest, _problem(module, group)))
    problem = next((problem for _, problem in told if problem), "")
    if problem:
        raise ValueError(problem)
    if len({digest for digest, _ in told}) > 1:
        raise ValueError(_first_difference(group.all_gather_object(entries)))
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run one forward before wrapping the model")


def check_batch_norms(module: nn.Module) -> None:
    """Raise if a batch norm is to use all ranks' batches and has no way to them; local.

    Raises:
        ValueError: Naming the first `torch.nn.SyncBatchNorm`; it communicates by `torch.distributed` alone.
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


def _problem(module: nn.Module, group: ProcessGroup) -> str:
    try:
        check_not_divided(module, group)
        check_batch_norms(module)
    except ValueError as error:
        return str(error)
    return ""


def _entries(module: nn.Module, arguments: Mapping[str, object]) -> list[Entry]:
    entries = [(f"argument {name!r}", str(value)) for name, value in arguments.items()]
    for name, parameter in module.named_parameters():
        frozen = "" if parameter.requires_grad else ", frozen"
        entries.append((f"parameter {name!r}", _description(parameter) + frozen))
    entries += [(f"buffer {name!r}", _description(buffer)) for name, buffer in module.named_buffers()]
    return entries


def _description(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return f"{tensor.dtype} without a shape yet"
    strides = "" if tensor.is_contiguous() else f", strides {list(gradient_strides(tensor))}"
    return f"{tensor.dtype} {list(tensor.shape)}{strides}"


def _first_difference(all_entries: Sequence[Sequence[Entry]]) -> str:
    longest = max(len(entries) for entries in all_entries)
    for position in range(longest):
        seen = [entries[position] if position < len(entries) else None for entries in all_entries]
        if len(set(seen)) > 1:
            break
    texts = ["no further parameter or buffer" if entry is None else " ".join(entry) for entry in seen]
    ranks_of = ranks_by_text([text.replace("torch.", "") for text in texts])
    return (
        "the model is not the same on all ranks; the first difference is\n  "
        + lines_of_ranks(ranks_of.items())
        + "\nBuild and wrap the model in the same way on every rank."
    )


def gradient_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the parameter's own strides where it fills its memory, else those of its shape and order of dims."""
    return torch.empty_like(parameter, device="meta").stride()
