#!/usr/bin/env python3
"""Drawn functions and small networks on samples that are cut over ranks: all values are those of one process.

Settings are dealt to 2, 3, 4, 2 x 2 and 1 x 3 ranks. Results, all gradients and running statistics are compared
within 1e-10 (float64) of a tensor's largest value, or 1e-5 (float32) of a setting's. Refused settings are counted,
with reasons. The exit code is 0 if no value differs.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter

import torch
from helpers.cut_tensors import values
from jobs.domain.functions import FUNCTIONS
from jobs.domain.layers import LAYERS, Draw, in_factors
from jobs.job import command_parser, parse_with_seed, start_ranks
from torch import Tensor

import axonmpi as ax
from axonmpi.errors import DomainError

LAYOUTS = [{"y": 2}, {"y": 3}, {"y": 4}, {"y": 2, "x": 2}, {"y": 1, "x": 3}]
"""A setting has the layout of its number; a job has those of its number of ranks."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
SECONDS = 600
OPTIONS = {
    "--settings": {"type": int, "default": 2000, "help": "default: 2000"},
    "--first": {"type": int, "default": 0, "help": "number of the first setting (default: 0)"},
    "--ranks": {"type": int, "nargs": "*", "default": [2, 3, 4], "help": "numbers of ranks (default: 2 3 4)"},
}


def outcome(mesh: ax.DeviceMesh, number: int) -> tuple[str, str]:
    """Return "equal", "refused" (also as by torch, or by it alone) or "differs", and why; collective."""
    draw = Draw(number, mesh.axes)
    dtype = draw.choice([torch.float64, torch.float64, torch.float32])
    family = draw.choice(LAYERS + FUNCTIONS)
    setting = family(draw)
    if draw.chance(0.25):
        setting = in_factors(draw, setting)
    shapes = [tuple(x.shape) for x in setting.tensors]
    told = f"{family.__name__}: {setting.options}, {shapes}, {setting.cuts}, {dtype}"
    tensors = [x.to(dtype) if x.is_floating_point() else x for x in setting.tensors]
    buffers = [buffer.to(dtype) for buffer in setting.buffers]
    given = setting.function, tensors, setting.cuts[: len(tensors)]
    expected: list[tuple[str, Tensor]] | None = None
    try:
        expected = list(values(*given, buffers=buffers))
    except (RuntimeError, ValueError, IndexError) as error:
        told += f", torch: {error}"
    try:
        found = list(values(*given, mesh, buffers))
    except DomainError as error:
        return ("refused" if expected else "refused as by torch"), f"{family.__name__}: {error}"
    except (RuntimeError, ValueError, IndexError) as error:
        is_empty = expected is None or not expected[0][1].numel()  # torch refuses some empty results and not all
        return ("refused as by torch" if is_empty else "differs"), f"{told}: {error}"
    if expected is None:  # torch does not compute an average pool of an image below its kernel, for example
        return "refused by torch alone", told
    largest = [x.abs().max().item() if x.is_floating_point() and x.numel() else 1.0 for _, x in expected]
    for (what, one), (_, other), size in zip(found, expected, largest, strict=True):
        # Sums that cancel, such as the gradient of a bias before a norm, have the rounding of their terms.
        scale = min(max(1.0, size if dtype is torch.float64 else max(largest)), 1e6)
        limit = TOLERANCES[dtype] * scale
        try:
            torch.testing.assert_close(one, other, atol=limit, rtol=limit, equal_nan=True)
        except AssertionError as error:
            return "differs", f"{told}, {what}: {error}"
    return "equal", family.__name__


def on_ranks(seed: int, first: int, count: int) -> int:
    """Compare the settings of this number of ranks; print counts and what differs; return 1 if anything does."""
    warnings.simplefilter("ignore")  # of torch, about functions alone
    world = ax.init_process_group()
    meshes = {
        n: ax.DeviceMesh(shape)
        for n, shape in enumerate(LAYOUTS)
        if torch.Size(shape.values()).numel() == world.size
    }
    outcomes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for number in range(first, first + count):
        if number % len(LAYOUTS) not in meshes:
            continue
        here = outcome(meshes[number % len(LAYOUTS)], seed * 10**6 + number)
        everywhere = ax.all_gather_object(here)
        kind, why = next((each for each in everywhere if each[0] == "differs"), here)
        if len({each for each, _ in everywhere}) > 1:
            kind = "differs"
        outcomes[kind] += 1
        reasons[why.partition(" (cut")[0]] += kind == "refused"
        if kind == "differs" and world.is_main:
            print(f"--first {number} --settings 1, {LAYOUTS[number % len(LAYOUTS)]}: {why}", flush=True)
    if world.is_main:
        counts = ", ".join(f"{outcomes[kind]} {kind}" for kind in sorted(outcomes))
        print(
            f"{world.size} ranks: {counts}",
            *(f"    {n} {why}" for why, n in reasons.most_common(25) if n),
            sep="\n",
        )
    return int(outcomes["differs"] > 0)


def main() -> int:
    options = parse_with_seed(command_parser(__doc__, OPTIONS))
    failed = 0
    for ranks in options.ranks:
        with start_ranks(ranks, __file__, options.seed, options.first, options.settings) as job:
            code = job.wait(SECONDS)
            print(job.output, end="", flush=True)
        failed |= code != 0
    return failed


if __name__ == "__main__":
    if len(sys.argv) == 4 and all(word.isdecimal() for word in sys.argv[1:]):
        sys.exit(on_ranks(*map(int, sys.argv[1:])))
    sys.exit(main())
