"""Parameters, gradients and optimizer state in files that are mapped into memory.

The system keeps as much of them in memory as there is room for, and writes the rest to the files. The files have no
names once they are mapped: nothing is left behind, however the job ends. A folder that was made for them goes with
the last model that has files in it, or with the job.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..groups.world import ProcessGroup
from ..utils.torch_internals import plain_tensors
from .flat_parameter import ShardedParameter

__all__ = ["IN_MEMORY", "Files", "OffloadedParameter", "file_system_of", "offload_state"]

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""File systems whose files are memory, so that nothing is gained by putting anything there."""


class Files:
    """Tensors in files of one folder.

    Args:
        folder: Where the files are made; on a disk with room for them. Made with the first file if it is missing
            then. None: the first folder for temporary files that is no memory.

    Raises:
        ValueError: There is no such folder.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = _temporary_folder() if folder is None else Path(folder)
        missing = [place for place in (self.folder, *self.folder.parents) if not place.exists()]
        weakref.finalize(self, _remove_empty, missing)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, group: ProcessGroup | None = None) -> Tensor:
        """Return a tensor of zeros in a file.

        Args:
            shape: Its shape.
            dtype: Its dtype.
            group: Ranks of one node that have the file in common; collective then. None: this rank alone; local.
        """
        numel = prod(shape)
        if not numel:
            return torch.zeros(tuple(shape), dtype=dtype)
        path = self._make(numel * dtype.itemsize) if group is None or group.rank == 0 else None
        shared = path if group is None else group.broadcast_object(path)
        try:
            return torch.from_file(str(shared), shared=True, size=numel, dtype=dtype).view(tuple(shape))
        finally:
            if group is not None:
                group.barrier()  # all have mapped it
            if path is not None:
                path.unlink()

    def _make(self, nbytes: int) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix="axonmpi-", dir=self.folder)
        try:
            os.ftruncate(descriptor, nbytes)
        finally:
            os.close(descriptor)
        return Path(name)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, the innermost first, that others have no files in; local."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _temporary_folder() -> Path:
    """Return the first of the usual folders that is on a disk and can be written to; local."""
    tried = list(dict.fromkeys([tempfile.gettempdir(), "/var/tmp", os.getcwd()]))  # noqa: S108
    for folder in map(Path, tried):
        if os.access(folder, os.W_OK) and file_system_of(folder) not in IN_MEMORY:
            return folder
    raise ValueError(
        f"offload_folder: expected a folder on a disk with room for what is offloaded, got None, and none of "
        f"{', '.join(tried)} is one"
    )


def file_system_of(folder: Path) -> str:
    """Return the kind of file system that a folder is on, empty where the system does not tell; local."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text("utf-8").splitlines()]
    except OSError:
        return ""
    above = [folder.resolve(), *folder.resolve().parents]
    found = [(place, kind) for _, place, kind, *_ in mounts if Path(place) in above]
    return max(reversed(found), key=lambda entry: len(entry[0]), default=("", ""))[1]  # the last hides the others


_LIKE: tuple[Callable[..., Tensor], ...] = (torch.zeros_like, torch.empty_like, torch.ones_like, torch.full_like)


class OffloadedParameter(nn.Parameter):
    """A parameter whose optimizer state goes into files: what is made `like` it lies there.

    Attributes:
        files: Where.
    """

    files: Files

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Make tensors that are `like` this one in files; everything else is as usual."""
        kwargs = kwargs or {}
        with plain_tensors():
            if function in _LIKE and isinstance(args[0], OffloadedParameter) and kwargs.get("device") is None:
                model = args[0]
                made = model.files.zeros(model.shape, kwargs.get("dtype") or model.dtype)
                if function is torch.ones_like:
                    made.fill_(1)
                elif function is torch.full_like:
                    made.fill_(args[1] if len(args) > 1 else kwargs["fill_value"])
                return made
            return function(*args, **kwargs)


def offload_state(parameters: Iterable[ShardedParameter], files: Files) -> None:
    """Let optimizers put their state for parameters into files; local."""
    for parameter in parameters:
        offloaded = OffloadedParameter(parameter.sharded.data, requires_grad=parameter.sharded.requires_grad)
        offloaded.__dict__.update(parameter.sharded.__dict__)
        offloaded.files = files
        parameter.sharded = offloaded
