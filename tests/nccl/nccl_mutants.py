"""Breaks the order of streams in the library, a place at a time; a test over the double has to fail each time.

    python tests/nccl/nccl_mutants.py              all of them, about a minute
    python tests/nccl/nccl_mutants.py 1 4          some

A copy of the library is changed, never the library itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MUTANTS", "Mutant", "found_by"]

REPOSITORY = Path(__file__).resolve().parents[2]
SELECTION = ("tests/nccl/test_stream_order.py",)


@dataclass(frozen=True)
class Mutant:
    """A change of one place.

    Attributes:
        what: What is missing then.
        file: Where, below `axonmpi`.
        old: The text there, once.
        new: What it becomes.
    """

    what: str
    file: str
    old: str
    new: str = ""


BACKEND, WORK = "backends/nccl/backend.py", "backends/nccl/work.py"
MUTANTS = (
    Mutant(
        "the group's stream does not wait for the caller's",
        BACKEND,
        "        device.wait(channel.stream, device.record(device.current_stream()))\n",
    ),
    Mutant("Work.wait() does not wait", WORK, "        self._device.wait(stream, self._done)\n"),
    Mutant(
        "the end of an operation is recorded before it",
        BACKEND,
        "        value = move(*args)\n",
        "        early = device.record(channel.stream)\n        value = move(*args)\n"
        "        return NcclWork(operation, device, early, value, partial(self._check_healthy, channel=channel))\n",
    ),
    Mutant(
        "a result is not kept for the stream that waits for it",
        WORK,
        "                self._device.keep(tensor, stream)\n",
        "                pass\n",
    ),
    Mutant("a result is not kept for the group's stream", BACKEND, "        self._keep(made)\n"),
    Mutant(
        "what is only read is not kept",
        BACKEND,
        "        self._keep(tensor)\n        with self._on_stream():\n            return bytes_or_native",
        "        with self._on_stream():\n            return bytes_or_native",
    ),
    Mutant(
        "what is written to is not kept",
        BACKEND,
        "        self._keep(tensor)\n        if writes:\n",
        "        if writes:\n",
    ),
    Mutant(
        "what is reduced and scattered is not kept",
        BACKEND,
        "        self._keep(output, *parts.tensors)\n",
    ),
    Mutant(
        "what all gather into is not kept",
        BACKEND,
        "        self._keep(output, *([] if tensor is None else [tensor]))\n",
    ),
    Mutant("a message is not kept", BACKEND, "                    device.keep(tensor, channel.stream)\n"),
    Mutant(
        "posted messages do not wait for the streams that they were posted from",
        BACKEND,
        "            self._device.wait(self._main.stream, message.ready)\n",
        "            pass\n",
    ),
    Mutant(
        "what is converted is written back on the caller's stream",
        BACKEND,
        "            yield values\n            if writes:\n",
        "            yield values\n        if True:\n            if writes:\n",
    ),
    Mutant(
        "a communicator is split while operations are under way",
        BACKEND,
        "        self._device.block(self._device.record(self._main.stream))",
        "       ",
    ),
)


def found_by(mutant: Mutant) -> list[str]:
    """Return the tests that fail with a mutant."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "axonmpi"
        shutil.copytree(REPOSITORY / "axonmpi", library, ignore=shutil.ignore_patterns("__pycache__"))
        changed = library / mutant.file
        text = changed.read_text()
        if text.count(mutant.old) != 1:
            raise ValueError(f"{mutant.file}: expected once, found {text.count(mutant.old)} times:\n{mutant.old}")
        changed.write_text(text.replace(mutant.old, mutant.new))
        tests = [str(REPOSITORY / each) for each in SELECTION]
        options = ["-q", "-n0", "--tb=no", "-p", "no:cacheprovider", "-c", str(REPOSITORY / "setup.cfg")]
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            env={**os.environ, "PYTHONPATH": folder},
            cwd=folder,  # comes before all other places that Python looks for modules in
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    if ended.returncode not in (0, 1):
        raise RuntimeError(ended.stdout + ended.stderr)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("FAILED ")]
    return [line.split()[1].rpartition("::")[2] for line in lines]


def main(chosen: list[str]) -> int:
    """Run the mutants with these numbers, from 1, or all; return how many nothing has found."""
    missed = 0
    for number, mutant in enumerate(MUTANTS, 1):
        if not chosen or str(number) in chosen:
            tests = found_by(mutant)
            missed += not tests
            print(f"{number:2}. {mutant.what}: {', '.join(tests) or 'FOUND BY NOTHING'}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
