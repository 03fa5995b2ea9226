#!/usr/bin/env python3
"""Public programs, run whole: their results are those over gloo, and the time is compared.

    tests/others/run public --checkouts FOLDER [--rounds 3] [--json FILE] [NAME ...]

FOLDER has a checkout of each repository under the repository's name, such as FOLDER/nanoGPT. A program's packages
are installed into an environment of its own, in a temporary folder. The variants of a program take turns, each in a
new copy of the checkout, in ranks of the mpirun that belongs to this Python; the exit code is 0 if all agree.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from helpers import REPOSITORY
from others.public.program import Program

from axonmpi.testing import launch

NAMES = sorted({path.stem for path in Path(__file__).parent.glob("*.py")} - {"command", "program"})


def programs_of(names: Sequence[str]) -> dict[str, Program]:
    """Return the programs with these names, or all; a file has one or more."""
    found: dict[str, Program] = {}
    for name in NAMES:
        found.update(import_module(f"others.public.{name}").PROGRAMS)
    return {name: found[name] for name in names or found}


def environment_for(program: Program, folder: Path) -> dict[str, str]:
    """Install a program's packages beside those of this Python; return the variables with which they are found."""
    venv.create(folder, with_pip=True)
    ours = sysconfig.get_path("purelib")
    own = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    Path(own, "beside.pth").write_text(ours)
    if program.packages:
        pip = [folder / "bin" / "pip", "install", "-q", "-c", REPOSITORY / "constraints.txt"]
        subprocess.run([*pip, *program.packages], check=True)
    paths = os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {"PYTHONPATH": paths, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", **program.env}


def prepared(program: Program, checkouts: Path, folder: Path, variables: Mapping[str, str]) -> Path:
    """Return a checkout with the program's changes, files and data."""
    if program.repository:
        source = checkouts / Path(program.repository).name
        # Some links of a checkout lead nowhere.
        shutil.copytree(source, folder, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    else:
        folder.mkdir()
    for name, old, new in program.changes:
        text = (folder / name).read_text()
        assert old in text, f"{name}: {old!r} is not there"
        (folder / name).write_text(text.replace(old, new))
    for name, text in program.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for line in program.prepare:
        subprocess.run(line, shell=True, cwd=folder, check=True, env={**os.environ, **variables})
    return folder


def run_once(program: Program, prefix: str, checkout: Path, folder: Path, variables: Mapping[str, str]) -> Any:
    """Return a variant's figures, as they are printed, in an order of their own, and its seconds; or exit."""
    work = shutil.copytree(checkout, folder / "work", symlinks=True)
    words = shlex.split(f"{prefix} {program.command}")
    start = ["-m", *words] if prefix else words
    script = Path(work, start[0]) if start[0].endswith(".py") else start[0]
    done = launch(program.ranks, script, *start[1:], timeout=program.seconds, env=variables, cwd=work)
    shutil.rmtree(work)
    output = done.stdout + done.stderr
    figures = sorted(tuple(filter(None, match.groups())) for match in re.finditer(program.results, output))
    if done.returncode or not figures:
        sys.exit(f"{output[-6000:]}\n{prefix}: exit code {done.returncode}, {len(figures)} results")
    return figures, done.seconds


def difference(reference: Sequence[Sequence[str]], figures: Sequence[Sequence[str]]) -> float:
    """Return the largest relative difference of figures; infinite if there are more of one."""
    pairs = [pair for lines in zip(reference, figures, strict=False) for pair in zip(*lines, strict=True)]
    if len(reference) != len(figures):
        return float("inf")
    values = [(float(a), float(b)) for a, b in pairs]
    return max(abs(a - b) / max(abs(a), abs(b), 1e-30) if a != b else 0.0 for a, b in values)


def measure(program: Program, checkouts: Path, rounds: int) -> dict[str, Any]:
    """Run all variants of a program in turns; return what a row of the table says."""
    seconds: dict[str, list[float]] = {name: [] for name in program.variants}
    figures: dict[str, list[Any]] = {name: [] for name in program.variants}
    with tempfile.TemporaryDirectory(prefix="axonmpi-public-") as name:
        folder = Path(name)
        variables = environment_for(program, folder / "environment")
        checkout = prepared(program, checkouts, folder / "checkout", variables)
        for _ in range(rounds):
            for variant, prefix in program.variants.items():
                found, taken = run_once(program, prefix, checkout, folder, variables)
                seconds[variant].append(taken)
                figures[variant].append(found)
    first, *_, last = program.variants
    reference = figures[first][0]
    return {
        "compared": program.compared,
        "ranks": program.ranks,
        "figures": sum(map(len, reference)),
        "example": reference[-1],
        "difference": max(difference(reference, found) for runs in figures.values() for found in runs),
        "seconds": seconds,
        "ratio": median(seconds[last]) / median(seconds[first]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of those in {', '.join(NAMES)}")
    parser.add_argument("--checkouts", type=Path, default=Path(), metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = {}
    for name, program in programs_of(options.names).items():
        rows[name] = row = measure(program, options.checkouts.resolve(), options.rounds)
        agrees = row["difference"] <= program.tolerance
        print(
            f"{'passed' if agrees else 'FAILED'} {name}: {row['figures']} figures ({program.compared}, the last "
            f"{row['example']}), largest relative difference {row['difference']:.1e}, "
            f"time {row['ratio']:.2f} of {next(iter(program.variants))}'s: {row['seconds']}",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    return int(any(row["difference"] > programs_of([name])[name].tolerance for name, row in rows.items()))


if __name__ == "__main__":
    sys.exit(main())
