"""run_ranks: results, failures and time-outs of functions on mock ranks."""

import threading

import pytest
import torch

import axonmpi as ax
from axonmpi.errors import CollectiveTimeoutError
from axonmpi.testing import run_ranks
from axonmpi.testing.mock_ranks import _add_note


def _message(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_results_are_in_rank_order_and_arguments_reach_every_rank():
    assert run_ranks(3, lambda world, a, b: (world.rank, world.size, a + b), 4, 5) == [
        (0, 3, 9),
        (1, 3, 9),
        (2, 3, 9),
    ]


def test_each_rank_has_its_world_as_default():
    def body(world):
        tensor = torch.tensor([ax.get_rank() + 1.0])
        ax.all_reduce(tensor)
        return tensor.item()

    assert run_ranks(4, body) == [10.0] * 4
    assert not ax.is_initialized()


def test_a_failing_rank_releases_the_others_and_its_own_exception_is_raised():
    original = KeyError("rank 2 only")

    def body(world):
        if world.rank == 2:
            raise original
        world.default_group.barrier()

    with pytest.raises(KeyError) as caught:
        run_ranks(3, body)
    assert caught.value is original


def test_the_lowest_rank_that_failed_by_itself_is_raised_and_all_are_named():
    def body(world):
        if world.rank in (1, 3):
            raise ValueError(f"from {world.rank}")
        world.default_group.barrier()

    with pytest.raises(ValueError, match="from 1") as caught:
        run_ranks(4, body)
    assert "raised on ranks 1, 3 of 4" in _message(caught.value)


def test_system_exit_of_a_rank_is_a_failure_like_any_other():
    def body(world):
        if world.rank == 1:
            raise SystemExit(3)
        world.default_group.barrier()

    with pytest.raises(SystemExit) as caught:
        run_ranks(2, body)
    assert caught.value.code == 3


def test_time_out_shows_where_each_rank_is_and_releases_them():
    released = []

    def wait_in_vain(world):
        try:
            world.default_group.barrier()
        except ax.errors.RankFailedError as error:
            released.append(world.rank)
            raise error

    def body(world):
        if world.rank != 1:
            wait_in_vain(world)

    with pytest.raises(CollectiveTimeoutError, match="ranks 0, 2 of 3") as caught:
        run_ranks(3, body, timeout=0.3)
    message = str(caught.value)
    assert message.count("wait_in_vain") > 0
    assert "stack of ranks 0, 2" in message  # both are at the same place, which is printed once
    assert "mock_ranks.py" not in message
    assert sorted(released) == [0, 2]


def test_a_failure_before_the_time_out_is_what_is_raised():
    stay = threading.Event()

    def body(world):
        if world.rank == 0:
            stay.wait()
        raise ValueError("rank 1")

    with pytest.raises(ValueError, match="rank 1") as caught:
        run_ranks(2, body, timeout=0.2)
    stay.set()
    assert "rank 0 of 2 mock ranks did not end" in _message(caught.value)


def test_without_a_limit_it_waits_as_long_as_it_takes():
    assert run_ranks(2, lambda world: world.default_group.barrier(), timeout=None) == [None, None]


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
def test_a_wrong_number_of_ranks_is_refused(count):
    with pytest.raises(ValueError, match="positive number of ranks"):
        run_ranks(count, lambda world: None)


@pytest.mark.parametrize("timeout", [0, -1])
def test_a_wrong_time_out_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout: expected a positive"):
        run_ranks(1, lambda world: None, timeout=timeout)


def test_before_python_3_11_a_note_is_the_tail_of_the_message(monkeypatch):
    monkeypatch.setattr("sys.version_info", (3, 10, 0))
    error = ValueError("what went wrong", 5)
    _add_note(error, "on rank 1")
    assert error.args == ("what went wrong\non rank 1", 5)
    other = OSError(2)
    _add_note(other, "on rank 1")
    assert other.args == (2,)
