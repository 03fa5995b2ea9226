"""Connections to the launcher that the rank before holds open, too."""

import os
import socket
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from axonmpi.launch import lifeline


@pytest.fixture
def launcher(monkeypatch):
    """The launcher's end of a connection, and the ranks' end."""
    monkeypatch.setattr(lifeline, "_held", [])
    mine, own = socket.socketpair()
    for name, value in {"PMI_FD": own.fileno(), "PMI_RANK": 0, "PMI_SIZE": 3, "MPI_LOCALRANKID": 0}.items():
        monkeypatch.setenv(name, str(value))
    with mine, own:
        yield mine, own


def hold_on(ranks: int, of: int | None = None) -> list[int]:
    """Have ranks of a node, threads with one connection, hold the next one's; return the descriptors."""
    barrier, job = threading.Barrier(ranks), uuid.uuid4().hex
    nodes = [SimpleNamespace(rank=rank, size=of or ranks, Barrier=barrier.wait) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(lifeline.hold, nodes, [job] * ranks))
    return lifeline._held


def test_a_connection_ends_when_the_rank_before_has_gone_too(launcher) -> None:
    mine, own = launcher
    held = hold_on(3)
    assert (len(set(held)), any(map(os.get_inheritable, held))) == (3, False)
    own.close()
    mine.setblocking(False)
    for file in held:
        with pytest.raises(BlockingIOError):  # open
            mine.recv(1)
        os.close(file)
    assert mine.recv(1) == b""


@pytest.mark.parametrize(
    ("ranks", "of", "lacks"),
    [(1, 1, []), (2, 2, ["PMI_FD"]), (2, 2, ["MPI_LOCALRANKID"]), (1, 2, [])],
    ids=["alone", "without a connection", "under another launcher", "where nobody comes"],
)
def test_a_rank_that_cannot_hold_a_connection_goes_on(launcher, monkeypatch, ranks, of, lacks) -> None:
    for name in lacks:
        monkeypatch.delenv(name)
    assert hold_on(ranks, of) == []
