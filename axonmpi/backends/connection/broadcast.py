"""Broadcast: the root's tensor is copied into those of all other ranks, in place.

    small      up to a chunk on one node, up to 64 KiB between nodes: with the agreement
    in place   symmetric tensors on one node: each rank reads the root's memory
    chunked    the root copies a chunk into its buffer; lane l takes slice l to the other nodes; all copy it out
    alone      ranks that are alone on their nodes: the lane carries the tensors themselves

The bytes go once into each node, in log2 n rounds of the MPI library's or more, and twice through memory there.

Source: MPI 4.1, section 6.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..buffers import bytes_of, flat_elements, write_back
from ..call import Call
from .chunks import ALIGNMENT, slices_of, stages_of
from .connection import Connection
from .lane import Flight
from .rounds import Copied, Payload, Rounds
from .topology import Bytes


def broadcast(ranks: Connection, call: Call, tensor: Tensor) -> None:
    """Copy the root's tensor into those of the other ranks, in place; collective.

    Args:
        ranks: The group.
        call: The call.
        tensor: Of the call's dtype and shape, any strides.

    Raises:
        CollectiveMismatchError: The ranks made different calls.
    """
    flat = flat_elements(tensor)
    data, address = bytes_of(flat), ranks.address_of_large(flat)
    if address and ranks.agreement.agree(call, 0, address)[2]:
        _read_from_root(ranks, call, data, address)
    elif not address and data.nbytes <= ranks.small_bytes:
        if not broadcast_small(ranks, call, data):
            _broadcast_chunks(ranks, call, data)
    elif ranks.is_apart:
        assert ranks.lane is not None
        ranks.agreement.agree(call)
        ranks.lane.complete(ranks.lane.broadcast(flat, call.root))
    else:
        if not address:
            ranks.agreement.agree(call)
        _broadcast_chunks(ranks, call, data)
    if ranks.topology.rank != call.root:
        write_back(flat, tensor)


def broadcast_small(ranks: Connection, call: Call, data: Bytes) -> bool:
    """Copy small data of the call's root to all ranks, in place, with the agreement; collective.

    Returns:
        False if the data of some ranks, not of this one, is symmetric: nothing was copied then.
    """
    buffers, topology, rounds = ranks.staging.buffers, ranks.topology, ranks.rounds
    cargo = None if rounds is None else _CopyCargo(ranks, rounds, data.nbytes, *topology.find(call.root))
    index = ranks.barrier.count % len(buffers)
    if topology.rank == call.root:
        target = buffers[index][topology.local_rank]
        if rounds is not None and ranks.is_apart:
            target = rounds.outgoing
        target[: data.nbytes] = data
    if not ranks.agreement.agree(call, 0, 0, cargo)[2]:
        return False
    if topology.rank != call.root:
        data[...] = buffers[index][call.root][: data.nbytes] if cargo is None else cargo.result
    return True


class _CopyCargo:
    """A root's data on its way between nodes; see `agreement.Cargo`."""

    def __init__(self, ranks: Connection, rounds: Rounds, nbytes: int, node: int, local_rank: int) -> None:
        self._ranks, self._rounds, self._nbytes = ranks, rounds, nbytes
        self._node, self._local_rank = node, local_rank

    @property
    def result(self) -> Bytes:
        """The data after the agreement, valid until the next collective."""
        memory = self._rounds.outgoing if self._ranks.is_apart else self._ranks.buffers_before()[0]
        return memory[: self._nbytes]

    def load(self) -> Payload:
        """Take the data of the root if it is on this node."""
        if self._ranks.topology.node == self._node and not self._ranks.is_apart:
            self._rounds.outgoing[: self._nbytes] = self._ranks.buffers_before()[self._local_rank][: self._nbytes]
        return Copied(self._rounds, self._nbytes, self._node)

    def unload(self) -> None:
        """Show the data to this node."""
        if not self._ranks.is_apart:
            self._ranks.buffers_now()[0][: self._nbytes] = self._rounds.outgoing[: self._nbytes]


def _read_from_root(ranks: Connection, call: Call, data: Bytes, address: int) -> None:
    """Read a symmetric tensor in the root's memory; collective, after the agreement."""
    assert ranks.arena is not None
    if ranks.topology.rank != call.root:
        data[...] = ranks.arena.parts(address, data.nbytes)[call.root]
    ranks.barrier.wait(call)


def _broadcast_chunks(ranks: Connection, call: Call, data: Bytes) -> None:
    """Copy chunks of the root's data to all ranks; collective, after the agreement."""
    topology, buffers, lane, size = ranks.topology, ranks.staging.buffers, ranks.lane, ranks.chunk_bytes
    node, root = topology.find(call.root)
    is_root, is_here = topology.rank == call.root, topology.node == node
    chunks = [data[at : at + size] for at in range(0, data.nbytes, size)]
    flights: dict[int, Flight] = {}

    def copy_in(number: int, index: int, now: int) -> None:
        if is_root:
            buffers[index][root][: chunks[number].nbytes] = chunks[number]

    def start(number: int, index: int, now: int) -> None:
        if lane is not None:
            low, high = slices_of(chunks[number].nbytes, topology.lanes, ALIGNMENT)[topology.local_rank]
            memory = torch.from_numpy(buffers[index][root if is_here else topology.local_rank][low:high])
            flights[number] = lane.start(lane.broadcast(memory, node))

    def end(number: int, index: int, now: int) -> None:
        if lane is not None:
            flights.pop(number).finish()

    def copy_out(number: int, index: int, now: int) -> None:
        chunk = chunks[number]
        if not is_here:
            for peer, (low, high) in enumerate(slices_of(chunk.nbytes, topology.lanes, ALIGNMENT)):
                chunk[low:high] = buffers[index][peer][low:high]
        elif not is_root:
            chunk[...] = buffers[index][root][: chunk.nbytes]

    middle = [] if ranks.rounds is None else stages_of(len(chunks), start, end)
    ranks.run_chunks(call, len(chunks), [copy_in, *middle, copy_out], is_agreed=True)
