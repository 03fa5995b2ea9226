"""The open files of a checkpoint, written by one rank.

After the first error a rank writes nothing more, and goes on to the collectives in which the other ranks wait.
Ranks of two nodes never write one page of 4 KiB: clients of a network file system may cache full pages, and would
overwrite each other's bytes. Bytes of a page that a rank has in part are sent to the one rank that writes the page.

    rank 0, node 0   | page | page | pa              pa is sent
    rank 1, node 1               ge | page |         ge, too, to the same rank
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...backends import Backend
from ..files.checksums import BlockSums
from ..files.tensor_file import PAGE_BYTES, TensorFile
from ..rank_errors import RankErrors
from ..shards.tensor_shard import pieces_of_range
from .local_plan import FileSlice

CHUNK_BYTES = 4 << 20
"""Bytes that are copied and written at once."""


class Output:
    """The files of tensors, open for writing.

    Args:
        folder: Of the files, which have their sizes already.
        files: Their layouts.
        backend: Of all ranks.
        nodes: Number of nodes.
        errors: Records this rank's errors.

    Attributes:
        sums: This rank's terms of the checksums of each file.
        errors: Of this rank.
    """

    def __init__(
        self, folder: Path, files: Sequence[TensorFile], backend: Backend, nodes: int, errors: RankErrors
    ) -> None:
        self.sums = [BlockSums(file.size) for file in files]
        self.errors = errors
        self._backend = backend
        self._nodes = nodes
        self._descriptors: list[int] = []
        self._edges: list[tuple[int, int, bytes]] = []  # file, offset, bytes of a page that the rank has in part
        with errors.recorded():
            for file in files:
                self._descriptors.append(os.open(folder / file.name, os.O_WRONLY | os.O_CLOEXEC))

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes of a file; local.

        Args:
            file: Its index.
            offset: Of the first byte.
            data: The bytes, in format "B".
        """
        self.sums[file].add(offset, data)
        if self._nodes > 1:
            begin, end = -(-offset // PAGE_BYTES) * PAGE_BYTES, (offset + len(data)) // PAGE_BYTES * PAGE_BYTES
            head = min(begin - offset, len(data))
            self._keep(file, offset, data[:head])
            if end < begin:
                return
            self._keep(file, end, data[end - offset :])
            offset, data = begin, data[head : end - offset]
        self._put(file, offset, data)

    def _keep(self, file: int, offset: int, data: memoryview) -> None:
        if len(data):
            self._edges.append((file, offset, bytes(data)))

    def _put(self, file: int, offset: int, data: memoryview) -> None:
        if self.errors.texts:
            return
        with self.errors.recorded():
            while len(data):
                written = os.pwrite(self._descriptors[file], data, offset)
                offset, data = offset + written, data[written:]

    def write_slice(self, file_slice: FileSlice) -> None:
        """Write a slice from this rank's memory, a chunk at a time; local."""
        itemsize = file_slice.view.itemsize
        for first, last in chunks_of(file_slice):
            offset = file_slice.start + (first - file_slice.first) * itemsize
            self.write(file_slice.file, offset, bytes_of(elements_of(file_slice.view, first, last)))

    def exchange_edges(self) -> None:
        """Write the pages that several nodes have in part; collective over all ranks."""
        if self._nodes == 1:
            return
        size = self._backend.size
        sent: list[list[tuple[int, int, bytes]]] = [[] for _ in range(size)]
        for edge in self._edges:
            sent[(edge[1] // PAGE_BYTES + edge[0]) % size].append(edge)
        self._edges.clear()
        for message in self._backend.all_to_all([_packed(edges) for edges in sent]):
            for file, offset, data in _unpacked(message.numpy()):
                self._put(file, offset, data)

    def sync(self) -> None:
        """Bring all written bytes to the disks; local."""
        for descriptor in self._descriptors:
            with self.errors.recorded():
                os.fsync(descriptor)

    def close(self) -> None:
        """Close the files; local."""
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)


def chunks_of(file_slice: FileSlice) -> Iterator[tuple[int, int]]:
    """Yield the first and last element, plus one, of each chunk of a slice."""
    step = max(1, CHUNK_BYTES // file_slice.view.itemsize)
    for first in range(file_slice.first, file_slice.last, step):
        yield first, min(first + step, file_slice.last)


def elements_of(view: Tensor, first: int, last: int) -> Tensor:
    """Return [last - first] elements in row-major order on the CPU, as a view if possible; local."""
    if view.is_contiguous() and view.device.type == "cpu":
        return view.view(-1)[first:last]
    chunk = torch.empty(last - first, dtype=view.dtype, device="cpu")
    for piece in pieces_of_range(chunk, view.shape, first):
        piece.view.copy_(view[piece.subarray.slices])
    return chunk


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU."""
    flat = tensor.detach().reshape(-1).resolve_conj().resolve_neg()
    return flat.view(torch.uint8).numpy().data


_EDGE = np.dtype([("file", "<i8"), ("offset", "<i8"), ("length", "<i8")])


def _packed(edges: Sequence[tuple[int, int, bytes]]) -> Tensor:
    heads = np.array([(file, offset, len(data)) for file, offset, data in edges], dtype=_EDGE)
    count = np.array([len(edges)], dtype="<i8")
    message = b"".join([count.tobytes(), heads.tobytes(), *(data for _, _, data in edges)])
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _unpacked(message: npt.NDArray[np.uint8]) -> Iterator[tuple[int, int, memoryview]]:
    count = int(message[:8].view("<i8")[0])
    begin = 8 + count * _EDGE.itemsize
    for file, offset, length in message[8:begin].view(_EDGE).tolist():
        yield file, offset, message[begin : begin + length].data
        begin += length
