"""Training in pipelines: the same as on one rank, whichever way the ranks are laid out."""

import threading

import pytest
import torch

import axonmpi as ax
from axonmpi.pipeline.trace import read_trace
from axonmpi.testing import run_ranks
from axonmpi.train import Config, Trainer, recorder
from axonmpi.train.layout import Layout, plan_schedule

SETTINGS = {"layers": 4, "steps": 10, "sample_length": 14, "prompt": "def "}  # together longer than a sequence
CASES = {
    1: [
        {"pp": 1, "micro_batches": 3, "tied_embeddings": False},
        {"schedule": "zero-bubble", "chunks": 2, "accumulation": 2},
    ],
    2: [
        {"pp": 1, "micro_batches": 2, "accumulation": 2},
        {"pp": 2, "schedule": "gpipe", "accumulation": 2, "positions": "learned", "norm": "layernorm"},
        {"pp": 2, "chunks": 2, "tied_embeddings": False},
        {"pp": 2, "schedule": "zero-bubble", "micro_batches": 3, "strategy": "no_sync"},
    ],
    4: [
        {"pp": 4, "schedule": "zero-bubble", "tied_embeddings": False},
        {"pp": 2, "schedule": "zero-bubble", "chunks": 2},
        {"pp": 2, "schedule": "interleaved-1f1b", "strategy": "synchronous"},
        {"pp": 4, "micro_batches": 4, "gradient_clip": 0.0},
    ],
}
_once = threading.Lock()
_references = {}


def trained(world, config):
    trainer = Trainer(config, world)
    return trainer, trainer.run()


def alone(config, folder):
    """Train on one rank, once for all ranks of this process."""
    off = {"pp": 1, "accumulation": 1, "micro_batches": 0, "chunks": 0}
    off |= {"schedule": "1f1b", "strategy": "overlapped", "dtype": "float32"}
    plain = config.replace(**off, out=None)
    with _once:
        if plain not in _references:
            _references[plain] = trained(ax.World.mock(1), plain.replace(out=str(folder)))
    return _references[plain]


def curve(trainer):
    return torch.tensor([step.loss for step in trainer.steps])


@pytest.mark.ranks(1, 2, 4)
def test_training_is_that_of_one_rank(world, tiny, tmp_path, shared_tmp_path):
    for case in CASES[world.size]:
        config = tiny.replace(**SETTINGS | case, out=str(shared_tmp_path))
        trainer, summary = trained(world, config)
        single, expected = alone(config, tmp_path / f"alone{world.rank}")
        assert (curve(trainer) - curve(single)).abs().max() < 1e-4, case
        norms = [[step.gradient_norm for step in each.steps] for each in (trainer, single)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4), case
        assert summary.held_out_loss == pytest.approx(expected.held_out_loss, abs=1e-5), case
        assert summary.sample == expected.sample, case
        parameters = dict(single.model.named_parameters(remove_duplicate=False))
        for stage in trainer.model:
            for name, parameter in stage.named_parameters():
                assert (parameter - parameters[name]).abs().max() < 1e-5, (case, name)
        told = world.default_group.all_gather_object((summary, [step.loss for step in trainer.steps]))
        assert len({repr(each) for each in told}) == 1, case


@pytest.mark.ranks(2, 4)
def test_every_rank_has_its_stages_only(world, tiny):
    trainer = Trainer(tiny.replace(layers=5, pp=2), world)
    (stage,) = trainer.model
    assert stage.content == ["embedding, blocks 0 to 2", "blocks 3 to 4, output layer"][world.rank % 2]
    updated = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in updated} == {id(p) for p in stage.parameters()}
    assert all(p.dim() == 2 for p in trainer.optimizer.param_groups[0]["params"])  # the tied output layer as well
    assert all(p.dim() == 1 for p in trainer.optimizer.param_groups[1]["params"])


@pytest.mark.ranks(2)
def test_bfloat16_stays_near_float32(world, tiny, tmp_path, shared_tmp_path):
    config = tiny.replace(**SETTINGS, pp=2, schedule="zero-bubble", dtype="bfloat16", out=str(shared_tmp_path))
    rounded, _ = trained(world, config)
    exact, _ = alone(config, tmp_path / f"alone{world.rank}")
    assert 0 < (curve(rounded) - curve(exact)).abs().max() < 0.05


@pytest.mark.ranks(4)
def test_the_last_step_is_traced_and_drawn(world, tiny, shared_tmp_path):
    trace = shared_tmp_path / "deep" / "trace.json"
    for wanted, tp in ((True, 1), (False, 2)):
        config = tiny.replace(layers=4, steps=3, pp=2, tp=tp, schedule="zero-bubble", accumulation=2, plot=wanted)
        config = config.replace(trace=str(trace), out=str(shared_tmp_path))
        trained(world, config)
        if world.rank == 0:
            timeline = read_trace(trace)
            schedule = plan_schedule(config, Layout.of(config, world.size, 0))
            assert schedule.num_microbatches == 2 * tp
            expected = [[a for a in own if a.kind.is_compute] for own in schedule.actions]
            assert [[span.action for span in spans] for spans in timeline.spans] == [own * 2 for own in expected]
            assert (shared_tmp_path / "pipeline.png").exists() == wanted
        world.default_group.barrier()


def test_what_is_shown(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recorder, "find_spec", lambda name: None)  # as if matplotlib was not there
    config = tiny.replace(layers=5, steps=2, pp=2, micro_batches=3, progress="plain", plot=True)
    config = config.replace(trace=str(tmp_path / "trace.json"), out=str(tmp_path))
    summary = run_ranks(4, lambda world: trained(world, config)[1])[0]
    lines = capsys.readouterr().out.splitlines()
    ideal = "2 pipelines, each 1F1B on 2 ranks: bubble 25.0%, peak activations 2, 1"
    assert f"{ideal}; 3 micro-batches of 1 or 2 sequences" in lines
    (shown,) = [line for line in lines if line.startswith("last step: 1F1B on 2 ranks: bubble ")]
    assert shown.endswith(f"see {tmp_path / 'trace.json'}")
    assert 0 < summary.communication < 1
    assert [file.name for file in tmp_path.glob("*.png")] == []


class Counter:
    operations = 0

    def enter(self, operation, nbytes):
        self.operations += 1

    def leave(self, operation):
        pass


@pytest.mark.ranks(4)
def test_layouts_that_do_not_fit_are_refused_on_every_rank(world, tiny, shared_tmp_path):
    counter = world.default_group.backend.observer = Counter()
    refused = [
        ({"pp": 3}, r"tp x pp = 1 x 3 = 3, which does not divide the 4 ranks: .*, or start a multiple of 3"),
        (
            {"dp": 2},
            r"dp x tp x pp = 2 x 1 x 1 = 2, but there are 4 ranks: take .* 2 x 1 x 2 or .*, or start 2 ranks",
        ),
        ({"tp": 2, "global_batch": 9}, "global_batch: expected a multiple of replicas x accumulation = 2 x 1"),
        ({"pp": 2, "global_batch": 9}, "global_batch: expected a multiple of pipelines x accumulation = 2 x 1"),
        ({"pp": 2, "micro_batches": 5}, "micro_batches: expected at most .* 8 / 2 / 1 = 4, .* got 5"),
    ]
    for settings, message in refused:
        with pytest.raises(ValueError, match=message):
            Trainer(tiny.replace(layers=4, **settings), world)
    assert counter.operations == 2 * len(refused)  # the settings were compared, and nothing else was sent
    occupied = shared_tmp_path / "file"
    occupied.touch()
    trainer = Trainer(tiny.replace(layers=4, pp=2, trace=str(occupied / "trace.json")), world)
    with pytest.raises(ValueError, match=r"--trace .*trace.json: cannot write there"):
        trainer.run()


def test_numbers_that_are_left_out():
    def planned(**settings):
        config = Config().replace(global_batch=24, **settings)
        schedule = plan_schedule(config, Layout.of(config, 4, 0))
        return schedule.name, schedule.num_stages, schedule.num_microbatches

    assert planned(pp=2) == ("1F1B", 2, 8)
    assert planned(pp=4, accumulation=3) == ("1F1B", 4, 8)  # 8 sequences at a time
    assert planned(pp=2, schedule="interleaved-1f1b") == ("interleaved 1F1B", 4, 8)
    assert planned(pp=4, schedule="interleaved-1f1b") == ("1F1B", 4, 16)  # 4 blocks
    assert planned(pp=2, schedule="zero-bubble", chunks=2, micro_batches=1) == ("zero bubble, V-shaped", 4, 1)
