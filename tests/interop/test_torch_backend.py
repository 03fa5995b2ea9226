"""torch.distributed over MPI: every operation, and how jobs end that cannot go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from axonmpi.interop import autoload
from axonmpi.testing import launch

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_operation_gives_what_numpy_gives(ranks) -> None:
    done = launch(ranks, HERE / "every_operation.py", timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.count("all is well") == ranks


START = """
import time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("axonmpi", timeout=timedelta(seconds=3))
rank, tensor = dist.get_rank(), torch.ones(2)
dist.all_reduce(tensor)
"""


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("if rank == 1: raise KeyError('no such thing')\ndist.all_reduce(tensor)", "KeyError: 'no such thing'"),
        ("dist.all_reduce(torch.ones(2 + rank), async_op=True).wait()", "rank 1: all_reduce(float32 [3], SUM)"),
        ("if rank: time.sleep(60)\ndist.all_reduce(tensor)", "was not complete after 3 s: rank 1 did not come"),
        (
            "dist.group.WORLD.set_timeout(timedelta(seconds=1))\nif rank: time.sleep(60)\ndist.all_reduce(tensor)",
            "was not complete after 1 s: rank 1 did not come",
        ),
        ("dist.group.WORLD.abort()\ndist.all_reduce(tensor)", "torch.distributed has aborted it"),
        (
            "if rank: dist.group.WORLD.abort(), time.sleep(60)\ndist.all_reduce(tensor)",
            "waited for it on this node",
        ),
    ],
    ids=["a rank raises", "mismatch", "time-out", "another time-out", "abort", "abort by another rank"],
)
def test_a_job_that_cannot_go_on_ends_with_the_cause(program, cause) -> None:
    done = launch(2, START + program, timeout=50)
    assert not done.timed_out
    assert done.returncode != 0
    assert cause in done.stderr
    assert done.leftover == ()


def test_what_the_program_says_of_its_ranks_is_checked() -> None:
    program = "import torch.distributed as dist; dist.init_process_group('axonmpi', rank=0, world_size=3)"
    done = launch(2, program, timeout=50)
    assert "init_process_group(rank=0, world_size=3): by MPI this is rank" in done.stderr
    assert "mpirun -n 3" in done.stderr


def test_under_torchrun_it_says_what_to_type(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import torch.distributed as dist; dist.init_process_group('axonmpi')")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run([sys.executable, *torchrun], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "by the variables of torchrun this is rank" in done.stderr
    assert "mpirun -n 2 python SCRIPT" in done.stderr


ALONE = """
import sys, torch, torch.distributed as dist
assert not {"axonmpi", "mpi4py"} & set(sys.modules), "torch has imported them"
assert dist.is_backend_available("axonmpi")
try:
    dist.init_process_group("gloo")
except ValueError as error:
    assert "RANK expected" in str(error)
dist.init_process_group("axonmpi")
tensor = torch.ones(2)
dist.all_reduce(tensor)
assert dist.get_world_size() == 1 and tensor.sum() == 2
work = dist.irecv(tensor)
dist.isend(torch.zeros(2), 0).wait()
work.wait()
assert work._source_rank() == 0 and tensor.sum() == 0
group = dist.new_group([0])
dist.barrier(group)
dist.destroy_process_group()
"""


def test_alone_it_is_a_world_of_one_and_others_are_left_alone() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_entry_point_raises_nothing_whatever_torch_has_become(monkeypatch) -> None:
    monkeypatch.delattr(torch.distributed.Backend, "AXONMPI", raising=False)
    monkeypatch.delattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers")
    autoload.load()
    with pytest.raises(AttributeError):
        autoload.register()
