"""Keys of a pipeline's state dict: names in the full model, found from names in the stages.

    stages keep the names of one model    "embedding.weight" | "blocks.3.weight"    so has the whole model
    they do not                           "0.weight"         | "0.weight"           "0.0.weight" and "1.0.weight",
                                                                                    as in nn.Sequential(*stages)

Stages keep the names of one model if each name is in one stage only, or belongs to copies of a tied parameter, or
to buffers of one shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..backends import Backend, all_gather_object
from .ties import Tie

_OTHERS = "differs in every stage"


class StateNames(NamedTuple):
    """The names of all stages' tensors in the whole model.

    Attributes:
        prefixes: The prefix of all names of each stage.
        shared: The ranks of the pipeline that have the same tensor, by its name.
    """

    prefixes: list[str]
    shared: dict[str, list[int]]


def state_names(
    modules: Mapping[int, nn.Module], num_stages: int, ties: Sequence[Tie], backend: Backend
) -> StateNames:
    """Return the names; collective.

    Args:
        modules: This rank's stages by number.
        num_stages: Of all ranks.
        ties: The same on all ranks.
        backend: Of the pipeline's own messages.
    """
    own = [_kinds(module, number, ties) for number, module in modules.items()]
    found: dict[str, list[tuple[int, str]]] = {}
    for rank, of_rank in enumerate(all_gather_object(backend, own)):
        for name, kind in (item for kinds in of_rank for item in kinds.items()):
            found.setdefault(name, []).append((rank, kind))
    several = {name: having for name, having in found.items() if len(having) > 1}
    for having in several.values():
        if len({kind for _, kind in having}) > 1 or having[0][1] == _OTHERS:
            return StateNames([f"{stage}." for stage in range(num_stages)], {})
    return StateNames([""] * num_stages, {name: [*dict(having)] for name, having in several.items()})


def _kinds(module: nn.Module, stage: int, ties: Sequence[Tie]) -> dict[str, str]:
    """Return a text for each name in a stage's state dict; stages with equal texts may share the name."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    tied = {id(parameters[name]): f"tie {tie}" for tie in ties for number, name in tie if number == stage}
    return {name: _kind(value, tied) for name, value in module.state_dict(keep_vars=True).items()}


def _kind(value: Any, tied: Mapping[int, str]) -> str:
    if not isinstance(value, Tensor) or (isinstance(value, nn.Parameter) and id(value) not in tied):
        return _OTHERS
    return tied.get(id(value), f"buffer {value.dtype} {list(value.shape)}")
