"""Whether the stages of a pipeline keep the names of one model.

    they do        "embedding.weight" | "blocks.3.weight"     the whole model has these names
    they do not    "0.weight"         | "0.weight"            it has those of nn.Sequential(*stages): "1.0.weight"

A name in several stages is one tensor if these are copies of a tied parameter, or buffers of one shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..backends import Backend, all_gather_object
from .ties import Tie

__all__ = ["names_differ"]

_OTHERS = "differs in every stage"


def names_differ(modules: Mapping[int, nn.Module], ties: Sequence[Tie], backend: Backend) -> bool:
    """Say whether no two stages have different tensors under one name; collective.

    Args:
        modules: This rank's stages by number.
        ties: The same on all ranks.
        backend: Of the pipeline's own messages.
    """
    own = [_kinds(module, number, ties) for number, module in modules.items()]
    found: dict[str, list[str]] = {}
    for of_stage in (each for of_rank in all_gather_object(backend, own) for each in of_rank):
        for name, kind in of_stage.items():
            found.setdefault(name, []).append(kind)
    return all(len(kinds) == 1 or {*kinds} == {kinds[0]} - {_OTHERS} for kinds in found.values())


def _kinds(module: nn.Module, stage: int, ties: Sequence[Tie]) -> dict[str, str]:
    """Return for each name in a stage's state dict what another stage's tensor of this name has to be."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    tied = {id(parameters[name]): f"tie {tie}" for tie in ties for number, name in tie if number == stage}
    return {name: _kind(value, tied) for name, value in module.state_dict(keep_vars=True).items()}


def _kind(value: Any, tied: Mapping[int, str]) -> str:
    if not isinstance(value, Tensor) or (isinstance(value, nn.Parameter) and id(value) not in tied):
        return _OTHERS
    return tied.get(id(value), f"buffer {value.dtype} {list(value.shape)}")
