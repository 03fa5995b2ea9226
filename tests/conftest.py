"""Settings of all tests: which run on real ranks, on which cores, and with which of them to spare."""

import argparse
import gc
import os
import random
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from helpers.doubled_worlds import doubled
from helpers.nodes import Nodes
from hypothesis import settings

import axonmpi as ax
from axonmpi.backends.mock.mock_backend import MockBackend
from axonmpi.groups.world import current_world
from axonmpi.launch.cpu import CoreShare, usable_cores
from axonmpi.launch.launcher_variables import launched_ranks
from axonmpi.testing.plugin.markers import marked_rank_count

pytest_plugins = ["pytester"]

settings.register_profile("no deadline", deadline=None)  # an example takes as long as the machine is busy
settings.load_profile("no deadline")

PINS = (Path(__file__).parents[1] / "constraints.txt").read_text(encoding="utf-8").split()
ABOVE_THE_BACKENDS = (
    *("backends/nccl/test_carriers", "backends/nccl/test_double", "backends/nccl/test_stream_order"),
    *("checkpoint/shards/", "checkpoint/test_layouts", "checkpoint/tools/", "across_ranks/", "ddp/", "fsdp/"),
    *(
        "domain/test_along",
        "domain/test_dropout",
        "domain/test_losses",
        "domain/test_norms",
        "domain/test_products",
    ),
    *("domain/test_reductions", "domain/test_resampling", "domain/test_shapes"),
    *("data/", "groups/", "jobs/gpu/", "jobs/soak/", "others/original/", "pipeline/", "tensor/", "test_comm"),
    *("test_habits", "test_mesh", "test_public_calls", "test_wrong_types", "train/", "wrapping/"),
)
"""Beginnings of the paths of tests of code that is written once for all backends."""
START_JOBS = (
    *("backends/connection/test_settings", "cli/", "data/test_jobs", "docs/", "fsdp/test_limits", "interop/"),
    *("jobs/", "launch/", "observe/", "others/", "testing/", "train/test_command"),
)
"""Beginnings of the paths of tests that start jobs, which may use all cores."""
ALL_CORES = usable_cores()


def is_in(item: pytest.Item, places: tuple[str, ...]) -> bool:
    """Return True for a test below one of these beginnings of paths."""
    return Path(item.path).relative_to(Path(__file__).parent).as_posix().startswith(places)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--overlap",
        choices=("two", "always", "never"),
        default="two",
        help="which tests above the backends have collectives beside the computation, as with cores to spare: "
        "those on two mock ranks and on other numbers of real ranks, all, or none",
    )
    parser.addoption("--seed", type=int, help="of all that tests draw at random; drawn itself if not given")
    parser.addoption(
        "--over-double",
        action="store_true",
        help="mock ranks have pretended GPUs whose collectives go by a double of NCCL",
    )
    if not pluginmanager.hasplugin("xdist"):  # after -p no:xdist, what setup.cfg tells it is for nobody
        for option in ("--numprocesses", "--dist"):
            parser.addoption(option, help=argparse.SUPPRESS)


# ---- which tests run ------------------------------------------------------------------------------------------


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Under mpirun, leave out files without a test on ranks: all ranks would import what these need."""
    if launched_ranks() == 1 or not collection_path.name.startswith("test_"):
        return None
    return True if "pytest.mark.ranks(" not in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under mpirun, leave out what plain pytest has tested just as well."""
    if (size := launched_ranks()) > 1:
        config.hook.pytest_deselected(items=[item for item in items if not needs_real_ranks(item, size)])
        items[:] = [item for item in items if needs_real_ranks(item, size)]


def needs_real_ranks(item: pytest.Item, size: int) -> bool:
    """Say whether a session on `size` ranks runs a test.

    Sessions on 2, 4, 8 ... ranks run each case once between them: each those for more than half of its ranks, and
    the one on two ranks those for a single rank, too.
    """
    count = marked_rank_count(item) or 0
    chosen = not is_in(item, ABOVE_THE_BACKENDS) or item.get_closest_marker("real_ranks") is not None
    return chosen and count > (size // 2 if size > 2 else 0)


# ---- what they draw at random ---------------------------------------------------------------------------------


def pytest_sessionstart(session: pytest.Session) -> None:
    """Take the seed of rank 0 on all ranks."""
    if launched_ranks() > 1:
        session.config.option.seed = ax.broadcast_object(session.config.option.seed)


def pytest_report_header(config: pytest.Config) -> str:
    return f"what is drawn at random: --seed {config.option.seed}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of what the test draws, the same on all ranks; a failure shows it."""
    print(f"repeat with --seed {request.config.option.seed}")
    return int(request.config.option.seed)


# ---- on which cores -------------------------------------------------------------------------------------------


def cores_of_mock_ranks() -> set[int]:
    """Return the core of this process of pytest-xdist, or all cores where it is the only process.

    Threads take turns at Python's lock. On several cores they wake up only to find it taken, which costs twice the
    processor time, and half as much time again.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    return {sorted(ALL_CORES)[int(worker) % len(ALL_CORES)]} if worker else set(ALL_CORES)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw a seed; let a process with one core compute with one thread, and lines of several ranks stay whole."""
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(10**6)
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(config.option.seed)
    if len(cores_of_mock_ranks()) < len(ALL_CORES):
        torch.set_num_threads(len(cores_of_mock_ranks()))
    os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Skip a test of a feature that this torch is too old for, as the feature's own error says.

    Never with the torch of the constraints file, which has all features.
    """
    try:
        return (yield)
    except RuntimeError as error:
        if " needs torch " in str(error) and f"torch=={torch.__version__.partition('+')[0]}" not in PINS:
            pytest.skip(str(error))
        raise


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep mock ranks on the cores of this process; jobs may use all cores."""
    if hasattr(os, "sched_setaffinity"):  # not on macOS
        os.sched_setaffinity(0, ALL_CORES if is_in(item, START_JOBS) else cores_of_mock_ranks())


# ---- how they run ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _cores_to_spare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have collectives go beside the computation in some cases, whatever cores this machine has.

    The number of ranks decides, which the id shows: two mock ranks, and any other number of real ranks.
    """
    if not is_in(request.node, ABOVE_THE_BACKENDS):
        return
    overlap = request.config.getoption("--overlap")
    count = marked_rank_count(request.node)
    overlaps = overlap == "always"
    if overlap == "two":
        overlaps = (count == 2) == (launched_ranks() == 1)
    monkeypatch.setattr(MockBackend, "overlaps", overlaps)
    monkeypatch.setattr(CoreShare, "spare", overlaps)
    if world := current_world():  # made before, for all tests with as many ranks
        monkeypatch.setattr(world.default_group.backend, "overlaps", overlaps)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Four namespaces that pass for nodes, of which a job takes the first ones."""
    if (obstacle := Nodes.obstacle()) is not None:
        pytest.skip(obstacle)
    with Nodes(4) as made:
        yield made


@pytest.fixture(autouse=True, scope="module")
def _short_collections() -> None:
    """Spare the garbage collector, which some tests call often, what tests before have left for good."""
    gc.collect()
    gc.freeze()


# ---- over the double of NCCL ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _over_double(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With `--over-double`, or its marker, give mock ranks pretended GPUs."""
    marker = request.node.get_closest_marker
    if not request.config.getoption("--over-double") and marker("over_double") is None:
        yield
        return
    if (refusal := marker("not_over_double")) is not None:
        pytest.skip(*refusal.args)
    if marker("compares_calls") is not None:
        monkeypatch.setenv("AXONMPI_DEBUG", "1")
    with doubled(request.getfixturevalue("seed")):
        yield
