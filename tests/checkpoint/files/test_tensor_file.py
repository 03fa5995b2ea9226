"""Headers and checksums of files, beside the safetensors package and zlib."""

import itertools
import json
import random
import zlib

import numpy as np
import pytest
import torch
from helpers.compare import refused
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from axonmpi.checkpoint.files.checksums import BLOCK_BYTES, BlockSums, combined
from axonmpi.checkpoint.files.tensor_file import (
    PAGE_BYTES,
    TensorSpec,
    index_of,
    lay_out,
    read_header,
    read_headers,
)
from axonmpi.errors import CheckpointError

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a": torch.tensor(3, dtype=torch.int64),
    "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "signs": torch.tensor([True, False, True]),
}


def specs(tensors):
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def write(folder, file, tensors):
    data = bytearray(file.size)
    data[: len(file.header)] = file.header
    for name, entry in file.entries.items():
        data[entry.start : entry.stop] = tensors[name].contiguous().view(torch.uint8).numpy().tobytes()
    (folder / file.name).write_bytes(data)


def test_the_safetensors_package_reads_the_file(tmp_path):
    (file,) = lay_out("model", specs(TENSORS), {"format": "pt"}, 1 << 30)
    data = {name: tensor.reshape(1) if not tensor.dim() else tensor for name, tensor in TENSORS.items()}
    write(tmp_path, file, data)
    assert len(file.header) % PAGE_BYTES == 0
    assert all(entry.start % entry.spec.dtype.itemsize == 0 for entry in file.entries.values())
    with safe_open(tmp_path / file.name, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert {name: opened.get_tensor(name).tolist() for name in opened.keys()} == {  # noqa: SIM118
            name: tensor.tolist() for name, tensor in TENSORS.items()
        }
    assert read_header(tmp_path / file.name).entries == file.entries


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TensorSpec("__metadata__", torch.float32, (1,)), "another use of this name"),
        (TensorSpec("it", torch.qint8, (1,)), "cannot hold tensors of torch.qint8"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(spec, message):
    refused(CheckpointError, (lambda: lay_out("model", [spec], {}, 1 << 30), f"'{spec.name}': .*{message}"))


def test_the_order_of_tensors_does_not_matter():
    shuffled = random.Random(0).sample(specs(TENSORS), len(TENSORS))
    assert lay_out("model", shuffled, {}, 1 << 30) == lay_out("model", specs(TENSORS), {}, 1 << 30)


def test_several_files_have_an_index(tmp_path):
    files = lay_out("model", specs(TENSORS), {}, 24)
    assert [len(file.entries) for file in files] == [1, 2, 2]
    for file in files:
        (tmp_path / file.name).write_bytes(file.header.ljust(file.size))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index_of(files)))
    assert [file.entries for file in read_headers(tmp_path, "model")] == [file.entries for file in files]
    (tmp_path / files[1].name).unlink()
    refused(CheckpointError, (lambda: read_headers(tmp_path, "model"), "model-00002-of-00003"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "cut off in 'signs'"),
        (lambda data: data + b"x", "something after"),
        (lambda data: data[:20], "no safetensors file"),
        (lambda data: b"PK\3\4" * 100, "no safetensors file"),
        (lambda data: data.replace(b'"BF16"', b'"BF99"'), "BF99"),
        (lambda data: data.replace(b"[2,3]", b"[2,4]"), "24 bytes, expected 32"),
        (lambda data: data.replace(b"{", b"[", 1), "header is damaged"),
    ],
)
def test_damaged_headers_are_refused(damage, message, tmp_path):
    (file,) = lay_out("model", specs(TENSORS), {}, 1 << 30)
    (tmp_path / file.name).write_bytes(damage(file.header.ljust(file.size, b"\0")))
    refused(CheckpointError, (lambda: read_header(tmp_path / file.name), message))


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_checksums_of_pieces_are_those_of_blocks(seed, ranks):
    generator = random.Random(seed)
    size = generator.randrange(1, 3 * BLOCK_BYTES)
    data = generator.randbytes(size)
    cuts = sorted({0, size, *(generator.randrange(size) for _ in range(generator.randrange(12)))})
    sums = [BlockSums(size) for _ in range(ranks)]
    pieces = list(itertools.pairwise(cuts))
    for start, stop in generator.sample(pieces, len(pieces)):
        generator.choice(sums).add(start, memoryview(data)[start:stop])
    found = combined(size, [one.shares() for one in sums])
    assert found.tolist() == [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, size, BLOCK_BYTES)]
    assert found.dtype == np.uint32
