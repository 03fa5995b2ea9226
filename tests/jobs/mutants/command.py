"""Breaks the library in one place at a time, and looks whether the tests notice.

    tests/jobs/run mutants --seed 7 [--number 40] [--out FILE.json]     places drawn over all packages
    tests/jobs/run mutants --again FILE.json                            those of an earlier run

A mutant is a comparison turned, a constant off by one, or a statement left out, in a copy of the tree. `pytest -x`
runs on the tests of its package, and then, if these pass, on all tests. The exit code is 1 if a mutant survives
that an earlier run has killed.
"""

import argparse
import ast
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from helpers import REPOSITORY

TURNED = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">", "is": "is not", "in": "not in"}
SECONDS = 3600.0
"""A session that takes longer hangs, and has noticed."""
NO_TESTS = 5
"""pytest's exit code."""


@dataclasses.dataclass
class Mutant:
    """One change of one line, and what became of it.

    Attributes:
        file: Below the tree.
        line: Its number, from 1.
        old: The line.
        new: The same, changed.
        killed_by: The first test that failed; None: none did.
    """

    file: str
    line: int
    old: str
    new: str
    killed_by: str | None = None

    def apply(self, tree: Path) -> None:
        """Change the line nearest to the place that reads as the old one."""
        path = tree / self.file
        lines = path.read_text().splitlines()
        same = [number for number, text in enumerate(lines, 1) if text == self.old]
        if not same:
            sys.exit(f"{self.file}: there is no line {self.old!r}")
        lines[min(same, key=lambda number: abs(number - self.line)) - 1] = self.new
        path.write_text("\n".join(lines) + "\n")


# ---- drawing ----------------------------------------------------------------------------------------------------


def mutants_of(path: Path, tree: Path) -> Iterator[tuple[str, Mutant]]:
    """Yield each mutant of a file, with its kind."""
    source = path.read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.expr | ast.stmt) and node.lineno == node.end_lineno:
            old = lines[node.lineno - 1]
            for kind, new in changes(node, old):
                if new != old:
                    yield kind, Mutant(path.relative_to(tree).as_posix(), node.lineno, old, new)


def changes(node: ast.expr | ast.stmt, line: str) -> Iterator[tuple[str, str]]:
    """Yield kinds of changes, and the changed line; columns of nodes count bytes."""
    text = line.encode()
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        start, stop = node.left.end_col_offset or 0, node.comparators[0].col_offset
        sign = text[start:stop].decode().strip(" ()")
        if sign in TURNED:
            turned = text[start:stop].decode().replace(sign, TURNED[sign])
            yield "comparison", (text[:start] + turned.encode() + text[stop:]).decode()
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield (
            "constant",
            (text[: node.col_offset] + str(node.value + 1).encode() + text[node.end_col_offset :]).decode(),
        )
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.Raise | ast.Expr) and not is_text(node):
        yield "statement", line[: len(line) - len(line.lstrip())] + "pass"


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def package_of(file: str) -> str:
    """`axonmpi/fsdp/layout.py` is of "fsdp", `axonmpi/comm.py` of "comm"."""
    return Path(file).with_suffix("").parts[1]


def drawn(tree: Path, number: int, seed: int) -> list[Mutant]:
    """Draw mutants: packages in turn, in each of them a kind, and of the kind a place."""
    chance = random.Random(seed)
    places: dict[str, dict[str, list[Mutant]]] = {}
    for path in sorted((tree / "axonmpi").rglob("*.py")):
        for kind, mutant in mutants_of(path, tree):
            places.setdefault(package_of(mutant.file), {}).setdefault(kind, []).append(mutant)
    packages = chance.sample(sorted(places), len(places))
    found = []
    for count in range(number):
        of_package = places[packages[count % len(packages)]]
        found.append(chance.choice(of_package[chance.choice(sorted(of_package))]))
    return found


# ---- testing ----------------------------------------------------------------------------------------------------


def tests_of(package: str, tree: Path) -> list[str]:
    """Return the tests of a package: a folder, or the file of a module."""
    there = (f"tests/{package}", f"tests/test_{package}.py")
    return [path for path in there if (tree / path).exists()]


def killer(tree: Path, tests: list[str]) -> str | None:
    """Return the first test that fails, or why there is no result; None if all pass."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "tests")])}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    with tempfile.TemporaryFile("w+") as printed:
        try:
            done = subprocess.run(
                command, cwd=tree, env=environment, stdout=printed, stderr=printed, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no end within {SECONDS:g} s"
        printed.seek(0)
        failed = [line for line in printed.read().splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode in (0, NO_TESTS):
        return None
    return failed[0] if failed else f"pytest's exit code {done.returncode}"


def test_mutant(mutant: Mutant) -> str | None:
    """Return what kills a mutant."""
    with tempfile.TemporaryDirectory(prefix="axonmpi-mutant-") as folder:
        tree = Path(folder, "tree")
        shutil.copytree(REPOSITORY, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__"))
        mutant.apply(tree)
        own = tests_of(package_of(mutant.file), tree)
        return (killer(tree, own) if own else None) or killer(tree, [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--number", type=int, default=40, help="how many are drawn (default: 40)")
    parser.add_argument("--again", type=Path, metavar="FILE", help="test those of an earlier run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to keep what became of them")
    options = parser.parse_args()
    if options.again:
        before = [Mutant(**each) for each in json.loads(options.again.read_text())]
    else:
        before = drawn(REPOSITORY, options.number, options.seed)
    after = []
    for mutant in before:
        began = time.monotonic()
        after.append(dataclasses.replace(mutant, killed_by=test_mutant(mutant)))
        print(f"{mutant.file}:{mutant.line}: {mutant.old.strip()} -> {mutant.new.strip()}")
        print(f"  {after[-1].killed_by or 'SURVIVES'}, {time.monotonic() - began:.0f} s", flush=True)
        if options.out:
            options.out.write_text(json.dumps([dataclasses.asdict(each) for each in after], indent=1))
    lost = [new for old, new in zip(before, after, strict=True) if old.killed_by and not new.killed_by]
    print(f"{sum(bool(each.killed_by) for each in after)} of {len(after)} killed, {len(lost)} no longer killed")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
