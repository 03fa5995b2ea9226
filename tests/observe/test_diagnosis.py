"""Who waits for whom: from where ranks are, without any job."""

from __future__ import annotations

import json
from dataclasses import replace

from axonmpi.observe.board import Condition
from axonmpi.observe.diagnosis import diagnose, site_in
from axonmpi.observe.state import RankState

WORLD, OTHER = 7, 8
WORDS = {WORLD: "the group of ranks 0 to 3", OTHER: "the group of ranks 0 to 3, number 2 of 2 such"}


def at(rank: int, name: str = "", call: int = 0, *, group: int = WORLD, **values) -> RankState:
    """A rank that has called five collectives of each group, or `call`, and is in an operation."""
    place = {"operation": f"{name}()", "group": group, "group_text": WORDS[group], "group_size": 4} if name else {}
    state = RankState(
        rank=rank, host="n1", pid=100 + rank, number=9, condition=Condition.LIVES.value, name=name, call=call,
        counts={WORLD: 5, OTHER: 5, group: call or 5}, ranks={WORLD: rank, OTHER: rank}, seconds=12.0, **place,
    )  # fmt: skip
    return replace(state, **values)


def in_all_reduce(*ranks: int, call: int = 6) -> list[RankState]:
    return [at(rank, "all_reduce", call) for rank in ranks]


def test_a_rank_that_has_not_come():
    found = diagnose([*in_all_reduce(0, 2, 3), at(1, phase="forward", latest="barrier()", site="a.py:3 in f")], 4)
    assert found.behind == (1,)
    assert found.waits == {rank: frozenset([1]) for rank in (0, 2, 3)}
    assert found.classes == [
        ("all_reduce(), collective 6 of the group of ranks 0 to 3", (0, 2, 3)),
        ("outside of collectives, forward, at a.py:3 in f", (1,)),
    ]
    (sentence,) = found.sentences
    assert sentence == (
        "ranks 0, 2, 3 wait for rank 1 in all_reduce(), collective 6 of the group of ranks 0 to 3, and rank 1 has "
        "been outside of collectives for 12 s during its forward at a.py:3 in f, after 5 collectives of that "
        "group; the last one was barrier()"
    )


def test_why_a_rank_has_not_come():
    for state, reason in (
        (at(1, condition=Condition.STOPPED.value), "rank 1 is stopped by a signal (SIGSTOP or SIGTSTP)"),
        (at(1, condition=Condition.GONE.value), "rank 1 has ended"),
        (at(1, condition=Condition.TRACED.value), "rank 1 is in a debugger"),
        (at(1, "end of program"), "rank 1 has come to the end of its program"),
        (at(1, "all_gather", 3), "rank 1 has been in all_gather() for 12 s"),
    ):
        found = diagnose([*in_all_reduce(0, 2), state], 3)
        assert found.behind == (1,)
        assert reason in found.sentences[0]


def test_a_chain_leads_to_its_end():
    """Rank 0 waits for a message of rank 1, and that for one of rank 2."""
    chain = [at(0, "recv", peer=1), at(1, "wait for irecv", peer=2), at(2), *in_all_reduce(3)]
    found = diagnose(chain, 4)
    assert found.behind == (2,)
    assert found.waits == {0: {1}, 1: {2}, 3: {0, 1, 2}}
    assert "ranks 1, 3 wait for rank 2" in found.sentences[0]


def test_circles():
    ring = [at(rank, "send", peer=(rank + 1) % 3) for rank in range(3)]
    found = diagnose(ring, 3)
    assert (found.is_circle, found.behind) == (True, (0, 1, 2))
    crossed = [at(rank, "barrier", 6, group=OTHER if rank == 1 else WORLD) for rank in range(3)]
    found = diagnose(crossed, 3)
    assert (found.is_circle, found.behind) == (True, (1,))
    assert found.sentences == [
        "every rank waits for another one, in a circle, so none goes on; look at rank 1 first"
    ]


def test_all_have_come_and_one_is_stopped_in_the_middle():
    states = in_all_reduce(0, 1, 2)
    assert diagnose(states, 3).behind == ()
    states[2] = replace(states[2], condition=Condition.STOPPED.value)
    assert diagnose(states, 3).behind == (2,)


def test_ends_of_programs_and_ranks_of_other_nodes():
    found = diagnose([at(0, "end of program"), at(1)], 3)
    assert (found.behind, found.unknown) == ((), (2,))
    assert found.waits == {0: {1, 2}}


def test_states_go_through_json():
    state = at(1, "recv", peer=2, phase="data")
    assert RankState.from_json(json.loads(json.dumps(state.as_json()))) == state


def test_the_users_line_of_a_stack():
    stacks = """\
Thread 0x00007f1c01000000 (most recent call first):
  File "/home/me/other.py", line 1 in work
Current thread 0x00007f1c01c59b80 (most recent call first):
  File "{package}/comm.py", line 9 in all_reduce
  File "/venv/lib/python3.11/site-packages/torch/nn/module.py", line 5 in forward
  File "/home/me/torch/axonmpi/train.py", line 12 in step
  File "/home/me/main.py", line 3 in <module>
"""
    from axonmpi import comm

    stacks = stacks.replace("{package}", comm.__file__.rpartition("/")[0])
    assert site_in(stacks, 0x7F1C01C59B80) == "train.py:12 in step"
    assert site_in(stacks, 0x7F1C01000000) == "other.py:1 in work"
    assert site_in("(no stack: no answer)", 1) == ""
