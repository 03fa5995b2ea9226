"""The packages' order, read from their imports: a file imports from packages before its own, or from its own."""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers.programs import run_alone

import axonmpi

ORDER = (
    ("utils",),
    ("errors", "types"),
    ("record",),
    ("launch",),
    ("observe",),
    ("backends",),
    ("tracing",),
    ("groups",),
    ("across_ranks",),
    ("comm", "autograd", "mesh"),
    ("wrapping",),
    ("ddp", "fsdp", "tensor", "domain", "data"),
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
    ("reduction", "ranks"),
    ("call", "checks", "buffers", "counters"),
    ("flat_parts",),
    ("call_site",),
    ("worker",),
    ("runner",),
    ("contract",),
    ("coalesced", "objects", "connection"),
    ("local", "mock"),
    ("mpi", "nccl"),
    ("",),
)
"""The same below `axonmpi.backends`."""

ROOT = Path(axonmpi.__file__).parent
MOST_FILES = 16
LONGEST = 400
WHY_LONG = "The file is long because"


def module_name(path: Path) -> str:
    """`backends/contract.py` is `backends.contract`, `ddp/__init__.py` is `ddp`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
PACKAGES = {module_name(path) for path in ROOT.rglob("__init__.py")}


@cache
def trees() -> dict[str, ast.Module]:
    return {module: ast.parse(source) for module, source in SOURCES.items()}


def nodes_of(node: ast.AST, at_start: bool = False) -> Iterator[ast.AST]:
    """Yield the code of a file, or only what runs when the file is imported, and not in functions."""
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not at_start or not (
            is_for_types or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        ):
            yield child
            yield from nodes_of(child, at_start)


def imports_of(nodes: Iterable[ast.AST], module: str) -> list[str]:
    """Return the full names of the modules of any package that code imports, also by `import_module`."""
    parents = ["axonmpi", *filter(None, module.split("."))]
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = len(parents) - node.level + (module in PACKAGES)
            name = ".".join([*(parents[:up] if node.level else []), *filter(None, [node.module])])
            inner = [f"{name}.{alias.name}" for alias in node.names]
            found += [each if own_name(each) in SOURCES else name for each in inner]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found += [name.value for name in node.args[:1] if isinstance(name, ast.Constant)]
    return found


def own_name(target: str) -> str | None:
    """A module of this package without `axonmpi.`; None for others."""
    return f"{target}.".removeprefix("axonmpi.").removesuffix(".") if f"{target}.".startswith("axonmpi.") else None


@cache
def own_imports() -> dict[str, set[str]]:
    """The files of this package that each of them imports."""
    return {
        module: {own for target in imports_of(nodes_of(tree), module) if (own := own_name(target)) is not None}
        for module, tree in trees().items()
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
    if package and module != package and not module.startswith(f"{package}."):
        return None
    return module.removeprefix(package).removeprefix(".")


def wrong_imports(package: str, order: tuple[tuple[str, ...], ...]) -> list[tuple[str, str]]:
    """Imports against an order, of the files below a package among themselves."""
    pairs = [(module, target) for module, targets in own_imports().items() for target in targets]
    inner = [(below(package, module), below(package, target)) for module, target in pairs]
    return [names for names in inner if None not in names and not may_import(*names, order)]


def test_packages_and_backends_import_only_those_before_them() -> None:
    assert [module for module in SOURCES if entry_of(module, ORDER) is None] == []
    assert wrong_imports("", ORDER) + wrong_imports("backends", BACKENDS) == []


def test_others_import_backends_from_the_package_alone() -> None:
    others = {module: targets for module, targets in own_imports().items() if below("backends", module) is None}
    assert [(module, target) for module in others for target in others[module] if below("backends", target)] == []


def test_no_imports_in_a_circle_not_even_for_types() -> None:
    graph = {module: targets - {module} for module, targets in own_imports().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {error.args[1]}")


def test_mpi_is_imported_in_functions_only_and_neither_it_nor_torch_distributed_by_utils() -> None:
    for module, tree in trees().items():
        at_start = imports_of(nodes_of(tree, at_start=True), module)
        assert not [target for target in at_start if target.startswith("mpi4py")], module
        if entry_of(module, ORDER) == (0, "utils"):
            found = imports_of(nodes_of(tree), module)
            assert not [target for target in found if target.startswith(("mpi4py", "torch.distributed"))], module


ENVIRONMENT_NAMES = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")


def test_environment_variables_are_read_in_four_files() -> None:
    # of launchers, of users, of matplotlib, and a file that cannot import the others
    assert modules_with(_is_of_the_environment) == {
        "launch.launcher_variables",
        "launch.user_variables",
        "utils.pictures",
        "interop.autoload",
    }


def modules_with(is_one: Callable[[ast.AST], bool]) -> set[str]:
    """Return the files that have such a piece of code."""
    return {module for module, tree in trees().items() if any(map(is_one, nodes_of(tree)))}


def _is_of_the_environment(node: ast.AST) -> bool:
    """Return True for a use of environment variables."""
    if isinstance(node, ast.ImportFrom):
        return node.module in ("os", "posix") and any(alias.name in ENVIRONMENT_NAMES for alias in node.names)
    return isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES


PRIVATE_IN_TORCH = re.compile(r"torch\._(?!_)|Variable\._|functional\._|from torch\S* import _")


def test_what_is_private_in_torch_is_used_in_one_file() -> None:
    assert {module for module, text in SOURCES.items() if PRIVATE_IN_TORCH.search(text)} == {
        "utils.torch_internals"
    }
    # which torch runs without this package
    assert [module for module, text in SOURCES.items() if "_rendezvous_handlers" in text] == ["interop.autoload"]
    # of torch.distributed, which utils do not import
    of_groups = [module for module, text in SOURCES.items() if "_new_process_group_helper" in text]
    assert of_groups == ["interop.backend_override"]


def test_what_is_asked_of_a_gpu_is_asked_in_one_file() -> None:
    assert modules_with(_is_of_cuda) == {"utils.device"}


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
    openings = {module: ast.get_docstring(tree) or "" for module, tree in trees().items()}
    assert [module for module, opening in openings.items() if SOURCES[module].strip() and not opening] == []
    long = {module for module, source in SOURCES.items() if len(source.splitlines()) > LONGEST}
    assert {module for module in long if WHY_LONG not in openings[module]} == set()


def test_folders_have_few_files() -> None:
    counts = Counter(path.parent for path in ROOT.rglob("*.py"))
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_no_two_files_or_classes_of_a_package_have_one_name() -> None:
    names: Counter[tuple[str, str]] = Counter()
    for module, tree in trees().items():
        package = module.partition(".")[0]
        classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        names.update((package, name) for name in classes if not name.startswith("_"))
        if module not in PACKAGES:
            names[package, f"{module.rpartition('.')[2]}.py"] += 1
    assert {name: count for name, count in names.items() if count > 1} == {}


STARTS_NOTHING = """
import sys, threading
import axonmpi as ax
import torch
assert "mpi4py.MPI" not in sys.modules, "MPI was loaded"
assert "isal" not in sys.modules, "isal was loaded"
imported = {name for name in sys.modules if name.startswith("axonmpi.")}
assert not any(name.startswith(("axonmpi.backends", "axonmpi.comm", "axonmpi.fsdp")) for name in imported), imported
assert not torch.cuda.is_initialized(), "CUDA was initialised"
assert threading.active_count() == 1, threading.enumerate()
assert not ax.is_initialized()
ax.World.mock(2)
ax.ReduceOp.SUM, ax.GradSyncStrategy.OVERLAPPED, ax.ProcessGroup.mock()
assert "mpi4py.MPI" not in sys.modules, "mock ranks have loaded MPI"
assert threading.active_count() == 1, threading.enumerate()
assert "mpi4py" not in sys.modules, "mpi4py was loaded"
assert "pytest" not in sys.modules, "pytest was loaded"
missing = [name for name in dir(ax) if not hasattr(ax, name)]
assert not missing and {"DDP", "fsdp", "rank"} < set(dir(ax)), missing
try:
    ax.ddpp
except AttributeError as error:
    assert str(error) == "module 'axonmpi' has no attribute 'ddpp'"
else:
    raise AssertionError("a name that is not there")
"""


def test_importing_starts_nothing() -> None:
    done = run_alone(STARTS_NOTHING, "-W", "error")
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
        ("backends.contract", "groups", False),
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
    import_module("axonmpi.data"), importlib.import_module(f".{name}", "axonmpi")
class Loaded:
    import mpi4py
"""
    tree, module = ast.parse(source), "backends.connection.arena"
    own = ["backends.connection.segment", "backends.connection.barrier", "errors", "groups.world", "comm"]
    expected = ["typing", *(f"axonmpi.{each}" for each in own), "mpi4py", "axonmpi.data", *["mpi4py"] * 2]
    assert sorted(imports_of(nodes_of(tree), module)) == sorted(expected)
    assert sorted(imports_of(nodes_of(tree, at_start=True), module)) == sorted(expected[:-3])
    assert imports_of(ast.parse("from .wrapper import X").body, "ddp") == ["axonmpi.ddp.wrapper"]
