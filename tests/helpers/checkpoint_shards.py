"""Shards of tensors for tests: cut into subarrays at random, dealt out to ranks, put together again."""

import collections
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import axonmpi as ax
from axonmpi.checkpoint.files.tensor_file import TensorSpec, lay_out
from axonmpi.checkpoint.ranks import CheckpointRanks
from axonmpi.checkpoint.shards.subarrays import Subarray
from axonmpi.checkpoint.shards.tensor_shard import UNREPLICATED, Piece, Replicas, TensorShard
from axonmpi.checkpoint.writing.job import Job
from axonmpi.checkpoint.writing.local_plan import local_plan_of, locations_in
from axonmpi.groups.world import partition_group

SHAPES = {
    "columns": (512, 4096),
    "rows": (700, 512),
    "deep": (3, 40, 50, 60),
    "long": (1_500_000,),
    "none": (0, 4),
    "one": (),
    "small": (7, 3),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def whole_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    choice = random.Random(seed).choice
    return {
        name: torch.randint(0, 100, shape, generator=generator).to(choice(DTYPES)) for name, shape in SHAPES.items()
    }


def cut(subarray, count, chance):
    """Cut a subarray into about as many, along any dimensions."""
    subarrays = [subarray]
    for _ in range(20 * count):
        if len(subarrays) >= count:
            break
        index = max(range(len(subarrays)), key=lambda at: subarrays[at].numel)
        dim = chance.randrange(len(subarray.size)) if subarray.size else 0
        if not subarray.size or subarrays[index].size[dim] < 2:
            continue
        one = subarrays.pop(index)
        at = chance.randrange(1, one.size[dim])
        for first, size in ((0, at), (at, one.size[dim] - at)):
            start = (*one.start[:dim], one.start[dim] + first, *one.start[dim + 1 :])
            subarrays.append(Subarray(start, (*one.size[:dim], size, *one.size[dim + 1 :])))
    return subarrays


def memory_of(tensor, subarray):
    """Return the values of a subarray in memory of some strides."""
    values = tensor[subarray.slices].clone()
    if values.dim() > 1 and subarray.numel % 2:
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
    return values


def shards_of(rank, size, tensors, seed):
    """Cut each tensor into subarrays, and give each subarray to one rank, or the tensor to all ranks."""
    chance = random.Random(seed)
    shards = []
    for name, tensor in tensors.items():
        copied = chance.random() < 0.3
        subarrays = cut(Subarray.full(tensor.shape), chance.randrange(1, 9), chance)
        owners = [chance.randrange(size) for _ in subarrays]
        pieces = [
            Piece(subarray, memory_of(tensor, subarray))
            for subarray, owner in zip(subarrays, owners, strict=True)
            if copied or owner == rank
        ]
        replicas = Replicas(size, rank) if copied else UNREPLICATED
        shards.append(TensorShard(name, tuple(tensor.shape), tensor.dtype, pieces, replicas))
    return shards


def full_shard(name, tensor):
    """Return the shard of a rank that has the full tensor."""
    shape = tuple(tensor.shape)
    return TensorShard(name, shape, tensor.dtype, [Piece(Subarray.full(shape), tensor)], is_split=False)


STATE = b'{"any": "thing"}'


def job_for(path, shards, max_file_size=1 << 40):
    files = {"model": lay_out("model", [TensorSpec(p.name, p.dtype, p.shape) for p in shards], {}, max_file_size)}
    plan = local_plan_of({"model": shards}, locations_in(files), {"model": UNREPLICATED})
    return Job(path, files["model"], plan, plan.nbytes, {"state.json": STATE})


def ranks_on_two_nodes(world: ax.World) -> CheckpointRanks:
    """Make the groups of a checkpoint for ranks of which each half is on a node; collective."""
    half = world.size // 2
    nodes = partition_group(world.default_group, [range(half), range(half, world.size)])
    return CheckpointRanks(world.default_group, nodes, 2)


# ---- put together -----------------------------------------------------------------------------------------------


class Described(NamedTuple):
    """A shard with its values, which can be sent."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]
    replicas: Replicas
    is_split: bool


def assembled(world: ax.World, shards: Iterable[TensorShard]) -> dict[str, Tensor]:
    """Put the shards of all ranks together; collective.

    Checked on the way: ranks with the same elements have the same values, and every element is that of each number
    from 0 to the number of ranks that have it, once. Ranks with all of these parts alike count as replicas.
    """
    own = [
        Described(
            *(shard.name, shard.shape, shard.dtype),
            [(piece.subarray.start, piece.subarray.size, piece.view.clone()) for piece in shard.pieces],
            *(shard.replicas, shard.is_split),
        )
        for shard in shards
    ]
    assert len({each.name for each in own}) == len(own), "a name comes twice"
    everywhere: Sequence[Sequence[Described]] = world.default_group.all_gather_object(own)
    layouts = [
        [(each.name, [piece[:2] for piece in each.pieces], each.replicas) for each in of_rank]
        for of_rank in everywhere
    ]
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
        bit = 1 << (each.replicas.rank * count + number)
        for start, size, view in each.pieces:
            assert (tuple(view.shape), view.dtype) == (size, dtype), name
            index = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            assert np.all((numbers[index] == 0) | (whole[index] == view.numpy())), f"{name}: ranks differ"
            assert not np.any(numbers[index] & bit), f"{name}: two ranks have one number"
            assert np.all((most[index] == 0) | (most[index] == each.replicas.size * count)), (
                f"{name}: copies differ"
            )
            whole[index] = view.numpy()
            numbers[index] |= bit
            most[index] = each.replicas.size * count
    assert np.all((1 << most) - 1 == numbers), f"{name}: a number is missing"
    assert np.all(most), f"{name}: nobody has some of it"
    return torch.from_numpy(whole)


def fill(shards: Iterable[TensorShard], tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors to this rank's shards of them."""
    with torch.no_grad():
        for shard in shards:
            assert (shard.shape, shard.dtype) == (tuple(tensors[shard.name].shape), tensors[shard.name].dtype), (
                shard.name
            )
            for piece in shard.pieces:
                piece.view.copy_(tensors[shard.name][piece.subarray.slices])
