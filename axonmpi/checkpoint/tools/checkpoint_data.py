"""Tensors by name and a few values: the form between reading one format and writing another.

checkpoint, .safetensors, .pt     tensors are views of the mapped files, whose pages are read when they are used
PyTorch DCP                       tensors are on the meta device until `fetch` reads their values
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
"""Called with the number of bytes that are done, and of all bytes."""

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
DCP_METADATA = ".metadata"


@dataclass
class CheckpointData:
    """The content of a file or folder.

    Attributes:
        format: Of the file or folder.
        files: Names and bytes of the files.
        model: Tensors of the model by name, each once.
        aliases: Name in `model` by further name, for tied tensors.
        extra_state: Values from `get_extra_state()` that are no tensors, by name.
        config: Of the model, as in `config.json`.
        optimizer: Tensors of the optimizer's state, as `"blocks.0.weight.exp_avg"`.
        optimizer_state: Its other values, as in `state.json`; None without an optimizer.
        random: Tensors of the ranks' random states.
        values: Those of `step`, `epoch`, `scheduler`, `scaler`, `sampler` and `extra` that are known.
        layout: The ranks that saved it.
        versions: Of the programs that saved it.
        left_out: Descriptions of content that no checkpoint has.
        fetch: Returns tensors of this object with their values.
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
    fetch: Callable[[Iterable[Tensor]], list[Tensor]] = list

    @property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of each kind of file."""
        return {"model": self.model, "optimizer": self.optimizer, "random": self.random}


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def format_of(path: Path) -> Format:
    """Return the format of a file or folder, by its name and its files; local.

    Raises:
        CheckpointError: There is no such file or folder, or its format is unknown.
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
    read_contents(path)  # raises an error that names the missing file
    raise AssertionError


def files_in(folder: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of a folder's files, inner folders left out."""
    return sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())


def from_safetensors(path: Path) -> CheckpointData:
    """Read a checkpoint, a folder of `transformers`, or a single `.safetensors` file; local.

    Raises:
        CheckpointError: It is damaged.
    """
    contents = read_contents(path)
    data = CheckpointData("checkpoint" if contents.state else "safetensors")
    data.files = [(path.name, path.stat().st_size)] if path.is_file() else files_in(contents.folder)
    data.model, data.optimizer, data.random = (_mapped(contents, kind) for kind in ("model", "optimizer", "random"))
    if path.is_dir():
        data.config = _config_in(contents.folder)
    if contents.state:
        _add_state(data, contents.state)
    return data


def _add_state(data: CheckpointData, state: Mapping[str, Any]) -> None:
    keys = ("step", "epoch", "scheduler", "scaler", "sampler", "extra")
    data.values = {key: decoded(state[key]) for key in keys}
    data.layout, data.versions = state["layout"], state["versions"]
    data.aliases, data.extra_state = state["model"]["aliases"], decoded(state["model"]["extra"])
    data.optimizer_state = state["optimizer"]


def _config_in(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    try:
        config = strict_json(read_small(path), constants=True) if os.path.lexists(path) else None
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    return config if isinstance(config, dict) else None


def _mapped(contents: Contents, kind: str) -> dict[str, Tensor]:
    """Return the tensors in the files of a kind, as views of the mapped files."""
    tensors: dict[str, Tensor] = {}
    for file in contents.files[kind]:
        tensors |= _tensors_in(contents.folder / file.name, file)
    return tensors


def _tensors_in(path: Path, file: TensorFile) -> dict[str, Tensor]:
    """Map a file, and return its tensors, each with a storage of its own."""
    with path.open("rb") as opened:
        content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # writable, or torch warns
    return {name: _view(content, entry.start, *entry.spec[1:]) for name, entry in file.entries.items()}


def _view(content: Any, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    elements = torch.frombuffer(content, dtype=torch.uint8, count=nbytes, offset=start)
    if start % dtype.itemsize:  # not aligned, as in files of other tools
        elements = elements.clone()
    return elements.view(dtype).view(shape)
