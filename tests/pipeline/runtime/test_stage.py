"""What stages may be and hand to each other: nested tensors, skips, ties, frozen parts, stages with replicas."""

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import pytest
import torch
from helpers.compare import assert_close, assert_equal, refused
from helpers.pipelines import (
    TOLERANCE,
    assert_step_like_one_process,
    assert_trains_like,
    batches,
    block,
    built,
    trained,
)
from helpers.settings import all_pairs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import axonmpi as ax
from axonmpi.pipeline import Pipeline, PipelineSchedule, make_schedule, pop, stash


class Pair(NamedTuple):
    hidden: Tensor
    rest: dict


class First(nn.Linear):
    """Makes everything that can be handed on from a tensor."""

    def forward(self, x: Tensor) -> Pair:
        hidden = super().forward(x)
        parts = [hidden[:, :3].t().float(), (10 * x[:, 1]).int()]
        return Pair(hidden, {"mask": x[:, 0] > 0, "parts": parts, "scale": 0.5, "empty": x[:, :0]})


class Between(nn.Linear):
    """Uses some of it, hands the rest on, and changes what it may change."""

    def forward(self, given: Pair) -> Pair:
        assert (given.rest["empty"].shape[1], given.rest["mask"].dtype) == (0, torch.bool)
        part, count = given.rest["parts"]
        rest = {**given.rest, "parts": [part * 2, count + 1]}
        return Pair(super().forward(given.hidden) * given.rest["scale"], rest)


class Last(nn.Linear):
    def forward(self, given: Pair) -> Tensor:
        part, count = given.rest["parts"]
        assert not count.requires_grad
        joined = torch.cat([given.hidden, part.t().double()], 1)
        otherwise = joined[:, :8] + (count > 4)[:, None]
        return torch.where(given.rest["mask"][:, None], super().forward(joined), otherwise)


class Down(nn.Linear):
    name = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x).relu()
        stash(self.name, {"hidden": hidden, "sign": x > 0})
        return hidden


class Up(nn.Linear):
    name = ""

    def forward(self, x: Tensor) -> Tensor:
        left = pop(self.name)
        return super().forward(x) + torch.where(left["sign"], left["hidden"], 0.1 * x)


class Head(nn.Module):
    """An output layer whose weight may be that of an embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def nested(count: int) -> list[nn.Module]:
    between = built(lambda: Between(8, 8), count - 2)
    return [*built(lambda: First(8, 8), 1), *between, *built(lambda: Last(11, 8), 1)]


def u_net(count: int) -> list[nn.Module]:
    """Two connections past the stages between, one of them between neighbours."""
    stages = [*built(lambda: Down(8, 8), 2), *built(block, count - 4), *built(lambda: Up(8, 8), 2)]
    for stage, name in zip((*stages[:2], *stages[-2:]), "abba", strict=True):
        stage.name = name
    return stages


def tied(count: int) -> list[nn.Module]:
    (embedding,) = built(lambda: nn.Embedding(12, 8), 1)
    return [embedding, *built(block, count - 2), Head(embedding.weight)]


def frozen(count: int) -> list[nn.Module]:
    """Before the first no gradient is needed; one in between lets gradients through."""
    stages = built(block, count)
    nn.ModuleList([stages[0], stages[2]]).requires_grad_(False)
    return stages


def drawing(count: int) -> list[nn.Module]:
    return [Checkpointed(*stage) for stage in built(lambda: block(dropout=0.4), count)]


def tokens(samples: int = 11) -> tuple[Tensor, ...]:
    return torch.randint(12, (2, samples), generator=torch.Generator().manual_seed(2)).unbind()


MODELS = (nested, u_net, tied, frozen, drawing)
CASES = all_pairs(make=MODELS, schedule=tuple(PipelineSchedule), ranks=(2, 3), parts=(3, 4), node=("", "1"))


@pytest.mark.ranks(2, 3)
def test_what_stages_hand_to_each_other(world, monkeypatch) -> None:
    for case in [case for case in CASES if case["ranks"] == world.size]:
        monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", case["node"])
        make, count = case["make"], 2 * world.size
        settings = {
            "loss_fn": F.cross_entropy if make is tied else F.mse_loss,
            "seed": 9 if make is drawing else None,
        }
        steps = [[tokens() if make is tied else batch] for batch in batches(2)]
        model, found = trained(make(count), steps, parts=case["parts"], **settings)
        settings |= {"schedule": case["schedule"], "num_microbatches": case["parts"]}
        skips = {"a": (0, count - 1), "b": (1, count - 2)} if make is u_net else {}
        pipeline = Pipeline.from_modules(make(count), world.new_group(range(world.size)), skips=skips, **settings)
        tolerance = 1e-5 if make is nested else TOLERANCE  # which hands on a tensor of dtype float32
        assert_trains_like(pipeline, model, found, steps, str(case), tolerance)


@pytest.mark.ranks(2)
def test_inputs_and_outputs_may_be_nested_and_outputs_stay_as_they_are(world) -> None:
    """Even if a stage returns what it was given, in memory that later micro-batches are written to."""

    class Sum(nn.Module):
        def forward(self, given: dict) -> dict:
            return {"sum": given["a"] + given["b"][0], "same": given["a"]}

    pipeline = Pipeline.from_modules([Sum(), nn.Identity()], num_microbatches=6)
    a, b = torch.arange(12.0).view(6, 2), torch.ones(6, 2)
    outputs = [pipeline({"a": a + number, "b": (b, "text")}) for number in range(5)]
    expected = [{"sum": a + number + 1, "same": a + number} for number in range(5)]
    # the first by messages, the others through mailboxes
    assert_equal(outputs, expected if pipeline.has_last_stage else [None] * 5)


@pytest.mark.ranks(2)
def test_ties_that_are_named_begin_with_the_first_ones_values(world) -> None:
    """Each rank has made its own stage only; gradients are added to sums that are there."""
    own = (nn.Embedding(12, 8) if world.rank == 0 else Head(nn.Parameter(torch.randn(12, 8)))).double()
    stages = [ax.PipelineStage(own if rank == world.rank else None, rank, rank) for rank in range(2)]
    pipeline = Pipeline(stages, loss_fn=F.cross_entropy, ties=[[(0, "weight"), (1, "weight")]])
    (weight,) = pipeline.parameters()
    gathered = ax.all_gather(weight.detach())
    assert torch.equal(gathered[:12], gathered[12:])
    embedding = nn.Embedding(12, 8, _weight=weight.detach().clone())
    assert_step_like_one_process(pipeline, [embedding, Head(embedding.weight)], tokens(), F.cross_entropy)
    assert_close(pipeline.clip_grad_norm(1e9), embedding.weight.grad.norm().float())
    pipeline.train_step(*tokens())
    assert_close(weight.grad, 2 * embedding.weight.grad)
    with pipeline.no_sync():
        refused(ValueError, (partial(pipeline.train_step, *tokens()), "zero_grad"))


@pytest.mark.ranks(2)
def test_what_is_trained_may_change_between_steps(world) -> None:
    pipeline = Pipeline.from_modules(built(block, 2), num_microbatches=2, loss_fn=F.mse_loss)
    model = nn.Sequential(*built(block, 2))
    firsts = nn.ModuleList([model[0], *(stage for number, stage in pipeline.stages.items() if number == "0")])
    for step, batch in enumerate(batches(4)):
        firsts.requires_grad_(step % 2 == 0)
        model.zero_grad()
        assert_step_like_one_process(pipeline, model, batch)


# ---- replicas ---------------------------------------------------------------------------------------------------


def language_model(count: int) -> list[nn.Module]:
    """Stages of which the first and the last have a matrix of the same shape, with an odd number of rows."""

    def first() -> nn.Module:
        return nn.Sequential(OrderedDict(embedding=nn.Embedding(15, 6), linear=nn.Linear(6, 6), tanh=nn.Tanh()))

    def last() -> nn.Module:
        return nn.Sequential(OrderedDict(norm=nn.LayerNorm(6), head=nn.Linear(6, 15, bias=False)))

    return [*built(first, 1), *built(lambda: nn.Linear(6, 6), count - 2), *built(last, 1)]


FULL, GRAD, HYBRID = (ax.ShardingStrategy[name] for name in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"))
REPLICAS = [  # ranks of a pipeline; nothing, a unit at a time, or each step's parameters are gathered
    (1, "", FULL, PipelineSchedule.GPIPE, 2),
    (2, "", None, PipelineSchedule.GPIPE, 2),
    (2, "", FULL, PipelineSchedule.ONE_F_ONE_B, 1),
    (2, "1", FULL, PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, 2),
    (2, "1", GRAD, PipelineSchedule.ZERO_BUBBLE, 2),  # both places of the tied matrix on one rank
    (2, "1", HYBRID, PipelineSchedule.ZERO_BUBBLE, 1),
    (2, "1", None, PipelineSchedule.ZERO_BUBBLE, 2),
]


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_stages_with_replicas(world, monkeypatch) -> None:
    """Each stage averages its gradients with its replicas, once in a step; tied parts stay parts of one matrix."""
    for case in REPLICAS:
        if case[0] < world.size:
            monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", case[1])
            check_replicas(world, *case)


def check_replicas(world, pp: int, _, strategy, schedule: PipelineSchedule, chunks: int) -> None:
    replicas, count = world.size // pp, pp * chunks
    pipelines = [world.new_group(range(replica * pp, (replica + 1) * pp)) for replica in range(replicas)]
    columns = [world.new_group(range(place, world.size, pp)) for place in range(pp)]
    (replica, place), inputs_and_targets = divmod(world.rank, pp), tokens(8)
    modules: list[nn.Module | None] = language_model(count)
    for stage, rank in enumerate(make_schedule(schedule, pp, 1, chunks).placement):
        options = {"units": {0: ["embedding"], count - 1: ["head"]}.get(stage), "sharding_strategy": strategy}
        wrapper, options = (ax.DDP, {}) if strategy is None else (ax.FSDP, options)
        modules[stage] = wrapper(modules[stage], columns[place], **options) if rank == place else None
    model = nn.Sequential(*language_model(count))
    model[-1].head.weight = model[0].embedding.weight
    tie = [(count - 1, "head.weight"), (0, "embedding.weight")]
    settings = {"schedule": schedule, "num_microbatches": 2, "loss_fn": F.cross_entropy, "ties": [tie]}
    pipeline = Pipeline.from_modules(modules, pipelines[replica], **settings)
    optimizers = [torch.optim.SGD(trained.parameters(), lr=0.5) for trained in (model, pipeline)]
    halves = [[t.tensor_split(replicas)[replica][half::2] for t in inputs_and_targets] for half in range(2)]
    for _ in range(3):
        (2 * F.cross_entropy(model(inputs_and_targets[0]), inputs_and_targets[1])).backward()
        with pipeline.no_sync():
            pipeline.train_step(*halves[0])
        pipeline.train_step(*halves[1])
        expected = nn.utils.clip_grad_norm_(model.parameters(), 1.0).float()
        copies = replicas if strategy in (None, HYBRID) else 1
        norm = pipeline.clip_grad_norm(float("inf"), group=world.default_group, copies=copies)
        assert_close([norm, pipeline.clip_grad_norm(1.0)], [expected, expected], 1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for number, module in pipeline.stages.items():
        state = module.state_dict() if strategy is None else module.full_state_dict(rank0_only=False)
        assert_close(state, model[int(number)].state_dict(), TOLERANCE)


@pytest.mark.ranks(4)
def test_parts_that_do_not_belong_together_are_refused_on_every_rank(world) -> None:
    pipelines = [world.new_group([0, 1]), world.new_group([2, 3])]
    columns = [world.new_group([0, 2]), world.new_group([1, 3])]
    modules, own = [None, None], world.rank % 2
    modules[own] = ax.FSDP(language_model(2)[own], columns[own])  # the matrix comes first here, and second there
    tie = [(0, "embedding.weight"), (1, "head.weight")]
    make = partial(Pipeline.from_modules, modules, pipelines[world.rank // 2], ties=[tie])
    refused(ValueError, (make, "'embedding.weight' of stage 0 and 'head.weight' of stage 1 are divided"))


# ---- one thing at a time ----------------------------------------------------------------------------------------


class Whole(nn.Linear):
    needs_whole_backward = True


@pytest.mark.ranks(2)
def test_a_module_can_have_its_backward_whole(world) -> None:
    """For what it puts on autograd's own nodes, which is not called for a weight that is left for later."""
    calls, stages = [], [Whole(8, 8, dtype=torch.float64) for _ in range(2)]
    pipeline = Pipeline.from_modules(stages, schedule="zero-bubble", num_microbatches=4, loss_fn=F.mse_loss)
    node = torch.autograd.graph.get_gradient_edge(stages[world.rank].weight).node
    node.register_hook(lambda *_: calls.append(None))
    pipeline.train_step(*batches(1)[0])
    assert len(calls) == 4


@pytest.mark.ranks(2)
def test_short_floats_and_autocast(world) -> None:
    inputs, targets = batches(1)[0]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output.float(), target.float())

    for dtype, autocast in ((torch.bfloat16, False), (torch.float16, False), (torch.float32, True)):
        stages = [module.to(dtype) for module in built(block, 2)]
        pipeline = Pipeline.from_modules(stages, num_microbatches=2, loss_fn=loss_fn)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = pipeline.train_step(inputs.to(dtype), targets)
            expected = loss_fn(nn.Sequential(*stages)(inputs.to(dtype)), targets)
        assert_close(loss, expected if pipeline.has_last_stage else None, 1e-2)
