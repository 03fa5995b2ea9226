"""torch.distributed over MPI: every operation, and how jobs end that cannot go on."""

import sys

import pytest
import torch
from helpers import TESTS, WITH_HELPERS
from helpers.compare import assert_said
from helpers.limits import limit
from helpers.over_gloo import equals_gloo
from helpers.programs import run_alone

from axonmpi.interop import autoload
from axonmpi.testing import launch


def test_every_operation_gives_what_numpy_gives(seed) -> None:
    """On all four ranks, and in a group of two of them."""
    done = launch(4, TESTS / "interop/every_operation.py", seed, timeout=limit(120), env=WITH_HELPERS)
    assert (done.returncode, done.stderr, done.stdout.count("all is well")) == (0, "", 4), done.stderr


def test_a_stock_program_gives_what_it_gives_over_gloo(tmp_path) -> None:
    equals_gloo(2, ["ddp", "fsdp2_and_dcp", "dtensor", "functional"], tmp_path)


# ---- what cannot work -------------------------------------------------------------------------------------------


FAILURES = """
from datetime import timedelta
import pytest, torch, torch.distributed as dist

def refused(message, call, *arguments, **options):
    with pytest.raises(Exception, match=message):
        call(*arguments, **options)

refused("rank=0, world_size=3.: by MPI this is rank . of 2.*mpirun -n 3",
        dist.init_process_group, "axonmpi", rank=0, world_size=3)
dist.init_process_group("axonmpi")
rank, tensor = dist.get_rank(), torch.ones(2)
mismatch, late, later, aborted, left = (dist.new_group() for _ in range(5))

work = dist.all_reduce(torch.ones(2 + rank), group=mismatch, async_op=True)
refused("rank 1: all_reduce.float32 .3., SUM.", work.wait)

late.set_timeout(timedelta(seconds=1))
if rank == 0:
    refused("was not complete after 1 s: rank 1 did not come", dist.all_reduce, tensor, group=late)
    refused("was not complete after 1 s: rank 1 did not come", later.monitored_barrier, timedelta(seconds=1))
dist.barrier()

aborted.abort()
refused("torch.distributed has aborted it", dist.all_reduce, tensor, group=aborted)

if rank == 0:
    refused("waited for it on this node", dist.all_reduce, tensor, group=left)
else:
    left.abort()
dist.barrier()

if rank:
    raise KeyError("no such thing")
dist.all_reduce(tensor)
"""


def test_failures_have_their_causes_and_one_that_nobody_catches_ends_the_job() -> None:
    done = launch(2, FAILURES, timeout=limit(60))
    assert (done.timed_out, done.returncode == 0, done.leftover) == (False, False, ())
    assert_said(done.stderr, "Error: ", "KeyError: 'no such thing'", times=1)


# ---- beside other backends --------------------------------------------------------------------------------------


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

# Under torchrun it says what to type, whether torch has a store or this library is asked where the ranks meet.
import os, pytest
os.environ.update(TORCHELASTIC_RUN_ID="one", RANK="0", WORLD_SIZE="2")
for given in {}, {"store": dist.HashStore(), "rank": 0, "world_size": 2}:
    with pytest.raises(Exception, match="by the variables of torchrun this is rank 0 of 2") as caught:
        dist.init_process_group("axonmpi", **given)
    assert "mpirun -n 2 python SCRIPT" in str(caught.value)
"""


def test_alone_it_is_a_world_of_one_and_others_are_left_alone() -> None:
    done = run_alone(ALONE)
    assert done.returncode == 0, done.stderr


def test_importing_the_library_registers_the_backend_where_torch_may_not() -> None:
    asks = "import torch.distributed as dist; print(dist.is_backend_available('axonmpi'))"
    done = run_alone(f"{asks}; import axonmpi; {asks}", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    found_by_torch = str(torch.__version__ >= "2.14")  # by another entry point, which nothing forbids
    assert done.stdout.split() == [found_by_torch, "True"], done.stderr


def test_the_entry_point_raises_nothing_whatever_torch_has_become(monkeypatch) -> None:
    monkeypatch.delattr(torch.distributed.Backend, "AXONMPI", raising=False)
    monkeypatch.delattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers")
    autoload.load()
    with pytest.raises(AttributeError):
        autoload.register()
