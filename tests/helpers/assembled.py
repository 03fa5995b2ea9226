"""Whole tensors of the parts that all ranks have, put together with numpy."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import axonmpi as ax
from axonmpi.checkpoint.parts.part import Part


class Described(NamedTuple):
    """A part with its values, which can be sent."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]
    copies: int
    copy: int
    is_split: bool

    @property
    def layout(self) -> object:
        return self.name, [piece[:2] for piece in self.pieces], self.copies, self.copy


def assembled(world: ax.World, parts: Iterable[Part]) -> dict[str, Tensor]:
    """Put the parts of all ranks together; collective.

    Checked on the way: ranks with the same elements have the same values, and every element is that of each number
    from 0 to the number of ranks that have it, once. Ranks with all of these parts alike count as replicas.
    """
    own = [
        Described(
            *(part.name, part.shape, part.dtype),
            [(piece.box.start, piece.box.size, piece.view.clone()) for piece in part.pieces],
            *(part.copies, part.copy, part.is_split),
        )
        for part in parts
    ]
    assert len({each.name for each in own}) == len(own), "a name comes twice"
    everywhere: Sequence[Sequence[Described]] = world.default_group.all_gather_object(own)
    layouts = [repr([each.layout for each in of_rank]) for of_rank in everywhere]
    found = collections.defaultdict(list)
    for rank, of_rank in enumerate(everywhere):
        alike = [other for other, layout in enumerate(layouts) if layout == layouts[rank]]
        for each in of_rank:
            found[each.name].append((each, len(alike), alike.index(rank)))
    return {name: _joined(name, of_ranks) for name, of_ranks in found.items()}


def _joined(name: str, of_ranks: Sequence[tuple[Described, int, int]]) -> Tensor:
    ((shape, dtype, _),) = {(each.shape, each.dtype, each.is_split) for each, _, _ in of_ranks}
    whole = torch.zeros(shape, dtype=dtype).numpy()
    numbers, most = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)  # a bit for each number
    for each, count, number in of_ranks:
        bit = 1 << (each.copy * count + number)
        for start, size, view in each.pieces:
            assert (tuple(view.shape), view.dtype) == (size, dtype), name
            index = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            assert np.all((numbers[index] == 0) | (whole[index] == view.numpy())), f"{name}: ranks differ"
            assert not np.any(numbers[index] & bit), f"{name}: two ranks have one number"
            assert np.all((most[index] == 0) | (most[index] == each.copies * count)), f"{name}: copies differ"
            whole[index] = view.numpy()
            numbers[index] |= bit
            most[index] = each.copies * count
    assert np.all((1 << most) - 1 == numbers), f"{name}: a number is missing"
    assert np.all(most), f"{name}: nobody has some of it"
    return torch.from_numpy(whole)


def fill(parts: Iterable[Part], tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors to this rank's parts of them."""
    with torch.no_grad():
        for part in parts:
            assert (part.shape, part.dtype) == (tuple(tensors[part.name].shape), tensors[part.name].dtype), (
                part.name
            )
            for piece in part.pieces:
                piece.view.copy_(tensors[part.name][piece.box.slices])
