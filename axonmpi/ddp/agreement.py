"""Whether all ranks have the same model (layer 5).

Asked once, when a model is wrapped: ranks whose models differ would average gradients of different parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..group import ProcessGroup

__all__ = ["check_same_model"]

Entry = tuple[str, str]


def check_same_model(module: nn.Module, group: ProcessGroup) -> None:
    """Raise on every rank unless names, shapes and dtypes of parameters and buffers agree; collective.

    Args:
        module: This rank's model.
        group: The ranks to compare.

    Raises:
        ValueError: Naming the first parameter or buffer that differs, and the ranks.
    """
    entries = _entries(module)
    digest = hashlib.sha256(repr(entries).encode()).digest()[:16]
    digests = group.all_gather_object(digest)
    if len(set(digests)) > 1:
        raise ValueError(_first_difference(group.all_gather_object(entries)))


def _entries(module: nn.Module) -> list[Entry]:
    entries = []
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run one forward before wrapping the model")
        grad = "" if parameter.requires_grad else ", frozen"
        entries.append((f"parameter {name!r}", f"{parameter.dtype} {list(parameter.shape)}{grad}"))
    for name, buffer in module.named_buffers():
        entries.append((f"buffer {name!r}", f"{buffer.dtype} {list(buffer.shape)}"))
    return entries


def _first_difference(all_entries: Sequence[Sequence[Entry]]) -> str:
    longest = max(len(entries) for entries in all_entries)
    for position in range(longest):
        seen = [entries[position] if position < len(entries) else None for entries in all_entries]
        if len(set(seen)) > 1:
            break
    ranks_of: dict[str, list[int]] = {}
    for rank, entry in enumerate(seen):
        text = "no further parameter" if entry is None else " ".join(entry)
        ranks_of.setdefault(text.replace("torch.", ""), []).append(rank)
    lines = [f"rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}: {text}" for text, r in ranks_of.items()]
    return (
        f"the model is not the same on all ranks; first difference at position {position}:\n  "
        + "\n  ".join(lines)
        + "\nBuild the model in the same way on every rank."
    )
