"""The collectives of MPI alone, at the thread level of a program that has no threads.

An MPI library may have a quicker path for small messages in programs of one thread. axonmpi needs
MPI_THREAD_MULTIPLE, and a process starts MPI once, so this is a separate job without axonmpi's communication. The
ranks have the same settings and cores as in the other job.

    axonmpi bench collectives
    ├─ mpirun ...   comparison.measure         all variants, MPI at MPI_THREAD_MULTIPLE
    └─ mpirun ...   mpi_alone.measure          MPI at MPI_THREAD_FUNNELED

`add` puts the quicker time into the column of MPI.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from ....launch import exit as exits
from ....launch import start as runtime
from ....launch.cpu import core_to_keep_to, count_of_node, keep_to_core, usable_cores
from ....launch.launcher_variables import set_variables_for_mpi
from ..harness.benchmark import Figures
from ..harness.timing import RankOperations
from .cases import CollectiveCase, measure_variants, mpi_variant


def measure(options: argparse.Namespace) -> Figures | None:
    """Start MPI at MPI_THREAD_FUNNELED, and measure its operations on float32; collective.

    Returns:
        On rank 0 the thread level that MPI has granted, and the cases, each with its time in microseconds; None on
        the other ranks.

    Raises:
        RuntimeError: A result is wrong; raised on all ranks.
    """
    mpi = _start()
    comm = mpi.COMM_WORLD
    ranks = RankOperations(comm.Barrier, lambda value: comm.allreduce(value, mpi.MAX))
    cases = []
    for operation in options.operations:
        for nbytes in options.sizes:
            case = CollectiveCase(operation, torch.float32, nbytes, comm.rank, comm.size)
            times = measure_variants({"mpi": mpi_variant(case, mpi)}, options.blocks, ranks=ranks)
            cases.append({"operation": operation, "bytes": nbytes, "microseconds": times["mpi"]})
    return {"level": runtime.thread_level(mpi), "cases": cases} if comm.rank == 0 else None


def _start() -> Any:
    import mpi4py

    mpi4py.rc(initialize=False, finalize=False)
    from mpi4py import MPI

    set_variables_for_mpi(count_of_node(), MPI.Get_library_version())
    MPI.Init_thread(MPI.THREAD_FUNNELED)
    exits.install(MPI, finalize=True)
    local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED, key=MPI.COMM_WORLD.rank)
    core = core_to_keep_to(local.rank, local.allgather(usable_cores()))
    if core is not None:
        keep_to_core(core)
    local.Free()
    return MPI


def add(result: Figures, measure_alone: Callable[[], Figures]) -> None:
    """Put the quicker time of both jobs into the figures, if MPI is among the variants.

    Args:
        result: The figures of the other job, changed in place.
        measure_alone: Runs the job of MPI alone, and returns rank 0's result of `measure`.
    """
    cases = [case for case in result["cases"] if case["mpi_microseconds"]]
    if not cases:
        return
    alone = measure_alone()
    times = {(case["operation"], case["bytes"]): case["microseconds"] for case in alone["cases"]}
    for case in cases:
        time = times[case["operation"], case["bytes"]]
        case["mpi_microseconds"][alone["level"]] = time
        case["microseconds"]["mpi"] = min(case["microseconds"]["mpi"], time)
