"""Headers of safetensors files: layout, writing and strict reading.

    8 bytes        length of the header
    header         JSON: for each name the dtype, the shape, and the offsets of its bytes after the header
    bytes          the tensors, one after the other without gaps, row-major, little-endian

Headers are padded with spaces, so that the tensors begin at a page of 4 KiB. Tensors are sorted by the width of
their dtype, widest first, which aligns them, and then by name: the offsets depend on names, dtypes and shapes
only. Above a size, tensors are spread over several files with an index, as Hugging Face's libraries do.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import CheckpointError
from ...utils.partition import bucket_by_size
from .small_files import check_plain_name, read_small, regular_size, strict_json

PAGE_BYTES = 4096
_LONGEST_HEADER = 100_000_000
"""In bytes: the limit of the `safetensors` package."""
_DEEPEST = 125
"""Nested lists in an unknown field: the limit of the `safetensors` package."""
_MOST_BITS = 1 << 64
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
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
_FIELDS = ("dtype", "shape", "data_offsets")
_METADATA = "__metadata__"


class TensorSpec(NamedTuple):
    """Name, dtype and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorEntry(NamedTuple):
    """A tensor in a file.

    Attributes:
        spec: Its name, dtype and shape.
        start: Offset of its first byte in the file.
    """

    spec: TensorSpec
    start: int

    @property
    def stop(self) -> int:
        """Offset after its last byte."""
        return self.start + self.spec.nbytes


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file.

    Attributes:
        name: File name.
        entries: Its tensors by name, in their order in the file.
        size: Bytes of the file.
        header: The bytes before the first tensor; empty for a file that was read.
        metadata: The texts in the header.
    """

    name: str
    entries: Mapping[str, TensorEntry]
    size: int
    header: bytes = field(default=b"", repr=False)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def touching(self, start: int, stop: int) -> Iterator[TensorEntry]:
        """Yield the tensors with bytes between two offsets."""
        return (entry for entry in self.entries.values() if entry.start < stop and entry.stop > start)


def lay_out(
    stem: str, specs: Iterable[TensorSpec], metadata: Mapping[str, str], max_file_size: int
) -> list[TensorFile]:
    """Lay tensors out in files; local, the same for the same tensors in any order.

    Args:
        stem: Name of the file without `.safetensors`; several are `stem-00001-of-00002.safetensors`.
        specs: The tensors; names differ.
        metadata: Texts for the header.
        max_file_size: Bytes of tensors in a file; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: The format has no code for a dtype, or uses a name itself.
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
    if length > _LONGEST_HEADER:
        raise CheckpointError(
            f"{name}: its {len(specs)} tensors need a header of {length} bytes, readers take {_LONGEST_HEADER}: "
            "choose a smaller max_file_size"
        )
    header = length.to_bytes(8, "little") + text.ljust(length)
    entries = {
        spec.name: TensorEntry(spec, len(header) + described[spec.name]["data_offsets"][0]) for spec in specs
    }
    return TensorFile(name, entries, len(header) + at, header, dict(metadata))


def index_of(files: list[TensorFile]) -> dict[str, Any]:
    """Return the index of several files: the file of each tensor, and the bytes of all tensors."""
    total = sum(entry.spec.nbytes for file in files for entry in file.entries.values())
    return {
        "metadata": {"total_size": total},
        "weight_map": {name: file.name for file in files for name in file.entries},
    }


# ---- reading ----------------------------------------------------------------------------------------------------


def read_headers(folder: Path, stem: str) -> list[TensorFile]:
    """Read the headers of one file, or of all files in an index; local.

    Args:
        folder: Of the files.
        stem: Name of the single file without `.safetensors`, or of the index without `.safetensors.index.json`.

    Raises:
        CheckpointError: There is no such file or index, or a file is damaged.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.exists():
        return [read_header(single)]
    if not index.exists():
        raise CheckpointError(f"{folder}: expected {single.name} or {index.name} in it, found neither")
    try:
        named: dict[str, str] = strict_json(read_small(index))["weight_map"]
        names = sorted({check_plain_name(name) for name in named.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index}: expected an index of safetensors files, with a weight_map: {error}"
        ) from None
    files = [read_header(folder / name) for name in names]
    found: dict[str, str] = {}
    for file in files:
        if twice := found.keys() & file.entries.keys():
            raise CheckpointError(f"{folder / file.name}: has {min(twice)!r}, which {found[min(twice)]} has, too")
        found |= dict.fromkeys(file.entries, file.name)
    if wrong := [name for name in named if found.get(name) != named[name]]:
        raise CheckpointError(f"{index}: says that {named[wrong[0]]} has {wrong[0]!r}, which it has not")
    return files


def read_header(path: Path) -> TensorFile:
    """Read the header of a safetensors file; local.

    Raises:
        CheckpointError: There is no such file, it is no safetensors file, or its size is wrong.
    """
    size = regular_size(path)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise CheckpointError(f"{path}: this is no safetensors file, or only the beginning of one")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        described = strict_json(text)
        metadata = _metadata(described.pop(_METADATA, None))
        entries = [_entry(name, entry, 8 + length) for name, entry in described.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: this is no safetensors file, its header is damaged: {error}") from None
    ordered = sorted(entries, key=lambda entry: (entry.start, entry.stop))
    file_made = TensorFile(path.name, {entry.spec.name: entry for entry in ordered}, size, b"", metadata)
    end = _end_without_gaps(path, ordered, 8 + length)
    check_size(path, file_made, size, end)
    return file_made


def _metadata(described: Any) -> dict[str, str]:
    metadata = {} if described is None else described
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"expected texts by name in {_METADATA!r}")
    return metadata


def _entry(name: str, described: Any, begin: int) -> TensorEntry:
    if isinstance(described, list):  # which readers in Rust accept, too
        described = dict(zip(_FIELDS, described, strict=True))
    code, shape, (start, stop) = (described[key] for key in _FIELDS)
    for key, value in described.items():
        if key not in _FIELDS:
            _check_depth(value, _DEEPEST)
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(f"{name!r} has dtype {code!r}, which torch has not")
    if not isinstance(shape, list):
        raise ValueError(f"{name!r} has no list as its shape")
    if not all(type(number) is int and 0 <= number < _MOST_BITS >> 1 for number in (*shape, start, stop)):
        raise ValueError(f"{name!r} has a shape or offsets that are not whole numbers from 0 to 2^63")
    spec = TensorSpec(name, _DTYPES[code], tuple(shape))
    bits = 1
    for number in (*shape, 8 * spec.dtype.itemsize):
        bits *= number
        if bits >= _MOST_BITS:
            raise ValueError(f"{name!r} has shape {shape}, which is too large")
    if stop - start != spec.nbytes:
        raise ValueError(f"{name!r} has {stop - start} bytes, expected {spec.nbytes}")
    return TensorEntry(spec, begin + start)


def _check_depth(value: Any, left: int) -> None:
    if not isinstance(value, list | dict):
        return
    if not left:
        raise ValueError("it is nested too deeply")
    for item in value.values() if isinstance(value, dict) else value:
        _check_depth(item, left - 1)


def _end_without_gaps(path: Path, ordered: list[TensorEntry], begin: int) -> int:
    """Return the offset after the last tensor."""
    for entry in ordered:
        if entry.start != begin:
            raise CheckpointError(f"{path}: its header is damaged: {entry.spec.name!r} is not where it has to be")
        begin = entry.stop
    return begin


def check_size(path: Path, file: TensorFile, size: int, end: int) -> None:
    """Raise if the size of a file is not the one that follows from its header; local.

    Args:
        path: Of the file.
        file: Its tensors.
        size: Its bytes.
        end: Expected bytes.

    Raises:
        CheckpointError: Names the first tensor that is cut off.
    """
    if size < end:
        cut = next(entry.spec.name for entry in file.entries.values() if entry.stop > size)
        raise CheckpointError(f"{path}: expected {end} bytes, got {size}: it is cut off in {cut!r}")
    if size > end:
        raise CheckpointError(f"{path}: expected {end} bytes, got {size}: there is something after the last tensor")
