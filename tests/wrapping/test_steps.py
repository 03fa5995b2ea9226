"""Ranks that come to different training steps: an error that names ranks and steps, or the units and buffers."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.compare import assert_same_on_all_ranks, refused
from helpers.models import built, new_group
from torch import Tensor, nn

import axonmpi as ax
from axonmpi import CollectiveMismatchError


class Towers(nn.Module):
    """Two towers of one shape, of which a batch may need one."""

    def __init__(self, buffers: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.left, self.right = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.norm = nn.BatchNorm1d(4) if buffers else nn.Identity()

    def forward(self, x: Tensor, tower: str = "left") -> Tensor:
        return self.norm(getattr(self, tower)(self.first(x)))


WRAPPERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "ddp": ("", lambda group: ax.DDP(built(Towers), group, find_unused_parameters=True)),
    "buffers": ("", lambda group: ax.DDP(built(lambda: Towers(True)), group, find_unused_parameters=True)),
    "one_node": ("", lambda group: ax.FSDP(built(Towers), group, units=["left", "right"])),
    "apart": ("1", lambda group: ax.FSDP(built(Towers), group, units=["left", "right"])),
    "kept": ("1", lambda group: ax.FSDP(built(Towers), group, units=["left"], sharding_strategy="grad")),
    "replicas": ("1", lambda group: ax.FSDP(built(Towers), group, sharding_strategy="hybrid")),
}
"""Ranks a node, and a wrapper."""


pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in.*WorkerWork")
"""Nobody waits for reductions that were under way when a gather of the same backward fails."""


@pytest.fixture(autouse=True)
def _drops_what_failed() -> Iterator[None]:
    yield
    gc.collect()


@contextmanager
def model_of(world: ax.World, kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    ranks_per_node, wrap = WRAPPERS[kind]
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", ranks_per_node)
    with new_group(world) as group:
        yield wrap(group)


def batch() -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


def train(model: Any, steps: int, **how: Any) -> None:
    for _ in range(steps):
        model(batch(), **how).square().sum().backward()


@pytest.mark.compares_calls
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_rank_that_leaves_a_backward_out_is_named_with_its_step(world, kind, monkeypatch):
    with model_of(world, kind, monkeypatch) as model:
        train(model, 2)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if world.rank == 1:
            model(batch())  # and `continue`, as for a loss that is nan
        with pytest.raises(CollectiveMismatchError, match=r"rank 1: [^\n]*step 4") as error:
            train(model, 1)
        assert "step 3" in str(error.value)
        for parameter, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, value)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", ["ddp", "kept", "replicas"])
def test_forwards_that_are_no_steps(world, kind, monkeypatch):
    with model_of(world, kind, monkeypatch) as model:
        lone = world.rank == 1 and kind == "ddp"  # forwards of FSDP are collective
        for _ in range(3):
            if lone or kind != "ddp":
                model.eval()
                model(batch())
                model.train()
                with torch.no_grad():
                    model(batch())
                with model.no_sync():
                    model(batch())
            train(model, 1)
            with model.no_sync():
                train(model, world.rank * lone + 1)
            if kind == "ddp":  # as many forwards in a backward as a rank has sequences
                sum(model(batch()).sum() for _ in range(world.rank + 1)).backward()
            model.sync_gradients()
        assert_same_on_all_ranks(world, {"gradient": next(model.parameters()).grad} if kind == "ddp" else {})


@pytest.mark.ranks(2, 4)
def test_steps_are_counted_anew_after_uneven_batches_and_after_an_error(world, monkeypatch):
    with model_of(world, "ddp", monkeypatch) as model:
        with model.join():
            train(model, world.rank + 1)
        train(model, 2)
        if world.rank == 1:
            model(batch())
        with pytest.raises(CollectiveMismatchError, match=r"rank 1: step 4"):
            train(model, 1)
        train(model, 2)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("averages", ["overlapped", "synchronous", "no_sync"])
def test_other_numbers_of_forwards_are_no_steps(world, averages):
    """One that failed and is tried again, one whose result is not used, one without average, gradients of zeros."""
    model = ax.DDP(built(Towers), sync_strategy=averages, find_unused_parameters=True)
    for _ in range(3):
        if world.rank == 1:
            refused(AttributeError, (lambda: model(batch(), "lost"), "lost"))
        outputs = [model(batch()) for _ in range(2)]
        sum(output.sum() for output in outputs[world.rank == 0 :]).backward()
        output = model(batch())
        loss = sum(p.sum() * 0 for p in model.parameters()) if world.rank == 1 else output.sum()
        loss.backward()
        if averages == "no_sync" and world.rank == 1:
            model(batch())
        model.sync_gradients()


@pytest.mark.compares_calls
@pytest.mark.ranks(2, 4)
def test_units_that_ranks_do_not_have_in_common_are_named(world, monkeypatch):
    with model_of(world, "apart", monkeypatch) as model:
        train(model, 1)
        tower = "left" if world.rank else "right"
        expected = r"rank 0: .* of unit '(left|right)'.* in step 2"
        with pytest.raises(CollectiveMismatchError, match=expected) as error:
            train(model, 1, tower=tower)
        assert all(" of unit '" in call for call in error.value.calls)


@pytest.mark.compares_calls
@pytest.mark.ranks(2, 4)
def test_a_buffer_that_changed_on_one_rank_is_named(world, monkeypatch):
    with model_of(world, "buffers", monkeypatch) as model:
        train(model, 1)
        if world.rank == 1:
            model.module.norm.running_var = torch.ones(7)
        expected = r"(?s)rank 1: buffer 'norm.running_var' float32 \[7\].*broadcast_buffers=False"
        with pytest.raises(CollectiveMismatchError, match=expected):
            model(batch())
        model.module.norm.running_var = torch.ones(4)
        train(model, 2)
