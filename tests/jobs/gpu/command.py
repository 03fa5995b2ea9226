#!/usr/bin/env python3
r"""All that can be checked on this machine's GPU, by one command, in less than ten minutes and without network.

    tests/jobs/run gpu [--out FILE.json] [--seconds 540]

It needs a Python with torch (2.11 or newer), numpy and isal; axonmpi need not be installed. What else is there
decides what is checked, and what is not there is named with the checks that are skipped for it:

    nccl4py          NCCL at one rank; without it the checks run on the GPU without communication
    NCCL 2.30        two and four ranks on one GPU (NCCL_MULTI_RANK_GPU_ENABLE=1)
    mpi4py, mpirun   ranks by MPI; without it two and four ranks check what needs no CPUs
    tyro             `axonmpi train --device cuda`; the trainer itself needs none

Where wheels are missing and there is no network, bring them in a folder (say isal, nccl4py, cuda-core,
cuda-bindings, cuda-pathfinder, mpi4py and mpich, each in one version for this Python), and run the command with
these. A wheel of nvidia-nccl-cu13 among them has to be preloaded, or torch loads its own libnccl first:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 -d FOLDER isal nccl4py cuda-core mpich
    python3 -m venv --system-site-packages env && env/bin/pip install --no-index --no-deps FOLDER/*.whl
    LD_PRELOAD=$(find env -name libnccl.so.2) env/bin/python tests/jobs/run gpu

The file that is written (by default gpu-run.json in the current folder) has the machine, each check with its
outcome, reason and seconds, and figures: what the CPU spends on an all-reduce, the trainer's speed, and
`axonmpi bench collectives --device cuda`. The exit code is 0 unless a check has failed: also where there is no GPU,
when all is skipped. `--device cpu` makes the checks of one and two ranks on the CPU, to try them.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parents[2]
PART = [sys.executable, "-m", "jobs.gpu.on_gpu.part"]
SHARING_SINCE = (2, 30)
"""The first NCCL in which several ranks may use one GPU."""
NO_CPUS_NEEDED = ("conformance", "ordering")
TIME_IS_UP = "the time was up"
LEAST_SECONDS = 5.0
"""Less is not worth a start."""
SHOWN = 2000
"""Characters of a program's last output that a reason quotes."""

Machine = dict[str, Any]


class Part(NamedTuple):
    """Checks that are made by the same processes.

    Attributes:
        name: What stands before the checks' names.
        way: How the ranks are connected, see `on_gpu/part.py`.
        seconds: How long it may take.
        only: Beginnings of the names of the checks.
        ranks: Number of ranks.
        reason: Why it cannot be done here; empty if it can.
    """

    name: str
    way: str
    seconds: float
    only: Sequence[str] = ("",)
    ranks: int = 1
    reason: str = ""


@dataclass
class Report:
    """What is written into the file."""

    machine: Machine = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, outcome: str, reason: str = "", seconds: float = 0.0) -> None:
        self.checks.append({"name": name, "outcome": outcome, "reason": reason, "seconds": seconds})
        shown = f": {reason.splitlines()[0]}" if reason else ""
        print(f"{outcome:8} {seconds:6.1f} s  {name}{shown}", flush=True)


# ---- what there is to do ----------------------------------------------------------------------------------------


def parts_for(machine: Machine, device: str) -> list[Part]:
    """Return what is to be done, with the reason where it cannot be."""
    if device == "cpu":
        no_mpi = "" if machine.get("mpirun") else first_line(machine.get("mpirun_missing", ""))
        return [Part("1 rank", "cpu", 240), Part("2 ranks", "mpi", 240, ranks=2, reason=no_mpi)]
    no_gpu = "" if machine["gpus"] else f"no GPU: {machine.get('gpus_missing', 'torch sees none')}"
    no_nccl = no_gpu or first_line(machine.get("nccl_missing", ""))
    sharing = no_nccl or cannot_share(machine)
    parts = [
        Part("1 rank", "nccl", 120, NO_CPUS_NEEDED, reason=no_nccl),
        Part("1 rank, cost", "nccl+host", 60, ("cost",), reason=no_nccl),
        Part("1 rank, with its CPU", "nccl+host", 180, (*NO_CPUS_NEEDED, *ABOVE), reason=no_nccl),
    ]
    if no_nccl and not no_gpu:
        parts.append(Part("1 rank, without NCCL", "no nccl", 180, ABOVE))
    for ranks in (2, 4):
        if machine.get("mpirun"):
            parts.append(Part(f"{ranks} ranks on a GPU", "mpi+nccl", 150, ranks=ranks, reason=sharing))
        else:
            why = sharing or f"needs MPI: {first_line(machine.get('mpirun_missing', ''))}"
            parts.append(Part(f"{ranks} ranks on a GPU", "nccl", 90, NO_CPUS_NEEDED, ranks, sharing))
            parts.append(Part(f"{ranks} ranks on a GPU, by MPI", "mpi+nccl", 150, ABOVE, ranks, why))
    return parts


ABOVE = ("data parallel", "fully sharded", "gradient norm", "pipeline", "trainer")


def cannot_share(machine: Machine) -> str:
    """Return why several ranks cannot use one GPU; empty if they can."""
    version, needed = (".".join(map(str, numbers)) for numbers in (machine["nccl"], SHARING_SINCE))
    if tuple(machine["nccl"]) >= SHARING_SINCE:
        return ""
    return f"several ranks on one GPU need NCCL {needed} or newer, not {version}"


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


# ---- running ----------------------------------------------------------------------------------------------------


class Runner:
    """Runs commands until the time is up.

    Args:
        seconds: The time for all of them.
        folder: Their current folder, for what they write.
    """

    def __init__(self, seconds: float, folder: Path) -> None:
        self._end = time.monotonic() + seconds
        self.folder = folder

    def run(self, command: Sequence[str], seconds: float, **variables: str) -> tuple[str, str]:
        """Run a command; return why it failed, empty if not, and what it printed."""
        limit = min(seconds, self._end - time.monotonic())
        if limit < LEAST_SECONDS:
            return TIME_IS_UP, ""
        search = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        found = {"PYTHONPATH": os.pathsep.join(search), "PYTHONUNBUFFERED": "1"}
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(
                command,
                env={**os.environ, **found, **variables},
                cwd=self.folder,
                start_new_session=True,
                **streams,
            )
            try:
                problem = f"exit code {process.wait(limit)}"
            except subprocess.TimeoutExpired:
                problem = "took too long, and was ended"
            with contextlib.suppress(ProcessLookupError):  # there may be ranks left that it has started
                os.killpg(process.pid, 9)
            process.wait()
            output.seek(0)
            printed = output.read()
        if process.returncode == 0:
            return "", printed
        return f"{problem}: {last_line(printed)}\n{printed[-SHOWN:]}", printed


def describe(runner: Runner, report: Report) -> Machine:
    """Return what a process finds on this machine; put into the report why it cannot say."""
    problem, printed = runner.run([*PART, "--describe"], 120)
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not problem and lines:
        return json.loads(lines[-1])
    report.add("import axonmpi", "failed", problem or printed[-SHOWN:])
    return {"gpus": [], "gpus_missing": "axonmpi cannot be imported", "packages": {}}


# ---- parts ------------------------------------------------------------------------------------------------------


def run_part(part: Part, runner: Runner, machine: Machine, report: Report) -> None:
    """Make the checks of a part."""
    if part.reason:
        report.add(part.name, "skipped", part.reason)
        return
    out = runner.folder / f"{part.name.replace(' ', '-').replace(',', '')}.jsonl"
    command = [*PART, part.way, "--out", str(out), "--only", *part.only]
    variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if part.ranks > 1 else {}
    if part.way.startswith("mpi"):
        from axonmpi.testing.mpirun import mpirun_command

        launcher, more = mpirun_command(Path(machine["mpirun"]), part.ranks)
        command, variables = [*launcher, *command], variables | more
    else:
        command += ["--ranks", str(part.ranks)]
    problem, _ = runner.run(command, part.seconds, **variables)
    if problem == TIME_IS_UP:
        report.add(part.name, "skipped", problem)
    else:
        take_over(part, out, problem, report)


def take_over(part: Part, out: Path, problem: str, report: Report) -> None:
    """Put into the report what a part's processes have written, and what they were at when they ended."""
    entries = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for entry in entries:
        if "name" in entry:
            report.add(f"{part.name}: {entry['name']}", entry["outcome"], entry["reason"], entry["seconds"])
            report.figures.setdefault(part.name, {}).update(entry["figures"])
    last = entries[-1] if entries else {}
    if problem or "ended" not in last:
        name = f"{part.name}: {last.get('begun', 'start or end')}"
        report.add(name, "failed", problem or "the processes ended early")


def run_command(
    name: str, options: Sequence[str], written: str, reason: str, runner: Runner, report: Report
) -> None:
    """Run a command of axonmpi on the GPU, if there is no reason against it; put what it writes into the report."""
    if reason:
        report.add(name, "skipped", reason)
        return
    began = time.monotonic()
    command = [sys.executable, "-m", "axonmpi", *name.split(), "--device", "cuda", *options]
    problem, printed = runner.run(command, 120)
    outcome = "skipped" if problem == TIME_IS_UP else "failed" if problem else "passed"
    report.add(name, outcome, problem, round(time.monotonic() - began, 1))
    if not problem:
        print(printed)
        report.figures[name] = json.loads((runner.folder / written).read_text())


BENCH = ("--ranks", "1", "--blocks", "7", "--dtypes", "float32", "--json", "bench.json", "--operations")
OPERATIONS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
TRAIN = ("--dtype", "bfloat16", "--steps", "200", "--no-plot", "--progress", "plain", "--out", "trained")


def check_all(device: str, runner: Runner, report: Report) -> None:
    """Ask what this machine has, and make all checks that it allows."""
    machine = report.machine = describe(runner, report)
    print(json.dumps(machine, indent=2))
    for part in parts_for(machine, device):
        run_part(part, runner, machine, report)
    reason = first_line(machine.get("nccl_missing", "")) if machine["gpus"] else "no GPU"
    no_tyro = "" if machine["packages"].get("tyro") else "tyro is not installed"
    run_command("bench collectives", [*BENCH, *OPERATIONS], "bench.json", reason, runner, report)
    run_command("train", TRAIN, "trained/summary.json", reason or no_tyro, runner, report)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-run.json"), help="the file to write")
    parser.add_argument("--seconds", type=float, default=540.0, help="the time for all of it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the checks")
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")
    began = time.monotonic()
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        check_all(options.device, Runner(options.seconds, Path(name)), report)
    outcomes = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for check in report.checks:
        outcomes[check["outcome"]] += 1
    summary = {**outcomes, "seconds": round(time.monotonic() - began, 1)}
    everything = {"summary": summary, "machine": report.machine, "checks": report.checks, "figures": report.figures}
    options.out.write_text(json.dumps(everything, indent=2) + "\n")
    if not report.machine["gpus"]:
        print("\nThere is no GPU here: nothing of NCCL or CUDA was checked.")
    print(f"\n{', '.join(f'{number} {what}' for what, number in outcomes.items())}; written to {options.out}")
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent))
    sys.exit(main())
