#!/usr/bin/env python3
"""Saving against odds: jobs that are killed at any instant, and disks that are full at any point.

    tests/jobs/run kills kills [NUMBER] [RANKS]     100 jobs of 2 ranks unless said otherwise
    tests/jobs/run kills full [NUMBER] [RANKS]      60 points on 2 ranks; as root, on a tmpfs

After each, the newest checkpoint is whole, by the safetensors package and zlib, and nothing else is left once the
next job has started. 0 is the exit code if that holds.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from jobs.kills.whole import check_whole

from axonmpi.testing.mpirun import find_mpirun, mpirun_command

HERE = Path(__file__).parent
LONGEST_SECONDS = 0.6
"""Of a life: about five saves."""


def start(job: str, ranks: int, *arguments: object) -> subprocess.Popen[str]:
    command, variables = mpirun_command(find_mpirun(), ranks)
    return subprocess.Popen(
        [*command, sys.executable, str(HERE / job), *map(str, arguments)],
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kills(number: int, ranks: int) -> int:
    """Kill all ranks of a job at a random instant of saving, again and again."""
    chance = random.Random(0)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        for count in range(number):
            job = start("killed_job.py", ranks, root)
            assert job.stdout is not None
            pids: list[int] = []
            said: list[str] = []
            while len(pids) < ranks:
                line = job.stdout.readline()
                said.append(line)
                if not line or line.startswith("wrong"):
                    print("".join(said), f"job {count} ended by itself, or found something wrong")
                    job.terminate()
                    job.communicate()
                    return 1
                if line.startswith("saving "):
                    pids.append(int(line.split()[1]))
            time.sleep(chance.uniform(0, LONGEST_SECONDS))  # the instant
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            job.communicate()
            there = list(root.iterdir()) if root.exists() else []
            left = sorted(path.name.rpartition(".")[2] for path in there if "." in path.name)
            found["while writing" if "partial" in left else "between"] += 1
            newest = (root / "latest").resolve() if (root / "latest").exists() else None
            if newest is not None:
                check_whole(newest)
            print(f"{count + 1}: newest {newest.name if newest else None}, left over {left}", flush=True)
    print(f"{number} kills of {ranks} ranks: {dict(found)}; the newest checkpoint was whole after each")
    return 0


def full(number: int, ranks: int) -> int:
    """Let one job save on a small disk that is full at random points."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
        try:
            job = start("full_disk_job.py", ranks, folder, number)
            output, _ = job.communicate(timeout=600)
            print(output, end="")
            return job.returncode
        finally:
            subprocess.run(["umount", folder], check=True)


if __name__ == "__main__":
    kinds = {"kills": (kills, 100), "full": (full, 60)}
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        sys.exit(__doc__)
    call, usual = kinds[sys.argv[1]]
    numbers = [int(text) for text in sys.argv[2:]]
    sys.exit(call(*numbers, *(usual, 2)[len(numbers) :]))
