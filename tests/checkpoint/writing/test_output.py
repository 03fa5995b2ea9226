"""Writing by all ranks, checked by the safetensors package: tensors cut into subarrays in any way."""

import json
import os
import shutil

import pytest
import torch
from helpers.checkpoint_shards import job_for, ranks_on_two_nodes, shards_of, whole_tensors
from helpers.checkpoints import assert_checksums, by_name, on_first
from helpers.compare import assert_equal, refused
from safetensors.torch import load_file

from axonmpi.checkpoint.ranks import ranks_of
from axonmpi.checkpoint.shards.subarrays import Subarray
from axonmpi.checkpoint.shards.tensor_shard import Piece, TensorShard
from axonmpi.checkpoint.writing import job as jobs
from axonmpi.checkpoint.writing.job import write_checkpoint
from axonmpi.checkpoint.writing.output import CHUNK_BYTES, Output
from axonmpi.checkpoint.writing.snapshot import Snapshot
from axonmpi.errors import CheckpointError


def job_of(world, path, tensors, seed):
    return job_for(path, shards_of(world.rank, world.size, tensors, seed))


def check_file(path, tensors):
    assert_equal(by_name(load_file(path / "model.safetensors")), by_name(tensors))


@pytest.fixture
def small(world, tmp_path):
    """How one rank writes a small tensor: to where, what, and with whom."""
    return job_of(world, tmp_path / "it", {"a": torch.ones(5)}, 0), ranks_of(world.default_group)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("copies", [False, True])
def test_any_division_of_tensors_gives_the_same_file(world, seed, copies, shared_tmp_path):
    path, tensors = shared_tmp_path / "it", whole_tensors(seed)
    job = job_of(world, path, tensors, seed)
    if copies:
        snapshot = Snapshot(job.plan)
        snapshot.copy_now()
        snapshot.copy_rest()
        job = job._replace(plan=snapshot.plan)
    write_checkpoint(job, ranks_of(world.default_group))
    assert sorted(os.listdir(path)) == ["checksums.safetensors", "model.safetensors", "state.json"]
    assert os.listdir(shared_tmp_path) == ["it"]
    check_file(path, tensors)
    assert [*load_file(path / "checksums.safetensors")] == ["model.safetensors"]
    assert_checksums(path)


@pytest.mark.ranks(4)
def test_ranks_of_two_nodes_write_no_page_together(world, seed, shared_tmp_path, monkeypatch):
    tensors, ranks = whole_tensors(seed), ranks_on_two_nodes(world)
    job = job_of(world, shared_tmp_path / "it", tensors, seed)
    pages, pwrite = set(), os.pwrite

    def counted(descriptor, data, offset):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        pages.update((name, page) for page in range(offset // 4096, (offset + len(data) - 1) // 4096 + 1))
        return pwrite(descriptor, data, offset)

    if not world.peers:  # threads of one process would count each other's
        monkeypatch.setattr(os, "pwrite", counted)
    write_checkpoint(job, ranks)
    of_ranks = world.default_group.all_gather_object(pages)
    assert not (of_ranks[0] | of_ranks[1]) & (of_ranks[2] | of_ranks[3])
    assert any(of_ranks) != bool(world.peers)
    check_file(shared_tmp_path / "it", tensors)


@pytest.mark.ranks(2)
def test_a_rank_keeps_few_edges_of_columns_that_two_nodes_share(world, shared_tmp_path, monkeypatch):
    path = shared_tmp_path / "it"
    tensor = torch.arange(3 << 20).view(-1, 512)  # 24 MiB; a rank has 2 KiB of a row
    subarray = Subarray((0, 256 * world.rank), (len(tensor), 256))
    job = job_for(path, [TensorShard("it", tensor.shape, tensor.dtype, [Piece(subarray, tensor[subarray.slices])])])
    kept, exchange = [], Output.exchange_edges

    def measured(output):
        kept.append(sum(len(data) for _, _, data in output._edges))
        exchange(output)

    monkeypatch.setattr(Output, "exchange_edges", measured)
    write_checkpoint(job, ranks_on_two_nodes(world))
    assert 0 < max(kept) <= CHUNK_BYTES
    check_file(path, {"it": tensor})


@pytest.mark.ranks(2, 4)
def test_an_error_of_one_rank_is_that_of_all_and_what_was_there_stays(world, shared_tmp_path, monkeypatch):
    path, ranks = shared_tmp_path / "it", ranks_of(world.default_group)
    job = job_of(world, path, whole_tensors(2), 2)
    write_checkpoint(job, ranks)
    before, pwrite = (path / "model.safetensors").read_bytes(), os.pwrite

    def full(descriptor, data, offset):
        if offset > 1 << 20:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patch:
        on_first(patch.setattr, os, "pwrite", full)
        refused(CheckpointError, (lambda: write_checkpoint(job, ranks), "No space left on device"))
    world.barrier()
    assert (os.listdir(shared_tmp_path), (path / "model.safetensors").read_bytes()) == (["it"], before)
    world.barrier()
    write_checkpoint(job, ranks)  # and on it goes


@pytest.mark.ranks(2)
def test_what_is_no_checkpoint_is_not_replaced(world, shared_tmp_path):
    path = shared_tmp_path / "it"
    on_first(path.mkdir)
    on_first((path / "thesis.tex").write_text, "the only copy")
    job, ranks = job_of(world, path, whole_tensors(0), 0), ranks_of(world.default_group)
    refused(CheckpointError, (lambda: write_checkpoint(job, ranks), "it is there and is no checkpoint"))
    assert (path / "thesis.tex").read_text() == "the only copy"


@pytest.mark.ranks(1)
@pytest.mark.parametrize("when", ["partial", "moved", "renamed"])
def test_the_next_save_tidies_up_after_a_killed_one(world, small, when, tmp_path):
    write_checkpoint(*small)
    (tmp_path / ".it.axonmpi-lock").write_text("axonmpi: a process that was killed\n")
    (tmp_path / "it/state.json").write_text(json.dumps("the first"))
    if when == "moved":
        (tmp_path / "it").rename(tmp_path / "it.previous")
    else:
        left = tmp_path / ("it.partial" if when == "partial" else "it.previous")
        left.mkdir()
        (left / "model.safetensors").write_text("half")
    write_checkpoint(*small)
    assert os.listdir(tmp_path) == ["it"]
    assert json.loads((tmp_path / "it/state.json").read_text())["any"] == "thing"
    check_file(tmp_path / "it", {"a": torch.ones(5)})


@pytest.mark.ranks(1)
def test_a_file_of_the_users_in_a_checkpoint_is_not_removed(world, small, tmp_path):
    write_checkpoint(*small)
    (tmp_path / "it/tokenizer.model").write_text("words")
    mistake = lambda: write_checkpoint(*small), r"'tokenizer.model' in it.* move that away"
    refused(CheckpointError, mistake, mistake)
    (tmp_path / "it/tokenizer.model").unlink()
    write_checkpoint(*small)


@pytest.mark.ranks(1)
def test_of_two_saves_with_one_path_the_second_is_refused(world, small, tmp_path, monkeypatch):
    write_rest = jobs.write_short_runs

    def another_comes(*args):
        monkeypatch.undo()
        refused(CheckpointError, (lambda: write_checkpoint(*small), "this process saves there already"))
        write_rest(*args)

    monkeypatch.setattr(jobs, "write_short_runs", another_comes)
    write_checkpoint(*small)
    assert os.listdir(tmp_path) == ["it"]
    check_file(tmp_path / "it", {"a": torch.ones(5)})


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["it.partial", "it.previous"])
def test_a_folder_that_no_save_has_left_stays(world, small, name, tmp_path):
    """Somebody's copy of a checkpoint may well have such a name."""
    write_checkpoint(*small)
    shutil.copytree(tmp_path / "it", tmp_path / name)
    refused(
        CheckpointError, *[(lambda: write_checkpoint(*small), f"{name}: it is in the way of saves to 'it'")] * 2
    )
    check_file(tmp_path / name, {"a": torch.ones(5)})
    assert sorted(os.listdir(tmp_path)) == ["it", name]
