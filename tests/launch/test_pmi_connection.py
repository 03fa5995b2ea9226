"""Connections to the launcher that the rank before holds open, too."""

import os
import socket
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from axonmpi.launch import pmi_connection


@pytest.fixture
def launcher(monkeypatch):
    """The launcher's end of a connection, and the ranks' end."""
    monkeypatch.setattr(pmi_connection, "_held", [])
    mine, own = socket.socketpair()
    for name, value in {"PMI_FD": own.fileno(), "PMI_RANK": 0, "PMI_SIZE": 3, "MPI_LOCALRANKID": 0}.items():
        monkeypatch.setenv(name, str(value))
    with mine, own:
        yield mine, own


@pytest.fixture
def folder():
    """A folder with a path short enough for sockets."""
    with TemporaryDirectory() as path:
        yield Path(path)


class Node(SimpleNamespace):
    """The communicator of a node, ranks of which are threads."""

    def allgather(self, value: str) -> list[str]:
        self.values[self.rank] = value
        self.barrier.wait()
        return self.values


def hold_on(ranks: int, folder: Path) -> list[str]:
    """Have ranks of a node, threads with one connection, hold the next one's; return their reasons."""
    shared = {"size": ranks, "values": [""] * ranks, "barrier": threading.Barrier(ranks)}
    nodes = [Node(rank=rank, **shared) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(pmi_connection.hold, nodes, [folder] * ranks, [uuid.uuid4().hex[:8]] * ranks))


def test_a_connection_ends_when_the_rank_before_has_gone_too(launcher, folder) -> None:
    mine, own = launcher
    assert hold_on(3, folder) == [""] * 3
    held = pmi_connection._held
    assert (len(set(held)), any(map(os.get_inheritable, held)), list(folder.iterdir())) == (3, False, [])
    own.close()
    mine.setblocking(False)
    for file in held:
        with pytest.raises(BlockingIOError):  # open
            mine.recv(1)
        os.close(file)
    assert mine.recv(1) == b""


@pytest.mark.parametrize(
    ("ranks", "lacks", "below", "reasons"),
    [
        (1, [], "", {""}),
        (2, ["PMI_FD"], "", {""}),
        (2, ["MPI_LOCALRANKID"], "", {""}),
        (2, [], "nowhere", {"No such file or directory"}),
    ],
    ids=["alone", "without a connection", "under another launcher", "without a folder"],
)
def test_a_rank_that_cannot_hold_a_connection_goes_on(
    launcher, folder, monkeypatch, ranks, lacks, below, reasons
) -> None:
    for name in lacks:
        monkeypatch.delenv(name)
    assert {reason.rpartition("] ")[2] for reason in hold_on(ranks, folder / below)} == reasons
    assert pmi_connection._held == []
