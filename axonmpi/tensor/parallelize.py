"""Tensor parallelism for a model that was written for one process: `tensor_parallelize`.

    model, built in full and alike on all ranks
      │ plan      the style of each module
      │ check     styles fit the modules, sizes divide, ties hold, all ranks agree: nothing is changed before
      ▼
    the same model: parallel layers with this rank's shards, and hooks that shard and gather the sequence

Names of modules and parameters stay, so that `state_dicts.py` can make full state dicts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..across_ranks.comparison import raised_on_all, same_on_all_ranks
from ..across_ranks.model_checks import check_same_model
from ..groups.process_group import ProcessGroup
from ..groups.world import group_of_this_rank
from ..utils.arguments import check_flags, integer
from .apply_styles import REPLACING, ModelOptions, change_module, check_style, parallel_module
from .plan import Column, Join, Plan, Region, Split, Style, Tied, find_modules
from .presets import preset
from .shards import Shard, Sharded

_Module = TypeVar("_Module", bound=nn.Module)


def tensor_parallelize(
    module: _Module,
    plan: Plan | str | None = None,
    group: ProcessGroup | None = None,
    *,
    sequence_parallel: bool = False,
    sequence_dim: int = 1,
    generator: torch.Generator | None = None,
) -> _Module:
    """Divide a model among the ranks of a group, in place; collective.

    Each rank keeps its shard of the layers that the plan names. Call it before DDP or FSDP, and before making the
    optimizer. Called with the same inputs on all ranks of the group, the model gives the same outputs as before.

    Args:
        module: The model, built with the same values on all ranks, or on the meta device.
        plan: Styles by patterns of module names, see `axonmpi.tensor.plan`; the name of a preset; or None for the
            preset of `module.config.model_type`.
        group: The ranks; None means all.
        sequence_parallel: Activations between blocks are divided along the sequence, whose length has to be a
            multiple of the number of ranks. A model in which the plan names no `"split"` and no embedding takes
            this rank's slice of the sequence; one with no `"join"` and no layer for logits returns it.
        sequence_dim: Dimension of the sequence in activations.
        generator: Source of random numbers for dropout, in the same state on all ranks; None means torch's default
            generator.

    Returns:
        The model.

    Raises:
        TypeError: An argument is of the wrong type; on all ranks if it is not the group.
        ValueError: The plan does not fit the model, sizes do not divide, the model is divided already, or ranks
            have different plans or models; on all ranks, and nothing is changed.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053); Korthikanti et al. 2022 (arXiv:2205.05198).
    """
    group = group_of_this_rank(group, "group")
    options = ModelOptions(group, sequence_parallel, sequence_dim, generator)
    with raised_on_all(group.backend):
        check_flags(sequence_parallel=sequence_parallel)
        integer("sequence_dim", sequence_dim)
        matched = _match_plan(module, plan, group.size)
        if sequence_parallel:
            _check_sequence(module, matched)
    _check_same_plan(module, matched, options)
    splits, joins = bool(matched.named(Split)), bool(matched.named(Join))
    _divide(module, matched, dataclasses.replace(options, splits=splits, joins=joins))
    return module


@dataclass(frozen=True)
class _MatchedPlan:
    """The modules that a plan names, and the shards of their parameters.

    Attributes:
        styles: By module name, in the model's order.
        shards: By module name and parameter name.
    """

    styles: Mapping[str, tuple[Style, ...]]
    shards: Mapping[str, Mapping[str, Shard]]

    def named(self, kind: type[Style]) -> list[str]:
        """Return the names of modules with a style."""
        return [name for name, styles in self.styles.items() if any(isinstance(style, kind) for style in styles)]


# ---- checking ---------------------------------------------------------------------------------------------------


def _match_plan(model: object, plan: Plan | str | None, ranks: int) -> _MatchedPlan:
    if not isinstance(model, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(model).__name__}")
    divided = [name for name, part in model.named_modules() if isinstance(part, Sharded)]
    if divided:
        raise ValueError(f"module: {divided[0] or 'it'} is divided already; tensor_parallelize is called once")
    wrappers = [part for part in model.modules() if hasattr(part, "no_sync") and hasattr(part, "sync_gradients")]
    if wrappers:
        raise ValueError(
            f"module: it is wrapped in {type(wrappers[0]).__name__}, which knows the full parameters; "
            "divide the model before it is wrapped"
        )
    plan = preset(model, ranks, plan) if plan is None or isinstance(plan, str) else plan
    styles = find_modules(plan, model)
    shards: dict[str, dict[str, Shard]] = {}
    mistakes = []
    for name, own in styles.items():
        try:
            shards[name] = _shards_of_module(model.get_submodule(name), own, ranks)
        except ValueError as error:
            mistakes.append(f"module {name!r}: {error}")
    if mistakes:
        raise ValueError("\n".join(mistakes))
    matched = _MatchedPlan(styles, shards)
    _check_ties(model, matched)
    return matched


def _shards_of_module(module: nn.Module, styles: tuple[Style, ...], ranks: int) -> dict[str, Shard]:
    replacing = [style for style in styles if isinstance(style, REPLACING)]
    if len(replacing) > 1:
        raise ValueError(f"expected one style for a layer, got {' and '.join(map(repr, replacing))}")
    if replacing and _has_hooks(module):
        raise ValueError(
            "it has hooks, which a layer in its place would not have; parallelize it before (DDP and FSDP too)"
        )
    shards: dict[str, Shard] = {}
    for style in styles:
        shards |= check_style(module, style, ranks)
    return shards


def _has_hooks(module: nn.Module) -> bool:
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    of_parameters = (
        hooks
        for parameter in module.parameters(recurse=False)
        for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    )
    return any(own) or any(of_parameters)


def _check_ties(model: nn.Module, matched: _MatchedPlan) -> None:
    """Raise unless all modules of a tied parameter have the same shard of it."""
    holders = set(matched.named(Tied))
    for owners in _parameter_owners(model).values():
        cuts = {
            f"{name}.{own}".removeprefix("."): matched.shards.get(name, {}).get(own)
            for name, own in owners
            if name not in holders
        }
        if len(set(cuts.values())) > 1:
            raise ValueError(
                f"plan: {' and '.join(cuts)} are one parameter, so the plan has to cut them alike; name all of "
                "their modules, as 'tied' where a module only holds it"
            )


def _check_sequence(model: nn.Module, matched: _MatchedPlan) -> None:
    """Raise if parameters would compute on a shard of the sequence without a sum of their gradients."""
    for name in matched.named(Split):
        blocks, _, _ = name.rpartition(".")
        is_list = isinstance(model.get_submodule(blocks), nn.ModuleList | nn.Sequential) and blocks
        around = blocks if is_list else name
        for inner, module in model.get_submodule(around).named_modules(prefix=around):
            own = [own for own, value in module.named_parameters(recurse=False) if value.requires_grad]
            if own and inner not in matched.styles:
                raise ValueError(
                    f"plan: {inner} has parameters ({', '.join(own)}) behind the 'split' at {name}, and no style; "
                    "with sequence parallelism it needs one, such as 'sequence' if it treats each position alone"
                )


def _parameter_owners(model: nn.Module) -> dict[int, list[tuple[str, str]]]:
    """Return for each parameter id the names of its modules, and its own name in each."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((name, own))
    return owners


def _check_same_plan(model: nn.Module, matched: _MatchedPlan, options: ModelOptions) -> None:
    """Raise on all ranks unless they have the same plan and the same model, with the same values; collective."""
    arguments: dict[str, object] = {f"plan: {name}": styles for name, styles in matched.styles.items()}
    arguments |= {"sequence_parallel": options.sequence_parallel, "sequence_dim": options.sequence_dim}
    if options.generator is not None:
        arguments["generator (a digest of its state)"] = _digest(options.generator.get_state())
    check_same_model(model, options.group, arguments)
    same_on_all_ranks(
        options.group.backend,
        (f"parameter {name!r} with digest {_sample(value)}" for name, value in model.named_parameters()),
        "module: the parameters' values are not the same on all ranks",
        "Build the model with the same seed, or load the same values, on all ranks of the group.",
    )


def _sample(parameter: Tensor) -> str:
    """Return a digest of some elements, enough to tell the values of two seeds apart."""
    if parameter.is_meta:
        return ""
    flat = parameter.detach().reshape(-1)
    return _digest(flat[:: max(1, flat.numel() // 256)])


def _digest(values: Tensor) -> str:
    content = values.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


# ---- changing ---------------------------------------------------------------------------------------------------


def _divide(model: nn.Module, matched: _MatchedPlan, options: ModelOptions) -> None:
    owners, parents = _parameter_owners(model), _parents(model)
    regions = [
        name
        for name, styles in matched.styles.items()
        if any(isinstance(style, Region) and (style.shared or options.sequence_parallel) for style in styles)
    ]
    styled = [(name, style) for name, styles in matched.styles.items() for style in styles]
    for name, style in styled:
        if not isinstance(style, REPLACING):
            continue
        # one layer after the other, so that memory holds at most one of them full and sharded
        old = model.get_submodule(name)
        is_entered = isinstance(style, Column) and any(name.startswith(f"{region}.") for region in regions)
        new = parallel_module(old, style, matched.shards[name], options, is_entered=is_entered)
        for parent, own in parents[id(old)]:
            setattr(parent, own, new)
    _tie(model, owners, matched, options.group)
    for name, style in styled:
        if not isinstance(style, REPLACING):
            change_module(model.get_submodule(name), style, options)


def _parents(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return for each module id its parents, and its name in each."""
    parents: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for own, child in parent._modules.items():  # named_children() has each child under one name only
            if child is not None:
                parents.setdefault(id(child), []).append((parent, own))
    return parents


def _tie(
    model: nn.Module, owners: Mapping[int, list[tuple[str, str]]], matched: _MatchedPlan, group: ProcessGroup
) -> None:
    """Tie the shards of a parameter that several modules had in common."""
    for of_one in owners.values():
        cut = [(name, own) for name, own in of_one if own in matched.shards.get(name, {})]
        if not cut or len(of_one) == 1:
            continue
        layer, own = cut[0]
        part, shard = model.get_submodule(layer).get_parameter(own), matched.shards[layer][own]
        for name, own in of_one:
            holder: Any = model.get_submodule(name)
            setattr(holder, own, part)
            if (name, own) not in cut:  # a module that only holds the parameter becomes a `Sharded`, too
                known = holder.shards if isinstance(holder, Sharded) else {}
                holder.shards, holder.process_group = {**known, own: shard}, group
