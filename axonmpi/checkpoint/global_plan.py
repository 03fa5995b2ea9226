"""The files of a checkpoint, planned alike on all ranks: which tensors each file has, and their offsets in it.

The plan is kept, and the next save computes again only the steps whose inputs have changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..groups.process_group import ProcessGroup
from .files.tensor_file import TensorFile, lay_out
from .global_specs import GlobalSpecs, Shards, gather_specs, without_duplicates
from .shards.tensor_shard import UNREPLICATED
from .writing.local_plan import LocalPlan, local_plan_of, locations_in


class GlobalPlan(NamedTuple):
    """The layout of the files, kept for the next save.

    Attributes:
        known: The tensors and notes of all ranks.
        max_file_size: The argument of the save.
        files: The files of each kind.
        has_duplicates: True if ranks with different shards have some equal ones.
    """

    known: GlobalSpecs
    max_file_size: int
    files: Mapping[str, list[TensorFile]]
    has_duplicates: bool


def plan_writes(
    group: ProcessGroup, shards: Shards, notes: dict[str, Any], max_file_size: int, before: GlobalPlan | None
) -> tuple[GlobalPlan, LocalPlan]:
    """Plan the files of a checkpoint, and the bytes that this rank writes; collective.

    Args:
        group: All ranks.
        shards: This rank's.
        notes: This rank's other values for `state.json`.
        max_file_size: Bytes of tensors in a file.
        before: Plan of the last save.

    Raises:
        CheckpointError: Ranks have tensors of one name with different shapes or dtypes; on all ranks.
    """
    known = gather_specs(group, shards, notes, before and before.known)
    if before and known.specs is before.known.specs and max_file_size == before.max_file_size:
        files = before.files
    else:
        files = {kind: lay_out(kind, specs, {"format": "pt"}, max_file_size) for kind, specs in known.specs.items()}
    locations = locations_in(files)
    plan = local_plan_of(shards, locations, known.equal_ranks)
    if before and known.has_same_shards(before.known):
        has_duplicates = before.has_duplicates
    else:
        # Duplicates show in the sum: all ranks together would write more bytes than there are.
        planned = torch.tensor(plan.nbytes)
        group.all_reduce(planned)
        has_duplicates = int(planned) > sum(spec.nbytes for specs in known.specs.values() for spec in specs)
    if has_duplicates:
        own = without_duplicates(group, shards)
        plan = local_plan_of(own, locations, dict.fromkeys(own, UNREPLICATED))
    return GlobalPlan(known, max_file_size, files, has_duplicates), plan
