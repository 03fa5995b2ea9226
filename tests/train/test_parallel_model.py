"""Training in every layout of the ranks is training in one process: dp, cp, tp and pp, sharded or not."""

import pytest
import torch
from helpers.plain_training import plain_run

import axonmpi as ax
from axonmpi.train import Trainer
from axonmpi.train.report.recorder import printable

SMALL = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "steps": 2,
    "lr": 2e-3,
    "warmup_steps": 2,
    "prompt": "def __init__(se",  # with the sample it is longer than a sequence
    "sample_length": 3,
    "temperature": 0.0,  # of a model that has learnt little all draws are alike, the likeliest bytes are not
}
ZERO_BUBBLE = {"schedule": "zero-bubble", "micro_batches": 2}
PARALLEL = {"sequence_parallel": True}
APART = {"ranks_per_node": "1"}
ROWS = {  # by the number of ranks; what is not divided by cp, tp and pp is divided by dp
    1: [
        {"fsdp": "full", "accumulation": 4, **PARALLEL},
        {"fsdp": "grad", "chunks": 2, "accumulation": 2, **ZERO_BUBBLE},
        {"micro_batches": 3, "strategy": "synchronous"},
    ],
    2: [
        {"strategy": "overlapped", "accumulation": 2},
        {"strategy": "synchronous", "gradient_clip": 0.0},
        {"strategy": "no_sync", "micro_batches": 2, "accumulation": 2},
        {"fsdp": "full", "accumulation": 2, "norm": "layernorm"},
        {"fsdp": "grad", "cpu_offload": "params", "tied_embeddings": False},
        {"fsdp": "hybrid", "positions": "learned", **APART},
        {"fsdp": "full", "schedule": "gpipe", "micro_batches": 2, "cpu_offload": "full", "positions": "learned"},
        {"tp": 2, "positions": "learned", "norm": "layernorm", **PARALLEL},
        {"tp": 2, "tied_embeddings": False, "accumulation": 2, "chunks": 2, **ZERO_BUBBLE},
        {"pp": 2, "layers": 4, "schedule": "interleaved-1f1b", "micro_batches": 2, "gradient_clip": 0.0, **APART},
        {"pp": 2, "schedule": "gpipe", "accumulation": 2, "positions": "learned", "norm": "layernorm"},
        {"pp": 2, "schedule": "zero-bubble", "micro_batches": 3, "strategy": "no_sync", "tied_embeddings": False},
        {"cp": 2, "accumulation": 2, "sequence_length": 17},
        {"cp": 2, "fsdp": "full", "positions": "learned", "norm": "layernorm"},
    ],
    3: [
        {"tp": 3, "heads": 6, "width": 48, "sequence_length": 18, **PARALLEL},  # 256 bytes by three
        {"fsdp": "full", "global_batch": 9},
        {"cp": 3, "tied_embeddings": False},
    ],
    4: [
        {"fsdp": "full", "accumulation": 2},
        {"tp": 4, "tied_embeddings": False, **PARALLEL},
        {"tp": 2, "strategy": "synchronous", "accumulation": 4},
        {"tp": 2, "fsdp": "full", "positions": "learned", **PARALLEL},
        {"tp": 2, "fsdp": "grad", **PARALLEL, **APART},
        {"tp": 2, "fsdp": "hybrid", **APART},
        {"pp": 2, "strategy": "no_sync", "micro_batches": 2},
        {"pp": 2, "layers": 4, "chunks": 2, "fsdp": "full", "accumulation": 2, **ZERO_BUBBLE},
        {"pp": 2, "fsdp": "grad", **ZERO_BUBBLE, **APART},
        {"pp": 2, "fsdp": "hybrid", "micro_batches": 2, **APART},
        {"pp": 4, "layers": 4, "micro_batches": 4, "gradient_clip": 0.0, "tied_embeddings": False},
        {"tp": 2, "pp": 2, "micro_batches": 2, "positions": "learned", **PARALLEL},
        {"tp": 2, "pp": 2, "accumulation": 2, "norm": "layernorm", **ZERO_BUBBLE},
        {"tp": 2, "pp": 2, "layers": 4, "chunks": 2, **ZERO_BUBBLE, **PARALLEL},
        {"cp": 2, "fsdp": "hybrid", "accumulation": 2, **APART},
    ],
    8: [
        {"dp": 2, "tp": 2, "pp": 2, "micro_batches": 2},
        {"tp": 2, "pp": 2, "fsdp": "full", **ZERO_BUBBLE, **PARALLEL},
    ],
}


@pytest.mark.rank_timeout(240)
@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.parametrize("half", [pytest.param(0, marks=pytest.mark.real_ranks), 1])
def test_training_in_every_layout_is_training_in_one_process(world, half, tiny, shared_tmp_path, monkeypatch):
    """Compare what every rank has measured with the run in one process."""
    for row in ROWS[world.size][half::2]:
        settings = dict(row)
        monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", settings.pop("ranks_per_node", ""))
        config = tiny.replace(**SMALL | settings, out=str(shared_tmp_path))
        expected = plain_run(config)
        trainer = Trainer(config, world)
        summary = trainer.run()
        losses, norms = zip(*((step.loss, step.gradient_norm) for step in trainer.steps), strict=True)
        assert losses == pytest.approx(expected.losses, abs=1e-4), row
        assert norms == pytest.approx(expected.norms, rel=1e-4), row
        assert norms[0] == pytest.approx(expected.norms[0], rel=1e-5), row
        assert summary.held_out_loss == pytest.approx(expected.held_out_loss, abs=1e-4), row
        assert summary.sample == printable(expected.sample), row
        told = world.default_group.all_gather_object((losses, norms, trainer.held_out[-1].held_out_loss, summary))
        assert told.count(told[0]) == world.size, row


@pytest.mark.ranks(4)
def test_bfloat16_stays_near_float32(world, tiny, shared_tmp_path):
    for settings in ({"tp": 2, "fsdp": "full"}, {"tp": 2, "pp": 2, **PARALLEL}):
        config = tiny.replace(**SMALL | settings | {"dtype": "bfloat16"}, out=str(shared_tmp_path))
        trainer = Trainer(config, world)
        trainer.run()
        apart = torch.tensor([step.loss for step in trainer.steps]) - torch.tensor(plain_run(config).losses)
        assert 0 < apart.abs().max() < 0.05, settings


@pytest.mark.ranks(4)
def test_nodes_are_as_the_rows_say(world, monkeypatch):
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "1")
    row = ax.DeviceMesh({"dp": 2, "tp": 2}, world).group("dp")
    assert row.backend.node_ranks == (row.rank,)
