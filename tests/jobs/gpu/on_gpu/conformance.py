"""Every operation, dtype, layout and reduction, against numpy."""

from functools import partial

import torch
from helpers.collective_checks import LAYOUTS, CollectiveChecks, allows
from helpers.numpy_reference import DTYPES, Shape, reductions, same_bits, values

import axonmpi as ax
from axonmpi import ReduceOp

from . import Check, Figures

UNEVEN = (5, 0, 11, 3)
SHAPE = (13, 37)


class ChecksWithoutTags(CollectiveChecks):
    """GPUs have no tags."""

    def ring(self, dtype: torch.dtype, shape: Shape, layout: str = "contiguous", tag: int = 0) -> None:
        super().ring(dtype, shape, layout)


def check_dtype(dtype: torch.dtype, world: ax.World, figures: Figures) -> None:
    for asynchronous in (False, True):
        checks = ChecksWithoutTags(world.default_group, asynchronous=asynchronous, seed=asynchronous)
        for layout in LAYOUTS:
            if allows(dtype, SHAPE, layout):
                checks.every_operation(dtype, SHAPE, layout)
        checks.every_operation(dtype, (0,))
        checks.every_operation(dtype, (1,))
        for op in reductions(dtype):
            checks.all_reduce(dtype, (7,), op)
            checks.reduce(dtype, (3, 40), op, world.size - 1)
            checks.reduce_scatter(dtype, (3, 40), op, 1)
        checks.all_gather(dtype, (1, 3), 0, sizes=UNEVEN)
        checks.gather(dtype, (1, 3), 0, sizes=UNEVEN)
        checks.all_to_all([(dtype, (3, 5)), (dtype, (2,)), (dtype, (0,))])
        checks.barrier()
        checks.finish()


def check_flat_memory(world: ax.World, figures: Figures) -> None:
    """The operations that fully sharded data parallelism is made of, and several reductions in one launch."""
    backend, rank = world.default_group.backend.on(world.device), world.rank
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for sizes in ([64] * world.size, [*range(3, 3 + world.size)], [0] * (world.size - 1) + [5]):
            parts = [values(dtype, (size,), owner, 1) for owner, size in enumerate(sizes)]
            whole = backend.node_empty([sum(sizes)], dtype)
            backend.all_gather_into(whole, parts[rank].to(world.device), sizes)
            assert same_bits(whole, torch.cat(parts))

            number, output = sum(sizes), torch.empty(sizes[rank], device=world.device)
            given = [torch.full((number,), owner + 1.0, dtype=dtype) for owner in range(world.size)]
            total = (torch.arange(number) % 5 * sum(range(1, world.size + 1))).split(sizes)[rank]
            sent = given[rank] * (torch.arange(number) % 5).to(dtype)
            halves = [part.to(world.device) for part in sent.tensor_split(2)]
            backend.reduce_scatter_into(output, halves, sizes, ReduceOp.SUM)
            assert output.tolist() == total.tolist()
    tensors = [torch.full((size,), rank + 1.0, device=world.device) for size in (1, 5, 1000)]
    if hasattr(backend, "reduce_together") and backend.reduce_together(tensors, ReduceOp.SUM):
        for tensor in tensors:
            assert set(tensor.tolist()) == {float(sum(range(1, world.size + 1)))}


def check_groups(world: ax.World, figures: Figures) -> None:
    """Groups of some ranks, objects, and the functions of the module."""
    everything = world.new_group(range(world.size)[::-1])
    own = world.partition([[rank] for rank in range(world.size)])
    for group in (world.default_group, everything, own):
        tensor = torch.full((100,), world.rank + 1.0, device=world.device)
        group.all_reduce(tensor)
        assert set(tensor.tolist()) == {sum(rank + 1.0 for rank in group.ranks)}
        assert group.all_gather_object({"rank": world.rank}) == [{"rank": rank} for rank in group.ranks]
    for group in (own, everything):
        group.close()
    with world.activate():
        gradient = torch.full((3,), float(world.rank), device=world.device)
        ax.sync_gradients([gradient])
        assert gradient.tolist() == [(world.size - 1) / 2] * 3
        assert ax.broadcast_object("from rank 0" if world.is_main else None) == "from rank 0"
        ax.barrier()


CHECKS = [
    *(Check(f"conformance/{str(dtype).removeprefix('torch.')}", partial(check_dtype, dtype)) for dtype in DTYPES),
    Check("conformance/flat memory", check_flat_memory),
    Check("conformance/groups", check_groups),
]
