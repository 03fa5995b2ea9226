"""What each rank does: torch's own tests of torch.distributed, one after the other, with a backend of choice.

    mpirun -n 2 python in_ranks.py axonmpi REPORT NAME ...

The tests are written to be spawned. Here they are called in the ranks that mpirun has started, with a group made
and destroyed around each. Tests say for which backends they are: ours stands where gloo stands. After a test in
which a rank has failed the job ends, since nobody knows what the others wait for; the caller starts the next.
"""

import faulthandler
import json
import os
import sys
import tempfile
import traceback
import unittest
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.testing._internal.common_utils import set_rng_seed

from axonmpi.launch.start import start_world

SECONDS = 60
"""How long a test may take."""
GROUP_SECONDS = 15
"""The time-out of its groups."""
TAKEN_FOR_GLOO = "test_accumulate_gradients_no_sync"
"""Tests that decide by the backend's name, while they run, whether to use the CPU or a GPU."""


def suite(size: int):
    """The class of torch's tests, made for gloo."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), TEMP_DIR=tempfile.mkdtemp())
    set_rng_seed()  # models are made when it is imported
    from torch.testing._internal.distributed import distributed_test

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        pass

    return distributed_test, Suite


def outcome_of(test, name: str) -> str:
    """Run one test; "" if it has passed, "skip", or what went wrong on this rank."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    skips = {skip.exit_code for skip in TEST_SKIPS.values()}
    try:
        getattr(test, name)()
    except unittest.SkipTest:
        return "skip"
    except SystemExit as end:
        return "skip" if end.code in skips else f"exit {end.code}"
    except BaseException:
        return traceback.format_exc()
    return ""


def prepare(comm, module) -> None:
    """Give all ranks of a test one empty folder."""
    path = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    if comm.rank == 0:
        for name in ("barrier", "test_dir", "init_dir"):
            Path(path, name).mkdir()
    comm.Barrier()
    os.environ.update(TEMP_DIR=path, INIT_METHOD=f"file://{path}/init_dir/shared_init_file")
    module.Barrier.barrier_id = 0


def run_one(comm, module, tests, name: str, backend: str) -> list[str]:
    """Run a test on all ranks and return the outcome of each."""
    prepare(comm, module)
    test = tests(name)
    test.rank, test.file_name = comm.rank, f"{os.environ['TEMP_DIR']}/group"
    where = (
        {"init_method": test.init_method, "rank": comm.rank, "world_size": comm.size} if backend == "gloo" else {}
    )
    dist.init_process_group(backend, timeout=timedelta(seconds=GROUP_SECONDS), **where)
    comm.Barrier()
    set_rng_seed()
    module.BACKEND = "gloo" if name.startswith(TAKEN_FOR_GLOO) else backend
    outcomes = comm.allgather(outcome_of(test, name))
    if not any(outcome not in ("", "skip") for outcome in outcomes) and dist.is_initialized():
        dist.destroy_process_group()
    return outcomes


def main() -> None:
    backend, report, *names = sys.argv[1:]
    comm = start_world().comm
    module, tests = suite(comm.size)
    if names == ["--list"]:
        if comm.rank == 0:
            Path(report).write_text(json.dumps(unittest.TestLoader().getTestCaseNames(tests)))
        return
    control = comm.Dup()
    for name in names:
        if comm.rank == 0:
            note(report, name, "began")
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        outcomes = run_one(control, module, tests, name, backend)
        faulthandler.dump_traceback_later(SECONDS, exit=True)  # what follows may hang too
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(outcomes) if text not in ("", "skip")]
        if comm.rank == 0:
            well = "skipped" if "skip" in outcomes else "passed"
            note(report, name, "failed" if failed else well, "\n".join(failed))
        if failed:
            control.Barrier()
            os._exit(1)


def note(report: str, name: str, outcome: str, why: str = "") -> None:
    with open(report, "a") as file:
        file.write(json.dumps({"name": name, "outcome": outcome, "why": why}) + "\n")


if __name__ == "__main__":
    main()
