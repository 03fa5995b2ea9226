"""A run that stops and goes on is the run that was never interrupted."""

import dataclasses
import json
import shutil

import pytest
import torch
from helpers.models import plain_run

import axonmpi as ax
from axonmpi.testing import run_ranks
from axonmpi.train import Trainer

SMALL = {"layers": 2, "width": 32, "heads": 4, "steps": 7, "evaluate_every": 2, "warmup_steps": 2, "lr": 2e-3}
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


class StopsAfter(ax.PreemptionGuard):
    """Stops after so many steps because of one rank; with `killed` that rank fails instead."""

    def __init__(self, steps, *, tells, killed=False):
        super().__init__(())
        self._left = steps
        self._tells, self._killed = tells, killed

    def vote(self):
        self._left -= 1
        if self._left == 0 and self._tells:
            if self._killed:
                raise KilledError
            self.request_stop()
        return super().vote()


class KilledError(Exception):
    pass


def run(world, config, stops=None, *, killed=False):
    """Train, told on one of the ranks to stop after some steps of this call."""
    tells = world.rank == (stops or 0) % world.size
    guard = None if stops is None else StopsAfter(stops, tells=tells, killed=killed)
    trainer = Trainer(config, world, guard=guard)
    return trainer, trainer.run()


def lines(folder):
    """What was measured, without times."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in found]


def saved(folder, step):
    """The bytes of the files of model and optimizer."""
    path = folder / "checkpoints" / f"step-{step:08}"
    return {name: (path / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


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
        made = 0
        for stops in (1, 2, 3):
            trainer, summary = run(world, parted, stops)
            made += stops
            assert (summary.complete, summary.steps, summary.sample) == (False, made, ""), layout
            assert not (parted.run.folder / "summary.json").exists()
        trainer, summary = run(world, parted)
        assert without_times(summary) == without_times(expected), layout
        assert [step.step for step in trainer.steps] == list(range(1, 8)), layout
        seconds = [step.seconds for step in trainer.steps]
        assert seconds == sorted(seconds)
        world.default_group.barrier()
        assert lines(parted.run.folder) == lines(config.run.folder), layout
        assert saved(parted.run.folder, 7) == saved(config.run.folder, 7), layout


CHANGES = [
    (1, {}, 4, {"tp": 2, "pp": 2, "micro_batches": 2}),
    (4, {"tp": 2, "fsdp": "full"}, 2, {"pp": 2, "micro_batches": 2}),
    (4, {"pp": 4, "layers": 4, "micro_batches": 2}, 2, {"tp": 2, "layers": 4}),
    (2, {"fsdp": "full", "cpu_offload": "params"}, 4, {"fsdp": "grad", "accumulation": 2}),
    (4, {}, 1, {}),
]


@pytest.mark.parametrize(("ranks", "layout", "other_ranks", "other"), CHANGES)
def test_a_run_goes_on_with_other_ranks_and_another_layout(tiny, tmp_path, ranks, layout, other_ranks, other):
    config = tiny.replace(**SMALL | {"steps": 24}, out=str(tmp_path))
    run_ranks(ranks, run, config.replace(**layout), 4)
    trainer, summary = run_ranks(other_ranks, run, config.replace(**other, resume="auto"))[0]
    expected = plain_run(config.replace(**({"layers": 4} if "layers" in layout else {})))
    assert [step.loss for step in trainer.steps] == pytest.approx(expected.losses, abs=1e-5)
    assert summary.held_out_loss == pytest.approx(expected.held_out_loss, abs=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_goes_on_from_its_last_checkpoint(tiny, tmp_path, ranks):
    config = tiny.replace(**SMALL, out=str(tmp_path / "whole"))
    run_ranks(ranks, run, config)
    killed = config.replace(out=str(tmp_path / "killed"), resume="auto", checkpoint_every=2)
    with pytest.raises(KilledError):
        run_ranks(ranks, lambda world: run(world, killed, 6, killed=True))
    with (killed.run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 5.')
    run_ranks(ranks, run, killed)
    assert lines(killed.run.folder) == lines(config.run.folder)
    assert saved(killed.run.folder, 7) == saved(config.run.folder, 7)


@pytest.mark.ranks(1, 2)
def test_a_finished_run_stays_as_it_is(world, tiny, shared_tmp_path, capsys):
    config = tiny.replace(steps=2, out=str(shared_tmp_path), resume="auto", progress="plain")
    _, first = run(world, config)
    world.default_group.barrier()
    before = {path: path.stat().st_mtime_ns for path in shared_tmp_path.rglob("*")}
    world.default_group.barrier()
    _, again = run(world, config)
    world.default_group.barrier()
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in shared_tmp_path.rglob("*")} == before
    assert world.rank or "all 2 steps were made before: see " in capsys.readouterr().out  # mock ranks share it


@pytest.mark.ranks(1, 2)
def test_a_run_that_was_killed_after_its_last_step_is_brought_to_its_end(world, tiny, shared_tmp_path):
    config = tiny.replace(steps=2, out=str(shared_tmp_path), resume="auto", sample_length=2)
    _, first = run(world, config)
    world.default_group.barrier()
    if world.rank == 0:
        (shared_tmp_path / "summary.json").unlink()
    trainer, again = run(world, config)
    assert without_times(again) == without_times(first)
    assert len(trainer.steps) == 2
    assert (shared_tmp_path / "summary.json").exists()


def test_another_run_begins_where_a_checkpoint_is(tiny, tmp_path):
    world = ax.World.mock(1)
    config = tiny.replace(**SMALL, out=str(tmp_path / "first"), checkpoint_every=2)
    run(world, config)
    for number, path in enumerate(("first/checkpoints/step-00000004", "first/checkpoints/latest", "first")):
        other = config.replace(out=str(tmp_path / f"other-{number}"), resume=str(tmp_path / path))
        run(world, other)
        assert lines(other.run.folder) == lines(config.run.folder)
    run(world, config.replace(resume=str(tmp_path / "first/checkpoints/step-00000004")), 1)  # goes back itself
    assert [path.name for path in sorted((tmp_path / "first/checkpoints").glob("step-*"))] == [
        "step-00000004",
        "step-00000005",
    ]
    (tmp_path / "link").symlink_to(tmp_path / "first")
    linked = config.replace(out=str(tmp_path / "link"))
    run(world, linked.replace(resume=str(tmp_path / "link")), 1)
    (tmp_path / "first" / "metrics.jsonl").unlink()
    trainer, _ = run(world, config.replace(resume="auto"))
    assert [step.step for step in trainer.steps] == [7]
    run(world, linked.replace(resume=str(tmp_path / "first")))  # what it begins with is not in its own way
    names = [path.name for path in sorted((tmp_path / "first/checkpoints").glob("step-*"))]
    assert names == ["step-00000005", "step-00000006", "step-00000007"]


def test_the_time_limit_stops_a_run(tiny, tmp_path):
    config = tiny.replace(out=str(tmp_path), time_limit=1e-3, progress="off")
    _, summary = run(ax.World.mock(1), config)
    assert (summary.complete, summary.steps) == (False, 1)
    assert (tmp_path / "checkpoints" / "latest" / "state.json").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_if_a_checkpoint_beside_it_cannot_be_written(tiny, tmp_path, ranks, capsys):
    config = tiny.replace(**SMALL, out=str(tmp_path), checkpoint_every=2, progress="plain")
    blocked = tmp_path / "checkpoints" / "step-00000004.partial"

    def rank(world):
        trainer = Trainer(config, world, guard=BlocksAfter(3, blocked))
        return trainer.run()

    assert run_ranks(ranks, rank)[0].complete
    shown = capsys.readouterr().out
    assert shown.count("step-00000004: the checkpoint was not written: ") == 1
    assert "training goes on without it" in shown
    names = [path.name for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert names == ["latest", "step-00000002", "step-00000004.partial", "step-00000006", "step-00000007"]


class BlocksAfter(ax.PreemptionGuard):
    """Puts a file where a checkpoint is to be written after some steps."""

    def __init__(self, steps, path):
        super().__init__(())
        self._left, self._path = steps, path

    def vote(self):
        self._left -= 1
        if self._left == 0:
            self._path.write_text("in the way")
        return super().vote()


# ---- what is refused --------------------------------------------------------------------------------------------


def refused(world, config, message):
    with pytest.raises(ValueError, match=message):
        Trainer(config, world).run()


@pytest.mark.ranks(1, 2)
def test_what_would_be_another_run_is_refused_on_all_ranks(world, tiny, shared_tmp_path):
    config = tiny.replace(steps=4, out=str(shared_tmp_path / "run"))
    run(world, config, 2)
    world.default_group.barrier()
    before = sorted(shared_tmp_path.rglob("*"))
    world.default_group.barrier()
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
        refused(world, config.replace(**{"resume": "auto"} | settings), message)
    foreign = shared_tmp_path / "foreign"
    ax.save_checkpoint(foreign, torch.nn.Linear(1, 1))
    refused(world, config.replace(resume=str(foreign)), "was not saved by axonmpi train")
    world.default_group.barrier()
    if world.rank == 0:
        shutil.rmtree(foreign)
    world.default_group.barrier()
    assert sorted(shared_tmp_path.rglob("*")) == before
