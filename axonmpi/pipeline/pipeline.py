"""`Pipeline`: a model whose stages are on different ranks.

    pipeline = ax.Pipeline.from_modules(stages, num_microbatches=8, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = pipeline.train_step(inputs, targets)     # a number on the last stage's rank
        optimizer.step()

A step cuts its batch into micro-batches, which go through the stages one behind the other, in the schedule's order.
Gradients equal those of one process: the loss is the mean over the full batch for any number of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..across_ranks.comparison import first_rank_does, raised_on_all, same_on_all_ranks
from ..across_ranks.gradient_norm import ClipsGradients, Copies, copy_counts, sharding_axes
from ..backends import all_gather_object
from ..groups.process_group import ProcessGroup
from ..groups.world import chosen_group, group_of_this_rank
from ..utils.arguments import check_flags, check_functions, integer
from ..wrapping.optimizer_hooks import mark_gradients
from .batches import batch_size, digest_of, joined, loss_weights, split_batch
from .runtime.executor import Executor
from .runtime.payload import Forms
from .runtime.stage import PipelineStage, StageRun
from .runtime.step import Header, Mode, Step, agree
from .runtime.transport import Transport
from .schedule.chart import text_chart
from .schedule.schedules import PipelineSchedule
from .schedule.simulator import Costs, simulate
from .schedule.timeline import Span
from .schedule.trace import write_trace
from .stage_layout import ScheduleMaker, chosen_schedule, make_layout, own_modules, placement_for
from .state_names import StateNames, state_names
from .ties import Tie, shared_parameters, tie_parameters


class Pipeline(nn.Module, ClipsGradients):
    """Runs the stages of a model on the ranks of a group, micro-batch after micro-batch.

    Its parameters are the parameters of this rank's stages. Making it and every step are collective over the group.

    Args:
        stages: All stages, the same list on all ranks; modules of other ranks' stages may be None and are dropped.
        process_group: The ranks; None means the default group.
        schedule: The order in which the ranks compute, a `PipelineSchedule` or its name. Or a function that makes a
            `Schedule` for a number of micro-batches, which is checked first.
        num_microbatches: The number of parts of a batch; a batch with fewer samples is cut into single ones.
        loss_fn: `loss_fn(output, target)` returns the mean loss of a micro-batch as a tensor of one element; used
            on the last stage's rank.
        loss_weight: `loss_weight(target)` returns the weight of a micro-batch in the mean over the batch; None
            means its number of samples. A loss that ignores some targets needs the number of counted targets here.
        skips: Source and target stage of each skip connection by name, see `axonmpi.pipeline.stash`.
        ties: For each parameter that several stages share, pairs of a stage's number and the parameter's name in
            that stage. All copies get the values of the first pair's, and their gradients are summed.
        seed: Makes random numbers, as for dropout, depend on the seed, the step and the micro-batch only, see
            `microbatch_seed`. None leaves them to each process.

    Attributes:
        stages: This rank's modules, by number.
        steps: Number of past training steps; set it when training is resumed.
        num_microbatches: May be changed between steps, on all ranks alike.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The stages do not fit the ranks or the schedule, or the ranks' arguments differ; on all ranks.
    """

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
        with raised_on_all(backend):
            integer("num_microbatches", num_microbatches, minimum=1)
            check_functions(loss_fn=loss_fn, loss_weight=loss_weight)
            modules = own_modules(stages, self._group)
            layout = make_layout(stages, self._group, schedule, modules, skips, ties, seed)
        problem = "the arguments of Pipeline are not the same on all ranks"
        what_to_do = "Give all ranks of the pipeline the same arguments."
        same_on_all_ranks(backend, layout.described(), problem, what_to_do)
        self._layout = layout
        self.stages = nn.ModuleDict({str(stage): module for stage, module in modules.items()})
        self._runs = {stage: StageRun(module) for stage, module in modules.items()}
        self._tied = tie_parameters(layout.ties, layout.placement, modules, self._group, backend)
        self._transport = Transport(backend, layout.placement, layout.edges)
        self._schedule_for = cache(layout.schedule_for)
        self._forms: dict[tuple[Header, ...], Forms] = {}
        self._shares = True
        self._times: list[Span] | None = None
        self._names: StateNames | None = None

    @classmethod
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
            modules: One for each stage, as many as ranks or a multiple of that: then each rank has several, and the
                schedule assigns them. Parameters that several modules share are tied.
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
        return len(self._layout.placement)

    @property
    def schedule(self) -> PipelineSchedule | ScheduleMaker:
        """The order in which the ranks compute."""
        return self._layout.schedule

    @property
    def has_first_stage(self) -> bool:
        """Whether the input is needed on this rank."""
        return self._layout.placement[0] == self._group.rank

    @property
    def has_last_stage(self) -> bool:
        """Whether the target is needed, and output and loss are returned, on this rank."""
        return self._layout.placement[-1] == self._group.rank

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
        outputs = [output for _, output in sorted(step.outputs.items())]
        return joined(outputs) if self.has_last_stage else None

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
            for tied in self._tied:
                tied.begin()
            step = self._run(Mode.TRAIN, input, target)
        if self._shares:
            for _, run in sorted(self._runs.items()):
                run.sync_gradients()
            for tied in self._tied:
                tied.sum()
            if self._group.size > 1:
                mark_gradients(self.parameters())
        else:
            for tied in self._tied:
                tied.leave()
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
        asked = [stages if group is None else chosen_group(group)]
        if not np.isin(stages.members, asked[0].members).all():
            raise ValueError(
                f"group: expected one with all ranks of the pipeline, {list(stages.ranks)}, got "
                f"{list(asked[0].ranks)}; join the axes, as in mesh.group('pp', 'tp')"
            )
        named = list(self.named_parameters())
        if group is None and copies is None:
            asked = [*(axis.group for axis in sharding_axes(self.parameters())), stages]
        elsewhere = set[int]().union(*(tied.elsewhere for tied in self._tied))
        counted: list[tuple[Tensor, float]] = [
            (parameter, math.inf if id(parameter) in elsewhere else count)
            for (_, parameter), count in zip(named, copy_counts(named, copies, asked), strict=True)
        ]
        return counted, asked

    # ---- state ------------------------------------------------------------------------------------------------

    @property
    def ties(self) -> list[Tie]:
        """The stages and names of each parameter that several stages share, the first stage first."""
        return [tuple(sorted(tie)) for tie in self._layout.ties]

    def state_names(self) -> StateNames:
        """Return the names of all stages' tensors in the whole model; collective the first time."""
        if self._names is None:
            modules = {int(number): module for number, module in self.stages.items()}
            self._names = state_names(modules, self.num_stages, self.ties, self._backend)
        return self._names

    def spread_ties(self) -> None:
        """Give all copies of tied parameters the values of the first stage's copy; collective."""
        for tied in self._tied:
            tied.spread()

    # ---- pictures ---------------------------------------------------------------------------------------------

    def schedule_chart(self, costs: Costs | None = None) -> str:
        """Draw the schedule of a training step in characters, a line for each rank; local.

        Args:
            costs: The times of actions; None means forward 1, backward 2.
        """
        return text_chart(simulate(self._schedule_for(self.num_microbatches, trains=True), costs))

    def record_times(self, wanted: bool = True) -> None:
        """Begin to record the times of this rank's actions, or stop and drop the records; local."""
        check_flags(wanted=wanted)
        self._times = [] if wanted else None

    def write_trace(self, path: str | Path) -> None:
        """Write the times since `record_times()` to a trace file, on rank 0, and begin anew; collective.

        Args:
            path: A JSON file for Perfetto (ui.perfetto.dev), chrome://tracing, or `axonmpi chart --trace`.

        Raises:
            ValueError: `record_times()` was not called on a rank; on all ranks.
            OSError: Rank 0 cannot write the file; on all ranks.
        """
        with raised_on_all(self._backend):
            if self._times is None:
                raise ValueError("write_trace: expected that record_times() was called before the steps")
        of_all = all_gather_object(self._backend, self._times)
        self._times = []
        name = self._schedule_for(self.num_microbatches, trains=True).name
        first_rank_does(self._backend, lambda: write_trace(Path(path), of_all, name))

    # ---- internals --------------------------------------------------------------------------------------------

    def _run(self, mode: Mode, input: Any, target: Any) -> Step:
        trains = mode is Mode.TRAIN
        header, problem = self._header(mode, input, target)
        headers = agree(self._backend, header, problem)
        samples = max(header.samples for header in headers)
        count = min(self.num_microbatches, samples)
        self._transport.check(count)
        forms = self._forms.setdefault(tuple(headers), Forms())
        schedule = self._schedule_for(count, trains=trains)
        step = self._step(mode, input, target, count)
        wires = self._transport.wires(count, forms, trains=trains)
        Executor(
            schedule,
            self._group.rank,
            self._layout.skips,
            self._runs,
            wires,
            forms,
            step=step,
            times=self._times,
        ).run()
        self._transport.outbox.flush()
        if not forms.are_complete:
            self._transport.learn(schedule, forms, trains=trains)
        return step

    def _header(self, mode: Mode, input: Any, target: Any) -> tuple[Header, Exception | None]:
        """Return this rank's header of a step, and the error in its arguments, if there is one."""
        header = Header(mode)
        try:
            count = integer("num_microbatches", self.num_microbatches, minimum=1)
            trained = hash(tuple(parameter.requires_grad for parameter in self.parameters())) & (2**62 - 1)
            header = replace(header, num_microbatches=count, shares=self._shares, trained=trained)
            if self.has_first_stage:
                header = replace(header, samples=batch_size(input, "input"), shapes=digest_of(input))
            if self.has_last_stage and mode is not Mode.PREDICT:
                if self.loss_fn is None:
                    raise ValueError("loss_fn: expected one, which train_step() and eval_step() need, got None")
                header = replace(header, targets=batch_size(target, "target"))
        except (TypeError, ValueError) as error:
            return header, error
        return header, None

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
            seed=None if self._layout.seed is None else (self._layout.seed, self.steps),
            device=self._backend.place,
        )
