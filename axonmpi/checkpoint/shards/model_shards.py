"""This rank's shards of a model, in every layout of ranks.

    plain, DDP            the full tensors
    FSDP                  some elements of each parameter
    tensor parallelism    some rows of some parameters, the others full
    FSDP over it          some elements of these rows
    pipeline              the same of the tensors of its stages

Shards are views of the rank's own memory. Nothing is gathered.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...across_ranks.comparison import raised_on_all
from ...fsdp import FullyShardedDataParallel
from ...fsdp.runtime import FSDPRuntime
from ...groups.process_group import ProcessGroup
from ...pipeline import Pipeline
from ...pipeline.state_names import StateNames
from ...wrapping.state_names import Wrapper
from ..files.tensor_file import TensorSpec
from ..files.values import decoded, encoded
from .parameter_placement import ParallelLayers, Placement
from .tensor_shard import UNREPLICATED, Replicas, TensorShard


class ModelShards:
    """This rank's shards of a model, made by `model_shards`.

    Attributes:
        shards: Of each tensor in the state dict, once; a tied parameter is the first stage's.
        aliases: Name in the file by further name, for tied tensors.
        extra: JSON by name of values from `get_extra_state()` that are no tensors.
        config: The model's `config` as JSON; None if there is none.
    """

    def __init__(self, model: nn.Module, roots: Sequence[_Root], ties: Mapping[int, _Tied]) -> None:
        self.shards: list[TensorShard] = []
        self.aliases: dict[str, str] = {}
        self.extra: dict[str, Any] = {}
        self.config = _config_of(model)
        self._pipeline = model if isinstance(model, Pipeline) else None
        modules = [module for root in roots for module in root.module.modules()]
        self._runtimes = _runtimes_in(modules)
        self._sharded = {id(each.sharded): each for runtime in self._runtimes for each in runtime.parameters}
        self._layers = ParallelLayers(modules)
        self._ties = ties
        self._names: dict[int, str] = {}
        self._placements: dict[int, Placement] = {}
        self._computed: list[tuple[_Root, dict[str, Any]]] = []
        self._buffers: dict[str, Tensor] = {}
        self._repeated: list[tuple[Tensor, Tensor]] = []
        for root in roots:
            self._add_root(root)

    def placement_of(self, parameter: Tensor) -> Placement | None:
        """Return the placement of a parameter that optimizers have; None for other models' parameters; local."""
        return self._placements.get(id(parameter))

    @contextmanager
    def stable(self) -> Iterator[None]:
        """Keep the shards valid in the `with` block; collective at both ends for FSDP, local without it."""
        with ExitStack() as stack:
            for runtime in self._runtimes:
                stack.enter_context(runtime.between_steps())
            yield

    def loaded(self, extra: Mapping[str, Any]) -> None:
        """Make the model compute with the new values of its shards; within `stable()`, collective for pipelines.

        Args:
            extra: JSON by name of values for `set_extra_state()`; names of other ranks are ignored.
        """
        for runtime in self._runtimes:
            runtime.forget_gathered()
        known = {name: decoded(value) for name, value in extra.items()}
        for root, values in self._computed:
            own = {name: known.get(_plain(root.prefix + name), value) for name, value in values.items()}
            root.module.load_state_dict(own, strict=False)
        with torch.no_grad():
            for first, again in self._repeated:
                again.copy_(first)
        if self._pipeline is not None:
            self._pipeline.spread_ties()

    # ---- construction ------------------------------------------------------------------------------------------

    def _add_root(self, root: _Root) -> None:
        """Add the state dict of a model or stage: its own tensors, and values that modules compute for it."""
        _check_names(root.module)
        own = {id(tensor) for tensor in (*root.module.parameters(), *root.module.buffers())}
        computed: dict[str, Any] = {}
        for name, value in root.module.state_dict(keep_vars=True).items():
            full_name = _plain(root.prefix + name)
            if not isinstance(value, Tensor):
                where = f"model: {full_name!r} in its state dict, such as get_extra_state() adds"
                self.extra[full_name] = encoded(value, where)
                computed[name] = value
            elif id(value) in own:
                self._add_tensor(root, name, full_name, value)
            else:
                copy = computed[name] = value.detach().clone()
                shard = self._placement(root, name, full_name, copy, is_first=True).shard(copy)
                self.shards.append(dataclasses.replace(shard, is_split=False))
        if computed:
            self._computed.append((root, computed))

    def _add_tensor(self, root: _Root, name: str, full_name: str, tensor: Tensor) -> None:
        if id(tensor) in self._names:
            if full_name != self._names[id(tensor)]:
                self.aliases[full_name] = self._names[id(tensor)]
            return
        _check_saveable(full_name, tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        if not is_parameter and full_name in self._buffers:  # of another stage on this rank
            self._repeated.append((self._buffers[full_name], tensor))
            return
        tied = self._ties.get(id(tensor), _Tied(full_name, is_first=True))
        self._names[id(tensor)] = tied.name
        if full_name != tied.name:
            self.aliases[full_name] = tied.name
        placement = self._placement(root, name, tied.name, tensor, is_first=tied.is_first)
        sharded = self._sharded.get(id(tensor))
        shard = placement.shard(tensor if sharded is None else sharded.own)
        if is_parameter:
            self._placements[id(tensor)] = placement
        else:
            self._buffers[full_name] = tensor
        if placement.is_first:
            self.shards.append(dataclasses.replace(shard, is_split=shard.is_split and is_parameter))

    def _placement(self, root: _Root, name: str, file_name: str, tensor: Tensor, *, is_first: bool) -> Placement:
        sharded = self._sharded.get(id(tensor))
        if sharded is None:
            is_shared = name in root.shared and not isinstance(tensor, nn.Parameter)
            replicas = root.shared[name].times(root.replicas) if is_shared else root.replicas
            shape = memory_shape = tuple(tensor.shape)
            bounds, state_replicas = (0, math.prod(shape)), replicas
        else:
            shape, memory_shape, bounds = tuple(sharded.shape), tuple(sharded.own.shape), sharded.bounds
            replicas, state_replicas = UNREPLICATED, Replicas.among(sharded.holders, sharded.flat.group.rank)
        return self._layers.placement(
            file_name, tensor, shape, bounds, memory_shape, replicas, state_replicas, is_first=is_first
        )


class _Tied(NamedTuple):
    """A copy of a parameter that several stages share.

    Attributes:
        name: The parameter's name in the file.
        is_first: True for the first stage's copy.
    """

    name: str
    is_first: bool


class _Root(NamedTuple):
    """A model, or a stage of a pipeline.

    Attributes:
        module: The model or stage.
        prefix: Beginning of its names in the file.
        replicas: The ranks with the same tensors outside of FSDP's shards; replicas with equal shards of all
            tensors do not count.
        shared: By name, the ranks of a pipeline with the same buffer.
    """

    module: nn.Module
    prefix: str
    replicas: Replicas
    shared: Mapping[str, Replicas]


def _root(module: nn.Module, prefix: str = "", shared: Mapping[str, Replicas] | None = None) -> _Root:
    groups = [runtime.group for runtime in _runtimes_in(module.modules())]
    if any(group.ranks != groups[0].ranks for group in groups):
        raise ValueError("model: expected modules in FSDP that all belong to one group of ranks")
    replicas = Replicas(groups[0].size, groups[0].rank) if groups else UNREPLICATED
    return _Root(module, prefix, replicas, shared or {})


def _runtimes_in(modules: Iterable[nn.Module]) -> list[FSDPRuntime]:
    return [module.runtime for module in modules if isinstance(module, FullyShardedDataParallel)]


def model_shards(model: nn.Module, group: ProcessGroup) -> ModelShards:
    """Find this rank's shards of a model; collective.

    Args:
        model: A module, or one wrapped in DDP or FSDP, also with parallel layers; or a `Pipeline` of such stages.
        group: All ranks with shards of it.

    Raises:
        ValueError: A file cannot hold a value of the state dict, or the model is on the meta device; on all ranks.
    """
    names = model.state_names() if isinstance(model, Pipeline) else None
    with raised_on_all(group.backend):
        inner = [name for name, module in model.named_modules() if isinstance(module, Pipeline) and name]
        if inner:
            raise ValueError(f"model: {inner[0]!r} in it is a Pipeline: give the pipeline itself")
        if isinstance(model, Pipeline) and names is not None:
            found = _of_stages(model, names)
        else:
            found = ModelShards(model, [_root(model)], {})
    return found


@contextmanager
def reshaped_buffers(model: nn.Module, specs: Mapping[str, TensorSpec]) -> Iterator[None]:
    """Let modules change the shapes of buffers to the shapes in a file, as their `load_state_dict` does; local.

    For instance, observers of quantization know the shapes of their buffers only after a forward. Other modules are
    left alone. If the `with` block raises, all buffers are as before.

    Args:
        model: Of which this rank has all buffers.
        specs: The tensors of the file, by name.
    """
    others = {
        name: torch.zeros(specs[_plain(name)].shape, dtype=buffer.dtype, device=buffer.device)
        for name, buffer in model.named_buffers()
        if _plain(name) in specs and specs[_plain(name)].shape != buffer.shape
    }
    before: list[tuple[nn.Module, dict[str, Tensor]]] = []
    if others:
        before = [
            (module, {key: buffer.clone() for key, buffer in module.named_buffers(recurse=False)})
            for module in model.modules()
        ]
        with suppress(RuntimeError):  # shapes that stay wrong, which the caller reports
            model.load_state_dict(others, strict=False)
    try:
        yield
    except BaseException:
        for module, copies in before:
            module._buffers.update(copies)
        raise


def _of_stages(pipeline: Pipeline, names: StateNames) -> ModelShards:
    stages = {int(number): stage for number, stage in pipeline.stages.items()}
    rank = pipeline.process_group.rank
    shared = {name: Replicas.among(ranks, rank) for name, ranks in names.shared.items()}
    roots = [_root(stage, names.prefixes[number], shared) for number, stage in stages.items()]
    own = {number: dict(stage.named_parameters(remove_duplicate=False)) for number, stage in stages.items()}
    ties: dict[int, _Tied] = {}
    for tie in pipeline.ties:
        first, name = tie[0]
        for number, own_name in tie:
            if number in own:
                tied = _Tied(names.prefixes[first] + name, number == first)
                ties.setdefault(id(own[number][own_name]), tied)
    return ModelShards(pipeline, roots, ties)


def _check_saveable(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(f"model: {name!r} has no shape yet: run one forward first")
    if tensor.is_meta:
        raise ValueError(f"model: {name!r} is on the meta device: call the model's to_empty(device=...) first")
    if tensor.is_sparse or tensor.layout != torch.strided:
        raise ValueError(f"model: {name!r} is sparse ({tensor.layout}), which a file of tensors cannot hold")
    if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"model: {name!r} is expanded, so several of its elements are the same memory, and a load could not "
            "set them: call contiguous() first"
        )


def _check_names(module: nn.Module) -> None:
    """Raise if two tensors of a module have one name, since a state dict would lose one of them."""
    known: dict[str, Tensor] = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            if known.setdefault(_plain(name), tensor) is not tensor:
                raise ValueError(f"model: two different tensors have the name {_plain(name)!r}: rename one of them")


def _plain(name: str) -> str:
    """Return a name without the prefix of `torch.compile`."""
    return name.replace("_orig_mod.", "")


# ---- the model's config -----------------------------------------------------------------------------------------


def _config_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the `config` of a model, of the module in its wrappers, or of a pipeline's first stage with one."""
    while isinstance(model, Wrapper) or hasattr(model, "_orig_mod"):
        inner: Any = model.module if isinstance(model, Wrapper) else model._orig_mod
        model = inner
    config: Any = getattr(model, "config", None)
    if config is None and isinstance(model, Pipeline):
        found = (_config_of(stage) for stage in model.stages.values())
        return next((config for config in found if config is not None), None)
    try:
        if callable(getattr(config, "to_dict", None)):
            values = config.to_dict()
            config = {**values, "architectures": values.get("architectures") or [type(model).__name__]}
        as_json = json.loads(json.dumps(config, default=_readable))
    except (TypeError, ValueError):  # other tools could not read it either
        return None
    return as_json if isinstance(as_json, dict) else None


def _readable(value: Any) -> Any:
    """Return a value as JSON: a dict for a dataclass or mapping, a text as in `transformers` for a dtype."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, torch.dtype | torch.device | os.PathLike):
        return str(value).removeprefix("torch.")
    raise TypeError(type(value).__name__)
