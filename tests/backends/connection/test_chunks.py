"""The loop over chunks: which stage of which chunk runs at which tick, and in which buffer."""

from typing import Any

import pytest

from axonmpi.backends.connection.chunks import run_chunks, stages_of


class Barrier:
    """Counts the barriers that one rank passes, and lists them among what it does."""

    def __init__(self, done: list[Any], count: int) -> None:
        self.done, self.count = done, count

    def wait(self, what: object) -> None:
        self.count += 1
        self.done.append("|")


def run(chunks: int, stages: int, first: int = 0, count: int = 7, buffers: int = 4) -> list[Any]:
    """Return what a rank does: barriers, and (chunk, stage, buffer of the chunk, buffer of the tick)."""
    done: list[Any] = []
    made = [lambda *of, stage=stage: done.append((of[0], stage, *of[1:])) for stage in range(stages)]
    barrier: Any = Barrier(done, count)
    run_chunks(barrier, buffers, "a test", chunks, made, first)
    return done


def test_two_chunks_of_three_stages() -> None:
    assert run(2, 3) == [
        *[(0, 0, 3, 3), "|"],
        *[(1, 0, 0, 0), (0, 1, 3, 0), "|"],
        *[(1, 1, 0, 1), (0, 2, 3, 1), "|"],
        *[(1, 2, 0, 2)],
    ]


@pytest.mark.parametrize(("chunks", "stages"), [(0, 2), (0, 3), (1, 1), (1, 2), (2, 5), (9, 4)])
def test_every_stage_runs_once_a_tick_after_the_one_before(chunks, stages) -> None:
    done, tick, seen = run(chunks, stages, buffers=3), 0, {}
    for each in done:
        if each == "|":
            tick += 1
        else:
            chunk, stage, buffer, now = each
            seen[chunk, stage] = tick
            assert (buffer, now) == ((7 + chunk) % 3, (7 + tick) % 3)
    assert seen == {(chunk, stage): chunk + stage for chunk in range(chunks) for stage in range(stages)}


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_a_first_tick_before_the_agreement_is_part_of_the_same_loop(chunks) -> None:
    whole = run(chunks, 3, count=7)
    assert run(chunks, 3, first=1, count=8) == whole[whole.index("|") + 1 :]


def test_a_single_chunk_has_its_stages_at_once() -> None:
    done: list[tuple[str, int]] = []
    stages = [lambda number, *_, name=name: done.append((name, number)) for name in ("start", "go on", "end")]
    assert stages_of(2, *stages) == stages
    (at_once,) = stages_of(1, *stages)
    at_once(0, 1, 2)
    assert done == [("start", 0), ("go on", 0), ("end", 0)]
