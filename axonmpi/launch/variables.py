"""What the environment says about the launch; the only module that reads `os.environ`.

Each launcher tells a process its rank and the number of ranks in variables of its own. They are not trusted but
compared: MPI knows the truth, and where a launcher says four ranks and MPI says one, the wrong `mpirun` was used
and every process would train alone.

    mpirun / srun / torchrun ──variables──> detect_launchers ─┐
    mpi4py ──rank, size, library───────────────────────────────┴─> check_launch ──> None, or what to type instead

The file is long because every variable that matters is read here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "Launcher",
    "MpiLibrary",
    "check_launch",
    "check_protocol",
    "child_environment",
    "detect_launchers",
    "is_first_launched",
    "is_first_on_node",
    "launched_ranks",
    "parent_rank",
    "prepare_for_mpi",
    "pretended_node",
    "process_environment",
    "settings_for_mpi",
    "share_of_cores",
    "turn_into_child",
    "usable_cores",
    "user_threads",
    "wanted_matmul",
    "wants_shared_memory",
    "without_launcher_variables",
]

PARENT_RANK = "AXONMPI_PARENT_RANK"
"""Set in processes that a rank has forked or spawned: the number of that rank."""


@dataclass(frozen=True)
class MpiLibrary:
    """The MPI library that this process has loaded.

    Attributes:
        vendor: `"MPICH"`, `"Open MPI"`, `"Intel MPI"`, ... as mpi4py names it.
        version: For instance `"5.0.11"`.
        path: The shared library's file, `None` where the system does not tell.
        mpirun: The launcher installed with it, `None` where it was not found.
    """

    vendor: str
    version: str
    path: str | None
    mpirun: str | None


@dataclass(frozen=True)
class Launcher:
    """What one launcher's variables say about this process.

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
    unless: tuple[str, ...] = field(default=())


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


_unbound: frozenset[int] | None = None


def process_environment() -> dict[str, str]:
    """Return a copy of this process's environment variables; local."""
    return dict(os.environ)


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
    rank, size, local_rank, local_size = (_number(env, name) for name in names)
    if (rank if convention.size is None else size) is None:
        return None
    seen = tuple((name, env[name]) for name in (*names, convention.requires) if name is not None and name in env)
    return Launcher(convention.name, rank, size, local_rank, local_size, tuple(dict.fromkeys(seen)))


def _number(env: Mapping[str, str], name: str | None) -> int | None:
    text = env.get(name, "") if name is not None else ""
    return int(text) if text.isdecimal() else None


def launched_ranks(env: Mapping[str, str] | None = None) -> int:
    """Return how many ranks the launchers say there are, 1 where nothing says more; local."""
    launchers = detect_launchers(env)
    return max((max(launcher.size or 1, (launcher.rank or 0) + 1) for launcher in launchers), default=1)


def is_first_launched(env: Mapping[str, str] | None = None) -> bool:
    """Say whether this is rank 0 as the launcher numbers the ranks, before MPI tells; local.

    `RANK` and `WORLD_SIZE` alone may be left over from another job, in which case there is no other rank 0.
    """
    launcher = _trusted_launcher(env)
    return launcher is None or not launcher.rank


def is_first_on_node(env: Mapping[str, str] | None = None) -> bool:
    """Say whether this is, or may be, the first process that the launcher has started on this node; local."""
    launcher = _trusted_launcher(env)
    if launcher is None:
        return True
    number = launcher.local_rank
    return not (_number(os.environ if env is None else env, "SLURM_LOCALID") if number is None else number)


def _trusted_launcher(env: Mapping[str, str] | None) -> Launcher | None:
    """Return the launcher by whose numbers the processes can tell each other apart, if there is one."""
    return next((found for found in detect_launchers(env) if found.name != "RANK/WORLD_SIZE"), None)


def without_launcher_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without what a launcher tells its processes, so that a new job can be started with it; local.

    Settings stay: `OMPI_MCA_*` and the like, and the description of Slurm's allocation.
    """
    return {name: value for name, value in env.items() if not _is_launchers(name)}


def _is_launchers(name: str) -> bool:
    return name in _OWN_VARIABLES or (name.startswith(_OWN_PREFIXES) and not name.startswith(_KEPT_PREFIXES))


def child_environment(rank: int) -> dict[str, str]:
    """Return the environment for a process that rank `rank` starts to work for it; local."""
    return {**without_launcher_variables(os.environ), PARENT_RANK: str(rank)}


def turn_into_child(rank: int) -> None:
    """Change this process's environment into that of a child of rank `rank`; local, in a forked process."""
    for name in filter(_is_launchers, list(os.environ)):
        del os.environ[name]
    os.environ[PARENT_RANK] = str(rank)


def parent_rank(env: Mapping[str, str] | None = None) -> int | None:
    """Return the rank that forked or spawned this process, `None` if none did; local."""
    return _number(os.environ if env is None else env, PARENT_RANK)


# ---- launch check -----------------------------------------------------------------------------------------------


def check_launch(launchers: Iterable[Launcher], mpi_rank: int, mpi_size: int, library: MpiLibrary) -> str | None:
    """Compare what the launchers say with what MPI says; local.

    Args:
        launchers: What `detect_launchers` found.
        mpi_rank: This process's number in MPI's world.
        mpi_size: Number of ranks in MPI's world.
        library: The MPI library loaded.

    Returns:
        `None` if they agree, else a message: what was seen, which library is loaded, and what to type.
    """
    for launcher in launchers:
        if _disagrees(launcher, mpi_rank, mpi_size):
            return (
                f"the launcher and MPI disagree: by the variables of {launcher.name} this is {_place(launcher)}, "
                f"by MPI it is rank {mpi_rank} of {mpi_size}.\n{_evidence(launcher, mpi_size, library)}"
            )
    return None


def check_protocol(env: Mapping[str, str], library: MpiLibrary, description: str) -> str | None:
    """Say why the library could not even start under the launcher, where it would end the process; local.

    Args:
        env: The environment variables.
        library: The MPI library loaded.
        description: What the library says of itself, its build options included.

    Returns:
        `None` if nothing is known against it, else a message as `check_launch` gives it.
    """
    if library.vendor != "MPICH" or "pmix" in description.lower() or _number(env, "PMIX_RANK") is None:
        return None
    speakers = (launcher for launcher in detect_launchers(env) if launcher.name in ("Open MPI", "PMIx"))
    launcher = next(speakers, None)
    if launcher is None:
        return None
    return (
        f"by the variables of {launcher.name} this is {_place(launcher)}, but that launcher speaks PMIx, "
        f"which this {library.vendor} was built without.\n{_evidence(launcher, 1, library)}"
    )


def _disagrees(launcher: Launcher, mpi_rank: int, mpi_size: int) -> bool:
    if launcher.size is not None and launcher.size != mpi_size:
        return True
    if launcher.rank is None:
        return False
    if launcher.name == "Slurm":  # some MPI libraries can number the ranks in another order than Slurm
        return launcher.rank >= mpi_size
    return launcher.rank != mpi_rank


def _place(launcher: Launcher) -> str:
    rank = "a process" if launcher.rank is None else f"rank {launcher.rank}"
    return rank if launcher.size is None else f"{rank} of {launcher.size}"


def _evidence(launcher: Launcher, mpi_size: int, library: MpiLibrary) -> str:
    seen = ", ".join(f"{name}={value}" for name, value in launcher.variables)
    return (
        f"  seen:   {seen}\n"
        f"  loaded: {library.vendor} {library.version} from {library.path or 'an unknown place'}\n"
        f"  {_advice(launcher, mpi_size, library)}"
    )


def _advice(launcher: Launcher, mpi_size: int, library: MpiLibrary) -> str:
    """Say what to type instead."""
    ranks = launcher.size or "N"
    by_mpirun = f"{library.mpirun or f'the mpirun that belongs to {library.vendor}'} -n {ranks} python SCRIPT"
    leftover = "unset " + " ".join(name for name, _ in launcher.variables)
    if launcher.name == "torchrun":
        return f"type:   {by_mpirun}\n          (torchrun starts processes that MPI knows nothing of)"
    if launcher.name == "RANK/WORLD_SIZE":
        wanted = "" if mpi_size > 1 else f"\n  or, if {ranks} ranks are wanted:\n          {by_mpirun}"
        return f"type:   {leftover}\n          (left over from another job, or set by hand){wanted}"
    if mpi_size > 1:
        return f"type:   {leftover}\n          (they are not of the launcher that started this job)"
    if launcher.name in ("Slurm", "PMI", "PMIx"):
        interface = "pmix" if library.vendor == "Open MPI" else "pmi2"
        return (
            f"type:   srun --mpi={interface} -n {ranks} python SCRIPT\n"
            f"          (srun has to speak the protocol of {library.vendor})\n"
            f"  or:     {by_mpirun}"
        )
    return f"type:   {by_mpirun}\n          (the mpirun used belongs to another MPI than the library loaded)"


# ---- cores and threads ------------------------------------------------------------------------------------------


def usable_cores(pid: int = 0) -> frozenset[int]:
    """Return the logical CPUs that a process may run on, by default this one; empty where unknown; local."""
    try:
        return frozenset(os.sched_getaffinity(pid))
    except (AttributeError, OSError):  # not Linux; or the process has ended or is another user's
        return frozenset(range(os.cpu_count() or 1)) if pid == 0 else frozenset()


def share_of_cores(own: Iterable[int], masks: Sequence[frozenset[int]]) -> int:
    """Return how many threads a rank should use: its share of each core that it may run on, at least 1; local.

    Args:
        own: This rank's logical CPUs.
        masks: Those of all ranks of the node, this one included.
    """
    # In units of the ranks' common multiple the sum would be exact; a small allowance does as well.
    share = sum(1.0 / sum(cpu in mask for mask in masks) for cpu in own)
    return max(1, int(share + 1e-9))


def core_to_keep_to(own_rank: int, masks: Sequence[frozenset[int]]) -> int | None:
    """Return the core for a rank to stay on, where ranks outnumber the cores and nobody has bound them; local.

    Ranks that wait for each other and outnumber the cores are moved about by the system, often two waiting ones to
    one core and two computing ones to the other. Dealt out evenly, none is moved.

    Args:
        own_rank: This rank's number on its node.
        masks: The logical CPUs that each rank of the node may run on.
    """
    own = masks[own_rank]
    shared_by_all = len(own) > 1 and all(mask == own for mask in masks)
    if not shared_by_all or len(masks) <= len(own) or os.environ.get("AXONMPI_BIND") == "none":
        return None
    return sorted(own)[own_rank % len(own)]


def keep_to_core(core: int) -> None:
    """Stay on one core from now on; what this process starts with `unbound_cores` need not."""
    global _unbound
    _unbound = usable_cores()
    os.sched_setaffinity(0, {core})


def unbound_cores() -> frozenset[int] | None:
    """Return the cores that this process could use before `keep_to_core`; None if it was not called; local."""
    return _unbound


def user_threads(env: Mapping[str, str] | None = None) -> str | None:
    """Return the first variable by which the user chose the number of threads, as `NAME=value`; local."""
    variables = os.environ if env is None else env
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if variables.get(name):
            return f"{name}={variables[name]}"
    return None


def settings_for_mpi(env: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return variables worth setting before MPI starts, without those that the user has set; local.

    Args:
        env: The environment variables.
        cores: Number of logical CPUs that the ranks of this node share.
    """
    # The ucx component of Open MPI's one-sided communication complains where there is no such network.
    # Over TCP its put protocol leaves one direction of the network idle while the other one is busy.
    settings = {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_btl_tcp_flags": "send"}
    local_sizes = [launcher.local_size or 1 for launcher in detect_launchers(env)]
    if max(local_sizes, default=1) > cores:
        # A waiting rank of Open MPI would else keep those it waits for from running.
        settings["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return {name: value for name, value in settings.items() if name not in env}


def prepare_for_mpi() -> None:
    """Set the variables that `settings_for_mpi` returns; local, before MPI starts."""
    # A rank may be bound to one core; its launcher's daemon has all that the ranks share.
    cores = max(len(usable_cores()), len(usable_cores(os.getppid())))
    os.environ.update(settings_for_mpi(os.environ, cores))


def wants_shared_memory() -> bool:
    """Say whether ranks may communicate through shared memory; `AXONMPI_COLLECTIVES=plain` forbids it; local.

    Raises:
        ValueError: The variable has another value than `auto` or `plain`.
    """
    setting = os.environ.get("AXONMPI_COLLECTIVES", "auto")
    if setting not in ("auto", "plain"):
        raise ValueError(f"AXONMPI_COLLECTIVES: expected 'auto' or 'plain', got {setting!r}")
    return setting == "auto"


def wanted_matmul() -> str:
    """Return which library is to multiply matrices, `AXONMPI_MATMUL`: "auto", "torch" or "onednn"; local.

    Raises:
        ValueError: The variable is something else.
    """
    setting = os.environ.get("AXONMPI_MATMUL", "auto")
    if setting not in ("auto", "torch", "onednn"):
        raise ValueError(f"AXONMPI_MATMUL: expected 'auto', 'torch' or 'onednn', got {setting!r}")
    return setting


def pretended_node(world_rank: int) -> int:
    """Return the node that a rank is to believe it is on, 0 unless `AXONMPI_RANKS_PER_NODE` is set; local.

    With it, what several nodes do can be tried on one: each so many consecutive ranks take themselves for a node.

    Raises:
        ValueError: The variable is no positive number.
    """
    setting = os.environ.get("AXONMPI_RANKS_PER_NODE", "")
    if not setting:
        return 0
    if not setting.isdecimal() or int(setting) < 1:
        raise ValueError(f"AXONMPI_RANKS_PER_NODE: expected a positive number, got {setting!r}")
    return world_rank // int(setting)
