"""Folders of `torch.distributed.checkpoint` (DCP), by its public interface, in one process.

Their metadata is a pickle: reading it runs the code in it. `format_utils` of DCP is not used: it reads all values
into memory, also where only names and shapes are needed, and files of torch with `weights_only=False`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..files.small_files import regular_size
from .checkpoint_data import CheckpointData, Progress, files_in, total_bytes
from .torch_dict import read_torch_dict, torch_dict_of


def from_dcp(path: Path, *, trust: bool, only_model: bool) -> CheckpointData:
    """Read a folder of DCP without the values of its tensors; local.

    Args:
        path: The folder.
        trust: Allow the folder to run code.
        only_model: Leave an optimizer's state alone.

    Raises:
        CheckpointError: It is not trusted, or cannot be read.
    """
    if not trust:
        raise CheckpointError(
            f"{path}: this is a folder of torch.distributed.checkpoint, whose metadata is a pickle, and reading it "
            "runs whatever is in it: if you trust it, add --trust"
        )
    for inner in path.iterdir():
        if not inner.is_dir():
            regular_size(inner)  # opening a pipe would hang
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # takes a second to import
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        metadata = FileSystemReader(path).read_metadata()
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                tensors[key] = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            else:
                plain[key] = None
        _load(path, plain)
    except Exception as error:  # a pickle can raise any
        raise CheckpointError(f"{path}: cannot be read as a folder of DCP: {error}") from error
    keys = {id(tensor): key for key, tensor in tensors.items()}

    def fetch(chosen: Iterable[Tensor]) -> list[Tensor]:
        wanted = {keys[id(tensor)]: torch.empty_like(tensor, device="cpu") for tensor in chosen}
        _load(path, wanted)
        return list(wanted.values())

    data = CheckpointData("dcp", files_in(path), fetch=fetch)
    saved = _unflattened({**tensors, **plain}, metadata.planner_data or {})
    read_torch_dict(data, str(path), saved, only_model=only_model)
    return data


def _load(path: Path, values: dict[str, Any]) -> None:
    """Read the values of the dict's keys; tensors are filled in place."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    if values:
        with _one_process():
            load(values, storage_reader=FileSystemReader(path), no_dist=True)


@contextmanager
def _one_process() -> Iterator[None]:
    """Suppress DCP's warning that one process uses it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _unflattened(values: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> dict[str, Any]:
    """Return the nested dicts and lists that DCP has flattened."""
    root: dict[Any, Any] = {}
    for key, value in values.items():
        *outer, last = paths.get(key, (key,))
        at = root
        for each in outer:
            at = at.setdefault(each, {})
        at[last] = value
    nested: dict[str, Any] = _with_lists(root)
    return nested


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item) for key, item in value.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner


def write_dcp(data: CheckpointData, path: Path, progress: Progress) -> None:
    """Write a folder of DCP; local.

    Raises:
        OSError: It cannot be written.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    total, done = total_bytes([*data.model.values(), *data.optimizer.values()]), 0

    class Planner(DefaultSavePlanner):
        """A planner that calls `progress`."""

        def resolve_data(self, write_item: Any) -> Any:
            nonlocal done
            resolved = super().resolve_data(write_item)
            done += resolved.nbytes if isinstance(resolved, Tensor) else 0
            progress(min(done, total), total)
            return resolved

    with _one_process():
        save(torch_dict_of(data), storage_writer=FileSystemWriter(path), planner=Planner(), no_dist=True)
