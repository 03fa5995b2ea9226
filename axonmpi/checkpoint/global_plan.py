"""What the ranks agree on before they write: the layout of the files, and who writes what of them.

What has not changed since the last save is not worked out again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..groups.process_group import ProcessGroup
from .files.tensor_file import TensorFile, lay_out
from .global_specs import Catalogue, agree_on, without_repeated
from .shards.tensor_shard import Part
from .writing.local_plan import Share, joined, places_in, share_of

Parts = Mapping[str, Sequence[Part]]


class Agreed(NamedTuple):
    """What holds for the next save, too, unless something has changed.

    Attributes:
        catalogue: What all ranks know.
        max_file_size: As it was asked for.
        files: The layouts of the files, by kind.
        is_repeated: Whether ranks that are not equal have parts in common.
    """

    catalogue: Catalogue
    max_file_size: int
    files: Mapping[str, list[TensorFile]]
    is_repeated: bool


def agree(
    group: ProcessGroup, parts: Parts, notes: dict[str, Any], max_file_size: int, before: Agreed | None
) -> tuple[Agreed, Share]:
    """Agree on the files, and find what this rank writes of them; collective.

    Args:
        group: All ranks.
        parts: This rank's, by the kind of file; the same kinds on all ranks.
        notes: What else is to be known of all ranks together.
        max_file_size: Bytes of tensors in a file.
        before: What the ranks agreed on last time.

    Raises:
        CheckpointError: Ranks have tensors of one name with different shapes or dtypes; on all ranks.
    """
    known = agree_on(group, parts, notes, before and before.catalogue)
    if before and known.specs is before.catalogue.specs and max_file_size == before.max_file_size:
        files = before.files
    else:
        files = {kind: lay_out(kind, known.specs[kind], {"format": "pt"}, max_file_size) for kind in known.specs}
    share = _share_of(parts, files, known.equals)
    if before and known.has_same_parts(before.catalogue):
        is_repeated = before.is_repeated
    else:
        is_repeated = _is_repeated(share, known, group)
    if is_repeated:
        share = _share_of(without_repeated(group, parts), files, dict.fromkeys(parts, (1, 0)))
    return Agreed(known, max_file_size, files, is_repeated), share


def _share_of(
    parts: Parts, files: Mapping[str, Sequence[TensorFile]], equals: Mapping[str, tuple[int, int]]
) -> Share:
    places = places_in(files)
    return joined(
        [share_of([(part, places[kind, part.name]) for part in own], *equals[kind]) for kind, own in parts.items()]
    )


def _is_repeated(share: Share, known: Catalogue, group: ProcessGroup) -> bool:
    """Say whether all ranks together would write more than there is; collective."""
    total = torch.tensor(share.nbytes)
    group.all_reduce(total)
    return int(total) > sum(spec.nbytes for specs in known.specs.values() for spec in specs)
