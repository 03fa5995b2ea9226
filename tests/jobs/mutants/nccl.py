"""Mutants of the order of streams: each leaves out one wait, and a test over the double of NCCL has to notice.

    python tests/jobs/mutants/nccl.py              all of them, about two minutes
    python tests/jobs/mutants/nccl.py 1 4          the first and the fourth

The change is made in a copy of the library.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[3]


class Mutant(NamedTuple):
    """A change of one place.

    Attributes:
        what: The rule that is broken.
        file: Path below `axonmpi`.
        old: The text there, found once.
        new: The text that replaces it.
    """

    what: str
    file: str
    old: str
    new: str = ""


STREAMS, WORK, MESSAGES = "backends/nccl/streams.py", "backends/nccl/work.py", "backends/nccl/messages.py"
COLLECTIVES, OFFLOAD = "backends/nccl/collectives.py", "fsdp/offload.py"
MUTANTS = (
    Mutant(
        "the group's stream does not wait for the caller's",
        STREAMS,
        "        device.wait(channel.stream, device.record(device.current_stream()))\n",
    ),
    Mutant("Work.wait() does not wait", WORK, "        self._device.wait(stream, self._done)\n"),
    Mutant(
        "the end of an operation is recorded before it",
        STREAMS,
        "        try:\n            value = move(*args)\n",
        "        early = device.record(channel.stream)\n        try:\n            value = move(*args)\n"
        "            check = partial(self._check_waiting, channel=channel)\n"
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
        "            self._device.wait(main.stream, message.ready)\n",
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
        STREAMS,
        "            self._device.wait(stream, self._latest)\n",
    ),
    Mutant(
        "parameters are copied to the GPU before what was told has let go of their memory",
        OFFLOAD,
        "        device.wait(self._up, device.record(device.current_stream()))\n",
    ),
    Mutant(
        "gradients are copied from the GPU before they are computed",
        OFFLOAD,
        "        device.wait(self._down, device.record(device.current_stream()))\n",
    ),
    Mutant(
        "parameters are used before they are copied to the GPU",
        OFFLOAD,
        "        self._device.wait(self._device.current_stream(), self._event)\n",
    ),
    Mutant(
        "gradients are not kept while they are copied",
        OFFLOAD,
        "        device.keep(source, self._down)\n",
    ),
)


def failing(mutant: Mutant) -> list[str]:
    """Return the tests that fail with a mutant."""
    tests = "fsdp/test_devices.py" if mutant.file == OFFLOAD else "backends/nccl/test_stream_order.py"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "axonmpi")
        shutil.copytree(REPOSITORY / "axonmpi", library, ignore=shutil.ignore_patterns("__pycache__"))
        text = (library / mutant.file).read_text()
        (library / mutant.file).write_text(text.replace(mutant.old, mutant.new))
        options = ["-q", "-n0", "--tb=no", "-pno:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, REPOSITORY / "tests" / tests]
        environment = {**os.environ, "PYTHONPATH": folder}
        # The current folder is the first place where Python looks for modules.
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    return [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("FAILED ")]


def main() -> None:
    for file in (WORK, OFFLOAD):
        assert not failing(Mutant("nothing is broken", file, old="")), "the tests fail without a mutant"
    missed = []
    for number, mutant in enumerate(MUTANTS, 1):
        if str(number) in sys.argv[1:] or not sys.argv[1:]:
            found = failing(mutant)
            print(f"{number:2}. {mutant.what}: {', '.join(found) or 'NOT NOTICED'}", flush=True)
            missed += [] if found else [number]
    sys.exit(f"not noticed: {missed}" if missed else 0)


if __name__ == "__main__":
    main()
