"""Folders of `torch.distributed.checkpoint` (DCP), by its public interface, which one process can use alone.

Its metadata is a pickle: reading it runs what is in it.
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
    """Read a folder of DCP, all but the values of tensors; local.

    Args:
        path: The folder.
        trust: Whether the folder may run code.
        only_model: Whether an optimizer's state is left alone.

    Raises:
        CheckpointError: It may not, or cannot be read.
    """
    if not trust:
        raise CheckpointError(
            f"{path}: this is a folder of torch.distributed.checkpoint, whose metadata is a pickle, and reading it "
            "runs whatever is in it: if you trust it, add --trust"
        )
    for inner in path.iterdir():
        if not inner.is_dir():
            regular_size(inner)  # to open a pipe would hang
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # takes a second to import
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        metadata = FileSystemReader(path).read_metadata()
        described = metadata.state_dict_metadata
        shaped = {
            key: torch.empty(known.size, dtype=known.properties.dtype, device="meta")
            for key, known in described.items()
            if isinstance(known, TensorStorageMetadata)
        }
        plain: dict[str, Any] = dict.fromkeys(key for key in described if key not in shaped)
        _load(path, plain)
    except Exception as error:  # whatever a pickle raises
        raise CheckpointError(f"{path}: cannot be read as a folder of DCP: {error}") from error
    keys = {id(tensor): key for key, tensor in shaped.items()}

    def fetch(tensors: Iterable[Tensor]) -> list[Tensor]:
        wanted = {keys[id(tensor)]: torch.empty_like(tensor, device="cpu") for tensor in tensors}
        _load(path, wanted)
        return list(wanted.values())

    made = CheckpointData("dcp", files_in(path), fetch=fetch)
    nested = _nested({**shaped, **plain}, metadata.planner_data or {})
    read_torch_dict(made, str(path), nested, only_model=only_model)
    return made


def _load(path: Path, values: dict[str, Any]) -> None:
    """Read what is under some keys; values of tensors into them."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    if values:
        with _as_one_process():
            load(values, storage_reader=FileSystemReader(path), no_dist=True)


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Let DCP not warn that it is used by one process, as it is told to be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _nested(values: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> dict[str, Any]:
    """Undo what DCP does to a dict of dicts and lists."""
    root: dict[Any, Any] = {}
    for key, value in values.items():
        *places, last = paths.get(key, (key,))
        at = root
        for place in places:
            at = at.setdefault(place, {})
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

    kinds = {"model": data.model, "optimizer": data.optimizer}
    total, done = sum(total_bytes(of_kind.values()) for of_kind in kinds.values()), 0

    class Planner(DefaultSavePlanner):
        """Tells how much is done."""

        def resolve_data(self, write_item: Any) -> Any:
            nonlocal done
            data = super().resolve_data(write_item)
            done += data.nbytes if isinstance(data, Tensor) else 0
            progress(min(done, total), total)
            return data

    tensors = {
        kind: dict(zip(of_kind, data.fetch(of_kind.values()), strict=True)) for kind, of_kind in kinds.items()
    }
    nested = torch_dict_of(data, tensors)
    with _as_one_process():
        save(nested, storage_writer=FileSystemWriter(path), planner=Planner(), no_dist=True)
