"""Saving beside training: what is saved are the values at the call, and errors come out."""

import os
import threading
from pathlib import Path

import pytest
import torch
from helpers.models import built
from safetensors.torch import load_file
from torch import nn

import axonmpi as ax
from axonmpi.checkpoint.writing import snapshot as snapshots
from axonmpi.errors import CheckpointError


def wrapped(kind, world):
    model = built(lambda: nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 3)))
    group = world.default_group
    return ax.FSDP(model, group) if kind == "fsdp" else ax.DDP(model, group) if kind == "ddp" else model


def train(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()


def whole(kind, model, optimizer, world):
    """Return the model's values, and the averages of the gradients, without sharding."""
    if kind == "fsdp":
        values = model.full_state_dict()
        state = model.full_optimizer_state_dict(optimizer)["state"]
    else:
        values = {name: value.clone() for name, value in model.state_dict().items()}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        state = {names[id(parameter)]: state for parameter, state in optimizer.state.items()}
    first = {name: value.clone() for name, value in values.items()}
    return first, {f"{name}.exp_avg": of_name["exp_avg"].clone() for name, of_name in state.items()}


def shared_folder(world, tmp_path):
    return Path(ax.broadcast_object(str(tmp_path), 0, world.default_group))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_values_are_those_of_the_call(kind, world, tmp_path):
    folder = shared_folder(world, tmp_path)
    model = wrapped(kind, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    values, averages = whole(kind, model, optimizer, world)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    work = ax.save_checkpoint(folder / "it", model, optimizer, step=2, blocking=False, group=world.default_group)
    train(model, optimizer, 3)
    work.wait()
    assert work.done()
    optimizer.register_step_pre_hook(lambda *_: None)  # while torch goes through hooks, none may be removed
    train(model, optimizer)
    found = load_file(folder / "it/model.safetensors")
    assert found.keys() == values.keys()
    if world.rank == 0:  # the others' running means are their own
        assert all(torch.equal(found[name], value) for name, value in buffers.items())
    assert all(torch.equal(found[name], values[name]) for name in values if name not in buffers)
    state = load_file(folder / "it/optimizer.safetensors")
    assert all(torch.equal(state[name], averages[name]) for name in averages)


@pytest.mark.ranks(1)
def test_a_step_waits_for_the_copy_and_not_for_the_disk(world, tmp_path, monkeypatch):
    model = wrapped("plain", world)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    may_copy, may_write, begun = threading.Event(), threading.Event(), threading.Event()
    copy, pwrite = snapshots.Snapshot.copy_rest, os.pwrite

    def held_copy(snapshot):
        begun.set()
        may_copy.wait()
        copy(snapshot)

    def held_pwrite(*args):
        may_write.wait()
        return pwrite(*args)

    monkeypatch.setattr(snapshots.Snapshot, "copy_rest", held_copy)
    monkeypatch.setattr(os, "pwrite", held_pwrite)
    group = world.default_group
    work = ax.save_checkpoint(tmp_path / "it", model, optimizer, blocking=False, group=group)
    begun.wait()
    before = model[0].weight.detach().clone()
    model(torch.randn(8, 6)).square().mean().backward()
    step = threading.Thread(target=optimizer.step)
    step.start()
    step.join(0.2)
    assert step.is_alive()
    assert torch.equal(model[0].weight, before)
    may_copy.set()
    step.join()
    assert not torch.equal(model[0].weight, before)
    assert not work.done()
    may_write.set()
    work.wait()
    assert torch.equal(load_file(tmp_path / "it/model.safetensors")["0.weight"], before)


@pytest.mark.ranks(1, 2)
def test_without_an_optimizer_everything_is_copied_at_the_call(world, tmp_path):
    folder = shared_folder(world, tmp_path)
    model = wrapped("plain", world)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    work = ax.save_checkpoint(folder / "it", model, blocking=False, group=world.default_group)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    work.wait()
    found = load_file(folder / "it/model.safetensors")
    assert all(torch.equal(found[name], before[name]) for name in before)


@pytest.mark.ranks(1, 2)
def test_a_failed_save_is_told_by_the_next_step_and_training_goes_on(world, tmp_path, monkeypatch):
    folder = shared_folder(world, tmp_path)
    group = world.default_group
    model = wrapped("ddp", world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    ax.save_checkpoint(folder / "it", model, optimizer, step=1, group=group)
    before = (folder / "it/model.safetensors").read_bytes()

    def full(descriptor, data, offset):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        if world.rank == 0 or not isinstance(group.backend, ax.MockBackend):  # mock ranks share the module
            patched.setattr(os, "pwrite", full)
        ax.barrier(group)
        work = ax.save_checkpoint(folder / "it", model, optimizer, step=2, blocking=False, group=group)
        while not work.done():
            work._thread.join()
        ax.barrier(group)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(model, optimizer)
    train(model, optimizer)
    assert (folder / "it/model.safetensors").read_bytes() == before
    ax.save_checkpoint(folder / "it", model, optimizer, step=3, group=group)
    assert (folder / "it/model.safetensors").read_bytes() != before
    assert os.listdir(folder) == ["it"]


@pytest.mark.ranks(1)
def test_the_next_save_waits_and_tells(world, tmp_path, monkeypatch):
    group = world.default_group
    model = wrapped("plain", world)
    first = ax.save_checkpoint(tmp_path / "one", model, blocking=False, group=group)
    second = ax.save_checkpoint(tmp_path / "two", model, blocking=False, group=group)
    assert first.done()
    second.wait()
    (tmp_path / "two/state.json").unlink()  # it is no checkpoint any more
    ax.save_checkpoint(tmp_path / "two", model, blocking=False, group=group)
    with pytest.raises(CheckpointError, match="no checkpoint, so it is not replaced"):
        ax.save_checkpoint(tmp_path / "three", model, group=group)
    ax.save_checkpoint(tmp_path / "three", model, group=group)
    assert sorted(os.listdir(tmp_path)) == ["one", "three", "two"]


class Momentum(nn.Module):
    """A model whose forward changes parameters that no optimizer has, as momentum encoders do."""

    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.target.weight.lerp_(self.online.weight, 0.1)
        return self.online(x) - self.target(x)


@pytest.mark.ranks(1)
def test_what_forward_changes_is_copied_at_the_call(world, tmp_path, monkeypatch):
    model = Momentum()
    optimizer = torch.optim.SGD(model.online.parameters(), lr=0.1)
    may_copy, copy = threading.Event(), snapshots.Snapshot.copy_rest

    def held_copy(snapshot):
        may_copy.wait()
        copy(snapshot)

    monkeypatch.setattr(snapshots.Snapshot, "copy_rest", held_copy)
    before = model.target.weight.clone()
    work = ax.save_checkpoint(tmp_path / "it", model, optimizer, blocking=False, group=world.default_group)
    model(torch.randn(2, 6))
    may_copy.set()
    work.wait()
    assert torch.equal(load_file(tmp_path / "it/model.safetensors")["target.weight"], before)
