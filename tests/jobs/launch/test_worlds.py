"""Worlds of an mpi4py communicator: some ranks of a job train, the others have a world of their own."""

import pytest
from helpers.limits import limit

from axonmpi.testing import LaunchResult, launch

TRAIN_AND_SERVE = """
import os, torch
from mpi4py import MPI
import axonmpi as ax
from axonmpi.observe import job_names, records_of

everyone = MPI.COMM_WORLD
trains = everyone.rank % 2 == 1
own = everyone.Split(trains, everyone.rank)
server = everyone.rank - 1 if trains else None

def refused(kind, message, call):
    try:
        call()
    except kind as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)

refused(TypeError, "expected an mpi4py intracommunicator", lambda: ax.World.init(comm=everyone.Get_group()))
refused(TypeError, "that has this rank, got COMM_NULL", lambda: ax.World.init(comm=MPI.COMM_NULL))
refused(ValueError, "expected None for a mock world", lambda: ax.World.init("mock", comm=own))
world = ax.init_process_group(comm=own)
assert (world.rank, world.size, world.local_size) == (own.rank, 2, 2)
processes = everyone.allgather(os.getpid())
records = [record for name in job_names() for record in records_of(name) if record.pid in processes]
assert len({record.job for record in records}) == 2
assert sorted((record.rank, record.size) for record in records) == [(0, 2), (0, 2), (1, 2), (1, 2)]
own.Free()  # the world has a duplicate
if trains:
    model = ax.DDP(torch.nn.Linear(2, 1))
    for _ in range(3):
        batch = everyone.recv(source=server)
        model(batch).sum().backward()
    gradient = model.module.weight.grad.tolist()
    assert gradient == [[18.0, 18.0]], gradient  # the mean of ranks with ones and twos, 4 rows, 3 steps
else:
    group = world.new_group([1, 0])
    for step in range(3):
        total = torch.ones(1)
        group.all_reduce(total)
        everyone.send(torch.full((4, 2), float(everyone.rank // 2 + total.item() / 2)), dest=everyone.rank + 1)
    refused(ax.errors.CommunicatorError, "has started a world of 2 ranks before", lambda: ax.World.init())
END
ax.destroy_process_group()
print("all is well")
"""


def run(end: str) -> LaunchResult:
    program = TRAIN_AND_SERVE.replace("END", end)
    done = launch(4, program, timeout=limit(60), env={"OMP_NUM_THREADS": "1"})
    assert (done.timed_out, done.leftover) == (False, ()), done.stderr
    return done


def test_half_of_the_ranks_train_and_half_serve() -> None:
    done = run("")
    assert (done.returncode, done.stdout.count("all is well"), done.stderr) == (0, 4, ""), done.stderr


@pytest.mark.parametrize("culprit", [1, 2], ids=["trains", "serves"])
def test_a_failure_in_one_world_ends_both(culprit) -> None:
    done = run(f"if everyone.rank == {culprit}: raise KeyError('lost')\nworld.barrier()\neveryone.barrier()")
    assert done.returncode == 1
    assert f"[rank {culprit}] KeyError: 'lost'" in done.stderr.splitlines()
    assert done.stdout.count("all is well") == 0
