"""The connection between nodes: who is let in, and what its end says."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from axonmpi.launch.node_links import Link, LinkState, Place, listen, meet
from axonmpi.observe import neighbours
from axonmpi.utils.waiting import Backoff, wait_until

SECRET = "5a" * 16
UNREACHABLE = "127.255.255.254"
"""An address where nobody listens."""


def place(listener: socket.socket, **other) -> Place:
    known = {
        "rank": 1,
        "host": "n2",
        "ranks": "ranks 1, 2",
        "addresses": [UNREACHABLE, "127.0.0.1"],
        "port": listener.getsockname()[1],
        "secret": SECRET,
    }
    return Place(**{**known, **other})


@pytest.fixture
def ends():
    """Both ends of a connection."""
    with listen() as listener, ThreadPoolExecutor() as pool:
        caller = pool.submit(meet, listener, SECRET, None)
        called = meet(listener, "", place(listener))[1]
        caller = caller.result()[0]
        assert caller is not None
        assert called is not None
        whole = place(listener)
    with caller, called:
        yield Link(caller, whole), Link(called, whole), called


def settled(link: Link) -> LinkState:
    assert wait_until(lambda: link.look() is not LinkState.OPEN, Backoff(0, 0.001), 5.0)
    return link.state


def test_an_open_connection_says_nothing(ends) -> None:
    assert {link.look() for link in ends[:2]} == {LinkState.OPEN}


def test_a_goodbye_is_no_alarm(ends) -> None:
    link, other, _ = ends
    other.close()
    assert settled(link) is LinkState.LEFT


def test_the_end_without_a_goodbye(ends) -> None:
    link, other, _ = ends
    other.drop()
    assert settled(link) is LinkState.ENDED
    assert link.said == ""


def test_the_first_cause_is_kept(ends) -> None:
    link, other, _ = ends
    other.say("rank 2 is\nstopped")
    other.say("rank 1 has failed")
    other.drop()
    assert settled(link) is LinkState.ENDED
    assert link.said == "rank 2 is stopped"


def test_a_stranger_is_not_let_in() -> None:
    with listen() as listener, ThreadPoolExecutor() as pool:
        waiting = pool.submit(meet, listener, SECRET, None, 1.0)
        assert meet(listener, "", place(listener, secret="00" * 16), 0.5) == (None, None)
        assert waiting.result() == (None, None)


def test_nobody_is_there() -> None:
    with listen() as listener:
        nowhere = place(listener)
    assert meet(listener, "", nowhere, 0.2) == (None, None)


class Waiting:
    """A rank, as far as the verdict needs one."""

    def __init__(self, waits: bool, lost: bool = False) -> None:
        self.waits, self.is_lost, self.is_ending = waits, lost, False
        self.operation = "all_reduce(float32 [4], SUM)" if waits else None


@pytest.mark.parametrize(
    ("ranks", "ends_job"),
    [([True, True], True), ([True, False], False), ([False, False], False)],
    ids=["all wait", "one computes", "nobody waits"],
)
def test_a_job_ends_only_where_all_ranks_wait(ends, monkeypatch, ranks, ends_job) -> None:
    link, other, _ = ends
    printed: list[str] = []
    monkeypatch.setattr(neighbours, "links", lambda: [link])
    seen = neighbours.Neighbours("n1", printed.append)
    standings = {rank: Waiting(waits) for rank, waits in enumerate(ranks)}
    seen.look(0.5)
    assert seen.in_vain(standings) == ""
    other.drop()
    settled(link)
    link.state = LinkState.OPEN  # seen by the watchdog, not by this test
    for _ in range(4):
        seen.look(0.5)
    cause = "rank 1 on n2 has ended, or was ended, before the end of its program"
    assert printed == [f"axonmpi: {cause}"]
    expected = f"{cause} while ranks 0, 1 wait in all_reduce(float32 [4], SUM)" if ends_job else ""
    assert seen.in_vain(standings) == expected


def test_a_node_that_answers_again_is_no_alarm(ends, monkeypatch) -> None:
    link, _, _ = ends
    printed: list[str] = []
    monkeypatch.setattr(neighbours, "links", lambda: [link])
    seen = neighbours.Neighbours("n1", printed.append)
    link.state = LinkState.LOST
    for _ in range(4):
        seen.look(0.5)
    assert seen.in_vain({0: Waiting(True)}) == ""
    assert printed == [
        "axonmpi: the link from node n1 to node n2 (ranks 1, 2) is lost",
        "axonmpi: node n2 answers again, and the job goes on",
    ]
