"""What a rank has of a model's tensors, however the ranks share the model.

    plain, DDP            all of each tensor
    FSDP                  some elements of each parameter
    tensor parallelism    some rows of some parameters, all of the others
    FSDP over it          some elements of these rows
    pipeline              of the tensors of its stages

Parts are views of the rank's own memory. Nothing is gathered.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..collectives.agreement import raised_on_all
from ..fsdp import FullyShardedDataParallel
from ..groups.world import ProcessGroup
from ..pipeline import Pipeline
from ..wrapping.state_names import Wrapper
from .holdings import Holding, Layers
from .parts import Part
from .values import decoded, encoded

__all__ = ["ModelParts", "model_parts"]


class ModelParts:
    """What a rank has of a model, made by `model_parts`.

    Attributes:
        parts: Of the tensors in its state dict, each once; of tied parameters those of the first stage.
        aliases: The other names of tied tensors, and the names that they have in the file.
        extra: What modules return from `get_extra_state()`, if it is no tensor, by name, as JSON has it.
        config: The model's `config` as JSON has it; None if there is none.
    """

    def __init__(self, model: nn.Module, roots: Sequence[tuple[str, nn.Module]], ties: Mapping[int, _Tied]) -> None:
        self.parts: list[Part] = []
        self.aliases: dict[str, str] = {}
        self.extra: dict[str, Any] = {}
        self.config = _config_of(model)
        self._pipeline = model if isinstance(model, Pipeline) else None
        modules = [module for _, root in roots for module in root.modules()]
        self._runtimes = [module.runtime for module in modules if isinstance(module, FullyShardedDataParallel)]
        self._sharded = {id(part.sharded): part for runtime in self._runtimes for part in runtime.parameters}
        self._layers = Layers(modules)
        self._ties = ties
        self._names: dict[int, str] = {}
        self._holdings: dict[int, Holding] = {}
        self._own: dict[int, Part] = {}
        self._others: list[tuple[nn.Module, dict[str, Any], str]] = []
        for prefix, root in roots:
            self._add_all(prefix, root)

    def holding_of(self, parameter: Tensor) -> Holding | None:
        """Return where a parameter lies, as optimizers have it; None if it is not of this model; local."""
        return self._holdings.get(id(parameter))

    def part_of(self, parameter: Tensor) -> Part | None:
        """Return the part that a parameter is, as optimizers have it; None if it is not of this model; local."""
        return self._own.get(id(parameter))

    @contextmanager
    def stable(self) -> Iterator[None]:
        """Let parts be read or written in the `with` block; collective at both ends for FSDP, and local else."""
        with ExitStack() as stack:
            for runtime in self._runtimes:
                stack.enter_context(runtime.between_steps())
            yield

    def loaded(self, extra: Mapping[str, Any] | None = None) -> None:
        """Let the model compute with what was written to its parts; within `stable()`, collective for pipelines.

        Args:
            extra: Values for `set_extra_state()` by name, as JSON has them; names of other ranks do nothing.
        """
        for runtime in self._runtimes:
            runtime.forget_gathered()
        known = {name: decoded(value) for name, value in (extra or {}).items()}
        for root, values, prefix in self._others:
            own = {name: known.get(prefix + name, value) for name, value in values.items()}
            root.load_state_dict(own, strict=False)
        if self._pipeline is not None:
            self._pipeline.spread_ties()

    # ---- making ------------------------------------------------------------------------------------------------

    def _add_all(self, prefix: str, root: nn.Module) -> None:
        lives = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
        others: dict[str, Any] = {}
        for name, value in root.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and id(value) in lives:
                self._add_tensor(prefix + name, value)
            else:
                others[name] = self._add_other(prefix + name, value)
        if others:
            self._others.append((root, others, prefix))

    def _add_other(self, name: str, value: Any) -> Any:
        """Add what a module makes for its state dict, and return what is to be loaded if nothing else is given."""
        if isinstance(value, Tensor):
            copy = value.detach().clone()
            self.parts.append(dataclasses.replace(self._holding(name, copy).part(copy), is_split=False))
            return copy
        self.extra[name] = encoded(value, f"model: {name!r} in its state dict, such as get_extra_state() adds")
        return value

    def _add_tensor(self, name: str, tensor: Tensor) -> None:
        if id(tensor) in self._names:
            self._add_alias(name, self._names[id(tensor)])
            return
        _check_saveable(name, tensor)
        tied = self._ties.get(id(tensor))
        self._names[id(tensor)] = name if tied is None else tied.name
        self._add_alias(name, self._names[id(tensor)])
        holding = self._holding(self._names[id(tensor)], tensor, is_first=tied is None or tied.is_first)
        sharded = self._sharded.get(id(tensor))
        part = holding.part(tensor if sharded is None else sharded.own)
        is_parameter = isinstance(tensor, nn.Parameter)
        if is_parameter:
            self._holdings[id(tensor)], self._own[id(tensor)] = holding, part
        if holding.is_first:
            self.parts.append(part if is_parameter else dataclasses.replace(part, is_split=False))

    def _add_alias(self, name: str, of: str) -> None:
        if name != of:
            self.aliases[name] = of

    def _holding(self, name: str, tensor: Tensor, *, is_first: bool = True) -> Holding:
        sharded = self._sharded.get(id(tensor))
        local = tuple(tensor.shape if sharded is None else sharded.shape)
        memory = tuple((tensor if sharded is None else sharded.own).shape)
        bounds = (0, math.prod(local)) if sharded is None else sharded.bounds
        return self._layers.holding(name, tensor, local, bounds, memory, is_first=is_first)


@dataclass(frozen=True)
class _Tied:
    """A copy of a parameter that several stages share.

    Attributes:
        name: The parameter's name in the file.
        is_first: Whether it is the first stage's.
    """

    name: str
    is_first: bool


def model_parts(model: nn.Module, group: ProcessGroup) -> ModelParts:
    """Find what this rank has of a model; collective.

    Args:
        model: A module, or one wrapped in DDP or FSDP, also with parallel layers; or a `Pipeline` of such stages.
        group: All ranks that have a part of it.

    Raises:
        ValueError: The state dict has something that a file cannot hold, or the model is on the meta device; on all
            ranks.
    """
    prefixes = model.state_prefixes() if isinstance(model, Pipeline) else [""]
    with raised_on_all(group.backend):
        made = _made(model, prefixes)
    return made


def _made(model: nn.Module, prefixes: Sequence[str]) -> ModelParts:
    inner = [name for name, module in model.named_modules() if isinstance(module, Pipeline) and name]
    if inner:
        raise ValueError(f"model: {inner[0]!r} in it is a Pipeline: give the pipeline itself")
    if not isinstance(model, Pipeline):
        return ModelParts(model, [("", model)], {})
    stages = {int(number): stage for number, stage in model.stages.items()}
    roots = [(prefixes[number], stage) for number, stage in stages.items()]
    return ModelParts(model, roots, _ties(model, stages, prefixes))


def _ties(pipeline: Pipeline, stages: Mapping[int, nn.Module], prefixes: Sequence[str]) -> dict[int, _Tied]:
    """Return this rank's copies of tied parameters."""
    own = {number: dict(stage.named_parameters(remove_duplicate=False)) for number, stage in stages.items()}
    found: dict[int, _Tied] = {}
    for tie in pipeline.ties:
        first, name = tie[0]
        for number, own_name in tie:
            if number in own:
                found.setdefault(id(own[number][own_name]), _Tied(prefixes[first] + name, number == first))
    return found


def _check_saveable(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(f"model: {name!r} has no shape yet: run one forward first")
    if tensor.is_meta:
        raise ValueError(f"model: {name!r} is on the meta device: call the model's to_empty(device=...) first")
    if tensor.is_sparse or tensor.layout != torch.strided:
        raise ValueError(f"model: {name!r} is sparse ({tensor.layout}), which a file of tensors cannot hold")


def _config_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the `config` of a model, of what is in its wrappers, or of a pipeline's first stage that has one."""
    while isinstance(model, Wrapper):
        model = model.module
    config: Any = getattr(model, "config", None)
    if config is None and isinstance(model, Pipeline):
        found = (_config_of(stage) for stage in model.stages.values())
        return next((config for config in found if config is not None), None)
    described: Any = None
    if callable(getattr(config, "to_dict", None)):
        described = config.to_dict()
        described = {**described, "architectures": described.get("architectures") or [type(model).__name__]}
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        described = dataclasses.asdict(config)
    elif isinstance(config, Mapping):
        described = dict(config)
    try:
        made = json.loads(json.dumps(described))
    except (TypeError, ValueError):  # whatever it is, no other tool reads it
        return None
    return made if isinstance(made, dict) else None
