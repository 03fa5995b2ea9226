"""Breaks the order of streams in the library, a place at a time; a test over the double has to fail each time.

    python tests/helpers/nccl_mutants.py              all of them, about two minutes
    python tests/helpers/nccl_mutants.py 1 4          some

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

from helpers import REPOSITORY

__all__ = ["MUTANTS", "Mutant", "found_by"]


@dataclass(frozen=True)
class Mutant:
    """A change of one place.

    Attributes:
        what: What is missing then.
        file: Where, below `axonmpi`.
        old: The text there, once.
        new: What it becomes.
        tests: Which are run.
    """

    what: str
    file: str
    old: str
    new: str = ""
    tests: tuple[str, ...] = ("tests/backends/nccl/test_stream_order.py",)


BACKEND, WORK, MESSAGES = "backends/nccl/backend.py", "backends/nccl/work.py", "backends/nccl/messages.py"
COLLECTIVES, OFFLOAD = "backends/nccl/collectives.py", "fsdp/offload.py"
OFFLOADING = ("tests/fsdp/test_devices.py",)
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
        "        try:\n            value = move(*args)\n",
        "        early = device.record(channel.stream)\n        try:\n            value = move(*args)\n"
        "            check = partial(self._check_healthy, channel=channel)\n"
        "            return NcclWork(operation, device, early, value, check)\n",
    ),
    Mutant(
        "a result is not kept for the stream that waits for it",
        WORK,
        "                self._device.keep(tensor, stream)\n",
        "                pass\n",
    ),
    Mutant("a result is not kept for the group's stream", COLLECTIVES, "        self.keep(made)\n"),
    Mutant(
        "what is exchanged is not kept",
        COLLECTIVES,
        "        self.keep(*(tensor for tensor in sends if tensor is not None))\n",
    ),
    Mutant(
        "what is written to is not kept",
        COLLECTIVES,
        "        self.keep(tensor)\n        if writes:\n",
        "        if writes:\n",
    ),
    Mutant("what is reduced and scattered is not kept", COLLECTIVES, "        self.keep(output, *parts.tensors)\n"),
    Mutant(
        "what all gather into is not kept",
        COLLECTIVES,
        "        self.keep(output, *([] if tensor is None else [tensor]))\n",
    ),
    Mutant("a message is not kept", MESSAGES, "        self._device.keep(tensor, channel.stream)\n"),
    Mutant(
        "posted messages do not wait for the streams that they were posted from",
        MESSAGES,
        "            self._device.wait(self._main.stream, message.ready)\n",
        "            pass\n",
    ),
    Mutant(
        "what is converted is written back on the caller's stream",
        COLLECTIVES,
        "            yield values\n            if writes:\n",
        "            yield values\n        if True:\n            if writes:\n",
    ),
    Mutant(
        "a blocking operation does not wait for asynchronous ones before it",
        BACKEND,
        "            self._device.wait(stream, self._latest)\n",
    ),
    Mutant(
        "parameters are copied to the GPU before what was told has let go of their memory",
        OFFLOAD,
        "        device.wait(self._up, device.record(device.current_stream()))\n",
        tests=OFFLOADING,
    ),
    Mutant(
        "gradients are copied from the GPU before they are computed",
        OFFLOAD,
        "        device.wait(self._down, device.record(device.current_stream()))\n",
        tests=OFFLOADING,
    ),
    Mutant(
        "parameters are used before they are copied to the GPU",
        OFFLOAD,
        "        self._device.wait(self._device.current_stream(), self._event)\n",
        tests=OFFLOADING,
    ),
    Mutant(
        "gradients are not kept while they are copied",
        OFFLOAD,
        "        device.keep(source, self._down)\n",
        tests=OFFLOADING,
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
        tests = [str(REPOSITORY / each) for each in mutant.tests]
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
    tests = tuple(sorted({each for mutant in MUTANTS for each in mutant.tests}))
    if failing := found_by(Mutant("nothing", WORK, "class NcclWork(", "class NcclWork(", tests)):
        raise SystemExit(f"tests fail without a mutant: {', '.join(failing)}")
    missed = 0
    for number, mutant in enumerate(MUTANTS, 1):
        if not chosen or str(number) in chosen:
            tests = found_by(mutant)
            missed += not tests
            print(f"{number:2}. {mutant.what}: {', '.join(tests) or 'FOUND BY NOTHING'}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
