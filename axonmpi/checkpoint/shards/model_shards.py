"""What a rank has of a model's tensors, however the ranks share the model.

    plain, DDP            all of each tensor
    FSDP                  some elements of each parameter
    tensor parallelism    some rows of some parameters, all of the others
    FSDP over it          some elements of these rows
    pipeline              of the tensors of its stages

Shards are views of the rank's own memory. Nothing is gathered.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...collectives.agreement import raised_on_all
from ...fsdp import FullyShardedDataParallel
from ...fsdp.runtime import FSDPRuntime
from ...groups.process_group import ProcessGroup
from ...pipeline import Pipeline
from ...pipeline.state_names import StateNames
from ...wrapping.state_names import Wrapper
from ..files.tensor_file import TensorSpec
from ..files.values import decoded, encoded
from .parameter_placement import UNREPLICATED, Layers, Placement, Replicas
from .tensor_shard import TensorShard


class ModelShards:
    """What a rank has of a model, made by `model_shards`.

    Attributes:
        shards: Of the tensors in its state dict, each once; of tied parameters those of the first stage.
        aliases: The other names of tied tensors, and the names that they have in the file.
        extra: What modules return from `get_extra_state()`, if it is no tensor, by name, as JSON has it.
        config: The model's `config` as JSON has it; None if there is none.
    """

    def __init__(self, model: nn.Module, roots: Sequence[_Root], ties: Mapping[int, _Tied]) -> None:
        self.shards: list[TensorShard] = []
        self.aliases: dict[str, str] = {}
        self.extra: dict[str, Any] = {}
        self.config = _config_of(model)
        self._pipeline = model if isinstance(model, Pipeline) else None
        modules = [module for root in roots for module in root.module.modules()]
        self._runtimes = _runtimes_in(modules)
        self._sharded = {id(shard.sharded): shard for runtime in self._runtimes for shard in runtime.parameters}
        self._layers = Layers(modules)
        self._ties = ties
        self._names: dict[int, str] = {}
        self._placements: dict[int, Placement] = {}
        self._own: dict[int, TensorShard] = {}
        self._others: list[tuple[_Root, dict[str, Any]]] = []
        self._buffers: dict[str, Tensor] = {}
        self._repeated: list[tuple[Tensor, Tensor]] = []
        for root in roots:
            self._add_all(root)

    def placement_of(self, parameter: Tensor) -> Placement | None:
        """Return where a parameter lies, as optimizers have it; None if it is not of this model; local."""
        return self._placements.get(id(parameter))

    def shard_of(self, parameter: Tensor) -> TensorShard | None:
        """Return the shard that a parameter is, as optimizers have it; None if it is not of this model; local."""
        return self._own.get(id(parameter))

    @contextmanager
    def stable(self) -> Iterator[None]:
        """Let shards be read or written in the `with` block; collective at both ends for FSDP, and local else."""
        with ExitStack() as stack:
            for runtime in self._runtimes:
                stack.enter_context(runtime.between_steps())
            yield

    def loaded(self, extra: Mapping[str, Any] | None = None) -> None:
        """Let the model compute with what was written to its shards; within `stable()`, collective for pipelines.

        Args:
            extra: Values for `set_extra_state()` by name, as JSON has them; names of other ranks do nothing.
        """
        for runtime in self._runtimes:
            runtime.forget_gathered()
        known = {name: decoded(value) for name, value in (extra or {}).items()}
        for root, values in self._others:
            own = {name: known.get(_plain(root.prefix + name), value) for name, value in values.items()}
            root.module.load_state_dict(own, strict=False)
        with torch.no_grad():
            for first, again in self._repeated:
                again.copy_(first)
        if self._pipeline is not None:
            self._pipeline.spread_ties()

    # ---- making ------------------------------------------------------------------------------------------------

    def _add_all(self, root: _Root) -> None:
        _check_names(root.module)
        lives = {id(tensor) for tensor in (*root.module.parameters(), *root.module.buffers())}
        others: dict[str, Any] = {}
        for name, value in root.module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and id(value) in lives:
                self._add_tensor(root, name, value)
            else:
                others[name] = self._add_other(root, name, value)
        if others:
            self._others.append((root, others))

    def _add_other(self, root: _Root, name: str, value: Any) -> Any:
        """Add what a module makes for its state dict, and return what is to be loaded if nothing else is given."""
        full = _plain(root.prefix + name)
        if isinstance(value, Tensor):
            copy = value.detach().clone()
            self._add_shard(self._placement(root, name, full, copy).shard(copy), is_split=False)
            return copy
        self.extra[full] = encoded(value, f"model: {full!r} in its state dict, such as get_extra_state() adds")
        return value

    def _add_tensor(self, root: _Root, name: str, tensor: Tensor) -> None:
        full = _plain(root.prefix + name)
        if id(tensor) in self._names:
            self._add_alias(full, self._names[id(tensor)])
            return
        _check_saveable(full, tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        if not is_parameter and full in self._buffers:  # of another stage on this rank
            self._repeated.append((self._buffers[full], tensor))
            return
        tied = self._ties.get(id(tensor))
        self._names[id(tensor)] = of = full if tied is None else tied.name
        self._add_alias(full, of)
        placement = self._placement(root, name, of, tensor, is_first=tied is None or tied.is_first)
        sharded = self._sharded.get(id(tensor))
        shard = placement.shard(tensor if sharded is None else sharded.own)
        if is_parameter:
            self._placements[id(tensor)], self._own[id(tensor)] = placement, shard
        else:
            self._buffers[full] = tensor
        if placement.is_first:
            self._add_shard(shard, is_split=shard.is_split and is_parameter)

    def _add_shard(self, shard: TensorShard, *, is_split: bool) -> None:
        self.shards.append(dataclasses.replace(shard, is_split=is_split))

    def _add_alias(self, name: str, of: str) -> None:
        if name != of:
            self.aliases[name] = of

    def _placement(self, root: _Root, name: str, of: str, tensor: Tensor, *, is_first: bool = True) -> Placement:
        """Return where a tensor with a name in the root lies, in the file's tensor `of`."""
        sharded = self._sharded.get(id(tensor))
        if sharded is None:
            is_shared = name in root.shared and not isinstance(tensor, nn.Parameter)
            copies = root.shared[name].each_of(root.copies) if is_shared else root.copies
            shape = tuple(tensor.shape)
            return self._layers.placement(
                of, tensor, shape, (0, math.prod(shape)), shape, (copies, copies), is_first=is_first
            )
        holders, rank = sharded.holders, sharded.flat.group.rank
        wholes = Replicas(len(holders), holders.index(rank)) if rank in holders else UNREPLICATED
        memory = tuple(sharded.own.shape)
        return self._layers.placement(
            *(of, tensor, tuple(sharded.shape), sharded.bounds, memory, (UNREPLICATED, wholes)), is_first=is_first
        )


@dataclass(frozen=True)
class _Tied:
    """A copy of a parameter that several stages share.

    Attributes:
        name: The parameter's name in the file.
        is_first: Whether it is the first stage's.
    """

    name: str
    is_first: bool


@dataclass(frozen=True)
class _Root:
    """A model, or a stage of a pipeline.

    Attributes:
        module: The same.
        prefix: What comes before its names in the file.
        copies: The ranks that have what FSDP does not divide in it, but for replicas with all shards alike.
        shared: The ranks of a pipeline that have the same tensor, by its name.
    """

    module: nn.Module
    prefix: str
    copies: Replicas
    shared: Mapping[str, Replicas]

    @classmethod
    def of(cls, module: nn.Module, prefix: str = "", shared: Mapping[str, Replicas] | None = None) -> _Root:
        """Describe one; local.

        Raises:
            ValueError: Different ranks share shards of it.
        """
        groups = [runtime.group for runtime in _runtimes_in(module.modules())]
        if any(group.ranks != groups[0].ranks for group in groups):
            raise ValueError("model: expected modules in FSDP that all belong to one group of ranks")
        return cls(
            module, prefix, Replicas(groups[0].size, groups[0].rank) if groups else UNREPLICATED, shared or {}
        )


def _runtimes_in(modules: Iterable[nn.Module]) -> list[FSDPRuntime]:
    return [module.runtime for module in modules if isinstance(module, FullyShardedDataParallel)]


def model_shards(model: nn.Module, group: ProcessGroup) -> ModelShards:
    """Find what this rank has of a model; collective.

    Args:
        model: A module, or one wrapped in DDP or FSDP, also with parallel layers; or a `Pipeline` of such stages.
        group: All ranks that have a shard of it.

    Raises:
        ValueError: The state dict has something that a file cannot hold, or the model is on the meta device; on all
            ranks.
    """
    names = model.state_names() if isinstance(model, Pipeline) else None
    with raised_on_all(group.backend):
        inner = [name for name, module in model.named_modules() if isinstance(module, Pipeline) and name]
        if inner:
            raise ValueError(f"model: {inner[0]!r} in it is a Pipeline: give the pipeline itself")
        if isinstance(model, Pipeline) and names is not None:
            made = _of_stages(model, names)
        else:
            made = ModelShards(model, [_Root.of(model)], {})
    return made


@contextmanager
def reshaped_buffers(model: nn.Module, specs: Mapping[str, TensorSpec]) -> Iterator[None]:
    """Let modules give buffers the shapes that a file has, as `load_state_dict` does; local.

    Observers of quantization, for instance, know the shapes of theirs after a forward only. Modules that do not see
    to it are left alone. If the `with` block raises, the buffers are what they were.

    Args:
        model: Of which this rank has all buffers.
        specs: What the file has, by name.
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
        with suppress(RuntimeError):  # of shapes that stay wrong, about which the caller says more
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
    shared = {
        name: Replicas(len(ranks), ranks.index(rank)) for name, ranks in names.shared.items() if rank in ranks
    }
    roots = [_Root.of(stage, names.prefixes[number], shared) for number, stage in stages.items()]
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
    """Raise if two tensors of a module have one name, of which a state dict would lose one."""
    known: dict[str, Tensor] = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            if known.setdefault(_plain(name), tensor) is not tensor:
                raise ValueError(f"model: two different tensors have the name {_plain(name)!r}: rename one of them")


def _plain(name: str) -> str:
    """Return a name without what `torch.compile` puts in front."""
    return name.replace("_orig_mod.", "")


def _config_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the `config` of a model, of what is in its wrappers, or of a pipeline's first stage that has one."""
    while isinstance(model, Wrapper) or hasattr(model, "_orig_mod"):
        inner: Any = model.module if isinstance(model, Wrapper) else model._orig_mod
        model = inner
    config: Any = getattr(model, "config", None)
    if config is None and isinstance(model, Pipeline):
        found = (_config_of(stage) for stage in model.stages.values())
        return next((config for config in found if config is not None), None)
    try:
        made = json.loads(json.dumps(_described(config, type(model).__name__), default=_readable))
    except (TypeError, ValueError):  # whatever it is, no other tool reads it
        return None
    return made if isinstance(made, dict) else None


def _described(config: Any, name: str) -> dict[str, Any] | None:
    """Return the values of the config of a model of the class `name`; None if it is of no known kind."""
    if callable(getattr(config, "to_dict", None)):
        described = config.to_dict()
        return {**described, "architectures": described.get("architectures") or [name]}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return dict(config) if isinstance(config, Mapping) else None


def _readable(value: Any) -> Any:
    """Return what JSON has for a value that it does not know: a dtype as `transformers` writes it, or a text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, torch.dtype | torch.device | os.PathLike):
        return str(value).removeprefix("torch.")
    raise TypeError(type(value).__name__)
