"""What the CPU spends on an `ax.all_reduce`, beside torch.distributed's on NCCL, at one rank."""

from functools import partial

import torch
import torch.distributed as dist

import axonmpi as ax
from axonmpi.cli.bench.harness.timing import MICROSECONDS, enqueue_clock, interleave
from axonmpi.utils.device import device_at

from . import Check, Figures, NotHereError

MOST = 2.0
"""How many times as long as torch's a call may take; processors differ by more than that."""
BLOCKS, CALLS = 60, 32


def check_all_reduce(numel: int, world: ax.World, figures: Figures) -> None:
    device = device_at(world.device)
    backend = "nccl" if device.is_asynchronous else "gloo"
    if world.size > 1:
        raise NotHereError("is measured at one rank")
    if backend == "nccl" and not dist.is_nccl_available():
        raise NotHereError("this torch has no NCCL to compare with")
    tensors = [torch.zeros(numel, device=world.device) for _ in range(4)]
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    calls = {
        "axonmpi": partial(ax.all_reduce, tensors[0]),
        "torch": partial(dist.all_reduce, tensors[1]),
        "axonmpi, asynchronous": lambda: ax.all_reduce(tensors[2], async_op=True).wait(),
        "torch, asynchronous": lambda: dist.all_reduce(tensors[3], async_op=True).wait(),
    }
    try:
        clock = enqueue_clock(device)
        microseconds = interleave(calls, blocks=BLOCKS, calls=CALLS, unit=MICROSECONDS, clock=clock)
    finally:
        dist.destroy_process_group()
    figures[f"all_reduce of {4 * numel} bytes, microseconds of the CPU"] = microseconds
    ratio = microseconds["axonmpi"] / microseconds["torch"]
    if device.is_asynchronous:  # on the CPU, another library is compared, and the time is the operation's
        assert ratio <= MOST, f"{ratio:.2f} times torch's, expected at most {MOST}: {microseconds}"


CHECKS = [
    Check(f"cost/all_reduce of {4 * numel} bytes", partial(check_all_reduce, numel)) for numel in (1, 1 << 18)
]
