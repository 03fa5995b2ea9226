"""mpi4py.futures: a pool of workers for a search, in turns with training in a process group of the same ranks."""

from others.public.program import Program

SEARCH = """
import os

import torch
from mpi4py import MPI
from mpi4py.futures import MPICommExecutor

COMM = MPI.COMM_WORLD
IS_DISTRIBUTED = "RANK" in os.environ  # or plain mpi4py


def model_and_data(seed):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(seed))
    return model, x, x.square().sum(1, keepdim=True).log()


def step(model, x, y, rate, average):
    loss = (model(x) - y).square().mean()
    model.zero_grad()
    loss.backward()
    average(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= rate * parameter.grad
    return loss.item()


def trial(rate):  # on one worker
    model, x, y = model_and_data(seed=1)
    for _ in range(200):
        loss = step(model, x, y, rate, lambda model: None)
    return rate, loss


def search(rates):
    best = None
    with MPICommExecutor(COMM, root=0) as pool:
        if pool is not None:
            found = list(pool.map(trial, rates))
            for rate, loss in found:
                print(f"trial {rate:.6f} loss {loss:.9f}", flush=True)
            best = min(found, key=lambda row: row[1])[0]
    return COMM.bcast(best)


def average(model):  # gradients of all ranks, in rank order
    for parameter in model.parameters():
        if IS_DISTRIBUTED:
            torch.distributed.all_reduce(parameter.grad)
        else:
            parameter.grad = sum(COMM.allgather(parameter.grad))
        parameter.grad /= COMM.size


if IS_DISTRIBUTED:
    torch.distributed.init_process_group()
rate = search([0.3 / 2**i for i in range(8)])
model, x, y = model_and_data(seed=10 + COMM.rank)
for number in range(1, 9):
    for _ in range(50):
        loss = step(model, x, y, rate, average)
    print(f"rank {COMM.rank} step {50 * number} loss {loss:.9f}", flush=True)
    rate = search([rate * factor for factor in (0.5, 0.7, 0.9, 1.0)])
if IS_DISTRIBUTED:
    torch.distributed.destroy_process_group()
"""
PROGRAMS = {
    "mpi4py-futures": Program(
        command="search.py",
        files={"search.py": SEARCH.lstrip()},
        results=r"(?:trial ([\d.]+) loss ([\d.]+)|rank (\d) step (\d+) loss ([\d.]+))",
        compared="losses of 40 trials in the pool, and of 400 steps on 3 ranks",
        ranks=3,  # 2 workers and the rank that asks
        variants={"mpi4py": "", "axonmpi": "axonmpi run --backend axonmpi"},
    ),
}
