"""What all ranks know of a checkpoint before they write it: every tensor's name, dtype and shape.

Ranks with all stages of a model know it by themselves: they compare digests, of 16 bytes each. Where some have
tensors that others have not, as stages of a pipeline, or state that an optimizer has made on some ranks only, they
tell each other, and again only after something has changed.
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
from .shards.tensor_shard import TensorShard

_DIGEST_BYTES = 16

Specs = Mapping[str, Sequence[TensorSpec]]
"""The tensors of each kind of file."""


class GlobalSpecs(NamedTuple):
    """What the ranks have agreed on.

    Attributes:
        specs: All tensors, in the same order on all ranks.
        notes: The notes of all ranks.
        equals: For each kind of file, how many ranks have the same shards as this one, itself among them, and this
            rank's number among these.
        told: What all ranks said, a row for each digest, by which they know later what has not changed.
    """

    specs: Specs
    notes: dict[str, Any]
    equals: Mapping[str, tuple[int, int]]
    told: Sequence[bytes]

    def has_same_parts(self, other: GlobalSpecs) -> bool:
        """Say whether all ranks have the same shards of the same tensors as then; local, the same on all ranks."""
        return self.specs is other.specs and self.told[2:] == other.told[2:]


def digests_of(shards: Mapping[str, Sequence[TensorShard]], notes: Mapping[str, Any]) -> bytes:
    """Return what a rank tells of its shards and notes, in digests of 16 bytes each; local.

    Args:
        shards: By the kind of file.
        notes: What JSON can hold.

    Returns:
        The first digest is the same where ranks have tensors of the same names, dtypes and shapes, the second where
        they have the same notes. Then comes one for each kind of file, the same where they have the same shards.
    """
    specs = [f"{kind}\0{shard.name}\0{shard.dtype}\0{shard.shape}" for kind, own in shards.items() for shard in own]
    subarrays = [_digest(_subarrays(shard) for shard in own) for own in shards.values()]
    return b"".join([_digest(specs), _digest([json.dumps(notes)]), *subarrays])


def _subarrays(shard: TensorShard) -> str:
    subarrays = [(piece.subarray.start, piece.subarray.size) for piece in shard.pieces]
    return f"{shard.name}\0{shard.shape}\0{shard.copies}\0{shard.copy}\0{subarrays}"


def _digest(lines: Iterable[str]) -> bytes:
    return hashlib.sha256("\n".join(lines).encode()).digest()[:_DIGEST_BYTES]


def gather_specs(
    group: ProcessGroup,
    shards: Mapping[str, Sequence[TensorShard]],
    notes: dict[str, Any],
    before: GlobalSpecs | None = None,
) -> GlobalSpecs:
    """Agree on the tensors of a checkpoint; collective.

    Args:
        group: All ranks.
        shards: This rank's, by the kind of file; the same kinds on all ranks.
        notes: What else is to be known of all ranks together; where two differ, the lower rank's counts.
        before: What the ranks agreed on last time.

    Raises:
        CheckpointError: Ranks have tensors of one name with different shapes or dtypes; on all ranks.
    """
    told = group.all_gather(torch.frombuffer(bytearray(digests_of(shards, notes)), dtype=torch.uint8)).numpy()
    of_all = told.reshape(group.size, -1, _DIGEST_BYTES)
    same = (of_all == of_all[group.rank]).all(-1)  # [W, digests] as this rank
    before_this = same[: group.rank]
    equals = {
        kind: (int(same[:, 2 + number].sum()), int(before_this[:, 2 + number].sum()))
        for number, kind in enumerate(shards)
    }
    rows = [of_all[:, number].tobytes() for number in range(2 + len(shards))]
    specs: Specs
    if before is not None and before.told[0] == rows[0]:
        specs = before.specs
    elif same[:, 0].all():
        specs = _own_specs(shards)
    else:  # the first of those with the same tensors speaks for all of them
        specs = _joined(group.all_gather_object({} if before_this[:, 0].any() else _own_specs(shards)))
    if not same[:, 1].all():
        notes = merged(group.all_gather_object({} if before_this[:, 1].any() else notes))
    return GlobalSpecs(specs, notes, equals, rows)


def without_duplicates(
    group: ProcessGroup, shards: Mapping[str, Sequence[TensorShard]]
) -> dict[str, list[TensorShard]]:
    """Leave out shards that a lower rank has as well, such as what experts have in common; collective.

    For ranks that are not equal and nevertheless have equal shards. What is left is to be written by one rank.

    Args:
        group: All ranks.
        shards: This rank's, by the kind of file.
    """
    own = {
        kind: {shard.name: _digest([_subarrays(shard)]) for shard in of_kind} for kind, of_kind in shards.items()
    }
    lower: Sequence[dict[str, dict[str, bytes]]] = group.all_gather_object(own)[: group.rank]
    return {
        kind: [
            shard
            for shard in of_kind
            if all(known[kind].get(shard.name) != own[kind][shard.name] for known in lower)
        ]
        for kind, of_kind in shards.items()
    }


def _own_specs(shards: Mapping[str, Sequence[TensorShard]]) -> dict[str, list[TensorSpec]]:
    return {
        kind: [TensorSpec(shard.name, shard.dtype, shard.shape) for shard in of_kind]
        for kind, of_kind in shards.items()
    }


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
    """Join dicts, and the dicts in them; where they differ otherwise, the first counts."""
    result: dict[str, Any] = {}
    for own in of_ranks:
        for key, value in own.items():
            known = result.setdefault(key, value)
            if isinstance(known, dict) and isinstance(value, dict):
                result[key] = merged([known, value]) if known is not value else dict(value)
    return result
