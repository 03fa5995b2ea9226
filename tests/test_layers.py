"""The packages' order, read from their imports: a file imports from packages before its own, or from its own."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import axonmpi

ORDER = (
    ("utils",),
    ("errors", "types"),
    ("launch",),
    ("observe",),
    ("backends",),
    ("groups",),
    ("collectives",),
    ("comm", "autograd"),
    ("wrapping",),
    ("ddp", "fsdp", "tensor", "data"),
    ("pipeline",),
    ("checkpoint",),
    ("interop",),
    ("testing",),
    ("train",),
    ("cli",),
    ("__main__", ""),
)
"""Packages and files below `axonmpi`, which is the last itself. Those of one line do not import each other."""

BACKENDS = (
    ("tuning",),
    ("reduction", "concat_view", "ranks"),
    ("call", "checks", "shared.counters"),
    ("call_site",),
    ("runner",),
    ("base", "worker"),
    ("bucketing", "objects", "buffers"),
    ("handshake",),
    ("connection",),
    ("local", "mock", "shared", "mpi.plain"),
    ("network",),
    ("connect",),
    ("mpi", "nccl"),
    ("",),
)
"""The same below `axonmpi.backends`."""

ROOT = Path(axonmpi.__file__).parent
MOST_FILES = 17
LONGEST = 400
WHY_LONG = "The file is long because"


def module_name(path: Path) -> str:
    """`backends/base.py` is `backends.base`, `ddp/__init__.py` is `ddp`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@dataclass(frozen=True)
class Import:
    """One imported module of any package: its full name, and where and how it is imported."""

    target: str
    line: int
    at_start: bool
    """Whether it runs when the file is imported, rather than in a function."""
    for_types: bool
    """Whether it is for type checkers only."""


def imports_of(source: str, module: str, is_package: bool = False) -> Iterator[Import]:
    """All imports of a file."""
    package = ["axonmpi", *filter(None, module.split("."))]
    yield from _imports(ast.parse(source), package if is_package else package[:-1], at_start=True, for_types=False)


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
    return "" if target == "axonmpi" else target.removeprefix("axonmpi.") if target.startswith("axonmpi.") else None


FOUND = {
    module: list(imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"))
    for module, path in SOURCES.items()
}
OWN = {
    module: [(target, found) for found in each if (target := own_name(found.target)) is not None]
    for module, each in FOUND.items()
}


def entry_of(module: str, order: tuple[tuple[str, ...], ...]) -> tuple[int, str] | None:
    """The place in an order of the longest name that a module is, or is below."""
    fits = [
        (len(name), number, name)
        for number, names in enumerate(order)
        for name in names
        if module == name or (name and module.startswith(f"{name}."))
    ]
    return None if not fits else max(fits)[1:]


def may_import(module: str, target: str, order: tuple[tuple[str, ...], ...]) -> bool:
    """Whether `target` comes before `module`, or is of the same entry."""
    own, other = entry_of(module, order), entry_of(target, order)
    return own is not None and other is not None and (other == own or other[0] < own[0])


def below(package: str, module: str) -> str | None:
    """A module's name below a package; None for others."""
    return (
        ""
        if module == package
        else module.removeprefix(f"{package}.")
        if module.startswith(f"{package}.")
        else None
    )


def wrong_imports(package: str | None, order: tuple[tuple[str, ...], ...]) -> list[str]:
    """Imports against an order, of all files or of those below a package among themselves."""
    wrong = []
    for module, imports in OWN.items():
        for target, found in imports:
            names = (module, target) if package is None else (below(package, module), below(package, target))
            if None not in names and not may_import(*names, order):
                wrong.append(f"{module}:{found.line} imports {target}")
    return wrong


def test_packages_import_only_those_before_them() -> None:
    assert [module for module in SOURCES if entry_of(module, ORDER) is None] == []
    assert wrong_imports(None, ORDER) == []


def test_backends_import_only_those_before_them() -> None:
    assert wrong_imports("backends", BACKENDS) == []


def test_others_import_backends_from_the_package_alone() -> None:
    wrong = [
        f"{module}:{found.line} imports {target}"
        for module, imports in OWN.items()
        for target, found in imports
        if below("backends", module) is None and below("backends", target)
    ]
    assert wrong == []


def test_no_imports_in_a_circle_not_even_for_types() -> None:
    graph = {module: {target for target, _ in imports if target != module} for module, imports in OWN.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {error.args[1]}")


def test_mpi_is_imported_in_functions_only_and_neither_it_nor_torch_distributed_by_utils() -> None:
    for module, imports in FOUND.items():
        for found in imports:
            top = found.target.partition(".")[0]
            assert top != "mpi4py" or found.for_types or not found.at_start, f"{module}:{found.line}"
            if entry_of(module, ORDER) == (0, "utils"):
                assert not found.target.startswith(("mpi4py", "torch.distributed")), f"{module}:{found.line}"


ENVIRONMENT_NAMES = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")


def test_environment_variables_are_read_in_two_places() -> None:
    uses = set()
    for module, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES:
                uses.add(module)
            elif isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"):
                uses |= {module for alias in node.names if alias.name in ENVIRONMENT_NAMES}
    # of launchers, of users, and what cannot import the first two
    assert uses == {"launch.variables", "launch.settings", "interop.autoload"}


PRIVATE_IN_TORCH = re.compile(r"torch\._|Variable\._|functional\._|from torch\S* import _")


def test_what_is_private_in_torch_is_used_in_one_file() -> None:
    uses = {module for module, path in SOURCES.items() if PRIVATE_IN_TORCH.search(path.read_text(encoding="utf-8"))}
    assert uses == {"utils.torch_internals"}
    handlers = [module for module, path in SOURCES.items() if "_rendezvous_handlers" in path.read_text("utf-8")]
    assert handlers == ["interop.autoload"]  # which torch runs without this package


def test_what_is_asked_of_a_gpu_is_asked_in_one_file() -> None:
    uses = {
        module
        for module, path in SOURCES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if _is_of_cuda(node)
    }
    assert uses == {"utils.device"}


def _is_of_cuda(node: ast.AST) -> bool:
    """Say whether code uses torch.cuda: as an attribute, by an import, or as a device that has its methods."""
    if isinstance(node, ast.Attribute):
        is_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
        return (is_torch and node.attr == "cuda") or node.attr in ("is_cuda", "record_stream", "pin_memory")
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("torch.cuda") for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.module:
        names = {alias.name for alias in node.names}
        return node.module.startswith("torch.cuda") or (node.module == "torch" and "cuda" in names)
    return isinstance(node, ast.keyword) and node.arg == "pin_memory"


def test_files_are_short_or_say_why_not() -> None:
    too_long = []
    for module, path in SOURCES.items():
        text = path.read_text(encoding="utf-8")
        opening = ast.get_docstring(ast.parse(text)) or ""
        assert opening or not text.strip(), f"{module} does not begin with a paragraph"
        if len(text.splitlines()) > LONGEST and WHY_LONG not in opening:
            too_long.append(f"{module}: {len(text.splitlines())} lines")
    assert too_long == []


def test_folders_have_few_files() -> None:
    folders = {path.parent for path in SOURCES.values()} - {ROOT}
    counts = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: count for name, count in counts.items() if count > MOST_FILES + 1} == {}  # with __init__


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
        ("groups.world", "comm", False),
        ("comm", "groups.world", True),
        ("comm", "autograd", False),
        ("ddp.reducer", "data", False),
        ("ddp.wrapper", "ddp.reducer", True),
        ("ddp", "ddp.wrapper", True),
        ("backends.base", "groups", False),
        ("train.trainer", "cli", False),
        ("", "cli.train", True),
        ("errors", "unheard_of", False),
    ],
)
def test_what_may_be_imported(module, target, allowed) -> None:
    assert may_import(module, target, ORDER) is allowed


def test_imports_are_found_wherever_they_are() -> None:
    source = """
from typing import TYPE_CHECKING
from . import segment
from .barrier import NodeBarrier
from ... import errors
from ...groups.world import World
import axonmpi.comm
if TYPE_CHECKING:
    from mpi4py import MPI
def start():
    from mpi4py import MPI
class Loaded:
    import mpi4py
"""
    found = list(imports_of(source, "backends.shared.arena"))
    assert [entry.target for entry in found] == [
        *("typing", "axonmpi.backends.shared.segment", "axonmpi.backends.shared.barrier", "axonmpi.errors"),
        *("axonmpi.groups.world", "axonmpi.comm", "mpi4py", "mpi4py", "mpi4py"),
    ]
    assert [entry.for_types for entry in found[-3:]] == [True, False, False]
    assert [entry.at_start for entry in found[-3:]] == [True, False, True]
    assert [entry.target for entry in imports_of("from .wrapper import X", "ddp", True)] == ["axonmpi.ddp.wrapper"]
