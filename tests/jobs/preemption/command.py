#!/usr/bin/env python3
"""Preempt runs on real ranks at random moments, and compare them with runs that were never interrupted.

    trainer     axonmpi train on 2 ranks; signals to one rank, to all, to mpirun; one in five is killed instead
    own loop    a loop with a sampler, on 1, 2 and 4 ranks in turn; signals only

The exit code is 0 if nothing was lost, repeated or changed.
"""

import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from helpers.limits import limit
from jobs.job import Job, command_parser, parse_with_seed, send, start_ranks, wait_for
from jobs.preemption.own_loop import EPOCHS, SAMPLES

import axonmpi as ax

SECONDS = 120.0
TINY = [
    *("--layers=2", "--width=32", "--heads=4", "--sequence-length=16", "--global-batch=8", "--data-limit=0.05"),
    *("--held-out-sequences=8", "--evaluate-every=100", "--sample-length=20", "--progress=off", "--no-plot"),
]
TRAIN = ["-m", "axonmpi", "train", *TINY]
OWN_LOOP = Path(__file__).with_name("own_loop.py")
TIMES = ("seconds", "tokens_per_second", "communication")


def run(ranks: int, *arguments: object) -> None:
    """Run a job that has to succeed."""
    with start_ranks(ranks, *arguments) as job:
        assert job.wait(limit(SECONDS)) == 0, job.output


def lines_in(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_for_lines(job: Job, file: Path, enough: Callable[[int], bool]) -> None:
    """Wait until a file of a job has enough lines, or the job has ended."""
    wait_for(lambda: not job.is_running or enough(lines_in(file)), limit(SECONDS))


def preempt(job: Job, file: Path, draw: random.Random, *, kills: bool) -> str:
    """Wait for some more lines of a job's file, then end it in one of several ways; return which."""
    before = lines_in(file)
    wait_for_lines(job, file, lambda count: count != before)  # a run that goes on may cut back some lines first
    more = lines_in(file) + draw.randint(1, 12)
    wait_for_lines(job, file, lambda count: count >= more)
    if not (processes := job.ranks()):
        return "none: it has come to its end"
    number = draw.choice([signal.SIGUSR1, signal.SIGTERM])
    way = draw.choice(["one", "one", "all", "mpirun", "kill" if kills else "all"])
    if way == "one":
        processes = [draw.choice(processes)]
    elif way == "mpirun":  # launchers hand SIGUSR1 on; at SIGTERM they end the job themselves
        number, processes = signal.SIGUSR1, [job.launcher.pid]
    elif way == "kill":
        number, way = signal.SIGKILL, "all"
    send(number, processes)
    return f"{number.name} to {way}"


def finish(
    ranks_of: list[int], arguments: list[object], file: Path, preemptions: int, draw: random.Random, *, kills: bool
) -> str:
    """Begin a job again and again until it is complete; return how often it was ended in which way."""
    ways: Counter[str] = Counter()
    while True:
        with start_ranks(ranks_of[ways.total() % len(ranks_of)], *arguments) as job:
            way = preempt(job, file, draw, kills=kills) if ways.total() < preemptions else "none"
            code = job.wait(limit(SECONDS))
            if code == 0:
                each = ", ".join(f"{count} {way}" for way, count in sorted(ways.items()))
                return f"{ways.total()} preemptions ({each})"
            may_end = way.startswith("SIGKILL") or (code == ax.REQUEUE_EXIT_CODE and not way.startswith("none"))
            assert may_end, f"exit code {code} after {way}:\n{job.output}"
        ways[way] += 1


def json_lines(file: Path) -> list:
    return [json.loads(line) for line in file.read_text().splitlines()]


def measured(folder: Path) -> list[dict]:
    return [
        {name: value for name, value in line.items() if name not in TIMES}
        for line in json_lines(folder / "metrics.jsonl")
    ]


def final(folder: Path) -> list[bytes]:
    latest = folder / "checkpoints" / "latest"
    files = latest / "model.safetensors", latest / "optimizer.safetensors", folder / "sample.txt"
    return [file.read_bytes() for file in files]


def check_trainer(root: Path, preemptions: int, draw: random.Random) -> bool:
    settings = [*TRAIN, "--fsdp=full", f"--steps={20 * preemptions}", "--checkpoint-every=7"]
    whole, parted = root / "whole", root / "parted"
    run(2, *settings, f"--out={whole}")
    begun = time.monotonic()
    ways = finish(
        [2],
        [*settings, "--resume=auto", f"--out={parted}"],
        parted / "metrics.jsonl",
        preemptions,
        draw,
        kills=True,
    )
    same = measured(parted) == measured(whole) and final(parted) == final(whole)
    left = sorted(path.name for path in (parted / "checkpoints").iterdir())
    print(f"trainer: {ways} in {time.monotonic() - begun:.0f} s")
    print(f"  {len(measured(whole))} lines of metrics, weights, optimizer: {'equal' if same else 'DIFFER'}")
    print(f"  in its folder: {' '.join(left)}", flush=True)
    return same and len(left) == 4 and not any("." in name for name in left)


def check_own_loop(root: Path, preemptions: int, draw: random.Random) -> bool:
    for name in ("whole", "parted"):
        (root / name).mkdir(parents=True)
    run(1, OWN_LOOP, root / "whole")
    file = root / "parted/steps.jsonl"
    ways = finish([1, 2, 4], [OWN_LOOP, root / "parted"], file, preemptions, draw, kills=False)
    whole, parted = json_lines(root / "whole/steps.jsonl"), json_lines(file)
    seen = Counter((epoch, sample) for epoch, _, samples, _ in parted for sample in samples)
    once = seen == Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES))
    steps = [step for _, step, *_ in parted] == [step for _, step, *_ in whole]
    apart = max(abs(one[-1] - other[-1]) for one, other in zip(whole, parted, strict=True)) if steps else None
    print(f"own loop on 1, 2, 4 ranks in turn: {ways}")
    how = "once each" if once else "LOST OR REPEATED"
    print(f"  {len(seen)} samples {how}, losses at most {apart} apart", flush=True)
    return once and apart is not None and apart < 1e-4  # other ranks round otherwise


def main() -> int:
    number = {"type": int, "default": 50, "help": "preemptions of each run (default: 50)"}
    options = parse_with_seed(command_parser(__doc__, {"--number": number}))
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="axonmpi-preemption-") as folder:
        root = Path(folder)
        good = [check(root / check.__name__, options.number, draw) for check in (check_own_loop, check_trainer)]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
