"""TCP connections between ranks of two nodes, authenticated at both ends by a secret that is never sent.

The ranks get the secret over MPI. Each end sends a random number, and a digest of both numbers, the called address
and the secret; nothing else is read before. Anyone can connect: a connection that sends anything else is closed,
and connections that send nothing do not keep the expected rank out.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass

CONNECT_SECONDS = 2.0
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_MAX_STRANGERS = 256
"""Limit of open connections that are not authenticated: fewer than the usual limit of open files."""
_YES = b"+"
_BACKLOG = 1024


@dataclass(frozen=True)
class NodeAddress:
    """Address of the lowest rank of a node.

    Attributes:
        rank: World rank.
        host: Name of the node.
        ranks: Names of the node's ranks, for messages.
        addresses: IP addresses of the node.
        port: TCP port of the listening socket.
        secret: Secret of the listening rank, in hexadecimal.
    """

    rank: int
    host: str
    ranks: str
    addresses: list[str]
    port: int
    secret: str


def listen() -> socket.socket:
    """Return a socket that listens on all addresses of this node; a closed socket if none is possible; local."""
    with contextlib.suppress(OSError, ValueError):  # there may be no IPv6
        return socket.create_server(("::", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    with contextlib.suppress(OSError):
        return socket.create_server(("", 0), backlog=_BACKLOG)
    closed = socket.socket()
    closed.close()
    return closed


def accept_and_connect(
    listener: socket.socket, secret: str, target: NodeAddress | None, limit: float = CONNECT_SECONDS
) -> tuple[socket.socket | None, socket.socket | None]:
    """Accept the connection of one rank, and connect to another at all of its addresses at once; local.

    Args:
        listener: Listening socket of this rank.
        secret: This rank's secret, in hexadecimal; empty to accept no connection.
        target: The rank to connect to; None for none.
        limit: Time limit in seconds.

    Returns:
        The accepted connection and the connection to the target; None for each that is missing.
    """
    connector = _Connector(secret, target)
    connector.run(listener, time.monotonic() + limit)
    return connector.accepted, connector.connected


# ---- the handshake ----------------------------------------------------------------------------------------------

_Handshake = Generator[tuple[bytes, int], bytes, None]
"""One end of the handshake: yields bytes to send and the length of the answer, and returns once it is complete."""


def _prove_caller(secret: bytes, address: str) -> _Handshake:
    """Authenticate this rank to the rank at an address, and the other way round."""
    own = secrets.token_bytes(_NONCE_BYTES)
    answer = yield own, _NONCE_BYTES + _PROOF_BYTES
    nonces = own + answer[:_NONCE_BYTES]
    _check(answer[_NONCE_BYTES:], _proof(secret, "called", nonces, address))
    _check((yield _proof(secret, "caller", nonces, address), len(_YES)), _YES)


def _prove_called(secret: bytes, address: str) -> _Handshake:
    """Authenticate this rank to a caller of one of its addresses, and the other way round."""
    own = secrets.token_bytes(_NONCE_BYTES)
    nonces = (yield b"", _NONCE_BYTES) + own
    answer = yield own + _proof(secret, "called", nonces, address), _PROOF_BYTES
    _check(answer, _proof(secret, "caller", nonces, address))


def _proof(secret: bytes, role: str, nonces: bytes, address: str) -> bytes:
    # The address is part of the proof, so a stranger that listens at another address cannot relay it.
    return hmac.digest(secret, f"{role} {address} ".encode() + nonces, "sha256")


def _check(answer: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(answer, expected):
        raise ConnectionError("a stranger")


# ---- connections ------------------------------------------------------------------------------------------------


class _Candidate:
    """A connection that is not authenticated yet.

    Args:
        connection: The socket, non-blocking.
        handshake: This rank's end of the handshake.
        is_accepted: True if the other rank has called.
    """

    def __init__(self, connection: socket.socket, handshake: _Handshake, *, is_accepted: bool) -> None:
        self.socket = connection
        self.is_accepted = is_accepted
        self._handshake = handshake
        self._received = b""
        self._wanted = 0

    def advance(self) -> bool:
        """Receive and send the next bytes; return True once the other end is authenticated, else OSError."""
        if self._wanted:
            data = self.socket.recv(self._wanted - len(self._received))
            if not data:
                raise ConnectionError("the other end has gone")
            self._received += data
            if len(self._received) < self._wanted:
                return False
        try:
            reply, wanted = self._handshake.send(self._received) if self._wanted else next(self._handshake)
        except StopIteration:
            return True
        self._received, self._wanted = b"", wanted
        self.socket.send(reply)
        return False


class _Connector:
    """Candidates in both directions, until one of each is authenticated.

    The selector has the listening socket, without data, and all candidates, oldest first.

    Attributes:
        accepted: Connection of the rank that has called; None so far.
        connected: Connection to the target; None so far.
    """

    def __init__(self, secret: str, target: NodeAddress | None) -> None:
        self.accepted: socket.socket | None = None
        self.connected: socket.socket | None = None
        self._secret = bytes.fromhex(secret)
        self._target = target
        self._selector = selectors.DefaultSelector()

    def run(self, listener: socket.socket, deadline: float) -> None:
        if self._secret and listener.fileno() >= 0:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        if self._target is not None:
            for address in self._target.addresses:
                self._connect(address, self._target.port, bytes.fromhex(self._target.secret))
        while not self._is_complete() and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._accept(listener)
                elif key.data.socket.fileno() >= 0:  # not closed within this loop
                    self._advance(key.data)
        for candidate in self._candidates():
            candidate.socket.close()
        self._selector.close()

    def _is_complete(self) -> bool:
        has_accepted = not self._secret or self.accepted is not None
        return has_accepted and (self._target is None or self.connected is not None)

    def _candidates(self) -> list[_Candidate]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _connect(self, address: str, port: int, secret: bytes) -> None:
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        connection.setblocking(False)
        candidate = _Candidate(connection, _prove_caller(secret, address), is_accepted=False)
        self._selector.register(connection, selectors.EVENT_WRITE, candidate)
        try:
            connection.connect_ex((address, port))
        except OSError:  # not an address of this system
            self._drop(candidate)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            stranger, _ = listener.accept()
            stranger.setblocking(False)
            address = stranger.getsockname()[0].removeprefix("::ffff:")
            candidate = _Candidate(stranger, _prove_called(self._secret, address), is_accepted=True)
            self._selector.register(stranger, selectors.EVENT_READ, candidate)
        # The expected rank sends at once: silent strangers must not keep it out by taking all descriptors.
        strangers = [candidate for candidate in self._candidates() if candidate.is_accepted]
        if len(strangers) > _MAX_STRANGERS:
            self._drop(strangers[0])

    def _advance(self, candidate: _Candidate) -> None:
        try:
            if not candidate.advance():
                self._selector.modify(candidate.socket, selectors.EVENT_READ, candidate)
                return
            if (self.accepted if candidate.is_accepted else self.connected) is not None:
                raise ConnectionError("another address has led here before")
            if candidate.is_accepted:
                candidate.socket.send(_YES)
        except OSError:  # a stranger, or nobody listens at this address
            self._drop(candidate)
            return
        self._selector.unregister(candidate.socket)
        if candidate.is_accepted:
            self.accepted = candidate.socket
        else:
            self.connected = candidate.socket

    def _drop(self, candidate: _Candidate) -> None:
        self._selector.unregister(candidate.socket)
        candidate.socket.close()
