"""What has to wait for what, though the CPU waits for nothing.

Each operation is started while the device is still busy, reads what the device has yet to write, and is followed at
once by what would spoil it: a write into its input, or memory that is freed and taken by somebody else. On one rank
nothing is reduced, so operations that copy into other memory show what operations in place cannot.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import axonmpi as ax
from axonmpi import Work
from axonmpi.backends import Backend
from axonmpi.utils.device import device_at

from . import Check, Figures

NUMEL = 1 << 16
LATE, ROUNDS = 1 << 24, 24
"""Elements that keep a group's stream busy, and how often memory is given back before it is used."""


def keep_busy(place: torch.device) -> None:
    """Let the device compute for some hundredths of a second; on the CPU hardly at all."""
    size = 16 if place.type == "cpu" else 4096
    matrix = torch.full((size, size), 1e-4, device=place)
    for _ in range(40):
        matrix = matrix @ matrix + 1e-4


def start(operation: str, backend: Backend, tensor: Tensor) -> tuple[list[Work], Callable[[], Any]]:
    """Start an operation; return its Works, and what returns the tensor that then holds the result."""
    size, rank = backend.size, backend.rank
    if operation == "messages":
        received = torch.empty_like(tensor)
        works = [backend.isend(tensor, (rank + 1) % size), backend.irecv(received, (rank - 1) % size)]
        return works, received.clone
    if operation == "all_to_all":
        cut = (tensor.dtype, tuple(tensor.shape), 0)
        work = backend.all_to_all(tensor.tensor_split(size), async_op=True, cut_from=cut)
        return [work], lambda: torch.cat(work.result())
    options = {"sizes": [NUMEL] * size} if operation == "all_gather" else {}
    work = getattr(backend, operation)(tensor, async_op=True, **options)
    return [work], tensor.clone if operation in IN_PLACE else work.result


def expected(operation: str, rank: int, size: int) -> Tensor:
    """Return the result where rank r puts in `content(r)`."""
    each = torch.stack([content(rank) for rank in range(size)])
    return {
        "all_gather": each.flatten(),
        "reduce_scatter": each.sum(0).tensor_split(size)[rank],
        "all_to_all": each.tensor_split(size, dim=1)[rank].flatten(),
        "messages": each[rank - 1],
        "all_reduce": each.sum(0),
        "broadcast": each[0],
    }[operation]


def content(rank: int) -> Tensor:
    return torch.arange(NUMEL).remainder(251).float() + 1000 * rank


IN_PLACE = ("all_reduce", "broadcast")
OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all", "messages", *IN_PLACE)


def check_late_input(operation: str, world: ax.World, figures: Figures) -> None:
    """The input is written after a long computation, and overwritten as soon as the operation was waited for."""
    backend, device = world.default_group.backend.on(world.device), device_at(world.device)
    own = content(world.rank).to(world.device)
    for stream in (device.current_stream(), device.new_stream()):
        with device.within(stream):
            source = torch.full((NUMEL,), -1.0, device=world.device)
            for work in start(operation, backend, source)[0]:  # the first time NCCL connects, and the CPU waits
                work.wait()
            backend.barrier()
            device.synchronize()
            keep_busy(world.device)
            source.copy_(own)
            began = time.perf_counter()
            works, result = start(operation, backend, source)
            told = time.perf_counter() - began
            # messages are told to the GPU when somebody waits for them, or asks
            is_done = operation != "messages" and works[0].done()
            for work in works:
                work.wait()
            found = result().clone()
            source.fill_(-2.0)
            after = torch.zeros_like(found).copy_(found)
            assert torch.equal(after.cpu(), expected(operation, world.rank, world.size)), operation
            if world.device.type != "cpu":  # where computation is over when its call returns, this may be, too
                assert not is_done, f"{operation} was over when its call returned: the call waited for the GPU"
                figures[f"{operation} under way was started in, microseconds"] = told * 1e6
        device.synchronize()


def check_freed_memory(world: ax.World, figures: Figures) -> None:
    """Inputs and results that nobody holds any more, while the group's stream is still busy with others."""
    backend, size = world.default_group.backend.on(world.device), world.size
    large = torch.ones(NUMEL if world.device.type == "cpu" else LATE, device=world.device)
    sizes = [NUMEL] * size
    late = [backend.all_gather(large, sizes=[large.numel()] * size, async_op=True) for _ in range(4)]
    kept, zeros = [], []
    for number in range(ROUNDS):
        source = torch.full((NUMEL,), float(number + 100 * world.rank), device=world.device)
        kept.append(backend.all_gather(source, sizes=sizes, async_op=True))
        del source
        torch.full((NUMEL,), -1.0, device=world.device)  # takes the memory, if it may be taken
        backend.all_gather(torch.full((NUMEL,), 7.0, device=world.device), sizes=sizes, async_op=True)
        zeros.append(torch.zeros(NUMEL * size, device=world.device))  # the same with the memory of a lost result
    for number, work in enumerate(kept):
        parts = work.result().split(sizes)
        assert [part.unique().tolist() for part in parts] == [[number + 100.0 * rank] for rank in range(size)]
    assert not any(tensor.any() for tensor in zeros)
    for work in late:
        assert work.result().sum().item() == large.numel() * size


def check_waiting(world: ax.World, figures: Figures) -> None:
    """`wait(timeout)` blocks, `synchronize` leaves nothing under way, order of operations is that of the calls."""
    backend, place = world.default_group.backend.on(world.device), world.device
    tensor = torch.ones(NUMEL, device=place)
    keep_busy(place)
    works = [backend.all_reduce(tensor, async_op=True) for _ in range(3)]
    works[-1].wait(timeout=60)
    assert all(work.done() for work in works)
    assert set(tensor.unique().tolist()) == {float(world.size) ** 3}
    backend.barrier()


CHECKS = [
    *(Check(f"ordering/{operation}", partial(check_late_input, operation)) for operation in OPERATIONS),
    Check("ordering/freed memory", check_freed_memory),
    Check("ordering/waiting", check_waiting),
]
