"""Collectives for ranks on several nodes.

The ranks of a node meet in shared memory; between nodes go only as many bytes as have to, however many ranks a node
has. Ranks with the same place on their nodes form a lane, and each lane carries its slice of the data:

    node 0: ranks 0 1         sum of 0 1 ──▶ + 2 3 ──▶ + 4 5       the sum grows from node to node ...
    node 1: ranks 2 3
    node 2: ranks 4 5         result ◀────── result ◀── result     ... and the result comes back the same way

A chain of nodes keeps the sums in rank order, whatever the number of nodes, and in float32 for 16-bit types. Data
flows in chunks, so that all nodes and both directions of the network work at the same time: with two nodes each
direction carries the data once, which is the least possible (Patarasu and Yuan 2009); with many, twice.

Waiting for the network is done by looking now and then, and sleeping in between: the cores are for computing.
This file cuts the data and orders the turns; `chain` is what a lane does in its turn, `channels` its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...utils.cache import BoundedCache
from ...utils.waiting import YIELDS, Steps, is_beside_computation, run_steps
from ..buffers import as_bytes, flat_elements, write_back
from ..call import Call
from ..concat_view import FlatParts
from ..connection import Limits
from ..handshake import PAYLOAD_BYTES, Handshake
from ..shared.arena import Arena
from ..shared.barrier import NodeBarrier
from ..shared.chunk_pipeline import Stage, run_stages
from ..shared.collectives import SharedConnection
from ..shared.segment import Segment
from ..shared.staging import ALIGNMENT, Bytes, Staging, bounds_of, round_down, slices_of
from ..tuning import LEAST_NETWORK_CHUNK_BYTES, MAX_VIEWS, NETWORK_CHUNK_BYTES
from .chain import Chain, Exchange, Relay
from .channels import Lane, Nodes
from .stream import Portion, Stream, cut_rows

__all__ = ["NetworkConnection"]

_CHUNKS = 16


class NetworkConnection(SharedConnection):
    """Moves large data between the ranks of a group that lies on several nodes.

    Args:
        handshake: Compares the calls of all ranks.
        nodes: Where the ranks are.
        barrier: The barrier of the own node's ranks.
        arena: Memory that they share.
        spare: Serves where there is no more: four lines of memory for each block that a lane carries, at least.
        lane: The ranks at the same place on other nodes; None on ranks without a lane.
        limits: Sizes of chunks.
        release: Called by `free`, in order.
    """

    path = "nodes"

    def __init__(
        self,
        handshake: Handshake,
        nodes: Nodes,
        barrier: NodeBarrier,
        arena: Arena,
        spare: Segment,
        lane: Lane | None,
        limits: Limits,
        *,
        release: Sequence[Callable[[], None]] = (),
    ) -> None:
        super().__init__(handshake, barrier, arena, release)
        self._nodes = nodes
        self._spare = spare
        self._lane = lane
        self._limits = limits
        self._staging: tuple[Staging, Staging] | None = None
        self._carried = nodes.carried
        self._unit = ALIGNMENT * max(map(len, self._carried))
        self._most = 0
        self._cut_before: BoundedCache[Any, list[Portion]] = BoundedCache(MAX_VIEWS)
        self._spans: dict[int, tuple[int, int]] = {}
        self._deciding = False
        self._begun = self._met = self._ended = 0
        # The other nodes' messages have to move on while this rank waits for its neighbours.
        # Beside a thread that computes, a nap is over sooner than the turn that giving way takes.
        barrier.yields = YIELDS
        barrier.while_waiting = lane.progress if lane is not None else None

    # ---- reductions ---------------------------------------------------------------------------------------

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self._nodes.of[self._nodes.own]

    def reduce(self, call: Call, tensor: Tensor) -> None:
        """Reduce onto the call's root, or onto all ranks if it has none, in place there; collective."""
        if call.nbytes <= PAYLOAD_BYTES:
            self.handshake.reduce(call, tensor)
        elif call.root is None:
            run_steps(self._all_reduce(call, tensor))
        else:
            self.handshake.agree(call)
            data = as_bytes(tensor).numpy()
            self._reduce(call, tensor.view(-1), [(0, data.nbytes)] if self.rank == call.root else [], data)
            if self.rank == call.root:
                torch.autograd.graph.increment_version(tensor)

    def reduce_in_steps(self, call: Call, tensor: Tensor) -> Steps[None]:
        """Return a reduction onto all ranks in steps, between which the next one may begin; any strides; local."""
        return self._small(call, tensor) if call.nbytes <= PAYLOAD_BYTES else self._all_reduce(call, tensor)

    def _all_reduce(self, call: Call, tensor: Tensor) -> Steps[None]:
        yield from self._take_turn()
        try:
            span = yield from self._until_free(tensor)
            flat = flat_elements(tensor)
            address = self._arena.address(flat)
            self._barrier.fence()
            words = yield from self.handshake.agree_in_steps(call, address, is_beside_computation())
            if not self._is_symmetric([word for word, _ in words]):
                while self._ended < self._begun:
                    yield False
                data = as_bytes(flat).numpy()
                self._reduce(call, flat, [(0, data.nbytes)], data)
                write_back(flat, tensor)
                return
            number, self._begun = self._begun, self._begun + 1
        finally:
            self._deciding = False
        self._spans[number] = span
        try:
            yield from self._reduce_symmetric(call, flat, address, number, long=all(beside for _, beside in words))
            write_back(flat, tensor)
        except (Exception, KeyboardInterrupt) as error:
            # The others of this node must not go on as if this rank had done its part.
            self._barrier.mark_failed(f"{call} ended in {type(error).__name__}")
            raise
        finally:
            del self._spans[number]
            self._met = max(self._met, number + 1)
            self._ended += 1

    def _small(self, call: Call, tensor: Tensor) -> Steps[None]:
        """Reduce what fits into a message in steps, beside larger ones that are under way; collective."""
        yield from self._take_turn()
        try:
            yield from self._until_free(tensor)
            yield from self.handshake.reduce_in_steps(call, tensor)
        finally:
            self._deciding = False

    def _take_turn(self) -> Steps[None]:
        while self._deciding:  # the one before may yet need the group for itself
            yield False
        self._deciding = True

    def _until_free(self, tensor: Tensor) -> Steps[tuple[int, int]]:
        """Wait in steps until none that is under way changes the tensor's memory; returns where that lies."""
        span = _span(tensor)
        while any(span[0] < high and low < span[1] for low, high in self._spans.values()):
            yield False
        return span

    def _is_symmetric(self, addresses: list[int]) -> bool:
        """Say whether all ranks have named an address, and all ranks of a node the same one."""
        return all(addresses) and all(len({addresses[rank] for rank in ranks}) == 1 for ranks in self._nodes.of)

    def _reduce_symmetric(self, call: Call, flat: Tensor, address: int, number: int, *, long: bool) -> Steps[None]:
        """Reduce where the ranks of each node can reach all of it; the group's reduction of this `number`."""
        assert call.op is not None
        self._barrier.fence()
        if self._lane is not None and (portions := self._portions(flat, address, long)):
            yield from Stream(self._nodes, self._lane, portions, flat.dtype, call.op, number).run()
        while self._met < number:
            yield False
        count = self._barrier.come(call)
        self._met = max(self._met, number + 1)
        yield from self._barrier.pass_in_steps(count, call)

    def _portions(self, flat: Tensor, address: int, long: bool) -> list[Portion]:
        """Return what this rank's lane carries of a symmetric tensor, as it lies with all ranks of the node.

        Beside computation they are `long`: the next reductions keep the network busy, and each portion costs.
        """
        most = self._most_bytes()
        key = (address, flat.dtype, flat.numel(), long, most)
        portions = self._cut_before.get(key)
        if portions is None:
            itemsize = flat.element_size()
            bounds = []
            for start, _, slices in self._cut(
                flat.nbytes, itemsize, most, most // 2 if long else LEAST_NETWORK_CHUNK_BYTES
            ):
                low, high = slices[self._nodes.place]
                bounds.append(((start + low) // itemsize, (start + high) // itemsize))
            with torch.inference_mode(False):
                rows = self._arena.rows(address, flat.nbytes).view(flat.dtype)
            portions = cut_rows(rows, bounds)
            self._cut_before.add(key, portions, len(portions))
        return portions

    def reduce_scatter_into(self, call: Call, parts: FlatParts, output: Tensor, sizes: list[int]) -> None:
        """Reduce the parts and put this rank's share of the result into `output`; collective."""
        self.handshake.agree(call)
        flat = parts.flat(output.dtype)
        bounds = bounds_of([size * flat.element_size() for size in sizes])
        self._reduce(call, flat, [bounds[self.rank]], as_bytes(output).numpy())

    def _reduce(self, call: Call, flat: Tensor, wanted: list[tuple[int, int]], target: Bytes) -> None:
        """Reduce `flat` over all ranks and copy the wanted ranges of the result into `target`, end to end."""
        if not flat.numel():
            return
        (inputs, outputs), op = self._staging_memory(call), call.op
        assert op is not None
        source, itemsize = as_bytes(flat).numpy(), flat.element_size()
        chunks = self._chunks(source.nbytes, itemsize)
        chain = Chain(self._nodes, self._lane, inputs, outputs, chunks, flat.dtype, op)

        def copy_in(chunk: int, index: int, before: int) -> None:
            start, stop, _ = chunks[chunk]
            inputs.buffers[index][self._nodes.place][: stop - start] = source[start:stop]

        def copy_out(chunk: int, index: int, before: int) -> None:
            start, _, slices = chunks[chunk]
            at = 0
            for low, high in wanted:
                for lane, (first, last) in enumerate(slices):
                    begin, end = max(low, start + first), min(high, start + last)
                    if begin < end:
                        piece = outputs.buffers[before][lane][begin - start : end - start]
                        target[at + begin - low : at + end - low] = piece
                at += high - low

        self._run(call, len(chunks), [copy_in, chain.add, *chain.stages_after, copy_out])
        chain.end()

    # ---- copies -------------------------------------------------------------------------------------------

    def broadcast(self, call: Call, flat: Tensor) -> None:
        """Copy the root's flat contiguous data to all ranks; collective."""
        assert call.root is not None
        self.handshake.agree(call)
        inputs, outputs = self._staging_memory(call)
        data = as_bytes(flat).numpy()
        chunks = self._chunks(data.nbytes, 1)
        node, place_of_root = self._nodes.find(call.root)
        relay = Relay(self._nodes, self._lane, node, [high - low for low, high in self._own_slices(chunks)])

        def copy_in(chunk: int, index: int, before: int) -> None:
            start, stop, _ = chunks[chunk]
            if self.rank == call.root:
                inputs.buffers[index][place_of_root][: stop - start] = data[start:stop]

        def pass_on(chunk: int, index: int, before: int) -> None:
            low, high = chunks[chunk][2][self._nodes.place] if self._lane is not None else (0, 0)
            if low < high:
                target = outputs.buffers[index][self._nodes.place][low:high]
                is_here = self._nodes.own == node
                relay.run(inputs.buffers[before][place_of_root][low:high] if is_here else None, target)

        def copy_out(chunk: int, index: int, before: int) -> None:
            start, _, slices = chunks[chunk]
            if self.rank != call.root:
                for lane, (low, high) in enumerate(slices):
                    data[start + low : start + high] = outputs.buffers[before][lane][low:high]

        self._run(call, len(chunks), (copy_in, pass_on, copy_out))
        relay.end()

    def all_gather(self, call: Call, own: Tensor, rows: list[int], result: Tensor) -> None:
        """Put the blocks of all ranks one after the other into `result`; collective, agreed already."""
        self._gather(call, own, rows, result, common=False)

    def _gather(self, call: Call, own: Tensor, rows: list[int], result: Tensor, *, common: bool) -> None:
        """Do what `all_gather` does.

        With `common`, `result` is the same memory for all ranks of the node, and has the own blocks already; they
        fill in the rest together.
        """
        inputs, outputs = self._staging_memory(call)
        nodes, carried = self._nodes, self._carried
        target = as_bytes(result).numpy()
        bounds = bounds_of([count * (result.nbytes // sum(rows)) for count in rows])
        low, high = bounds[self.rank]
        source = as_bytes(own).numpy()[: high - low]
        if not common:
            target[low:high] = source
        here = nodes.of[nodes.own] if common else (self.rank,)
        # The blocks of a lane lie one after the other in its buffer.
        size = round_down(self._chunk_bytes() // max(map(len, carried)), ALIGNMENT)
        mine = carried[nodes.place] if self._lane is not None else []
        exchange = Exchange(self._nodes, self._lane, mine, bounds, size)

        def copy_in(chunk: int, index: int, before: int) -> None:
            part = source[chunk * size : (chunk + 1) * size]
            inputs.buffers[index][nodes.place][: part.nbytes] = part

        def swap(chunk: int, index: int, before: int) -> None:
            if mine:
                exchange.run(chunk, inputs.buffers[before], outputs.buffers[index][nodes.place])

        def copy_out(chunk: int, index: int, before: int) -> None:
            for lane, ranks in enumerate(carried):
                for position, rank in enumerate(ranks):
                    first, last = bounds[rank]
                    part = target[first:last][chunk * size : (chunk + 1) * size]
                    if rank not in here and (not common or rank % len(here) == nodes.place):
                        part[...] = outputs.buffers[before][lane][position * size : position * size + part.nbytes]

        longest = max(last - first for first, last in bounds)
        self._run(call, -(-longest // size), (copy_in, swap, copy_out))

    def _gather_common(self, call: Call, own: Tensor, rows: list[int], result: Tensor) -> None:
        self._gather(call, own, rows, result, common=True)
        self._barrier.wait(call)  # before any rank reads what the others have filled in

    # ---- common to them -----------------------------------------------------------------------------------

    def free(self) -> None:
        """Release the shared memory; see `SharedConnection`."""
        self._staging = None
        self._cut_before.clear()
        del self._spare
        super().free()

    def _run(self, call: Call, chunks: int, stages: Sequence[Stage]) -> None:
        run_stages(self._barrier, 2, call, chunks, stages)

    def _staging_memory(self, call: Call) -> tuple[Staging, Staging]:
        """Return staging for what ranks put in and for results; collective the first time."""
        if self._staging is None:
            half = 2 * round_down(NETWORK_CHUNK_BYTES, self._unit)
            block = self._arena.allocate(2 * half)
            if isinstance(block, str):
                regions, start, half = self._spare.regions, 0, self._spare.region_bytes // 2
            else:
                regions, start = self._arena.segments[block.segment].regions, block.start
            inputs, outputs = (
                Staging([region[at : at + half] for region in regions]) for at in (start, start + half)
            )
            # A node that is short of memory has smaller buffers, and chunks are the same on all nodes.
            self._most = min(self.handshake.agree(call, inputs.buffer_bytes))
            self._staging = inputs, outputs
        return self._staging

    def _most_bytes(self) -> int:
        # The limit is that of pieces that fit into a cache; the network wants several of them at a time.
        return NETWORK_CHUNK_BYTES // (1 << 20) * self._limits.piece_bytes

    def _chunk_bytes(self) -> int:
        return round_down(min(self._most_bytes(), self._most), self._unit)

    def _chunks(self, nbytes: int, itemsize: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """Cut `nbytes` bytes into chunks that fit into staging."""
        return self._cut(nbytes, itemsize, self._chunk_bytes(), LEAST_NETWORK_CHUNK_BYTES)

    def _cut(
        self, nbytes: int, itemsize: int, most: int, least: int
    ) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """Cut `nbytes` bytes into chunks of about equal size; return start, stop and each lane's slice of each."""
        unit = max(ALIGNMENT, itemsize)
        # Several chunks, so that the result of the first comes back while the last is still to be sent.
        count = -(-nbytes // min(most, max(nbytes // _CHUNKS, least)))
        size = -(-nbytes // (count * unit)) * unit
        cut = []
        for start in range(0, nbytes, size):
            stop = min(start + size, nbytes)
            cut.append((start, stop, slices_of(stop - start, self._nodes.lanes, unit)))
        return cut

    def _own_slices(self, chunks: list[tuple[int, int, list[tuple[int, int]]]]) -> list[tuple[int, int]]:
        return [slices[self._nodes.place] for _, _, slices in chunks] if self._lane is not None else []


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return where in memory the elements of a tensor lie: the first byte and the one after the last; local."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
