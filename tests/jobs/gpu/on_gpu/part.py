"""One process of `tests/jobs/run gpu`: makes a world in one of several ways, and makes checks in it, one by one.

    python -m jobs.gpu.on_gpu.part --describe
    python -m jobs.gpu.on_gpu.part WAY --out FILE [--only PREFIX ...] [--ranks N --id FILE]

What each check came to is a line of JSON in the file, written when the check ends, so that a process that dies
leaves behind what it knew. WAY says how ranks are connected:

    nccl          one rank, without a backend for its CPU
    nccl+host     one rank with its CPU
    no nccl       one rank, on a GPU without NCCL
    file          several ranks that this process starts; rank 0 writes the id into a file
    mpi+nccl      ranks of an mpirun with GPUs
    mpi, cpu      ranks of an mpirun, or one, without GPUs
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import axonmpi as ax
from axonmpi.backends import LocalBackend
from axonmpi.launch.topology import Topology
from axonmpi.utils.waiting import network_backoff, wait_until

from . import Check, Figures, NotHereError, conformance, cost, ordering, parallelisms, training

CHECKS = [*conformance.CHECKS, *ordering.CHECKS, *parallelisms.CHECKS, *training.CHECKS, *cost.CHECKS]
_ID_SECONDS = 60.0
_PACKAGES = ("axonmpi", "nccl4py", "cuda-core", "cuda-bindings", "mpi4py", "tyro")
_BACKENDS = {"mpi+nccl": "nccl", "mpi": "mpi", "cpu": "mock"}
_TRACE_LINES = 12


# ---- worlds -----------------------------------------------------------------------------------------------------


def make_world(options: argparse.Namespace) -> ax.World:
    """Connect the ranks in one of the ways."""
    if options.way in _BACKENDS:
        return ax.World.init(_BACKENDS[options.way])
    if options.way == "no nccl":
        backend = LocalBackend(memory=torch.device("cuda", 0))
        backend.place = torch.device("cuda", 0)
    elif options.way == "nccl+host":
        backend = ax.NcclBackend.over(LocalBackend(), 0)
    else:
        unique_id = unique_id_in(options.id, options.rank) if options.id else ax.NcclBackend.generate_unique_id()
        backend = ax.NcclBackend.init_from_unique_id(unique_id, options.rank, options.ranks, 0)
    return ax.World(backend, Topology.of([0] * options.ranks, options.rank))


def unique_id_in(file: Path, rank: int) -> bytes:
    """Write an id into a file on rank 0, and read it on the others."""
    if rank == 0:
        content = bytes(ax.NcclBackend.generate_unique_id())
        being_written = file.with_suffix(".tmp")
        being_written.write_bytes(content)
        being_written.rename(file)
        return content
    if not wait_until(file.exists, network_backoff(), _ID_SECONDS):
        raise TimeoutError(f"rank {rank}: rank 0 has written no id into {file} within {_ID_SECONDS:g} s")
    return file.read_bytes()


# ---- checks -----------------------------------------------------------------------------------------------------


def made(check: Check, world: ax.World) -> dict[str, Any]:
    """Make a check; return its outcome, reason, seconds and figures."""
    figures: Figures = {}
    outcome, reason = "passed", ""
    began = time.perf_counter()
    try:
        check.run(world, figures)
    except NotHereError as error:
        outcome, reason = "skipped", str(error)
    except Exception as error:
        trace = "".join(traceback.format_tb(error.__traceback__)[-_TRACE_LINES:])
        outcome, reason = "failed", f"{type(error).__name__}: {error}\n{trace}"
    seconds = round(time.perf_counter() - began, 3)
    return {"name": check.name, "outcome": outcome, "reason": reason, "seconds": seconds, "figures": figures}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", nargs="?")
    parser.add_argument("--describe", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--id", type=Path)
    options = parser.parse_args()
    if options.describe:
        print(json.dumps(described()))
        return 0
    others = range(options.rank + 1, options.ranks if options.rank == 0 else 0)
    command = [sys.executable, "-m", "jobs.gpu.on_gpu.part", *sys.argv[1:], "--rank"]
    started = [subprocess.Popen([*command, str(rank)]) for rank in others]
    world = make_world(options)
    chosen = [check for check in CHECKS if check.name.startswith(tuple(options.only))]
    with open(options.out if world.is_main else os.devnull, "a", buffering=1) as out, world.activate():
        for check in chosen:
            print(json.dumps({"begun": check.name}), file=out)
            outcome = made(check, world)
            told = world.default_group.all_gather_object((outcome["outcome"], outcome["reason"]))
            failed = [f"rank {rank}: {reason}" for rank, (what, reason) in enumerate(told) if what == "failed"]
            if failed:
                outcome |= {"outcome": "failed", "reason": "\n".join(failed)}
            print(json.dumps(outcome), file=out)
        print(json.dumps({"ended": True}), file=out)
    world.close()
    codes = {process.wait() for process in started}
    return int(bool(codes - {0}))


# ---- the machine ------------------------------------------------------------------------------------------------


def described() -> dict[str, Any]:
    """Say what this machine has, and what it lacks and why."""
    installed = {package.name: package.version for package in metadata.distributions()}
    machine: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "driver": subprocess.getoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader"),
        "cores": os.cpu_count(),
        "packages": {name: installed.get(name) for name in _PACKAGES},
    }
    found = (("nccl", ax.NcclBackend.nccl_version), ("torch_nccl", torch.cuda.nccl.version), ("mpirun", mpirun))
    for name, find in found:
        try:
            machine[name] = find()
        except Exception as error:
            machine[name], machine[f"{name}_missing"] = None, str(error)
    return machine


def mpirun() -> str:
    """Return the launcher, if MPI starts."""
    from axonmpi.launch.start import library_info
    from axonmpi.testing.mpirun import find_mpirun

    library_info()
    return str(find_mpirun())


if __name__ == "__main__":
    sys.exit(main())
