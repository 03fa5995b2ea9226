#!/usr/bin/env python3
"""Saving against odds: jobs that are killed at any instant, or with --full-disk a disk that is full at any point.

After each, the newest checkpoint is whole, by the safetensors package and zlib, and nothing else is left once the
next job has started. The exit code is 0 if that holds. --full-disk needs root: it mounts a tmpfs.

With --pairs two jobs at a time save to one path, or to one folder of checkpoints. One of them is refused and names
the other; that one is killed at any instant, and then the first one saves.
"""

import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from helpers.limits import limit
from jobs.job import command_parser, parse_with_seed, send, start_ranks, wait_for
from jobs.kills.saving import check_whole

SAVING = Path(__file__).with_name("saving.py")
LONGEST_SECONDS = 0.6
"""Of a life: about five saves."""


def kills(number: int, ranks: int, seed: int) -> None:
    """Kill all ranks of a job at a random instant of saving, again and again."""
    chance = random.Random(seed)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        for count in range(number):
            kill_while_saving(root, ranks, chance)
            there = list(root.iterdir()) if root.exists() else []
            left = sorted(path.name.rpartition(".")[2] for path in there if "." in path.name)
            found["while writing" if "partial" in left else "between"] += 1
            newest = (root / "latest").resolve() if (root / "latest").exists() else None
            if newest is not None:
                check_whole(newest)
            print(f"{count + 1}: newest {newest.name if newest else None}, left over {left}", flush=True)
    print(f"{number} kills of {ranks} ranks: {dict(found)}; the newest checkpoint was whole after each")


def kill_while_saving(root: Path, ranks: int, chance: random.Random) -> None:
    with start_ranks(ranks, SAVING, root) as job:

        def all_save() -> bool:
            return job.output.count("saving ") == ranks

        wait_for(lambda: all_save() or not job.is_running, limit(60))
        assert all_save(), job.output
        time.sleep(chance.uniform(0, LONGEST_SECONDS))  # the instant
        send(signal.SIGKILL, job.ranks())
        job.wait(limit(20))


def pairs(number: int, ranks: int, seed: int) -> None:
    """Start two jobs that save to one place, and kill the one that does, again and again."""
    chance = random.Random(seed)
    refusals = 0
    for count in range(number):
        kind = chance.choice(["path", "folder"])
        with tempfile.TemporaryDirectory() as folder:
            refusals += kill_one_of_two(Path(folder) / "run", kind, ranks, chance)
            print(f"{count + 1}: {kind}: whole after both kills; {refusals} refusals so far", flush=True)
    print(f"{number} pairs of {ranks} ranks: the checkpoint was whole after each kill, and the other job went on;")
    print(f"each of {refusals} refusals named the other job's host, process and program")


def kill_one_of_two(root: Path, kind: str, ranks: int, chance: random.Random) -> int:
    """Return how many refusals there were."""
    with start_ranks(ranks, SAVING, root, kind) as one, start_ranks(ranks, SAVING, root, kind) as other:

        def both_met() -> bool:
            outputs = one.output + other.output
            return "refused: " in outputs and "saved" in outputs

        wait_for(lambda: both_met() or not (one.is_running and other.is_running), limit(60))
        assert both_met(), one.output + other.output
        processes = [*one.ranks(), *other.ranks()]
        time.sleep(chance.uniform(0, LONGEST_SECONDS))  # the instant
        first, second = (one, other) if one.output.rstrip().endswith("saved") else (other, one)
        send(signal.SIGKILL, first.ranks())
        first.wait(limit(20))
        saved = second.output.count("saved")
        wait_for(lambda: second.output.count("saved") > saved + 2 or not second.is_running, limit(60))
        assert second.output.count("saved") > saved + 2, f"a job that was killed keeps the lock\n{second.output}"
        send(signal.SIGKILL, second.ranks())
        second.wait(limit(20))
        refusals = re.findall("refused: .*", one.output + other.output)
        named = re.compile(
            rf"process ({'|'.join(map(str, processes))}) on {re.escape(socket.gethostname())}.*saving.py"
        )
        strange = [text for text in refusals if not named.search(text)]
        assert not strange, strange
        check_whole(newest_in(root, kind))
    return len(refusals)


def newest_in(root: Path, kind: str) -> Path:
    if kind == "folder":
        return (root / "latest").resolve()
    return root / "it" if (root / "it").exists() else root / "it.previous"


def full_disk(number: int, ranks: int, seed: int) -> None:
    """Let one job save on a small disk that is full at random points."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
        try:
            with start_ranks(ranks, SAVING, folder, number, seed) as job:
                code = job.wait(limit(600))
                print(job.output, end="")
        finally:
            subprocess.run(["umount", folder], check=True)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    of_both = {
        "--number": {"type": int, "help": "of kills (default: 100), or of saves on a full disk (60)"},
        "--ranks": {"type": int, "default": 2, "help": "default: 2"},
        "--pairs": {"type": int, "metavar": "N", "help": "so many pairs of jobs that save to one place"},
        "--full-disk": {"action": "store_true", "help": "a full disk in place of kills"},
    }
    options = parse_with_seed(command_parser(__doc__, of_both))
    call, usual = (full_disk, 60) if options.full_disk else (kills, 100)
    if options.pairs:
        call, usual = pairs, options.pairs
    call(options.number or usual, options.ranks, options.seed)
