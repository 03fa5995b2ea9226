"""What is checked and agreed on when a pipeline is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..backends import Backend, all_gather_object
from ..collectives.agreement import check_batch_norms
from ..collectives.divided_parameters import divided_modules, in_common
from ..groups.world import ProcessGroup
from ..utils.arguments import member
from .agreement import raise_together
from .runtime.stage import PipelineStage, Synchronized
from .schedule.actions import Schedule, chain
from .schedule.schedules import PipelineSchedule, make_schedule
from .schedule.transfers import with_transfers
from .schedule.validator import validate
from .ties import Tie

__all__ = [
    "Plan",
    "ScheduleMaker",
    "agree_on",
    "check_groups",
    "check_stages",
    "chosen_schedule",
    "lay_out",
    "placement_for",
    "schedule_for",
]

ScheduleMaker = Callable[[int], Schedule]
"""Makes the schedule for a number of micro-batches."""


@dataclass(frozen=True)
class Plan:
    """How a pipeline is laid out, the same on all ranks.

    Attributes:
        placement: The rank of each stage.
        edges: Pairs of stages between which activations go forward and gradients back.
        skips: Source and target stage of each skip connection, by name.
        schedule: Which schedule, or what makes it.
        ties: Places of parameters that several stages have in common.
        seed: Of the random numbers; None leaves them to each process.
    """

    placement: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    skips: Mapping[str, tuple[int, int]]
    schedule: PipelineSchedule | ScheduleMaker
    ties: tuple[Tie, ...]
    seed: int | None

    def described(self) -> dict[str, str]:
        """Return what has to be the same on all ranks, by the name of the argument."""
        kind = self.schedule if isinstance(self.schedule, PipelineSchedule) else "made by a function"
        return {
            "stages": f"on ranks {list(self.placement)}",
            "skips": str(dict(sorted(self.skips.items()))),
            "schedule": str(kind),
            "ties": str(sorted(self.ties)),
            "seed": str(self.seed),
        }

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return len(self.placement) // (max(self.placement) + 1)


def check_stages(stages: Iterable[PipelineStage], group: ProcessGroup) -> tuple[PipelineStage, ...]:
    """Return the stages in order.

    Raises:
        TypeError: Something else is among them.
        ValueError: Numbers are missing or double, a rank has none or is not in the group, ranks have different
            numbers of stages, or this rank's own module is missing or has a `SyncBatchNorm`.
    """
    given = tuple(stages)
    for stage in given:
        if not isinstance(stage, PipelineStage):
            raise TypeError(f"stages: expected PipelineStage objects, got {type(stage).__name__}")
    ordered = tuple(sorted(given, key=lambda stage: stage.stage_id))
    numbers = [stage.stage_id for stage in ordered]
    if numbers != list(range(len(ordered))) or not ordered:
        raise ValueError(f"stages: expected each stage_id from 0 once, on every rank the whole list, got {numbers}")
    counts = [sum(stage.device_rank == rank for stage in ordered) for rank in range(group.size)]
    if len(set(counts)) > 1 or sum(counts) != len(ordered):
        ranks = [stage.device_rank for stage in ordered]
        raise ValueError(
            f"stages: expected the same number of stages on each of the {group.size} ranks, got {len(ordered)} "
            f"stages with device_rank {ranks}"
        )
    for stage in ordered:
        if stage.device_rank == group.rank:
            if stage.module is None:
                raise ValueError(f"stages: expected a module for stage {stage.stage_id} on its own rank, got None")
            check_batch_norms(stage.module)
    return ordered


def check_groups(modules: Mapping[int, nn.Module], group: ProcessGroup) -> None:
    """Raise if a rank of the pipeline shares parameters or gradients of its stages with another one; local.

    Args:
        modules: This rank's stages.
        group: The ranks of the pipeline, which have different stages.

    Raises:
        ValueError: A layer of a stage is divided over ranks of the pipeline, or a wrapper in it averages over them.
    """
    for stage, module in modules.items():
        wrappers = [(name, part) for name, part in module.named_modules() if isinstance(part, Synchronized)]
        averaged = [
            (name, getattr(part, attribute, None))
            for name, part in wrappers
            for attribute in ("process_group", "replicate_group")
        ]
        for name, other in [*averaged, *divided_modules(module)]:
            if isinstance(other, ProcessGroup) and (ranks := in_common(group, other)):
                raise ValueError(
                    f"process_group: expected ranks with different stages, got ranks {list(group.ranks)}, of which "
                    f"{ranks} share module {name!r} of stage {stage} with each other (its group has ranks "
                    f"{list(other.ranks)}); give the pipeline the group of one axis, as in "
                    "process_group=mesh.group('pp'), and the modules of its stages those of others"
                )


def chosen_schedule(schedule: PipelineSchedule | ScheduleMaker | str) -> PipelineSchedule | ScheduleMaker:
    """Return a schedule that was given, or the one of this name.

    Raises:
        TypeError: It is neither, nor a function.
        ValueError: No schedule has this name.
    """
    return schedule if callable(schedule) else member("schedule", PipelineSchedule, schedule)


def placement_for(num_stages: int, num_ranks: int, schedule: PipelineSchedule | ScheduleMaker) -> tuple[int, ...]:
    """Return the rank of each stage for a schedule.

    Raises:
        ValueError: The stages cannot be dealt out to the ranks.
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


def skip_routes(skips: Mapping[str, tuple[int, int]] | None, num_stages: int) -> dict[str, tuple[int, int]]:
    """Return the skip connections.

    Raises:
        ValueError: A connection does not lead from a stage to a later one.
    """
    routes = {}
    for name, route in ({} if skips is None else skips).items():
        pair = tuple(route)
        if len(pair) != 2 or not 0 <= pair[0] < pair[1] < num_stages:
            raise ValueError(
                f"skips[{name!r}]: expected (source, target), stages from 0 to {num_stages - 1}, the earlier one "
                f"first, got {route!r}"
            )
        routes[name] = (pair[0], pair[1])
    return routes


def tie_list(
    ties: Sequence[Sequence[tuple[int, str]]], placement: Sequence[int], modules: Mapping[int, nn.Module], rank: int
) -> tuple[Tie, ...]:
    """Return the ties.

    Raises:
        ValueError: A stage does not exist, or this rank's stage has no parameter of that name.
    """
    made = []
    for tie in ties:
        places = tuple((stage, name) for stage, name in tie)
        for stage, name in places:
            if not 0 <= stage < len(placement):
                raise ValueError(f"ties: expected stages from 0 to {len(placement) - 1}, got {stage}")
            if placement[stage] == rank and name not in dict(
                modules[stage].named_parameters(remove_duplicate=False)
            ):
                raise ValueError(f"ties: expected the name of a parameter of stage {stage}, got {name!r}")
        if len({stage for stage, _ in places}) < 2:
            raise ValueError(f"ties: expected places in several stages, got {list(places)}")
        made.append(places)
    return tuple(made)


def schedule_for(plan: Plan, num_microbatches: int, *, trains: bool) -> Schedule:
    """Make the schedule of a step, its forwards only if nothing is trained.

    Raises:
        ValueError: A schedule made by a function is not valid, or is not for these stages.
    """
    num_ranks = max(plan.placement) + 1
    if isinstance(plan.schedule, PipelineSchedule):
        schedule = make_schedule(plan.schedule, num_ranks, num_microbatches, plan.chunks, plan.edges)
    else:
        schedule = plan.schedule(num_microbatches)
        validate(schedule)
    if (schedule.placement, schedule.edges) != (plan.placement, plan.edges):
        raise ValueError(
            f"schedule: expected one for stages on ranks {list(plan.placement)} with edges {list(plan.edges)}, got "
            f"one for {list(schedule.placement)} with {list(schedule.edges)}"
        )
    if trains:
        return schedule
    forwards = [[action for action in own if action.kind.value == "F"] for own in schedule.actions]
    return with_transfers(replace(schedule, actions=tuple(map(tuple, forwards))))


def edges_of(num_stages: int, skips: Mapping[str, tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of stages between which something goes."""
    return tuple(sorted({*chain(num_stages), *skips.values()}))


def agree_on(backend: Backend, plan: Plan | None, problem: str) -> None:
    """Raise on all ranks unless they have made the same plan; collective.

    Raises:
        ValueError: A rank has a problem, or the ranks' arguments differ.
    """
    raise_together(backend, problem)
    assert plan is not None
    described = all_gather_object(backend, plan.described())
    for name, text in described[0].items():
        others = [rank for rank, entries in enumerate(described) if entries[name] != text]
        if others:
            raise ValueError(
                f"{name}: expected the same on all ranks of the pipeline, got {text} on rank 0 and "
                f"{described[others[0]][name]} on rank {others[0]}"
            )


def lay_out(
    stages: Sequence[PipelineStage],
    group: ProcessGroup,
    schedule: PipelineSchedule | ScheduleMaker | str,
    modules: Mapping[int, nn.Module],
    skips: Mapping[str, tuple[int, int]] | None,
    ties: Sequence[Sequence[tuple[int, str]]],
    seed: int | None,
) -> Plan:
    """Lay out a pipeline; local, arguments as those of `Pipeline`.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The arguments do not fit each other.
    """
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise TypeError(f"seed: expected an int or None, got {seed!r}")
    placement = tuple(stage.device_rank for stage in stages)
    schedule = chosen_schedule(schedule)
    expected = placement_for(len(stages), group.size, schedule)
    if placement != expected:
        raise ValueError(
            f"stages: expected device_rank {list(expected)} for this schedule, got {list(placement)}; "
            "Pipeline.from_modules() places stages by itself"
        )
    routes = skip_routes(skips, len(stages))
    found = tie_list(ties, placement, modules, group.rank)
    return Plan(placement, edges_of(len(stages), routes), routes, schedule, found, seed)
