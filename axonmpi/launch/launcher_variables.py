"""Launchers' environment variables: the number of this rank, and of all ranks.

Each launcher has variables of its own. They are compared with MPI's world, see `check`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

PARENT_RANK = "AXONMPI_PARENT_RANK"
"""Set in processes that a rank has forked or spawned: the number of that rank."""


@dataclass(frozen=True)
class Launcher:
    """One launcher's variables in this process.

    Attributes:
        name: The launcher: `"Open MPI"`, `"MVAPICH"`, `"Intel MPI"`, `"MPICH"`, `"PMI"` (another one with the same
            variables), `"PMIx"`, `"Slurm"`, `"torchrun"`, or `"RANK/WORLD_SIZE"` set by something else.
        rank: The process's number, `None` where it is not said.
        size: The number of processes, `None` where it is not said.
        local_rank: The process's number on its node, `None` where it is not said.
        local_size: The number of processes on the node, `None` where it is not said.
        variables: The variables seen, with their values, in the order of the attributes above.
    """

    name: str
    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None
    variables: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Convention:
    """The variables of one launcher; it is recognised by `size`, or by `rank` where it has no size."""

    name: str
    rank: str
    size: str | None = None
    local_rank: str | None = None
    local_size: str | None = None
    requires: str | None = None
    unless: tuple[str, ...] = ()


_CONVENTIONS = (
    _Convention(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Convention(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Convention("Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", requires="I_MPI_MPIRUN"),
    _Convention(
        "MPICH",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        requires="MPI_LOCALRANKID",
        unless=("I_MPI_MPIRUN",),
    ),
    _Convention("PMI", "PMI_RANK", "PMI_SIZE", unless=("MPI_LOCALRANKID", "I_MPI_MPIRUN")),
    _Convention("PMIx", "PMIX_RANK", unless=("OMPI_COMM_WORLD_SIZE",)),
    # Under mpirun, Slurm's variables describe the daemons that mpirun has started through srun.
    _Convention(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        unless=("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK"),
    ),
    _Convention("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", requires="TORCHELASTIC_RUN_ID"),
    _Convention(
        "RANK/WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", unless=("TORCHELASTIC_RUN_ID",)
    ),
)

_OWN_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "I_MPI_MPIRUN"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEPID", "SLURM_GTIDS", "SLURM_TASK_PID"),
    *("SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT", "SLURM_LAUNCH_NODE_IPADDR"),
    *("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs", PARENT_RANK),
}
_OWN_PREFIXES = (
    *("OMPI_", "PMI_", "PMI2_", "PMIX_", "PRTE_", "PRRTE_", "HYDI_", "MV2_COMM_WORLD_"),
    *("SLURM_STEP_", "SLURM_PMI", "TORCHELASTIC_"),
)
# Settings that a user makes, or that are as true for the next job as for this one.
_KEPT_PREFIXES = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_RUN_AS_ROOT")


def detect_launchers(env: Mapping[str, str] | None = None) -> list[Launcher]:
    """Find the launchers whose variables are set, the MPI launchers first; local.

    Args:
        env: Environment variables, `None` for this process's own. Values that are no numbers count as not set.
    """
    variables = os.environ if env is None else env
    found = (_recognise(convention, variables) for convention in _CONVENTIONS)
    return [launcher for launcher in found if launcher is not None]


def _recognise(convention: _Convention, env: Mapping[str, str]) -> Launcher | None:
    if convention.requires is not None and convention.requires not in env:
        return None
    if any(name in env for name in convention.unless):
        return None
    names = (convention.rank, convention.size, convention.local_rank, convention.local_size)
    rank, size, local_rank, local_size = (number_in(env, name) for name in names)
    if (rank if convention.size is None else size) is None:
        return None
    seen = tuple((name, env[name]) for name in (*names, convention.requires) if name is not None and name in env)
    return Launcher(convention.name, rank, size, local_rank, local_size, tuple(dict.fromkeys(seen)))


def number_in(env: Mapping[str, str] | None, name: str | None) -> int | None:
    """Return the number that a variable has, None where it is not set or no number; local."""
    text = "" if name is None else (os.environ if env is None else env).get(name, "")
    return int(text) if text.isdecimal() else None


def launched_ranks(env: Mapping[str, str] | None = None) -> int:
    """Return the number of ranks that the launchers' variables give, 1 without a launcher; local."""
    launchers = detect_launchers(env)
    return max((max(launcher.size or 1, (launcher.rank or 0) + 1) for launcher in launchers), default=1)


def is_first_launched(env: Mapping[str, str] | None = None) -> bool:
    """Return whether this is rank 0 by the launcher's variables, before MPI starts; local.

    `RANK` and `WORLD_SIZE` alone may be left over from another job, in which case there is no other rank 0.
    """
    launcher = _trusted_launcher(env)
    return launcher is None or not launcher.rank


def is_first_on_node(env: Mapping[str, str] | None = None) -> bool:
    """Return whether this may be the first process that the launcher started on this node; local."""
    launcher = _trusted_launcher(env)
    if launcher is None:
        return True
    number = launcher.local_rank
    return not (number_in(env, "SLURM_LOCALID") if number is None else number)


def job_end_time(env: Mapping[str, str] | None = None) -> int | None:
    """Return when Slurm will end this job, in seconds since 1970, None outside a job or without a limit; local."""
    return number_in(env, "SLURM_JOB_END_TIME")


def _trusted_launcher(env: Mapping[str, str] | None) -> Launcher | None:
    """Return the launcher whose numbers are different on each process, or None."""
    return next((found for found in detect_launchers(env) if found.name != "RANK/WORLD_SIZE"), None)


def without_launcher_variables(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return environment variables for a new job, without a launcher's variables for its processes; local.

    Settings stay: `OMPI_MCA_*` and the like, and the description of Slurm's allocation.

    Args:
        env: Environment variables, `None` for this process's own.
    """
    variables = os.environ if env is None else env
    return {name: value for name, value in variables.items() if not _is_launchers(name)}


def _is_launchers(name: str) -> bool:
    return name in _OWN_VARIABLES or (name.startswith(_OWN_PREFIXES) and not name.startswith(_KEPT_PREFIXES))


def child_environment(rank: int) -> dict[str, str]:
    """Return the environment for a process that rank `rank` starts to work for it; local."""
    return {**without_launcher_variables(), PARENT_RANK: str(rank)}


def set_variables(values: Mapping[str, str]) -> None:
    """Set environment variables of this process; local."""
    os.environ.update(values)


def turn_into_child(rank: int) -> None:
    """Change this process's environment into that of a child of rank `rank`; local, in a forked process."""
    for name in filter(_is_launchers, list(os.environ)):
        del os.environ[name]
    os.environ[PARENT_RANK] = str(rank)


def parent_rank(env: Mapping[str, str] | None = None) -> int | None:
    """Return the rank that forked or spawned this process, `None` if none did; local."""
    return number_in(env, PARENT_RANK)
