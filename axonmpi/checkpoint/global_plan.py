"""What the ranks agree on before they write: the layout of the files, and who writes what of them.

What has not changed since the last save is not worked out again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..groups.process_group import ProcessGroup
from .files.tensor_file import TensorFile, lay_out
from .global_specs import GlobalSpecs, gather_specs, without_duplicates
from .shards.tensor_shard import TensorShard
from .writing.local_plan import LocalPlan, joined, local_plan_of, locations_in

Shards = Mapping[str, Sequence[TensorShard]]


class GlobalPlan(NamedTuple):
    """What holds for the next save, too, unless something has changed.

    Attributes:
        specs_of_all: What all ranks know.
        max_file_size: As it was asked for.
        files: The layouts of the files, by kind.
        has_duplicates: Whether ranks that are not equal have shards in common.
    """

    specs_of_all: GlobalSpecs
    max_file_size: int
    files: Mapping[str, list[TensorFile]]
    has_duplicates: bool


def plan_writes(
    group: ProcessGroup, shards: Shards, notes: dict[str, Any], max_file_size: int, before: GlobalPlan | None
) -> tuple[GlobalPlan, LocalPlan]:
    """Agree on the files, and find what this rank writes of them; collective.

    Args:
        group: All ranks.
        shards: This rank's, by the kind of file; the same kinds on all ranks.
        notes: What else is to be known of all ranks together.
        max_file_size: Bytes of tensors in a file.
        before: What the ranks agreed on last time.

    Raises:
        CheckpointError: Ranks have tensors of one name with different shapes or dtypes; on all ranks.
    """
    known = gather_specs(group, shards, notes, before and before.specs_of_all)
    if before and known.specs is before.specs_of_all.specs and max_file_size == before.max_file_size:
        files = before.files
    else:
        files = {kind: lay_out(kind, known.specs[kind], {"format": "pt"}, max_file_size) for kind in known.specs}
    share = _local_plan_of(shards, files, known.equals)
    if before and known.has_same_parts(before.specs_of_all):
        has_duplicates = before.has_duplicates
    else:
        has_duplicates = _has_duplicates(share, known, group)
    if has_duplicates:
        share = _local_plan_of(without_duplicates(group, shards), files, dict.fromkeys(shards, (1, 0)))
    return GlobalPlan(known, max_file_size, files, has_duplicates), share


def _local_plan_of(
    shards: Shards, files: Mapping[str, Sequence[TensorFile]], equals: Mapping[str, tuple[int, int]]
) -> LocalPlan:
    places = locations_in(files)
    return joined(
        [
            local_plan_of([(shard, places[kind, shard.name]) for shard in own], *equals[kind])
            for kind, own in shards.items()
        ]
    )


def _has_duplicates(share: LocalPlan, known: GlobalSpecs, group: ProcessGroup) -> bool:
    """Say whether all ranks together would write more than there is; collective."""
    total = torch.tensor(share.nbytes)
    group.all_reduce(total)
    return int(total) > sum(spec.nbytes for specs in known.specs.values() for spec in specs)
