"""Whole tensors of the parts that all ranks have, put together with numpy."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import axonmpi as ax
from axonmpi.checkpoint.parts import Part


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
    from 0 to the number of ranks that have it, once. Ranks whose parts are all alike count as replicas.
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
    whole, seen = torch.zeros(shape, dtype=dtype).numpy(), np.zeros(shape, dtype=bool)
    numbers = collections.defaultdict(list)
    for each, count, number in of_ranks:
        for start, size, view in each.pieces:
            assert (tuple(view.shape), view.dtype) == (size, dtype), name
            index = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            assert np.all(~seen[index] | (whole[index] == view.numpy())), f"{name}: ranks differ"
            whole[index], seen[index] = view.numpy(), True
            for place in np.argwhere(np.ones(size)) + np.array(start, dtype=int):
                numbers[tuple(place)].append((each.copies * count, each.copy * count + number))
    assert seen.all(), f"{name}: nobody has some of it"
    for place, of_place in numbers.items():
        assert sorted(of_place) == [(len(of_place), number) for number in range(len(of_place))], (name, place)
    return torch.from_numpy(whole)
