"""A run that stops and goes on is the run that was never interrupted."""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import entries, on_first
from helpers.compare import refused
from helpers.models import fail
from helpers.plain_training import metrics_in, plain_run

import axonmpi as ax
from axonmpi.testing import run_ranks
from axonmpi.train import Trainer

SMALL = {"layers": 2, "width": 16, "heads": 4, "steps": 5, "evaluate_every": 2, "warmup_steps": 2, "lr": 2e-3}
TIMES = ("seconds", "tokens_per_second", "communication")
LAYOUTS = {
    1: [{}, {"accumulation": 2, "micro_batches": 2}],
    2: [
        {},
        {"fsdp": "full"},
        {"fsdp": "grad", "cpu_offload": "full", "tied_embeddings": False},
        {"tp": 2},
        {"pp": 2, "micro_batches": 2},
    ],
    4: [
        {"tp": 2, "fsdp": "full", "sequence_parallel": True},
        {"pp": 2, "fsdp": "full", "micro_batches": 2},
        {"tp": 2, "pp": 2, "schedule": "zero-bubble", "micro_batches": 2},
    ],
}


class Acts(ax.PreemptionGuard):
    """Calls something with itself before it votes in some step of this call."""

    def __init__(self, step, action):
        super().__init__(())
        self._left, self._action = step, action

    def vote(self):
        self._left -= 1
        if self._left == 0:
            self._action(self)
        return super().vote()


def run(world, config, stops=None, action=ax.PreemptionGuard.request_stop):
    """Train, and do something on one of the ranks after some steps of this call; without `stops` go to the end."""
    guard = None if stops is None else Acts(stops if world.rank == stops % world.size else 0, action)
    trainer = Trainer(config, world, guard=guard)
    return trainer, trainer.run()


def lines(folder):
    """What was measured, without times."""
    return [{name: value for name, value in line.items() if name not in TIMES} for line in metrics_in(folder)]


def saved(folder, step):
    """The bytes of the files of model and optimizer."""
    path = folder / "checkpoints" / f"step-{step:08}"
    return {name: (path / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def check_same_run(config, other, what=""):
    """Compare what two runs have left, to the last bit."""
    assert lines(config.run.folder) == lines(other.run.folder), what
    assert saved(config.run.folder, 5) == saved(other.run.folder, 5), what


def without_times(summary):
    return {name: value for name, value in dataclasses.asdict(summary).items() if name not in (*TIMES, "folder")}


@pytest.mark.real_ranks
@pytest.mark.rank_timeout(120)
@pytest.mark.ranks(1, 2, 4)
def test_a_run_that_goes_on_is_the_same_to_the_bit(world, tiny, shared_tmp_path):
    for number, layout in enumerate(LAYOUTS[world.size]):
        config = tiny.replace(**SMALL | layout, sample_length=3, out=str(shared_tmp_path / f"whole-{number}"))
        _, expected = run(world, config)
        parted = config.replace(out=str(shared_tmp_path / f"parted-{number}"), resume="auto", checkpoint_every=2)
        for stops, made in ((1, 1), (2, 3)):
            trainer, summary = run(world, parted, stops)
            assert (summary.complete, summary.steps, summary.sample) == (False, made, ""), layout
            assert not (parted.run.folder / "summary.json").exists()
        trainer, summary = run(world, parted)
        assert without_times(summary) == without_times(expected), layout
        assert [step.step for step in trainer.steps] == list(range(1, 6)), layout
        seconds = [step.seconds for step in trainer.steps]
        assert seconds == sorted(seconds)
        world.barrier()
        check_same_run(parted, config, layout)


@pytest.mark.parametrize(
    ("ranks", "layout", "other_ranks", "other"),
    [
        (1, {}, 4, {"tp": 2, "pp": 2, "micro_batches": 2}),
        (4, {"pp": 4, "layers": 4, "micro_batches": 2}, 2, {"tp": 2, "layers": 4}),
        (2, {"fsdp": "full", "cpu_offload": "params"}, 4, {"tp": 2, "fsdp": "grad", "accumulation": 2}),
        (4, {"tp": 2, "fsdp": "full"}, 1, {}),
        (4, {"cp": 2, "fsdp": "full"}, 3, {"cp": 3}),
    ],
)
def test_a_run_goes_on_with_other_ranks_and_another_layout(tiny, tmp_path, ranks, layout, other_ranks, other):
    config = tiny.replace(**SMALL | {"steps": 6}, out=str(tmp_path))
    run_ranks(ranks, run, config.replace(**layout), 3)
    trainer, summary = run_ranks(other_ranks, run, config.replace(**other, resume="auto"))[0]
    expected = plain_run(config.replace(**({"layers": 4} if "layers" in layout else {})))
    assert [step.loss for step in trainer.steps] == pytest.approx(expected.losses, abs=1e-5)
    assert summary.held_out_loss == pytest.approx(expected.held_out_loss, abs=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_goes_on_from_its_last_checkpoint(tiny, tmp_path, ranks):
    config = tiny.replace(**SMALL, out=str(tmp_path / "whole"))
    run_ranks(ranks, run, config)
    killed = config.replace(out=str(tmp_path / "killed"), resume="auto", checkpoint_every=2)
    refused(ArithmeticError, (lambda: run_ranks(ranks, run, killed, 4, fail), "in the middle"))
    with (killed.run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 5.')
    run_ranks(ranks, run, killed)
    check_same_run(killed, config)


@pytest.mark.ranks(1, 2)
def test_a_finished_run_stays_as_it_is(world, tiny, shared_tmp_path, capsys):
    config = tiny.replace(steps=2, out=str(shared_tmp_path), resume="auto", progress="plain")
    summaries, times = [], []
    for _ in range(2):
        summaries.append(run(world, config)[1])
        world.barrier()
        files = filter(Path.is_file, entries(shared_tmp_path))
        times.append({path: path.stat().st_mtime_ns for path in files})
        world.barrier()
    assert (summaries[0], times[0]) == (summaries[1], times[1])
    assert world.rank or "all 2 steps were made before: see " in capsys.readouterr().out  # mock ranks share it


@pytest.mark.ranks(1, 2)
def test_a_run_that_was_killed_after_its_last_step_is_brought_to_its_end(world, tiny, shared_tmp_path):
    config = tiny.replace(steps=2, out=str(shared_tmp_path), resume="auto", sample_length=2)
    _, first = run(world, config)
    on_first((shared_tmp_path / "summary.json").unlink)
    trainer, again = run(world, config)
    assert (without_times(again), len(trainer.steps)) == (without_times(first), 2)
    assert (shared_tmp_path / "summary.json").exists()


def steps_in(folder):
    return [int(path.name.removeprefix("step-")) for path in sorted((folder / "checkpoints").glob("step-*"))]


def test_another_run_begins_where_a_checkpoint_is(tiny, tmp_path):
    world, first = ax.World.mock(1), tmp_path / "first"
    config = tiny.replace(**SMALL, out=str(first), checkpoint_every=2)
    run(world, config)
    for number, path in enumerate((first / "checkpoints/step-00000002", first / "checkpoints/latest", first)):
        other = config.replace(out=str(tmp_path / f"other-{number}"), resume=str(path))
        run(world, other)
        assert lines(other.run.folder) == lines(first)
    run(world, config.replace(resume=str(first / "checkpoints/step-00000002")), 1)  # goes back itself
    assert steps_in(first) == [2, 3]
    (tmp_path / "link").symlink_to(first)
    linked = config.replace(out=str(tmp_path / "link"))
    run(world, linked.replace(resume=str(tmp_path / "link")), 1)
    (first / "metrics.jsonl").unlink()
    trainer, _ = run(world, config.replace(resume="auto"))
    assert [step.step for step in trainer.steps] == [5]
    run(world, linked.replace(resume=str(first)))  # what it begins with is not in its own way
    assert steps_in(first) == [3, 4, 5]


def test_the_time_limit_stops_a_run(tiny, tmp_path):
    _, summary = run(ax.World.mock(1), tiny.replace(out=str(tmp_path), time_limit=1e-3, progress="off"))
    assert (summary.complete, summary.steps) == (False, 1)
    assert (tmp_path / "checkpoints" / "latest" / "state.json").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_if_a_checkpoint_beside_it_cannot_be_written(tiny, tmp_path, ranks, capsys):
    config = tiny.replace(**SMALL, out=str(tmp_path), checkpoint_every=2, progress="plain")
    blocked = tmp_path / "checkpoints" / "step-00000004.partial"
    assert run_ranks(ranks, run, config, 3, lambda guard: blocked.write_text("in the way"))[0][1].complete
    shown = capsys.readouterr().out
    told = ("step-00000004: the checkpoint was not written: ", "training goes on without it")
    assert [shown.count(text) for text in told] == [1, 1]
    folder = tmp_path / "checkpoints"
    names = [path.name for path in entries(folder) if path.parent == folder]
    assert names == ["latest", "step-00000002", "step-00000004.partial", "step-00000005"]


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2)
def test_what_would_be_another_run_is_refused_on_all_ranks(world, tiny, shared_tmp_path):
    config = tiny.replace(steps=4, out=str(shared_tmp_path / "run"))
    run(world, config, 2)
    world.barrier()
    before = entries(shared_tmp_path)
    world.barrier()
    for settings, message in (
        ({"steps": 8}, r"steps 4, now 8 \(the learning rate of a step depends on their number\)"),
        ({"lr": 1.0, "width": 32}, r"width 16, now 32; lr 0.003, now 1.0.\nGo on with the same ones"),
        ({"seed": 3}, r"seed 0, now 3 \(it decides the data"),
        ({"global_batch": 16}, "global_batch 8, now 16"),
        ({"data": json.__file__}, r"text \w+, now \w+ \(it is what the run trains on\)"),
        ({"resume": "none"}, "has checkpoints of a run that has not come to its end: go on with --resume auto"),
        ({"resume": str(shared_tmp_path / "nowhere")}, "got .*nowhere, which does not exist"),
        ({"resume": str(shared_tmp_path)}, "which has no checkpoint"),
    ):
        refused(ValueError, (partial(run, world, config.replace(**{"resume": "auto"} | settings)), message))
    foreign = shared_tmp_path / "foreign"
    ax.save_checkpoint(foreign, torch.nn.Linear(1, 1))
    refused(ValueError, (lambda: run(world, config.replace(resume=str(foreign))), "was not saved by axonmpi train"))
    on_first(shutil.rmtree, foreign)
    assert entries(shared_tmp_path) == before
