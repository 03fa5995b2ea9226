"""Full state dicts of models with parallel layers, and back.

    this rank's state dict ── full_state_dict ──> full state dict, the same on all ranks
    this rank's state dict <── local_state_dict ── full state dict

Names are the same in both. Any tensors with the shapes of parameters can be joined under their names: values,
gradients, the averages of an optimizer. DDP and FSDP on another mesh axis wrap the divided model: their full
parameters are this rank's shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..across_ranks.comparison import first_rank_does, raised_on_all, same_on_all_ranks
from ..groups.process_group import ProcessGroup
from ..utils.arguments import check_flags
from .shards import Shard, Sharded, gather_shards, scatter_shards


@torch.no_grad()
def full_state_dict(
    module: nn.Module, state: Mapping[str, Any] | None = None, *, rank0_only: bool = False
) -> dict[str, Any]:
    """Return the state dict of the model as it would be on one rank; collective, one tensor after the other.

    Args:
        module: A model with parallel layers, also one wrapped in DDP or FSDP.
        state: This rank's shards by the names of the model's parameters, such as gradients, or the result of
            `FullyShardedDataParallel.full_state_dict()`; None means the model's own state dict. Values of
            replicated parameters and None are returned unchanged.
        rank0_only: Only rank 0 of the model's group gets it; the others get an empty dict.

    Returns:
        The full state dict, with new tensors for sharded parameters; empty if `state` is empty on all ranks.

    Raises:
        ValueError: The ranks' names differ, or a tensor is not a shard of its parameter; on all ranks.
    """
    check_flags(rank0_only=rank0_only)
    module = _unwrapped(module)
    group, shards = _cuts(module)
    state = module.state_dict() if state is None else state
    sharded = {name: shards[name] for name, value in state.items() if name in shards and value is not None}
    with raised_on_all(group.backend):
        _check_fit("state", sharded, state, full=False)
    problem = "state: expected the same names in the same order on all ranks"
    same_on_all_ranks(group.backend, sharded, problem, "Give the state of the same model on every rank.")
    result = dict(state)
    for name, shard in sharded.items():
        part = state[name].detach()
        if not rank0_only:
            result[name] = gather_shards(part, shard, group)
        elif (parts := group.gather(part[None])) is not None:
            result[name] = shard.join([one[0] for one in parts])
    return result if not rank0_only or group.rank == 0 else {}


def local_state_dict(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's state dict from a full one; local.

    Args:
        module: A model with parallel layers, also one wrapped in DDP or FSDP.
        state_dict: Of the model before it was divided, or gradients and the like by the names of parameters.

    Returns:
        The same names, with new tensors for sharded parameters, for `load_state_dict` of the model or
        `FullyShardedDataParallel.load_full_state_dict`.

    Raises:
        ValueError: A tensor has not the shape of its parameter.
    """
    group, shards = _cuts(_unwrapped(module))
    sharded = {name: shards[name] for name, value in state_dict.items() if name in shards and value is not None}
    _check_fit("state_dict", sharded, state_dict, full=True)
    own = {name: shard.cut(state_dict[name].detach(), group.rank) for name, shard in sharded.items()}
    return {**state_dict, **own}


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any] | None, *, strict: bool = True) -> None:
    """Load a full state dict from rank 0; collective, one tensor after the other.

    Args:
        module: A model with parallel layers, not wrapped in FSDP: use `local_state_dict` there.
        state_dict: On rank 0 of the model's group; ignored on other ranks, may be None there.
        strict: Missing and unexpected names are an error.

    Raises:
        ValueError: `state_dict` is no mapping, names or shapes do not fit, or the model is on the meta device; on
            all ranks, and nothing is changed.
    """
    check_flags(strict=strict)
    module = _unwrapped(module)
    group, shards = _cuts(module)
    own = module.state_dict()
    given = state_dict if group.rank == 0 and state_dict is not None else {}

    def checked_names() -> list[str]:
        _check_loadable(own, shards, state_dict, strict=strict)
        return [name for name in own if name in given]

    names = first_rank_does(group.backend, checked_names)
    received = {name: _receive(own[name], shards.get(name), given.get(name), group) for name in names}
    module.load_state_dict(received, strict=False)


def _receive(own: Any, shard: Shard | None, full: Any, group: ProcessGroup) -> Any:
    """Return this rank's shard of a value of rank 0; collective."""
    is_first = group.rank == 0
    if not isinstance(own, Tensor):
        return group.broadcast_object(full)
    if shard is None:
        value = full.to(own).clone() if is_first else torch.empty_like(own)
        group.broadcast(value)
        return value
    return scatter_shards(full.to(own) if is_first else None, shard, group)


def copies(module: nn.Module) -> dict[str, int]:
    """Return the number of ranks in the model's group that have the same gradients of each parameter; local.

    A norm over the full model divides by it, so that each element counts once.

    Args:
        module: A model with parallel layers, also one wrapped in DDP or FSDP.

    Returns:
        The number by the parameter's name in the model inside such wrappers: 1 for a sharded parameter without
        copies, the size of the group for a replicated one.
    """
    module = _unwrapped(module)
    group, shards = _cuts(module)
    return {name: shards[name].copies if name in shards else group.size for name, _ in module.named_parameters()}


# ---- shards of a model ------------------------------------------------------------------------------------------


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside wrappers that do not show in its state dict."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    inner = getattr(module, "module", None)
    if isinstance(inner, nn.Module) and module.state_dict().keys() == inner.state_dict().keys():
        return _unwrapped(inner)
    return module


def _cuts(module: nn.Module) -> tuple[ProcessGroup, dict[str, Shard]]:
    """Return the ranks that share a model, and the shards of its parameters, by all of their names."""
    shards: dict[str, Shard] = {}
    groups = []
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, Sharded):
            groups.append(part.process_group)
            shards |= {f"{name}.{own}".removeprefix("."): shard for own, shard in part.shards.items()}
    if not groups:
        raise ValueError(f"module: expected a model with parallel layers, {type(module).__name__} has none")
    if any(group.ranks != groups[0].ranks for group in groups):
        raise ValueError("module: expected parallel layers that all belong to one group of ranks")
    return groups[0], shards


# ---- checking ---------------------------------------------------------------------------------------------------


def _check_fit(argument: str, shards: Mapping[str, Shard], state: Mapping[str, Any], *, full: bool) -> None:
    """Raise unless each tensor has the size of the full parameter, or of this rank's shard; local."""
    wrong = []
    for name, shard in shards.items():
        dim = 1 - shard.dim if full and shard.is_transposed else shard.dim
        size = shard.size if full else shard.local
        shape = list(state[name].shape)
        if len(shape) <= dim or shape[dim] != size:
            wrong.append(f"{name}: expected size {size} along dim {dim}, got shape {shape}")
    if wrong:
        raise ValueError(f"{argument}: {'; '.join(wrong)}")


def _check_loadable(own: Mapping[str, Any], shards: Mapping[str, Shard], given: object, *, strict: bool) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"state_dict: expected a mapping of names to values on rank 0, got {type(given).__name__}")
    problems = []
    missing, unexpected = [name for name in own if name not in given], [name for name in given if name not in own]
    if strict and missing:
        problems.append(f"missing: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected: {', '.join(unexpected)}")
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    wrong = []
    for name, value in tensors.items():
        shape = shards[name].full_shape(value.shape) if name in shards else list(value.shape)
        if name in given and _shape_text(given[name]) != str(shape):
            wrong.append(f"{name}: expected {shape}, got {_shape_text(given[name])}")
    if wrong:
        problems.append(f"wrong shapes: {'; '.join(wrong)}")
    if any(value.is_meta for value in tensors.values()):
        problems.append("the model is on the meta device: call its to_empty(device=...) first")
    if problems:
        raise ValueError(f"state_dict does not fit the model, {'; '.join(problems)}")


def _shape_text(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
