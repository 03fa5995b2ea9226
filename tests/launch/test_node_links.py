"""The connection between nodes: who is let in, and what its end says."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from helpers.limits import limit

from axonmpi.launch import authentication
from axonmpi.launch.authentication import NodeAddress, accept_and_connect, listen
from axonmpi.launch.node_links import Link, LinkState
from axonmpi.observe import node_monitor
from axonmpi.utils.waiting import Backoff, wait_until

SECRET = "5a" * 16
UNREACHABLE = "127.255.255.254"
"""An address where nobody listens."""


def address_of(listener: socket.socket, **other) -> NodeAddress:
    known = {
        "rank": 1,
        "host": "n2",
        "ranks": "ranks 1, 2",
        "addresses": [UNREACHABLE, "127.0.0.1"],
        "port": listener.getsockname()[1],
        "secret": SECRET,
    }
    return NodeAddress(**{**known, **other})


@pytest.fixture
def ends():
    """Both ends of a connection."""
    with listen() as listener, ThreadPoolExecutor() as pool:
        answered = pool.submit(accept_and_connect, listener, SECRET, None, limit(5))
        called = accept_and_connect(listener, "", address_of(listener), limit(5))[1]
        caller = answered.result()[0]
        whole = address_of(listener)
    with caller, called:
        yield Link(caller, whole), Link(called, whole)


def settled(link: Link) -> LinkState:
    assert wait_until(lambda: link.look() is not LinkState.OPEN, Backoff(0, 0.001), limit(5))
    return link.state


@pytest.mark.parametrize(("end", "state"), [(Link.close, LinkState.LEFT), (Link.drop, LinkState.ENDED)])
def test_an_end_with_a_goodbye_is_no_alarm_and_one_without_is(ends, end, state) -> None:
    link, other = ends
    assert {link.look(), other.look()} == {LinkState.OPEN}
    end(other)
    assert settled(link) is state
    assert link.said == ""


def test_the_first_cause_is_kept(ends) -> None:
    link, other = ends
    other.say("rank 2 is\nstopped")
    other.say("rank 1 has failed")
    other.drop()
    assert settled(link) is LinkState.ENDED
    assert link.said == "rank 2 is stopped"


def test_a_stranger_is_not_let_in_and_nobody_answers_where_nobody_is() -> None:
    with listen() as listener, ThreadPoolExecutor() as pool:
        waiting = pool.submit(accept_and_connect, listener, SECRET, None, 0.5)
        assert accept_and_connect(listener, "", address_of(listener, secret="00" * 16), 0.2) == (None, None)
        assert waiting.result() == (None, None)
        nowhere = address_of(listener)
    assert accept_and_connect(listener, "", nowhere, 0.2) == (None, None)


def silent(address: tuple[str, int]) -> list[socket.socket]:
    return [socket.create_connection(address)]


def crowd(address: tuple[str, int]) -> list[socket.socket]:
    return [socket.create_connection(address) for _ in range(400)]


def garbage(address: tuple[str, int]) -> list[socket.socket]:
    strangers = [socket.create_connection(address) for _ in range(8)]
    for stranger, data in zip(
        strangers, [b"\xff" * 4096, b"{", bytes.fromhex(SECRET), b"\0" * 48] * 2, strict=True
    ):
        stranger.sendall(data)
    return strangers


@pytest.mark.parametrize("come", [silent, crowd, garbage])
def test_strangers_that_come_first_do_not_keep_the_caller_out(come) -> None:
    with listen() as listener, ThreadPoolExecutor() as pool, ExitStack() as stack:
        waiting = pool.submit(accept_and_connect, listener, SECRET, None, limit(5))
        for stranger in come(("127.0.0.1", listener.getsockname()[1])):
            stack.enter_context(stranger)
        called = accept_and_connect(listener, "", address_of(listener), limit(5))[1]
        caller = waiting.result()[0]
        with called, caller:
            called.sendall(b"here")
            assert caller.recv(4) == b"here"


def test_a_call_in_parts_is_heard() -> None:
    with listen() as listener, ThreadPoolExecutor() as pool, socket.socket() as caller:
        waiting = pool.submit(accept_and_connect, listener, SECRET, None, limit(5))
        caller.connect(("127.0.0.1", listener.getsockname()[1]))
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        talk = authentication._prove_caller(bytes.fromhex(SECRET), "127.0.0.1")
        sent, wanted = next(talk)
        for byte in sent:
            caller.send(bytes([byte]))
        proof, wanted = talk.send(caller.recv(wanted, socket.MSG_WAITALL))
        for byte in proof:
            caller.send(bytes([byte]))
        assert caller.recv(wanted) == authentication._YES
        waiting.result()[0].close()


def test_a_stranger_that_listens_is_not_told_the_secret_and_cannot_pass_a_proof_on() -> None:
    """The stranger has an address of the other node, and relays to the rank itself."""
    received = b""
    with listen() as listener, socket.create_server(("127.0.0.2", 0)) as trap, ThreadPoolExecutor() as pool:
        waiting = pool.submit(accept_and_connect, listener, SECRET, None, 1.0)
        told = address_of(listener, addresses=["127.0.0.2"], port=trap.getsockname()[1])
        calling = pool.submit(accept_and_connect, listener, "", told, 1.0)
        victim, _ = trap.accept()
        with victim, socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as relay:
            received += victim.recv(4096)
            relay.sendall(received)
            victim.sendall(relay.recv(4096))
            received += victim.recv(4096)
            assert (calling.result(), waiting.result()) == ((None, None), (None, None))
    assert received
    assert bytes.fromhex(SECRET) not in received


@pytest.fixture
def watched(ends, monkeypatch):
    """A watchdog's view of a link, the link, and what is printed."""
    printed: list[str] = []
    monkeypatch.setattr(node_monitor, "links", lambda: [ends[0]])
    return node_monitor.NodeMonitor("n1", printed.append), ends[0], printed


def rank_that(waits: bool) -> SimpleNamespace:
    """A rank, as far as the verdict needs one."""
    operation = "all_reduce(float32 [4], SUM)" if waits else None
    return SimpleNamespace(waits=waits, is_lost=False, is_ending=False, operation=operation)


@pytest.mark.parametrize(
    ("ranks", "ends_job"),
    [([True, True], True), ([True, False], False), ([False, False], False)],
    ids=["all wait", "one computes", "nobody waits"],
)
def test_a_job_ends_only_where_all_ranks_wait(ends, watched, ranks, ends_job) -> None:
    seen, link, printed = watched
    states = {rank: rank_that(waits) for rank, waits in enumerate(ranks)}
    seen.look(0.5)
    assert seen.reason_to_end(states) == ""
    ends[1].drop()
    settled(link)
    link.state = LinkState.OPEN  # seen by the watchdog, not by this test
    for _ in range(4):
        seen.look(0.5)
    cause = "rank 1 on n2 has ended, or was ended, before the end of its program"
    assert printed == [f"axonmpi: {cause}"]
    expected = f"{cause} while ranks 0, 1 wait in all_reduce(float32 [4], SUM)" if ends_job else ""
    assert seen.reason_to_end(states) == expected


def test_a_node_that_answers_again_is_no_alarm(watched) -> None:
    seen, link, printed = watched
    link.state = LinkState.LOST
    for _ in range(4):
        seen.look(0.5)
    assert seen.reason_to_end({0: rank_that(True)}) == ""
    assert printed == [
        "axonmpi: the link from node n1 to node n2 (ranks 1, 2) is lost",
        "axonmpi: node n2 answers again, and the job goes on",
    ]
