"""Training: the same on any number of ranks, and what it leaves behind."""

import json
import math
import struct

import pytest
import torch

import axonmpi as ax
from axonmpi.testing import run_ranks
from axonmpi.train import Config, Trainer

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def trained(world, config):
    trainer = Trainer(config, world)
    trainer.run()
    return trainer


def curve(trainer):
    return torch.tensor([step.loss for step in trainer.steps])


def alone(config, folder):
    return trained(ax.World.mock(1), config.replace(out=str(folder), accumulation=1))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("strategy", ["overlapped", "synchronous", "no_sync"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_is_that_of_one_rank_on_the_joined_batch(
    world, tiny, tmp_path, shared_tmp_path, strategy, accumulation
):
    config = tiny.replace(strategy=strategy, accumulation=accumulation, out=str(shared_tmp_path))
    together = trained(world, config)
    single = alone(config, tmp_path / f"alone{world.rank}")
    assert len(together.steps) == 20
    assert (curve(together) - curve(single)).abs().max() < 1e-4
    for mine, other in zip(together.model.parameters(), single.model.parameters(), strict=True):
        assert (mine - other).abs().max() < 1e-5
    assert together.held_out[-1].held_out_loss == pytest.approx(single.held_out[-1].held_out_loss, abs=1e-6)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(
    "settings",
    [{"fsdp": "full"}, {"fsdp": "grad"}, {"fsdp": "hybrid"}, {"fsdp": "full", "cpu_offload": "full"}],
    ids=str,
)
def test_sharded_training_is_that_of_one_rank_on_the_joined_batch(world, tiny, tmp_path, shared_tmp_path, settings):
    together = trained(world, tiny.replace(accumulation=2, out=str(shared_tmp_path), **settings))
    single = alone(tiny.replace(accumulation=2), tmp_path / f"alone{world.rank}")
    assert (curve(together) - curve(single)).abs().max() < 1e-4
    assert [step.gradient_norm for step in together.steps] == pytest.approx(
        [step.gradient_norm for step in single.steps], rel=1e-4
    )
    assert together.held_out[-1].held_out_loss == pytest.approx(single.held_out[-1].held_out_loss, abs=1e-6)
    held = sum(part.numel() for part in together.model.parameters())
    assert held < single.model.num_parameters() / world.size + 200


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fsdp", ["none", "full"])
def test_bfloat16_stays_near_float32(world, tiny, tmp_path, shared_tmp_path, fsdp):
    rounded = trained(world, tiny.replace(fsdp=fsdp, dtype="bfloat16", out=str(shared_tmp_path)))
    exact = alone(tiny, tmp_path / f"alone{world.rank}")
    assert 0 < (curve(rounded) - curve(exact)).abs().max() < 0.05


def test_the_same_seed_gives_the_same_curve_and_another_seed_another(tiny, tmp_path):
    config = tiny.replace(steps=3)
    first, again, other = (curve(alone(config.replace(seed=seed), tmp_path)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.ranks(2)
def test_the_loss_falls_below_what_byte_frequencies_can_give(world, tiny, shared_tmp_path):
    settings = {"steps": 150, "width": 32, "lr": 1e-2, "warmup_steps": 10, "evaluate_every": 50}
    summary = Trainer(tiny.replace(out=str(shared_tmp_path), **settings), world).run()
    assert summary.first_held_out_loss == pytest.approx(math.log(256), abs=0.2)
    assert summary.held_out_loss < summary.unigram_entropy - 0.2
    assert summary.last_loss < summary.first_loss


@pytest.mark.ranks(1, 2)
def test_a_run_leaves_metrics_a_picture_a_sample_and_a_summary(world, tiny, shared_tmp_path):
    settings = {"steps": 5, "evaluate_every": 2, "sample_length": 20, "prompt": "def ", "plot": True}
    config = tiny.replace(out=str(shared_tmp_path / "deep" / "run"), **settings)
    trainer = Trainer(config, world)
    summary = trainer.run()
    folder = config.run.folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if "held_out_loss" in line] == [0, 2, 4, 5]
    assert [line["loss"] for line in lines if "loss" in line] == [step.loss for step in trainer.steps]
    written = json.loads((folder / "summary.json").read_text())
    assert written["held_out_loss"] == summary.held_out_loss == lines[-1]["held_out_loss"]
    assert Config.from_mapping({k: v for k, v in written["config"].items() if v is not None}) == config
    assert (folder / "sample.txt").read_text() == summary.sample + "\n"
    assert summary.sample.startswith("def ")
    picture = (folder / "loss.png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert picture.startswith(PNG_SIGNATURE)
    assert min(width, height) >= 400


@pytest.mark.ranks(2, 4)
def test_every_rank_gets_the_same_summary(world, tiny, shared_tmp_path):
    summary = Trainer(tiny.replace(steps=2, out=str(shared_tmp_path)), world).run()
    assert summary.ranks == world.size
    assert summary.tokens == 2 * 8 * 16
    assert 0 <= summary.communication <= 1
    assert len({repr(other) for other in world.default_group.all_gather_object(summary)}) == 1


def test_an_earlier_runs_files_are_replaced(tiny, tmp_path):
    for name in ("metrics.jsonl", "loss.png", "sample.txt", "summary.json"):
        (tmp_path / name).write_text("an earlier run")
    alone(tiny.replace(steps=1), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]
    assert "an earlier run" not in (tmp_path / "metrics.jsonl").read_text()


def test_clipping_bounds_the_step_and_zero_leaves_gradients_alone(tiny, tmp_path):
    clipped = alone(tiny.replace(steps=5, gradient_clip=1e-12), tmp_path)
    free = alone(tiny.replace(steps=5, gradient_clip=0.0), tmp_path)
    loose = alone(tiny.replace(steps=5, gradient_clip=1e6), tmp_path)
    assert all(step.gradient_norm > 0.01 for step in clipped.steps)
    assert torch.equal(curve(free), curve(loose))
    assert not torch.equal(curve(free), curve(clipped))


def test_weight_decay_spares_the_norms(tiny):
    trainer = Trainer(tiny.replace(norm="layernorm", weight_decay=0.3), ax.World.mock(1))
    groups = trainer.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert {p.dim() for p in groups[0]["params"]} == {2}
    assert {p.dim() for p in groups[1]["params"]} == {1}
    assert sum(len(group["params"]) for group in groups) == len(list(trainer.model.parameters()))


@pytest.mark.ranks(4)
def test_a_global_batch_that_does_not_divide_is_refused_on_every_rank(world, tiny):
    before = world.default_group.backend.observer = Counter()
    with pytest.raises(ValueError, match="No such file"):
        Trainer(tiny.replace(data="nowhere"), world)
    assert before.operations == 0  # refused before anything was sent
    with pytest.raises(ValueError, match="ranks x accumulation = 4 x 1 = 4, got 6"):
        Trainer(tiny.replace(global_batch=6), world)
    with pytest.raises(ValueError, match="ranks 0 and 3 differ in global_batch"):
        Trainer(tiny.replace(global_batch=6 if world.rank == 3 else 8), world)


class Counter:
    operations = 0

    def enter(self, operation, nbytes):
        self.operations += 1

    def leave(self, operation):
        pass


@pytest.mark.ranks(2)
def test_ranks_with_other_settings_or_another_text_are_refused_on_every_rank(world, tiny, tmp_path):
    with pytest.raises(ValueError, match="ranks 0 and 1 differ in lr"):
        Trainer(tiny.replace(lr=0.1 * (1 + world.rank)), world)
    text = tmp_path / f"text{world.rank}"
    text.write_bytes(bytes([65 + world.rank]) * 1000)
    with pytest.raises(ValueError, match="ranks 0 and 1 differ in text"):
        Trainer(tiny.replace(data=str(text)), world)


@pytest.mark.ranks(2)
def test_a_folder_that_cannot_be_written_is_refused_on_every_rank(world, tiny, shared_tmp_path):
    occupied = shared_tmp_path / "file"
    occupied.touch()
    with pytest.raises(ValueError, match=r"--out .*file.*cannot write there"):
        Trainer(tiny.replace(out=str(occupied)), world).run()


@pytest.mark.ranks(2)
def test_training_that_diverges_ends_on_every_rank(world, tiny, shared_tmp_path):
    for pp in (1, 2):
        config = tiny.replace(layers=2, pp=pp, lr=1e30, gradient_clip=0.0, out=str(shared_tmp_path))
        with pytest.raises(FloatingPointError, match=r"step \d+ is nan.*smaller lr \(now 1e\+30\)"):
            Trainer(config, world).run()


def test_the_global_generator_is_left_alone(tiny, tmp_path):
    state = torch.get_rng_state()
    alone(tiny.replace(steps=1, sample_length=3), tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


def test_rank_zero_shows_and_the_others_are_quiet(tiny, tmp_path, capsys):
    config = tiny.replace(steps=2, progress="plain", sample_length=5, out=str(tmp_path))
    run_ranks(2, lambda world: trained(world, config))
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("step 2/2  loss ") for line in lines) == 1
    assert sum(line.startswith("held-out loss ") and "unigram entropy" in line for line in lines) == 1
    assert any("on 2 ranks" in line and "tokens/s" in line for line in lines)
