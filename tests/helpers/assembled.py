"""Whole tensors of the parts that all ranks have, put together with numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

import axonmpi as ax
from axonmpi.checkpoint.parts import Part

Described = tuple[str, tuple[int, ...], torch.dtype, list, int, int, bool]


def assembled(
    world: ax.World, parts: Iterable[Part]
) -> tuple[dict[str, Tensor], dict[str, int], dict[str, tuple[int, bool]]]:
    """Put the parts of all ranks together; collective.

    Returns:
        By name the whole tensors, which ranks with the same elements agree on; on how many ranks each element is;
        and the number of copies and whether these share the writing, which all ranks agree on.
    """
    own = [
        (
            *(part.name, part.shape, part.dtype),
            [(piece.box.start, piece.box.size, piece.view.clone()) for piece in part.pieces],
            *(part.copies, part.copy, part.is_split),
        )
        for part in parts
    ]
    assert len({each[0] for each in own}) == len(own), "a name comes twice"
    everywhere: Sequence[Sequence[Described]] = world.default_group.all_gather_object(own)
    found: dict[str, list[Described]] = {}
    for of_rank in everywhere:
        for each in of_rank:
            found.setdefault(each[0], []).append(each)
    joined = {name: _joined(name, of_ranks) for name, of_ranks in found.items()}
    return tuple({name: each[index] for name, each in joined.items()} for index in range(3))  # type: ignore[return-value]


def _joined(name: str, of_ranks: Sequence[Described]) -> tuple[Tensor, int, tuple[int, bool]]:
    ((shape, dtype, is_split),) = {(each[1], each[2], each[6]) for each in of_ranks}
    whole = torch.zeros(shape, dtype=dtype).numpy()
    numbers: dict[int, np.ndarray] = {}
    for _, _, _, pieces, copies, copy, _ in of_ranks:
        if not pieces:
            continue
        assert 0 <= copy < copies, name
        times = numbers.setdefault(copies, np.zeros((copies, *shape), dtype=int))
        for start, size, view in pieces:
            assert tuple(view.shape) == size, name
            index = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            before = whole[index]
            assert np.all((times.sum(0)[index] == 0) | (before == view.numpy())), f"{name}: ranks differ"
            whole[index] = view.numpy()
            times[(copy, *index)] += 1
    if not whole.size:
        return torch.from_numpy(whole), 0, (1, is_split)
    ((copies, times),) = numbers.items()
    (count,) = set(times.ravel().tolist())
    return torch.from_numpy(whole), count * copies, (copies, is_split)
