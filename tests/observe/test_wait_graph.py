"""Wait graphs of given states, without a job."""

import time
from dataclasses import dataclass

import pytest

from axonmpi import comm
from axonmpi.observe.wait_graph import site_in, wait_graph_of
from axonmpi.observe.waits import RankState
from axonmpi.record.layout import Phase
from axonmpi.record.reader import Condition, Group, Operation

WORLD, OTHER = 7, 8


@dataclass
class OwnRecord:
    """What is asked of a record: of a rank of four, in two groups of all ranks."""

    rank: int
    counts: dict[int, int]
    latest: int = 9
    host: str = "n1"
    current: Operation | None = None

    @property
    def groups(self) -> list[Group]:
        return [self.group(key) for key in (WORLD, OTHER)]

    def group(self, key: int) -> Group:
        return Group(key, self.counts[key], self.rank, 4, 0, 1, False)

    def operations(self) -> list[Operation]:
        return [operation(self.group(WORLD), "barrier", 5, left=1), *([self.current] if self.current else [])]

    @property
    def identity(self) -> dict[str, int]:
        return {"wall_clock": time.time_ns() - 12 * 10**9, "started": 0}


def operation(
    group: Group, name: str, call: int = 0, peer: int | None = None, left: int | None = None
) -> Operation:
    return Operation(9, name, group, call, "", (), 0, None, peer, -1, 0, 1, 1, left, False, 1)


def at(
    rank: int, name: str = "", call: int = 0, *, group: int = WORLD, peer: int | None = None,
    condition: Condition = Condition.LIVES, phase: Phase = Phase.OTHER,
) -> tuple[int, RankState]:  # fmt: skip
    """A rank that has called five collectives of each group, or `call`, and is in an operation."""
    record = OwnRecord(rank, {WORLD: 5, OTHER: 5, group: call or 5})
    record.current = operation(record.group(group), name, call, peer) if name else None
    return rank, RankState(record, condition, phase, record.latest, record.current)


def in_all_reduce(*ranks: int, call: int = 6) -> list[tuple[int, RankState]]:
    return [at(rank, "all_reduce", call) for rank in ranks]


def test_a_rank_that_has_not_come():
    found = wait_graph_of(dict([*in_all_reduce(0, 2, 3), at(1, phase=Phase.FORWARD)]), 4, {1: "a.py:3 in f"})
    assert (found.behind, found.waits) == ((1,), {rank: {1} for rank in (0, 2, 3)})
    assert found.classes == [
        ("all_reduce(), collective 6 of the group of ranks 0 to 3, number 1 of 2 such", (0, 2, 3)),
        ("outside of collectives, forward, at a.py:3 in f", (1,)),
    ]
    assert "; ".join(found.sentences) == (
        "ranks 0, 2, 3 wait for rank 1 in all_reduce(), collective 6 of the group of ranks 0 to 3, number 1 of 2 "
        "such, and rank 1 has been outside of collectives during its forward for 12 s at a.py:3 in f, after 5 "
        "collectives of that group"
    )


def test_why_a_rank_has_not_come():
    for state, reason in (
        (at(1, condition=Condition.STOPPED), "rank 1 is stopped by a signal (SIGSTOP or SIGTSTP)"),
        (at(1, condition=Condition.GONE), "rank 1 has ended"),
        (at(1, condition=Condition.TRACED), "rank 1 is in a debugger"),
        (at(1, phase=Phase.ENDING), "rank 1 has come to the end of its program"),
        (at(1, "all_to_all"), "rank 1 has been in all_to_all() for 12 s"),
    ):
        found = wait_graph_of(dict([*in_all_reduce(0, 2), state]), 3)
        assert (found.behind, reason in found.sentences[0]) == ((1,), True), found.sentences


def test_a_chain_leads_to_its_end():
    """Rank 0 waits for a message of rank 1, and that for one of rank 2."""
    chain = [at(0, "recv", peer=1), at(1, "recv", peer=2), at(2), *in_all_reduce(3)]
    found = wait_graph_of(dict(chain), 4)
    assert (found.waits, found.behind) == ({0: {1}, 1: {2}, 3: {0, 1, 2}}, (2,))
    assert found.sentences[0].startswith("ranks 1, 3 wait for rank 2 in recv(src=2), and rank 2 has been outside")


def test_circles():
    ring = wait_graph_of(dict(at(rank, "send", peer=(rank + 1) % 3) for rank in range(3)), 3)
    groups = wait_graph_of(
        dict(at(rank, "barrier", 6, group=OTHER if rank == 1 else WORLD) for rank in range(3)), 3
    )
    assert (ring.is_circle, ring.behind, groups.is_circle, groups.behind) == (True, (0, 1, 2), True, (1,))
    assert groups.sentences == ["ranks wait for each other in a circle, so none goes on; look at rank 1 first"]


STOPPED = at(2, "all_reduce", 6, condition=Condition.STOPPED)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (in_all_reduce(0, 1, 2), ((), {})),
        ([*in_all_reduce(0, 1), STOPPED], ((2,), {0: {2}, 1: {2}})),
        ([at(0, phase=Phase.ENDING), at(1)], ((), {0: {1}})),
    ],
    ids=["all have come", "one is stopped in the middle", "ends of programs and ranks of other nodes"],
)
def test_who_is_behind(states, expected):
    found = wait_graph_of(dict(states), 3)
    assert (found.behind, found.waits, found.unknown) == (*expected, tuple(range(len(states), 3)))


def test_the_users_line_of_a_stack():
    stacks = """\
Thread 0x00007f1c01000000 (most recent call first):
  File "/home/me/other.py", line 1 in work
Current thread 0x00007f1c01c59b80 (most recent call first):
  File "{package}/comm.py", line 9 in all_reduce
  File "/venv/lib/python3.11/site-packages/torch/nn/module.py", line 5 in forward
  File "/home/me/torch/axonmpi/train.py", line 12 in step
  File "/home/me/main.py", line 3 in <module>
""".replace("{package}", comm.__file__.rpartition("/")[0])
    sites = [site_in(stacks, thread) for thread in (0x7F1C01C59B80, 0x7F1C01000000)]
    assert sites == ["train.py:12 in step", "other.py:1 in work"]
    assert site_in("(no stack: no answer)", 1) == ""
