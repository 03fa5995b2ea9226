"""Connections between nodes, by which a node notices the loss of another node or of the network.

The lowest rank of each node keeps a TCP connection to the lowest rank of the next node, in a ring: two for each
node, however many nodes there are. No data goes through it while the job goes on. Both kernels probe the connection
every second, and answer without the processes, so a busy or stopped rank does not count as lost. A connection shows

    a goodbye, and the end         the other rank has come to the end of its program
    a line, and the end            it has ended the job, and the line says why
    the end without a word         its process has gone
    an error after 4 s             the other node has gone, or the network to it

The ranks exchange addresses and secrets over MPI. Both ends prove that they know the secret, without sending it,
before anything else is read. If a firewall keeps them from connecting within 2 s, rank 0 says so, and a lost node
is noticed as late as any other rank that does not come.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..utils.text import name_ranks
from . import exit as exits
from .authentication import CONNECT_SECONDS, Place, listen, meet
from .topology import Topology

PROBE_SECONDS = 1
LOST_SECONDS = 4
"""After so long without an answer a connection is lost."""
ANSWER_SECONDS = 1.0
"""How long a node that seems to be lost has for an answer."""
_PLACE_BYTES = 2048
_MAX_ADDRESSES = 16
_SECRET_BYTES = 16
_SAID_BYTES = 1000
"""How much of a line is sent."""
_SIOCGIFADDR = 0x8915

_links: list[Link] = []


class LinkState(Enum):
    """What has become of a connection."""

    OPEN = "open"
    LEFT = "the other rank has come to its end"
    ENDED = "the other process has gone"
    LOST = "nothing answers"


class Link:
    """The connection to the lowest rank of another node.

    Args:
        connection: The socket.
        place: Whom it leads to.

    Attributes:
        place: The same.
        state: What has become of it, at the last look.
        said: Why the other rank ends the job; empty where it has not said so.
    """

    def __init__(self, connection: socket.socket, place: Place) -> None:
        self.place = place
        self.state = LinkState.OPEN
        self.said = ""
        self._socket = connection
        self._received = b""
        connection.setblocking(False)
        self._address = connection.getpeername()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, PROBE_SECONDS),
            (socket.TCP_KEEPINTVL, PROBE_SECONDS),
            (socket.TCP_KEEPCNT, LOST_SECONDS // PROBE_SECONDS),
            (socket.TCP_USER_TIMEOUT, 1000 * LOST_SECONDS),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        """Return the descriptor, which can be read when `look` has something to see."""
        return self._socket.fileno()

    def look(self) -> LinkState:
        """Return what has become of it; local, does not wait."""
        while self.state is LinkState.OPEN:
            try:
                data = self._socket.recv(4096)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            except OSError:
                self.state = LinkState.LOST
                break
            self._received += data
            lines = self._received.decode(errors="replace").split("\n")[:-1]
            self.said = next(filter(None, lines), "")
            if not data:
                self.state = LinkState.LEFT if "" in lines else LinkState.ENDED
        return self.state

    def say(self, why: str) -> None:
        """Tell the other rank why this one ends the job; local, does not wait."""
        line = " ".join(why.split())[:_SAID_BYTES]
        with contextlib.suppress(OSError):
            self._socket.send(line.encode() + b"\n")

    def close(self) -> None:
        """Say goodbye: this rank has come to its end; local."""
        self.say("")
        self._socket.close()

    def drop(self) -> None:
        """Close it without a word: the rank is another process's; local."""
        self._socket.close()

    def answers(self) -> bool:
        """Say whether the other node of a lost connection answers, so that it was lost for a moment; local."""
        with socket.socket(self._socket.family) as probe:
            probe.settimeout(ANSWER_SECONDS)
            try:
                probe.connect(self._address)
            except ConnectionRefusedError:  # nobody listens there any more, says the node
                return True
            except OSError:
                return False
            return True


def links() -> list[Link]:
    """Return this rank's connections to other nodes; local."""
    return _links


def connect(mpi: Any, comm: Any, node: Any, topology: Topology) -> str:
    """Connect the lowest rank of this node to those of the next nodes; collective, does nothing on one node.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: Communicator of all ranks.
        node: Communicator of this node's ranks.
        topology: Placement of this rank.

    Returns:
        The reason if there is no connection to the next node; empty if there is, or need not be.
    """
    if topology.num_nodes == 1:
        return ""
    ranks = node.gather(comm.rank)
    firsts = comm.Split(mpi.UNDEFINED if node.rank else 0, comm.rank)
    if node.rank:
        return ""
    with contextlib.closing(listen()) as listener:
        secret = secrets.token_hex(_SECRET_BYTES)
        port = 0 if listener.fileno() < 0 else listener.getsockname()[1]
        own = Place(comm.rank, os.uname().nodename, name_ranks(ranks), _addresses(), port, secret)
        before, after = _exchange(firsts, _as_bytes(own))
        ring = (Place(**json.loads(bytes(each).rstrip(b"\0"))) for each in (before, after))
        agreed, reason = _agreed(firsts, listener, own, *ring)
    _links.extend(agreed)
    firsts.Free()
    os.register_at_fork(after_in_child=_leave_to_parent)
    exits.at_failure(partial(_tell_end, f"rank {comm.rank} has failed"))
    exits.before_finalize(_say_goodbye)
    return reason


def _agreed(
    firsts: Any, listener: socket.socket, own: Place, before: Place, after: Place
) -> tuple[list[Link], str]:
    """Return the connections that both ends have, and why there is none to the next node."""
    calls, called = firsts.size > 2 or firsts.rank == 0, firsts.size > 2 or firsts.rank == 1
    found = meet(listener, own.secret if called else "", after if calls else None)
    has = [np.array([each is not None], np.uint8) for each in found]
    has_before, has_after = _exchange(firsts, *has[::-1])
    agreed = []
    for connection, place, other in zip(found, (before, after), (has_before, has_after), strict=True):
        if connection is not None and other[0]:
            agreed.append(Link(connection, place))
        elif connection is not None:
            connection.close()
    if not calls or (found[1] is not None and has_after[0]):
        return agreed, ""
    return agreed, (
        f"no connection to node {after.host} in {CONNECT_SECONDS:g} s: if it goes, ranks notice late; let nodes "
        "connect to each other on any port"
    )


def _exchange(firsts: Any, to_after: Any, to_before: Any = None) -> tuple[Any, Any]:
    """Send to both neighbours in the ring; returns what those before and after have sent."""
    to_before = to_after if to_before is None else to_before
    before, after = (firsts.rank - 1) % firsts.size, (firsts.rank + 1) % firsts.size
    from_before, from_after = np.empty_like(to_after), np.empty_like(to_before)
    firsts.Sendrecv(to_after, after, 0, from_before, before, 0)
    firsts.Sendrecv(to_before, before, 1, from_after, after, 1)
    return from_before, from_after


def _as_bytes(place: Place) -> Any:
    return np.frombuffer(json.dumps(asdict(place)).encode().ljust(_PLACE_BYTES, b"\0"), np.uint8)


# ---- addresses --------------------------------------------------------------------------------------------------


def _addresses() -> list[str]:
    """Return the addresses of this node's interfaces, without the loopback's."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, _, _, scope, *_ = line.split()
            if scope == "00":  # not of one network only
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    return [address for address in found if not address.startswith("127.")][:_MAX_ADDRESSES]


# ---- the end ----------------------------------------------------------------------------------------------------


def _tell_end(why: str) -> None:
    for link in _links:
        link.say(why)


def _say_goodbye() -> None:
    while _links:
        _links.pop().close()


def _leave_to_parent() -> None:
    """Let go of the connections in a fork, or they would outlive the rank."""
    while _links:
        _links.pop().drop()
