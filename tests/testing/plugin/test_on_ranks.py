"""The plugin used as its users do: these tests run on mock ranks, and on real ones under mpirun."""

import pytest
import torch

import axonmpi as ax
from axonmpi.testing import parallel_assert


@pytest.mark.ranks(1, 2, 4)
def test_the_world_has_exactly_the_ranks_of_the_marker(world, group, rank_count):
    assert world.size == group.size == rank_count == ax.get_world_size()
    assert ax.all_gather_object(world.rank) == list(range(rank_count))
    assert group is world.default_group
    parallel_assert(world.size > 0, "a world is never empty")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("factor", [3, 5])
def test_a_test_with_other_parameters_need_not_ask_for_its_world(factor):
    ax.all_reduce(tensor := torch.tensor([factor * ax.get_rank()]))
    assert tensor.item() == factor * (ax.get_world_size() - 1)


@pytest.mark.ranks(2)
def test_the_shared_folder_is_the_same_on_all_ranks(world, shared_tmp_path):
    (shared_tmp_path / str(world.rank)).write_text("here")
    ax.barrier()
    assert sorted(path.name for path in shared_tmp_path.iterdir()) == ["0", "1"]


def test_an_unmarked_test_that_asks_for_a_world_gets_one_rank(world):
    assert world.size == 1


def test_an_unmarked_test_finds_the_library_as_in_a_plain_run():
    assert not ax.is_initialized()


@pytest.mark.ranks(4)
def test_parallel_assert_raises_on_all_ranks(world):
    with pytest.raises(AssertionError) as caught:
        parallel_assert(world.rank == 0, "must be rank 0")
    assert str(caught.value) == "ranks 1, 2, 3 of 4: must be rank 0"
    group = world.new_group([1, 3])
    if group.contains(world.rank):
        with pytest.raises(AssertionError) as caught:
            parallel_assert(False, f"I am {world.rank}", group)
        assert str(caught.value) == "rank 0 of 2: I am 1\nrank 1 of 2: I am 3"
