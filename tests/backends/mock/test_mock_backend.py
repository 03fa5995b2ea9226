"""The mock's own features: its log, ranks that fail, time limits, and being used by plain threads."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers.compare import refused

import axonmpi as ax
from axonmpi import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    MockBackend,
    ProcessGroup,
    RankFailedError,
    ReduceOp,
    World,
)
from axonmpi.backends.mock import mock_backend as mock
from axonmpi.backends.mock.mock_backend import LoggedCall
from axonmpi.testing import run_ranks

# ---- the log ----------------------------------------------------------------------------------------------


def test_each_operation_is_one_entry() -> None:
    log = (group := ProcessGroup.mock()).backend.log
    group.all_reduce(tensor := torch.ones(2, 3), ReduceOp.MAX)
    group.broadcast(tensor, 0)
    group.all_gather(tensor, 1)
    group.barrier()
    work = group.irecv(tensor, 0)
    group.isend(tensor, 0, tag=3).wait()
    group.isend(tensor, 0).wait()
    work.wait()
    group.all_reduce(tensor[0], async_op=True).wait()
    assert log == [
        LoggedCall("all_reduce", torch.float32, (2, 3), ReduceOp.MAX, None, 24, (0,)),
        LoggedCall("broadcast", torch.float32, (2, 3), None, 0, 24, (0,)),
        LoggedCall("all_gather", torch.float32, (2, -1), None, None, 24, (0,)),
        LoggedCall("barrier", None, (), None, None, 0, (0,)),
        LoggedCall("recv", torch.float32, (2, 3), None, 0, 24, (0,)),
        LoggedCall("send", torch.float32, (2, 3), None, 0, 24, (0,)),
        LoggedCall("send", torch.float32, (2, 3), None, 0, 24, (0,)),
        LoggedCall("all_reduce", torch.float32, (3,), ReduceOp.SUM, None, 12, (0,)),
    ]
    log.clear()
    group.all_gather_object({"a": 1})  # small objects are two operations
    group.broadcast_object({"a": 1})
    assert [entry.operation for entry in log] == ["all_gather"] * 2 + ["broadcast"] * 2


def test_gradients_are_reduced_by_dtype_and_in_buckets_of_25_mebibytes() -> None:
    """A single one is not copied into a bucket; no gradients are one empty reduction."""
    log = (group := ProcessGroup.mock()).backend.log
    large = 20 * 2**20 // 4
    for sizes, shapes in (
        ([(number,) for number in range(1, 101)], [(5050,)]),
        ([(large,), (3,), (large,), (1, 5), (1,)], [(large + 3,), (large + 1,), (1, 5)]),
        ([(2, 3)], [(2, 3)]),
        ([], [(0,)]),
    ):
        log.clear()
        ax.sync_gradients([torch.ones(size).to(torch.float64 if len(size) == 2 else None) for size in sizes], group)
        assert [(entry.operation, entry.shape, entry.op) for entry in log] == [
            ("all_reduce", shape, ReduceOp.AVERAGE) for shape in shapes
        ]


def test_a_log_keeps_the_latest_operations(monkeypatch) -> None:
    monkeypatch.setattr(mock, "MAX_LOGGED", 10)
    log = (group := ProcessGroup.mock()).backend.log
    for number in range(1, 100):
        group.all_reduce(torch.ones(number))
        assert [entry.shape for entry in log] == [(n,) for n in range(number - len(log) + 1, number + 1)]
        assert min(number, 5) <= len(log) <= 10
    assert group.backend.log is log


def test_entries_name_the_ranks_of_the_group() -> None:
    def body(world: World) -> list[tuple[int, ...]]:
        part = world.new_group([2, 0])
        if part.contains(world.rank):
            part.barrier()
            return [entry.ranks for entry in part.backend.log]
        return []

    assert run_ranks(3, body) == [[(2, 0)], [], [(2, 0)]]


# ---- ranks that fail --------------------------------------------------------------------------------------


def test_a_rank_that_fails_releases_those_that_wait() -> None:
    backends = MockBackend.create_world(3)
    waiting = threading.Barrier(3)

    def wait(operation: Callable[[], None]) -> BaseException:
        waiting.wait()
        with pytest.raises(RankFailedError, match=r"rank 2 failed while .*ValueError: no more memory") as caught:
            operation()
        return caught.value

    problem = ValueError("no more memory")
    with ThreadPoolExecutor(2) as threads:
        operations = partial(backends[0].all_reduce, torch.ones(2)), partial(backends[1].recv, torch.zeros(1), 2, 5)
        errors = threads.map(wait, operations)
        waiting.wait()
        backends[2].fail(problem)
        for error, words in zip(errors, ("all_reduce(float32 [2], SUM)", "recv(tag=5)"), strict=True):
            assert (error.__cause__, words in str(error)) == (problem, True)


def test_ranks_that_wait_later_are_released_too() -> None:
    """But what has come already is delivered."""
    backends = MockBackend.create_world(2)
    backends[0].send(torch.ones(1), 1)
    backends[0].fail(KeyError("gone"))
    backends[1].recv(tensor := torch.zeros(1), 0)
    assert tensor.item() == 1
    failed = r"rank 0 failed while .* KeyError: 'gone'"
    refused(
        RankFailedError,
        (lambda: backends[1].barrier(), failed),
        (lambda: backends[1].recv(torch.zeros(1), 0), failed),
        (lambda: backends[1].barrier(async_op=True).wait(), failed),
        (lambda: backends[1].irecv(torch.zeros(1), 0).wait(), failed),
    )


def test_a_rank_that_was_released_meets_nobody_any_more() -> None:
    """What the others still do there is another operation than the one that it begins next."""
    first, second, failed = MockBackend.create_world(3)
    tensor = torch.ones(1)

    def gather(backend: MockBackend) -> ax.Work | None:
        return backend.all_gather_into(torch.zeros(3), tensor, [1, 1, 1], async_op=True)

    gathers = [gather(first), gather(failed)]
    failed.fail(KeyError("gone"))
    with pytest.raises(RankFailedError):
        gathers[0].wait()
    gathers.append(gather(second))
    sums = [backend.all_reduce(tensor.clone(), async_op=True) for backend in (first, failed)]
    refused(RankFailedError, *((work.wait, "rank 2 failed .*gone") for work in (*gathers[1:], *sums)))


def test_a_mistake_on_one_rank_releases_the_others_in_all_groups() -> None:
    """And names the rank by its number in the world."""

    def body(world: World) -> None:
        part = world.new_group([1, 2])
        tensor = torch.ones(2, device="meta" if world.rank == 1 else "cpu")
        with pytest.raises(RankFailedError, match=r"rank 1 failed while all_reduce.* waited"):
            ax.all_reduce(tensor, group=part if world.rank else None)

    refused(ValueError, (lambda: run_ranks(3, body), "got one on meta"))


def test_the_first_failure_is_the_one_that_is_named() -> None:
    backends = MockBackend.create_world(3)
    backends[1].fail(KeyError("first"))
    backends[1].fail(KeyError("second"))
    backends[0].abort(3)
    refused(RankFailedError, (backends[2].barrier, r"rank 1 failed while .*first"))


def test_ranks_that_have_left_are_named_by_their_numbers_in_the_world() -> None:
    *worlds, last = World.mock(4).peers
    with ThreadPoolExecutor(3) as threads:
        made = threads.map(lambda world: world.new_group([3, 1, 2]), worlds)
        group = last.new_group([3, 1, 2])
        list(made)
    for world in worlds:
        world.default_group.backend.leave()
    refused(CollectiveMismatchError, (group.barrier, r"^barrier\(\) waits for ranks 1, 2, which have returned"))
    worlds[1].fail(KeyError("gone"))  # says more than that rank 2 has returned
    refused(RankFailedError, (group.barrier, "rank 1 failed while"))


# ---- time limits ------------------------------------------------------------------------------------------


def test_a_rank_gives_up_after_the_time_limit_of_its_world() -> None:
    backends = MockBackend.create_world(3, timeout=0.05)
    refused(
        CollectiveTimeoutError,
        (lambda: backends[1].all_reduce(torch.ones(2)), r"all_reduce\(float32 \[2\], SUM\) waited .* ranks 0, 2"),
        (lambda: backends[1].recv(torch.ones(2), 2, 7), r"recv\(tag=7\) waited 0\.05 s for rank 2"),
        (lambda: backends[1].barrier(async_op=True).wait(), r"barrier\(\) waited 0\.05 s for ranks 0, 2"),
    )
    backends[1].close()


def test_the_limit_is_that_of_the_groups_too() -> None:
    first, second = World.mock(2).peers
    with ThreadPoolExecutor(1) as other:
        other.submit(second.new_group, [1, 0])
        group = first.new_group([1, 0])
    group.backend.rendezvous.world.timeout = 0.05
    refused(CollectiveTimeoutError, (group.barrier, r"waited 0\.05 s for rank 1"))


# ---- worlds -----------------------------------------------------------------------------------------------


def test_worlds_do_not_meet() -> None:
    first, second = World.mock(1), World.mock(1)
    assert first.default_group.all_gather_object("first") == ["first"]
    assert second.default_group.all_gather_object("second") == ["second"]
    first.close()
    assert second.default_group.all_gather_object("second") == ["second"]


def test_what_ranks_exchange_is_copied() -> None:
    """A rank that changes its tensor afterwards changes nobody else's."""

    def body(world: World) -> list[float]:
        own = torch.full((2,), float(world.rank))
        gathered = ax.all_gather(own)
        received = ax.all_to_all([own] * world.size)
        own.fill_(99)
        ax.all_gather(own).fill_(-1)
        ax.barrier()
        return [*gathered.tolist(), *(part[0].item() for part in received)]

    assert run_ranks(2, body) == [[0, 0, 1, 1, 0, 1]] * 2


def test_messages_are_received_from_a_named_rank() -> None:
    backend = World.mock(1).default_group.backend
    received = torch.zeros(1)
    refused(
        ax.CommunicatorError,
        (lambda: backend.irecv(received, None), "the mock backend receives from a named rank only"),
    )
    backend.isend(torch.ones(1), 0)
    backend.irecv(received, 0).wait()
    assert received.item() == 1


def test_threads_end_with_their_group() -> None:
    world = World.mock(1)
    before = set(threading.enumerate())
    for group in (world.default_group, world.new_group([0])):
        group.all_reduce(torch.ones(1), async_op=True).wait()
    began = set(threading.enumerate()) - before
    world.close()
    assert [thread.is_alive() for thread in began] == [False, False]


def test_closed_groups_are_forgotten():
    def body(world):
        group = world.new_group([1, 0])
        group.barrier()
        room = weakref.ref(group.backend.rendezvous)
        group.close()
        world.close_groups()
        del group
        world.barrier()
        if world.rank == 0:  # the ranks have one collector
            gc.collect()
        world.barrier()
        return room() is None

    assert run_ranks(2, body) == [True, True]


def test_a_message_waits_for_a_rank_that_is_slow_to_make_its_group() -> None:
    def exchange(world):
        received = []
        for number in range(40):
            group = world.new_group([0, 1])
            if world.rank == number % 2:
                group.send(torch.tensor([number]), 1 - world.rank)
            else:
                group.recv(message := torch.empty(1, dtype=torch.int64), 1 - world.rank)
                received.append(message.item())
            group.close()
            world.close_groups()
            del group
        return received

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that ranks overtake each other at any place
    try:
        assert run_ranks(2, exchange) == [list(range(1, 40, 2)), list(range(0, 40, 2))]
    finally:
        sys.setswitchinterval(before)
