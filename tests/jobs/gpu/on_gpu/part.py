"""One process of `tests/jobs/run gpu`: makes a world in one of several ways, and makes checks in it, one by one.

    python -m on_gpu.part --describe
    python -m on_gpu.part WAY --out FILE [--only PREFIX ...] [--ranks N --rank R --id FILE]

What each check came to is a line of JSON in the file, written when the check ends, so that a process that dies
leaves behind what it knew. WAY says how ranks are connected, see `WAYS`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import axonmpi as ax
from axonmpi.backends import LocalBackend
from axonmpi.launch.topology import Topology
from axonmpi.utils.waiting import network_backoff, wait_until

from . import conformance, cost, ordering, parallelisms, training
from .check import Check, Figures, NotHereError

CHECKS: list[Check] = [
    *conformance.CHECKS,
    *ordering.CHECKS,
    *parallelisms.CHECKS,
    *training.CHECKS,
    *cost.CHECKS,
]
_ID_SECONDS = 60.0
_PACKAGES = ("axonmpi", "nccl4py", "cuda-core", "cuda-bindings", "mpi4py")
_TRACE_LINES = 12


# ---- worlds -----------------------------------------------------------------------------------------------------


def without_host(options: argparse.Namespace) -> ax.World:
    unique_id = ax.NcclBackend.generate_unique_id()
    return ax.World(ax.NcclBackend(unique_id, 0, 1, 0), Topology.of([0], 0))


def with_host(options: argparse.Namespace) -> ax.World:
    return ax.World(ax.NcclBackend.over(LocalBackend(), 0), Topology.of([0], 0))


def without_nccl(options: argparse.Namespace) -> ax.World:
    place = torch.device("cuda", 0)
    backend = LocalBackend(memory=place)
    backend.place = place
    return ax.World(backend, Topology.of([0], 0))


def by_mpi(options: argparse.Namespace) -> ax.World:
    return ax.init_process_group("nccl")


def by_mpi_alone(options: argparse.Namespace) -> ax.World:
    return ax.init_process_group()


def by_file(options: argparse.Namespace) -> ax.World:
    """Connect ranks that know no more than a file: rank 0 writes the id there."""
    content = unique_id_in(options.id, options.rank)
    backend = ax.NcclBackend.init_from_unique_id(content, options.rank, options.ranks, 0)
    return ax.World(backend, Topology.of([0] * options.ranks, options.rank))


def on_the_cpu(options: argparse.Namespace) -> ax.World:
    return ax.World.init("mock")


WAYS: dict[str, Callable[[argparse.Namespace], ax.World]] = {
    "nccl": without_host,
    "nccl+host": with_host,
    "no nccl": without_nccl,
    "mpi+nccl": by_mpi,
    "file": by_file,
    "mpi": by_mpi_alone,
    "cpu": on_the_cpu,
}


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
        outcome, reason = "failed", f"{type(error).__name__}: {error}\n{short_trace(error)}"
    seconds = round(time.perf_counter() - began, 3)
    return {"name": check.name, "outcome": outcome, "reason": reason, "seconds": seconds, "figures": figures}


def short_trace(error: Exception) -> str:
    """Return the last lines of the traceback."""
    return "".join(traceback.format_tb(error.__traceback__)[-_TRACE_LINES:])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", nargs="?", choices=tuple(WAYS))
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
    world = WAYS[options.way](options)
    chosen = [check for check in CHECKS if check.name.startswith(tuple(options.only))]
    with open(options.out if world.is_main else os.devnull, "a") as out, world.activate():
        for check in chosen:
            print(json.dumps({"begun": check.name}), file=out, flush=True)
            outcome = made(check, world)
            told = world.default_group.all_gather_object((outcome["outcome"], outcome["reason"]))
            failed = [f"rank {rank}: {reason}" for rank, (what, reason) in enumerate(told) if what == "failed"]
            if failed:
                outcome |= {"outcome": "failed", "reason": "\n".join(failed)}
            print(json.dumps(outcome), file=out, flush=True)
        print(json.dumps({"ended": True}), file=out, flush=True)
    world.close()
    return 0


# ---- the machine ------------------------------------------------------------------------------------------------


def described() -> dict[str, Any]:
    """Say what this machine has, and what it lacks and why."""
    count = torch.cuda.device_count()
    machine: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
        "driver": driver(),
        "cores": os.cpu_count(),
        "packages": {name: package_version(name) for name in _PACKAGES},
    }
    found = (("nccl", ax.NcclBackend.nccl_version), ("torch_nccl", torch.cuda.nccl.version), ("mpirun", mpirun))
    for name, find in found:
        try:
            machine[name] = version_text(find)
        except Exception as error:
            machine[name], machine[f"{name}_missing"] = None, str(error)
    return machine


def version_text(find: Callable[[], Any]) -> str:
    found = find()
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def mpirun() -> str:
    """Return the launcher, if MPI starts."""
    from axonmpi.launch.start import library_info
    from axonmpi.testing.mpirun import find_mpirun

    library_info()
    return str(find_mpirun())


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """Return the version of NVIDIA's driver."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    sys.exit(main())
