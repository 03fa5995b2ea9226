"""Pages of ranks: what is written is read, by this user alone, and what is left behind is removed."""

import itertools
import mmap
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import axonmpi as ax
from axonmpi.launch import board
from axonmpi.launch import page as rank_page
from axonmpi.launch.page import OPERATION_BYTES, OPERATIONS, OPERATIONS_AT, Phase, describe
from axonmpi.launch.topology import Topology
from axonmpi.observe import Condition, RankPage, job_names, pages_of, stacks_of
from axonmpi.utils.own_files import open_own

# Python 3.12 and later: the child only runs Python
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
SHAPE = (3, 4, 5, 6, 7)
GONE, LIVES = "0" * 8, "1" * 8


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of this user's pages, which is not there yet."""
    monkeypatch.setattr(board, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(board, "_own", None)
    return tmp_path / f"axonmpi-{os.geteuid()}"


def published(job: str = "job", rank: int = 0, size: int = 2) -> board.Page:
    """Make this process's page that of a rank."""
    assert board.publish(board.make_folder(), job, asdict(Topology.of([0] * size, rank))) == ""
    return board.own_page()


def test_what_is_written_is_read(folder) -> None:
    log = published(rank=1).join(1, 4, 77, first=1, step=2)
    told = describe("all_reduce", "float32", SHAPE, int(ax.ReduceOp.MAX), nbytes=10080)
    log.leave(log.enter(told))
    log.fail(log.enter(told))
    with board.phase(Phase.BACKWARD), log.noted(describe("recv", "int8", (2,), None, 3, 5, 2)):
        [page] = pages_of("job")
        assert (page.phase, str(page.current())) == (Phase.BACKWARD, "recv(int8 [2], src=3, tag=5)")
        assert page.current().group.world_rank(3) == 7
    first, second, third = page.operations()
    assert (first.name, first.op, first.nbytes) == ("all_reduce", ax.ReduceOp.MAX, 10080)
    assert (first.shape, first.dims, str(first)) == (SHAPE[:4], 5, "all_reduce(float32 [3, 4, 5, 6, ...], MAX)")
    assert [(each.call, each.failed) for each in (first, second, third)] == [(1, False), (2, True), (0, False)]
    assert first.entered <= first.left <= second.entered
    assert (page.rank, page.size, page.pid, page.condition()) == (1, 2, os.getpid(), Condition.LIVES)
    assert (page.phase, page.current(), page.latest) == (Phase.OTHER, None, 3)
    [group] = page.groups
    assert (group.key, group.count, group.rank, group.size, group.members) == (77, 2, 1, 4, (1, 3, 5, 7))


def test_the_time_that_a_thread_spends_in_operations(monkeypatch) -> None:
    clock = itertools.count(step=10**9)
    monkeypatch.setattr(rank_page, "time", SimpleNamespace(monotonic_ns=clock.__next__))
    own = rank_page.Page(mmap.mmap(-1, rank_page.PAGE_BYTES))
    log, told = own.join(0, 2, 77), describe("all_reduce")
    for _ in range(OPERATIONS - 1):
        log.leave(log.enter(told))
    before = own.latest
    assert own.seconds_in_operations(0) == OPERATIONS - 1
    with log.noted(describe("wait")):  # an operation within another counts once
        log.leave(log.enter(told))
    with ThreadPoolExecutor() as other_thread:
        other_thread.submit(lambda: log.leave(log.enter(told))).result()
    log.leave(log.enter(told))
    log.enter(told)  # not over
    assert own.seconds_in_operations(before) == 3 + 1
    assert own.seconds_in_operations(0) == OPERATIONS - 5 + 3 + 1  # the ring has lost the first ones


def test_what_another_thread_does_later_is_not_where_the_rank_is(folder) -> None:
    log = published().join(0, 2, 1)
    note = log.enter(describe("all_reduce"))
    log.queue(note)
    [page] = pages_of("job")
    [queued] = page.unfinished()
    assert (page.current(), queued.started, queued.thread) == (None, 0, 0)
    log.start(note)
    assert page.unfinished()[0].started >= queued.entered


def test_an_operation_that_is_not_over_is_never_overwritten(folder) -> None:
    log = published().join(0, 2, 1)
    log.enter(describe("barrier"))
    for _ in range(2 * OPERATIONS + 9):
        log.leave(log.enter(describe("all_reduce")))
    [page] = pages_of("job")
    names, last = [each.name for each in page.operations()], page.operations()[-1]
    assert (page.current().name, len(names), names.count("barrier")) == ("barrier", OPERATIONS, 1)
    assert last.call == 2 * OPERATIONS + 10
    for _ in range(OPERATIONS + 9):
        log.enter(describe("all_reduce"))  # all of them: the oldest go
    assert len(page.unfinished()) == OPERATIONS


def test_a_record_that_is_being_written_is_left_out(folder) -> None:
    page = published()
    log = page.join(0, 2, 1)
    for _ in range(2):
        log.leave(log.enter(describe("barrier")))
    page.words[(OPERATIONS_AT + 3 * OPERATION_BYTES) // 8 - 1] = 1  # the last word of the second one
    assert [each.number for each in pages_of("job")[0].operations()] == [1]


def test_groups_that_are_closed_make_room(folder) -> None:
    page = published()
    for key in range(1, 1000):
        page.join(0, 2, key).close()
    logs = [page.join(0, 2, key) for key in range(1, 300)]  # more than a page has room for
    logs[-1].leave(logs[-1].enter(describe("barrier")))
    [read] = pages_of("job")
    assert (len(read.groups), read.operations()[-1].group) == (256, None)


def test_pages_are_this_users_alone(folder) -> None:
    page = published()
    modes = [path.stat().st_mode & 0o777 for path in (folder, page.path)]
    assert (page.path.parent, modes) == (folder, [0o700, 0o600])


def obstruct_open(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def obstruct_with_link(folder: Path) -> None:
    """Lead to a folder of the user's, with files that look like those of a job that has ended."""
    target = folder.parent / "mine"
    target.mkdir(mode=0o700)
    for name in ("train-0001.csv", "0123abcd-0.csv"):
        (target / name).touch()
    folder.symlink_to(target)


def obstruct_as_stranger(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    os.chown(folder, 12345, 12345)


OBSTACLES = {
    "open": obstruct_open,
    "link": obstruct_with_link,
    "file": Path.touch,
    "FIFO": os.mkfifo,
    "another user's": obstruct_as_stranger,
}


@pytest.mark.parametrize("obstruct", OBSTACLES.values(), ids=OBSTACLES)
def test_a_folder_that_is_not_safe_is_not_used_and_another_one_is(folder, obstruct) -> None:
    if obstruct is obstruct_as_stranger and os.geteuid():
        pytest.skip("only root can give a folder away")
    obstruct(folder)
    files = sorted(folder.parent.rglob("*"))
    board.remove_stale()
    assert sorted(folder.parent.rglob("*")) == files
    own = published().path.parent
    assert (own.name.startswith(f"{folder.name}-"), own.stat().st_mode & 0o777) == (True, 0o700)
    assert board.make_folder() != folder
    assert [page.path.parent for page in pages_of("job")] == [own]
    board.remove_stale()
    board.remove_own()
    assert (list(own.iterdir()), set(files) - set(folder.parent.rglob("*"))) == ([], set())


def test_files_that_are_none_of_the_library_stay(folder) -> None:
    folder.mkdir(mode=0o700)
    kept = {"train-0001.csv", "model-0", "0123abcd-0.tar.gz", "0123ABCD-1"}
    for name in (*kept, "0123abcd-node.ended"):
        (folder / name).touch()
    board.remove_stale()
    assert {path.name for path in folder.iterdir()} == kept


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "job-0")  # to open it would block for ever


def link(folder: Path) -> None:
    (folder / "job-0").symlink_to("/dev/zero")


@pytest.mark.parametrize("plant", [fifo, link])
def test_only_regular_files_are_read(folder, plant) -> None:
    folder.mkdir(mode=0o700)
    plant(folder)
    assert pages_of("job") == []
    with pytest.raises(OSError, match=r"regular file|symbolic links"):
        open_own(folder / "job-0")


@pytest.mark.parametrize(
    ("make", "expected"), [(lambda path: path.chmod(0o777), "1777"), (Path.rmdir, "there is no")]
)
def test_where_names_can_be_exchanged_there_are_no_pages_and_it_is_said(
    tmp_path, monkeypatch, make, expected
) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    make(shared)
    monkeypatch.setattr(board, "SHARED_MEMORY", shared)
    assert expected in board.make_folder()
    assert board.files_of_pages() == []


def test_a_rank_without_a_page_that_others_see_has_one_of_its_own(folder) -> None:
    folder.touch()
    assert str(folder) in board.publish(folder, "job", asdict(Topology.of([0, 0], 0)))
    log = board.own_page().join(0, 2, 1)
    log.leave(log.enter(describe("barrier")))
    assert pages_of("job") == []


def in_a_fork(function, *arguments) -> None:
    """Run a function in a process that has ended on return."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_pages_of_processes_that_are_gone_are_removed(folder) -> None:
    for rank in range(2):
        in_a_fork(published, GONE, rank)
    (folder / f"{GONE}-0.stacks").touch()
    published(LIVES)
    assert [page.condition() for page in pages_of(GONE)] == [Condition.GONE] * 2
    assert stacks_of(pages_of(GONE)) == dict.fromkeys(range(2), "(no stack: the process has ended)")
    assert set(job_names()) == {LIVES, GONE}
    board.remove_stale()
    assert [path.name for path in folder.iterdir()] == [f"{LIVES}-0"]
    board.remove_own()
    assert list(folder.iterdir()) == []


def test_a_forked_process_does_not_write_to_the_page_of_its_parent(folder) -> None:
    published()
    in_a_fork(board.enter_phase, Phase.DATA)
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
    message = torch.ones(2)
    group.recv(message, 0, tag=4) if group.rank else group.send(message, 1, tag=4)
    world.barrier()
    key = RankPage(own.path).operations()[-2].group.key
    assert [page.group(key).count for page in pages[:2]] == [2, 2]
    did = [str(each) for each in pages[0].operations() if each.group is not None and each.group.key == key]
    assert [did[0], did[-1]] == ["all_reduce(float32 [3], SUM)", "send(float32 [2], dst=1, tag=4)"]
    world.barrier()
