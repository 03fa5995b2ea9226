"""The package's layers, read from its imports: a file imports from lower layers, or from its own package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

import pytest

import axonmpi

LAYERS = (
    ("errors", "types", "environment", "partition", "topology", "memory"),
    ("arguments", "matmul"),
    ("backends",),
    ("objects", "bucketing"),
    ("process_group",),
    ("group",),
    ("mesh",),
    ("comm", "autograd"),
    ("wrapping",),
    ("norms",),
    ("ddp", "fsdp", "pipeline", "tensor", "data"),
    ("testing",),
    ("train",),
    ("cli",),
    ("__main__", "__init__"),
)
"""Packages and files of `axonmpi`, lowest first; those of one layer know nothing of each other."""

ROOT = Path(axonmpi.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
SOURCES = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in FILES}
LONGEST = 400
WHY_LONG = "The file is long because"


class Import(NamedTuple):
    """One imported module, where, and when: as the file is imported, in a function, or for type checkers only."""

    target: str
    line: int
    when: str


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def imports_of(module: str) -> Iterator[Import]:
    tree = tree_of(module)
    when = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            when |= dict.fromkeys(ast.walk(node), "in a function")
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            when |= {inner: "for types" for child in node.body for inner in ast.walk(child)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), module.rpartition(".")[0])
            inner = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if file_of(name) in SOURCES else base for name in inner]
        for name in names:
            yield Import(file_of(name), node.lineno, when.get(node, "at start"))


def file_of(target: str) -> str:
    """The file of a module of ours; other modules are named as they are."""
    return f"{target}.__init__" if f"{target}.__init__" in SOURCES else target


def layer_of(module: str) -> int:
    part = module.split(".")[1]
    assert any(part in names for names in LAYERS), f"axonmpi.{part} is in no layer: add it to LAYERS"
    return next(number for number, names in enumerate(LAYERS) if part in names)


def test_imports_go_down_and_never_in_a_circle() -> None:
    wrong, graph = [], {}
    for module in SOURCES:
        found = [entry for entry in imports_of(module) if entry.target in SOURCES]
        graph[module] = {entry.target for entry in found if entry.when != "for types"} - {module}
        wrong += [
            f"{module}:{line} (layer {layer_of(module)}) imports {target} (layer {layer_of(target)})"
            for target, line, _ in found
            if layer_of(target) >= layer_of(module) and module.split(".")[1] != target.split(".")[1]
        ]
    assert sum(map(len, graph.values())) > len(SOURCES), "most imports are not found"
    assert not wrong, "\n".join(["imports go to lower layers only:", *wrong])
    assert {name for names in LAYERS for name in names} == {module.split(".")[1] for module in SOURCES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' <- '.join(error.args[1])}")


def test_mpi_is_imported_in_functions_only_and_the_environment_read_in_one_place() -> None:
    names = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    mpi, environment = [], []
    for module in SOURCES:
        mpi += [
            f"{module}:{entry.line}"
            for entry in imports_of(module)
            if entry.target.split(".")[0] == "mpi4py" and entry.when == "at start"
        ]
        for node in ast.walk(tree_of(module)):
            uses = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
            uses |= isinstance(node, ast.ImportFrom) and node.module == "os" and node.names[0].name in names
            environment += [f"{module}:{node.lineno}"] if uses else []
    assert not mpi, f"mpi4py is imported where axonmpi is: {mpi}"
    elsewhere = [place for place in environment if not place.startswith("axonmpi.launch.variables:")]
    assert environment, "no environment variable is read anywhere"
    assert not elsewhere, f"environment variables are read outside of launch/variables.py: {elsewhere}"


def test_files_begin_with_a_paragraph_and_are_short_or_say_why_not() -> None:
    wrong = []
    for module, path in SOURCES.items():
        opening = ast.get_docstring(tree_of(module)) or ""
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines and not opening:
            wrong.append(f"{module} does not begin with a paragraph")
        if lines > LONGEST and WHY_LONG not in opening:
            wrong.append(f"{module} has {lines} lines and does not say: {WHY_LONG} ...")
    assert not wrong, "\n".join(wrong)


STARTS_NOTHING = """
import sys, threading
import axonmpi as ax
import torch
assert "mpi4py.MPI" not in sys.modules, "MPI was loaded"
assert not torch.cuda.is_initialized(), "CUDA was initialised"
assert threading.active_count() == 1, threading.enumerate()
assert not ax.is_initialized()
ax.World.mock(2)
ax.ReduceOp.SUM, ax.GradSyncStrategy.OVERLAPPED, ax.ProcessGroup.mock()
assert threading.active_count() == 1, threading.enumerate()
assert "mpi4py" not in sys.modules, "mpi4py was loaded"
assert "pytest" not in sys.modules, "pytest was loaded"
missing = [name for name in ax.__all__ if name != "MpiBackend" and not hasattr(ax, name)]
assert not missing, missing
"""


def test_importing_starts_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", STARTS_NOTHING], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
