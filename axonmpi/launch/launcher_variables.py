"""Environment variables of launchers, such as the number of this rank, and variables set for MPI libraries.

Each launcher has its own variables. `check.py` compares them with MPI's world.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

PARENT_RANK = "AXONMPI_PARENT_RANK"
"""Set in processes that a rank has forked or spawned: the number of that rank."""


TORCHRUN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
"""Variables by which a script finds out that torchrun has started it, and its number."""


@dataclass(frozen=True)
class Launcher:
    """One launcher's variables in this process.

    Attributes:
        name: The launcher, as in `CONVENTIONS`.
        rank: Number of the process; None if not set, as for the next three.
        size: Number of processes.
        local_rank: Number of the process on its node.
        local_size: Number of processes on the node.
        variables: The variables seen, with their values, in the order of the attributes above.
    """

    name: str
    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None
    variables: tuple[tuple[str, str], ...]

    def contradicts(self, other: Launcher) -> bool:
        """Return True if the ranks or the sizes of two launchers are both known and differ; local."""
        pairs = ((self.rank, other.rank), (self.size, other.size))
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


@dataclass(frozen=True)
class Convention:
    """The names of a launcher's variables, and how it goes with other launchers.

    Attributes:
        name: The launcher: an MPI library with its own `mpirun`, another command, a protocol (PMI, PMIx) of any
            launcher, or `"RANK/WORLD_SIZE"` for variables set by hand.
        rank: Variable with the rank.
        size: Variable with the number of ranks. None, here and below: the launcher has no such variable.
        local_rank: Variable with the rank's number on its node.
        local_size: Variable with the number of ranks of the node.
        requires: Variable that tells this launcher from others with the same variables; None if no other has them.
        key: Variable that has to be a number; empty: `size`, or `rank` without a size.
        sets: Names of launchers whose variables this one sets as well, to the same numbers.
        inside: Names of launchers that may be around this one; their numbers are those of daemons or of a shell.
    """

    name: str
    rank: str
    size: str | None = None
    local_rank: str | None = None
    local_size: str | None = None
    requires: str | None = None
    key: str = ""
    sets: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()


_STEPS = ("PALS", "Flux", "jsrun", "ParaStation", "PMI", "PMIx", "Slurm")
"""Launchers of a system, in whose jobs and shells people start an `mpirun` of their own."""

CONVENTIONS = (
    Convention(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        sets=("PRRTE", "PMIx"),
        inside=_STEPS,
    ),
    Convention(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        inside=_STEPS,
    ),
    Convention(
        "Intel MPI",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        requires="I_MPI_MPIRUN",
        sets=("MPICH",),
        inside=_STEPS,
    ),
    Convention(
        "MPICH",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        requires="MPI_LOCALRANKID",
        inside=_STEPS,
    ),
    Convention("PRRTE", "PMIX_RANK", requires="PRTE_LAUNCHED", sets=("PMIx",), inside=_STEPS),
    Convention(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
        sets=("Open MPI", "PRRTE", "PMIx"),
    ),
    Convention(
        "Flux",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        "FLUX_TASK_LOCAL_ID",
        sets=("PALS", "PMI", "PMIx"),
        inside=("PALS", "jsrun", "ParaStation", "Slurm"),
    ),
    Convention(
        "PALS",
        "PALS_RANKID",
        "PMI_SIZE",
        "PALS_LOCAL_RANKID",
        "PALS_LOCAL_SIZE",
        key="PALS_RANKID",
        sets=("PMI", "PMIx"),
        inside=("Slurm",),
    ),
    Convention(
        "ParaStation",
        "PMI_RANK",
        "PMI_SIZE",
        requires="PSP_SMP_NODE_ID",
        sets=("PMI", "PMIx"),
        inside=("Slurm",),
    ),
    Convention("PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", inside=("Slurm",)),
    Convention("PMIx", "PMIX_RANK"),
    # Its plugin cray_shasta sets the variables of PALS and of PMI.
    Convention("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", sets=("PALS",)),
    Convention(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        requires="TORCHELASTIC_RUN_ID",
        sets=("RANK/WORLD_SIZE",),
    ),
    Convention("RANK/WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)
"""The launchers that are known. Variables of PBS and LSF, such as PBS_TASKNUM, number no ranks of MPI."""
_BY_NAME = {convention.name: convention for convention in CONVENTIONS}

_OWN_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "I_MPI_MPIRUN"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEPID", "SLURM_GTIDS", "SLURM_TASK_PID"),
    *("SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT", "SLURM_LAUNCH_NODE_IPADDR"),
    # Others of PALS are settings of its `mpiexec`; PBS_TASKNUM and the like are read by an `mpirun` built for PBS.
    *("PALS_RANKID", "PALS_NODEID", "PALS_APID", "PALS_APINFO", "PALS_SPOOL_DIR", "PSP_SMP_NODE_ID", "PSI_APPNUM"),
    *("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs", PARENT_RANK),
}
_OWN_PREFIXES = (
    *("OMPI_", "PMI_", "PMI2_", "PMIX_", "PRTE_", "PRRTE_", "HYDI_", "MV2_COMM_WORLD_"),
    *("SLURM_STEP_", "SLURM_PMI", "TORCHELASTIC_"),
    *("PALS_LOCAL_", "FLUX_JOB_", "FLUX_TASK_", "FLUX_PMI_", "JSM_NAMESPACE_"),
)
# Variables that a user sets, or that hold for the next job as well.
_KEPT_PREFIXES = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_RUN_AS_ROOT")


def detect_launchers(env: Mapping[str, str] | None = None) -> list[Launcher]:
    """Find the launchers of this process, the MPI launchers first; local.

    The result has no launcher that is around another of the result. So two whose numbers differ contradict each
    other, unless one is torchrun, which may run inside any.

    Args:
        env: Environment variables, `None` for this process's own. Values that are no numbers count as not set.
    """
    variables = os.environ if env is None else env
    seen = [launcher for convention in CONVENTIONS if (launcher := _recognise(convention, variables))]
    jobs = [one for one in seen if not any(_sets(other, one) for other in seen)]
    around = {name for launcher in jobs for name in _BY_NAME[launcher.name].inside}
    return [launcher for launcher in jobs if launcher.name not in around]


def _sets(launcher: Launcher, other: Launcher) -> bool:
    """Return True if a launcher has set another's variables."""
    return other.name in _BY_NAME[launcher.name].sets and not launcher.contradicts(other)


def _recognise(convention: Convention, env: Mapping[str, str]) -> Launcher | None:
    if convention.requires is not None and convention.requires not in env:
        return None
    names = (convention.rank, convention.size, convention.local_rank, convention.local_size)
    if number_in(env, convention.key or convention.size or convention.rank) is None:
        return None
    seen = tuple((name, env[name]) for name in (*names, convention.requires) if name is not None and name in env)
    rank, size, local_rank, local_size = (number_in(env, name) for name in names)
    return Launcher(convention.name, rank, size, local_rank, local_size, tuple(dict.fromkeys(seen)))


def number_in(env: Mapping[str, str] | None, name: str | None) -> int | None:
    """Return a variable as a number; None if it is not set or no number; local."""
    text = "" if name is None else (os.environ if env is None else env).get(name, "")
    return int(text) if text.isdecimal() else None


def missing_of_torchrun(env: Mapping[str, str] | None = None) -> list[str]:
    """Return the variables of torchrun that are not set; local."""
    variables = os.environ if env is None else env
    return [name for name in TORCHRUN if name not in variables]


def launched_ranks(env: Mapping[str, str] | None = None) -> int:
    """Return the number of ranks that the launchers' variables give, 1 without a launcher; local."""
    numbers = ((one.size or 1, (one.rank or 0) + 1, one.local_size or 1) for one in detect_launchers(env))
    return max(map(max, numbers), default=1)


def is_first_launched(env: Mapping[str, str] | None = None) -> bool:
    """Return True for rank 0 by the launcher's variables, before MPI starts; local.

    `RANK` and `WORLD_SIZE` alone may be left over from another job: then each process counts as rank 0.
    """
    launcher = _trusted_launcher(env)
    return launcher is None or not launcher.rank


def is_first_on_node(env: Mapping[str, str] | None = None) -> bool:
    """Return True if this may be the first process that the launcher has started on this node; local."""
    launcher = _trusted_launcher(env)
    if launcher is None:
        return True
    number = launcher.local_rank
    return not (number_in(env, "SLURM_LOCALID") if number is None else number)


def job_end_time(env: Mapping[str, str] | None = None) -> int | None:
    """Return the time at which Slurm ends this job, in seconds since 1970; None without a limit; local."""
    return number_in(env, "SLURM_JOB_END_TIME")


def _trusted_launcher(env: Mapping[str, str] | None) -> Launcher | None:
    """Return the launcher whose numbers surely differ between processes, or None."""
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
    """Return the environment variables for a child of rank `rank`; local."""
    return {**without_launcher_variables(), **_set_here, PARENT_RANK: str(rank)}


_set_here: dict[str, str] = {}
"""Variables that `set_variables` has set, torchrun's among them: children read them as torchrun's children do."""


def set_variables(values: Mapping[str, str]) -> None:
    """Set environment variables of this process and of its children, such as DataLoader workers; local."""
    os.environ.update(values)
    _set_here.update(values)


def turn_into_child(rank: int) -> None:
    """Turn this process's environment variables into those for a child of rank `rank`; local, in a fork."""
    for name in filter(_is_launchers, list(os.environ)):
        if name not in _set_here:
            del os.environ[name]
    os.environ[PARENT_RANK] = str(rank)


def parent_rank(env: Mapping[str, str] | None = None) -> int | None:
    """Return the rank that forked or spawned this process, None without one; local."""
    return number_in(env, PARENT_RANK)


# ---- MPI libraries ----------------------------------------------------------------------------------------------

_MPICH_WITH_BOTH = re.compile(r"MPICH Device:\s+ch4:(ucx.*ofi|ofi.*ucx)")


def variables_for_mpi(env: Mapping[str, str], cores: int, description: str) -> dict[str, str]:
    """Return variables to set before MPI starts, except those that the user has set; local.

    Args:
        env: The environment variables.
        cores: Number of logical CPUs that the ranks of this node share.
        description: The library's version text, with its build options.
    """
    # Open MPI's ucx component for one-sided communication prints warnings on other networks.
    # Over TCP its put protocol leaves one direction of the network idle while the other is busy.
    values = {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_btl_tcp_flags": "send"}
    launchers = detect_launchers(env)
    if max((launcher.local_size or 1 for launcher in launchers), default=1) > cores:
        # Otherwise a waiting rank of Open MPI takes the core from the ranks that it waits for.
        values["OMPI_MCA_mpi_yield_when_idle"] = "1"
    by_srun = "SLURM_STEP_NUM_TASKS" in env and any(launcher.name == "PMI" for launcher in launchers)
    if by_srun and _MPICH_WITH_BOTH.search(description):
        # Over UCX, MPICH sends longer lines than srun's pmi2 reads, and hangs on several nodes (mpich#6924).
        values["MPIR_CVAR_CH4_NETMOD"] = "ofi"
    return {name: value for name, value in values.items() if name not in env}


def set_variables_for_mpi(cores: int, description: str) -> None:
    """Set the variables that `variables_for_mpi` returns; local, before MPI starts."""
    os.environ.update(variables_for_mpi(os.environ, cores, description))
