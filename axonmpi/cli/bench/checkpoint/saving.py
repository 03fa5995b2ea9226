"""Saves, loads, memory and stalls: ours beside plain writes and torch's."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ....comm import barrier, broadcast_object
from ....fsdp.memory import PeakMemory, process_memory
from ....groups.world import World
from ... import positive
from ..harness.timing import AXONMPI, Clock, count_cores, give_back, interleave, start_gloo
from . import planning, while_training
from .models import ours, torchs
from .savers import Ways, forget_pages, remove_all


def measure(world: World, options: argparse.Namespace) -> dict[str, Any]:
    """Measure on the ranks of `world`; collective. Times are in seconds, memory in bytes."""
    start_gloo(world)
    figures: dict[str, Any] = {"ranks": world.size, "cores": count_cores(world), "folder": options.folder}
    with _folder_in(world, options.folder) as folder:
        own, other = ours(options.mebibytes), torchs(options.mebibytes, world)
        ways = Ways(world, folder, own, other)
        figures["bytes"] = ways.nbytes
        clear = partial(remove_all, world, folder)
        figures["memory"] = {
            name: _extra_memory(save, clear) for name, save in ways.saves.items() if name != "plain"
        }
        cleared = _clock_after(clear)
        figures["save"] = interleave(ways.saves, blocks=options.blocks, calls=1, clock=cleared)
        for name in ways.loads:
            ways.saves[name]()
        forgotten = _clock_after(partial(forget_pages, world, folder))
        figures["load"] = interleave(ways.loads, blocks=options.blocks, calls=1, clock=forgotten)
        clear()
        del ways, other
        figures["asynchronous"] = while_training.measure(own, folder, options.mebibytes, options.blocks)
    dist.destroy_process_group()
    figures["planning"] = planning.measure(options.mebibytes, options.blocks)
    return figures


@contextmanager
def _folder_in(world: World, parent: str) -> Iterator[Path]:
    """Make a folder for the `with` block; collective, and removed also after an error of rank 0."""
    made = tempfile.TemporaryDirectory(dir=parent) if world.rank == 0 else None
    try:
        yield Path(broadcast_object(made.name if made else ""))
        barrier()
    finally:
        if made is not None:
            made.cleanup()


def _clock_after(prepare: Callable[[], None]) -> Clock:
    """Return what tells the time of a call for which something is prepared, untimed and by all ranks."""

    def seconds(call: Callable[[], object], _calls: int) -> float:
        prepare()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return seconds


def _extra_memory(call: Callable[[], object], prepare: Callable[[], None]) -> int:
    """Return the most memory of a rank during a call beyond what it has before; collective."""
    prepare()
    call()  # the first one makes what stays
    prepare()
    give_back()
    before = process_memory()[0]
    with PeakMemory() as peak:
        call()
    return int(AXONMPI.largest(peak.most - before))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--mebibytes",
        type=positive,
        default=1024,
        help="MiB of parameters and AdamW's state, on all ranks together (default: 1024)",
        metavar="N",
    )
    parser.add_argument(
        "--folder",
        type=_folder,
        default=tempfile.gettempdir(),
        help="where to write, six times as much, on the disk that is to be measured (default: the system's for "
        "temporary files)",
        metavar="FOLDER",
    )


def _folder(text: str) -> str:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder that exists, got {text!r}")
    return os.path.abspath(text)
