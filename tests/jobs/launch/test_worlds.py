"""A world of an mpi4py communicator, while other ranks have a world of their own, or go on with mpi4py."""

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
own_rank = own.rank
reversed_order = own.Split(0, -own.rank)
refused(ax.errors.CommunicatorError, "already, in its order", lambda: ax.World.init(comm=reversed_order))
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
    refused(ax.errors.CommunicatorError, "belongs to already, got 4 ranks", lambda: ax.World.init(comm=everyone))
END
ax.destroy_process_group()
torch.distributed.init_process_group("axonmpi")  # of the same ranks
assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (own_rank, 2)
torch.distributed.new_group([0], use_local_synchronization=True)
pair = torch.distributed.new_group([1, 0], use_local_synchronization=True)
torch.distributed.all_reduce(total := torch.ones(1), group=pair)
assert total == 2 and ax.init_process_group().size == 2
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


@pytest.mark.parametrize(("culprit", "rank"), [(1, 0), (2, 1)], ids=["trains", "serves"])
def test_a_failure_in_one_world_ends_both(culprit, rank) -> None:
    done = run(f"if everyone.rank == {culprit}: raise KeyError('lost')\nworld.barrier()\neveryone.barrier()")
    assert done.returncode == 1
    assert f"[rank {rank} of 2, rank {culprit} of MPI] KeyError: 'lost'" in done.stderr.splitlines()
    assert done.stdout.count("all is well") == 0


PLAIN_SERVER = """
import sys
from mpi4py import MPI
everyone = MPI.COMM_WORLD
trains = everyone.rank < 2
own = everyone.Split(trains, everyone.rank)
if trains:
    import axonmpi as ax
    if sys.argv[1] == "absent" and everyone.rank == 1:
        everyone.barrier()
    forgets = sys.argv[1] == "forgotten" and everyone.rank == 1
    world = ax.init_process_group(comm=None if forgets else own, timeout=5)
    world.barrier()
    if sys.argv[1].isdecimal():
        sys.exit(int(sys.argv[1]))
    everyone.barrier()
else:
    if sys.argv[1] == "server":
        raise KeyError("lost")
    if sys.argv[1] != "85":
        everyone.barrier()
    print("served")
"""


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("none", 0, ""),
        ("3", 3, "has ended with exit code 3 while other ranks may go on, and ends the job"),
        ("85", 85, ""),
        ("server", 1, "KeyError: 'lost'"),
        ("forgotten", 1, "ranks have called it, with one comm, in 5 s"),
        ("absent", 1, "init_process_group: not all of 2 ranks have called it, with one comm, in 5 s"),
    ],
)
def test_others_of_the_job_are_programs_of_mpi4py(fault, code, message, tmp_path) -> None:
    program = tmp_path / "serve.py"
    program.write_text(PLAIN_SERVER)
    done = launch(3, "-m", "mpi4py", program, fault, timeout=limit(60), env={"OMP_NUM_THREADS": "1"})
    assert (done.timed_out, done.leftover, done.returncode) == (False, (), code), done.stderr
    assert message in done.stderr
    assert done.stdout.count("served") == (code in (0, 85))
