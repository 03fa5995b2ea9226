"""One process of `tests/jobs/run gpu`: makes a world in one of several ways, and makes checks in it, one by one.

    python -m jobs.gpu.on_gpu.part --describe
    python -m jobs.gpu.on_gpu.part WAY --out FILE [--only PREFIX ...] [--ranks N]

What each check came to is a line of JSON in the file, written when the check ends, so that a process that dies
leaves behind what it knew. WAY says how ranks are connected:

    nccl          ranks without a backend for their CPUs; this process starts the others
    nccl+host     one rank with its CPU
    no nccl       one rank, on a GPU without NCCL
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

from . import Check, Figures, NotHereError, conformance, cost, ordering, parallelisms, training

CHECKS = [*conformance.CHECKS, *ordering.CHECKS, *parallelisms.CHECKS, *training.CHECKS, *cost.CHECKS]
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
        backend = ax.NcclBackend.init_from_unique_id(bytes.fromhex(options.id), options.rank, options.ranks, 0)
    return ax.World(backend, Topology.of([0] * options.ranks, options.rank))


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
    parser.add_argument("--id", help="of the communicator, in hexadecimal; made on rank 0 if not given")
    options = parser.parse_args()
    if options.describe:
        print(json.dumps(described()))
        return 0
    started = []
    if options.way == "nccl" and not options.id:
        options.id = bytes(ax.NcclBackend.generate_unique_id()).hex()
        command = [sys.executable, "-m", "jobs.gpu.on_gpu.part", *sys.argv[1:], "--id", options.id, "--rank"]
        started = [subprocess.Popen([*command, str(rank)]) for rank in range(1, options.ranks)]
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
