"""The variables that users set, AXONMPI_TIMEOUT (the watchdog's limit) among them, with defaults and checks."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

RAISING_SECONDS = 60.0
"""Time after a group's timeout for its operations to raise, before the watchdog ends the job."""


def _choice(name: str, default: str, other: str) -> str:
    """Return the value of a variable that has two; raises ValueError for any other value."""
    value = os.environ.get(name, default)
    if value not in (default, other):
        raise ValueError(f"{name}: expected {default!r} or {other!r}, got {value!r}")
    return value


def user_threads(env: Mapping[str, str] | None = None) -> str | None:
    """Return the first variable that sets the number of threads, as `NAME=value`; None without one; local."""
    variables = os.environ if env is None else env
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if variables.get(name):
            return f"{name}={variables[name]}"
    return None


def wants_shared_memory() -> bool:
    """Return True if ranks may communicate through shared memory; `AXONMPI_COLLECTIVES=plain` forbids it; local.

    Raises:
        ValueError: The variable is neither `auto` nor `plain`.
    """
    return _choice("AXONMPI_COLLECTIVES", "auto", "plain") == "auto"


def adds_in_order() -> bool:
    """Return True if sums over several nodes are taken in the order of the nodes: `AXONMPI_SUMS=ordered`; local.

    Raises:
        ValueError: The variable is neither `auto` nor `ordered`.
    """
    return _choice("AXONMPI_SUMS", "auto", "ordered") == "ordered"


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
    """Return True if costly checks of the program are on: `AXONMPI_DEBUG=1`; local.

    Ranks then compare their calls on GPUs too, as they always do on CPUs; messages about different calls name the
    lines that made them; wrappers warn of gradients that are nan on a rank.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    return _choice("AXONMPI_DEBUG", "0", "1") == "1"


def shares_gpus() -> bool:
    """Return True if several ranks may use one GPU: `NCCL_MULTI_RANK_GPU_ENABLE=1`; local."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def stop_signal() -> signal.Signals:
    """Return the signal besides SIGTERM that stops a job early: `AXONMPI_STOP_SIGNAL`, or SIGUSR1; local.

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
    """Return the watchdog's limit for the wait of a rank, in seconds, 0 for none: `AXONMPI_TIMEOUT`; local.

    Args:
        timeout: Timeout of the operations, in seconds: the watchdog leaves them a minute more to raise.

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
    """Return the folder for the latest operations of a failed job, None for no dump: `AXONMPI_DUMP`; local."""
    setting = os.environ.get("AXONMPI_DUMP", "")
    return Path(setting).absolute() if setting else None


def trace_folder() -> Path | None:
    """Return the folder for the trace of the whole job, None for no trace: `AXONMPI_TRACE`; local."""
    setting = os.environ.get("AXONMPI_TRACE", "")
    return Path(setting).absolute() if setting else None


def gpu_variables() -> str:
    """Return the variables that select this process's GPUs, as `NAME=value, NAME=value`; local."""
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_LOCALID", "SLURM_STEP_GPUS")
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def may_bind() -> bool:
    """Return True if unbound ranks may be bound to cores; `AXONMPI_BIND=none` forbids it; local."""
    return os.environ.get("AXONMPI_BIND") != "none"


def widen_terminal(columns: int) -> None:
    """Make this process use at least so many columns of the terminal; local."""
    if shutil.get_terminal_size().columns < columns:
        os.environ["COLUMNS"] = str(columns)
