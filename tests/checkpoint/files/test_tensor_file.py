"""Headers and checksums of files, beside the safetensors package and zlib."""

import itertools
import json
import os
import random
import zlib

import numpy as np
import pytest
import torch
from helpers.compare import refused
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib
from safetensors import SafetensorError, safe_open

from axonmpi.checkpoint.files import checksums
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


def entry(shape="[2]", offsets="[0,8]", dtype='"F32"', more=""):
    return f'{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}}}}}'


WHOLE = entry()
DEEP = [f',"more":{"[" * levels}{"]" * levels}' for levels in (125, 126, 2000)]
HEADERS = {
    "whole": WHOLE,
    "spaces": f" {WHOLE}\n\t ",
    "a tensor as a list": '{"a":["F32",[2],[0,8]]}',
    "a longer list": '{"a":["F32",[2],[0,8],1]}',
    "unknown fields": entry(more=',"more":[-1,1.5,null,{}]'),
    "no metadata": '{"__metadata__":null,' + WHOLE[1:],
    "an empty name": WHOLE.replace('"a"', '""'),
    "a name with NUL and a pair of surrogates": WHOLE.replace('"a"', r'"\u0000\ud83d\ude00"'),
    "metadata alone": ('{"__metadata__":{"a":"b"}}', b""),
    "nothing": ("{}", b""),
    "no elements, very many columns": (entry("[4611686018427387904,0]", "[0,0]"), b""),
    "float8": entry("[8]", dtype='"F8_E8M0"'),
    "data behind nothing": ("{}", b"x"),
    "data behind metadata": ('{"__metadata__":{}}', b"x"),
    "float offsets": entry(offsets="[0.0,8.0]"),
    "texts as offsets": entry(offsets='["0","8"]'),
    "minus zero": entry(offsets="[-0,8]"),
    "three offsets": entry(offsets="[0,8,8]"),
    "offsets that go back": entry("[0]", "[8,0]"),
    "true as an offset": (entry("[1]", "[0,true]", '"U8"'), b"x"),
    "a float shape": entry("[2.0]"),
    "an exponent": entry("[2e0]"),
    "a text as a shape": entry('"2"'),
    "a text in a shape": entry('["2"]'),
    "true in a shape": entry("[true,2]"),
    "null as a shape": entry("null"),
    "a negative shape": entry("[-1,-2]"),
    "a dimension of 2^70": (entry(f"[0,{1 << 70}]", "[0,0]"), b""),
    "a product of 2^64": (entry(f"[{1 << 63},2,0]", "[0,0]"), b""),
    "half of a pair in a name": WHOLE.replace('"a"', r'"\ud800"'),
    "half of a pair elsewhere": entry(more=r',"more":"\ud800"'),
    "a control character": WHOLE.replace('"a"', '"\x01"'),
    "metadata with a number": '{"__metadata__":{"a":1},' + WHOLE[1:],
    "metadata as a list": '{"__metadata__":[],' + WHOLE[1:],
    "metadata twice": '{"__metadata__":{},"__metadata__":{},' + WHOLE[1:],
    "a field twice": entry(more=',"shape":[2]'),
    "NaN": entry(more=',"more":NaN'),
    "out of range": entry(more=',"more":1e400'),
    "no dtype": WHOLE.replace('"dtype":"F32",', ""),
    "an unknown dtype": entry(dtype='"f32"'),
    "two documents": WHOLE + "{}",
    "NUL behind": WHOLE + "\0",
    "a list": ("[]", b""),
    "null": ("null", b""),
    "a byte-order mark": "\ufeff" + WHOLE,
    "UTF-16": WHOLE.encode("utf-16-le"),
    "UTF-32": WHOLE.encode("utf-32-le"),
    "no UTF-8": WHOLE.encode().replace(b'"a"', b'"\xff"'),
    "two at one place": WHOLE[:-1] + "," + WHOLE[1:].replace('"a"', '"b"'),
    **{f"nested {len(more)} deep": entry(more=more) for more in DEEP},
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_is_refused_if_the_safetensors_package_refuses_it(name, tmp_path):
    header, data = HEADERS[name] if isinstance(HEADERS[name], tuple) else (HEADERS[name], bytes(8))
    header = header if isinstance(header, bytes) else header.encode()
    path = tmp_path / "it.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    try:
        with safe_open(path, framework="pt") as opened:
            expected = {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118
    except SafetensorError:
        refused(CheckpointError, (lambda: read_header(path), "it.safetensors: "))
    else:
        assert {key: list(each.spec.shape) for key, each in read_header(path).entries.items()} == expected


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../it.safetensors"}, "index.json: .*the same folder, got '../it.safetensors'"),
        ({"a": "/dev/zero"}, "index.json: .*got '/dev/zero'"),
        ({"a": ".."}, "index.json: .*got '..'"),
        ({"a": 3}, "index.json: .*got 3"),
        ({"a": "it.safetensors\0"}, "index.json: .*same folder"),
        ({"a": "pipe"}, "pipe: expected a regular file, got a named pipe"),
    ],
)
def test_an_index_leads_to_regular_files_of_its_folder(weight_map, message, tmp_path):
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "in/pipe")
    (tmp_path / "it.safetensors").write_bytes(len(WHOLE).to_bytes(8, "little") + WHOLE.encode() + bytes(8))
    (tmp_path / "in/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(CheckpointError, (lambda: read_headers(tmp_path / "in", "model"), message))


@pytest.mark.parametrize("crc32", [isal_zlib.crc32, zlib.crc32], ids=["isal", "zlib"])
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 5))
def test_checksums_of_pieces_are_those_of_blocks(crc32, seed, ranks):
    generator = random.Random(seed)
    size = generator.randrange(1, 3 * BLOCK_BYTES)
    data = generator.randbytes(size)
    cuts = sorted({0, size, *(generator.randrange(size) for _ in range(generator.randrange(12)))})
    sums = [BlockSums(size) for _ in range(ranks)]
    pieces = list(itertools.pairwise(cuts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "crc32", crc32)
        for start, stop in generator.sample(pieces, len(pieces)):
            generator.choice(sums).add(start, memoryview(data)[start:stop])
    found = combined(size, [one.terms() for one in sums])
    assert found.tolist() == [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, size, BLOCK_BYTES)]
    assert found.dtype == np.uint32
