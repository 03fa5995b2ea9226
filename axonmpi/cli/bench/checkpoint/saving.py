"""`axonmpi bench checkpoint`: saves, loads, memory and stalls, beside plain writes and torch."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ....comm import barrier, broadcast_object
from ....groups.world import World
from ....utils.process_memory import PeakMemory, process_memory
from ..harness.benchmark import Benchmark, Figures
from ..harness.options import number
from ..harness.table import Column, figure, table_lines, text
from ..harness.timing import OVER_AXONMPI, WALL, Clock, interleave, release_memory
from . import planning, while_training
from .models import sharded_by_axonmpi, sharded_by_torch
from .savers import PLAIN, Savers, drop_cache, remove_all

_MIB = 1 << 20


# ---- measuring --------------------------------------------------------------------------------------------------


def _measure(world: World, options: argparse.Namespace) -> Figures:
    """Measure on the ranks of `world`; collective. Times are in seconds, memory in bytes."""
    figures: Figures = {"folder": options.folder}
    with _folder_in(world, options.folder) as folder:
        own, other = sharded_by_axonmpi(options.mebibytes), sharded_by_torch(options.mebibytes)
        savers = Savers(world, folder, own, other)
        figures["bytes"] = savers.nbytes

        clear = partial(remove_all, world, folder)
        figures["memory"] = {
            name: _extra_memory(save, clear) for name, save in savers.saves.items() if name != PLAIN
        }

        # Each save begins with an empty folder, and each load with an empty cache of the disk.
        figures["save"] = interleave(savers.saves, blocks=options.blocks, calls=1, clock=_clock_after(clear))
        for name in savers.loads:
            savers.saves[name]()
        uncached = _clock_after(partial(drop_cache, world, folder))
        figures["load"] = interleave(savers.loads, blocks=options.blocks, calls=1, clock=uncached)

        # Nothing but the sharded model of axonmpi is left beside the training.
        clear()
        del savers, other
        figures["asynchronous"] = while_training.measure(own, folder, options.mebibytes, options.blocks)
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
    """Return a clock that first runs a preparation of all ranks, untimed."""

    def seconds(call: Callable[[], object], calls: int) -> float:
        prepare()
        return WALL(call, calls)

    return seconds


def _extra_memory(call: Callable[[], object], prepare: Callable[[], None]) -> int:
    """Return the most memory of a rank during a call beyond its memory before; collective."""
    prepare()
    call()  # the first call allocates buffers that stay
    prepare()
    release_memory()
    before = process_memory()[0]
    with PeakMemory() as peak:
        call()
    return int(OVER_AXONMPI.maximum(peak.most - before))


# ---- table ------------------------------------------------------------------------------------------------------

_COLUMNS: list[Column] = [
    ("", text("name")),
    ("s", figure("seconds", form=".2f")),
    ("MiB/s", figure("rate", form=".0f")),
    ("axonmpi / this", figure("ours / this", form=".2f")),
    ("MiB more a rank", text("memory")),
]
_WHILE_TRAINING_COLUMNS: list[Column] = [
    ("saving beside training", text("name")),
    ("ms", figure("seconds", form=".0f", scale=1e3)),
    ("copies of the rank's part", figure("copies", form=".2f")),
]
_PLANNING_COLUMNS: list[Column] = [
    ("planning", text("name")),
    (f"ms, {planning.FEW} ranks", figure("few", scale=1e3)),
    (f"{planning.MANY}", figure("many", scale=1e3)),
    ("ratio", figure("ratio", form=".2f")),
]


def table(results: list[Figures]) -> str:
    """Format the figures of several numbers of ranks."""
    return "\n\n".join(_tables(result) for result in results)


def _tables(result: Figures) -> str:
    size = result["bytes"] / _MIB
    title = f"{result['ranks']} ranks on {result['cores']} cores, {size:.0f} MiB of parameters and AdamW's state"
    rows = []
    for kind in ("save", "load"):
        for name, seconds in result[kind].items():
            memory = result["memory"].get(name) if kind == "save" else None
            rows.append(
                {
                    "name": f"{kind}: {name}",
                    "seconds": seconds,
                    "rate": size / seconds,
                    "ours / this": result[kind]["axonmpi"] / seconds,
                    "memory": "" if memory is None else f"{memory / _MIB:.0f}",
                }
            )
    asynchronous = result["asynchronous"]
    stalls = [
        {"name": name, "seconds": seconds, "copies": seconds / asynchronous["copy"]}
        for name, seconds in asynchronous.items()
    ]
    few, many = (result["planning"][str(ranks)] for ranks in (planning.FEW, planning.MANY))
    plans = [
        {"name": turn, "few": seconds, "many": many[turn], "ratio": many[turn] / seconds}
        for turn, seconds in few.items()
    ]
    lines = [f"{title}; {result['folder']}; medians", *table_lines(_COLUMNS, rows, left=[0])]
    lines += ["", *table_lines(_WHILE_TRAINING_COLUMNS, stalls, left=[0])]
    lines += ["", *table_lines(_PLANNING_COLUMNS, plans, left=[0])]
    return "\n".join(lines)


# ---- command ----------------------------------------------------------------------------------------------------


def _folder(path: str) -> str:
    if not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder that exists, got {path!r}")
    return os.path.abspath(path)


CHECKPOINT = Benchmark(
    "saving and loading a checkpoint: ours, plain writes, torch's on gloo; time, memory, stalls, planning",
    _measure,
    table,
    ranks=(4,),
    blocks=5,
    options={
        "--mebibytes": number("MiB of parameters and AdamW's state, on all ranks together", 1024),
        "--folder": {
            "type": _folder,
            "default": tempfile.gettempdir(),
            "help": "where to write, six times as much, on the disk that is to be measured (default: the system's "
            "for temporary files)",
            "metavar": "FOLDER",
        },
    },
)
