"""The package's layers, read from its imports: a file imports from lower layers, or from its own package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import axonmpi

LAYERS = (
    ("errors", "types", "environment", "partition", "topology", "memory", "backends"),
    ("arguments",),
    ("matmul", "backends.reduction", "backends.flat_parts", "backends.futex", "backends.turns"),
    ("backends.call", "backends.checks", "backends.node_counters"),
    ("backends.base",),
    (
        *("objects", "bucketing", "backends.worker", "backends.children", "backends.cores", "backends.exits"),
        *("backends.runtime", "backends.mpi_memory", "backends.mpi_messages", "backends.mpi_slots"),
        *("backends.shared_memory", "backends.node_barrier", "backends.node_slots", "backends.plain_paths"),
        *(
            "backends.node_scratch",
            "backends.node_choice",
            "backends.node_turns",
            "backends.node_room",
            "backends.node_chunks",
            "backends.node_plans",
            "backends.node_paths",
        ),
        *(
            "backends.lanes",
            "backends.node_chain",
            "backends.node_stream",
            "backends.two_level_paths",
            "backends.node_memory",
            "backends.connect",
        ),
    ),
    ("backends.mock_room",),
    ("backends.mock", "backends.mpi"),
    ("process_group",),
    ("group",),
    ("mesh",),
    ("comm", "autograd"),
    ("wrapping.*",),
    ("norms",),
    ("ddp.*", "fsdp.*", "pipeline.*", "tensor.*", "data"),
    ("testing.*",),
    ("train.*",),
    ("cli.*",),
    ("__main__",),
    ("",),
)
"""Names without `axonmpi.`; `ddp.*` is a package with all of its files; the last is `axonmpi` itself."""

ROOT = Path(axonmpi.__file__).parent
LONGEST = 400
WHY_LONG = "The file is long because"


def module_name(path: Path) -> str:
    """`backends/base.py` is `backends.base`, `ddp/__init__.py` is `ddp`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def layer_of(module: str) -> int | None:
    """The number of a module's layer."""
    package = module.partition(".")[0]
    for number, names in enumerate(LAYERS):
        if module in names or f"{package}.*" in names:
            return number
    return None


@dataclass(frozen=True)
class Import:
    """One imported module: its full name, and where and how it is imported."""

    target: str
    line: int
    at_start: bool
    """Whether it runs when the file is imported, rather than in a function."""
    for_types: bool
    """Whether it is for type checkers only."""


def imports_of(source: str, module: str, is_package: bool = False) -> Iterator[Import]:
    """All imports of a file."""
    package = ["axonmpi", *filter(None, module.split("."))]
    package = package if is_package else package[:-1]
    yield from _imports(ast.parse(source), package, at_start=True, for_types=False)


def _imports(node: ast.AST, package: list[str], at_start: bool, for_types: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, at_start, for_types)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        name = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{name}.{alias.name}"
            yield Import(inner if own_name(inner) in SOURCES else name, node.lineno, at_start, for_types)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _imports(child, package, at_start, True)
        for child in node.orelse:
            yield from _imports(child, package, at_start, for_types)
    else:
        at_start = at_start and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, package, at_start, for_types)


def own_name(target: str) -> str | None:
    """A module of this package without `axonmpi.`; None for others."""
    if target == "axonmpi":
        return ""
    return target.removeprefix("axonmpi.") if target.startswith("axonmpi.") else None


def file_imports(module: str) -> list[Import]:
    path = SOURCES[module]
    return list(imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"))


def may_import(module: str, target: str) -> bool:
    """Whether `target` lies in a lower layer, or beside `module` in one package."""
    own, other = layer_of(module), layer_of(target)
    if own is None or other is None:
        return False
    same_package = "." in f"{module}." and module.partition(".")[0] == target.partition(".")[0]
    return other < own or (other == own and same_package)


def test_every_file_has_a_layer() -> None:
    assert [module for module in SOURCES if layer_of(module) is None] == []


def test_every_entry_of_the_table_is_a_file() -> None:
    names = [name for names in LAYERS for name in names]
    assert [name for name in names if name.removesuffix(".*") not in SOURCES] == []
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("module", SOURCES, ids=lambda module: module or "axonmpi")
def test_imports_go_down(module) -> None:
    wrong = [
        f"{module}:{found.line} (layer {layer_of(module)}) imports {target} (layer {layer_of(target)})"
        for found in file_imports(module)
        if (target := own_name(found.target)) is not None and not may_import(module, target)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_imports_in_a_circle() -> None:
    graph = {
        module: {
            target
            for found in file_imports(module)
            if not found.for_types and (target := own_name(found.target)) not in (None, module)
        }
        for module in SOURCES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {error.args[1]}")


def test_mpi_is_imported_in_functions_only() -> None:
    found = [
        f"{module}:{entry.line}"
        for module in SOURCES
        for entry in file_imports(module)
        if entry.target.partition(".")[0] == "mpi4py" and entry.at_start and not entry.for_types
    ]
    assert found == []


def test_the_lowest_layer_knows_no_mpi_and_no_torch_distributed() -> None:
    forbidden = ("mpi4py", "torch.distributed")
    found = [
        f"{module}:{entry.line}"
        for module in LAYERS[0]
        for entry in file_imports(module)
        if entry.target.startswith(forbidden)
    ]
    assert found == []


ENVIRONMENT_NAMES = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")


def environment_uses(source: str) -> list[int]:
    """Lines that read or write environment variables."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES:
            if isinstance(node.value, ast.Name) and node.value.id in ("os", "posix"):
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"):
            lines += [node.lineno for alias in node.names if alias.name in ENVIRONMENT_NAMES]
    return lines


def test_environment_variables_are_read_in_one_place() -> None:
    uses = {module: environment_uses(path.read_text(encoding="utf-8")) for module, path in SOURCES.items()}
    assert [module for module, lines in uses.items() if lines] == ["environment"], uses


def test_files_are_short_or_say_why_not() -> None:
    too_long = []
    for module, path in SOURCES.items():
        text = path.read_text(encoding="utf-8")
        opening = ast.get_docstring(ast.parse(text)) or ""
        assert opening or not text.strip(), f"{module} does not begin with a paragraph"
        if len(text.splitlines()) > LONGEST and WHY_LONG not in opening:
            too_long.append(f"{module}: {len(text.splitlines())} lines")
    assert too_long == []


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
assert "mpi4py.MPI" not in sys.modules, "mock ranks have loaded MPI"
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


# ---- what the tests above find, on files made for it -------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "target", "allowed"),
    [
        ("group", "comm", False),
        ("comm", "group", True),
        ("comm", "autograd", False),
        ("ddp.reducer", "data", False),
        ("data", "ddp.reducer", False),
        ("ddp.wrapper", "ddp.reducer", True),
        ("ddp", "ddp.wrapper", True),
        ("backends.base", "backends.mpi", False),
        ("backends.mpi_slots", "backends.mpi_messages", True),
        ("backends.mpi_slots", "bucketing", False),
        ("objects", "bucketing", False),
        ("train.trainer", "cli", False),
        ("", "cli.train", True),
        ("errors", "unheard_of", False),
    ],
)
def test_what_may_be_imported(module, target, allowed) -> None:
    assert may_import(module, target) is allowed


def test_imports_are_found_wherever_they_are() -> None:
    source = """
from typing import TYPE_CHECKING
from . import exits
from .call import Call
from .. import environment, errors
from ..group import World
import axonmpi.comm
if TYPE_CHECKING:
    from mpi4py import MPI
def start():
    from mpi4py import MPI
class Loaded:
    import mpi4py
"""
    found = list(imports_of(source, "backends.mpi"))
    assert [entry.target for entry in found] == [
        *("typing", "axonmpi.backends.exits", "axonmpi.backends.call", "axonmpi.environment", "axonmpi.errors"),
        *("axonmpi.group", "axonmpi.comm", "mpi4py", "mpi4py", "mpi4py"),
    ]
    assert [entry.for_types for entry in found[-3:]] == [True, False, False]
    assert [entry.at_start for entry in found[-3:]] == [True, False, True]
    assert [entry.target for entry in imports_of("from .wrapper import X", "ddp", True)] == ["axonmpi.ddp.wrapper"]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\nos.environ['A']", [2]),
        ("import os\n\nos.getenv('A')", [3]),
        ("from os import environ", [1]),
        ("import os\nos.getpid()", []),
        ("environ = {}\nenviron['A'] = 1", []),
    ],
)
def test_uses_of_the_environment_are_found(source, lines) -> None:
    assert environment_uses(source) == lines
