"""The layout of a pipeline: stages on ranks, edges, skips and ties, with the checks of these arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..across_ranks.model_checks import check_batch_norms
from ..across_ranks.sharded_parameters import common_ranks, sharded_modules
from ..groups.process_group import ProcessGroup
from ..utils.arguments import integer, member
from .runtime.stage import PipelineStage, Synchronized
from .schedule.actions import ActionKind, Schedule, chain
from .schedule.schedules import PipelineSchedule, make_schedule
from .schedule.transfers import in_order_of_sends, with_transfers
from .schedule.validator import validate
from .ties import Tie

ScheduleMaker = Callable[[int], Schedule]
"""Makes the schedule for a number of micro-batches."""


@dataclass(frozen=True)
class StageLayout:
    """The stages of a pipeline and the connections between them, the same on all ranks.

    Attributes:
        placement: The rank of each stage.
        edges: Pairs of stages between which activations go forward and gradients back.
        skips: Source and target stage of each skip connection, by name.
        schedule: The kind of schedule, or a function that makes it.
        ties: Stages and names of each parameter that several stages share.
        seed: Of the random numbers; None leaves them to each process.
    """

    placement: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    skips: Mapping[str, tuple[int, int]]
    schedule: PipelineSchedule | ScheduleMaker
    ties: tuple[Tie, ...]
    seed: int | None

    def described(self) -> list[str]:
        """Return texts of the arguments that have to be the same on all ranks."""
        kind = self.schedule if isinstance(self.schedule, PipelineSchedule) else "made by a function"
        return [
            f"stages: on ranks {list(self.placement)}",
            f"skips: {dict(sorted(self.skips.items()))}",
            f"schedule: {kind}",
            f"ties: {sorted(self.ties)}",
            f"seed: {self.seed}",
        ]

    def schedule_for(self, num_microbatches: int, *, trains: bool) -> Schedule:
        """Make the schedule of a step, its forwards only if nothing is trained.

        Raises:
            ValueError: A schedule made by a function is not valid, or is not for these stages.
        """
        if isinstance(self.schedule, PipelineSchedule):
            num_ranks = max(self.placement) + 1
            chunks = len(self.placement) // num_ranks
            schedule = make_schedule(self.schedule, num_ranks, num_microbatches, chunks, self.edges)
        else:
            schedule = self.schedule(num_microbatches)
            validate(schedule)
            schedule = in_order_of_sends(schedule)
        if (schedule.placement, schedule.edges) != (self.placement, self.edges):
            raise ValueError(
                f"schedule: expected one for stages on ranks {list(self.placement)} with edges {list(self.edges)}, "
                f"got one for {list(schedule.placement)} with {list(schedule.edges)}"
            )
        if trains:
            return schedule
        forwards = (tuple(a for a in own if a.kind is ActionKind.FORWARD) for own in schedule.actions)
        return with_transfers(replace(schedule, actions=tuple(forwards)))


def own_modules(stages: Iterable[PipelineStage], group: ProcessGroup) -> dict[int, nn.Module]:
    """Check the stages of a pipeline; return this rank's modules by number. Local.

    Raises:
        TypeError: The stages are not all `PipelineStage` objects.
        ValueError: Numbers are missing or double, a rank has none or is not in the group, ranks have different
            numbers of stages, or this rank's own module is missing, has a `SyncBatchNorm`, or shares parameters or
            gradients with another rank of the pipeline.
    """
    given = tuple(stages)
    for stage in given:
        if not isinstance(stage, PipelineStage):
            raise TypeError(f"stages: expected PipelineStage objects, got {type(stage).__name__}")
    numbers = sorted(stage.stage_id for stage in given)
    if numbers != list(range(len(given))) or not given:
        raise ValueError(f"stages: expected each stage_id from 0 once, on every rank the whole list, got {numbers}")
    ranks = _placement(given)
    if sorted(ranks) != sorted(list(range(group.size)) * (len(ranks) // group.size)):
        raise ValueError(
            f"stages: expected the same number of stages on each of the {group.size} ranks, got {len(ranks)} "
            f"stages with device_rank {list(ranks)}"
        )
    modules = {stage.stage_id: stage.module for stage in given if stage.device_rank == group.rank}
    checked = {}
    for number, module in sorted(modules.items()):
        if module is None:
            raise ValueError(f"stages: expected a module for stage {number} on its own rank, got None")
        check_batch_norms(module)
        _check_groups(number, module, group)
        checked[number] = module
    return checked


def _placement(stages: Iterable[PipelineStage]) -> tuple[int, ...]:
    """Return the rank of each stage, in the order of data."""
    return tuple(stage.device_rank for stage in sorted(stages, key=lambda stage: stage.stage_id))


def _check_groups(stage: int, module: nn.Module, group: ProcessGroup) -> None:
    """Raise if ranks of the pipeline, which have different stages, share parameters or gradients; local.

    Raises:
        ValueError: A layer of the stage is divided over ranks of the pipeline, or a wrapper in it averages over
            them.
    """
    averaged = [
        (name, getattr(part, attribute, None))
        for name, part in module.named_modules()
        if isinstance(part, Synchronized)
        for attribute in ("process_group", "replicate_group")
    ]
    for name, other in [*averaged, *sharded_modules(module)]:
        if isinstance(other, ProcessGroup) and (ranks := common_ranks(group, other)):
            raise ValueError(
                f"process_group: expected ranks with different stages, got ranks {list(group.ranks)}, of which "
                f"{ranks} share module {name!r} of stage {stage} with each other (its group has ranks "
                f"{list(other.ranks)}); give the pipeline the group of one axis, as in "
                "process_group=mesh.group('pp'), and the modules of its stages the groups of other axes"
            )


def chosen_schedule(schedule: PipelineSchedule | ScheduleMaker | str) -> PipelineSchedule | ScheduleMaker:
    """Return the schedule, which may be given by its name.

    Raises:
        TypeError: It is no schedule, name or function.
        ValueError: No schedule has this name.
    """
    return schedule if callable(schedule) else member("schedule", PipelineSchedule, schedule)


def placement_for(num_stages: int, num_ranks: int, schedule: PipelineSchedule | ScheduleMaker) -> tuple[int, ...]:
    """Return the rank of each stage for a schedule.

    Raises:
        ValueError: The number of stages is no multiple of the number of ranks.
    """
    if num_stages % num_ranks or not num_stages:
        fitting = max(num_stages // num_ranks, 1) * num_ranks
        raise ValueError(
            f"modules: expected a multiple of {num_ranks}, the number of ranks (such as {fitting}), got "
            f"{num_stages}; split_module() cuts a model into any number of stages"
        )
    if isinstance(schedule, PipelineSchedule):
        return make_schedule(schedule, num_ranks, 1, num_stages // num_ranks).placement
    return schedule(1).placement


def _skip_routes(skips: Mapping[str, tuple[int, int]], num_stages: int) -> dict[str, tuple[int, int]]:
    """Return the skip connections.

    Raises:
        ValueError: A connection does not lead from a stage to a later one.
    """
    routes = {}
    for name, route in skips.items():
        pair = tuple(route)
        if len(pair) != 2 or not 0 <= pair[0] < pair[1] < num_stages:
            raise ValueError(
                f"skips[{name!r}]: expected (source, target), stages from 0 to {num_stages - 1}, the earlier one "
                f"first, got {route!r}"
            )
        routes[name] = (pair[0], pair[1])
    return routes


def _check_tie(tie: Tie, num_stages: int, modules: Mapping[int, nn.Module]) -> None:
    """Raise unless a tie names parameters of several stages.

    Raises:
        ValueError: A stage does not exist, or this rank's stage has no parameter of that name.
    """
    for stage, name in tie:
        if not 0 <= stage < num_stages:
            raise ValueError(f"ties: expected stages from 0 to {num_stages - 1}, got {stage}")
        if stage in modules and name not in dict(modules[stage].named_parameters(remove_duplicate=False)):
            raise ValueError(f"ties: expected the name of a parameter of stage {stage}, got {name!r}")
    if len({stage for stage, _ in tie}) < 2:
        raise ValueError(f"ties: expected parameters of several stages, got {list(tie)}")


def make_layout(
    stages: Sequence[PipelineStage],
    group: ProcessGroup,
    schedule: PipelineSchedule | ScheduleMaker | str,
    modules: Mapping[int, nn.Module],
    skips: Mapping[str, tuple[int, int]] | None,
    ties: Sequence[Sequence[tuple[int, str]]],
    seed: int | None,
) -> StageLayout:
    """Return the layout of a pipeline; local. The arguments are as in `Pipeline`.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The arguments do not fit each other.
    """
    placement = _placement(stages)
    schedule = chosen_schedule(schedule)
    expected = placement_for(len(placement), group.size, schedule)
    if placement != expected:
        raise ValueError(
            f"stages: expected device_rank {list(expected)} for this schedule, got {list(placement)}; "
            "Pipeline.from_modules() places stages by itself"
        )
    routes = _skip_routes(skips or {}, len(placement))
    edges = tuple(sorted({*chain(len(placement)), *routes.values()}))
    checked_ties = tuple(tuple((stage, name) for stage, name in tie) for tie in ties)
    for tie in checked_ties:
        _check_tie(tie, len(placement), modules)
    return StageLayout(
        placement, edges, routes, schedule, checked_ties, None if seed is None else integer("seed", seed)
    )
