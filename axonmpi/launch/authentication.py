"""Connections between ranks of two nodes, which prove to each other that they know a secret.

The secret, which ranks tell each other over MPI, is never sent: each end sends a random number, and a digest of
both numbers, the address that was called and the secret. Nothing else is read before. Anyone can connect, so
callers that send something else, or nothing, are dropped, and the rank that is waited for still gets in.
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
"""How many callers that have not proved themselves keep a connection: fewer than open files are usually allowed."""
_YES = b"+"
_BACKLOG = 1024


@dataclass(frozen=True)
class Place:
    """Address of the lowest rank of a node.

    Attributes:
        rank: Its world rank.
        host: Name of the node.
        ranks: Names of the node's ranks, for messages.
        addresses: IP addresses of the node.
        port: TCP port of the listening socket.
        secret: Key of the proofs that a connection begins with, in hexadecimal.
    """

    rank: int
    host: str
    ranks: str
    addresses: list[str]
    port: int
    secret: str


def listen() -> socket.socket:
    """Return a socket that listens on all addresses of this node; a closed one if there can be none; local."""
    with contextlib.suppress(OSError, ValueError):  # there may be no IPv6
        return socket.create_server(("::", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    with contextlib.suppress(OSError):
        return socket.create_server(("", 0), backlog=_BACKLOG)
    closed = socket.socket()
    closed.close()
    return closed


def meet(
    listener: socket.socket, secret: str, after: Place | None, limit: float = CONNECT_SECONDS
) -> tuple[socket.socket | None, socket.socket | None]:
    """Wait for a call, and call another rank at all of its addresses at once; local.

    Args:
        listener: Listening socket of this rank.
        secret: Secret that the caller knows, in hexadecimal; empty if none is to be waited for.
        after: The rank to call; None calls nobody.
        limit: Seconds.

    Returns:
        The connections to the caller and to the called; None where there is none.
    """
    meeting = _Meeting(secret, after)
    if secret and listener.fileno() >= 0:
        listener.setblocking(False)
        meeting.ready.register(listener, selectors.EVENT_READ, meeting.accept)
    if after is not None:
        for address in after.addresses:
            meeting.call(address, after.port)
    until = time.monotonic() + limit
    while not meeting.is_over() and (left := until - time.monotonic()) > 0:
        for key, _ in meeting.ready.select(left):
            key.data(key.fileobj)
    meeting.end()
    return meeting.caller, meeting.called


_Talk = Generator[tuple[bytes, int], bytes, None]
"""One end's part of the proof that both know the secret: yields bytes to send and the length of the answer."""


def _prove_caller(secret: bytes, address: str) -> _Talk:
    """Prove to the rank at an address that this rank knows its secret, without sending the secret."""
    own = secrets.token_bytes(_NONCE_BYTES)
    answer = yield own, _NONCE_BYTES + _PROOF_BYTES
    nonces = own + answer[:_NONCE_BYTES]
    _check(answer[_NONCE_BYTES:], _proof(secret, "called", nonces, address))
    _check((yield _proof(secret, "caller", nonces, address), len(_YES)), _YES)


def _prove_called(secret: bytes, address: str) -> _Talk:
    """Prove to a caller of one of this rank's addresses that this rank knows the secret."""
    own = secrets.token_bytes(_NONCE_BYTES)
    nonces = (yield b"", _NONCE_BYTES) + own
    _check(
        (yield own + _proof(secret, "called", nonces, address), _PROOF_BYTES),
        _proof(secret, "caller", nonces, address),
    )


def _proof(secret: bytes, role: str, nonces: bytes, address: str) -> bytes:
    # The address is part of the proof, so a stranger that listens at another address cannot relay it.
    return hmac.digest(secret, f"{role} {address} ".encode() + nonces, "sha256")


def _check(answer: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(answer, expected):
        raise ConnectionError("a stranger")


class _Meeting:
    """Calls under way, in both directions."""

    def __init__(self, secret: str, after: Place | None) -> None:
        self.caller: socket.socket | None = None
        self.called: socket.socket | None = None
        self.ready = selectors.DefaultSelector()
        self._secret = bytes.fromhex(secret)
        self._after = after
        self._calls: list[_Call] = []

    def is_over(self) -> bool:
        return (not self._secret or self.caller is not None) and (self._after is None or self.called is not None)

    def end(self) -> None:
        self.ready.close()
        for each in self._calls:
            each.connection.close()

    def call(self, address: str, port: int) -> None:
        assert self._after is not None
        caller = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        caller.setblocking(False)
        call = _Call(caller, _prove_caller(bytes.fromhex(self._after.secret), address), is_own=True)
        self._calls.append(call)
        with contextlib.suppress(OSError):
            caller.connect_ex((address, port))
            self.ready.register(caller, selectors.EVENT_WRITE, lambda _: self._begin(call))

    def accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            stranger, _ = listener.accept()
            stranger.setblocking(False)
            address = stranger.getsockname()[0].removeprefix("::ffff:")
            call = _Call(stranger, _prove_called(self._secret, address), is_own=False)
            self._calls.append(call)
            self.ready.register(stranger, selectors.EVENT_READ, lambda _: self._go_on(call))
            call.begin()
        # The rank that is waited for speaks at once: silent ones must not keep it out by taking all descriptors.
        accepted = [each for each in self._calls if not each.is_own]
        if len(accepted) > _MAX_STRANGERS:
            self._refuse(accepted[0])

    def _begin(self, call: _Call) -> None:
        try:
            call.begin()
            self.ready.modify(call.connection, selectors.EVENT_READ, lambda _: self._go_on(call))
        except OSError:  # nobody listens at this address
            self._refuse(call)

    def _go_on(self, call: _Call) -> None:
        try:
            if not call.go_on():
                return
            if (self.called if call.is_own else self.caller) is not None:
                raise ConnectionError("another address has led here before")
            if not call.is_own:
                call.connection.send(_YES)
        except OSError:
            self._refuse(call)
            return
        self.ready.unregister(call.connection)
        self._calls.remove(call)
        if call.is_own:
            self.called = call.connection
        else:
            self.caller = call.connection

    def _refuse(self, call: _Call) -> None:
        if call.connection in self.ready.get_map():
            self.ready.unregister(call.connection)
        call.connection.close()
        self._calls.remove(call)


class _Call:
    """A connection whose other end has not proved yet that it knows the secret.

    Args:
        connection: The socket, non-blocking.
        talk: What is sent and received.
        is_own: Whether this rank has called.
    """

    def __init__(self, connection: socket.socket, talk: _Talk, *, is_own: bool) -> None:
        self.connection = connection
        self.is_own = is_own
        self._talk = talk
        self._received = b""
        self._wanted = 0

    def begin(self) -> None:
        """Send the first bytes."""
        first, self._wanted = next(self._talk)
        self.connection.send(first)

    def go_on(self) -> bool:
        """Receive more of an answer; return whether the other end has proved itself, OSError if it cannot."""
        data = self.connection.recv(self._wanted - len(self._received))
        if not data:
            raise ConnectionError("the other end has gone")
        self._received += data
        if len(self._received) < self._wanted:
            return False
        try:
            reply, self._wanted = self._talk.send(self._received)
        except StopIteration:
            return True
        self._received = b""
        self.connection.send(reply)
        return False
