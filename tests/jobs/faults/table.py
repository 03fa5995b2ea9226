"""The faults: how each is made, how soon its job has to end, how, and what has to be said."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from jobs.faults.programs import HANGS

Act = Literal["", "stop a rank", "kill the launcher", "cut the link", "fill /dev/shm", "mix", "no launcher"]
Places = tuple[tuple[int, ...], ...]

ONE_NODE, TWO_NODES = (3,), (1, 2)
"""Ranks of each node; the culprit, rank 1, shares the node of rank 0 or not."""
BOTH: Places = (ONE_NODE, TWO_NODES)


@dataclass(frozen=True)
class Fault:
    """A fault, and what has to follow from it.

    Attributes:
        name: The function of `programs.py`, or an entry of its tables.
        what: The fault in words.
        says: Patterns that all have to be found in what the job prints; the first finds the line of the table.
        code: The exit code of the launcher; None: any but 0; "any": the MPI libraries do what they can.
        seconds: How long the job may go on after the fault.
        places: Ranks of each node, one job for each.
        env: Variables of the job.
        arguments: Of the function.
        act: What is done from outside.
        quick: Whether it is one of the few that a plain session has.
    """

    name: str
    what: str
    says: tuple[str, ...]
    code: int | Literal["any"] | None = 1
    seconds: float = 10.0
    places: Places = BOTH
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    act: Act = ""
    quick: bool = False


ALONE_AT_THE_END = (r"ranks? .*\b2\b.* come to the end of .* while rank 1 waits in (all_reduce|wait)",)
ERROR = (r"\[rank 1\] ValueError: the injected error",)


def gone(how: str) -> tuple[str, ...]:
    """What has to be said of rank 1 when it is no more; launchers put it into two lines."""
    return (rf"\brank 1\b[^.;]*?({how})",)


def dead(number: int, name: str) -> tuple[str, ...]:
    """The same of a signal; MPICH's launcher ends the other ranks at once, and names a process."""
    by_mpich = rf"PID \d+ RUNNING AT n\d\s[\s\S]*?(EXIT CODE: {number}|signal {number})"
    return (rf"\brank 1\b[^.;]*?({name}|signal {number}|has ended)|{by_mpich}",)


def called(how: str) -> tuple[str, ...]:
    """What has to be said when rank 1 makes another call."""
    return (rf"\brank 1: {how}", r"CollectiveMismatchError", r"\branks 0, 2: ")


FAULTS = (
    Fault("raises", "a rank raises", ERROR),
    Fault("raises_in_thread", "a rank raises in a thread", ERROR),
    Fault("raises_in_hook", "a rank raises in a hook of backward", ERROR),
    Fault("raises_in_loader", "a DataLoader worker raises", ERROR),
    Fault("raises_in_stage", "a pipeline stage raises", ERROR),
    Fault("fewer_steps", "a rank makes fewer pipeline steps", gone("end"), code=None),
    Fault(
        "fsdp_caught", "an FSDP forward raises on a rank, and is caught",
        (r"\brank 1: \w+\(", "CollectiveMismatchError"),
    ),
    Fault("ends", "a rank comes to the end of its program", gone("end"), code=None),
    Fault("destroys", "a rank calls `destroy_process_group()` and ends", gone("end"), code=None),
    Fault("closes", "a rank closes a group and goes on", gone("closed the group"), code=None),
    Fault("exits_0", "`sys.exit(0)` on a rank", gone("end"), code=None),
    Fault("exits_256", "`sys.exit(256)` on a rank", gone("end"), code=None),
    Fault("os_exit_0", "`os._exit(0)` on a rank", dead(9, "exit"), code=None, quick=True),
    Fault("killed", "SIGKILL of a rank", dead(9, "Killed"), code=None),
    Fault("healthy", "SIGKILL of the launcher", (), code=-9, act="kill the launcher", quick=True),
    Fault("stopped", "SIGSTOP of a rank", gone("stopped"), code=None),
    Fault("crashes", "SIGSEGV of a rank", dead(11, "Segmentation"), code=None),
    Fault("out_of_memory", "a rank has no memory left", (r"\[rank 1\] .*(can't allocate|not enough) memory",)),
    Fault(
        "loops", "an endless loop between collectives", (r"\brank 1\b", r"in loop\b"), code=None, seconds=20.0,
        env={"AXONMPI_TIMEOUT": "5"}, quick=True,
    ),
    Fault("skipped", "a collective skipped on a rank", called("broadcast")),
    Fault("wrong_order", "two groups in another order", (r"\brank 1\b", "TimeoutError"), code=None),
    Fault("slow", "none: a rank comes late", (), code=0, seconds=15.0),
    Fault("wrong_operation", "another operation", called("all_gather")),
    Fault("wrong_dtype", "another dtype", called(r"all_reduce\(float64")),
    Fault("wrong_shape", "another shape", called(r"all_reduce\(float32 \[5\]")),
    Fault("wrong_root", "another root", called(r"broadcast\(.*root=1")),
    Fault(
        "ring_of_sends", "a ring of sends", (r"\brank 1\b.*send", "CollectiveTimeoutError"), code=None,
        places=(ONE_NODE,),
    ),
    Fault(
        "ring_of_sends", "a ring of sends over nodes", (r"has waited \d+ s for .*send", "CollectiveTimeoutError"),
        code=None, seconds=20.0, env={"AXONMPI_TIMEOUT": "5"}, places=(TWO_NODES,),
    ),
    Fault(
        "not_a_number", "NaN in the gradient of a rank", (r"\brank 1\b.*nan",), code=0,
        env={"AXONMPI_DEBUG": "1"},
    ),
    Fault(
        "dropped_work", "nobody waits for an operation that the other ranks never meet",
        (r"\[rank 1\] .*all_reduce.* still under way when the program ended: .*rank.* ha(s|ve) not met it",),
        code=None, seconds=15.0,
    ),
    Fault(
        "closed_in_use", "a group is closed while an operation is under way",
        (r"\[rank 1\] .*still runs an asynchronous operation",), seconds=15.0,
    ),
    Fault("after_the_end", "a collective after the end of MPI", (r"CommunicatorError: .*has ended",), code=0),
    Fault(
        "thread_at_the_end", "a rank ends while a thread of it waits",
        (r"\[rank 1\] .*recv.* in thread .* was still under way when the program ended",),
    ),
    Fault("thread_goes_on", "a thread of a rank waits for ranks at their end", ALONE_AT_THE_END, quick=True),
    Fault("pool_goes_on", "a thread of a pool waits for ranks at their end", ALONE_AT_THE_END),
    Fault("calls_at_exit", "a rank calls a collective at its exit", ALONE_AT_THE_END),
    Fault(
        "thread_is_awaited", "a thread waits for ranks at their end, and another thread for that thread",
        (r"rank 1 has waited .* for .*rank.* in all_reduce",), seconds=20.0, env={"AXONMPI_TIMEOUT": "5"},
    ),
    Fault("threads_meet", "none: threads communicate long after the main threads", (), code=0, seconds=20.0),
    Fault("thread_of_failed", "ranks exit with code 3 while a thread waits for them", ALONE_AT_THE_END),
    Fault(
        "healthy", "the link between nodes is cut",
        (r"RankFailedError: the link from node n\d to node n\d .* is lost", r"other nodes: not known"),
        code=None, places=(TWO_NODES,), act="cut the link",
    ),
    Fault("brief", "/dev/shm is full", (r"/dev/shm",), code="any", places=(ONE_NODE,), act="fill /dev/shm"),
    Fault(
        "healthy", "the launcher of another MPI", (r"errors\.LaunchError: ", r"type: +\S*mpirun"), code=None,
        places=(ONE_NODE,), act="mix",
    ),
    Fault(
        "healthy", "variables of a launcher, and none there",
        (r"errors\.LaunchError: ", r"type: ", r"or: +\S*mpirun"),
        places=(ONE_NODE,), env={"PMI_RANK": "1", "PMI_SIZE": "3"}, act="no launcher",
    ),
)  # fmt: skip


HANG_SECONDS = 40.0
HANG_LIMIT = "6"
"""Seconds that ranks may wait for one that lives: with the default it is an hour."""


def random_hangs(count: int, seed: int) -> Iterator[Fault]:
    """Return faults in which a random rank hangs in a random way after random operations, on one node."""
    draw = random.Random(seed)
    ways = list(HANGS)
    for number in range(count):
        how, rank, steps = ways[number % len(ways)], draw.randrange(sum(ONE_NODE)), draw.randrange(40)
        names = (
            rf": rank {rank} on \S+ (has|is)",
            rf"waited \d+ s for rank {rank} in",
            f"look at rank {rank} first",
        )
        named = rf"axonmpi\.errors.*({'|'.join(names)})"
        act: Act = "stop a rank" if how == "SIGSTOP from outside" else ""
        yield Fault(
            "hangs", f"rank {rank} after {steps} operations: {how}", (named,), None, HANG_SECONDS, (ONE_NODE,),
            {"AXONMPI_TIMEOUT": HANG_LIMIT}, (how, str(rank), str(steps), str(draw.randrange(10**6))), act,
        )  # fmt: skip
