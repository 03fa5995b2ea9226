"""Run on several ranks: everything where MPI was started for one thread at a time.

MPI4PY_RC_THREAD_LEVEL=serialized mpirun -n 2 python one_thread.py FOLDER
"""

import os
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from helpers.compare import refused
from mpi4py import MPI
from torch import nn

import axonmpi as ax

level, folder = os.environ["MPI4PY_RC_THREAD_LEVEL"], sys.argv[1]
assert MPI.Query_thread() == getattr(MPI, f"THREAD_{level.upper()}"), MPI.Query_thread()
ax.init_process_group(timeout=600)
rank, size = ax.get_rank(), ax.get_world_size()


def communicate() -> None:
    """Call what goes by a thread elsewhere."""
    tensors = [torch.full((number,), rank + 1.0) for number in (3, 300_000)]
    for work in [ax.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    assert [tensor.unique().tolist() for tensor in tensors] == [[sum(range(1, size + 1))]] * 2
    ax.barrier()


def trained(wrap, number: int, ranks: int) -> nn.Module:
    """Train a model on the own part of each batch, and save and load it."""
    torch.manual_seed(1)
    model = wrap(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for step in range(3):
        made = torch.Generator().manual_seed(step)
        inputs = torch.randn(4 * size, 8, generator=made).tensor_split(ranks)[number]
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if ranks > 1:
            work = ax.save_checkpoint(
                f"{folder}/{type(model).__name__}", model, optimizer, step=step, blocking=False
            )
    if ranks > 1:
        work.wait()
        assert ax.load_checkpoint(f"{folder}/{type(model).__name__}", model, optimizer).step == 2
    return model


communicate()
expected = trained(lambda module: module, 0, 1).state_dict()
torch.testing.assert_close(trained(ax.DDP, rank, size).state_dict(), expected)
torch.testing.assert_close(trained(ax.FSDP, rank, size).full_state_dict(), expected)
with ThreadPoolExecutor(1) as pool:
    beside = pool.submit(communicate)
    if level == "serialized":
        beside.result()
    else:
        refused(ax.CommunicatorError, (beside.result, "THREAD_FUNNELED, so only the main thread may communicate"))
ax.destroy_process_group()

warnings.simplefilter("ignore")
dist.init_process_group("axonmpi")
tensor = torch.ones(5)
future = dist.all_reduce(tensor, async_op=True).get_future()
chained = future.then(lambda done: dist.all_reduce(done.value()[0]) or done.value()[0])
assert chained.wait().tolist() == [size**2] * 5
message = dist.irecv(tensor, (rank - 1) % size)
refused(RuntimeError, (message.get_future, "MPI was started for one thread at a time"))
dist.barrier()
dist.send(torch.full((5,), float(rank)), (rank + 1) % size)
message.wait()
assert (tensor[0].item(), message.get_future().wait()[0][0].item()) == ((rank - 1) % size, (rank - 1) % size)
names = {thread.name for thread in threading.enumerate()}
assert not [name for name in names if name.startswith(("axonmpi-mpi", "axonmpi-torch"))], names
print("all is well\n", end="", flush=True)
