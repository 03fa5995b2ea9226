"""What users set in environment variables, and what is set for MPI before it starts."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

from .variables import detect_launchers

RAISING_SECONDS = 60.0
"""How long after its time-out an operation may take to raise its error."""
_MPICH_WITH_BOTH = re.compile(r"MPICH Device:\s+ch4:(ucx.*ofi|ofi.*ucx)")


def user_threads(env: Mapping[str, str] | None = None) -> str | None:
    """Return the first variable by which the user chose the number of threads, as `NAME=value`; local."""
    variables = os.environ if env is None else env
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if variables.get(name):
            return f"{name}={variables[name]}"
    return None


def settings_for_mpi(env: Mapping[str, str], cores: int, description: str) -> dict[str, str]:
    """Return variables to set before MPI starts, without variables that the user has set; local.

    Args:
        env: The environment variables.
        cores: Number of logical CPUs that the ranks of this node share.
        description: What the library says of itself, its build options included.
    """
    # The ucx component of Open MPI's one-sided communication complains where there is no such network.
    # Over TCP its put protocol leaves one direction of the network idle while the other one is busy.
    settings = {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_btl_tcp_flags": "send"}
    launchers = detect_launchers(env)
    if max((launcher.local_size or 1 for launcher in launchers), default=1) > cores:
        # Otherwise a waiting rank of Open MPI keeps the core from the ranks that it waits for.
        settings["OMPI_MCA_mpi_yield_when_idle"] = "1"
    by_srun = "SLURM_STEP_NUM_TASKS" in env and any(launcher.name == "PMI" for launcher in launchers)
    if by_srun and _MPICH_WITH_BOTH.search(description):
        # Over UCX ranks of several nodes tell srun more in one line than its pmi2 reads, and hang (mpich#6924).
        settings["MPIR_CVAR_CH4_NETMOD"] = "ofi"
    return {name: value for name, value in settings.items() if name not in env}


def prepare_for_mpi(cores: int, description: str) -> None:
    """Set the variables that `settings_for_mpi` returns; local, before MPI starts."""
    os.environ.update(settings_for_mpi(os.environ, cores, description))


def wants_shared_memory() -> bool:
    """Say whether ranks may communicate through shared memory; `AXONMPI_COLLECTIVES=plain` forbids it; local.

    Raises:
        ValueError: The variable has another value than `auto` or `plain`.
    """
    setting = os.environ.get("AXONMPI_COLLECTIVES", "auto")
    if setting not in ("auto", "plain"):
        raise ValueError(f"AXONMPI_COLLECTIVES: expected 'auto' or 'plain', got {setting!r}")
    return setting == "auto"


def adds_in_order() -> bool:
    """Say whether sums over several nodes are taken in the order of the nodes: `AXONMPI_SUMS=ordered`; local.

    Raises:
        ValueError: The variable has another value than `auto` or `ordered`.
    """
    setting = os.environ.get("AXONMPI_SUMS", "auto")
    if setting not in ("auto", "ordered"):
        raise ValueError(f"AXONMPI_SUMS: expected 'auto' or 'ordered', got {setting!r}")
    return setting == "ordered"


def pretended_node(world_rank: int) -> int:
    """Return the number of a rank's simulated node, 0 unless `AXONMPI_RANKS_PER_NODE` is set; local.

    The variable divides the ranks of one node into simulated nodes of so many consecutive ranks each.

    Raises:
        ValueError: The variable is no positive number.
    """
    setting = os.environ.get("AXONMPI_RANKS_PER_NODE", "")
    if not setting:
        return 0
    if not setting.isdecimal() or int(setting) < 1:
        raise ValueError(f"AXONMPI_RANKS_PER_NODE: expected a positive number, got {setting!r}")
    return world_rank // int(setting)


def debugs() -> bool:
    """Say whether to look for the program's mistakes where that costs time: `AXONMPI_DEBUG=1`; local.

    Ranks compare their calls on GPUs too, as they always do on CPUs; messages about calls that differ say where
    they were made; wrappers warn of gradients that are nan on a rank.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    setting = os.environ.get("AXONMPI_DEBUG", "0")
    if setting not in ("0", "1"):
        raise ValueError(f"AXONMPI_DEBUG: expected 0 or 1, got {setting!r}")
    return setting == "1"


def shares_gpus() -> bool:
    """Say whether the user lets several ranks use one GPU: `NCCL_MULTI_RANK_GPU_ENABLE=1`; local."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def stop_signal() -> signal.Signals:
    """Return the signal that tells a job to stop early, besides SIGTERM: `AXONMPI_STOP_SIGNAL`, or SIGUSR1; local.

    Raises:
        ValueError: The variable names no signal, or one that no program can handle.
    """
    setting = os.environ.get("AXONMPI_STOP_SIGNAL", "SIGUSR1")
    name = setting.upper() if setting.upper().startswith("SIG") else f"SIG{setting.upper()}"
    found = {each.name: each for each in signal.Signals}.get(name)
    if found is None or found in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"AXONMPI_STOP_SIGNAL: expected the name of a signal, such as USR1, got {setting!r}")
    return found


def waiting_limit(timeout: float | None) -> float:
    """Return how many seconds a rank may wait before the job is ended, 0 for ever: `AXONMPI_TIMEOUT`; local.

    Args:
        timeout: Seconds after which operations raise by themselves, and the job is ended only a minute later.

    Raises:
        ValueError: The variable is no number of seconds.
    """
    if timeout is not None:
        return timeout + RAISING_SECONDS
    setting = os.environ.get("AXONMPI_TIMEOUT", "3600")
    try:
        limit = float(setting)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise ValueError(f"AXONMPI_TIMEOUT: expected a number of seconds, or 0 for no limit, got {setting!r}")
    return limit


def dump_folder() -> Path | None:
    """Return where failing jobs write the latest operations of ranks, None for nowhere: `AXONMPI_DUMP`; local."""
    setting = os.environ.get("AXONMPI_DUMP", "")
    return Path(setting).absolute() if setting else None


def gpu_variables() -> str:
    """Return the variables that decide which GPUs this process sees, as `NAME=value, NAME=value`; local."""
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_LOCALID", "SLURM_STEP_GPUS")
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def may_bind() -> bool:
    """Return whether to bind each unbound rank to a core; `AXONMPI_BIND=none` forbids it; local."""
    return os.environ.get("AXONMPI_BIND") != "none"


def widen_terminal(columns: int) -> None:
    """Have this process take the terminal to have at least so many columns; local."""
    if shutil.get_terminal_size().columns < columns:
        os.environ["COLUMNS"] = str(columns)
