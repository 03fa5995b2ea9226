"""Records of ranks: written and read by one user alone, and removed after the job."""

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
from axonmpi.launch.topology import Topology
from axonmpi.observe import Condition, RankRecord, job_names, records_of, stacks_of
from axonmpi.record import files, writer
from axonmpi.record.layout import OPERATION_BYTES, OPERATIONS, OPERATIONS_AT, RECORD_BYTES, Phase, describe
from axonmpi.record.writer import OwnRecord
from axonmpi.utils.own_files import open_own

# Python 3.12 and later: the child only runs Python
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
SHAPE = (3, 4, 5, 6, 7)
GONE, LIVES = "0" * 8, "1" * 8


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of this user's records, which is not there yet."""
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(files, "_own", None)
    return tmp_path / f"axonmpi-{os.geteuid()}"


def published(job: str = "job", rank: int = 0, size: int = 2) -> files.OwnRecord:
    """Make this process's record that of a rank."""
    assert files.publish_record(files.make_folder(), job, asdict(Topology.of([0] * size, rank))) == ""
    return files.own_record()


def test_what_is_written_is_read(folder) -> None:
    log = published(rank=1).join(1, 4, 77, first=1, step=2)
    told = describe("all_reduce", "float32", SHAPE, int(ax.ReduceOp.MAX), nbytes=10080)
    log.leave(log.enter(told))
    log.fail(log.enter(told))
    with files.phase(Phase.BACKWARD), log.noted(describe("recv", "int8", (2,), None, 3, 5, 2)):
        [record] = records_of("job")
        assert (record.phase, str(record.current())) == (Phase.BACKWARD, "recv(int8 [2], src=3, tag=5)")
        assert record.current().group.world_rank(3) == 7
    first, second, third = record.operations()
    assert (first.name, first.op, first.nbytes) == ("all_reduce", ax.ReduceOp.MAX, 10080)
    assert (first.shape, first.dims, str(first)) == (SHAPE[:4], 5, "all_reduce(float32 [3, 4, 5, 6, ...], MAX)")
    assert [(each.call, each.failed) for each in (first, second, third)] == [(1, False), (2, True), (0, False)]
    assert first.entered <= first.left <= second.entered
    assert (record.rank, record.size, record.pid, record.condition()) == (1, 2, os.getpid(), Condition.LIVES)
    assert (record.phase, record.current(), record.latest) == (Phase.OTHER, None, 3)
    [group] = record.groups
    assert (group.key, group.count, group.rank, group.size, group.members) == (77, 2, 1, 4, (1, 3, 5, 7))


def test_the_time_that_a_thread_spends_in_operations(monkeypatch) -> None:
    clock = itertools.count(step=10**9)
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic_ns=clock.__next__))
    own = OwnRecord(mmap.mmap(-1, RECORD_BYTES))
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
    known = OPERATIONS - 5 + 3 + 1  # the ring has lost the first ones, for which the others stand
    assert own.seconds_in_operations(0) == pytest.approx(known * (OPERATIONS + 4) / OPERATIONS)


def test_what_another_thread_does_later_is_not_where_the_rank_is(folder) -> None:
    log = published().join(0, 2, 1)
    note = log.enter(describe("all_reduce"))
    log.queue(note)
    [record] = records_of("job")
    [queued] = record.unfinished()
    assert (record.current(), queued.started, queued.thread) == (None, 0, 0)
    log.start(note)
    assert record.unfinished()[0].started >= queued.entered


def test_an_operation_that_is_not_over_is_never_overwritten(folder) -> None:
    log = published().join(0, 2, 1)
    log.enter(describe("barrier"))
    for _ in range(2 * OPERATIONS + 9):
        log.leave(log.enter(describe("all_reduce")))
    [record] = records_of("job")
    names, last = [each.name for each in record.operations()], record.operations()[-1]
    assert (record.current().name, len(names), names.count("barrier")) == ("barrier", OPERATIONS, 1)
    assert last.call == 2 * OPERATIONS + 10
    for _ in range(OPERATIONS + 9):
        log.enter(describe("all_reduce"))  # all of them: the oldest go
    assert len(record.unfinished()) == OPERATIONS


def test_a_record_that_is_being_written_is_left_out(folder) -> None:
    record = published()
    log = record.join(0, 2, 1)
    for _ in range(2):
        log.leave(log.enter(describe("barrier")))
    record.words[(OPERATIONS_AT + 3 * OPERATION_BYTES) // 8 - 1] = 1  # the last word of the second one
    assert [each.number for each in records_of("job")[0].operations()] == [1]


def test_groups_that_are_closed_make_room(folder) -> None:
    record = published()
    for key in range(1, 1000):
        record.join(0, 2, key).close()
    logs = [record.join(0, 2, key) for key in range(1, 300)]  # more than a record has room for
    logs[-1].leave(logs[-1].enter(describe("barrier")))
    [read] = records_of("job")
    assert (len(read.groups), read.operations()[-1].group) == (256, None)


def test_pages_are_this_users_alone(folder) -> None:
    record = published()
    modes = [path.stat().st_mode & 0o777 for path in (folder, record.path)]
    assert (record.path.parent, modes) == (folder, [0o700, 0o600])


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
    planted = sorted(folder.parent.rglob("*"))
    files.remove_stale_records()
    assert sorted(folder.parent.rglob("*")) == planted
    own = published().path.parent
    assert (own.name.startswith(f"{folder.name}-"), own.stat().st_mode & 0o777) == (True, 0o700)
    assert files.make_folder() != folder
    assert [record.path.parent for record in records_of("job")] == [own]
    files.remove_stale_records()
    files.remove_own_record()
    assert (list(own.iterdir()), set(planted) - set(folder.parent.rglob("*"))) == ([], set())


def test_files_that_are_none_of_the_library_stay(folder) -> None:
    folder.mkdir(mode=0o700)
    kept = {"train-0001.csv", "model-0", "0123abcd-0.tar.gz", "0123ABCD-1"}
    for name in (*kept, "0123abcd-node.ended"):
        (folder / name).touch()
    files.remove_stale_records()
    assert {path.name for path in folder.iterdir()} == kept


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "job-0")  # to open it would block for ever


def link(folder: Path) -> None:
    (folder / "job-0").symlink_to("/dev/zero")


@pytest.mark.parametrize("plant", [fifo, link])
def test_only_regular_files_are_read(folder, plant) -> None:
    folder.mkdir(mode=0o700)
    plant(folder)
    assert records_of("job") == []
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
    monkeypatch.setattr(files, "SHARED_MEMORY", shared)
    assert expected in files.make_folder()
    assert files.record_files() == []


def test_a_rank_without_a_page_that_others_see_has_one_of_its_own(folder) -> None:
    folder.touch()
    assert str(folder) in files.publish_record(folder, "job", asdict(Topology.of([0, 0], 0)))
    log = files.own_record().join(0, 2, 1)
    log.leave(log.enter(describe("barrier")))
    assert records_of("job") == []


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
    assert [record.condition() for record in records_of(GONE)] == [Condition.GONE] * 2
    assert stacks_of(records_of(GONE)) == dict.fromkeys(range(2), "(no stack: the process has ended)")
    assert set(job_names()) == {LIVES, GONE}
    files.remove_stale_records()
    assert [path.name for path in folder.iterdir()] == [f"{LIVES}-0"]
    files.remove_own_record()
    assert list(folder.iterdir()) == []


def test_a_forked_process_does_not_write_to_the_page_of_its_parent(folder) -> None:
    published()
    in_a_fork(files.enter_phase, Phase.DATA)
    assert records_of("job")[0].phase is Phase.OTHER


# ---- on real ranks ----------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_ranks_of_a_node_see_what_each_other_does(world) -> None:
    own = files.own_record()
    if own.path is None:
        pytest.skip("mock ranks have no records: needs an mpirun")
    records = records_of(own.identity["job"])
    assert [record.rank for record in records] == list(range(records[0].size))
    group = world.new_group(range(world.size))
    group.all_reduce(torch.ones(3))
    group.all_reduce(torch.ones(5), async_op=True).wait()
    message = torch.ones(2)
    group.recv(message, 0, tag=4) if group.rank else group.send(message, 1, tag=4)
    world.barrier()
    key = RankRecord(own.path).operations()[-2].group.key
    assert [record.group(key).count for record in records[:2]] == [2, 2]
    did = [str(each) for each in records[0].operations() if each.group is not None and each.group.key == key]
    assert [did[0], did[-1]] == ["all_reduce(float32 [3], SUM)", "send(float32 [2], dst=1, tag=4)"]
    world.barrier()
