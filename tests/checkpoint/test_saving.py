"""Saving beside training: what is saved are the values at the call, and errors come out."""

import functools
import os
import threading

import pytest
import torch
from helpers.checkpoints import by_name, on_first
from helpers.compare import assert_equal, refused
from helpers.models import built
from safetensors.torch import load_file
from torch import nn

import axonmpi as ax
from axonmpi.checkpoint import saving
from axonmpi.checkpoint.writing.snapshot import Snapshot
from axonmpi.utils.waiting import Backoff, wait_until


def network(wrap=lambda model: model):
    return wrap(built(lambda: nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))))


def train(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()


@pytest.fixture
def held(monkeypatch):
    """Two events that a save waits for: before what may be copied later, and before each write."""
    may_copy, may_write = threading.Event(), threading.Event()
    copy, pwrite = Snapshot.copy_rest, os.pwrite
    monkeypatch.setattr(Snapshot, "copy_rest", lambda snapshot: (may_copy.wait(), copy(snapshot)))
    monkeypatch.setattr(os, "pwrite", lambda *args: (may_write.wait(), pwrite(*args))[1])
    yield may_copy, may_write
    may_copy.set()
    may_write.set()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("wrap", [ax.DDP, ax.FSDP])
def test_the_values_are_those_of_the_call(wrap, world, shared_tmp_path):
    model, before, beside = network(wrap), shared_tmp_path / "before", shared_tmp_path / "beside"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    ax.save_checkpoint(before, model, optimizer, step=2)
    work = ax.save_checkpoint(beside, model, optimizer, step=2, blocking=False)
    train(model, optimizer, 3)
    assert (work.wait(), work.done()) == (None, True)
    optimizer.register_step_pre_hook(lambda *_: None)  # while torch goes through hooks, none may be removed
    train(model, optimizer)
    for name in ("model.safetensors", "optimizer.safetensors", "random.safetensors"):
        assert (beside / name).read_bytes() == (before / name).read_bytes(), name


@pytest.mark.ranks(1)
def test_a_step_waits_for_the_copy_and_not_for_the_disk(world, tmp_path, monkeypatch, held):
    model, (may_copy, may_write) = network(), held
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    work = ax.save_checkpoint(tmp_path / "it", model, optimizer, blocking=False)
    is_copied, _ = saving._under_way[optimizer]
    waits, wait = threading.Event(), is_copied.wait
    monkeypatch.setattr(is_copied, "wait", lambda: (waits.set(), wait()))
    before = model[0].weight.detach().clone()
    model(torch.randn(8, 6)).square().mean().backward()
    step = threading.Thread(target=optimizer.step)
    step.start()
    wait_until(lambda: waits.is_set() or not step.is_alive(), Backoff())
    assert torch.equal(model[0].weight, before)
    may_copy.set()
    step.join()
    assert (torch.equal(model[0].weight, before), work.done()) == (False, False)
    may_write.set()
    work.wait()
    assert torch.equal(load_file(tmp_path / "it/model.safetensors")["0.weight"], before)


@pytest.mark.ranks(1, 2)
def test_without_an_optimizer_everything_is_copied_at_the_call(world, shared_tmp_path):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    work = ax.save_checkpoint(shared_tmp_path / "it", model, blocking=False)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    work.wait()
    assert_equal(by_name(load_file(shared_tmp_path / "it/model.safetensors")), by_name(before))


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
def test_what_forward_changes_is_copied_at_the_call(world, tmp_path, held):
    model = Momentum()
    optimizer = torch.optim.SGD(model.online.parameters(), lr=0.1)
    before = model.target.weight.clone()
    work = ax.save_checkpoint(tmp_path / "it", model, optimizer, blocking=False)
    model(torch.randn(2, 6))
    for event in held:
        event.set()
    work.wait()
    assert torch.equal(load_file(tmp_path / "it/model.safetensors")["target.weight"], before)


@pytest.mark.ranks(1, 2)
def test_a_failed_save_is_told_by_the_next_step_and_training_goes_on(world, shared_tmp_path):
    model, path = network(ax.DDP), shared_tmp_path / "it"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    on_first(path.mkdir)
    ax.save_checkpoint(path, model, optimizer, blocking=False).join()
    refused(ax.CheckpointError, (lambda: train(model, optimizer), "no checkpoint, so it is not replaced"))
    train(model, optimizer)
    on_first(path.rmdir)
    ax.save_checkpoint(path, model, optimizer)
    assert os.listdir(shared_tmp_path) == ["it"]


@pytest.mark.ranks(1)
def test_the_next_save_waits_and_tells(world, tmp_path):
    model = network()
    first = ax.save_checkpoint(tmp_path / "one", model, blocking=False)
    second = ax.save_checkpoint(tmp_path / "two", model, blocking=False)
    assert first.done()
    second.wait()
    (tmp_path / "two/state.json").unlink()  # it is no checkpoint any more
    ax.save_checkpoint(tmp_path / "two", model, blocking=False)
    save = functools.partial(ax.save_checkpoint, tmp_path / "three", model)
    refused(ax.CheckpointError, (save, "no checkpoint, so it is not replaced"))
    save()
    assert sorted(os.listdir(tmp_path)) == ["one", "three", "two"]


# ---- what a file cannot hold ------------------------------------------------------------------------------------


def two_of_one_name():
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model._parameters["a.weight"] = nn.Parameter(torch.ones(2, 2))
    return model


def of_wrapper_and_module():
    model = nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)})
    model.weight = nn.Parameter(torch.ones(2, 2))
    return model


def with_parameter(name, tensor):
    model = nn.Module()
    model._parameters[name] = nn.Parameter(tensor)
    return model


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (two_of_one_name, "two different tensors have the name 'a.weight'"),
        (of_wrapper_and_module, "two different tensors have the name 'weight'"),
        (lambda: with_parameter("wide", torch.zeros(1).expand(4)), "'wide' is expanded"),
        (lambda: with_parameter("half \ud800", torch.zeros(4)), r"'half \\ud800' is no Unicode text"),
    ],
)
def test_a_tensor_that_a_file_cannot_hold_is_named(world, make, message, shared_tmp_path):
    refused(ValueError, (lambda: ax.save_checkpoint(shared_tmp_path / "it", make()), message))
    assert os.listdir(shared_tmp_path) == []
