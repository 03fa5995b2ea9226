"""A file that the ranks of a group write together by MPI-IO."""

from __future__ import annotations

import errno
from pathlib import Path

from ...launch import start as runtime
from ..contract import Backend
from .backend import MpiBackend

_MOST_BYTES = 1 << 30  # of a call: counts are 32 bits


class MpiFile:
    """A file that is there, opened for writing; opening, `sync` and `close` are collective.

    Args:
        backend: Of the ranks that write it; another than MPI's stands for this rank alone.
        path: The file.

    Raises:
        OSError: It cannot be opened.

    Source: MPI standard 4.1, chapter 14.
    """

    def __init__(self, backend: Backend, path: Path) -> None:
        self._mpi = runtime.start_mpi()
        self._path = path
        comm = backend.mpi_comm if isinstance(backend, MpiBackend) else self._mpi.COMM_SELF
        try:
            self._file = self._mpi.File.Open(comm, str(path), self._mpi.MODE_WRONLY)
        except self._mpi.Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> OSError:
        return OSError(errno.EIO, f"MPI-IO: {error}", str(self._path))

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes; local.

        Args:
            offset: Of the first byte in the file.
            data: The bytes, in format "B".

        Raises:
            OSError: They cannot be written.
        """
        try:
            for at in range(0, len(data), _MOST_BYTES):
                part = data[at : at + _MOST_BYTES]
                self._file.Write_at(offset + at, [part, len(part), self._mpi.BYTE])
        except self._mpi.Exception as error:
            raise self._failure(error) from error

    def sync(self) -> None:
        """Bring written bytes to the disk; collective.

        Raises:
            OSError: It cannot be written.
        """
        try:
            self._file.Sync()
        except self._mpi.Exception as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Close the file; collective."""
        self._file.Close()
