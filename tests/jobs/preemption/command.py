#!/usr/bin/env python3
"""Preempt runs on real ranks at random moments, and compare them with runs that were never interrupted.

    tests/jobs/run preemption [PREEMPTIONS] [SEED]      50 of each kind unless said otherwise

    trainer     axonmpi train on 2 ranks; signals to one rank, to all, to mpirun; one in five is killed instead
    own loop    a loop with a sampler, on 1, 2 and 4 ranks in turn; signals only
    layouts     axonmpi train, stopped once, goes on with other ranks and another layout

It starts the mpirun that belongs to this Python. 0 is the exit code if nothing was lost, repeated or changed.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from jobs.preemption.own_loop import EPOCHS, SAMPLES

import axonmpi as ax
from axonmpi.launch.variables import without_launcher_variables
from axonmpi.testing.mpirun import find_mpirun, mpirun_command
from axonmpi.utils.waiting import Backoff, wait_until

PATIENCE = 120.0
TINY = [
    *("--layers=2", "--width=32", "--heads=4", "--sequence-length=16", "--global-batch=8", "--data-limit=0.05"),
    *("--held-out-sequences=8", "--evaluate-every=100", "--sample-length=20", "--progress=off", "--no-plot"),
]
TRAIN = ["-m", "axonmpi", "train", *TINY]
TIMES = ("seconds", "tokens_per_second", "communication")
LAYOUTS = [
    ("2 ranks", 2, [], "4 ranks, tp x pp", 4, ["--tp=2", "--pp=2"]),
    ("4 ranks, tp + fsdp", 4, ["--tp=2", "--fsdp=full"], "2 ranks, pp", 2, ["--pp=2"]),
    ("2 ranks, pp", 2, ["--pp=2"], "4 ranks, fsdp", 4, ["--fsdp=full"]),
    ("4 ranks, pp + fsdp", 4, ["--pp=2", "--fsdp=full"], "1 rank", 1, []),
]


class Job:
    """A job under mpirun."""

    def __init__(self, ranks: int, arguments: list[str]) -> None:
        command, variables = mpirun_command(find_mpirun(), ranks)
        self._mark = f"AXONMPI_PREEMPTED={os.getpid()}-{time.monotonic_ns()}"
        name, _, value = self._mark.partition("=")
        self._ranks = ranks
        self._process = subprocess.Popen(
            [*command, sys.executable, *arguments],
            env={**without_launcher_variables(), **variables, "OMP_NUM_THREADS": "1", name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def rank_processes(self) -> list[int]:
        """The processes of the ranks: those that run Python."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = self._mark.encode() in (folder / "environ").read_bytes().split(b"\0")
                if marked and (folder / "cmdline").read_bytes().startswith(sys.executable.encode()):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def send(self, number: int, processes: list[int]) -> None:
        for process in processes:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    def send_to_mpirun(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait; return the exit code and what was printed."""
        try:
            printed, _ = self._process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            printed, _ = self._process.communicate()
            raise SystemExit(f"a job did not end in {PATIENCE:g} s:\n{printed}") from None
        return self._process.returncode, printed


def lines_in(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_for_lines(job: Job, file: Path, count: int) -> None:
    """Wait until a file of a job has so many lines, or the job has ended."""
    wait_until(lambda: not job.is_running or lines_in(file) >= count, Backoff(), PATIENCE)


def preempt(job: Job, file: Path, draw: random.Random, *, kills: bool) -> str:
    """Wait for some more lines of a job's file, then end it in one of several ways; return which."""
    before = lines_in(file)
    # a run that goes on may cut back some lines first
    wait_until(lambda: not job.is_running or lines_in(file) != before, Backoff(), PATIENCE)
    more = lines_in(file) + draw.randint(1, 12)
    wait_for_lines(job, file, more)
    processes = job.rank_processes()
    if not processes:
        return "none: it has come to its end"
    number = draw.choice([signal.SIGUSR1, signal.SIGTERM])
    way = draw.choice(["one", "one", "all", "mpirun", "kill" if kills else "all"])
    if way == "one":
        job.send(number, [draw.choice(processes)])
    elif way == "all":
        job.send(number, processes)
    elif way == "mpirun":
        number = signal.SIGUSR1  # which launchers hand on; at SIGTERM they end the job themselves
        job.send_to_mpirun(number)
    else:
        number = signal.SIGKILL
        job.send(number, processes)
    return f"{number.name} to {way if way != 'kill' else 'all'}"


def finish(
    ranks_of: list[int], arguments: list[str], file: Path, preemptions: int, draw, *, kills: bool
) -> Counter:
    """Begin a job again and again until it is complete; return how often it was ended in which way."""
    ways: Counter = Counter()
    while True:
        job = Job(ranks_of[sum(ways.values()) % len(ranks_of)], arguments)
        way = preempt(job, file, draw, kills=kills) if sum(ways.values()) < preemptions else "none"
        code, printed = job.end()
        if code == 0:
            return ways
        expected = code == ax.REQUEUE_EXIT_CODE or (way.startswith("SIGKILL") and code != 0)
        if way.startswith("none") or not expected:
            raise SystemExit(f"exit code {code} after {way}:\n{printed}")
        ways[way] += 1


def measured(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in found]


def final(folder: Path) -> list[bytes]:
    path = folder / "checkpoints" / "latest"
    files = [path / name for name in ("model.safetensors", "optimizer.safetensors")]
    return [file.read_bytes() for file in [*files, folder / "sample.txt"]]


def said(ways: Counter) -> str:
    return (
        f"{sum(ways.values())} preemptions ({', '.join(f'{count} {way}' for way, count in sorted(ways.items()))})"
    )


def check_trainer(root: Path, preemptions: int, draw: random.Random) -> bool:
    settings = [*TRAIN, "--fsdp=full", f"--steps={20 * preemptions}", "--checkpoint-every=7"]
    code, printed = Job(2, [*settings, f"--out={root}/whole"]).end()
    assert code == 0, printed
    parted = [*settings, "--resume=auto", f"--out={root}/parted"]
    begun = time.monotonic()
    ways = finish([2], parted, root / "parted/metrics.jsonl", preemptions, draw, kills=True)
    same = measured(root / "parted") == measured(root / "whole") and final(root / "parted") == final(root / "whole")
    left = sorted(path.name for path in (root / "parted/checkpoints").iterdir())
    tidy = len(left) == 4 and not any("." in name for name in left)
    print(f"trainer: {said(ways)} in {time.monotonic() - begun:.0f} s")
    print(
        f"  {len(measured(root / 'whole'))} lines of metrics, weights, optimizer: {'equal' if same else 'DIFFER'}"
    )
    print(f"  in its folder: {' '.join(left)}", flush=True)
    return same and tidy


def check_own_loop(root: Path, preemptions: int, draw: random.Random) -> bool:
    program = str(Path(__file__).with_name("own_loop.py"))
    for name in ("whole", "parted"):
        (root / name).mkdir(parents=True)
    code, printed = Job(1, [program, f"{root}/whole"]).end()
    assert code == 0, printed
    ways = finish(
        [1, 2, 4], [program, f"{root}/parted"], root / "parted/steps.jsonl", preemptions, draw, kills=False
    )
    whole, parted = (
        [json.loads(line) for line in (root / name / "steps.jsonl").read_text().splitlines()]
        for name in ("whole", "parted")
    )
    seen = Counter((epoch, sample) for epoch, _, samples, _ in parted for sample in samples)
    once = seen == Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES))
    steps = [step for _, step, *_ in parted] == [step for _, step, *_ in whole]
    apart = max(abs(one[-1] - other[-1]) for one, other in zip(whole, parted, strict=True)) if steps else None
    print(f"own loop on 1, 2, 4 ranks in turn: {said(ways)}")
    print(
        f"  {len(seen)} samples {'once each' if once else 'LOST OR REPEATED'}, losses at most {apart} apart",
        flush=True,
    )
    return once and apart is not None and apart < 1e-4  # other ranks round otherwise


def check_layouts(root: Path) -> bool:
    code, printed = Job(1, [*TRAIN, "--steps=60", f"--out={root}/whole"]).end()
    assert code == 0, printed
    good = True
    for number, (first, ranks, layout, then, other_ranks, other) in enumerate(LAYOUTS):
        folder = root / f"run-{number}"
        settings = [*TRAIN, "--steps=60", "--resume=auto", f"--out={folder}"]
        job = Job(ranks, [*settings, *layout])
        wait_for_lines(job, folder / "metrics.jsonl", 11)
        job.send(signal.SIGUSR1, job.rank_processes()[:1])
        code, printed = job.end()
        assert code == ax.REQUEUE_EXIT_CODE, printed
        at = int((folder / "checkpoints/latest").readlink().name.partition("-")[2])
        code, printed = Job(other_ranks, [*settings, *other]).end()
        assert code == 0, printed
        whole, parted = (
            {line["step"]: line["loss"] for line in measured(each) if "loss" in line}
            for each in (root / "whole", folder)
        )
        apart = max(abs(whole[step] - parted[step]) for step in range(at + 1, min(at + 20, 60) + 1))
        good &= apart < 1e-5
        print(f"{first} to step {at}, then {then}: losses of 20 steps at most {apart:.2g} apart", flush=True)
    return good


def main(preemptions: int, seed: int) -> int:
    draw = random.Random(seed)
    print(f"seed {seed}, {find_mpirun()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="axonmpi-preemption-") as folder:
        root = Path(folder)
        good = [
            check_layouts(root / "layouts"),
            check_own_loop(root / "own", preemptions, draw),
            check_trainer(root / "trainer", preemptions, draw),
        ]
    return int(not all(good))


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    sys.exit(main(*numbers, *(50, random.randrange(10**6))[len(numbers) :]))
