"""What all ranks know of a checkpoint before they write it: every tensor's name, dtype and shape.

Ranks with all stages of a model know it by themselves: they compare digests, of 16 bytes each. Where some have
tensors that others have not, as stages of a pipeline, or state that an optimizer has made on some ranks only, they
tell each other, and again only after something has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..groups.process_group import ProcessGroup
from .files.tensor_file import TensorSpec
from .parts.part import Part

__all__ = ["Catalogue", "Digests", "Specs", "agree_on", "digests_of", "merged"]

Specs = Mapping[str, Sequence[TensorSpec]]
"""The tensors of each kind of file."""


class Digests(NamedTuple):
    """What a rank tells of its parts.

    Attributes:
        specs: The same where ranks have tensors of the same names, dtypes and shapes.
        boxes: For each kind of file the same where they also have the same parts of its tensors.
        notes: The same where they have the same notes.
    """

    specs: bytes
    boxes: tuple[bytes, ...]
    notes: bytes


class Catalogue(NamedTuple):
    """What the ranks have agreed on.

    Attributes:
        specs: All tensors, in the same order on all ranks.
        notes: The notes of all ranks.
        equals: For each kind of file, how many ranks have the same parts as this one, itself among them, and this
            rank's number among these.
        elsewhere: For each kind of file, names of tensors of which a lower rank that has other tensors as well has
            the same part as this one, as experts have a common trunk.
        told: What all ranks said, by which they know later that nothing has changed.
    """

    specs: Specs
    notes: dict[str, Any]
    equals: Mapping[str, tuple[int, int]]
    elsewhere: Mapping[str, AbstractSet[str]]
    told: tuple[tuple[bytes, ...], ...]


def digests_of(parts: Mapping[str, Sequence[Part]], notes: Mapping[str, Any]) -> Digests:
    """Return the digests of this rank's parts and notes; local.

    Args:
        parts: By the kind of file.
        notes: What JSON can hold.
    """
    specs = [f"{kind}\0{part.name}\0{part.dtype}\0{part.shape}" for kind, own in parts.items() for part in own]
    boxes = tuple(_digest(_boxes(part) for part in own) for own in parts.values())
    return Digests(_digest(specs), boxes, _digest([json.dumps(notes)]))


def _boxes(part: Part) -> str:
    boxes = [(piece.box.start, piece.box.size) for piece in part.pieces]
    return f"{part.name}\0{part.shape}\0{part.copies}\0{part.copy}\0{boxes}"


def _digest(lines: Iterable[str]) -> bytes:
    return hashlib.sha256("\n".join(lines).encode()).digest()[:16]


def agree_on(
    group: ProcessGroup,
    parts: Mapping[str, Sequence[Part]],
    notes: dict[str, Any],
    before: Catalogue | None = None,
) -> Catalogue:
    """Agree on the tensors of a checkpoint; collective.

    Args:
        group: All ranks.
        parts: This rank's, by the kind of file; the same kinds on all ranks.
        notes: What else is to be known of all ranks together; where two differ, the lower rank's counts.
        before: What the ranks agreed on last time.

    Raises:
        CheckpointError: Ranks have tensors of one name with different shapes or dtypes; on all ranks.
    """
    own = digests_of(parts, notes)
    of_all = [Digests(*digests) for digests in group.all_gather_object(tuple(own))]
    equals = {}
    for number, kind in enumerate(parts):
        ranks = [rank for rank, digests in enumerate(of_all) if digests.boxes[number] == own.boxes[number]]
        equals[kind] = len(ranks), ranks.index(group.rank)
    told = tuple((digests.specs, *digests.boxes) for digests in of_all)
    elsewhere: Mapping[str, AbstractSet[str]] = {kind: set() for kind in parts}
    if len({digests.specs for digests in of_all}) == 1:
        specs: Specs = _own_specs(parts)
    elif before is not None and before.told == told:
        specs, elsewhere = before.specs, before.elsewhere
    else:
        boxes_of = {
            kind: {part.name: _digest([_boxes(part)]) for part in of_kind} for kind, of_kind in parts.items()
        }
        spoken = {kind: of_kind for kind, of_kind in parts.items() if not equals[kind][1]}  # for this rank's equals
        answers = group.all_gather_object((_own_specs(spoken), {kind: boxes_of[kind] for kind in spoken}))
        specs = _joined([own_specs for own_specs, _ in answers])
        elsewhere = {
            kind: _known_before(boxes_of[kind], [known.get(kind, {}) for _, known in answers], of_all, number, own)
            for number, kind in enumerate(parts)
        }
    noted = [digests.notes for digests in of_all]
    if len(set(noted)) > 1:
        speaks = noted.index(own.notes) == group.rank
        notes = merged(group.all_gather_object(notes if speaks else {}))
    return Catalogue(specs, notes, equals, elsewhere, told)


def _known_before(
    own_boxes: Mapping[str, bytes],
    known: Sequence[Mapping[str, bytes]],
    of_all: Sequence[Digests],
    number: int,
    own: Digests,
) -> AbstractSet[str]:
    """Return the names of tensors of which a rank below the first of this one's equals has the same part."""
    first = next(rank for rank, digests in enumerate(of_all) if digests.boxes[number] == own.boxes[number])
    return {name for name, digest in own_boxes.items() if any(told.get(name) == digest for told in known[:first])}


def _own_specs(parts: Mapping[str, Sequence[Part]]) -> dict[str, list[TensorSpec]]:
    return {
        kind: [TensorSpec(part.name, part.dtype, part.shape) for part in of_kind] for kind, of_kind in parts.items()
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
