"""Traces of ranks: every operation, waiting apart from moving, and the rank that the others wait for."""

import errno
import json
import os
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import axonmpi as ax
from axonmpi.record import trace_file
from axonmpi.tracing.merge import MERGED_NAME, merge

PAUSE = 0.2


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Read a merged file by the rules of the format; those of operations and spans are returned."""
    content = json.loads((folder / MERGED_NAME).read_text())
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    open_spans: dict[tuple[Any, ...], float] = {}
    events = []
    for event in content["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
                continue
            case "X":
                assert event["ts"] >= 0
                assert event["dur"] >= 0
                rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "b":
                open_spans[event["pid"], event["cat"], event["id"]] = event["ts"]
            case "e":
                event["began"] = open_spans.pop((event["pid"], event["cat"], event["id"]))
                assert event["began"] <= event["ts"]
            case other:
                pytest.fail(f"unexpected {other}")
        events.append(event)
    assert not open_spans
    for row in rows.values():  # events of a thread lie within each other, or apart
        ends: list[float] = []
        for begin, end in sorted(row, key=lambda each: (each[0], -each[1])):
            while ends and ends[-1] <= begin + 1e-6:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-6
            ends.append(end)
    return events


@pytest.mark.ranks(2, 4)
def test_each_operation_is_in_the_merged_file(world: ax.World, shared_tmp_path: Path) -> None:
    folder, calls = shared_tmp_path / "trace", []
    with ax.trace(folder) as trace:
        for name, nbytes, call in [
            ("all_reduce", 4000, lambda: ax.all_reduce(torch.ones(1000))),
            ("broadcast", 24, lambda: ax.broadcast(torch.ones(3, dtype=torch.float64))),
            ("all_gather", 8, lambda: ax.all_gather(torch.ones(2))),
            ("barrier", 0, world.barrier),
        ]:
            began = time.monotonic()
            call()
            calls.append((name, nbytes, time.monotonic() - began))
    of_all = world.default_group.all_gather_object(calls)
    if world.is_main:
        events = [event for event in events_of(folder) if event.get("cat") == "operation"]
        for rank, expected in enumerate(of_all):
            own = [event for event in events if event["pid"] == rank and event["args"]["ranks"] == world.size]
            names = [name for name, *_ in expected]
            at = [event["name"] for event in own].index("all_reduce")
            for event, (name, nbytes, seconds) in zip(own[at : at + len(names)], expected, strict=True):
                assert (event["name"], event["args"]["bytes"]) == (name, nbytes)
                assert 0 < event["dur"] <= seconds * 1e6
                assert 0 <= event["args"]["waiting_us"] <= event["dur"]
        assert trace.summary is not None


@pytest.mark.ranks(2, 4)
def test_pauses_are_waits_of_the_others(world: ax.World, shared_tmp_path: Path) -> None:
    pauses = 0.0
    with ax.trace(shared_tmp_path / "trace") as trace:
        for late in (0, world.size - 1, 0):
            world.barrier()
            began = time.monotonic()
            if world.rank == late:
                time.sleep(PAUSE)
                pauses += time.monotonic() - began
            ax.all_reduce(torch.ones(1))
    of_all = world.default_group.all_gather_object(pauses)
    if world.is_main:
        assert trace.summary is not None
        for figures, own in zip(trace.summary.ranks, of_all, strict=True):
            assert figures.waiting == pytest.approx(sum(of_all) - own, rel=0.05, abs=0.01)
            assert figures.awaited == pytest.approx(own * (world.size - 1), rel=0.05, abs=0.02 * world.size)


@pytest.mark.ranks(2, 4)
def test_the_first_line_names_the_rank_and_what_it_does(world: ax.World, shared_tmp_path: Path) -> None:
    doing = {
        "data": "loads data",
        "forward": "has 0.0",  # it sleeps
        "checkpoint": "saves",
        "": "works outside of all phases",
    }
    for late, (during, text) in enumerate(doing.items()):
        rank = late % world.size
        folder = shared_tmp_path / f"in-{during}"
        with ax.trace(folder) as trace:
            for _ in range(4):
                with trace.phase("forward"):
                    torch.ones(128, 128) @ torch.ones(128, 128)
                with trace.phase(during) if during else nullcontext():
                    if world.rank == rank:
                        time.sleep(0.05)
                ax.all_reduce(torch.ones(1))
        if world.is_main:
            assert trace.summary is not None
            assert trace.summary.cause.startswith(f"rank {rank} {text}")
            assert str(trace.summary).startswith(trace.summary.cause)


@pytest.mark.ranks(2)
def test_messages_wait_for_their_source(world: ax.World, shared_tmp_path: Path) -> None:
    with ax.trace(shared_tmp_path / "trace") as trace:
        world.barrier()
        if world.rank == 0:
            time.sleep(PAUSE)
            ax.send(torch.ones(4), 1)
        else:
            ax.recv(torch.ones(4), 0)
    if world.is_main:
        assert trace.summary is not None
        assert [round(each.waiting, 1) for each in trace.summary.ranks] == [0, PAUSE]
        assert [round(each.awaited, 1) for each in trace.summary.ranks] == [PAUSE, 0]


@pytest.mark.ranks(2)
def test_steps_choose_what_is_traced(world: ax.World, shared_tmp_path: Path) -> None:
    folder = shared_tmp_path / "trace"
    with ax.trace(folder, steps=range(1, 3)) as trace:
        for step in range(5):
            ax.all_reduce(torch.ones(100 + step))
            trace.step()
    if world.is_main:
        sizes = [event["args"]["bytes"] for event in events_of(folder) if event["name"] == "all_reduce"]
        assert sorted(set(sizes) & set(range(400, 500))) == [404, 408]


@pytest.mark.ranks(2)
def test_buckets_and_phases_are_spans(world: ax.World, shared_tmp_path: Path) -> None:
    model = ax.DDP(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))))
    with ax.trace(shared_tmp_path / "trace"):
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
    if world.is_main:
        events = events_of(shared_tmp_path / "trace")
        for rank in range(world.size):
            own = [event for event in events if event["pid"] == rank]
            phases = [event["name"] for event in own if event.get("cat") == "phase"]
            assert phases == ["forward", "backward"] * 3
            begun = [event["args"]["bytes"] for event in own if event["ph"] == "b"]
            assert sum(begun) == 3 * sum(4 * p.numel() for p in model.parameters())


@pytest.mark.ranks(1)
def test_the_profiler_has_the_same_clock(world: ax.World, tmp_path: Path) -> None:
    with ax.trace(tmp_path, profiler=True) as trace:
        with trace.phase("forward"):
            torch.ones(300, 300) @ torch.ones(300, 300)
        with trace.phase("backward"):
            torch.ones(8).exp()
    events = json.loads((tmp_path / MERGED_NAME).read_text())["traceEvents"]
    spans = {event["name"]: (event["ts"], event["ts"] + event.get("dur", 0)) for event in events if "ts" in event}
    for span, operator in (("forward", "aten::mm"), ("backward", "aten::exp")):
        assert spans[span][0] - 100 <= spans[operator][0] <= spans[operator][1] <= spans[span][1] + 100


@pytest.mark.ranks(2)
def test_bad_folders_and_steps_are_refused_on_all_ranks(world: ax.World, shared_tmp_path: Path) -> None:
    file = shared_tmp_path / "file"
    if world.is_main:
        file.touch()
    world.barrier()
    with pytest.raises(OSError, match=r"rank 0: .*file"), ax.trace(file):
        pytest.fail("not reached")
    with pytest.raises(OSError, match=r"rank 1: rank 0's file is not there"), _apart(world, shared_tmp_path):
        pytest.fail("not reached")
    for steps, error in ((0, ValueError), (range(0), ValueError), (range(0, 4, 2), ValueError), (True, TypeError)):
        with pytest.raises(error, match="steps"):
            ax.trace(shared_tmp_path, steps=steps)
    with pytest.raises(ValueError, match="name: expected one of 'data'"):
        ax.trace(shared_tmp_path).phase("loading")
    with ax.trace(shared_tmp_path / "again"):
        world.barrier()
    if world.is_main:
        assert len(merge(shared_tmp_path / "again").ranks) == 2


def _apart(world: ax.World, folder: Path) -> Any:
    own = folder / f"of-{world.rank}"
    own.mkdir()
    return ax.trace(own)


@pytest.mark.ranks(2)
def test_a_second_trace_is_refused_and_one_after_the_other_is_not(world: ax.World, shared_tmp_path: Path) -> None:
    with ax.trace(shared_tmp_path), pytest.raises(RuntimeError, match="traced already"), ax.trace(shared_tmp_path):
        pytest.fail("not reached")
    with ax.trace(shared_tmp_path) as trace:
        world.barrier()
    assert (trace.summary is not None) == world.is_main


@pytest.mark.ranks(2)
def test_an_error_ends_the_trace_of_its_rank_alone(world: ax.World, shared_tmp_path: Path) -> None:
    with pytest.raises(KeyError) if world.is_main else nullcontext(), ax.trace(shared_tmp_path / "trace") as trace:
        ax.all_reduce(torch.ones(1))
        if world.is_main:
            raise KeyError
        trace.stop()
    world.barrier()
    if world.is_main:
        assert merge(shared_tmp_path / "trace").seconds > 0


@pytest.mark.ranks(3)
def test_a_pause_at_the_end_is_waited_for(world: ax.World, shared_tmp_path: Path) -> None:
    pair = world.new_group([0, 2])
    with ax.trace(shared_tmp_path / "trace") as trace:
        if world.rank == 2:
            time.sleep(PAUSE)
        if world.rank in (0, 2):
            pair.all_reduce(torch.ones(1))
    if world.is_main:
        assert trace.summary is not None
        assert trace.summary.cause.startswith("rank 2 works outside of all phases")
        assert [round(each.waiting, 1) for each in trace.summary.ranks] == [PAUSE, PAUSE, 0]
        assert trace.summary.ranks[2].awaited > 0.9 * PAUSE


@pytest.mark.ranks(2)
def test_what_threads_hide_counts_once(world: ax.World, shared_tmp_path: Path) -> None:
    groups = [world.new_group(range(world.size)) for _ in range(3)]
    with ax.trace(shared_tmp_path / "trace") as trace:
        works = [group.all_reduce(torch.ones(1), async_op=True) for group in groups] if world.is_main else []
        time.sleep(PAUSE)
        works = works or [group.all_reduce(torch.ones(1), async_op=True) for group in groups]
        for work in works:
            work.wait()
    if world.is_main:
        assert trace.summary is not None
        assert trace.summary.ranks[0].hidden == pytest.approx(PAUSE, abs=0.05)


@pytest.mark.ranks(2)
def test_only_files_of_an_earlier_trace_are_removed(world: ax.World, shared_tmp_path: Path) -> None:
    own = [shared_tmp_path / name for name in ("rank-0.txt", "rank-0.model.trace", "rank-a.profile")]
    if world.is_main:
        for path in (*own, shared_tmp_path / "rank-7.trace"):
            path.touch()
    world.barrier()
    with ax.trace(shared_tmp_path):
        world.barrier()
    assert all(path.exists() for path in own)
    assert not (shared_tmp_path / "rank-7.trace").exists()


@pytest.mark.ranks(2)
def test_a_begin_that_fails_on_one_rank_leaves_none_traced(
    world: ax.World, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate

    def full(*args: int) -> None:
        if ax.rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(*args)

    def patch(module: object) -> None:
        world.barrier()
        if world.local_rank == 0 or not is_mock:
            monkeypatch.setattr(trace_file, "os", module)
        world.barrier()

    is_mock = world.default_group.backend.name == "mock"
    patch(SimpleNamespace(**{**vars(os), "posix_fallocate": full}))
    with pytest.raises(OSError, match=r"rank 1: .*No space left"), ax.trace(shared_tmp_path):
        pytest.fail("not reached")
    patch(os)
    with ax.trace(shared_tmp_path):
        world.barrier()
