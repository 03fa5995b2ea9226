"""A model whose stages live on different ranks.

    pipeline = ax.Pipeline.from_modules(stages, num_microbatches=8, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = pipeline.train_step(inputs, targets)     # a number on the last stage's rank
        optimizer.step()

A step cuts its batch into micro-batches, which go through the stages one behind the other, as the schedule says.
Gradients are those of one process: the loss is the mean over the whole batch, however it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..backends import all_gather_object, broadcast_object
from ..collectives.gradient_norm import ClipsGradients, Copies
from ..groups.world import ProcessGroup, chosen_group, group_of_this_rank
from ..utils.arguments import check_flags, check_functions, either_group_name
from ..utils.text import name_ranks
from ..wrapping.partial import mark_gradients
from .agreement import Header, Mode, agree
from .batches import batch_size, digest_of, joined, loss_weights, split_batch
from .construction import (
    ScheduleMaker,
    agree_on,
    check_groups,
    check_stages,
    chosen_schedule,
    lay_out,
    placement_for,
    schedule_for,
)
from .norms import gradient_copies
from .runtime.executor import Executor, Routes
from .runtime.stage import PipelineStage, StageRun
from .runtime.step import Step
from .runtime.transport import Transport
from .runtime.wires import Forms
from .schedule.actions import Schedule
from .schedule.chart import text_chart
from .schedule.schedules import PipelineSchedule
from .schedule.simulator import Costs, simulate
from .schedule.timeline import Span
from .schedule.trace import write_trace
from .ties import Ties, shared_parameters

__all__ = ["Pipeline"]


class Pipeline(nn.Module, ClipsGradients):
    """Runs the stages of a model on the ranks of a group, micro-batch after micro-batch.

    Its parameters are those of this rank's stages. Making it and every step are collective over the group.

    Args:
        stages: All stages, the same list on all ranks; modules of other ranks' stages may be None and are dropped.
        process_group: The ranks; None means the default group.
        schedule: In which order the ranks compute, a `PipelineSchedule` or its name. Or a function that makes a
            `Schedule` for a number of micro-batches, which is checked before it is used.
        num_microbatches: Into how many parts a batch is cut; a batch with fewer samples is cut into single ones.
        loss_fn: `loss_fn(output, target)` returns the mean loss of a micro-batch as a tensor of one element; used
            on the last stage's rank.
        loss_weight: `loss_weight(target)` returns what a micro-batch counts in the mean over the batch; None means
            its number of samples. With targets that the loss leaves out it is the number of those it does not.
        skips: Source and target stage of each skip connection by name, see `axonmpi.pipeline.stash`.
        ties: For each parameter that several stages have in common, its places: pairs of a stage's number and the
            name of the parameter there. The copies get the first one's values, and their gradients are summed.
        seed: Makes random numbers, such as those of dropout, depend on the seed, the step and the micro-batch only,
            see `microbatch_seed`. None leaves them to each process.

    Attributes:
        stages: This rank's modules, by number.
        steps: How many training steps were made; set it when training is resumed.
        num_microbatches: As given; may be changed between steps, on all ranks alike.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The stages do not fit the ranks or the schedule, or the ranks' arguments differ; on all ranks.
    """

    @either_group_name
    def __init__(
        self,
        stages: Sequence[PipelineStage],
        process_group: ProcessGroup | None = None,
        *,
        schedule: PipelineSchedule | ScheduleMaker | str = PipelineSchedule.ONE_F_ONE_B,
        num_microbatches: int = 1,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        loss_weight: Callable[[Any], float] | None = None,
        skips: Mapping[str, tuple[int, int]] | None = None,
        ties: Sequence[Sequence[tuple[int, str]]] = (),
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self._group = group_of_this_rank(process_group)
        backend = self._group.private()
        assert backend is not None
        self._backend = backend
        self.num_microbatches = num_microbatches
        self.loss_fn = loss_fn
        self.loss_weight = loss_weight
        self.steps = 0
        plan, modules, problem = None, {}, ""
        try:
            _check_count(num_microbatches)
            check_functions(loss_fn=loss_fn, loss_weight=loss_weight)
            ordered = check_stages(stages, self._group)
            modules = {s.stage_id: s.module for s in ordered if s.device_rank == self._group.rank and s.module}
            check_groups(modules, self._group)
            plan = lay_out(ordered, self._group, schedule, modules, skips, ties, seed)
        except (TypeError, ValueError) as error:
            problem = str(error)
            if self._group.size == 1:
                raise
        agree_on(backend, plan, problem)
        assert plan is not None
        self._plan = plan
        self.stages = nn.ModuleDict({str(stage): module for stage, module in modules.items()})
        self._runs = {stage: StageRun(stage, module) for stage, module in modules.items()}
        self._ties = Ties(plan.ties, plan.placement, modules, self._group)
        self._transport = Transport(backend, plan.placement, plan.edges)
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._known: dict[tuple[Header, ...], Forms] = {}
        self._shares = True
        self._times: list[Span] | None = None

    @classmethod
    @either_group_name
    def from_modules(
        cls,
        modules: Sequence[nn.Module | None],
        process_group: ProcessGroup | None = None,
        *,
        schedule: PipelineSchedule | ScheduleMaker | str = PipelineSchedule.ONE_F_ONE_B,
        ties: Sequence[Sequence[tuple[int, str]]] | None = None,
        **settings: Any,
    ) -> Pipeline:
        """Make a pipeline of modules in the order of data; collective.

        Args:
            modules: One for each stage, as many as ranks or a multiple of that: then each rank has several, which
                the schedule places. Parameters that several of them share are tied.
            process_group: The ranks; None means the default group.
            schedule: See `Pipeline`.
            ties: See `Pipeline`; None finds them among the modules.
            settings: The other arguments of `Pipeline`.

        Raises:
            TypeError: An argument is of the wrong kind.
            ValueError: The number of modules is no multiple of the number of ranks, or the ranks' arguments differ.
        """
        group = group_of_this_rank(process_group)
        given = list(modules)
        schedule = chosen_schedule(schedule)
        placement = placement_for(len(given), group.size, schedule)
        stages = [PipelineStage(module, stage, placement[stage]) for stage, module in enumerate(given)]
        found = shared_parameters(given) if ties is None else ties
        return cls(stages, group, schedule=schedule, ties=found, **settings)

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks."""
        return self._group

    @property
    def num_stages(self) -> int:
        """Number of stages, on all ranks."""
        return len(self._plan.placement)

    @property
    def schedule(self) -> PipelineSchedule | ScheduleMaker:
        """In which order the ranks compute."""
        return self._plan.schedule

    @property
    def has_first_stage(self) -> bool:
        """Whether the input is needed on this rank."""
        return self._plan.placement[0] == self._group.rank

    @property
    def has_last_stage(self) -> bool:
        """Whether the target is needed, and output and loss are returned, on this rank."""
        return self._plan.placement[-1] == self._group.rank

    # ---- steps ------------------------------------------------------------------------------------------------

    def forward(self, input: Any) -> Any:
        """Compute the model's output without gradients; collective.

        Args:
            input: [B, ...] a tensor, or tensors in tuples, lists and dicts; used on the first stage's rank.

        Returns:
            [B, ...] the last stage's outputs put together along dim 0, on its rank; None elsewhere.

        Raises:
            ValueError: The input has no batch, or the ranks do not agree; on all ranks.
        """
        step = self._run(Mode.PREDICT, input, None)
        return joined(step.outputs) if self.has_last_stage else None

    def train_step(self, input: Any, target: Any) -> Tensor | None:
        """Compute the loss and add its gradients to the parameters' `grad`; collective.

        Args:
            input: [B, ...] a tensor, or tensors in tuples, lists and dicts; used on the first stage's rank.
            target: [B, ...] likewise; used on the last stage's rank.

        Returns:
            [] the mean loss over the batch, detached, on the last stage's rank; None elsewhere.

        Raises:
            ValueError: Input or target has no batch, they differ in size, there is no `loss_fn`, or the ranks do
                not agree; on all ranks, before anything is sent.
        """
        with ExitStack() as stack:
            for run in self._runs.values():
                stack.enter_context(run.without_sync())
            kept = self._ties.begin()
            step = self._run(Mode.TRAIN, input, target)
        if self._shares:
            for _, run in sorted(self._runs.items()):
                run.sync_gradients()
            self._ties.sum(kept)
            if self._group.size > 1:
                mark_gradients(self.parameters())
        else:
            self._ties.leave(kept)
        self.steps += 1
        return step.loss

    def eval_step(self, input: Any, target: Any) -> Tensor | None:
        """Compute the loss only; collective. Arguments, result and errors are those of `train_step`."""
        return self._run(Mode.EVALUATE, input, target).loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients within the block, on all ranks alike, without sharing them with other ranks; local.

        Tied parameters, and stages wrapped in DDP or FSDP, share them in the first step after the block.
        """
        before, self._shares = self._shares, False
        try:
            yield
        finally:
            self._shares = before

    def _gradient_copies(
        self, group: ProcessGroup | None, copies: Copies | None
    ) -> tuple[list[tuple[Tensor, float]], list[ProcessGroup]]:
        stages = ProcessGroup(self._backend, self._group.ranks)
        chosen = None if group is None else chosen_group(group)
        return gradient_copies(list(self.named_parameters()), self._ties.elsewhere, stages, chosen, copies)

    # ---- pictures ---------------------------------------------------------------------------------------------

    def schedule_chart(self, costs: Costs | None = None) -> str:
        """Draw the schedule of a training step in characters, a line for each rank; local.

        Args:
            costs: How long actions take; None means forward 1, backward 2.
        """
        return text_chart(simulate(self._schedule(self.num_microbatches, trains=True), costs))

    def record_times(self, wanted: bool = True) -> None:
        """Begin to keep when this rank's actions run, or stop it and forget; local."""
        check_flags(wanted=wanted)
        self._times = [] if wanted else None

    def write_trace(self, path: str | Path) -> None:
        """Write the times since `record_times()` to a trace file, on rank 0, and begin anew; collective.

        Args:
            path: A JSON file for Perfetto (ui.perfetto.dev), chrome://tracing, or `axonmpi chart --trace`.

        Raises:
            ValueError: `record_times()` was not called on a rank; on all ranks.
        """
        of_all = all_gather_object(self._backend, self._times)
        missing = [rank for rank, times in enumerate(of_all) if times is None]
        if missing:
            raise ValueError(
                "write_trace: expected that record_times() was called on all ranks before the steps, it was not on "
                + name_ranks(missing)
            )
        self._times = []
        if self._group.rank == 0:
            write_trace(Path(path), of_all, self._schedule(self.num_microbatches, trains=True).name)
        broadcast_object(self._backend, None, 0)  # the file is there on return

    # ---- inside -----------------------------------------------------------------------------------------------

    def _run(self, mode: Mode, input: Any, target: Any) -> Step:
        trains = mode is Mode.TRAIN
        header, problem = self._header(mode, input, target)
        headers = agree(self._backend, header, problem)
        samples = max(header.samples for header in headers)
        count = min(self.num_microbatches, samples)
        self._transport.check(count)
        key = tuple(headers)
        schedule = self._schedule(count, trains=trains)
        step = self._step(mode, input, target, count)
        learning = key not in self._known
        forms = {} if learning else self._known[key]
        wires = self._transport.wires(count, trains=trains, learning=learning)
        routes = Routes(schedule, self._group.rank, self._plan.skips, trains)
        Executor(routes, self._runs, wires, forms, learning=learning, feed=step, times=self._times).run()
        self._transport.outbox.flush()
        if learning:
            self._transport.learn(schedule, forms, trains=trains)
            self._known[key] = forms
        return step

    def _header(self, mode: Mode, input: Any, target: Any) -> tuple[Header, str]:
        """Return what this rank has to say before a step, and what is wrong with its arguments."""
        samples, shapes, targets, problem = -1, 0, -1, ""
        try:
            _check_count(self.num_microbatches)
            if self.has_first_stage:
                samples, shapes = batch_size(input, "input"), digest_of(input)
            if self.has_last_stage and mode is not Mode.PREDICT:
                if self.loss_fn is None:
                    raise ValueError("loss_fn: expected one, which train_step() and eval_step() need, got None")
                targets = batch_size(target, "target")
        except (TypeError, ValueError) as error:
            problem = str(error)
        trained = hash(tuple(parameter.requires_grad for parameter in self.parameters())) & (2**62 - 1)
        shares = int(self._shares)
        return Header(mode, int(self.num_microbatches), samples, shapes, targets, trained, shares), problem

    def _schedule(self, num_microbatches: int, *, trains: bool) -> Schedule:
        key = num_microbatches, trains
        if key not in self._schedules:
            self._schedules[key] = schedule_for(self._plan, num_microbatches, trains=trains)
        return self._schedules[key]

    def _step(self, mode: Mode, input: Any, target: Any, count: int) -> Step:
        """Cut the batch into `count` micro-batches."""
        wants_loss = self.has_last_stage and mode is not Mode.PREDICT
        targets = split_batch(target, count) if wants_loss else []
        return Step(
            mode,
            split_batch(input, count) if self.has_first_stage else [],
            targets,
            loss_weights(targets, self.loss_weight) if wants_loss else [],
            loss_fn=self.loss_fn,
            random=None if self._plan.seed is None else (self._plan.seed, self.steps),
            is_lent=self._transport.holds,
        )


def _check_count(num_microbatches: object) -> None:
    if not isinstance(num_microbatches, int) or isinstance(num_microbatches, bool):
        raise TypeError(f"num_microbatches: expected an int, got {num_microbatches!r}")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches: expected 1 or more, got {num_microbatches}")
