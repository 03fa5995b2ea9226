"""A writer of checkpoints and `.safetensors` files for one process, which reads a few tensors at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ...backends import LocalBackend
from ...groups.process_group import ProcessGroup
from ...utils.partition import bucket_by_size
from ..files.state_file import FORMAT, VERSION, check_state
from ..files.tensor_file import TensorFile, TensorSpec, lay_out
from ..files.values import encoded
from ..ranks import CheckpointRanks
from ..saving import MAX_FILE_SIZE, texts_of, versions_here
from ..writing.job import Job, write_checkpoint
from ..writing.local_plan import FileSlice, LocalPlan
from ..writing.output import bytes_of
from .checkpoint_data import CheckpointData, Progress

_AT_ONCE_BYTES = 256 << 20


def write_folder(data: CheckpointData, path: Path, progress: Progress) -> None:
    """Write a checkpoint; local.

    Raises:
        CheckpointError: It cannot be written, or `path` is there and is no checkpoint.
    """
    kinds = {kind: of_kind for kind, of_kind in data.tensors.items() if of_kind or kind == "model"}
    files = {kind: _laid_out(kind, of_kind, MAX_FILE_SIZE) for kind, of_kind in kinds.items()}
    all_files = [file for of_kind in files.values() for file in of_kind]
    tensors = [kinds[kind] for kind, of_kind in files.items() for _ in of_kind]
    slices = _slices(all_files, tensors, data, progress)
    nbytes = sum(tensor.nbytes for of_kind in kinds.values() for tensor in of_kind.values())
    texts = texts_of(_state(data), data.config, files)
    alone = ProcessGroup(LocalBackend())
    write_checkpoint(Job(path, all_files, LocalPlan(slices, []), nbytes, texts), CheckpointRanks(alone, alone, 1))


def write_safetensors(data: CheckpointData, path: Path, progress: Progress) -> None:
    """Write the model as one `.safetensors` file; local.

    Raises:
        OSError: It cannot be written.
    """
    files = _laid_out("model", data.model, 1 << 62)
    with path.open("wb") as opened:
        opened.write(files[0].header)
        for file_slice in _slices(files, [data.model], data, progress):
            opened.write(bytes_of(file_slice.view))
        opened.flush()
        os.fsync(opened.fileno())


def _laid_out(kind: str, tensors: Mapping[str, Tensor], max_file_size: int) -> list[TensorFile]:
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return lay_out(kind, specs, {"format": "pt"}, max_file_size)


def _slices(
    files: Sequence[TensorFile], tensors: Sequence[Mapping[str, Tensor]], data: CheckpointData, progress: Progress
) -> Iterator[FileSlice]:
    """Yield the tensors of files in their order, with values that are read some tensors at a time.

    Args:
        files: The files.
        tensors: Those of each file by name; may have tensors of other files, too.
        data: Reads the values.
        progress: Called when a tensor has been written.
    """
    entries = [
        (number, entry.start, tensors[number][name])
        for number, file in enumerate(files)
        for name, entry in file.entries.items()
    ]
    sizes = [tensor.nbytes for _, _, tensor in entries]
    done, total = 0, sum(sizes)
    for batch in bucket_by_size(sizes, _AT_ONCE_BYTES):
        values = data.fetch(entries[index][2] for index in batch)
        for index, value in zip(batch, values, strict=True):
            number, start, _ = entries[index]
            yield FileSlice(number, start, value, 0, value.numel(), may_wait=False)
            done += value.nbytes
            progress(done, total)
    progress(total, total)


# ---- state.json -------------------------------------------------------------------------------------------------


def _state(data: CheckpointData) -> dict[str, Any]:
    """Return the content of `state.json`."""
    state: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    state["layout"] = data.layout or {"ranks": 1, "nodes": 1}
    state["versions"] = data.versions or versions_here()
    state |= dict.fromkeys(("step", "epoch", "scheduler", "scaler", "sampler", "extra"))
    state |= _encoded(data.values, data.left_out)
    state["model"] = {"aliases": data.aliases, "extra": _encoded(data.extra_state, data.left_out)}
    state["optimizer"] = data.optimizer_state
    for key in ("step", "epoch"):
        state[key] = _count(key, data.values.get(key), data.left_out)
    check_state(state)
    return state


def _count(name: str, value: Any, left_out: list[str]) -> int:
    """Return a number of steps or epochs, which may be in a tensor; 0 if it is no such number."""
    plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if plain is None or (isinstance(plain, int | float) and plain == abs(int(plain)) < 1 << 63):
        return int(plain or 0)
    left_out.append(f"{name} ({type(value).__name__}), which is no number of {name}s")
    return 0


def _encoded(values: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Return values as JSON; other programs' values that a checkpoint cannot hold are left out, and listed."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = encoded(value, name)
        except ValueError as error:
            left_out.append(str(error))
    return found
