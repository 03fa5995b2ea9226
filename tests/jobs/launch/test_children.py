"""Processes that ranks fork or spawn leave MPI alone and see no launcher."""

import sys

import pytest
from helpers.limits import limit

from axonmpi.launch import start as runtime
from axonmpi.testing import launch

# Workers that are spawned import the script again, so what the rank does is behind a guard.
SCRIPT = """
import multiprocessing
import os
import torch
import axonmpi as ax
from axonmpi.launch.launcher_variables import (
    detect_launchers, is_first_launched, launched_ranks, without_launcher_variables
)

class Look(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        cores = os.sched_getaffinity(0)
        seen = set(os.environ) - set(without_launcher_variables(os.environ))
        try:
            ax.World.init("mpi")
        except ax.LaunchError as error:
            return sorted(seen), detect_launchers(), str(error), cores
        return sorted(seen), [], "started", cores

def workers(world):
    for method in ("fork", "spawn") if world.rank == 1 else ("fork",):
        loader = torch.utils.data.DataLoader(
            Look(), num_workers=1, collate_fn=list, multiprocessing_context=method
        )
        for item in loader:
            (seen, launchers, message, cores), = item
            assert cores == all_cores
            assert seen == ["AXONMPI_PARENT_RANK"], seen
            assert launchers == []
            assert f"forked or spawned by rank {world.rank}, and MPI belongs to that rank alone" in message, message

def groups_of_a_fork(world):
    child = os.fork()
    if child == 0:
        try:
            ax.barrier()
        except ax.CommunicatorError as error:
            os._exit(7 if f"this process is a fork of rank {world.rank}" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

def start():
    try:
        ax.init_process_group()
    except ax.LaunchError as error:
        raise SystemExit(7 if "forked or spawned by a rank of the job" in str(error) else 8)

def run(context, target):
    child = context.Process(target=target)
    child.start()
    child.join()
    return child.exitcode

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["torch", "axonmpi"])
    older = multiprocessing.get_context("forkserver") if is_first_launched() else None
    assert older is None or run(older, print) == 0  # its server runs, and knows of no rank
    all_cores = os.sched_getaffinity(0)
    world = ax.init_process_group()  # keeps to one core where there are fewer cores than ranks
    before = dict(os.environ)
    assert launched_ranks() == 2
    workers(world)
    groups_of_a_fork(world)
    assert older is None or run(older, start) == 7
    assert dict(os.environ) == before
    ax.barrier()
    print("done")
"""


def test_children_of_ranks():
    """Forked, spawned, from a fork server that is older than the rank; and what a fork inherits."""
    result = launch(2, SCRIPT, timeout=limit(60), env={"OMP_NUM_THREADS": "1"})
    assert (result.returncode, result.leftover, result.stdout.split()) == (0, (), ["done"] * 2), result.stderr


@pytest.mark.parametrize(
    ("env", "said"),
    [({}, "forked or spawned by rank 2"), ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "2 ranks were launched")],
    ids=["child", "rank of a new job"],
)
def test_a_child_that_is_a_rank_of_a_new_job_may_start(monkeypatch, env, said):
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # where it may start, it finds no MPI
    for name, value in {"AXONMPI_PARENT_RANK": "2", **env}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(runtime.LaunchError, match=said):
        runtime.start_world()
