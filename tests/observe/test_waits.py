"""Stuck ranks: found if they are stuck, and never else."""

import signal
import subprocess
from dataclasses import asdict

import pytest
from helpers.limits import limit

from axonmpi.launch.topology import Topology
from axonmpi.observe import Condition, cause_of, records_of, states_of, stuck_ranks, table_of
from axonmpi.record import files
from axonmpi.record.layout import GROUPS, Phase, describe
from axonmpi.utils.waiting import Backoff, wait_until

WORLD, PAIR, SPREAD = 1, 2, 3
"""Keys of a group of all ranks, one of ranks 0 and 1, and one of which half is on another node."""


class Ranks:
    """Records of three ranks, all of this process."""

    def __init__(self) -> None:
        self.records, self.logs = [], []
        for rank in range(3):
            assert files.publish_record(files.make_folder(), "job", asdict(Topology.of([0, 0, 0], rank))) == ""
            record = files.own_record()
            groups = {WORLD: 3, SPREAD: 6} if rank == 2 else {WORLD: 3, SPREAD: 6, PAIR: 2}
            self.records.append(record)
            self.logs.append({key: record.join(rank, size, key, 0, 1) for key, size in groups.items()})

    def enter(self, rank: int, name: str, group: int = WORLD, **details) -> int:
        """Have a rank enter an operation."""
        number = None if not {"peer", "number"} & details.keys() else details.pop("number", 0)
        return self.logs[rank][group].enter(describe(name, **details), number)

    def do(self, rank: int, name: str, group: int = WORLD, **details) -> None:
        """Have a rank do an operation."""
        self.logs[rank][group].leave(self.enter(rank, name, group, **details))

    def end(self, rank: int) -> None:
        """Bring a rank to the end of its program."""
        self.records[rank].words[2] = Phase.ENDING

    def stuck(self) -> dict[int, set[int]]:
        return stuck_ranks(states_of(records_of("job")))

    def cause(self) -> str:
        states = states_of(records_of("job"))
        return cause_of(states, stuck_ranks(states))


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(files, "_own", None)
    return Ranks()


MESSAGE = {"peer": 1, "tag": 5}
SITUATIONS = {
    "one that computes": (
        [(Ranks.enter, 0, "all_reduce"), (Ranks.do, 1, "barrier", PAIR), (Ranks.enter, 1, "all_reduce")],
        {},
    ),
    "a collective that all have called": ([(Ranks.enter, rank, "all_reduce") for rank in range(3)], {}),
    "a collective with other nodes": ([(Ranks.enter, rank, "all_reduce", SPREAD) for rank in range(3)], {}),
    "two collectives": (
        [(Ranks.enter, 0, "all_reduce"), (Ranks.enter, 1, "barrier", PAIR), (Ranks.enter, 2, "all_reduce")],
        {0: {1}, 1: {0}, 2: {1}},
    ),
    "a message that another receive has met": (
        [
            (Ranks.do, 1, "send", WORLD, {"peer": 0, "tag": 5}),
            (Ranks.do, 0, "recv", WORLD, MESSAGE),
            (Ranks.enter, 0, "recv", WORLD, MESSAGE),
            (Ranks.enter, 1, "barrier"),
        ],
        {0: {1}, 1: {0}},
    ),
    "what records do not say any more": (
        [
            *[(Ranks.do, 1, "all_reduce", PAIR)] * 2100,
            (Ranks.enter, 0, "recv", WORLD, MESSAGE),
            (Ranks.enter, 1, "barrier"),
        ],
        {},
    ),
}


@pytest.mark.parametrize(("steps", "expected"), SITUATIONS.values(), ids=SITUATIONS)
def test_who_waits_in_vain(ranks, steps, expected) -> None:
    for does, rank, name, *group in steps:
        does(ranks, rank, name, *group[:1], **dict(*group[1:]))
    assert ranks.stuck() == expected


def test_the_cause_names_the_rank_to_look_at(ranks) -> None:
    ranks.enter(0, "all_reduce")
    ranks.enter(1, "barrier", PAIR)
    assert "rank 2: " in table_of(states_of(records_of("job")))
    ranks.enter(2, "all_reduce")
    assert ranks.cause().startswith(
        "ranks wait for each other, look at rank 1 first: rank 0 waits for rank 1 in all_reduce()"
    )


def test_a_wait_is_one_for_the_collective_that_it_is_for(ranks) -> None:
    ranks.do(0, "all_reduce")
    ranks.do(1, "all_reduce")
    ranks.enter(0, "wait", number=1)
    ranks.enter(1, "wait", number=1)
    assert ranks.stuck() == {}
    log = ranks.logs[0][WORLD]
    log.queue(log.enter(describe("all_reduce")))
    ranks.enter(0, "wait", number=2)
    ranks.do(2, "all_reduce")
    ranks.enter(1, "barrier", PAIR)
    assert ranks.stuck() == {0: {1}, 1: {0}}


def test_a_collective_of_a_group_with_a_time_out_raises_by_itself(ranks) -> None:
    patient = ranks.records[0].join(0, 2, 9, 0, 1, gives_up=True)
    ranks.records[1].join(1, 2, 9, 0, 1, gives_up=True)
    patient.enter(describe("all_reduce"))
    ranks.enter(1, "barrier", PAIR)
    assert ranks.stuck() == {}


@pytest.mark.parametrize(("name", "other"), [("recv", "isend"), ("send", "irecv")])
def test_a_ring_of_messages_waits_in_vain_until_the_other_ends_are_there(ranks, name, other) -> None:
    for rank in range(3):
        ranks.enter(rank, name, peer=(rank + 1) % 3, tag=5)
    assert ranks.stuck() == {0: {1}, 1: {2}, 2: {0}}
    ranks.do(1, other, peer=0, tag=4)
    assert ranks.stuck() != {}
    ranks.do(1, other, peer=0, tag=5)
    assert ranks.stuck() == {}


def test_a_rank_at_its_end_never_comes_but_waits_for_all(ranks) -> None:
    ranks.end(1)
    assert ranks.stuck() == {}
    ranks.end(2)
    ranks.enter(0, "all_reduce")
    assert ranks.stuck() == {0: {1, 2}, 1: {0}, 2: {0}}
    assert ranks.cause().endswith("have come to the end of their program while rank 0 waits in all_reduce()")
    ranks.end(0)
    assert ranks.stuck() == {}


def test_a_rank_that_has_closed_a_group_never_comes_to_it(ranks) -> None:
    for rank in (1, 2):
        ranks.do(rank, "barrier", SPREAD)
        ranks.do(rank, "all_reduce")
    ranks.enter(0, "all_reduce")
    ranks.logs[1][WORLD].close()
    assert ranks.stuck() == {}  # it has done its part
    ranks.do(2, "all_reduce")
    ranks.logs[0][WORLD].leave(ranks.enter(0, "all_reduce"))
    ranks.enter(0, "all_reduce")
    assert ranks.stuck() == {0: {1}}
    assert ranks.cause().endswith("has closed the group while rank 0 waits in all_reduce()")
    for key in range(10, 10 + GROUPS):
        ranks.records[1].join(1, 3, key, 0, 1)
    assert records_of("job")[1].group(WORLD) is None


@pytest.mark.parametrize(
    ("sent", "condition", "said"),
    [(signal.SIGSTOP, Condition.STOPPED, "is stopped"), (signal.SIGKILL, Condition.GONE, "has ended")],
)
def test_a_process_that_does_nothing_any_more(ranks, monkeypatch, sent, condition, said) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        records = records_of("job")
        monkeypatch.setattr(records[2], "pid", process.pid)
        records[2].identity["started"] = files.process(process.pid).started
        ranks.enter(0, "all_reduce")
        assert stuck_ranks(states_of(records)) == {}
        process.send_signal(sent)
        came = wait_until(lambda: records[2].condition() is condition, Backoff(0, 0.001), limit(10))
        states = states_of(records)
        process.kill()
    assert (came, stuck_ranks(states)) == (True, {0: {2}})
    assert cause_of(states, {0: {2}}) == f"rank 2 on {records[2].host} {said} while rank 0 waits in all_reduce()"
