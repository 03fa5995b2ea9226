"""What a file or folder of any known format has, in the terms of a checkpoint: tensors by name, and a few values.

checkpoint, .safetensors, .pt     tensors are views of the mapped files: their pages are read when they are needed
PyTorch DCP                       tensors are on the meta device until `fetch` reads them
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..files.contents import Contents, read_contents
from ..files.folders import find_checkpoint
from ..files.small_files import read_small, strict_json
from ..files.state_file import CHECKSUMS_FILE, STATE_FILE
from ..files.tensor_file import TensorFile
from ..files.values import decoded

Format = Literal["checkpoint", "safetensors", "torch", "dcp"]
FORMATS: tuple[Format, ...] = get_args(Format)
Progress = Callable[[int, int], None]
"""Is told how many bytes are done, and of how many."""

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
DCP_METADATA = ".metadata"


def _as_it_is(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list(tensors)


@dataclass
class CheckpointData:
    """What there is.

    Attributes:
        format: Of the file or folder that it was read from.
        files: Names and bytes of the files.
        model: Tensors of the model by name, each once.
        aliases: Other names of tied tensors, and the names that they have in `model`.
        extra_state: What modules return from `get_extra_state()`, if it is no tensor, by name.
        config: Of the model, as `config.json` has it.
        optimizer: Tensors of the optimizer's state, as `"blocks.0.weight.exp_avg"`.
        optimizer_state: The rest of it, as `state.json` has it; None without an optimizer.
        random: Tensors of the ranks' random states.
        values: `step`, `epoch`, `scheduler`, `scaler`, `sampler` and `extra`, as far as they are known.
        layout: The ranks that saved it.
        versions: Of the programs that saved it.
        left_out: What is in the file and has no place here, in words.
        fetch: Returns some of these very tensors with their values.
    """

    format: Format
    files: list[tuple[str, int]] = field(default_factory=list)
    model: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra_state: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    optimizer_state: dict[str, Any] | None = None
    random: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    fetch: Callable[[Iterable[Tensor]], list[Tensor]] = _as_it_is

    @property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of each kind of file."""
        return {"model": self.model, "optimizer": self.optimizer, "random": self.random}


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def format_of(path: Path) -> Format:
    """Say of which format a file or folder is, by its name and by what is in it; local.

    Raises:
        CheckpointError: There is none, or it is of none of them.
    """
    if path.is_file():
        if path.suffix == ".safetensors":
            return "safetensors"
        if path.suffix in TORCH_SUFFIXES:
            return "torch"
        raise CheckpointError(
            f"{path}: expected a file named .safetensors, {', '.join(TORCH_SUFFIXES)}, or a folder"
        )
    folder = find_checkpoint(path)
    if os.path.lexists(folder / STATE_FILE) or os.path.lexists(folder / CHECKSUMS_FILE):
        return "checkpoint"
    if (folder / DCP_METADATA).is_file():
        return "dcp"
    if any(folder.glob("*.safetensors")):
        return "safetensors"
    if path.is_dir():
        raise CheckpointError(
            f"{path}: expected a folder with {STATE_FILE}, {DCP_METADATA} or .safetensors files, found neither"
        )
    read_contents(path)  # says what is missing
    raise AssertionError


def files_in(folder: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of a folder's files, those in its folders left out."""
    return sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())


def from_safetensors(path: Path) -> CheckpointData:
    """Read a checkpoint, a folder of `transformers`, or a single `.safetensors` file; local.

    Raises:
        CheckpointError: It is damaged.
    """
    contents = read_contents(path)
    made = CheckpointData("checkpoint" if contents.state else "safetensors")
    made.files = [(path.name, path.stat().st_size)] if path.is_file() else files_in(contents.folder)
    made.model, made.optimizer, made.random = (_mapped(contents, kind) for kind in ("model", "optimizer", "random"))
    if path.is_dir():
        made.config = _config_in(contents.folder)
    if contents.state:
        _read_state(made, contents.state)
    return made


def _read_state(made: CheckpointData, state: Mapping[str, Any]) -> None:
    made.values = {
        key: decoded(state.get(key)) for key in ("step", "epoch", "scheduler", "scaler", "sampler", "extra")
    }
    made.layout, made.versions = dict(state.get("layout", {})), dict(state.get("versions", {}))
    of_model = state.get("model", {})
    made.aliases, made.extra_state = dict(of_model.get("aliases", {})), decoded(of_model.get("extra", {}))
    made.optimizer_state = state.get("optimizer")


def _config_in(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    try:
        config = strict_json(read_small(path), constants=True) if os.path.lexists(path) else None
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    return config if isinstance(config, dict) else None


def _mapped(contents: Contents, kind: str) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in contents.files[kind]
        for name, tensor in _tensors_in(contents.folder / file.name, file).items()
    }


def _tensors_in(path: Path, file: TensorFile) -> dict[str, Tensor]:
    """Map a file, and return its tensors, each with a storage of its own."""
    with path.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # writable, or torch warns
    return {name: _view(data, entry.start, *entry.spec[1:]) for name, entry in file.entries.items()}


def _view(data: Any, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    elements = torch.frombuffer(data, dtype=torch.uint8, count=nbytes, offset=start)
    if start % dtype.itemsize:  # as other tools may leave them
        elements = elements.clone()
    return elements.view(dtype).view(shape)
