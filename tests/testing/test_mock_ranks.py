"""run_ranks: results, failures and time-outs of functions on mock ranks."""

import sys
import threading
import time

import pytest
import torch
from helpers.compare import assert_said

import axonmpi as ax
from axonmpi.errors import CollectiveMismatchError, CollectiveTimeoutError
from axonmpi.testing import mock_ranks, run_ranks


def _message(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_results_are_in_rank_order_and_each_rank_has_its_world_as_default():
    def body(world, a, b):
        ax.all_reduce(tensor := torch.tensor([ax.get_rank() + 1.0]))
        return world.rank, world.size, a + b, tensor.item()

    assert run_ranks(3, body, 4, 5) == [(rank, 3, 9, 6.0) for rank in range(3)]
    assert run_ranks(2, lambda world: world.barrier(), timeout=None) == [None, None]
    assert not ax.is_initialized()


@pytest.mark.parametrize("original", [KeyError("from 1"), SystemExit(3)])
def test_ranks_that_fail_release_the_others_and_the_lowest_ones_own_exception_is_raised(original):
    def body(world):
        if world.rank in (1, 3):
            raise original if world.rank == 1 else ValueError("from 3")
        world.barrier()

    with pytest.raises(type(original)) as caught:
        run_ranks(4, body)
    assert caught.value is original
    if sys.version_info >= (3, 11) or isinstance(original.args[0], str):  # before, only texts can have a note
        assert "raised on ranks 1, 3 of 4" in _message(caught.value)


def test_time_out_shows_where_each_rank_is_and_releases_them():
    released = []

    def wait_in_vain(world):
        try:
            world.barrier()
        except ax.errors.RankFailedError:
            released.append(world.rank)
            raise

    def body(world):
        if world.rank == 1:
            world.default_group.recv(torch.zeros(1), 0)
        wait_in_vain(world)

    with pytest.raises(CollectiveTimeoutError, match="ranks 0, 1, 2 of 3") as caught:
        run_ranks(3, body, timeout=0.3)
    assert_said(str(caught.value), "wait_in_vain", "stack of ranks 0, 2")  # the same stack once
    assert_said(str(caught.value), "axonmpi/testing/mock_ranks.py", times=0)
    assert sorted(released) == [0, 2]


OPERATIONS_THAT_WAIT = {
    "all_reduce(float32 [3], SUM)": lambda world: ax.all_reduce(torch.ones(3)),
    "barrier()": lambda world: ax.barrier(async_op=True).wait(),
    "recv(tag=7)": lambda world: ax.recv(torch.ones(3), 1, tag=7),
    "recv(tag=8)": lambda world: ax.irecv(torch.ones(3), 1, tag=8).wait(),
    "all_reduce(int64 [2], MAX)": lambda world: ax.DDP(torch.nn.Linear(2, 1)),
}


@pytest.mark.parametrize("operation", OPERATIONS_THAT_WAIT)
def test_a_rank_that_waits_for_one_that_has_returned_is_told_at_once(operation):
    with pytest.raises(CollectiveMismatchError) as caught:
        run_ranks(3, lambda world: world.rank == 1 or OPERATIONS_THAT_WAIT[operation](world))
    assert f"{operation} waits for rank 1, which has returned and calls nothing more" in str(caught.value)
    assert "raised on ranks 0, 2 of 3 mock ranks" in _message(caught.value)


@pytest.mark.parametrize(("steps", "waiting"), [(0, "recv(tag="), (1, "receiving from stage 2 at stage 1 ")])
def test_stages_of_a_pipeline_that_wait_for_one_that_has_returned_are_told_at_once(steps, waiting):
    def body(world):
        def loss(output, target):
            if own.steps == steps:
                raise ValueError("no loss")
            return (output - target).square().mean()

        modules = [torch.nn.Linear(2, 2) for _ in range(3)]
        own = ax.Pipeline.from_modules(modules, world.default_group, num_microbatches=4, loss_fn=loss)
        try:
            for _ in range(steps + 1):
                own.train_step(torch.ones(4, 2), torch.ones(4, 2))
        except ValueError:
            assert world.rank == 2  # and returns

    with pytest.raises(CollectiveMismatchError, match="waits for rank 2, which has returned") as caught:
        run_ranks(3, body)
    assert str(caught.value).startswith(waiting)
    assert "raised on rank 1 of 3" in _message(caught.value)  # rank 0 waits for rank 1, which has failed


def test_a_message_that_never_comes_is_done():
    def body(world):
        if world.rank == 0:
            work = ax.irecv(torch.zeros(1), 1)
            while not work.done():
                time.sleep(0)
            with pytest.raises(CollectiveMismatchError, match="waits for rank 1, which has returned"):
                work.wait()

    run_ranks(2, body)


def test_what_a_rank_has_begun_before_it_returned_is_done():
    def body(world):
        group = world.new_group([1, 0])
        if world.rank == 1:
            ax.isend(torch.ones(1), 0)
            ax.isend(torch.ones(1), 1, group)
            return [ax.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(20)]
        message = torch.zeros(1)
        sums = [torch.ones(1) for _ in range(20)]
        for each in sums:
            ax.all_reduce(each, group=group)
        ax.recv(message, 1)
        ax.recv(message, 0, group)
        with pytest.raises(CollectiveMismatchError, match=r"all_reduce.* waits for rank 1, which has returned"):
            ax.all_reduce(message, group=group)
        return torch.cat(sums).tolist()

    assert run_ranks(2, body)[0] == [2.0] * 20


def test_a_failure_before_the_time_out_is_what_is_raised(monkeypatch):
    monkeypatch.setattr(mock_ranks, "_RELEASE_SECONDS", 0.0)  # nothing can release rank 0
    stay = threading.Event()

    def body(world):
        if world.rank == 0:
            stay.wait()
        raise ValueError("rank 1")

    with pytest.raises(ValueError, match="rank 1") as caught:
        run_ranks(2, body, timeout=0.2)
    stay.set()
    assert "rank 0 of 2 mock ranks did not end" in _message(caught.value)


@pytest.mark.parametrize(
    ("count", "seconds", "said"),
    [
        *((count, 60, "positive number of ranks") for count in (0, -1, True, 1.5)),
        *((1, seconds, "timeout: expected a positive") for seconds in (0, -1)),
    ],
)
def test_wrong_numbers_of_ranks_and_time_outs_are_refused(count, seconds, said):
    with pytest.raises(ValueError, match=said):
        run_ranks(count, print, timeout=seconds)


@pytest.mark.parametrize(
    ("error", "args"),
    [(ValueError("what went wrong", 5), ("what went wrong\non rank 1", 5)), (OSError(2), (2,))],
)
def test_before_python_3_11_a_note_is_the_tail_of_the_message(monkeypatch, error, args):
    monkeypatch.setattr("sys.version_info", (3, 10, 0))
    mock_ranks._add_note(error, "on rank 1")
    assert error.args == args
