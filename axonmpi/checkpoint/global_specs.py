"""Names, dtypes and shapes of all tensors of a checkpoint, known to all ranks before they write.

Where all ranks have the same tensors, they compare digests of 16 bytes each and send nothing else. Stages of a
pipeline, or an optimizer with state on some ranks only, make lists differ. Then one rank for each different list
sends it, and again only after a change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..groups.process_group import ProcessGroup
from .files.tensor_file import TensorSpec
from .shards.tensor_shard import Replicas, TensorShard

_DIGEST_BYTES = 16

Specs = Mapping[str, Sequence[TensorSpec]]
"""Tensors by the kind of file."""
Shards = Mapping[str, Sequence[TensorShard]]
"""This rank's shards by the kind of file; the same kinds on all ranks."""


class GlobalSpecs(NamedTuple):
    """The tensors and notes of all ranks.

    Attributes:
        specs: All tensors, in the same order on all ranks.
        notes: Merged notes of all ranks.
        equal_ranks: By the kind of file, the ranks with the same shards as this one.
        digests: A row for each digest, with its values on all ranks: a later save compares them with its own.
    """

    specs: Specs
    notes: dict[str, Any]
    equal_ranks: Mapping[str, Replicas]
    digests: Sequence[bytes]

    def has_same_shards(self, other: GlobalSpecs) -> bool:
        """Return True if every rank has the same shards as in another save; local, the same on all ranks."""
        return self.specs is other.specs and self.digests[2:] == other.digests[2:]


def digests_of(shards: Shards, notes: Mapping[str, Any]) -> bytes:
    """Return the digests that a rank sends, of 16 bytes each; local.

    Args:
        shards: Of the rank.
        notes: Of the rank, as JSON.

    Returns:
        Digests of the tensors' names, dtypes and shapes, of the notes, and of the shards of each kind of file.
    """
    specs = [f"{kind}\0{shard.name}\0{shard.dtype}\0{shard.shape}" for kind, own in shards.items() for shard in own]
    of_kinds = [_digest(map(_position, own)) for own in shards.values()]
    return b"".join([_digest(specs), _digest([json.dumps(notes)]), *of_kinds])


def _position(shard: TensorShard) -> str:
    pieces = [(piece.subarray.start, piece.subarray.size) for piece in shard.pieces]
    size, rank = shard.replicas
    return f"{shard.name}\0{shard.shape}\0{size}\0{rank}\0{pieces}"


def _digest(lines: Iterable[str]) -> bytes:
    return hashlib.sha256("\n".join(lines).encode()).digest()[:_DIGEST_BYTES]


def gather_specs(
    group: ProcessGroup, shards: Shards, notes: dict[str, Any], before: GlobalSpecs | None = None
) -> GlobalSpecs:
    """Gather the tensors and notes of all ranks; collective.

    Args:
        group: All ranks.
        shards: This rank's.
        notes: This rank's, as JSON; of two different values the lower rank's counts.
        before: Result of the last save.

    Raises:
        CheckpointError: Tensors of one name have different shapes or dtypes; on all ranks.
    """
    own_digests = torch.frombuffer(bytearray(digests_of(shards, notes)), dtype=torch.uint8)
    digests = group.all_gather(own_digests).numpy().reshape(group.size, -1, _DIGEST_BYTES)
    same = (digests == digests[group.rank]).all(-1)  # [W, digests] True for ranks with this rank's digest
    same_before = same[: group.rank]
    equal_ranks = {
        kind: Replicas(int(same[:, column].sum()), int(same_before[:, column].sum()))
        for column, kind in enumerate(shards, 2)
    }
    rows = [digests[:, column].tobytes() for column in range(2 + len(shards))]
    # A list is sent by the first rank that has it.
    specs: Specs
    if before is not None and before.digests[0] == rows[0]:
        specs = before.specs
    elif same[:, 0].all():
        specs = _own_specs(shards)
    else:
        specs = _joined(group.all_gather_object({} if same_before[:, 0].any() else _own_specs(shards)))
    if not same[:, 1].all():
        notes = merged(group.all_gather_object({} if same_before[:, 1].any() else notes))
    return GlobalSpecs(specs, notes, equal_ranks, rows)


def without_duplicates(group: ProcessGroup, shards: Shards) -> dict[str, list[TensorShard]]:
    """Leave out shards that a lower rank has as well, such as the unsharded parameters of experts; collective.

    It is needed for ranks that differ in some shards and are equal in others. One rank writes each shard that is
    left.

    Args:
        group: All ranks.
        shards: This rank's.
    """
    own = {kind: {each.name: _digest([_position(each)]) for each in of_kind} for kind, of_kind in shards.items()}
    lower_ranks: Sequence[dict[str, dict[str, bytes]]] = group.all_gather_object(own)[: group.rank]

    def is_first(kind: str, name: str) -> bool:
        return all(lower[kind].get(name) != own[kind][name] for lower in lower_ranks)

    return {kind: [each for each in of_kind if is_first(kind, each.name)] for kind, of_kind in shards.items()}


def _own_specs(shards: Shards) -> dict[str, list[TensorSpec]]:
    return {kind: [TensorSpec(each.name, each.dtype, each.shape) for each in own] for kind, own in shards.items()}


def _joined(of_ranks: Sequence[Specs]) -> Specs:
    found: dict[str, dict[str, tuple[TensorSpec, int]]] = {}
    for rank, specs in enumerate(of_ranks):
        for kind, of_kind in specs.items():
            for spec in of_kind:
                known, other = found.setdefault(kind, {}).setdefault(spec.name, (spec, rank))
                if known != spec:
                    raise CheckpointError(
                        f"{spec.name!r} is {known.dtype} {list(known.shape)} on rank {other} and {spec.dtype} "
                        f"{list(spec.shape)} on rank {rank}: tensors of different names in one model have to differ"
                    )
    return {kind: [spec for spec, _ in of_kind.values()] for kind, of_kind in found.items()}


def merged(of_ranks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge dicts, and the dicts in them; of two different other values, the first counts."""
    result: dict[str, Any] = {}
    for own in of_ranks:
        for key, value in own.items():
            known = result.setdefault(key, value)
            if isinstance(known, dict) and isinstance(value, dict):
                result[key] = merged([known, value]) if known is not value else dict(value)
    return result
