"""What the trainer leaves behind and shows, and what it refuses."""

import json
import math
import re
import struct

import pytest
import torch
from helpers import compare
from helpers.operation_log import logged
from helpers.plain_training import metrics_in

import axonmpi as ax
from axonmpi.pipeline.schedule.trace import read_trace
from axonmpi.testing import run_ranks
from axonmpi.train import Config, Trainer
from axonmpi.train.rank_grid import RankGrid, plan_schedule


def alone(config, folder):
    trainer = Trainer(config.replace(out=str(folder)), ax.World.mock(1))
    trainer.run()
    return trainer


def curve(trainer):
    return [step.loss for step in trainer.steps]


def test_the_same_seed_gives_the_same_curve_and_another_seed_another(tiny, tmp_path):
    config, state = tiny.replace(steps=3, sample_length=3), torch.get_rng_state()
    first, again, other = (curve(alone(config.replace(seed=seed), tmp_path)) for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), state)


def test_the_loss_falls_below_what_byte_frequencies_can_give(tiny, tmp_path):
    text = tmp_path / "text"
    text.write_text("".join(f"{number} green bottles, and {number % 7} of them fall\n" for number in range(2000)))
    settings = {"data": text, "steps": 100, "width": 32, "lr": 1e-2, "warmup_steps": 10, "evaluate_every": 50}
    summary = Trainer(tiny.replace(out=str(tmp_path), **settings), ax.World.mock(1)).run()
    assert summary.first_held_out_loss == pytest.approx(math.log(256), abs=0.2)
    assert summary.held_out_loss < summary.unigram_entropy - 0.2
    assert summary.last_loss < summary.first_loss


def test_clipping_bounds_the_step_and_zero_leaves_gradients_alone(tiny, tmp_path):
    clipped, free, loose = (
        alone(tiny.replace(steps=4, gradient_clip=largest), tmp_path) for largest in (1e-12, 0.0, 1e6)
    )
    assert min(step.gradient_norm for step in clipped.steps) > 0.01
    assert curve(free) == curve(loose) != curve(clipped)


def test_weight_decay_spares_the_norms(tiny):
    trainer = Trainer(tiny.replace(norm="layernorm", weight_decay=0.3), ax.World.mock(1))
    groups = trainer.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert [{p.dim() for p in group["params"]} for group in groups] == [{2}, {1}]
    assert sum(len(group["params"]) for group in groups) == len(list(trainer.model.parameters()))


@pytest.mark.ranks(2, 4)
def test_every_rank_has_its_stages_only(world, tiny):
    trainer = Trainer(tiny.replace(layers=5, pp=2), world)
    (stage,) = trainer.model
    assert stage.content == ["embedding, blocks 0 to 2", "blocks 3 to 4, output layer"][world.rank % 2]
    groups = [group["params"] for group in trainer.optimizer.param_groups]
    assert {id(p) for group in groups for p in group} == {id(p) for p in stage.parameters()}
    assert [{p.dim() for p in group} for group in groups] == [{2}, {1}]  # the tied output layer is a matrix, too


# ---- what is written and shown ----------------------------------------------------------------------------------


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_a_run_leaves_metrics_a_picture_a_sample_and_a_summary(world, tiny, shared_tmp_path):
    settings = {"steps": 5, "evaluate_every": 2, "sample_length": 20, "prompt": "def ", "plot": True}
    config = tiny.replace(out=str(shared_tmp_path / "deep" / "run"), **settings)
    trainer = Trainer(config, world)
    summary = trainer.run()
    assert (summary.ranks, summary.tokens) == (world.size, 5 * 8 * 16)
    assert 0 < summary.communication <= 1
    assert world.default_group.all_gather_object(summary) == [summary] * world.size
    folder = config.run.folder
    lines = metrics_in(folder)
    steps = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert steps == list(enumerate(curve(trainer), 1))
    assert ([line["step"] for line in lines if "held_out_loss" in line], len(steps)) == ([0, 2, 4, 5], 5)
    written = json.loads((folder / "summary.json").read_text())
    assert written["held_out_loss"] == summary.held_out_loss == lines[-1]["held_out_loss"]
    assert Config.from_mapping({k: v for k, v in written["config"].items() if v is not None}) == config
    assert (folder / "sample.txt").read_text() == summary.sample + "\n"
    assert summary.sample.startswith("def ")
    signature, _, *sizes = struct.unpack(">8s8sII", (folder / "loss.png").read_bytes()[:24])
    assert (signature, min(sizes) >= 400) == (b"\x89PNG\r\n\x1a\n", True)


def test_an_earlier_runs_files_are_replaced(tiny, tmp_path):
    for name in ("metrics.jsonl", "loss.png", "sample.txt", "summary.json"):
        (tmp_path / name).write_text("an earlier run")
    alone(tiny.replace(steps=1), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoints", "metrics.jsonl", "summary.json"]
    assert "an earlier run" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(("wanted", "tp"), [(True, 1), (False, 2)])
def test_the_last_step_is_traced_and_drawn(tiny, tmp_path, wanted, tp):
    trace = tmp_path / "deep" / "traced"
    settings = {"layers": 4, "steps": 2, "schedule": "zero-bubble", "accumulation": 2, "trace": str(trace)}
    config = tiny.replace(**settings, pp=2, tp=tp, plot=wanted, out=str(tmp_path))
    run_ranks(4, lambda world: Trainer(config, world).run())
    schedule = plan_schedule(config, RankGrid.of(config, 4, 0))
    assert schedule.num_microbatches == 2 * tp
    expected = [[action for action in own if action.kind.is_compute] for own in schedule.actions]
    spans = [[span.action for span in spans] for spans in read_trace(trace).spans]
    assert (spans, (tmp_path / "pipeline.png").exists()) == ([own * 2 for own in expected], wanted)


def test_rank_zero_shows_what_goes_on(tiny, tmp_path, capsys):
    config = tiny.replace(layers=5, steps=2, pp=2, micro_batches=3, progress="plain", sample_length=5)
    config = config.replace(trace=str(tmp_path / "traced"), out=str(tmp_path))
    run_ranks(4, lambda world: Trainer(config, world).run())
    lines = capsys.readouterr().out.splitlines()
    ideal = "2 pipelines, each 1F1B on 2 ranks: bubble 25.0%, peak activations 2, 1"
    assert f"{ideal}; 3 micro-batches of 1 or 2 sequences" in lines
    for text in (
        f"^last step: 1F1B on 2 ranks: bubble .*see {tmp_path / 'traced' / 'pipeline.json'}$",
        f"^see: axonmpi trace {tmp_path / 'traced'}$",
        "^step 2/2  loss ",
        "^held-out loss .*unigram entropy",
        "on 4 ranks.*tokens/s",
    ):
        assert sum(re.search(text, line) is not None for line in lines) == 1, text
    assert [file.name for file in tmp_path.glob("*.png")] == []


# ---- what is refused --------------------------------------------------------------------------------------------


def refused(world, config, message):
    """Check that a trainer raises on this rank as on all others; return how many operations that took."""
    with logged(world) as log, pytest.raises(ValueError, match=message):
        Trainer(config, world)
    return len(log.calls)


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_what_does_not_fit_is_refused_on_every_rank(world, tiny, tmp_path, shared_tmp_path):
    last = world.size - 1
    assert refused(world, tiny.replace(data="nowhere"), "No such file") == 0  # before anything was sent
    operations = {
        refused(world, tiny.replace(layers=4, **settings), message)
        for settings, message in (
            ({"global_batch": 9}, rf"ranks x accumulation = {world.size} x 1 = {world.size}, got 9"),
            ({"tp": 2, "global_batch": 9, "accumulation": 2}, r"multiple of replicas x accumulation = \d x 2"),
            ({"pp": 2, "global_batch": 9, "accumulation": 2}, r"multiple of pipelines x accumulation = \d x 2"),
            ({"pp": 3}, rf"tp x pp = 1 x 3 = 3, .* {world.size} ranks: .*, or start a multiple of 3"),
            (
                {"dp": 8},
                rf"dp x tp x pp = 8 x 1 x 1 = 8, but there are {world.size} ranks: take .* or start 8 ranks",
            ),
            ({"pp": 2, "micro_batches": 9}, "micro_batches: expected at most .* got 9"),
            ({"device": "cuda"}, r"device: 'cuda' needs a world of GPUs, as init_process_group\('nccl'\)"),
        )
    }
    assert len(operations) == 1  # the settings were compared, and nothing else was sent
    own = tiny.replace(global_batch=9 if world.rank == last else 8)
    refused(world, own, rf"first difference is\n  .*: global_batch 8\n  rank {last}: global_batch 9\nStart all")
    text = tmp_path / f"text{world.rank}"
    text.write_text("AB"[world.rank == last] * 1000)
    refused(world, tiny.replace(data=str(text)), rf"rank {last}: text with digest \w+\nStart all")
    occupied = shared_tmp_path / "file"
    occupied.touch()
    for settings, message in (
        ({"out": str(occupied)}, r"--out .*file.*cannot write there"),
        ({"pp": 2, "trace": str(occupied / "traced")}, r"--trace .*traced: cannot write there"),
    ):
        compare.refused(ValueError, (Trainer(tiny.replace(layers=4, **settings), world).run, message))
    message = r"step \d+ is nan.*smaller lr \(now 1e\+30\)"
    for pp in (1, 2):
        config = tiny.replace(layers=2, pp=pp, lr=1e30, gradient_clip=0.0, out=str(shared_tmp_path))
        compare.refused(FloatingPointError, (Trainer(config, world).run, message))


@pytest.mark.ranks(2)
def test_a_picture_that_cannot_be_drawn_at_the_end_is_refused_at_the_beginning(world, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("axonmpi.train.report.recorder.find_spec", lambda _name: None)
    run = Trainer(tiny.replace(plot=True, out=str(tmp_path)), world).run
    compare.refused(ValueError, (run, r"matplotlib is not installed: .*axonmpi\[train\]', or use --no-plot"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pp": 2}, ("1F1B", 2, 8)),
        ({"pp": 4, "accumulation": 3}, ("1F1B", 4, 8)),  # 8 sequences at a time
        ({"pp": 2, "schedule": "interleaved-1f1b"}, ("interleaved 1F1B", 4, 8)),
        ({"pp": 4, "schedule": "interleaved-1f1b"}, ("1F1B", 4, 16)),  # 4 blocks
        ({"pp": 2, "schedule": "zero-bubble", "chunks": 2, "micro_batches": 1}, ("zero bubble, V-shaped", 4, 1)),
    ],
)
def test_numbers_that_are_left_out(settings, expected):
    config = Config().replace(global_batch=24, **settings)
    schedule = plan_schedule(config, RankGrid.of(config, 4, 0))
    assert (schedule.name, schedule.num_stages, schedule.num_microbatches) == expected
