"""The header of a safetensors file, made and read.

    8 bytes        length of the header
    header         JSON: for each name the dtype, the shape, and where its bytes begin and end after the header
    bytes          the tensors, one after the other without gaps, row-major, little-endian

Headers are padded with spaces, so that the bytes begin at a page of 4 KiB. Tensors of wide dtypes come first, so
that each is aligned, and then in the order of their names: a file depends on names, dtypes and shapes only. Above a
size tensors are spread over several files, and an index says which file has which, as Hugging Face lays it out.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import CheckpointError
from ...utils.partition import bucket_by_size

__all__ = [
    "PAGE_BYTES",
    "TensorEntry",
    "TensorFile",
    "TensorSpec",
    "check_size",
    "index_of",
    "lay_out",
    "read_header",
    "read_headers",
]

PAGE_BYTES = 4096
_LONGEST_HEADER = 1 << 30
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_METADATA = "__metadata__"


class TensorSpec(NamedTuple):
    """A tensor as a file describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorEntry(NamedTuple):
    """A tensor in a file.

    Attributes:
        spec: Its name, dtype and shape.
        start: Where its bytes begin, counted from the beginning of the file.
    """

    spec: TensorSpec
    start: int

    @property
    def stop(self) -> int:
        """Where its bytes end."""
        return self.start + self.spec.nbytes


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file.

    Attributes:
        name: Of the file, without its folder.
        entries: Its tensors by name, in their order in the file.
        size: Bytes of the file.
        header: Its first bytes, up to the first tensor; empty for a file that was read.
        metadata: The texts in the header.
    """

    name: str
    entries: Mapping[str, TensorEntry]
    size: int
    header: bytes = field(default=b"", repr=False)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def touching(self, start: int, stop: int) -> Iterator[TensorEntry]:
        """Yield the tensors with bytes between two places in the file."""
        return (entry for entry in self.entries.values() if entry.start < stop and entry.stop > start)


def lay_out(
    stem: str, specs: Iterable[TensorSpec], metadata: Mapping[str, str], max_file_size: int
) -> list[TensorFile]:
    """Lay tensors out in one file, or in several above a size; local, the same for the same tensors in any order.

    Args:
        stem: Name of the file without `.safetensors`; several are `stem-00001-of-00002.safetensors`.
        specs: The tensors; names differ.
        metadata: Texts for the header.
        max_file_size: Bytes of tensors in a file; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: Safetensors has no code for a dtype.
    """
    ordered = sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name))
    for spec in ordered:
        if spec.dtype not in _CODES:
            raise CheckpointError(f"{spec.name!r}: safetensors files cannot hold tensors of {spec.dtype}")
        if spec.name == _METADATA:
            raise CheckpointError(
                f"{spec.name!r}: safetensors files have another use of this name: rename the tensor"
            )
    groups = bucket_by_size([spec.nbytes for spec in ordered], max_file_size) or [[]]
    names = [f"{stem}-{number:05}-of-{len(groups):05}" for number in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else [stem]
    return [
        _file(f"{name}.safetensors", [ordered[index] for index in group], metadata)
        for name, group in zip(names, groups, strict=True)
    ]


def _file(name: str, specs: list[TensorSpec], metadata: Mapping[str, str]) -> TensorFile:
    described: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    at = 0
    for spec in specs:
        offsets = [at, at + spec.nbytes]
        described[spec.name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        at += spec.nbytes
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES - 8
    header = length.to_bytes(8, "little") + text.ljust(length)
    starts = {spec.name: described[spec.name]["data_offsets"][0] for spec in specs}
    entries = {spec.name: TensorEntry(spec, len(header) + starts[spec.name]) for spec in specs}
    return TensorFile(name, entries, len(header) + at, header, dict(metadata))


def index_of(files: list[TensorFile]) -> dict[str, Any]:
    """Return the index of several files: which has which tensor, and the bytes of all."""
    total = sum(entry.spec.nbytes for file in files for entry in file.entries.values())
    return {
        "metadata": {"total_size": total},
        "weight_map": {name: file.name for file in files for name in file.entries},
    }


# ---- reading ----------------------------------------------------------------------------------------------------


def read_headers(folder: Path, stem: str) -> list[TensorFile]:
    """Read the headers of one file, or of those that an index names; local.

    Args:
        folder: Where they are.
        stem: Name of the single file without `.safetensors`, or of the index without `.safetensors.index.json`.

    Raises:
        CheckpointError: There is neither, or a file is damaged.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.exists():
        return [read_header(single)]
    if not index.exists():
        raise CheckpointError(f"{folder}: expected {single.name} or {index.name} in it, found neither")
    try:
        named: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        files = [read_header(folder / name) for name in sorted(set(named.values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index}: expected an index of safetensors files, with a weight_map: {error}"
        ) from None
    found = {name: file.name for file in files for name in file.entries}
    if wrong := [name for name in named if found.get(name) != named[name]]:
        raise CheckpointError(f"{index}: says that {named[wrong[0]]} has {wrong[0]!r}, which it has not")
    return files


def read_header(path: Path) -> TensorFile:
    """Read the header of a safetensors file; local.

    Raises:
        CheckpointError: There is no such file, it is no safetensors file, or it is shorter or longer than it says.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise CheckpointError(f"{path}: this is no safetensors file, or only the beginning of one")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        described = json.loads(text)
        metadata = described.pop(_METADATA, {})
        entries = {name: _entry(name, entry, 8 + length) for name, entry in described.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: this is no safetensors file, its header is damaged: {error}") from None
    ordered = sorted(entries.values(), key=lambda entry: (entry.start, entry.stop))
    file_made = TensorFile(path.name, {entry.spec.name: entry for entry in ordered}, size, b"", metadata)
    _check_without_gaps(path, ordered, 8 + length)
    check_size(path, file_made, size)
    return file_made


def _entry(name: str, described: Mapping[str, Any], begin: int) -> TensorEntry:
    start, stop = described["data_offsets"]
    if described["dtype"] not in _DTYPES:
        raise ValueError(f"{name!r} has dtype {described['dtype']!r}, which torch has not")
    spec = TensorSpec(name, _DTYPES[described["dtype"]], tuple(map(int, described["shape"])))
    if min(spec.shape, default=0) < 0 or stop - start != spec.nbytes:
        raise ValueError(f"{name!r} has {stop - start} bytes, expected {spec.nbytes}")
    return TensorEntry(spec, begin + int(start))


def _check_without_gaps(path: Path, ordered: list[TensorEntry], begin: int) -> None:
    for entry in ordered:
        if entry.start != begin:
            raise CheckpointError(f"{path}: its header is damaged: {entry.spec.name!r} is not where it has to be")
        begin = entry.stop


def check_size(path: Path, file: TensorFile, size: int) -> None:
    """Raise unless a file has as many bytes as its tensors need; local.

    Raises:
        CheckpointError: Naming the first tensor that is cut off.
    """
    end = max((entry.stop for entry in file.entries.values()), default=size)
    if size < end:
        cut = next(entry.spec.name for entry in file.entries.values() if entry.stop > size)
        raise CheckpointError(f"{path}: expected {end} bytes, got {size}: it is cut off in {cut!r}")
    if size > end:
        raise CheckpointError(f"{path}: expected {end} bytes, got {size}: there is something after the last tensor")
