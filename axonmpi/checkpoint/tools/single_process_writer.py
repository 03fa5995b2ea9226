"""A checkpoint, or one `.safetensors` file, written by one process from tensors of anywhere, a few at a time."""

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
from ..files.tensor_file import TensorSpec, lay_out
from ..files.values import encoded
from ..ranks import CheckpointRanks
from ..saving import MAX_FILE_SIZE, texts_of, versions_here
from ..writing.job import Job, write_checkpoint
from ..writing.local_plan import FileSlice, LocalPlan
from ..writing.output import bytes_of
from .checkpoint_data import CheckpointData, Progress, total_bytes

_AT_ONCE_BYTES = 256 << 20
_METADATA = {"format": "pt"}


def write_folder(data: CheckpointData, path: Path, progress: Progress, max_file_size: int = MAX_FILE_SIZE) -> None:
    """Write a checkpoint; local.

    Raises:
        CheckpointError: It cannot be written, or `path` is there and is no checkpoint.
    """
    kinds = {kind: of_kind for kind, of_kind in data.tensors.items() if of_kind or kind == "model"}
    files = {kind: lay_out(kind, _specs(of_kind), _METADATA, max_file_size) for kind, of_kind in kinds.items()}
    numbered = [(kind, file) for kind, of_kind in files.items() for file in of_kind]
    places = [
        (number, entry.start, kinds[kind][name])
        for number, (kind, file) in enumerate(numbered)
        for name, entry in file.entries.items()
    ]
    stretches = _fetched(places, data, progress)
    texts = texts_of(_state(data), data.config, files)
    nbytes = total_bytes(tensor for _, _, tensor in places)
    job = Job(path, [file for _, file in numbered], LocalPlan(stretches, []), nbytes, texts)
    alone = ProcessGroup(LocalBackend())
    write_checkpoint(job, CheckpointRanks(alone, alone, 1))


def _specs(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def _state(data: CheckpointData) -> dict[str, Any]:
    """Return what `state.json` has."""
    state: dict[str, Any] = {"format": FORMAT, "version": VERSION, "step": 0, "epoch": 0}
    state |= {
        "layout": data.layout or {"ranks": 1, "nodes": 1},
        "versions": data.versions or versions_here(),
    }
    state |= dict.fromkeys(("scheduler", "scaler", "sampler", "extra"))
    state |= _encoded(data.values, data.left_out)
    state["model"] = {"aliases": data.aliases, "extra": _encoded(data.extra_state, data.left_out)}
    state["optimizer"] = data.optimizer_state
    for key in ("step", "epoch"):
        state[key] = _count(key, data.values.get(key), data.left_out)
    check_state(state)
    return state


def _count(name: str, value: Any, left_out: list[str]) -> int:
    """Return a number of steps or epochs, which other programs have as tensors, too; 0 where it is none."""
    plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if plain is None or (isinstance(plain, int | float) and plain == abs(int(plain)) < 1 << 63):
        return int(plain or 0)
    left_out.append(f"{name} ({type(value).__name__}), which is no number of {name}s")
    return 0


def _encoded(values: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Return what JSON holds of values. What it cannot hold of another program's is left out, and noted."""
    held = {}
    for name, value in values.items():
        try:
            held[name] = encoded(value, name)
        except ValueError as error:
            left_out.append(str(error))
    return held


def _fetched(
    places: Sequence[tuple[int, int, Tensor]], data: CheckpointData, progress: Progress
) -> Iterator[FileSlice]:
    """Yield stretches of whole tensors, whose values are fetched some at a time.

    Args:
        places: Number of the file, where the tensor begins in it, and the tensor.
        data: What they are of.
        progress: Is told what has been written.
    """
    done, total = 0, total_bytes(tensor for _, _, tensor in places)
    for batch in bucket_by_size([tensor.nbytes for _, _, tensor in places], _AT_ONCE_BYTES):
        values = data.fetch(places[index][2] for index in batch)
        for index, value in zip(batch, values, strict=True):
            file, start, _ = places[index]
            yield FileSlice(file, start, value, 0, value.numel(), may_wait=False)
            done += value.nbytes
            progress(done, total)
    progress(total, total)


def write_safetensors(data: CheckpointData, path: Path, progress: Progress) -> None:
    """Write the model as one `.safetensors` file; local.

    Raises:
        OSError: It cannot be written.
    """
    (file,) = lay_out("model", _specs(data.model), _METADATA, 1 << 62)
    places = [(0, entry.start, data.model[name]) for name, entry in file.entries.items()]
    with path.open("wb") as opened:
        opened.write(file.header)
        for stretch in _fetched(places, data, progress):
            opened.write(bytes_of(stretch.view))
        opened.flush()
        os.fsync(opened.fileno())
