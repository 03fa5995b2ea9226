"""A block that one rank runs before the others: its order, and its failures."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.compare import refused
from helpers.limits import limit

import axonmpi as ax
from axonmpi.errors import RankFailedError
from axonmpi.utils.waiting import Backoff, asleep, is_beside_computation, wait_until

PAUSE = Backoff(0, 1e-3)
MINUTE = 60.0


def on_ranks(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.real_ranks(pytest.mark.ranks(2, 4)(test))


def wait_for(*files: Path) -> None:
    assert wait_until(lambda: all(file.exists() for file in files), PAUSE, limit(MINUTE))


def first_in(group: ax.ProcessGroup, local: bool) -> int:
    return group.backend.node_ranks[0] if local else 0


@pytest.fixture
def two_nodes(world, monkeypatch) -> ax.ProcessGroup:
    """All ranks, on two simulated nodes."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", str(world.size // 2))
    return world.new_group(range(world.size))


@on_ranks
@pytest.mark.parametrize("local", [False, True])
def test_the_others_begin_when_the_first_has_ended(two_nodes, shared_tmp_path, local) -> None:
    """The first ranks end their block after all others have come."""
    group, firsts = two_nodes, {0, two_nodes.size // 2} if local else {0}
    here = [shared_tmp_path / f"here {rank}" for rank in range(group.size) if rank not in firsts]
    done = [shared_tmp_path / f"done {rank}" for rank in firsts]
    is_first = group.rank == first_in(group, local)
    assert is_first == (group.rank in firsts)
    if not is_first:
        (shared_tmp_path / f"here {group.rank}").touch()
    with ax.main_process_first(group, local=local):
        if is_first:
            wait_for(*here)
            (shared_tmp_path / f"done {group.rank}").touch()
        else:
            assert all(file.exists() for file in done)
    group.barrier()


@on_ranks
@pytest.mark.parametrize("local", [False, True])
def test_an_error_of_the_first_rank_is_raised_by_all(two_nodes, local) -> None:
    group, ran = two_nodes, []
    failing = group.size // 2 if local else 0  # the first of the second node

    def block() -> None:
        with ax.main_process_first(group, local=local):
            ran.append(group.rank)
            if group.rank == failing:
                raise OSError("no network")

    own = group.rank == failing
    refused(
        OSError if own else RankFailedError,
        (block, "^no network$" if own else f"main_process_first failed on rank {failing}: OSError: no network"),
    )
    assert ran == ([group.rank] if group.rank == first_in(group, local) else [])
    total = torch.ones(1)
    group.all_reduce(total)  # the group can be used
    assert total.item() == group.size


@on_ranks
def test_an_error_of_a_later_rank_is_its_own(group) -> None:
    last = group.size - 1
    try:
        with ax.main_process_first(group):
            if group.rank == last:
                raise OSError("full disk")
    except OSError:
        assert group.rank == last
    else:
        assert group.rank != last
    group.barrier()


@on_ranks
def test_leaving_the_block_early_lets_the_others_begin(world) -> None:
    ran = []

    def block() -> str:
        with ax.main_process_first():
            ran.append("return")
            return "left"

    assert block() == "left"
    for word in ("break", "continue"):
        for _ in range(1):
            with ax.main_process_first(local=True):
                ran.append(word)
                if word == "break":
                    break
                continue
    assert ran == ["return", "break", "continue"]
    ax.barrier()


@on_ranks
def test_an_inner_block_is_a_part_of_the_outer_one(world) -> None:
    other, ran = world.new_group(range(world.size)), []
    with ax.main_process_first(), ax.main_process_first():
        ran.append(1)
    assert ran == [1]
    text = "expected an inner block with the outer block's group and local"
    for arguments in ({"local": True}, {"group": other}):

        def nested(arguments=arguments) -> None:
            with ax.main_process_first(), ax.main_process_first(**arguments):
                ran.append(2)

        refused(
            RankFailedError if world.rank else ValueError,
            (nested, f"failed on rank 0: ValueError: .*{text}" if world.rank else text),
        )
    with ax.main_process_first(other):
        ran.append(3)
    assert ran == [1, 3]
    ax.barrier()


@on_ranks
def test_a_group_of_some_ranks(world) -> None:
    """Its own rank 0 is the first; ranks outside are refused."""
    last = world.size - 1
    group, ran = world.new_group([last]), []
    if world.rank != last:
        refused(ValueError, (lambda: ax.main_process_first(group).__enter__(), f"rank {world.rank} is not in this"))
    else:
        with ax.main_process_first(group):
            ran.append(group.rank)
        assert ran == [0]
    ax.barrier()


def test_waiting_is_napping() -> None:
    with asleep():
        assert is_beside_computation()
    assert not is_beside_computation()
