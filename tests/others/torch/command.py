#!/usr/bin/env python3
"""torch's own tests of torch.distributed over MPI, with gloo as the judge.

    tests/others/run torch [-n 2] [--every 10] [--out FILE.json] [NAME ...]

Each test runs on gloo and, where gloo passes, on axonmpi, in the ranks of the mpirun that belongs to this Python.
The exit code is 0 if `differences.json` has exactly those that pass with gloo alone, each with its reason, and if
these are at most 5 of 100, where all are run.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from axonmpi.testing import LaunchResult, launch

HERE = Path(__file__).resolve().parent
LEAST = 0.95


def run_ranks(ranks: int, *arguments: object) -> LaunchResult:
    """Run the tests in ranks."""
    env = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return launch(ranks, HERE / "in_ranks.py", *arguments, timeout=None, env=env)


def all_tests(ranks: int) -> list[str]:
    """The names of all tests of the suite."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "names.json")
        done = run_ranks(ranks, "gloo", report, "--list")
        if not report.exists():
            sys.exit(done.stdout + done.stderr)
        return json.loads(report.read_text())


def run_all(backend: str, names: list[str], ranks: int) -> dict[str, tuple[str, str]]:
    """Outcome and reason of each test, in as many jobs as it takes."""
    outcomes: dict[str, tuple[str, str]] = {}
    while left := [name for name in names if name not in outcomes]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.jsonl")
            done = run_ranks(ranks, backend, report, *left)
            entries = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        if not entries:
            sys.exit(f"no test has begun:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        outcomes |= {entry["name"]: (entry["outcome"], entry["why"]) for entry in entries}
        last = entries[-1]
        if done.returncode and last["outcome"] != "failed":  # within the test, or in what it has left behind
            outcomes[last["name"]] = ("ended the job", done.stdout[-2000:] + done.stderr[-6000:])
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="every so manieth test only")
    parser.add_argument("--out", type=Path, help="a file for all outcomes")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    names = options.names or all_tests(options.ranks)[:: options.every]
    judged = run_all("gloo", names, options.ranks)
    passing = [name for name in names if judged[name][0] == "passed"]
    ours = run_all("axonmpi", passing, options.ranks) if passing else {}
    if options.out:
        options.out.write_text(json.dumps({"gloo": judged, "axonmpi": ours}, indent=1))
    return conclude(names, ours, is_whole=not options.names and options.every == 1)


def conclude(names: list[str], ours: dict, *, is_whole: bool) -> int:
    """Print what differs; 0 if it is what is expected."""
    reasons = json.loads((HERE / "differences.json").read_text())
    failing = {name: why for name, (outcome, why) in ours.items() if outcome != "passed"}
    unknown, gone = sorted(set(failing) - set(reasons)), sorted((set(reasons) & set(ours)) - set(failing))
    for name in sorted(failing):
        print(f"{ours[name][0]}: {name}: {reasons.get(name) or 'no reason is known:'}")
        if name in unknown:
            print(failing[name])
    for name in gone:
        print(f"passes, but is in differences.json: {name}")
    passed = len(ours) - len(failing)
    least = LEAST * len(ours) if is_whole else 0
    print(f"{passed} of {len(ours)} tests that pass with gloo pass with axonmpi ({len(names)} are there)")
    return int(bool(unknown or gone) or passed < least)


if __name__ == "__main__":
    sys.exit(main())
