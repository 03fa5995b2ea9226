"""The life cycle: use before it begins and after it has ended, beginning twice, arguments that there are not."""

import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest
import torch
from helpers.compare import refused

import axonmpi as ax
from axonmpi import CommunicatorError, ProcessGroup, World
from axonmpi.testing import run_ranks

QUESTIONS: tuple[Callable[[], object], ...] = (
    ax.get_rank,
    ax.get_world_size,
    ax.get_local_rank,
    ax.get_local_world_size,
    ax.get_node_rank,
    ax.get_num_nodes,
    ax.rank,
    ax.world_size,
    ax.is_main_process,
)
OPERATIONS: tuple[Callable[[ProcessGroup | None], object], ...] = (
    lambda g: ax.all_reduce(torch.ones(2), group=g),
    lambda g: ax.all_reduce(torch.ones(2), group=g, async_op=True),
    lambda g: ax.all_reduce_mean(torch.ones(2), g),
    lambda g: ax.broadcast(torch.ones(2), g),
    lambda g: ax.all_gather(torch.ones(2), g),
    lambda g: ax.reduce_scatter_sum(torch.ones(2), g),
    lambda g: ax.reduce(torch.ones(2), 0, group=g),
    lambda g: ax.gather_tensor(torch.ones(2), group=g),
    lambda g: ax.scatter_tensor(torch.ones(2), group=g),
    lambda g: ax.all_to_all([torch.ones(2)] * (g.size if g else 1), g),
    lambda g: ax.recv(torch.ones(2), 0, g),
    lambda g: ax.isend(torch.ones(2), 0, g),
    lambda g: ax.irecv(torch.ones(2), 0, g),
    lambda g: ax.barrier(g),
    lambda g: ax.sync_gradient(torch.ones(2), g),
    lambda g: ax.sync_gradients([torch.ones(2)], g),
    lambda g: ax.sync_gradients([], g),
    lambda g: ax.broadcast_object(1, group=g),
    lambda g: ax.all_gather_object(1, g),
)


@pytest.fixture
def _no_world() -> Iterator[None]:
    """Begins without a world and ends without one."""
    assert not ax.is_initialized()
    yield
    ax.destroy_process_group()


@pytest.mark.usefixtures("_no_world")
def test_before_the_beginning() -> None:
    questions = (*QUESTIONS, ax.get_world, lambda: ax.new_group([0]), *(partial(op, None) for op in OPERATIONS))
    message = r"no process group yet: call axonmpi\.init_process_group\(\) first"
    refused(CommunicatorError, *((question, message) for question in questions))
    ax.destroy_process_group()


@pytest.mark.usefixtures("_no_world")
def test_beginning_twice_and_again_after_the_end() -> None:
    for _ in range(2):
        world = ax.init_process_group("mock")
        assert (ax.is_initialized(), ax.get_world()) == (True, world)
        again = (lambda: ax.init_process_group("mock"), r"initialised already; call axonmpi\.destroy_process_g")
        refused(CommunicatorError, again, again)
        with ThreadPoolExecutor() as other_thread:
            sizes = ax.get_world_size(), world.size, other_thread.submit(ax.get_world_size).result()
        assert (sizes, ax.all_gather_object("x")) == ((1, 1, 1), ["x"])
        ax.destroy_process_group()
        ax.destroy_process_group()
        assert not ax.is_initialized()


@pytest.mark.usefixtures("_no_world")
def test_the_first_world_is_the_default() -> None:
    """However it was made; until it is closed, however that is done."""
    for end in (World.close, lambda world: ax.destroy_process_group()):
        first, second = World.init("mock"), World.init("mock")
        World.mock()
        assert ax.DistributedDataParallel(torch.nn.Linear(2, 1)).process_group is first.default_group
        refused(CommunicatorError, (lambda: ax.init_process_group("mock"), "initialised already"))
        second.close()
        assert ax.is_initialized()
        end(first)
        assert not ax.is_initialized()
        refused(CommunicatorError, (first.default_group.barrier, "closed"))


@pytest.mark.usefixtures("_no_world")
def test_after_the_end() -> None:
    world = ax.init_process_group("mock")
    part = world.new_group([0])
    ax.all_reduce(torch.ones(2), group=part)
    ax.destroy_process_group()
    calls = [partial(operation, group) for operation in OPERATIONS for group in (world.default_group, part)]
    refused(
        CommunicatorError,
        *((call, r"it was closed by destroy_process_group\(\)") for call in calls),
        (lambda: world.new_group([0]), "it was closed"),
        *((question, "no process group yet") for question in QUESTIONS),
    )
    world.close()


@pytest.mark.usefixtures("_no_world")
def test_arguments_of_the_beginning() -> None:
    before = "mpi4py.MPI" in sys.modules
    refused(
        ValueError,
        (lambda: ax.init_process_group("gloo"), "backend: expected one of .*'mpi'.*'mock'.* got 'gloo'"),
        *(
            (
                partial(ax.init_process_group, "mpi", method),
                f"init_method: expected .*mpi://.*env://.*got '{method}'",
            )
            for method in ("tcp://localhost:1234", "file:///tmp/x", "")
        ),
        *(
            (
                partial(ax.init_process_group, backend, timeout=timeout),
                "timeout: expected a positive number .*, a timedelta or None, got",
            )
            for timeout in (0, -1, float("nan"), "5")
            for backend in ("mpi", "mock")
        ),
    )
    assert ("mpi4py.MPI" in sys.modules, ax.is_initialized()) == (before, False)


def test_worlds_and_groups_of_wrong_parts() -> None:
    for make in (World.mock, ax.MockBackend.create_world):
        sizes = (0, -1, 1.5, "2", True, None)
        refused(
            ValueError, *((partial(make, size), "size: expected a positive number of ranks, got") for size in sizes)
        )
    refused(
        (TypeError, ValueError),
        (lambda: ProcessGroup("mpi"), r"backend: expected an axonmpi\.Backend, got str"),
        (lambda: ProcessGroup([0, 1]), r"got list; world\.new_group\(ranks\) makes a group of some ranks"),
        (lambda: ProcessGroup(None), "a group without a backend needs its ranks and the own rank"),
    )


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_a_second_world_and_a_closed_group_in_a_job_that_runs(world) -> None:
    other = World.init("mock")
    assert ax.get_world() is world
    other.close()
    refused(CommunicatorError, (lambda: ax.init_process_group("mock"), "initialised already"))
    assert ax.get_world_size() == world.size
    part = world.new_group(range(world.size))
    part.close()
    closed = "this group cannot be used: it was closed"
    refused(CommunicatorError, *((partial(operation, part), closed) for operation in OPERATIONS))
    if world.default_group.backend.name != "mock":
        message = r"fail\(\) is for mock ranks; a rank that raises under MPI ends the job"
        refused(TypeError, (lambda: world.fail(RuntimeError("broken")), message))
    assert ax.all_gather_object(1) == [1] * world.size


@pytest.mark.ranks(2, 4)
def test_a_world_closes_the_worlds_that_it_has_made(world) -> None:
    known = world.groups
    part = world.subworld(2)
    assert (part is None) == (world.rank >= 2)
    world.close_groups(known)
    assert world.groups == known
    if part is not None:
        with pytest.raises(CommunicatorError, match="closed"):
            part.default_group.all_reduce_sum(torch.ones(1))
    world.barrier()


def rank_in_child(_: object = None) -> str:
    try:
        return str(ax.get_rank())
    except CommunicatorError as error:
        return str(error)


def test_a_child_of_a_rank_is_told_so() -> None:
    """As a worker of a DataLoader is that is spawned."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        message = pool.submit(rank_in_child).result(timeout=60)
    assert "a worker of a DataLoader" in message
    assert "hand it to the child" in message


def test_groups_made_in_a_loop_are_warned_of_once() -> None:
    def many(world: World) -> None:
        for group in [world.new_group([0, 1]) for _ in range(120)]:
            group.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, many)
    assert [str(warning.message)[:10] for warning in caught] == ["100 groups"] * 2
