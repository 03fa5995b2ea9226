"""Connections between nodes, by which a node notices the loss of another node or of the network.

The lowest rank of each node keeps a TCP connection to the lowest rank of the next node, in a ring: two for each
node, however many nodes there are. It carries no data while the job runs. Both kernels probe the connection every
second and answer without the processes, so a busy or stopped rank does not count as lost. A connection shows

    an empty line, then the end    the other rank has come to the end of its program
    a line, then the end           the other rank has ended the job for the reason in the line
    the end                        the other process has ended
    an error after 4 s             the other node is lost, or the network to it

The ranks exchange addresses and secrets over MPI, and authenticate each connection (`authentication.py`). If a
firewall keeps them from connecting within 2 s, rank 0 prints a warning, and only the watchdog's time limit ends a
job with a lost node.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from ..utils.text import name_ranks
from . import exit as exits
from .authentication import CONNECT_SECONDS, NodeAddress, accept_and_connect, listen
from .topology import Topology

PROBE_SECONDS = 1
LOST_SECONDS = 4
"""Time without an answer after which a connection is lost."""
ANSWER_SECONDS = 1.0
"""Time limit for an answer of a node that seems to be lost."""
_MAX_ADDRESSES = 16
_SECRET_BYTES = 16
_SAID_BYTES = 1000
"""Length at which a line is cut."""
_SIOCGIFADDR = 0x8915

_links: list[Link] = []


class LinkState(Enum):
    """State of a connection to another node."""

    OPEN = "open"
    LEFT = "the other rank has come to its end"
    ENDED = "the other process has gone"
    LOST = "nothing answers"


class Link:
    """The connection to the lowest rank of another node.

    Args:
        connection: The socket.
        peer: Address of the other rank.

    Attributes:
        peer: Address of the other rank.
        state: State at the last look.
        said: The other rank's reason for ending the job; empty without one.
    """

    def __init__(self, connection: socket.socket, peer: NodeAddress) -> None:
        self.peer = peer
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
        """Return the file descriptor, which is readable when `look` may return a new state; local."""
        return self._socket.fileno()

    def look(self) -> LinkState:
        """Return the state of the connection; local, does not wait."""
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
        """Send the other rank the reason for which this rank ends the job; local, does not wait."""
        line = " ".join(why.split())[:_SAID_BYTES]
        with contextlib.suppress(OSError):
            self._socket.send(line.encode() + b"\n")

    def close(self) -> None:
        """Close the connection at the end of this rank's program; local."""
        self.say("")
        self._socket.close()

    def drop(self) -> None:
        """Close this process's descriptor alone, as a fork of the rank; local."""
        self._socket.close()

    def answers(self) -> bool:
        """Return True if the other node of a lost connection answers again; local, waits for up to 1 s."""
        with socket.socket(self._socket.family) as probe:
            probe.settimeout(ANSWER_SECONDS)
            try:
                probe.connect(self._address)
            except ConnectionRefusedError:  # an answer: the port is closed by now
                return True
            except OSError:
                return False
            return True


def links() -> list[Link]:
    """Return this rank's connections to other nodes; local."""
    return _links


def connect(mpi: Any, comm: Any, node: Any, topology: Topology) -> str:
    """Connect the lowest rank of this node to the lowest ranks of the nodes before and after; collective.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: Communicator of all ranks.
        node: Communicator of this node's ranks.
        topology: This rank's node and local rank. On one node there is nothing to connect.

    Returns:
        The reason for a missing connection to the next node; empty on success.
    """
    if topology.num_nodes == 1:
        return ""
    ranks = node.gather(comm.rank)
    ring = comm.Split(mpi.UNDEFINED if node.rank else 0, comm.rank)
    if node.rank:
        return ""
    with contextlib.closing(listen()) as listener:
        port = 0 if listener.fileno() < 0 else listener.getsockname()[1]
        secret = secrets.token_hex(_SECRET_BYTES)
        own = NodeAddress(comm.rank, os.uname().nodename, name_ranks(ranks), _ip_addresses(), port, secret)
        reason = _connect_ring(ring, listener, own)
    ring.Free()
    os.register_at_fork(after_in_child=_leave_to_parent)
    exits.at_failure(partial(_send_reason, f"rank {comm.rank} has failed"))
    exits.before_finalize(_close)
    return reason


def _connect_ring(ring: Any, listener: socket.socket, own: NodeAddress) -> str:
    """Connect to the nodes before and after; return the reason for a missing connection to the next node."""
    before, after = _exchange(ring, own, own)
    # Two nodes need one connection: rank 0 calls rank 1.
    calls, is_called = ring.size > 2 or ring.rank == 0, ring.size > 2 or ring.rank == 1
    from_before, to_after = accept_and_connect(listener, own.secret if is_called else "", after if calls else None)
    # A connection counts only if both ends have it.
    before_has, after_has = _exchange(ring, to_after is not None, from_before is not None)
    for connection, peer, peer_has in ((from_before, before, before_has), (to_after, after, after_has)):
        if connection is not None and peer_has:
            _links.append(Link(connection, peer))
        elif connection is not None:
            connection.close()
    if not calls or (to_after is not None and after_has):
        return ""
    return (
        f"no connection to node {after.host} in {CONNECT_SECONDS:g} s: if it goes, ranks notice late; let nodes "
        "connect to each other on any port"
    )


def _exchange(ring: Any, to_after: Any, to_before: Any) -> tuple[Any, Any]:
    """Send an object to each neighbour in the ring; return the objects from the ranks before and after."""
    before, after = (ring.rank - 1) % ring.size, (ring.rank + 1) % ring.size
    from_before = ring.sendrecv(to_after, dest=after, sendtag=0, source=before, recvtag=0)
    from_after = ring.sendrecv(to_before, dest=before, sendtag=1, source=after, recvtag=1)
    return from_before, from_after


# ---- addresses --------------------------------------------------------------------------------------------------


def _ip_addresses() -> list[str]:
    """Return the IP addresses of this node's interfaces, without the loopback's."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, _, _, scope, *_ = line.split()
            if scope == "00":  # global, not link-local
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    return [address for address in found if not address.startswith("127.")][:_MAX_ADDRESSES]


# ---- the end ----------------------------------------------------------------------------------------------------


def _send_reason(why: str) -> None:
    for link in _links:
        link.say(why)


def _close() -> None:
    while _links:
        _links.pop().close()


def _leave_to_parent() -> None:
    """Close the connections in a fork, or they would outlive the rank."""
    while _links:
        _links.pop().drop()
