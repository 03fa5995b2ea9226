"""What stages may be and hand to each other: nested tensors, skips, ties, frozen parts, stages with replicas."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import reference
import torch
from reference import adamw, assert_stages_equal, batches, block, built, trained
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import axonmpi as ax
from axonmpi import Pipeline, PipelineSchedule
from axonmpi.pipeline import pop, stash

SCHEDULES = pytest.mark.parametrize("schedule", PipelineSchedule, ids=lambda schedule: schedule.value)


def train(world, stages, model_stages, schedule, data=None, *, parts=3, loss_fn=F.mse_loss, **settings) -> Pipeline:
    """Train the stages in a pipeline and the others in one process; compare."""
    data = batches(4) if data is None else data
    model, losses, _ = trained(model_stages, data, loss_fn=loss_fn)
    pipeline = Pipeline.from_modules(stages, schedule=schedule, num_microbatches=parts, loss_fn=loss_fn, **settings)
    reference.train(pipeline, data, losses)
    assert_stages_equal(pipeline, model, schedule)
    return pipeline


class Pair(NamedTuple):
    hidden: Tensor
    rest: dict


class First(nn.Module):
    """Makes everything that can be handed on from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Pair:
        hidden = self.linear(x)
        mask = x[:, 0] > 0
        rest = {"mask": mask, "parts": [hidden[:, :3].t(), (10 * x[:, 1]).int()], "scale": 0.5, "empty": x[:, :0]}
        return Pair(hidden.double(), rest)


class Between(nn.Module):
    """Uses some of it, hands the rest on, and changes what it may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, given: Pair) -> Pair:
        assert given.rest["empty"].shape[1] == 0
        assert given.rest["mask"].dtype is torch.bool
        part, count = given.rest["parts"]
        hidden = self.linear(given.hidden) * given.rest["scale"]
        return Pair(hidden, {**given.rest, "parts": [part * 2, count + 1]})


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(11, 8)

    def forward(self, given: Pair) -> Tensor:
        part, count = given.rest["parts"]
        assert not count.requires_grad
        joined = torch.cat([given.hidden.float(), part.t()], 1)
        return torch.where(given.rest["mask"][:, None], self.linear(joined), joined[:, :8] + (count > 4)[:, None])


def nested_stages(count: int) -> list[nn.Module]:
    return [built(First, 1)[0], *built(Between, count - 2), built(Last, 1)[0]]


@pytest.mark.ranks(2, 4)
@SCHEDULES
def test_tuples_lists_and_dicts_of_tensors_of_any_dtype(world, schedule) -> None:
    count = 2 * world.size
    train(world, nested_stages(count), nested_stages(count), schedule)


@pytest.mark.ranks(2)
def test_inputs_and_outputs_may_be_nested_too(world) -> None:
    class Sum(nn.Module):
        def forward(self, given: dict) -> dict:
            return {"sum": given["a"] + given["b"][0], "same": given["a"]}

    pipeline = Pipeline.from_modules([Sum(), nn.Identity()], num_microbatches=2)
    a, b = torch.arange(6.0).view(3, 2), torch.ones(3, 2)
    for _ in range(3):  # negotiated once, then through mailboxes that are used again
        output = pipeline({"a": a, "b": (b, "text")})
        if pipeline.has_last_stage:
            assert torch.equal(output["sum"], a + 1)
            assert torch.equal(output["same"], a)


class Down(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).relu()
        stash(self.name, {"hidden": hidden, "sign": x > 0})
        return hidden


class Up(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        left = pop(self.name)
        return self.linear(x) + torch.where(left["sign"], left["hidden"], 0.1 * x)


def u_net() -> list[nn.Module]:
    downs = [built(functools.partial(Down, name), 1)[0] for name in "ab"]
    ups = [built(functools.partial(Up, name), 1)[0] for name in "ba"]
    return [*downs, *ups]


@pytest.mark.ranks(1, 2, 4)
@SCHEDULES
def test_skip_connections(world, schedule) -> None:
    if schedule is PipelineSchedule.ZERO_BUBBLE and world.size == 1:
        with pytest.raises(ValueError, match="chunks: expected 1 or 2"):
            Pipeline.from_modules(u_net(), schedule=schedule)
        return
    train(world, u_net(), u_net(), schedule, skips={"a": (0, 3), "b": (1, 2)})


class Head(nn.Module):
    """An output layer whose weight may be that of an embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def language_model(blocks: int) -> list[nn.Module]:
    embedding = built(lambda: nn.Embedding(12, 8), 1)[0]
    return [embedding, *built(block, blocks), Head(embedding.weight)]


def tokens(samples: int = 11) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(12, (samples,), generator=drawn) for _ in range(2)) for _ in range(4)]


@pytest.mark.ranks(1, 2, 4)
@SCHEDULES
def test_an_embedding_tied_to_the_output_layer(world, schedule) -> None:
    chunks = 2 if world.size > 1 else 1
    count = world.size * chunks
    stages = language_model(count - 2) if count > 2 else language_model(0)[:count] if count == 2 else None
    if stages is None:  # one stage has both places, and nothing to share
        stages = [nn.Sequential(*language_model(1))]
        train(world, stages, [nn.Sequential(*language_model(1))], schedule, tokens(), loss_fn=F.cross_entropy)
        return
    pipeline = train(world, stages, language_model(count - 2), schedule, tokens(), loss_fn=F.cross_entropy, parts=4)
    places = {number: module for number, module in pipeline.stages.items() if hasattr(module, "weight")}
    weights = ax.all_gather_object([module.weight.detach() for module in places.values()])
    first, *others = [weight for of_rank in weights for weight in of_rank]
    assert len(others) == 1
    assert torch.equal(first, others[0])


@pytest.mark.ranks(2)
def test_ties_that_are_named_begin_with_the_first_ones_values(world) -> None:
    """Each rank has made its own stage only; gradients are sums also after steps without sharing."""
    own = nn.Embedding(12, 8) if world.rank == 0 else Head(nn.Parameter(torch.randn(12, 8)))
    stages = [ax.PipelineStage(own if rank == world.rank else None, rank, rank) for rank in range(2)]
    pipeline = Pipeline(stages, loss_fn=F.cross_entropy, ties=[[(0, "weight"), (1, "weight")]])
    (weight,) = pipeline.parameters()
    gathered = ax.all_gather(weight.detach())
    assert torch.equal(gathered[:12], gathered[12:])
    embedding = nn.Embedding(12, 8, _weight=weight.detach().clone())
    model = nn.Sequential(embedding, Head(embedding.weight))
    for sharing in (True, False, True, True):
        inputs, targets = tokens()[0]
        if not sharing:
            pipeline.zero_grad()
            model.zero_grad()
            with pipeline.no_sync():
                pipeline.train_step(inputs, targets)
        else:
            pipeline.train_step(inputs, targets)
        F.cross_entropy(model(inputs), targets).backward()
        if sharing:
            torch.testing.assert_close(weight.grad, embedding.weight.grad)
    torch.testing.assert_close(pipeline.clip_grad_norm(1e9), embedding.weight.grad.norm())
    with pytest.raises(ValueError, match="zero_grad"), pipeline.no_sync():
        pipeline.train_step(inputs, targets)


@pytest.mark.ranks(2, 3)
@SCHEDULES
def test_frozen_stages(world, schedule) -> None:
    """No gradient goes to a stage before which nothing is trained; one in between lets gradients through."""

    def stages() -> list[nn.Module]:
        made = built(block, 2 * world.size)
        for frozen in (0, 2):
            made[frozen].requires_grad_(False)
        return made

    pipeline = train(world, stages(), stages(), schedule)
    for parameter in pipeline.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad


@pytest.mark.ranks(2)
def test_what_is_trained_may_change_between_steps(world) -> None:
    data = batches(4)
    pipeline = Pipeline.from_modules(built(block, 2), num_microbatches=2, loss_fn=F.mse_loss)
    model = nn.Sequential(*built(block, 2))
    for step, (inputs, targets) in enumerate(data):
        for first in (model[0], *(module for number, module in pipeline.stages.items() if number == "0")):
            first.requires_grad_(step % 2 == 0)
        model.zero_grad()
        pipeline.zero_grad()
        pipeline.train_step(inputs, targets)
        F.mse_loss(model(inputs), targets).backward()
        for number, module in pipeline.stages.items():
            for own, other in zip(module.parameters(), model[int(number)].parameters(), strict=True):
                assert (own.grad is None) == (other.grad is None)
                if own.grad is not None:
                    torch.testing.assert_close(own.grad, other.grad)


def blocks() -> nn.Module:
    return nn.Sequential(block(), block())


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("wrapper", "ranks_per_node"), [(ax.DDP, ""), (ax.FSDP, ""), (ax.FSDP, "1")])
@SCHEDULES
def test_stages_with_replicas(world, schedule, wrapper, ranks_per_node, monkeypatch) -> None:
    """Two pipelines of two stages; each stage averages its gradients with its replica, once in a step."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", ranks_per_node)
    pipelines = [world.new_group([0, 1]), world.new_group([2, 3])]
    replicas = [world.new_group([0, 2]), world.new_group([1, 3])]
    group, mine = pipelines[world.rank // 2], replicas[world.rank % 2]
    chunks = 2
    data = [(x[:8], y[:8]) for x, y in batches(4)]
    model, _, _ = trained(built(blocks, 2 * chunks), data)
    modules = built(blocks, 2 * chunks)
    placement = (0, 1, 1, 0) if schedule is PipelineSchedule.ZERO_BUBBLE else (0, 1, 0, 1)
    stages = [
        ax.PipelineStage(wrapper(module, mine) if rank == group.rank else None, stage, rank)
        for stage, (module, rank) in enumerate(zip(modules, placement, strict=True))
    ]
    pipeline = Pipeline(stages, group, schedule=schedule, num_microbatches=2, loss_fn=F.mse_loss)
    optimizer = adamw(pipeline.parameters())
    half = slice(0, 4) if world.rank < 2 else slice(4, 8)
    for inputs, targets in data:
        optimizer.zero_grad()
        with pipeline.no_sync():
            pipeline.train_step(inputs[half][:2], targets[half][:2])
        pipeline.train_step(inputs[half][2:], targets[half][2:])
        for parameter in pipeline.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2
        optimizer.step()
    for number, module in pipeline.stages.items():
        state = module.full_state_dict(rank0_only=False) if wrapper is ax.FSDP else module.state_dict()
        torch.testing.assert_close(state, model[int(number)].state_dict(), atol=1e-5, rtol=0)


class Whole(nn.Linear):
    needs_whole_backward = True


@pytest.mark.ranks(2)
@SCHEDULES
def test_a_module_can_have_its_backward_whole(world, schedule) -> None:
    """For what it puts on autograd's own nodes, which is not called for a weight that is left for later."""
    calls: list[object] = []
    stages = [Whole(8, 8), Whole(8, 8)]
    pipeline = Pipeline.from_modules(stages, schedule=schedule, num_microbatches=4, loss_fn=F.mse_loss)
    node = torch.autograd.graph.get_gradient_edge(stages[world.rank].weight).node
    node.register_hook(lambda *_: calls.append(None))
    ((inputs, targets),) = batches(1)
    pipeline.train_step(inputs, targets)
    assert len(calls) == 4


def dropping_block() -> nn.Module:
    return block(dropout=0.4)


@pytest.mark.ranks(2)
@SCHEDULES
def test_checkpointed_stages_draw_the_same_again(world, schedule) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    data = batches(3)
    _, losses, _ = trained(built(dropping_block, 4), data, parts=3, seed=9)
    pipeline = Pipeline.from_modules(
        [Checkpointed(inner) for inner in built(dropping_block, 4)],
        schedule=schedule,
        num_microbatches=3,
        loss_fn=F.mse_loss,
        seed=9,
    )
    reference.train(pipeline, data, losses)


@pytest.mark.ranks(2)
def test_short_floats_and_autocast(world) -> None:
    inputs, targets = batches(1)[0]
    for dtype in (torch.bfloat16, torch.float16):
        pipeline = Pipeline.from_modules(
            [m.to(dtype) for m in built(block, 2)],
            num_microbatches=2,
            loss_fn=lambda o, t: F.mse_loss(o.float(), t),
        )
        model = nn.Sequential(*[m.to(dtype) for m in built(block, 2)])
        loss = pipeline.train_step(inputs.to(dtype), targets)
        expected = F.mse_loss(model(inputs.to(dtype)).float(), targets)
        if loss is not None:
            assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    pipeline = Pipeline.from_modules(built(block, 2), num_microbatches=2, loss_fn=F.mse_loss)
    with torch.autocast("cpu", torch.bfloat16):
        loss = pipeline.train_step(inputs, targets)
        expected = F.mse_loss(nn.Sequential(*built(block, 2))(inputs), targets)
    if loss is not None:
        assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
