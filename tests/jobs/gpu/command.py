#!/usr/bin/env python3
r"""All that can be checked on this machine's GPU, by one command, in less than ten minutes and without network.

    tests/jobs/run gpu [--out FILE.json] [--seconds 540]

It runs on the Python that runs it, if that has torch (2.11 or newer) and numpy; axonmpi need not be installed. What
else is there decides what is checked, and what is not there is named with the checks that are skipped for it:

    nccl4py          NCCL at one rank; without it the checks run on the GPU without communication
    NCCL 2.30        two and four ranks on one GPU (NCCL_MULTI_RANK_GPU_ENABLE=1)
    mpi4py, mpirun   ranks by MPI; without it two and four ranks meet over a file, for what needs no CPUs
    tyro             `axonmpi train --device cuda`; the trainer itself needs none
    pytest           the same checks as tests, `pytest -m gpu tests/gpu`, where time is left

Where wheels are missing and there is no network, put them into a folder and name it: AXONMPI_WHEELS=FOLDER. They
are unpacked into a temporary folder for this run, without their needs, so all that is missing has to be there, say
nccl4py, cuda-core, cuda-bindings, cuda-pathfinder, mpi4py and mpich, each in one version that is for this Python. A
wheel of nvidia-nccl-cu13 there is used in place of torch's own libnccl:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 -d FOLDER nccl4py cuda-core mpich

The file that is written (by default gpu-run.json in the current folder) has the machine, each check with its
outcome, reason and seconds, and figures: what the CPU spends on an all-reduce, the trainer's speed, and
`axonmpi bench collectives --device cuda`. The exit code is 0 unless a check has failed: also where there is no GPU,
when all is skipped. `--device cpu` makes the checks of one and two ranks on the CPU, to try them.
"""

from __future__ import annotations

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
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
SHARING_SINCE = (2, 30)
"""The first NCCL in which several ranks may use one GPU."""
NO_CPUS_NEEDED = ("conformance", "ordering")
TIME_IS_UP = "the time was up"
LEAST_SECONDS = 5.0
"""Less is not worth a start."""
SHOWN = 2000
"""Characters of a program's last output that a reason quotes."""

Machine = dict[str, Any]


@dataclass(frozen=True)
class Part:
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

    def count(self, outcome: str) -> int:
        return sum(check["outcome"] == outcome for check in self.checks)


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
            parts.append(Part(f"{ranks} ranks on a GPU", "file", 90, NO_CPUS_NEEDED, ranks, sharing))
            parts.append(Part(f"{ranks} ranks on a GPU, by MPI", "mpi+nccl", 150, ABOVE, ranks, why))
    return parts


ABOVE = ("data parallel", "fully sharded", "gradient norm", "tensor parallel", "pipeline", "trainer")


def cannot_share(machine: Machine) -> str:
    """Say why several ranks cannot use one GPU; empty if they can."""
    version = tuple(int(number) for number in machine["nccl"].split(".")[:2])
    if version >= SHARING_SINCE:
        return ""
    return f"several ranks on one GPU need NCCL {'.'.join(map(str, SHARING_SINCE))} or newer, not {machine['nccl']}"


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


# ---- running ----------------------------------------------------------------------------------------------------


class Runner:
    """Starts processes until the time is up.

    Args:
        seconds: The time for all of them.
        folder: For what they write.
        site: Folder of unpacked wheels, if any.
    """

    def __init__(self, seconds: float, folder: Path, site: Path | None) -> None:
        self._end = time.monotonic() + seconds
        self.folder = folder
        self.environment = environment_with(site)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def run(self, commands: Sequence[Sequence[str]], seconds: float, **variables: str) -> tuple[str, str]:
        """Run processes side by side; return why they failed, empty if not, and what they printed."""
        limit = min(seconds, self.left)
        if limit < LEAST_SECONDS:
            return TIME_IS_UP, ""
        files = [self.folder / f"output-{time.monotonic_ns()}-{number}" for number in range(len(commands))]
        end = time.monotonic() + limit
        processes = []
        for command, file in zip(commands, files, strict=True):
            with file.open("w") as stream:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        env={**self.environment, **variables},
                        cwd=self.folder,
                        start_new_session=True,
                    )
                )
        problems = [self._wait(process, end) for process in processes]
        printed = ["".join(file.read_text(errors="replace")) for file in files]
        failed = [
            f"{problem}: {last_line(text)}\n{text[-SHOWN:]}"
            for problem, text in zip(problems, printed, strict=True)
            if problem
        ]
        return (failed or [""])[0], "".join(printed)

    def _wait(self, process: subprocess.Popen[bytes], end: float) -> str:
        try:
            code = process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            end_session(process)
            return "took too long, and was ended"
        return f"exit code {code}" if code else ""


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def environment_with(site: Path | None) -> dict[str, str]:
    """Return the variables of the processes: where axonmpi, the checks and unpacked wheels are."""
    before = os.environ.get("PYTHONPATH", "")
    packages = sorted(map(str, site.rglob("*-packages"))) if site else []
    folders = [*packages, str(REPOSITORY), str(REPOSITORY / "tests"), str(HERE), before]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders)), "PYTHONUNBUFFERED": "1"}
    if site:
        for name, own in (("PATH", "bin"), ("LD_LIBRARY_PATH", "lib")):  # Debian's Python installs below "local"
            places = [str(site / own), str(site / "local" / own), os.environ.get(name, "")]
            variables[name] = os.pathsep.join(filter(None, places))
        for library in sorted(site.rglob("libnccl.so.2"))[:1]:  # or torch would load its own first
            variables["LD_PRELOAD"] = os.pathsep.join(
                filter(None, [str(library), os.environ.get("LD_PRELOAD", "")])
            )
    return variables


def unpack(wheels: str, folder: Path) -> Path | None:
    """Install the wheels of a folder into a temporary one; return that."""
    files = sorted(map(str, Path(wheels).glob("*.whl"))) if wheels else []
    if not files:
        return None
    site = folder / "site"
    # not --target, which leaves out what a wheel has for lib: libmpi
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--ignore-installed", "--prefix", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *files], check=True)
    return site


def describe(runner: Runner) -> tuple[Machine, str]:
    """Ask a process what this machine has; return why it could not say, too."""
    problem, printed = runner.run([[sys.executable, "-m", "on_gpu.part", "--describe"]], 120)
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if problem or not lines:
        return {"gpus": [], "gpus_missing": "axonmpi cannot be imported"}, problem or printed[-SHOWN:]
    return json.loads(lines[-1]), ""


# ---- parts ------------------------------------------------------------------------------------------------------


def run_part(part: Part, runner: Runner, machine: Machine, report: Report) -> None:
    """Make the checks of a part."""
    if part.reason:
        report.add(part.name, "skipped", part.reason)
        return
    out = runner.folder / f"{part.name.replace(' ', '-').replace(',', '')}.jsonl"
    own = [sys.executable, "-m", "on_gpu.part", part.way, "--out", str(out), "--only", *part.only]
    variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if part.ranks > 1 else {}
    if part.way == "file":
        options = ["--ranks", str(part.ranks), "--id", str(out.with_suffix(".id"))]
        commands = [[*own, *options, "--rank", str(rank)] for rank in range(part.ranks)]
    elif part.ranks > 1:
        launcher, more = mpirun_of(machine["mpirun"], part.ranks)
        variables |= more
        commands = [[*launcher, *own]]
    else:
        commands = [own]
    problem, _ = runner.run(commands, part.seconds, **variables)
    if problem == TIME_IS_UP:
        report.add(part.name, "skipped", problem)
    else:
        take_over(part, out, problem, report)


def mpirun_of(path: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts ranks, and its variables."""
    from axonmpi.testing.mpirun import mpirun_command

    return mpirun_command(Path(path), ranks)


def take_over(part: Part, out: Path, problem: str, report: Report) -> None:
    """Put into the report what a part's processes have written, and what they were at when they ended."""
    begun, ended = "", False
    for line in out.read_text().splitlines() if out.exists() else []:
        entry = json.loads(line)
        begun = entry.get("begun", "") if "name" not in entry else ""
        ended = ended or "ended" in entry
        if "name" in entry:
            report.add(f"{part.name}: {entry['name']}", entry["outcome"], entry["reason"], entry["seconds"])
            if entry["figures"]:
                report.figures.setdefault(part.name, {}).update(entry["figures"])
    if not ended or problem:
        report.add(f"{part.name}: {begun or 'start or end'}", "failed", problem or "the processes ended early")


def outcome_of(problem: str) -> str:
    """Say what a command has come to."""
    return "skipped" if problem == TIME_IS_UP else "failed" if problem else "passed"


def run_command(
    name: str, arguments: Sequence[str], seconds: float, reason: str, runner: Runner, report: Report
) -> bool:
    """Run this Python with some arguments, if there is no reason against it; return whether it has succeeded."""
    if reason:
        report.add(name, "skipped", reason)
        return False
    began = time.monotonic()
    problem, printed = runner.run([[sys.executable, *arguments]], seconds)
    report.add(name, outcome_of(problem), problem, round(time.monotonic() - began, 1))
    if not problem:
        print(printed)
    return not problem


def run_benchmark(runner: Runner, report: Report, reason: str) -> None:
    """Run `axonmpi bench collectives` on the GPU."""
    file = runner.folder / "bench.json"
    operations = ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"]
    options = ["--device", "cuda", "--ranks", "1", "--blocks", "7", "--dtypes", "float32", "--json", str(file)]
    command = ["-m", "axonmpi", "bench", "collectives", *options, "--operations", *operations]
    if run_command("axonmpi bench collectives --device cuda", command, 120, reason, runner, report):
        report.figures["collectives"] = json.loads(file.read_text())


def run_trainer(runner: Runner, report: Report, reason: str) -> None:
    """Run `axonmpi train` on the GPU, in bfloat16."""
    reason = reason or ("" if has_module("tyro", runner) else "tyro is not installed")
    folder = runner.folder / "trained"
    options = ["--device", "cuda", "--dtype", "bfloat16", "--steps", "200", "--no-plot", "--progress", "plain"]
    command = ["-m", "axonmpi", "train", *options, "--out", str(folder)]
    if run_command("axonmpi train --device cuda --dtype bfloat16", command, 120, reason, runner, report):
        report.figures["axonmpi train"] = json.loads((folder / "summary.json").read_text())


def run_pytest(runner: Runner, machine: Machine, report: Report, reason: str) -> None:
    """Make the same checks as tests."""
    missing = [name for name in ("pytest", "hypothesis") if not has_module(name, runner)]
    reason = reason or (f"{' and '.join(missing)} not installed" if missing else "")
    plugins = [] if machine["packages"].get("axonmpi") else ["-p", "axonmpi.testing.plugin"]
    serial = ["-p", "no:xdist", "-p", "no:cacheprovider"]
    command = ["-m", "pytest", "-q", *plugins, *serial, "-m", "gpu", str(HERE)]
    run_command("pytest -m gpu tests/gpu", command, 240, reason, runner, report)


def has_module(name: str, runner: Runner) -> bool:
    """Say whether processes can import a module."""
    return not runner.run([[sys.executable, "-c", f"import {name}"]], 60)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-run.json"), help="the file to write")
    parser.add_argument("--seconds", type=float, default=540.0, help="the time for all of it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the checks")
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")
    began = time.monotonic()
    report = Report()
    sys.path.insert(0, str(REPOSITORY))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        site = unpack(os.environ.get("AXONMPI_WHEELS", ""), folder)
        runner = Runner(options.seconds, folder, site)
        report.machine, problem = describe(runner)
        if problem:
            report.add("import axonmpi", "failed", problem)
        print(json.dumps(report.machine, indent=2))
        for part in parts_for(report.machine, options.device):
            run_part(part, runner, report.machine, report)
        missing = first_line(report.machine.get("nccl_missing") or "")
        reason = missing if report.machine["gpus"] else "no GPU"
        run_benchmark(runner, report, reason)
        run_trainer(runner, report, reason)
        run_pytest(runner, report.machine, report, reason)
    outcomes = {outcome: report.count(outcome) for outcome in ("passed", "failed", "skipped")}
    summary = {**outcomes, "seconds": round(time.monotonic() - began, 1)}
    everything = {"summary": summary, "machine": report.machine, "checks": report.checks, "figures": report.figures}
    options.out.write_text(json.dumps(everything, indent=2) + "\n")
    if not report.machine["gpus"]:
        print("\nThere is no GPU here: nothing of NCCL or CUDA was checked.")
    print(f"\n{', '.join(f'{number} {what}' for what, number in outcomes.items())}; written to {options.out}")
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
