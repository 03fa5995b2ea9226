"""Pages of ranks: what is written is read, by this user alone, and what is left behind is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

import axonmpi as ax
from axonmpi.launch import board
from axonmpi.launch.page import OPERATION_BYTES, OPERATIONS, OPERATIONS_AT, Phase, describe
from axonmpi.launch.topology import Topology
from axonmpi.observe import Condition, RankPage, job_names, pages_of

SHAPE = (3, 4, 5, 6, 7)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of this user's pages, which is not there yet."""
    monkeypatch.setattr(board, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(board, "_own", None)
    return board.folder_of_pages()


def published(job: str = "job", rank: int = 0, size: int = 2) -> board.Page:
    """Make this process's page that of a rank."""
    assert board.publish(job, asdict(Topology.of([0] * size, rank))) == ""
    return board.own_page()


def test_what_is_written_is_read(folder) -> None:
    log = published(rank=1).join(1, 4, 77, first=1, step=2)
    told = describe("all_reduce", "float32", SHAPE, int(ax.ReduceOp.MAX), nbytes=10080)
    log.leave(log.enter(told))
    log.fail(log.enter(told))
    with board.phase(Phase.BACKWARD), log.noted(describe("recv", "int8", (2,), None, 3, 5, 2)):
        [page] = pages_of("job")
        assert page.phase is Phase.BACKWARD
        assert str(page.current()) == "recv(int8 [2], src=3, tag=5)"
        assert page.current().group.world_rank(3) == 7
    first, second, third = page.operations()
    assert (first.name, first.shape, first.dims, first.op, first.nbytes) == (
        *("all_reduce", SHAPE[:4], 5, ax.ReduceOp.MAX, 10080),
    )
    assert str(first) == "all_reduce(float32 [3, 4, 5, 6, ...], MAX)"
    assert [each.call for each in (first, second, third)] == [1, 2, 0]
    assert [each.failed for each in (first, second, third)] == [False, True, False]
    assert first.entered <= first.left <= second.entered
    assert (page.rank, page.size, page.pid, page.condition()) == (1, 2, os.getpid(), Condition.LIVES)
    assert (page.phase, page.current(), page.latest) == (Phase.OTHER, None, 3)
    [group] = page.groups
    assert (group.key, group.count, group.rank, group.size, group.members) == (77, 2, 1, 4, (1, 3, 5, 7))


def test_what_another_thread_does_later_is_not_where_the_rank_is(folder) -> None:
    log = published().join(0, 2, 1)
    note = log.enter(describe("all_reduce"))
    log.queue(note)
    [page] = pages_of("job")
    assert page.current() is None
    [queued] = page.unfinished()
    assert (queued.started, queued.thread) == (0, 0)
    log.start(note)
    assert page.unfinished()[0].started >= queued.entered


def test_an_operation_that_is_not_over_is_never_overwritten(folder) -> None:
    log = published().join(0, 2, 1)
    log.enter(describe("barrier"))
    for _ in range(3 * OPERATIONS):
        log.leave(log.enter(describe("all_reduce")))
    [page] = pages_of("job")
    assert page.current().name == "barrier"
    operations = page.operations()
    assert len(operations) == OPERATIONS
    assert [each.name for each in operations].count("barrier") == 1
    assert operations[-1].call == 3 * OPERATIONS + 1
    for _ in range(3 * OPERATIONS):
        log.enter(describe("all_reduce"))  # all of them: the oldest go
    assert len(page.unfinished()) == OPERATIONS


def test_a_record_that_is_being_written_is_left_out(folder) -> None:
    page = published()
    log = page.join(0, 2, 1)
    for _ in range(2):
        log.leave(log.enter(describe("barrier")))
    last_word = (OPERATIONS_AT + 2 * OPERATION_BYTES) // 8 + OPERATION_BYTES // 8 - 1
    page.words[last_word] = 1
    assert [each.number for each in pages_of("job")[0].operations()] == [1]


def test_groups_that_are_closed_make_room(folder) -> None:
    page = published()
    for key in range(1, 1000):
        page.join(0, 2, key).close()
    logs = [page.join(0, 2, key) for key in range(1, 300)]  # more than a page has room for
    logs[-1].leave(logs[-1].enter(describe("barrier")))
    [read] = pages_of("job")
    assert len(read.groups) == 256
    assert read.operations()[-1].group is None


def test_pages_are_this_users_alone(folder) -> None:
    page = published()
    assert page.path.parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert page.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: needs root")
@pytest.mark.parametrize("redirect", ["<", ">>"], ids=["read", "write"])
def test_another_user_cannot_open_a_page(monkeypatch, redirect) -> None:
    monkeypatch.setattr(board, "_own", None)
    page = published("0test")
    try:
        done = subprocess.run(
            ["sh", "-c", f": {redirect} {page.path}"],
            user=65534, group=65534, extra_groups=[], cwd="/", capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert "Permission denied" in done.stderr
    finally:
        board.remove_own()


@pytest.mark.parametrize("obstacle", ["open to all", "link", "file"])
def test_a_folder_that_is_not_safe_is_not_used(folder, tmp_path, obstacle) -> None:
    if obstacle == "open to all":
        folder.mkdir()
        folder.chmod(0o777)
    elif obstacle == "link":
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        folder.symlink_to(elsewhere)
    else:
        folder.touch()
    assert str(folder) in board.publish("job", asdict(Topology.of([0, 0], 0)))
    assert pages_of("job") == []
    log = board.own_page().join(0, 2, 1)
    log.leave(log.enter(describe("barrier")))  # in memory of its own


def test_pages_of_processes_that_are_gone_are_removed(folder) -> None:
    code = """
import sys
from dataclasses import asdict
from pathlib import Path
from axonmpi.launch import board
from axonmpi.launch.topology import Topology
board.SHARED_MEMORY = Path(sys.argv[1])
for rank in (0, 1):
    assert not board.publish("gone", asdict(Topology.of([0, 0], rank)))
"""
    subprocess.run([sys.executable, "-c", code, str(folder.parent)], check=True, timeout=60)
    (folder / "gone-0.stacks").touch()
    published("lives")
    assert [page.condition() for page in pages_of("gone")] == [Condition.GONE] * 2
    assert set(job_names()) == {"lives", "gone"}
    board.remove_stale()
    assert [path.name for path in folder.iterdir()] == ["lives-0"]
    board.remove_own()
    assert list(folder.iterdir()) == []


def test_a_forked_process_does_not_write_to_the_page_of_its_parent(folder) -> None:
    published()
    if (child := os.fork()) == 0:
        board.enter_phase(Phase.DATA)
        os._exit(0)
    os.waitpid(child, 0)
    assert pages_of("job")[0].phase is Phase.OTHER


# ---- on real ranks ----------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_ranks_of_a_node_see_what_each_other_does(world) -> None:
    own = board.own_page()
    if own.path is None:
        pytest.skip("mock ranks have no pages: needs an mpirun")
    pages = pages_of(own.identity["job"])
    assert [page.rank for page in pages] == list(range(pages[0].size))
    group = world.new_group(range(world.size))
    group.all_reduce(torch.ones(3))
    group.all_reduce(torch.ones(5), async_op=True).wait()
    if group.rank == 0:
        group.send(torch.ones(2), 1, tag=4)
    elif group.rank == 1:
        group.recv(torch.ones(2), 0, tag=4)
    world.barrier()
    key = RankPage(own.path).operations()[-2].group.key
    counts = [page.count_in(key) for page in pages if page.count_in(key) is not None]
    assert counts == [2] * world.size
    did = [str(each) for each in pages[0].operations() if each.group is not None and each.group.key == key]
    assert did[0] == "all_reduce(float32 [3], SUM)"
    assert did[-1] == "send(float32 [2], dst=1, tag=4)"
    world.barrier()
