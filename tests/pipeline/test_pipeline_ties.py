"""Tied parameters of stages that are sharded: every copy's parts stay those of one matrix."""

from __future__ import annotations

import pytest
import torch
from reference import adamw
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi import Pipeline, PipelineSchedule

WORDS, WIDTH = 12, 6  # an odd number of elements for each rank


class Input(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.embedding(tokens)))


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def stages(count: int) -> list[nn.Module]:
    """Make stages, without torch's default generator."""
    made = [Input(), *(nn.Linear(WIDTH, WIDTH) for _ in range(count - 2)), Output()]
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for module in made:
            for parameter in module.parameters():
                parameter.normal_(0.0, 0.3, generator=drawn)
    return made


def data() -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(4)
    return [tuple(torch.randint(WORDS, (8,), generator=drawn) for _ in range(2)) for _ in range(4)]


def alone(count: int) -> tuple[nn.Sequential, list[float]]:
    """Train the model in one process; return it and the norms of its gradients."""
    model = nn.Sequential(*stages(count))
    model[-1].head.weight = model[0].embedding.weight
    optimizer, norms = adamw(model.parameters()), []
    for inputs, targets in data():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
    return model, norms


LAYOUTS = [  # pipelines of one rank or two; nothing, a unit at a time, or each step's parameters are gathered
    (1, "", ax.ShardingStrategy.FULL_SHARD, PipelineSchedule.GPIPE, 2),
    (2, "", ax.ShardingStrategy.FULL_SHARD, PipelineSchedule.ONE_F_ONE_B, 1),
    (2, "1", ax.ShardingStrategy.FULL_SHARD, PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, 2),
    (2, "1", ax.ShardingStrategy.SHARD_GRAD_OP, PipelineSchedule.ZERO_BUBBLE, 2),  # both places on one rank
    (2, "1", ax.ShardingStrategy.HYBRID_SHARD, PipelineSchedule.ZERO_BUBBLE, 1),
]


@pytest.mark.ranks(2, 4)
def test_tied_parts_stay_parts_of_one_matrix(world, monkeypatch) -> None:
    for pp, ranks_per_node, strategy, schedule, chunks in LAYOUTS:
        if pp == world.size:
            continue
        monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", ranks_per_node)
        replicas = world.size // pp
        pipelines = [world.new_group(range(replica * pp, (replica + 1) * pp)) for replica in range(replicas)]
        columns = [world.new_group(range(place, world.size, pp)) for place in range(pp)]
        group, column = pipelines[world.rank // pp], columns[world.rank % pp]
        count = pp * chunks
        model, norms = alone(count)
        modules: list[nn.Module | None] = []
        for stage, module in enumerate(stages(count)):
            rank = _rank_of(stage, pp, schedule)
            units = {0: ["embedding"], count - 1: ["head"]}.get(stage)
            own = rank == group.rank
            modules.append(ax.FSDP(module, column, sharding_strategy=strategy, units=units) if own else None)
        tie = [(count - 1, "head.weight"), (0, "embedding.weight")]
        settings = {"schedule": schedule, "num_microbatches": 2, "loss_fn": F.cross_entropy, "ties": [tie]}
        pipeline = Pipeline.from_modules(modules, group, **settings)
        optimizer = adamw(pipeline.parameters())
        share = slice(*(8 // replicas * (world.rank // pp + end) for end in range(2)))
        for (inputs, targets), expected in zip(data(), norms, strict=True):
            optimizer.zero_grad()
            pipeline.train_step(inputs[share], targets[share])
            copies = 1 if strategy is not ax.ShardingStrategy.HYBRID_SHARD else replicas
            norm = pipeline.clip_grad_norm(1e9, group=world.default_group, copies=copies)
            assert float(norm) == pytest.approx(expected, rel=1e-4)
            optimizer.step()
        for number, module in pipeline.stages.items():
            expected_state = model[int(number)].state_dict()
            torch.testing.assert_close(module.full_state_dict(), expected_state, atol=1e-5, rtol=0)


def _rank_of(stage: int, pp: int, schedule: PipelineSchedule) -> int:
    if schedule is PipelineSchedule.ZERO_BUBBLE and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp


@pytest.mark.ranks(4)
def test_parts_that_do_not_belong_together_are_refused_on_every_rank(world) -> None:
    pipelines = [world.new_group([0, 1]), world.new_group([2, 3])]
    columns = [world.new_group([0, 2]), world.new_group([1, 3])]
    own = world.rank % 2
    wrapped = ax.FSDP(stages(2)[own], columns[own])  # the matrix comes first here, and second there
    modules = [wrapped if stage == own else None for stage in range(2)]
    with pytest.raises(ValueError, match=r"'embedding.weight' of stage 0 and 'head.weight' of stage 1 are divided"):
        Pipeline.from_modules(
            modules, pipelines[world.rank // 2], ties=[[(0, "embedding.weight"), (1, "head.weight")]]
        )
