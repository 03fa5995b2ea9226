"""What every collective between nodes begins with: all agree on the call before any of them moves data.

Recursive doubling by messages (Thakur, Rabenseifner and Gropp 2005): in each round a peer swaps a message with
another one, at half the distance of the round before. It is the same exchange whatever the call, so messages
always meet, even where the calls differ:

    | key, -key, value, -value, flag: 40 bytes, of which all keep the largest | up to 64 KiB of data |

The largest of key and -key tell whether all keys were the same. Small data travels along, with peers whose messages
say the same, so a small collective is complete after as many rounds as the number of nodes has binary digits.

    peers      0  1  2  3  4        4 is a guest: it sends to 0 first, and gets the result last
    first      4 > 0
    round 1    0 - 2, 1 - 3
    round 2    0 - 1, 2 - 3
    last       0 > 4
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Protocol

import numpy as np

from ..tuning import AGREEMENT_BYTES
from .nodes import Integers
from .patience import Patience

__all__ = ["FIRST", "LAST", "TAG_OF_AGREEMENT", "Agreement", "Head", "Payload"]

FIRST, LAST = -1, 0
"""The steps before the first round and after the last one; those between are distances."""
_HEADER = Struct("5q")
_PAYLOAD_AT = 64
TAG_OF_AGREEMENT = 0


Head = tuple[int, int, int, int, int]
"""A key, -key, value, -value, and a flag."""


class Payload(Protocol):
    """Data that travels with an agreement; see `payloads`."""

    def send(self, step: int) -> int:
        """Put what the step sends into `Agreement.outgoing`; returns its bytes."""

    def take(self, step: int, *, is_lower: bool) -> None:
        """Take what has come into `Agreement.incoming`, from a peer with a lower index or a higher one."""


class Agreement:
    """The exchange between one rank of each node.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: A communicator that has them.
        peers: [peers] their ranks in it.
        index: Which of them this one is.
        patience: How this one waits.

    Attributes:
        count: How many peers there are.
        index: The same.
        hosts: How many of them take part in rounds: the largest power of two up to `count`.
        outgoing: [AGREEMENT_BYTES] memory for data that is sent.
        incoming: The same for data that comes.
    """

    def __init__(self, mpi: Any, comm: Any, peers: Integers, index: int, patience: Patience) -> None:
        self._comm, self._patience = comm, patience
        self.count, self.index = len(peers), index
        self.hosts = hosts = 1 << (self.count.bit_length() - 1)
        self._host = int(peers[index - hosts]) if index >= hosts else None
        self._guest = int(peers[index + hosts]) if index + hosts < self.count else None
        distances = [1 << number for number in reversed(range(hosts.bit_length() - 1))] if index < hosts else []
        self._rounds = [(each, int(peers[index ^ each]), bool(index & each)) for each in distances]
        out, into = (np.zeros(_PAYLOAD_AT + AGREEMENT_BYTES, np.uint8) for _ in range(2))
        self.outgoing, self.incoming = out[_PAYLOAD_AT:], into[_PAYLOAD_AT:]
        self._said, self._heard = (memory[: _HEADER.size].data for memory in (out, into))
        self._head, self._came = self._said.cast("q"), self._heard.cast("q")
        self._out: list[Any] = [out, 0, mpi.BYTE]
        self._in: list[Any] = [into, into.nbytes, mpi.BYTE]

    def run(self, head: Head, payload: Payload | None = None) -> tuple[int, ...]:
        """Exchange headers, and the payload with peers that say the same; collective over the peers.

        Args:
            head: The largest key, -key, value, -value and flag on this node.
            payload: Data to go along.

        Returns:
            The largest of each over all nodes.
        """
        _HEADER.pack_into(self._said, 0, *head)
        if head[0] != -head[1] or head[2] != -head[3]:
            payload = None
        if self._host is not None:
            self._send(self._host, payload, FIRST)
            self._receive(self._host)
            self._fold(payload, LAST, is_lower=True)
        else:
            if self._guest is not None:
                self._receive(self._guest)
                payload = self._fold(payload, FIRST, is_lower=False)
            for distance, peer, is_lower in self._rounds:
                self._swap(peer, payload, distance)
                if payload is not None or self._said != self._heard:  # else there is nothing to do, in most rounds
                    payload = self._fold(payload, distance, is_lower=is_lower)
            if self._guest is not None:
                self._send(self._guest, payload, LAST)
        return _HEADER.unpack_from(self._said)

    def _fold(self, payload: Payload | None, step: int, *, is_lower: bool) -> Payload | None:
        """Take the message that has come; returns the payload as long as all messages have said the same."""
        if self._said != self._heard:  # bytes, since one comparison takes a fraction of five
            is_same = self._head[:4] == self._came[:4]
            for number, word in enumerate(self._came):
                self._head[number] = max(self._head[number], word)
            payload = payload if is_same else None
        if payload is not None:
            payload.take(step, is_lower=is_lower)
        return payload

    def _fill(self, payload: Payload | None, step: int) -> list[Any]:
        self._out[1] = _HEADER.size if payload is None else _PAYLOAD_AT + payload.send(step)
        return self._out

    def _swap(self, peer: int, payload: Payload | None, step: int) -> None:
        out = self._fill(payload, step)
        coming = self._comm.Irecv(self._in, peer, TAG_OF_AGREEMENT)
        self._patience.wait(coming, self._comm.Isend(out, peer, TAG_OF_AGREEMENT))

    def _send(self, peer: int, payload: Payload | None, step: int) -> None:
        self._patience.wait(self._comm.Isend(self._fill(payload, step), peer, TAG_OF_AGREEMENT))

    def _receive(self, peer: int) -> None:
        self._patience.wait(self._comm.Irecv(self._in, peer, TAG_OF_AGREEMENT))
