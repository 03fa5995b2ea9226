"""What ranks write together, beside the safetensors package: tensors cut into boxes in any way."""

import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.checkpoint_parts import job_for, parts_of, whole_tensors
from safetensors.torch import load_file

import axonmpi as ax
from axonmpi.checkpoint.files.checksums import BLOCK_BYTES
from axonmpi.checkpoint.files.folders import prepare
from axonmpi.checkpoint.parts.boxes import Box
from axonmpi.checkpoint.parts.part import Part, Piece
from axonmpi.checkpoint.ranks import CheckpointRanks, ranks_of
from axonmpi.checkpoint.writing import job as jobs
from axonmpi.checkpoint.writing.job import write_checkpoint
from axonmpi.checkpoint.writing.output import CHUNK_BYTES, Output
from axonmpi.checkpoint.writing.snapshot import Snapshot
from axonmpi.errors import CheckpointError
from axonmpi.groups.world import partition_group


def shared_folder(world, tmp_path):
    return Path(ax.broadcast_object(str(tmp_path), 0, world.default_group))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("seed", range(4))
def test_any_division_of_tensors_gives_the_same_file(world, seed, tmp_path):
    folder = shared_folder(world, tmp_path)
    tensors = whole_tensors(seed)
    job = job_for(folder / "it", parts_of(world.rank, world.size, tensors, seed))
    if seed % 2:
        snapshot = Snapshot(job.share)
        snapshot.copy_now()
        snapshot.copy_rest()
        job = job._replace(share=snapshot.share)
    write_checkpoint(job, ranks_of(world.default_group))
    assert sorted(os.listdir(folder / "it")) == ["checksums.safetensors", "model.safetensors", "state.json"]
    assert os.listdir(folder) == ["it"]
    found = load_file(folder / "it/model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == tensors[name].dtype for name in tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    data = (folder / "it/model.safetensors").read_bytes()
    expected = [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    assert load_file(folder / "it/checksums.safetensors")["model.safetensors"].tolist() == expected


@pytest.mark.ranks(4)
@pytest.mark.parametrize("seed", range(2))
def test_ranks_of_two_nodes_write_no_page_together(world, seed, tmp_path, monkeypatch):
    folder = shared_folder(world, tmp_path)
    tensors = whole_tensors(seed)
    group = world.default_group
    node = partition_group(group, [[0, 1], [2, 3]])
    job = job_for(folder / "it", parts_of(world.rank, world.size, tensors, seed))
    pages = set()
    pwrite = os.pwrite

    def counted(descriptor, data, offset):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        pages.update((name, page) for page in range(offset // 4096, (offset + len(data) - 1) // 4096 + 1))
        return pwrite(descriptor, data, offset)

    if world.peers:  # threads of one process would count each other's
        write_checkpoint(job, CheckpointRanks(group, node, 2))
    else:
        monkeypatch.setattr(os, "pwrite", counted)
        write_checkpoint(job, CheckpointRanks(group, node, 2))
        of_ranks = group.all_gather_object(pages)
        assert not (of_ranks[0] | of_ranks[1]) & (of_ranks[2] | of_ranks[3])
        assert any(of_ranks)
    found = load_file(folder / "it/model.safetensors")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.ranks(2)
def test_a_rank_keeps_few_edges_of_columns_that_two_nodes_share(world, tmp_path, monkeypatch):
    folder, group = shared_folder(world, tmp_path), world.default_group
    tensor = torch.arange(3 << 20).view(-1, 512)  # 24 MiB; a rank has 2 KiB of a row
    box = Box((0, 256 * world.rank), (len(tensor), 256))
    job = job_for(folder / "it", [Part("it", tensor.shape, tensor.dtype, [Piece(box, tensor[box.slices])])])
    kept = []
    exchange = Output.exchange_edges

    def measured(output):
        kept.append(sum(len(data) for _, _, data in output._edges))
        exchange(output)

    monkeypatch.setattr(Output, "exchange_edges", measured)
    write_checkpoint(job, CheckpointRanks(group, partition_group(group, [[0], [1]]), 2))
    assert 0 < max(kept) <= CHUNK_BYTES
    assert torch.equal(load_file(folder / "it/model.safetensors")["it"], tensor)


@pytest.mark.ranks(2)
def test_several_files(world, tmp_path):
    folder = shared_folder(world, tmp_path)
    tensors = whole_tensors(1)
    job = job_for(folder / "it", parts_of(world.rank, world.size, tensors, 1), max_file_size=4 << 20)
    assert len(job.files) > 2
    write_checkpoint(job, ranks_of(world.default_group))
    found = {}
    for file in job.files:
        found |= load_file(folder / "it" / file.name)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.ranks(2, 4)
def test_an_error_of_one_rank_is_that_of_all_and_what_was_there_stays(world, tmp_path, monkeypatch):
    folder = shared_folder(world, tmp_path)
    tensors = whole_tensors(2)
    ranks = ranks_of(world.default_group)
    job = job_for(folder / "it", parts_of(world.rank, world.size, tensors, 2))
    write_checkpoint(job, ranks)
    before = (folder / "it/model.safetensors").read_bytes()
    pwrite = os.pwrite

    def full(descriptor, data, offset):
        if offset > 1 << 20:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_checkpoint(job, ranks)
    monkeypatch.undo()
    ax.barrier(world.default_group)
    assert os.listdir(folder) == ["it"]
    assert (folder / "it/model.safetensors").read_bytes() == before
    ax.barrier(world.default_group)
    write_checkpoint(job, ranks)  # and on it goes


@pytest.mark.ranks(2)
def test_what_is_no_checkpoint_is_not_replaced(world, tmp_path):
    folder = shared_folder(world, tmp_path)
    if world.rank == 0:
        (folder / "it").mkdir()
        (folder / "it/thesis.tex").write_text("the only copy")
    job = job_for(folder / "it", parts_of(world.rank, world.size, whole_tensors(0), 0))
    with pytest.raises(CheckpointError, match="it is there and is no checkpoint"):
        write_checkpoint(job, ranks_of(world.default_group))
    assert (folder / "it/thesis.tex").read_text() == "the only copy"


@pytest.mark.ranks(1)
@pytest.mark.parametrize("when", ["partial", "moved", "renamed"])
def test_the_next_save_tidies_up_after_a_killed_one(world, when, tmp_path):
    job = job_for(tmp_path / "it", parts_of(0, 1, {"a": torch.ones(5)}, 0))
    ranks = ranks_of(world.default_group)
    write_checkpoint(job, ranks)
    (tmp_path / "it/state.json").write_text(json.dumps("the first"))
    if when == "partial":
        (tmp_path / "it.partial").mkdir()
        (tmp_path / "it.partial/model.safetensors").write_text("half")
    elif when == "moved":
        (tmp_path / "it").rename(tmp_path / "it.previous")
    else:
        (tmp_path / "it.previous").mkdir()
    write_checkpoint(job, ranks)
    assert os.listdir(tmp_path) == ["it"]
    assert (tmp_path / "it/state.json").read_text() == "{}"
    assert np.array_equal(load_file(tmp_path / "it/model.safetensors")["a"], np.ones(5))


@pytest.mark.ranks(1)
def test_a_file_of_the_users_in_a_checkpoint_is_not_removed(world, tmp_path):
    job = job_for(tmp_path / "it", parts_of(0, 1, {"a": torch.ones(5)}, 0))
    ranks = ranks_of(world.default_group)
    write_checkpoint(job, ranks)
    (tmp_path / "it/tokenizer.model").write_text("words")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"'tokenizer.model' in it.* move that away"):
            write_checkpoint(job, ranks)
    (tmp_path / "it/tokenizer.model").unlink()
    write_checkpoint(job, ranks)


@pytest.mark.ranks(1)
def test_of_two_jobs_with_one_path_the_first_is_told(world, tmp_path, monkeypatch):
    ranks = ranks_of(world.default_group)
    job = job_for(tmp_path / "it", parts_of(0, 1, {"a": torch.ones(5)}, 0))
    write_rest = jobs.write_scattered

    def another_comes(*args):
        monkeypatch.undo()
        write_checkpoint(job, ranks)
        prepare(job.path, job.files)  # of a third one
        write_rest(*args)

    monkeypatch.setattr(jobs, "write_scattered", another_comes)
    with pytest.raises(CheckpointError, match="another job saves to the same path"):
        write_checkpoint(job, ranks)
    assert load_file(tmp_path / "it/model.safetensors")["a"].tolist() == [1] * 5
