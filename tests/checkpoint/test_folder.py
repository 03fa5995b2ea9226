"""The checkpoints of a run: which are kept, which is the newest, and what a killed job leaves behind."""

import os
import shutil
import threading

import pytest
import torch
from helpers.checkpoints import cut_off, flip, on_first, refused_on_all
from helpers.compare import refused

import axonmpi as ax
from axonmpi.checkpoint import folder as folder_module

RANKS = (1, 2)


class Model(torch.nn.Linear):
    """Knows by its values at which step it was saved."""

    def __init__(self, step=0):
        super().__init__(4, 3)
        self.at(step)

    def at(self, step):
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, step)
        return self

    @property
    def step(self):
        return int(self.weight[0, 0])


def names(root):
    """What is in a folder once all ranks are here; `latest` with its target."""
    ax.barrier()
    found = sorted(
        f"{path.name} -> {os.readlink(path)}" if path.is_symlink() else path.name
        for path in root.iterdir()
        if path.name != ".latest.axonmpi-lock"
    )
    ax.barrier()
    return found


def steps(*numbers):
    return [*([f"latest -> step-{max(numbers):08}"] if numbers else []), *(f"step-{n:08}" for n in sorted(numbers))]


def saved(root, *numbers, **settings):
    """A folder with a checkpoint of each of these steps."""
    folder = ax.CheckpointFolder(root, **settings)
    for step in numbers:
        folder.save(Model(step), step=step)
    return folder


def warned(recorded):
    """What the ranks were warned of, on one of them."""
    return "\n".join(ax.all_gather_object("\n".join(str(warning.message) for warning in recorded)))


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("blocking", [True, False])
def test_the_newest_are_kept_and_loaded(world, shared_tmp_path, blocking):
    root = shared_tmp_path / "deep" / "run"
    folder = ax.CheckpointFolder(root, keep=2)
    model = Model()
    assert (folder.latest(), folder.load_latest(model)) == (None, None)
    for step in (10, 20, 30, 100_000_000):
        work = folder.save(model.at(step), step=step, extra={"at": step}, blocking=blocking)
        assert (work is None) == blocking
        if work is not None:
            work.wait()
            assert work.done()
    assert names(root) == steps(30, 100_000_000)
    for again in (folder, ax.CheckpointFolder(root)):
        assert again.latest() == root / "step-100000000"
        found = Model()
        info = again.load_latest(found)
        assert (found.step, info.step, info.extra) == (100_000_000, 100_000_000, {"at": 100_000_000})


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize(("keep", "kept", "left"), [(None, (0, 1, 2, 3, 4), (0, 1, 2)), (2, (3, 4), (2,))])
def test_a_run_that_has_gone_back_removes_what_came_later(world, shared_tmp_path, keep, kept, left):
    """All are kept on demand."""
    folder = saved(shared_tmp_path, *range(5), keep=keep)
    assert names(shared_tmp_path) == steps(*kept)
    folder.save(Model(2), step=2, extra="again")
    assert names(shared_tmp_path) == steps(*left)
    assert folder.load_latest(Model()).extra == "again"


@pytest.mark.ranks(2)
def test_nothing_is_removed_before_a_save_in_the_background_is_complete(world, shared_tmp_path, monkeypatch):
    folder = saved(shared_tmp_path, 1, keep=1)
    may_end = threading.Event()
    real = folder_module.save_checkpoint

    def slow_save(*args, **settings):
        work = real(*args, **settings)
        if ax.is_main_process():
            monkeypatch.setattr(work, "join", lambda *limit: (may_end.wait(), type(work).join(work, *limit)))
        return work

    on_first(monkeypatch.setattr, folder_module, "save_checkpoint", slow_save)
    work = folder.save(Model(2), step=2, blocking=False)
    if world.rank == 0:
        refused(ax.CollectiveTimeoutError, (lambda: work.wait(0.05), "is not complete after 0.05 s"))
        assert (work.done(), (shared_tmp_path / "step-00000001").exists()) == (False, True)
        may_end.set()
    work.wait()
    assert names(shared_tmp_path) == steps(2)


# ---- damage -----------------------------------------------------------------------------------------------------


DAMAGES = {
    "cut off": lambda path: cut_off(path / "model.safetensors"),
    "a bit": lambda path: flip(path / "model.safetensors", -1),
    "empty state": lambda path: os.truncate(path / "state.json", 0),
    "no state": lambda path: (path / "state.json").unlink(),
    "no model": lambda path: (path / "model.safetensors").unlink(),
}


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(world, shared_tmp_path, damage, recwarn):
    saved(shared_tmp_path, 1, 2, 3, keep=2)
    on_first(DAMAGES[damage], shared_tmp_path / "step-00000003")
    again = ax.CheckpointFolder(shared_tmp_path, keep=2)
    model = Model()
    assert again.load_latest(model).step == model.step == 2
    assert "step-00000003" in warned(recwarn)
    again.save(model.at(4), step=4)
    assert again.latest().name == "step-00000004"
    # a damaged one does not count among those that are kept, if its size shows that it is
    assert names(shared_tmp_path) == steps(*((3, 4) if damage == "a bit" else (2, 3, 4)))


@pytest.mark.ranks(*RANKS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_if_all_are_damaged_nothing_begins_anew(world, shared_tmp_path):
    folder = saved(shared_tmp_path, 1, 2)
    for damage, message in (("a bit", "step-00000001"), ("cut off", "none of the 2 checkpoints in it is whole")):
        for step in (1, 2):
            on_first(DAMAGES[damage], shared_tmp_path / f"step-{step:08}")
        assert message in refused_on_all(ax.CheckpointError, folder.load_latest, Model())


# ---- what a killed job leaves -----------------------------------------------------------------------------------


def killed_while_saving(root):
    """Leave step 2, and step 3 as it is while another one takes its place."""
    shutil.copytree(root / "step-00000003", root / "step-00000004.partial")
    (root / "step-00000004.partial/state.json").unlink()
    (root / "step-00000001").rename(root / "step-00000001.deleted")
    (root / "step-00000003").rename(root / "step-00000003.previous")
    (root / "latest").unlink()
    (root / "latest").symlink_to("step-00000002")
    (root / "latest.partial").symlink_to("step-00000003")
    (root / "notes.partial").write_text("somebody's own")
    for name in ("step-00000003", "step-00000004", "latest"):
        (root / f".{name}.axonmpi-lock").write_text("axonmpi: a process that was killed\n")


@pytest.mark.ranks(*RANKS)
def test_the_next_start_removes_what_is_half_written_or_half_deleted(world, shared_tmp_path):
    saved(shared_tmp_path, 1, 2, 3)
    on_first(killed_while_saving, shared_tmp_path)
    again = ax.CheckpointFolder(shared_tmp_path)
    assert names(shared_tmp_path) == ["latest -> step-00000003", "notes.partial", "step-00000002", "step-00000003"]
    assert again.load_latest(Model()).step == 3


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.ranks(*RANKS)
def test_what_cannot_be_used_is_refused_on_all_ranks(world, shared_tmp_path):
    last = world.size - 1
    refused(ValueError, (lambda: ax.CheckpointFolder(shared_tmp_path, keep=0), "keep: expected at least 1, got 0"))
    if last:
        message = f"first difference is\n  rank 0: root .*a\n  rank {last}: root .*b\n"
        own = shared_tmp_path / ("b" if world.rank == last else "a")
        refused(ValueError, (lambda: ax.CheckpointFolder(own), message))
    folder, step = ax.CheckpointFolder(shared_tmp_path), "ten" if world.rank == last else 10
    refused(TypeError, (lambda: folder.save(Model(), step=step), "step: expected an integer, got 'ten'"))
    occupied = shared_tmp_path / "file"
    on_first(occupied.write_text, "somebody's own")
    assert "file: Not a directory" in refused_on_all(ax.CheckpointError, ax.CheckpointFolder, occupied)


@pytest.mark.ranks(*RANKS)
def test_a_save_that_fails_leaves_what_was_there_and_the_next_one_works(world, shared_tmp_path):
    folder = saved(shared_tmp_path, 1, keep=1)
    blocked = shared_tmp_path / "step-00000002.partial"
    on_first(blocked.write_text, "in the way")
    message = "step-00000002: the checkpoint was not written"
    refused(
        ax.CheckpointError,
        (lambda: folder.save(Model(2), step=2), message),
        (lambda: folder.save(Model(2), step=2, blocking=False).wait(), message),
    )
    assert names(shared_tmp_path) == [*steps(1), blocked.name]
    on_first(blocked.unlink)
    folder.save(Model(2), step=2)
    assert names(shared_tmp_path) == steps(2)


@pytest.mark.ranks(*RANKS)
@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_older_ones_that_cannot_be_removed_are_a_warning(world, shared_tmp_path, monkeypatch, recwarn):
    folder = saved(shared_tmp_path, 1, keep=1)

    def refuse(path):
        raise PermissionError(1, "Operation not permitted", str(path))

    with monkeypatch.context() as patch:
        on_first(patch.setattr, folder_module.shutil, "rmtree", refuse)  # rank 0 tidies up
        folder.save(Model(2), step=2)
        ax.barrier()
    assert "step-00000001.deleted: Operation not permitted" in warned(recwarn)
    ax.CheckpointFolder(shared_tmp_path)
    assert names(shared_tmp_path) == steps(2)
