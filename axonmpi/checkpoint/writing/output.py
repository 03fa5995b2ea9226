"""The files of a checkpoint as one rank writes them.

Whatever goes wrong is remembered, and nothing more is written then: the other ranks go on, and all meet at the end.
Between nodes no page of 4 KiB is written by two: the clients of a network file system may keep whole pages, and
overwrite each other's shard. What a rank has of a page that is not all its own goes to the page's rank.

    rank 0, node 0   | page | page | pa              pa is sent
    rank 1, node 1               ge | page |         ge, too, to the same rank
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...backends import Backend, MpiFile
from ..files.checksums import BlockSums
from ..files.tensor_file import PAGE_BYTES, TensorFile
from ..shards.subarrays import subarrays_of_range
from .local_plan import FileSlice

CHUNK_BYTES = 4 << 20
"""Bytes that are copied and written at once."""


class Trouble:
    """The first error of a rank, which the others are told.

    Attributes:
        text: What went wrong; empty if nothing did.
    """

    def __init__(self) -> None:
        self.text = ""

    @contextmanager
    def noting(self, path: Path) -> Iterator[None]:
        """Take note of an error in the block, and go on: the other ranks will wait for this one.

        Args:
            path: What was to be written.
        """
        try:
            yield
        except OSError as error:
            where = error.filename or path
            self.text = self.text or f"{where}: {error.strerror or error}"
        except Exception as error:
            self.text = self.text or f"{path}: {type(error).__name__}: {error}"


class _File(Protocol):
    def write(self, offset: int, data: memoryview) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class _PosixFile:
    """A file that is there, written by `pwrite`."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, offset: int, data: memoryview) -> None:
        while len(data):
            written = os.pwrite(self._descriptor, data, offset)
            offset, data = offset + written, data[written:]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class Output:
    """The files of tensors, open for writing; opened, synchronised and closed by all ranks together.

    Args:
        folder: Where they are, in their sizes.
        files: Their layouts.
        backend: Of all ranks.
        nodes: Number of nodes.
        trouble: Takes note of errors.
        with_mpi: Write by MPI-IO instead of `pwrite`.

    Attributes:
        sums: This rank's share of the checksums of each file.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[TensorFile],
        backend: Backend,
        nodes: int,
        trouble: Trouble,
        *,
        with_mpi: bool,
    ) -> None:
        self.sums = [BlockSums(file.size) for file in files]
        self._backend = backend
        self._nodes = nodes
        self._trouble = trouble
        self._path = folder
        self._open: list[_File] = []
        self._edges: list[tuple[int, int, bytes]] = []  # file, offset, bytes of a page that is not all this rank's
        with trouble.noting(folder):
            for file in files:
                path = folder / file.name
                self._open.append(MpiFile(backend, path) if with_mpi else _PosixFile(path))

    def noting(self) -> AbstractContextManager[None]:
        """Take note of an error in the block, and go on: the other ranks will wait for this one."""
        return self._trouble.noting(self._path)

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes of a file; local.

        Args:
            file: Its number.
            offset: Where they begin.
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
        if not self._trouble.text:
            with self._trouble.noting(self._path):
                self._open[file].write(offset, data)

    def write_slice(self, file_slice: FileSlice) -> None:
        """Write a file_slice from this rank's memory, a chunk at a time; local."""
        step = max(1, CHUNK_BYTES // file_slice.view.itemsize)
        for first in range(file_slice.first, file_slice.last, step):
            last = min(first + step, file_slice.last)
            at = (first - file_slice.first) * file_slice.view.itemsize
            self.write(file_slice.file, file_slice.start + at, bytes_of(elements_of(file_slice.view, first, last)))

    def exchange_edges(self) -> None:
        """Write the pages that several nodes have shards of; collective over all ranks."""
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
        """Bring everything that was written to the disks; collective with MPI-IO."""
        for file in self._open:
            with self._trouble.noting(self._path):
                file.sync()

    def close(self) -> None:
        """Close; collective with MPI-IO."""
        for file in self._open:
            with suppress(OSError):
                file.close()


def elements_of(view: Tensor, first: int, last: int) -> Tensor:
    """Return [last - first] elements, in row-major order, on the CPU: a view where it can be one; local."""
    if view.is_contiguous() and view.device.type == "cpu":
        return view.view(-1)[first:last]
    chunk = torch.empty(last - first, dtype=view.dtype, device="cpu")
    at = 0
    for subarray in subarrays_of_range(view.shape, first, last):
        chunk[at : at + subarray.numel].view(subarray.size).copy_(view[subarray.slices])
        at += subarray.numel
    return chunk


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU."""
    flat = tensor.detach().reshape(-1).resolve_conj().resolve_neg()
    return flat.view(torch.uint8).numpy().data


_HEAD = np.dtype([("file", "<i8"), ("offset", "<i8"), ("length", "<i8")])


def _packed(edges: Sequence[tuple[int, int, bytes]]) -> Tensor:
    heads = np.array([(file, offset, len(data)) for file, offset, data in edges], dtype=_HEAD)
    count = np.array([len(edges)], dtype="<i8")
    return torch.frombuffer(
        bytearray(b"".join([count.tobytes(), heads.tobytes(), *(e[2] for e in edges)])), dtype=torch.uint8
    )


def _unpacked(message: npt.NDArray[np.uint8]) -> Iterator[tuple[int, int, memoryview]]:
    count = int(message[:8].view("<i8")[0])
    begin = 8 + count * _HEAD.itemsize
    for file, offset, length in message[8:begin].view(_HEAD).tolist():
        yield file, offset, message[begin : begin + length].data
        begin += length
