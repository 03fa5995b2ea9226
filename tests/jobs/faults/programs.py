"""What goes wrong in a job: `programs.py FAULT ...`, on three ranks, of which rank 1 is the culprit.

A fault is a function of this file, or an entry of ENDS or OTHER_CALLS, by the name that the table has for it. The
other ranks go on with collectives until they are stopped. The time of the fault is written to the file that
FAULT_MARK names.
"""

import atexit
import ctypes
import itertools
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader

import axonmpi as ax

CULPRIT = 1
SPARE_BYTES = 64 << 20
"""Memory that a rank may still ask for before it has none."""


def mark() -> None:
    """Write down that the fault happens now; several ranks may, and the file is whole at any time."""
    path = Path(os.environ["FAULT_MARK"])
    own = path.with_name(f"{path.name}-{os.getpid()}")
    own.write_text(str(time.monotonic()))
    own.replace(path)


def go_on() -> NoReturn:
    """Do what a healthy rank does, for ever."""
    while True:
        ax.all_reduce(torch.ones(1000))


# ---- a rank raises ----------------------------------------------------------------------------------------------


def fail(*_: object) -> NoReturn:
    mark()
    raise ValueError("the injected error")


def raises_in_hook(world: ax.World) -> None:
    model = ax.DDP(nn.Linear(4, 4))
    if world.rank == CULPRIT:
        model.module.weight.register_hook(fail)
    while True:
        model(torch.ones(2, 4)).sum().backward()


def fail_in_thread() -> None:
    threading.Thread(target=fail).start()
    go_on()


class Block(nn.Module):
    """A layer that can be told to raise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fail() if self.broken else torch.relu(self.layer(x))


def pipeline_of(world: ax.World, stage: Block) -> ax.Pipeline:
    stages: list[nn.Module] = [Block() for _ in range(world.size)]
    stages[world.rank] = stage
    return ax.Pipeline.from_modules(
        stages, schedule=ax.PipelineSchedule.ONE_F_ONE_B, num_microbatches=4, loss_fn=nn.functional.mse_loss
    )


def raises_in_stage(world: ax.World) -> None:
    stage = Block()
    pipeline = pipeline_of(world, stage)
    x = torch.ones(8, 8)
    for step in range(10**6):
        stage.broken = world.rank == CULPRIT and step == 3
        pipeline.train_step(x, x)


def fewer_steps(world: ax.World) -> None:
    pipeline = pipeline_of(world, Block())
    x = torch.ones(8, 8)
    for _ in range(3 if world.rank == CULPRIT else 10**6):
        pipeline.train_step(x, x)
    mark()


def fsdp_caught(world: ax.World) -> None:
    """The culprit raises in the middle of a forward, catches it, and goes on with the next step."""
    blocks = [Block() for _ in range(3)]
    model = ax.FSDP(nn.Sequential(*blocks))
    for step in range(10**6):
        blocks[1].broken = world.rank == CULPRIT and step == 3
        try:
            loss = model(torch.ones(2, 8)).sum()
        except ValueError:
            continue
        loss.backward()


# ---- nothing goes wrong on the ranks ----------------------------------------------------------------------------


def healthy(world: ax.World) -> None:
    """The runner does something to the launcher or to the nodes."""
    brief(world)
    if world.rank == CULPRIT:
        mark()
    go_on()


def brief(world: ax.World) -> None:
    """The ranks end soon."""
    for _ in range(10):
        ax.all_reduce(torch.ones(1000))


# ---- a rank does something else ---------------------------------------------------------------------------------


def slow(world: ax.World) -> None:
    if world.rank == CULPRIT:
        mark()
        time.sleep(8)  # twice as long as a rank that is stopped is waited for
    ax.all_reduce(torch.ones(1000))


OTHER_CALLS = {
    "skipped": lambda: None,
    "wrong_operation": lambda: ax.all_gather(torch.ones(4)),
    "wrong_dtype": lambda: ax.all_reduce(torch.ones(4, dtype=torch.float64)),
    "wrong_shape": lambda: ax.all_reduce(torch.ones(5)),
}
"""What the culprit calls instead of an all-reduce of 4 values."""


def other_call(call: Callable[[], object], world: ax.World) -> None:
    ax.barrier()
    if world.rank == CULPRIT:
        mark()
        call()
    else:
        ax.all_reduce(torch.ones(4))
    ax.broadcast(torch.ones(4))


def wrong_root(world: ax.World) -> None:
    ax.barrier()
    mark()
    ax.broadcast_from(torch.ones(4), int(world.rank == CULPRIT))


def wrong_order(world: ax.World) -> None:
    """The culprit takes two groups in the other order: every rank waits."""
    groups = [world.new_group(range(world.size)) for _ in range(2)]
    mark()
    for group in reversed(groups) if world.rank == CULPRIT else groups:
        ax.all_reduce(torch.ones(4), group=group)


def ring_of_sends(world: ax.World) -> None:
    """Each rank sends before it receives, more than MPI keeps: every rank waits."""
    block = torch.ones(16 << 20)
    ax.barrier()
    mark()
    ax.send(block, (world.rank + 1) % world.size)
    ax.recv(block, (world.rank - 1) % world.size)


def not_a_number(world: ax.World) -> None:
    """One value of the culprit's gradient is no number."""
    model = ax.DDP(nn.Linear(4, 4))
    for step in range(10):
        x = torch.ones(2, 4)
        if world.rank == CULPRIT and step == 3:
            mark()
            x[0, 0] = float("nan")
        model(x).sum().backward()


# ---- the culprit does something else while the others go on -----------------------------------------------------


def loop() -> None:
    while True:
        torch.ones(10).sum()


def exhaust_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, resource.RLIM_INFINITY))
    torch.ones(4 * SPARE_BYTES)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


ENDS = {
    "raises": fail,
    "raises_in_thread": fail_in_thread,
    "raises_in_loader": lambda: list(DataLoader([0], num_workers=1, collate_fn=fail)),
    "ends": lambda: None,
    "destroys": ax.destroy_process_group,
    "closes": lambda: (ax.get_world().default_group.close(), loop()),
    "exits_0": lambda: sys.exit(0),
    "exits_256": lambda: sys.exit(256),
    "os_exit_0": lambda: os._exit(0),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": stop,
    "crashes": lambda: ctypes.string_at(0),
    "out_of_memory": exhaust_memory,
    "loops": loop,
}


def end(how: Callable[[], object], world: ax.World) -> None:
    if world.rank == CULPRIT:
        mark()
        how()
    else:
        go_on()


# ---- a random rank hangs in a random way ------------------------------------------------------------------------


def wait_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


HANGS = {
    "SIGSTOP": stop,
    "an endless loop": loop,
    "a lock": wait_for_lock,
    "a pipe": lambda: os.read(os.pipe()[0], 1),
    # One call into C that never lets another thread of this rank run.
    "a call that keeps the interpreter": lambda: sum(itertools.repeat(0)),
    # The other ranks send nothing, and wait for this one in a collective: a circle.
    "a message that nobody sends": lambda: ax.recv(torch.ones(3), (ax.get_rank() + 1) % ax.get_world_size()),
    "the end of the program": lambda: sys.exit(0),
    "SIGSTOP from outside": lambda: None,
}
"""How a rank hangs; the last one by the runner, at any moment, also in the middle of a collective."""


def hangs(world: ax.World) -> None:
    """`hangs HOW RANK STEP SEED`: a rank hangs after so many random operations."""
    how, culprit, steps, seed = sys.argv[2], *map(int, sys.argv[3:6])
    draw = random.Random(seed)
    pair = world.new_group([0, 1])
    for _ in range(steps):
        random_operation(draw, pair)
    if world.rank == culprit:
        Path(os.environ["FAULT_PID"]).write_text(str(os.getpid()))
        mark()
        HANGS[how]()
    while True:
        random_operation(draw, pair)


def random_operation(draw: random.Random, pair: ax.ProcessGroup) -> None:
    """Make a call that follows from the generator, which is the same on all ranks."""
    numel = draw.choice([1, 1000, 10**6])
    draw.choice(
        [
            lambda: ax.all_reduce(torch.ones(numel)),
            lambda: ax.all_gather(torch.ones(numel)),
            lambda: ax.broadcast(torch.ones(numel)),
            lambda: ax.all_reduce(torch.ones(numel), async_op=True).wait(),
            lambda: ax.all_reduce(torch.ones(numel), group=pair) if pair.contains(ax.get_world().rank) else None,
            ax.barrier,
        ]
    )()


# ---- operations that nobody waits for, or too late --------------------------------------------------------------


def dropped_work(world: ax.World) -> None:
    """Nobody waits for the culprit's operation, which the others never meet."""
    ax.barrier()
    mark()
    if world.rank == CULPRIT:
        ax.all_reduce(torch.ones(4), async_op=True)


def closed_in_use(world: ax.World) -> None:
    """The culprit closes a group in which its operation is under way."""
    group = world.new_group(range(world.size))
    if world.rank == CULPRIT:
        mark()
        ax.all_reduce(torch.ones(4), group=group, async_op=True)
        group.close()
    go_on()


def after_the_end(world: ax.World) -> None:
    """A function that Python calls after MPI has ended communicates: see `main`."""
    mark()


def thread_at_the_end(world: ax.World) -> None:
    """The culprit's program ends while a thread of it waits for a message."""
    ax.barrier()
    mark()
    if world.rank == CULPRIT:
        threading.Thread(target=ax.recv, args=(torch.ones(4), 0), daemon=True).start()


def thread_goes_on(world: ax.World) -> None:
    """A thread of the culprit, for which Python waits, is in a collective, and the other ranks end."""
    if world.rank == CULPRIT:
        threading.Thread(target=ax.all_reduce, args=(torch.ones(4),)).start()
    mark()


def pool_goes_on(world: ax.World) -> None:
    """The same with a thread of a pool, in an operation of another thread."""
    if world.rank == CULPRIT:
        work = ax.all_reduce(torch.ones(4), async_op=True)
        ThreadPoolExecutor().submit(work.wait)
    mark()


def thread_is_awaited(world: ax.World) -> None:
    """Another thread, which counts as one that computes, waits for the thread that waits in vain."""
    if world.rank == CULPRIT:
        waiting = threading.Thread(target=ax.all_reduce, args=(torch.ones(4),))
        waiting.start()
        threading.Thread(target=waiting.join).start()
    mark()


def threads_meet(world: ax.World) -> None:
    """Two threads of rank 0 wait: one for the culprit, which waits for the other one, and that for rank 2."""

    def do(*steps: tuple[Callable[..., object], int, int]) -> None:
        for step, peer, tag in steps:
            step(torch.ones(4), peer, tag=tag)

    def late() -> None:
        time.sleep(8.0)  # longer than it takes the watchdog to judge
        do((ax.send, 0, 2))

    threads = {
        0: [partial(do, (ax.recv, 1, 1)), partial(do, (ax.recv, 2, 2), (ax.send, 1, 3))],
        1: [partial(do, (ax.recv, 0, 3), (ax.send, 0, 1))],
        2: [late],
    }
    for run in threads[world.rank]:
        threading.Thread(target=run).start()
    mark()


def calls_at_exit(world: ax.World) -> None:
    """The culprit calls a collective when its main thread has ended."""
    if world.rank == CULPRIT:
        atexit.register(ax.all_reduce, torch.ones(4))
    mark()


def thread_of_failed(world: ax.World) -> NoReturn:
    """All ranks fail at the same time, and a thread of the culprit waits."""
    thread_goes_on(world)
    sys.exit(3)


def main() -> None:
    if sys.argv[1] == "after_the_end":
        atexit.register(ax.all_reduce, torch.ones(4))
    if os.environ.get("FAULT_AT_START"):
        mark()
    world = ax.init_process_group()
    name = sys.argv[1]
    if name in ENDS:
        end(ENDS[name], world)
    elif name in OTHER_CALLS:
        other_call(OTHER_CALLS[name], world)
    else:
        globals()[name](world)


if __name__ == "__main__":
    main()
