"""Comparison of the launcher's variables with MPI's world, and advice if they disagree.

MPI is right: if a launcher counts four ranks and MPI one, the wrong `mpirun` was used and every process would train
alone.

    mpirun / srun / torchrun ──variables──> detect_launchers ─┐
    mpi4py ──rank, size, library───────────────────────────────┴─> check_launch ──> None, or a message
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..utils.text import counted
from .launcher_variables import Launcher, detect_launchers, number_in

LEAST_ROOM = 2 << 20
"""Bytes of /dev/shm a rank without which MPICH dies of a bus error when it starts: with 1 MiB a rank it did."""

_SPEAK_PMIX = ("Open MPI", "PRRTE", "jsrun", "PMIx")
_WITHOUT_MPI = ("torchrun", "RANK/WORLD_SIZE")
_RENUMBERED = ("Slurm", "PALS", "Flux")
"""Launchers whose ranks some MPI libraries number in another order, as Cray MPICH by MPICH_RANK_REORDER_METHOD."""

_SRUN = {"Open MPI": "srun --mpi=pmix", "Cray MPICH": "srun --mpi=cray_shasta", "": "srun --mpi=pmi2"}
_COMMANDS = {
    **dict.fromkeys(("Slurm", "PMI", "PMIx"), _SRUN),
    "PALS": {"Cray MPICH": "mpiexec --pmi=cray", "": "mpiexec --pmi=pmix"},
    "Flux": {"Open MPI": "flux run -o pmi=pmix", "Cray MPICH": "flux run -o pmi=cray-pals", "": "flux run"},
    "ParaStation": {"Open MPI": "PSSLURM_PMI_TYPE=pmix srun", "": "srun"},
}
"""Commands by launcher and by the vendor of the MPI library; the empty vendor is any other."""


@dataclass(frozen=True)
class MpiLibrary:
    """The MPI library that this process has loaded.

    Attributes:
        vendor: `"MPICH"`, `"Open MPI"`, `"Intel MPI"`, ... as mpi4py names it.
        version: For instance `"5.0.11"`.
        path: File of the shared library; None if unknown.
        mpirun: The launcher installed with the library; None if there is none.
    """

    vendor: str
    version: str
    path: str | None
    mpirun: str | None


def check_launch(launchers: Iterable[Launcher], mpi_rank: int, mpi_size: int, library: MpiLibrary) -> str | None:
    """Compare the launchers' variables with MPI's world; local.

    Args:
        launchers: Result of `detect_launchers`.
        mpi_rank: This process's number in MPI's world.
        mpi_size: Number of ranks in MPI's world.
        library: The MPI library loaded.

    Returns:
        None if they agree, else a message with the variables, the loaded library, and the command to type.
    """
    found = list(launchers)
    wrong = [launcher for launcher in found if _disagrees(launcher, mpi_rank, mpi_size)]
    if not wrong:
        return None
    # torchrun runs inside the others, and they count its agents.
    launcher = next((one for one in wrong if one.name == "torchrun"), wrong[0])
    rivals = (one for one in found if one.name not in _WITHOUT_MPI and launcher.contradicts(one))
    rival = None if launcher.name in _WITHOUT_MPI else next(rivals, None)
    what = "the launcher and MPI disagree" if rival is None else "two launchers contradict each other"
    other = "" if rival is None else f" by those of {rival.name} {_rank_of(rival)},"
    return (
        f"{what}: by the variables of {launcher.name} this is {_rank_of(launcher)},{other} "
        f"by MPI it is rank {mpi_rank} of {mpi_size}.\n{_evidence(launcher, mpi_size, library, rival)}"
    )


def check_protocol(env: Mapping[str, str] | None, library: MpiLibrary, description: str) -> str | None:
    """Return the reason if the MPI library would end this process when it starts under the launcher; local.

    Args:
        env: Environment variables, `None` for this process's own.
        library: The MPI library loaded.
        description: The library's version text, with its build options.

    Returns:
        None if no reason is known, else a message as that of `check_launch`.
    """
    if library.vendor != "MPICH" or "pmix" in description.lower() or number_in(env, "PMIX_RANK") is None:
        return None
    speakers = (launcher for launcher in detect_launchers(env) if launcher.name in _SPEAK_PMIX)
    launcher = next(speakers, None)
    if launcher is None:
        return None
    return (
        f"by the variables of {launcher.name} this is {_rank_of(launcher)}, but that launcher speaks PMIx, "
        f"which this {library.vendor} was built without.\n{_evidence(launcher, 1, library)}"
    )


def check_room(library: MpiLibrary, folder: Path, ranks: int) -> str | None:
    """Return the reason if MPICH would crash when it starts, for lack of room in /dev/shm; else None; local.

    Args:
        library: The MPI library loaded.
        folder: /dev/shm.
        ranks: Number of ranks of the node.
    """
    if library.vendor != "MPICH":
        return None
    try:
        total, _, free = shutil.disk_usage(folder)
    except OSError:
        return None
    if free >= ranks * LEAST_ROOM:
        return None
    return (
        f"{folder} of this node has {free >> 20} MiB free of {total >> 20}, and {library.vendor} would crash: its "
        f"{counted(ranks, 'rank')} need at least {ranks * LEAST_ROOM >> 20} MiB there, and some 12 MiB each for "
        "large messages.\n"
        f"  type:   mount -o remount,size=1g {folder}\n"
        "          (for a container: docker run --shm-size=1g)\n"
        "  or:     axonmpi doctor\n"
        "          (on one rank; it names files there that ended jobs have left)"
    )


def _disagrees(launcher: Launcher, mpi_rank: int, mpi_size: int) -> bool:
    if launcher.size is not None and launcher.size != mpi_size:
        return True
    if launcher.rank is None:
        return False
    if launcher.name in _RENUMBERED:
        return launcher.rank >= mpi_size
    return launcher.rank != mpi_rank


def _rank_of(launcher: Launcher) -> str:
    rank = "a process" if launcher.rank is None else f"rank {launcher.rank}"
    return rank if launcher.size is None else f"{rank} of {launcher.size}"


def _evidence(launcher: Launcher, mpi_size: int, library: MpiLibrary, rival: Launcher | None = None) -> str:
    seen = "\n          ".join(
        ", ".join(f"{name}={value}" for name, value in one.variables) for one in (launcher, rival) if one
    )
    return (
        f"  seen:   {seen}\n"
        f"  loaded: {library.vendor} {library.version} from {library.path or 'an unknown place'}\n"
        f"  {_advice(launcher, mpi_size, library, rival)}"
    )


def _advice(launcher: Launcher, mpi_size: int, library: MpiLibrary, rival: Launcher | None) -> str:
    """Return the command to type instead."""
    ranks = launcher.size or "N"
    by_mpirun = f"{library.mpirun or f'the mpirun that belongs to {library.vendor}'} -n {ranks} python SCRIPT"
    leftover = _unset(launcher, rival)
    if launcher.name == "torchrun":
        return f"type:   {by_mpirun}\n          (torchrun starts processes that MPI knows nothing of)"
    if launcher.name == "RANK/WORLD_SIZE":
        wanted = "" if mpi_size > 1 else f"\n  or, if {ranks} ranks are wanted:\n          {by_mpirun}"
        return f"type:   {leftover}\n          (left over from another job, or set by hand){wanted}"
    if mpi_size > 1:
        return f"type:   {leftover}\n          (they are not of the launcher that started this job)"
    if rival is not None:
        return (
            f"type:   {leftover}\n          (if {rival.name} has started this job)\n"
            f"  or:     {_unset(rival, launcher)}\n          (if {launcher.name} has)\n"
            f"  then:   {by_mpirun}\n          (each process is alone: the launcher belongs to another MPI)"
        )
    if launcher.name in _COMMANDS:
        command = _COMMANDS[launcher.name].get(library.vendor, _COMMANDS[launcher.name][""])
        return (
            f"type:   {command} -n {ranks} python SCRIPT\n"
            f"          ({command.split()[0]} has to speak the protocol of {library.vendor})\n"
            f"  or:     {by_mpirun}"
        )
    return f"type:   {by_mpirun}\n          (the launcher used belongs to another MPI than the library loaded)"


def _unset(launcher: Launcher, rival: Launcher | None) -> str:
    """Return the command that unsets the variables of a launcher but not of its rival."""
    kept = dict(rival.variables) if rival else {}
    return "unset " + " ".join(name for name, _ in launcher.variables if name not in kept)
