"""A job in which the last rank does not come to a collective; run by tests, as `faulty_job.py FAULT`."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import axonmpi as ax


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def kill_launcher() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def loop() -> None:
    while True:
        time.sleep(0.001)


def come_late() -> None:
    time.sleep(8)
    world.default_group.all_reduce(torch.ones(3))


def wait_elsewhere() -> None:
    pair.barrier()


def end() -> None:
    """Come to the end of the program."""


FAULTS = {
    "killed": be_killed,
    "stopped": be_stopped,
    "crashed": crash,
    "left": lambda: os._exit(0),
    "exited": lambda: sys.exit(0),
    "exited 256": lambda: sys.exit(256),
    "ended": end,
    "launcher": kill_launcher,
    "loops": loop,
    "slow": come_late,
    "circle": wait_elsewhere,
}

world = ax.init_process_group()
pair = world.new_group(range(world.size))
world.barrier()
print("pid", world.rank, os.getpid(), flush=True)
if world.rank == world.size - 1:
    FAULTS[sys.argv[1]]()
elif len(sys.argv) > 2 and sys.argv[2] == "recv":
    world.default_group.recv(torch.zeros(3), world.size - 1)
else:
    world.default_group.all_reduce(torch.ones(3))
