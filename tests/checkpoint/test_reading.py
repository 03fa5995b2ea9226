"""Reading by all ranks: any division of tensors, from files that any other division has written."""

import json
import os
import re
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_shards import full_shard, job_for, ranks_on_two_nodes, shards_of, whole_tensors
from helpers.checkpoints import cut_off, flip, on_first, refused_on_all
from safetensors.torch import load_file, save_file

import axonmpi as ax
from axonmpi.checkpoint.files.checksums import BLOCK_BYTES
from axonmpi.checkpoint.files.tensor_file import TensorSpec, lay_out, read_header
from axonmpi.checkpoint.ranks import ranks_of
from axonmpi.checkpoint.reading import read_shards
from axonmpi.checkpoint.shards.subarrays import Subarray
from axonmpi.checkpoint.shards.tensor_shard import Piece, TensorShard
from axonmpi.checkpoint.writing.job import write_checkpoint


def blank(tensors, dtype=None):
    """Return tensors of the same shapes with other values."""
    return {name: torch.full_like(tensor, 111, dtype=dtype) for name, tensor in tensors.items()}


def check_values(shards, tensors):
    for shard in shards:
        for piece in shard.pieces:
            expected = tensors[shard.name][piece.subarray.slices].to(piece.view.dtype)
            assert torch.equal(piece.view, expected), (shard.name, piece.subarray)


def sums_in(folder):
    return {name: sums.numpy() for name, sums in load_file(folder / "checksums.safetensors").items()}


def save(folder, tensors):
    """Write a file of tensors by the safetensors package, and return what is in it."""
    on_first(save_file, tensors, folder / "model.safetensors")
    return read_header(folder / "model.safetensors")


def read(world, folder, files, shards, sums=None, **settings):
    """Read shards from files on all ranks, and return the shards; collective."""
    named = [(shard.name, shard) for shard in shards]
    read_shards(folder, files, named, ranks_of(world.default_group), sums or {}, **settings)
    return shards


def full_shards(tensors):
    """Return shards to read whole tensors into."""
    return [full_shard(name, tensor) for name, tensor in blank(tensors).items()]


def random_tensor(*shape, dtype=torch.float32):
    return torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


class Reads:
    """Counts the blocks that each rank reads."""

    def __init__(self):
        self._all = []

    def preadv(self, descriptor, buffers, offset, call=os.preadv):
        count = call(descriptor, buffers, offset)
        self._all.append((threading.get_ident(), os.readlink(f"/proc/self/fd/{descriptor}"), offset, count))
        return count

    def own(self):
        """Return how often this rank has read each block, by file and number."""
        here = [read for read in self._all if read[0] == threading.get_ident()]
        assert all(offset % BLOCK_BYTES == 0 for _, _, offset, _ in here)
        return Counter((Path(name).name, offset // BLOCK_BYTES) for _, name, offset, _ in here)

    def own_bytes(self):
        return sum(read[3] for read in self._all if read[0] == threading.get_ident())


@pytest.fixture
def reads(monkeypatch):
    counted = Reads()
    monkeypatch.setattr(os, "preadv", counted.preadv)
    return counted


# ---- values -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
def test_any_division_is_read_from_files_of_any_other(world, seed, dtype, shared_tmp_path):
    folder, several = shared_tmp_path / "it", dtype == torch.bfloat16
    tensors = whole_tensors(seed)
    job = job_for(folder, shards_of(world.rank, world.size, tensors, seed), 1 << (20 if several else 40))
    write_checkpoint(job, ranks_of(world.default_group))
    assert (len(job.files) > 1) == several
    shards = shards_of(world.rank, world.size, blank(tensors, dtype), seed + 1)
    window = (1 if dtype is None else 3) * BLOCK_BYTES
    check_values(read(world, folder, job.files, shards, sums_in(folder), window_bytes=window), tensors)


@pytest.mark.ranks(2)
def test_views_without_elements_of_no_dimension_and_transposed(world, shared_tmp_path):
    tensors = {
        "none": torch.zeros(0, 5),
        "one": torch.tensor(3.5),
        "signs": torch.tensor([True, False, True]),
        "turned": random_tensor(30, 50, dtype=torch.float16),
        "complex": torch.view_as_complex(random_tensor(7, 2)),
    }
    file = save(shared_tmp_path, tensors)
    turned = Piece(Subarray.full((30, 50)), torch.zeros(50, 30, dtype=torch.float16).t())
    shards = [shard for shard in full_shards(tensors) if shard.name != "turned"]
    shards.append(TensorShard("turned", (30, 50), torch.float16, [turned]))
    check_values(read(world, shared_tmp_path, [file], shards), tensors)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("length", [2, 3, 5, 8])
def test_elements_that_are_not_aligned_and_lie_in_two_windows(world, length, shared_tmp_path):
    tensors = {"odd": torch.arange(length, dtype=torch.uint8), "wide": random_tensor(400_001, dtype=torch.float64)}
    ends = {"odd": [0, length], "wide": [length, length + 8 * 400_001]}
    described = {
        name: {"dtype": code, "shape": [len(tensors[name])], "data_offsets": ends[name]}
        for name, code in (("odd", "U8"), ("wide", "F64"))
    }
    text = json.dumps(described).encode()
    data = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    path = shared_tmp_path / "model.safetensors"
    on_first(path.write_bytes, len(text).to_bytes(8, "little") + text + data)
    file = read_header(path)
    assert file.entries["wide"].start == 8 + len(text) + length
    check_values(read(world, shared_tmp_path, [file], full_shards(tensors), window_bytes=BLOCK_BYTES), tensors)


@pytest.mark.ranks(1, 2)
def test_floating_point_values_are_rounded_first(world, shared_tmp_path):
    tensors = {"weight": torch.linspace(0, 1, 1000), "count": torch.tensor(257)}
    file = save(shared_tmp_path, tensors)
    shards = read(world, shared_tmp_path, [file], full_shards(tensors), dtype=torch.bfloat16)
    check_values(shards, {"weight": tensors["weight"].bfloat16().float(), "count": torch.tensor(257)})


# ---- what is read -----------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 4)
def test_the_ranks_of_a_node_read_each_block_once(reads, world, shared_tmp_path):
    tensors = {"a": random_tensor(3, 1_000_001), "b": random_tensor(300)}
    file = save(shared_tmp_path, tensors)
    shards = read(world, shared_tmp_path, [file], full_shards(tensors), window_bytes=2 * BLOCK_BYTES)
    check_values(shards, tensors)
    of_ranks = ax.all_gather_object(reads.own())
    assert sum(of_ranks, Counter()) == Counter((file.name, block) for block in range(-(-file.size // BLOCK_BYTES)))
    counts = [counted.total() for counted in of_ranks]
    assert max(counts) - min(counts) <= 2 * len(counts)  # shares of windows of a dozen blocks
    assert sum(ax.all_gather_object(reads.own_bytes())) == file.size


@pytest.mark.ranks(4)
def test_each_node_reads_what_its_ranks_need(reads, world, shared_tmp_path):
    tensors = {"a": random_tensor(4, BLOCK_BYTES)}
    file, rows = save(shared_tmp_path, tensors), Subarray((world.rank, 0), (1, BLOCK_BYTES))
    shard = TensorShard("a", (4, BLOCK_BYTES), torch.float32, [Piece(rows, torch.zeros(rows.size))])
    read_shards(shared_tmp_path, [file], [("a", shard)], ranks_on_two_nodes(world), {})
    check_values([shard], tensors)
    of_ranks = ax.all_gather_object(set(reads.own()))
    of_nodes = [{block for _, block in of_ranks[first] | of_ranks[first + 1]} for first in (0, 2)]
    assert of_nodes == [set(range(9)), set(range(8, 17))]


@pytest.mark.ranks(1, 2)
def test_blocks_that_nobody_needs_are_not_read(reads, world, shared_tmp_path):
    shape = (5, 3, BLOCK_BYTES // 2)
    tensors = {"deep": random_tensor(*shape), "more": random_tensor(BLOCK_BYTES)}
    file, subarray = save(shared_tmp_path, tensors), Subarray((1, 1, 10), (3, 1, 20))
    shard = TensorShard("deep", shape, torch.float32, [Piece(subarray, torch.zeros(subarray.size))])
    check_values(read(world, shared_tmp_path, [file], [shard]), tensors)
    start = file.entries["deep"].start
    expected = {
        (file.name, (start + 4 * ((plane * 3 + 1) * shape[2] + element)) // BLOCK_BYTES)
        for plane in (1, 2, 3)
        for element in (10, 29)
    }
    assert set().union(*ax.all_gather_object(set(reads.own()))) == expected


@pytest.mark.ranks(2)
def test_a_rank_that_needs_nothing_reads_for_the_others(reads, world, shared_tmp_path):
    tensors = {"a": random_tensor(3_000_000)}
    file = save(shared_tmp_path, tensors)
    check_values(read(world, shared_tmp_path, [file], full_shards(tensors) if world.rank else []), tensors)
    assert reads.own()


@pytest.mark.ranks(1, 2)
def test_one_tensor_is_read_into_several_shards_and_a_file_that_nobody_needs_is_not_opened(
    reads, world, shared_tmp_path
):
    tensors = {"a": random_tensor(1_000_000)}
    file, shards = save(shared_tmp_path, tensors), [*full_shards(tensors), *full_shards(tensors)]
    (absent,) = lay_out("absent", [TensorSpec("b", torch.float32, (5,))], {}, 1 << 30)
    check_values(read(world, shared_tmp_path, [absent, file], shards), tensors)
    assert sum(ax.all_gather_object(reads.own_bytes())) == file.size
    read(world, shared_tmp_path, [], [])


# ---- what goes wrong --------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 4)
def test_damage_is_found_by_its_checksum_on_all_ranks(world, shared_tmp_path):
    tensors, folder = whole_tensors(3), shared_tmp_path / "it"
    job = job_for(folder, shards_of(world.rank, world.size, tensors, 3))
    write_checkpoint(job, ranks_of(world.default_group))
    file, sums = read_header(folder / "model.safetensors"), sums_in(folder)
    offsets = [file.entries["columns"].start + 5, file.entries["long"].stop - 1]
    on_first(flip, folder / "model.safetensors", *offsets)
    shards = full_shards(tensors)
    text = refused_on_all(ax.CheckpointError, read, world, folder, [file], shards, sums, window_bytes=BLOCK_BYTES)
    assert text.count("the file is damaged") == 2
    starts = [f"bytes {offset // BLOCK_BYTES * BLOCK_BYTES} to" for offset in offsets]
    assert all(shard in text for shard in ("'columns'", "'long'", str(folder / "model.safetensors"), *starts))
    assert world.size == 1 or re.search(r"rank \d: ", text)
    damaged = {offset // BLOCK_BYTES for offset in offsets}
    blocks = {name: {entry.start // BLOCK_BYTES, entry.stop // BLOCK_BYTES} for name, entry in file.entries.items()}
    unharmed = [shard for shard in shards if not damaged & blocks[shard.name]]
    assert unharmed
    check_values(read(world, folder, [file], unharmed, sums), tensors)
    read(world, folder, [file], shards)  # without checksums nobody knows


CHANGES = {
    "it is cut off in 'b'": cut_off,
    "something after": lambda path: cut_off(path, -1),
    "No such file": lambda path: path.unlink(),
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("message", CHANGES)
def test_a_file_that_is_not_what_it_was(world, message, shared_tmp_path):
    tensors = {"a": random_tensor(1_000_000), "b": random_tensor(5)}
    file = save(shared_tmp_path, tensors)
    on_first(CHANGES[message], shared_tmp_path / file.name)
    text = refused_on_all(ax.CheckpointError, read, world, shared_tmp_path, [file], full_shards(tensors))
    assert [shard for shard in (message, str(shared_tmp_path / file.name)) if shard not in text] == []
    assert len(text.splitlines()) == 1


@pytest.mark.ranks(2, 4)
def test_what_fails_on_one_rank_fails_on_all(world, shared_tmp_path):
    tensors = {"a": random_tensor(3_000_000)}
    file = save(shared_tmp_path, tensors)
    (shard,) = full_shards(tensors)
    if world.rank == 1:
        shard = TensorShard("a", shard.shape, shard.dtype, [Piece(Subarray.full(shard.shape), torch.zeros(7))])
    text = refused_on_all(
        ax.CheckpointError, read, world, shared_tmp_path, [file], [shard], window_bytes=BLOCK_BYTES
    )
    assert text.startswith("rank 1: ")
    if world.rank != 1:
        check_values([shard], tensors)
    check_values(read(world, shared_tmp_path, [file], full_shards(tensors)), tensors)  # and on it goes


@pytest.mark.ranks(1, 2)
def test_an_error_of_the_disk_names_the_tensors(world, shared_tmp_path, monkeypatch):
    tensors = {"a": random_tensor(3_000_000), "b": random_tensor(5)}
    file, preadv = save(shared_tmp_path, tensors), os.preadv

    def broken(descriptor, buffers, offset):
        if offset == BLOCK_BYTES:
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    text = refused_on_all(ax.CheckpointError, read, world, shared_tmp_path, [file], full_shards(tensors))
    assert "with 'a': cannot be read: Input/output error" in text
