"""Training in every layout of the ranks is training in one process: dp, tp and pp, sharded or not."""

import itertools

import pytest
import torch
from plain import plain_run

import axonmpi as ax
from axonmpi.train import Trainer
from axonmpi.train.recorder import printable

SMALL = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "steps": 30,
    "lr": 2e-3,  # with a higher one the first steps are chaotic: rounding errors grow
    "warmup_steps": 10,
    "prompt": "def __init__",  # with the sample it is longer than a sequence
    "sample_length": 6,
}
STRATEGIES = ("none", "full", "grad", "hybrid")


def products(ranks):
    """Return every dp, tp and pp for a number of ranks, with every way to share parameters along dp."""
    return [
        {"dp": dp, "tp": tp, "pp": pp, "layers": max(2, pp), "fsdp": fsdp, "micro_batches": pp if pp > 1 else 0}
        for dp, tp, pp in itertools.product(range(1, ranks + 1), repeat=3)
        for fsdp in (STRATEGIES if dp > 1 else ("none",))
        if dp * tp * pp == ranks
    ]


ZERO_BUBBLE = {"schedule": "zero-bubble", "micro_batches": 2}
FURTHER = {
    1: [
        {"fsdp": "full", "sequence_parallel": True, "accumulation": 4},
        {"fsdp": "grad", "chunks": 2, "accumulation": 2, **ZERO_BUBBLE},
    ],
    2: [
        {"tp": 2, "sequence_parallel": True, "positions": "learned", "norm": "layernorm"},
        {"tp": 2, "tied_embeddings": False, "accumulation": 2, "chunks": 2, **ZERO_BUBBLE},
        {"pp": 2, "layers": 4, "schedule": "interleaved-1f1b", "micro_batches": 2, "gradient_clip": 0.0},
        {"fsdp": "full", "schedule": "gpipe", "micro_batches": 2, "cpu_offload": "full", "positions": "learned"},
    ],
    3: [{"tp": 3, "heads": 6, "width": 48, "sequence_length": 18, "sequence_parallel": True}],  # 256 bytes by three
    4: [
        {"tp": 4, "sequence_parallel": True, "tied_embeddings": False},
        {"tp": 2, "sequence_parallel": True, "fsdp": "full", "positions": "learned"},
        {"tp": 2, "accumulation": 4, "strategy": "synchronous"},
        {"tp": 2, "pp": 2, "sequence_parallel": True, "micro_batches": 2, "positions": "learned"},
        {"tp": 2, "pp": 2, "accumulation": 2, "norm": "layernorm", **ZERO_BUBBLE},
        {"tp": 2, "pp": 2, "layers": 4, "chunks": 2, "sequence_parallel": True, **ZERO_BUBBLE},
        {"pp": 2, "layers": 4, "chunks": 2, "fsdp": "full", "accumulation": 2, **ZERO_BUBBLE},
    ],
    8: [
        {"dp": 2, "tp": 2, "pp": 2, "micro_batches": 2},
        {"tp": 2, "pp": 2, "fsdp": "full", "sequence_parallel": True, **ZERO_BUBBLE},
    ],
}


def check(world, config, case):
    """Train, and compare what every rank has measured with the run in one process."""
    expected = plain_run(config)
    trainer = Trainer(config, world)
    summary = trainer.run()
    losses, norms = zip(*((step.loss, step.gradient_norm) for step in trainer.steps), strict=True)
    assert losses == pytest.approx(expected.losses, abs=1e-4), case
    assert norms == pytest.approx(expected.norms, rel=1e-4), case
    assert norms[0] == pytest.approx(expected.norms[0], rel=1e-5), case
    assert summary.held_out_loss == pytest.approx(expected.held_out_loss, abs=1e-4), case
    assert summary.sample == printable(expected.sample), case
    told = world.default_group.all_gather_object((losses, norms, trainer.held_out[-1].held_out_loss, summary))
    assert told.count(told[0]) == world.size, case


@pytest.mark.rank_timeout(240)
@pytest.mark.ranks(1, 2, 4)
def test_every_product_of_dp_tp_and_pp(world, tiny, shared_tmp_path):
    for case in products(world.size):
        check(world, tiny.replace(**SMALL | case, out=str(shared_tmp_path)), case)


@pytest.mark.rank_timeout(240)
@pytest.mark.ranks(1, 2, 3, 4, 8)
def test_other_settings_together_with_them(world, tiny, shared_tmp_path):
    for case in FURTHER[world.size]:
        check(world, tiny.replace(**SMALL | case, out=str(shared_tmp_path)), case)


APART = [  # replicas that gather parameters unit by unit, or once, or have them whole
    {"tp": 2, "fsdp": "full", "sequence_parallel": True},
    {"pp": 2, "fsdp": "grad", **ZERO_BUBBLE},
    {"pp": 2, "fsdp": "hybrid", "micro_batches": 2},
]


@pytest.mark.rank_timeout(240)
@pytest.mark.ranks(4)
def test_ranks_that_are_alone_on_their_nodes(world, tiny, shared_tmp_path, monkeypatch):
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "1")
    row = ax.DeviceMesh({"dp": 2, "tp": 2}, world).group("dp")
    assert row.backend.node_ranks == (row.rank,)
    for case in APART:
        check(world, tiny.replace(**SMALL | case, out=str(shared_tmp_path)), case)


@pytest.mark.ranks(4)
def test_bfloat16_stays_near_float32(world, tiny, shared_tmp_path):
    sharded = {"tp": 2, "fsdp": "full"}, {"pp": 2, "fsdp": "grad"}
    for case in (*sharded, {"tp": 2, "sequence_parallel": True, "pp": 2}):
        config = tiny.replace(**SMALL | case | {"steps": 8, "dtype": "bfloat16"}, out=str(shared_tmp_path))
        expected = plain_run(config)
        trainer = Trainer(config, world)
        trainer.run()
        apart = torch.tensor([step.loss for step in trainer.steps]) - torch.tensor(expected.losses)
        assert 0 < apart.abs().max() < 0.05, case
