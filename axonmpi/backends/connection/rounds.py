"""Recursive doubling between one rank of each node: the agreement's part between nodes.

In each of log2 n rounds a peer swaps a message with another one, at half the distance of the round before
(Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH"). Messages
are the same for every call, so they always match, even if the calls differ:

    | key, -key, number, -number, flag: 40 bytes, of which all keep the largest | up to 64 KiB of data |

The largest of key and -key tell whether all keys were the same. Small data travels along between peers whose
headers are the same, so a small collective is complete with the last round.

    peers      0  1  2  3  4        4 is a guest: it sends to 0 first, and gets the result last
    first      4 > 0
    round 1    0 - 2, 1 - 3
    round 2    0 - 1, 2 - 3
    last       0 > 4

    Summed     each round adds the data of the two: the same tree of sums on all peers
    Gathered   each round swaps the blocks that the two have
    Copied     each round passes the data on to a peer that does not have it
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Protocol

import numpy as np
import torch

from ...utils.waiting import RequestWaiter
from ..call import Call
from ..reduction import choose_reduction, sum_of, wide_dtype
from ..tuning import AGREEMENT_BYTES
from .topology import Bytes, Integers

FIRST, LAST = -1, 0
"""Numbers of the steps before the first round and after the last one; a round's number is its distance."""
HEADER = Struct("5q")
"""Key, -key, number, -number and flag."""
TAG_OF_ROUNDS = 0
_PAYLOAD_AT = 64

Head = tuple[int, int, int, int, int]
"""Key, -key, number, -number and flag, as integers."""


class Payload(Protocol):
    """Data that travels with an agreement."""

    def send(self, step: int) -> int:
        """Put the data of this step into `Rounds.outgoing`; returns its size in bytes."""

    def take(self, step: int, *, is_lower: bool) -> None:
        """Take the data in `Rounds.incoming`, from a peer with a lower index or a higher one."""


class Rounds:
    """The exchange between one rank of each node.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: A communicator of all of them, and perhaps others.
        peers: [peers] their ranks in it.
        index: This peer's position in `peers`.
        waiter: Waits for messages.

    Attributes:
        count: Number of peers.
        index: This peer's position.
        hosts: Number of peers that take part in rounds: the largest power of two up to `count`.
        outgoing: [AGREEMENT_BYTES] memory for data that is sent.
        incoming: [AGREEMENT_BYTES] memory for data that is received.
    """

    def __init__(self, mpi: Any, comm: Any, peers: Integers, index: int, waiter: RequestWaiter) -> None:
        self._comm, self._wait = comm, waiter.wait
        self.count, self.index = len(peers), index
        self.hosts = hosts = 1 << (self.count.bit_length() - 1)
        self._host = int(peers[index - hosts]) if index >= hosts else None
        self._guest = int(peers[index + hosts]) if index + hosts < self.count else None
        distances = [1 << number for number in reversed(range(hosts.bit_length() - 1))] if index < hosts else []
        self._rounds = [(each, int(peers[index ^ each]), bool(index & each)) for each in distances]
        out, into = (np.zeros(_PAYLOAD_AT + AGREEMENT_BYTES, np.uint8) for _ in range(2))
        self.outgoing, self.incoming = out[_PAYLOAD_AT:], into[_PAYLOAD_AT:]
        self._said, self._heard = (memory[: HEADER.size].data for memory in (out, into))
        self._head, self._came = self._said.cast("q"), self._heard.cast("q")
        self._out: list[Any] = [out, 0, mpi.BYTE]
        self._in: list[Any] = [into, into.nbytes, mpi.BYTE]

    def run(self, head: Head, payload: Payload | None = None) -> Head:
        """Exchange headers, and the payload with peers of the same header; collective over the peers.

        Args:
            head: The largest key, -key, number, -number and flag on this node.
            payload: Data to go along.

        Returns:
            The largest of each over all nodes.
        """
        HEADER.pack_into(self._said, 0, *head)
        if head[0] != -head[1] or head[2] != -head[3]:
            payload = None
        if self._host is not None:
            self._send(self._host, payload, FIRST)
            self._receive(self._host)
            self._merge(payload, LAST, is_lower=True)
        else:
            if self._guest is not None:
                self._receive(self._guest)
                payload = self._merge(payload, FIRST, is_lower=False)
            for distance, peer, is_lower in self._rounds:
                self._swap(peer, payload, distance)
                if payload is not None or self._said != self._heard:  # else there is nothing to do, in most rounds
                    payload = self._merge(payload, distance, is_lower=is_lower)
            if self._guest is not None:
                self._send(self._guest, payload, LAST)
        return HEADER.unpack_from(self._said)

    def _merge(self, payload: Payload | None, step: int, *, is_lower: bool) -> Payload | None:
        """Take the received message; returns the payload as long as all headers have been the same."""
        if self._said != self._heard:  # as bytes: one comparison takes a fraction of five
            is_same = self._head[:4] == self._came[:4]
            for number, word in enumerate(self._came):
                self._head[number] = max(self._head[number], word)
            payload = payload if is_same else None
        if payload is not None:
            payload.take(step, is_lower=is_lower)
        return payload

    def _fill(self, payload: Payload | None, step: int) -> list[Any]:
        self._out[1] = HEADER.size if payload is None else _PAYLOAD_AT + payload.send(step)
        return self._out

    def _swap(self, peer: int, payload: Payload | None, step: int) -> None:
        out = self._fill(payload, step)
        coming = self._comm.Irecv(self._in, peer, TAG_OF_ROUNDS)
        self._wait(coming, self._comm.Isend(out, peer, TAG_OF_ROUNDS))

    def _send(self, peer: int, payload: Payload | None, step: int) -> None:
        self._wait(self._comm.Isend(self._fill(payload, step), peer, TAG_OF_ROUNDS))

    def _receive(self, peer: int) -> None:
        self._wait(self._comm.Irecv(self._in, peer, TAG_OF_ROUNDS))


class Summed:
    """A reduction of one dtype, shape and operation.

    Attributes:
        total: This node's part, then the reduction of all nodes; without rounding or division.
    """

    def __init__(self, rounds: Rounds, call: Call) -> None:
        wide = wide_dtype(call.dtype)
        self._nbytes = call.numel * wide.itemsize
        with torch.inference_mode(False):
            self.total, self._other = (
                torch.from_numpy(memory[: self._nbytes]).view(wide) for memory in (rounds.outgoing, rounds.incoming)
            )
        self._reduce = choose_reduction(wide, sum_of(call.op), 2).run

    def send(self, step: int) -> int:
        """Send the sum so far."""
        return self._nbytes

    def take(self, step: int, *, is_lower: bool) -> None:
        """Add the peer's sum, the lower index first."""
        if step == LAST:
            self.total.copy_(self._other)
        else:
            self._reduce([self._other, self.total] if is_lower else [self.total, self._other], self.total)


class Gathered:
    """Blocks of one size, one of each peer.

    Attributes:
        rows: [peers, nbytes] the blocks; the own one is there before.
    """

    def __init__(self, rounds: Rounds, nbytes: int) -> None:
        self.rows = np.empty((rounds.count, nbytes), np.uint8)
        index, hosts = rounds.index, rounds.hosts
        others = {1 << number: index ^ 1 << number for number in range(hosts.bit_length() - 1)}
        others |= {FIRST: index + hosts, LAST: index - hosts}
        self._out = {step: _beside(self._known_to(index, step), rounds.outgoing) for step in others}
        self._in = {step: _beside(self._known_to(peer, step), rounds.incoming) for step, peer in others.items()}

    def _known_to(self, index: int, step: int) -> Bytes:
        """Return the blocks that a peer has before a step: after the rounds, those at multiples of a distance."""
        if step == FIRST:
            return self.rows[index : index + 1]
        return self.rows if step == LAST else self.rows[index % (2 * step) :: 2 * step]

    def send(self, step: int) -> int:
        """Send all blocks that are here."""
        rows, outgoing = self._out[step]
        outgoing[...] = rows
        return rows.size

    def take(self, step: int, *, is_lower: bool) -> None:
        """Take the blocks of the peer."""
        rows, incoming = self._in[step]
        rows[...] = incoming


def _beside(rows: Bytes, memory: Bytes) -> tuple[Bytes, Bytes]:
    """Return rows, and memory of their shape; local."""
    return rows, memory[: rows.size].reshape(rows.shape)


class Copied:
    """One peer's data, which lies in `Rounds.outgoing` there before, and on all peers after.

    Args:
        rounds: The exchange.
        nbytes: Size of the data.
        source: Index of the peer whose data it is.
    """

    def __init__(self, rounds: Rounds, nbytes: int, source: int) -> None:
        self._rounds, self._nbytes, self._source = rounds, nbytes, source
        self._is_here = rounds.index == source

    def send(self, step: int) -> int:
        """Send the data if it is here: then the peer does not have it."""
        return self._nbytes if self._is_here else 0

    def take(self, step: int, *, is_lower: bool) -> None:
        """Take the data if the peer has it."""
        if not self._is_here and self._other_has(step):
            self._is_here = True
            self._rounds.outgoing[: self._nbytes] = self._rounds.incoming[: self._nbytes]

    def _other_has(self, step: int) -> bool:
        """Return True if the peer has the data before a step: in rounds, at multiples of twice the distance."""
        index, hosts = self._rounds.index, self._rounds.hosts
        if step == FIRST:
            return index + hosts == self._source
        return step == LAST or ((index ^ step) - self._source % hosts) % (2 * step) == 0
