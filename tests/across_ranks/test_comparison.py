"""Errors that all ranks raise, and comparisons of arguments: one message on all, and the group usable after."""

import pytest
from helpers.compare import refused

import axonmpi as ax
from axonmpi.across_ranks.comparison import first_rank_does, raised_on_all, same_on_all_ranks


@pytest.mark.real_ranks
@pytest.mark.ranks(2)
def test_rank_0_does_it_for_all(world: ax.World) -> None:
    calls = []

    def work() -> dict[str, int]:
        calls.append(world.rank)
        return {"rank": world.rank}

    assert first_rank_does(world.default_group.backend, work) == {"rank": 0}
    assert calls == [0] * world.is_main


@pytest.mark.real_ranks
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (FileNotFoundError, "No such file or directory: '.*missing"),
        (ax.CheckpointError, "of a class of axonmpi"),
        (ValueError, "can't decode byte 0xff"),  # as UnicodeDecodeError, which cannot be made of a text
    ],
)
def test_an_error_of_rank_0_is_raised_on_all(
    world: ax.World, kind: type[Exception], message: str, tmp_path
) -> None:
    def work() -> object:
        if kind is FileNotFoundError:
            return (tmp_path / "missing").read_text(encoding="utf-8")
        if kind is ValueError:
            return b"\xff".decode("utf-8")
        raise kind(message)

    with pytest.raises(kind, match=message):
        first_rank_does(world.default_group.backend, work)
    assert ax.all_gather_object(world.rank) == list(range(world.size))


@pytest.mark.ranks(3)
def test_an_error_of_any_rank_is_raised_on_all(world: ax.World) -> None:
    def check(failing: set[int], message: str) -> None:
        with raised_on_all(world.default_group.backend):
            if world.rank in failing:
                raise TypeError(message)

    check(set(), "")
    refused(
        TypeError,
        (lambda: check({1}, "wrong"), "^rank 1: wrong$"),
        (lambda: check({0, 2}, "wrong"), "^ranks 0, 2: wrong$"),
        (lambda: check({0, 1}, f"of {world.rank}"), "^rank 0: of 0\nrank 1: of 1$"),
        (lambda: check({0, 1, 2}, "wrong"), "^wrong$"),
    )


@pytest.mark.ranks(3)
def test_texts_that_differ_are_an_error_on_all(world: ax.World) -> None:
    def check(*texts: str) -> None:
        same_on_all_ranks(world.default_group.backend, texts, "they differ", "Make them equal.", ax.LaunchError)

    check("a", "b")
    own = ["a", "b", "c"][: 2 + (world.rank == 1)]
    message = "^they differ; the first difference is\n  ranks 0, 2: no further one\n  rank 1: c\nMake them equal.$"
    refused(ax.LaunchError, (lambda: check(*own), message))
