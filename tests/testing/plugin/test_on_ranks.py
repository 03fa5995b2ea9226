"""The plugin used as its users do: these tests run on mock ranks, and on real ones under mpirun."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import axonmpi as ax
from axonmpi.testing import parallel_assert

COUNTS = [1, 2, 4]


@pytest.mark.ranks(*COUNTS)
def test_the_world_has_exactly_the_ranks_of_the_marker(world, group, rank_count):
    assert world.size == group.size == rank_count == ax.get_world_size()
    assert ax.all_gather_object(world.rank) == list(range(rank_count))
    assert group is world.default_group


@pytest.mark.ranks(2)
def test_a_test_need_not_ask_for_its_world():
    tensor = torch.ones(3)
    ax.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("factor", [3, 5])
def test_with_other_parameters(world, factor):
    tensor = torch.tensor([factor * world.rank])
    ax.all_reduce(tensor)
    assert tensor.item() == factor * (world.size - 1) * world.size // 2


@pytest.mark.ranks(2)
def test_the_shared_folder_is_the_same_on_all_ranks(world, shared_tmp_path):
    (shared_tmp_path / str(world.rank)).write_text("here")
    ax.barrier()
    assert sorted(path.name for path in shared_tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.ranks(*COUNTS)
@settings(max_examples=20, database=None)
@given(values=st.lists(st.integers(-1000, 1000), max_size=5))
def test_all_ranks_see_the_same_examples(world, values):
    assert ax.all_gather_object(values) == [values] * world.size


class TestInAClass:
    @pytest.mark.ranks(2)
    @settings(max_examples=5, database=None)
    @given(number=st.integers())
    def test_examples_in_a_method(self, world, number):
        assert ax.all_gather_object(number) == [number] * 2

    @pytest.mark.ranks(2)
    def test_method(self, group):
        assert group.size == 2


def test_an_unmarked_test_that_asks_for_a_world_gets_one_rank(world):
    assert world.size == 1


def test_an_unmarked_test_finds_the_library_as_in_a_plain_run():
    assert not ax.is_initialized()


@pytest.mark.ranks(*COUNTS)
def test_parallel_assert_passes_where_all_agree(world):
    parallel_assert(world.size > 0, "a world is never empty")


@pytest.mark.ranks(2, 4)
def test_parallel_assert_raises_on_all_ranks(world):
    with pytest.raises(AssertionError) as caught:
        parallel_assert(world.rank == 0, "must be rank 0")
    failed = "rank 1" if world.size == 2 else "ranks 1, 2, 3"
    assert str(caught.value) == f"{failed} of {world.size}: must be rank 0"


@pytest.mark.ranks(4)
def test_parallel_assert_in_a_group_and_with_different_messages(world):
    group = world.new_group([1, 3])
    if group.contains(world.rank):
        with pytest.raises(AssertionError) as caught:
            parallel_assert(False, f"I am {world.rank}", group)
        assert str(caught.value) == "rank 0 of 2: I am 1\nrank 1 of 2: I am 3"
