"""Offload of parameters, gradients and optimizer state from the memory of the device that computes.

    a model on the CPU      to files that are mapped into memory
    a model on a GPU        to pinned memory of the CPU; copies run beside the computation:

                         second stream: shard ──▶ buffer ── gather
        computing stream ── unit 1 ── unit 2 ──────────▶ unit 3 ── its gradient's shard ── ...
                                                                     third stream: └──▶ memory of the CPU

The kernel keeps as many pages of the files in memory as fit, and writes the others to disk. Mapped files are
unlinked: nothing is left behind, however the job ends. A folder that was made for them is removed with the last
    model
that has files in it, or with the job.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..across_ranks.comparison import first_rank_does
from ..errors import CollectiveTimeoutError
from ..groups.process_group import ProcessGroup
from ..types import Seconds, Work
from ..utils.arguments import seconds
from ..utils.device import Device
from ..utils.own_files import open_own
from ..utils.torch_internals import plain_tensors
from ..utils.waiting import network_backoff, wait_until

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""File systems whose files take memory, to which an offload would gain nothing."""

_REMOVALS = 1000
"""Largest number of times that other ranks remove the empty folder while this rank makes a file."""


class Files:
    """Tensors in files of one folder.

    Args:
        folder: The folder, on a disk with room for the files; made with the first file if it is missing. None: the
            first folder for temporary files on a disk.

    Raises:
        ValueError: No folder for temporary files is on a disk.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = _temporary_folder() if folder is None else Path(folder)
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        weakref.finalize(self, _remove_empty, missing)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, group: ProcessGroup | None = None) -> Tensor:
        """Return a tensor of zeros in a file.

        Args:
            shape: Its shape.
            dtype: Its dtype.
            group: Ranks of one node that share the file; collective then. None: this rank alone; local.
        """
        numel = prod(shape)
        if not numel:
            return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
        nbytes = numel * dtype.itemsize
        made = self._make(nbytes) if group is None else first_rank_does(group.backend, lambda: self._make(nbytes))
        try:
            with os.fdopen(_open_made(*made), "r+b") as file:
                path = f"/proc/self/fd/{file.fileno()}"
                return torch.from_file(path, shared=True, size=numel, dtype=dtype).view(tuple(shape))
        finally:
            if group is not None:
                group.barrier()  # all have mapped it
            if group is None or group.rank == 0:
                made[0].unlink()

    def _make(self, nbytes: int) -> tuple[Path, int]:
        """Make a file; return its path and inode."""
        descriptor, name = self._new_file()
        with os.fdopen(descriptor, "wb"):
            os.ftruncate(descriptor, nbytes)
            return Path(name), os.fstat(descriptor).st_ino

    def _new_file(self) -> tuple[int, str]:
        """Make an empty file while other ranks may remove the empty folder; return descriptor and path."""
        for _ in range(_REMOVALS):
            with contextlib.suppress(FileNotFoundError):
                self.folder.mkdir(parents=True, exist_ok=True)
                return tempfile.mkstemp(prefix="axonmpi-", dir=self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        return tempfile.mkstemp(prefix="axonmpi-", dir=self.folder)


def _open_made(path: Path, inode: int) -> int:
    """Open a file by path and inode; OSError if the path leads to another file now."""
    descriptor = open_own(path, os.O_RDWR)
    if os.fstat(descriptor).st_ino != inode:
        os.close(descriptor)
        raise PermissionError(
            errno.EPERM, "expected the file that was made there, other users can exchange it", str(path)
        )
    return descriptor


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove empty folders, the innermost first; local."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _temporary_folder() -> Path:
    """Return the first usual folder that is on a disk and can be written to; local."""
    tried = list(dict.fromkeys([tempfile.gettempdir(), "/var/tmp", os.getcwd()]))  # noqa: S108
    for folder in map(Path, tried):
        if os.access(folder, os.W_OK) and file_system_of(folder) not in IN_MEMORY:
            return folder
    raise ValueError(
        f"offload_folder: expected a folder on a disk with room for what is offloaded, got None, and none of "
        f"{', '.join(tried)} is one"
    )


def file_system_of(folder: Path) -> str:
    """Return the kind of a folder's file system; empty on systems without `/proc`; local."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text("utf-8").splitlines()]
    except OSError:
        return ""
    above = [folder.resolve(), *folder.resolve().parents]
    found = [(point, kind) for _, point, kind, *_ in mounts if Path(point) in above]
    return max(reversed(found), key=lambda entry: len(entry[0]), default=("", ""))[1]  # the last hides the others


_LIKE: tuple[Callable[..., Tensor], ...] = (torch.zeros_like, torch.empty_like, torch.ones_like, torch.full_like)


class OffloadedParameter(nn.Parameter):
    """A parameter whose optimizer state lies in files: tensors made by `zeros_like` and similar functions.

    Attributes:
        files: The files.
    """

    files: Files

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Make results of `zeros_like` and similar functions in files; call other functions as usual."""
        kwargs = kwargs or {}
        with plain_tensors():
            files = getattr(args[0], "files", None) if function in _LIKE else None
            if files is not None and kwargs.get("device") is None:
                model = args[0]
                made = files.zeros(model.shape, kwargs.get("dtype") or model.dtype)
                if function is torch.ones_like:
                    made.fill_(1)
                elif function is torch.full_like:
                    made.fill_(args[1] if len(args) > 1 else kwargs["fill_value"])
                return made
            return function(*args, **kwargs)


class PinnedMemory:
    """Memory of the CPU that a device copies from and to beside its computations.

    The optimizer steps on the CPU then, and keeps its state there.

    Args:
        device: A device that computes asynchronously.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._up, self._down = device.new_stream(), device.new_stream()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros; local."""
        return self.empty(shape, dtype).zero_()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor with undefined values; local."""
        return self._device.pinned_empty(shape, dtype)

    def upload(self, source: Tensor, target: Tensor, then: Callable[[], Work | None]) -> Work:
        """Copy and convert to the device beside computations, after earlier ones have read `target`; local.

        Args:
            source: A tensor in this memory; leave it alone until `settle`.
            target: A tensor on the device.
            then: Begins the work that follows the copy on the device.

        Returns:
            The Work of the copy and of that work.
        """
        device = self._device
        device.wait(self._up, device.record(device.current_stream()))
        device.keep(target, self._up)
        with device.within(self._up):
            if source.dtype != target.dtype:
                source = source.to(device.place, non_blocking=True)  # conversion is the device's work
            target.copy_(source, non_blocking=True)
            work = then()
            if work is not None:
                work.wait()
        return _Uploaded(device, device.record(self._up))

    def download(self, source: Tensor, target: Tensor, after: Work | None) -> Any:
        """Copy from the device beside computations; local.

        Args:
            source: A tensor on the device.
            target: A tensor in this memory, of the same dtype.
            after: The Work whose result `source` is, if any.

        Returns:
            The event after which `target` may be read, see `block`.
        """
        device = self._device
        device.wait(self._down, device.record(device.current_stream()))
        device.keep(source, self._down)
        with device.within(self._down):
            if after is not None:
                after.wait()
            target.copy_(source, non_blocking=True)
        return device.record(self._down)

    def block(self, event: Any) -> None:
        """Block this thread until an event of `download`; local."""
        self._device.block(event)

    def settle(self) -> None:
        """Block this thread until all copies to the device are done and their sources may change; local."""
        self._device.block(self._device.record(self._up))


class _Uploaded(Work):
    """The Work of a stream up to an event."""

    def __init__(self, device: Device, event: Any) -> None:
        self._device = device
        self._event = event

    def wait(self, timeout: Seconds | None = None) -> None:
        """Make the current stream wait for the event; with a timeout, block this thread until it is complete."""
        limit = seconds("timeout", timeout, positive=False)
        if limit is not None and not wait_until(self.done, network_backoff(), limit):
            raise CollectiveTimeoutError(f"parameters were not gathered after {limit:g} s")
        self._device.wait(self._device.current_stream(), self._event)

    def done(self) -> bool:
        """Return True if the event is complete."""
        return self._device.is_complete(self._event)

    def result(self) -> None:
        """Wait and return None."""
        self.wait()
