"""Does what a schedule says: one executor for all schedules.

Every action has a method. Compute actions wait for what they need; sends and receives only begin. What goes from
stage to stage is a *parcel*: the output, for the stage that follows; what was stashed for that stage; and where
the micro-batch's random numbers are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..randomness import RandomStream, undisturbed
from ..schedule.actions import Action, ActionKind, Schedule
from ..schedule.timeline import Span
from ..skips import skip_scope
from .mailboxes import Line, last_uses
from .payload import TensorForm, check_form, form_of, pack, unpack
from .stage import StageRun
from .wires import Forms, MessageWire, Wire

__all__ = ["Executor", "Feed", "Routes"]


class Parcel(NamedTuple):
    """What goes from one stage to another.

    Attributes:
        output: The stage's output; None for a stage that does not follow it.
        skips: What was stashed for that stage, by name.
        random: State of the micro-batch's random numbers; None without a seed, and for other stages.
    """

    output: Any
    skips: dict[str, Any]
    random: Tensor | None


class Feed(Protocol):
    """What comes into a step at its ends."""

    @property
    def draws(self) -> bool:
        """Whether micro-batches have random numbers of their own."""

    def input(self, micro_batch: int) -> Any:
        """Return the first stage's input."""

    def begin_random(self, micro_batch: int) -> RandomStream | None:
        """Return the micro-batch's random numbers, None without a seed."""

    def finish(self, micro_batch: int, output: Any) -> Tensor | None:
        """Take the last stage's output; return the loss that backward begins at, if there is any."""

    def loss_gradient(self, micro_batch: int) -> Tensor:
        """Return the gradient of the step's loss with respect to that of a micro-batch."""


@dataclass(frozen=True)
class Routes:
    """Where things go, the same in every step.

    Attributes:
        schedule: Who does what.
        rank: This rank.
        skips: Source and target stage of each skip connection, by name.
        trains: Whether there is a backward.
    """

    schedule: Schedule
    rank: int
    skips: Mapping[str, tuple[int, int]]
    trains: bool

    def is_local(self, source: int, target: int) -> bool:
        """Say whether two stages live on the same rank."""
        return self.schedule.placement[source] == self.schedule.placement[target]


class Executor:
    """One step of one rank.

    Args:
        routes: Where things go.
        runs: This rank's stages.
        wires: This rank's ends of the lines to other ranks.
        forms: What is known of payloads; filled while learning.
        learning: Whether forms travel with the payloads.
        feed: What comes in at the ends.
        times: Where to put when each action ran, in seconds, if wanted; waiting for others is not counted.
    """

    def __init__(
        self,
        routes: Routes,
        runs: Mapping[int, StageRun],
        wires: Mapping[Line, Wire],
        forms: Forms,
        *,
        learning: bool,
        feed: Feed,
        times: list[Span] | None = None,
    ) -> None:
        self._routes = routes
        self._runs = runs
        self._wires = wires
        self._forms = forms
        self._learning = learning
        self._feed = feed
        self._times = times
        self._last = routes.schedule.num_stages - 1
        self._actions = routes.schedule.actions[routes.rank]
        self._last_uses = last_uses(trains=routes.trains)
        self._into = {stage: [wire for line, wire in wires.items() if line[1] == stage] for stage in runs}
        self._began = 0.0
        self._waiting: dict[tuple[int, int, int], list[Tensor]] = {}

    def run(self) -> None:
        """Do all actions of this rank in order; collective over the pipeline's ranks."""
        with torch.set_grad_enabled(self._routes.trains):
            for action in self._actions:
                self._began = time.monotonic()
                self._perform(action)
                if self._times is not None:
                    self._times.append(Span(action, self._began, time.monotonic()))
                if action.kind in self._last_uses:
                    for wire in self._into[action.stage]:
                        wire.free(action.micro_batch)

    def _perform(self, action: Action) -> None:
        if action.kind is ActionKind.FORWARD:
            self._forward(action)
        elif action.kind is ActionKind.BACKWARD_WEIGHT:
            self._backward_weight(action)
        elif action.kind.is_compute:
            self._backward(action)
        elif action.kind.is_send:
            self._send(action)
        else:
            self._post(action)

    # ---- transfers --------------------------------------------------------------------------------------------

    def _send(self, action: Action) -> None:
        source, target, micro_batch = action.stage, _peer(action), action.micro_batch
        wire = self._wires[source, target]
        tensors = self._waiting.pop((source, target, micro_batch))
        if self._learning and action.kind is ActionKind.SEND_FORWARD:
            assert isinstance(wire, MessageWire)
            wire.send_form(micro_batch, self._forms[source, target, micro_batch])
        wire.send(micro_batch, tensors)

    def _post(self, action: Action) -> None:
        source, target, micro_batch = _peer(action), action.stage, action.micro_batch
        if not self._learning:  # else nobody knows yet what will come
            self._wires[source, target].post(micro_batch, self._expected(source, target, micro_batch))

    def _expected(self, source: int, target: int, micro_batch: int) -> tuple[TensorForm, ...]:
        """Return the forms of what goes from one stage to another: activations forward, gradients back."""
        if source < target:
            return self._forms[source, target, micro_batch].tensors
        return self._forms[target, source, micro_batch].trained

    def _take(self, source: int, target: int, micro_batch: int) -> list[Tensor]:
        """Return what one stage has sent to another of this rank."""
        if self._routes.is_local(source, target):
            return self._waiting.pop((source, target, micro_batch))
        wire = self._wires[source, target]
        if self._learning and source < target:
            assert isinstance(wire, MessageWire)
            self._forms[source, target, micro_batch] = wire.take_form(micro_batch)
        return wire.take(micro_batch, self._expected(source, target, micro_batch))

    # ---- forward ----------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        arrived = {source: self._leaves(source, stage, micro_batch) for source in self._routes.schedule.sources[stage]}
        self._began = time.monotonic()
        run = self._runs[stage]
        if self._routes.trains:
            run.open(micro_batch, arrived)
        parcels = {
            source: unpack(self._forms[source, stage, micro_batch].skeleton, tensors)
            for source, tensors in arrived.items()
        }
        skips = {name: value for parcel in parcels.values() for name, value in parcel.skips.items()}
        given, stream = self._feed_of(stage, micro_batch, parcels)
        with skip_scope(skips) as stashed:
            with _drawing(stream, alone=not run.communicates):
                output = run.module(given)
                loss = self._feed.finish(micro_batch, output) if stage == self._last else None
            left = dict(stashed)
        if loss is not None and self._routes.trains:
            run.keep_loss(micro_batch, loss)
        self._check_stashed(stage, left)
        for target in self._routes.schedule.targets[stage]:
            self._hand_over(stage, target, micro_batch, output, left, stream)

    def _feed_of(
        self, stage: int, micro_batch: int, parcels: Mapping[int, Parcel]
    ) -> tuple[Any, RandomStream | None]:
        """Return a stage's input and the random numbers that it goes on with."""
        if stage == 0:
            return self._feed.input(micro_batch), self._feed.begin_random(micro_batch)
        before = parcels[stage - 1]
        return before.output, None if before.random is None else RandomStream(before.random.clone())

    def _leaves(self, source: int, stage: int, micro_batch: int) -> list[Tensor]:
        """Return what has come from another stage, ready to be computed with."""
        tensors = self._take(source, stage, micro_batch)
        forms = self._forms[source, stage, micro_batch].tensors
        return [t.requires_grad_(form.requires_grad) for t, form in zip(tensors, forms, strict=True)]

    def _hand_over(
        self,
        stage: int,
        target: int,
        micro_batch: int,
        output: Any,
        left: dict[str, Any],
        stream: RandomStream | None,
    ) -> None:
        """Make the parcel for another stage ready."""
        follows = target == stage + 1
        skips = {name: left[name] for name, route in self._routes.skips.items() if route == (stage, target)}
        random = stream.state if follows and stream is not None else None
        skeleton, tensors = pack(Parcel(output if follows else None, skips, random))
        if self._learning:
            self._forms[stage, target, micro_batch] = form_of(skeleton, tensors)
        else:
            check_form(self._forms[stage, target, micro_batch], skeleton, tensors, f"the output of stage {stage}")
        if self._routes.trains:
            self._runs[stage].keep(micro_batch, target, tensors)
        self._waiting[stage, target, micro_batch] = [tensor.detach() for tensor in tensors]

    def _check_stashed(self, stage: int, left: Mapping[str, Any]) -> None:
        """Raise unless a stage has stashed what the pipeline's skip connections say, and has popped the rest."""
        expected = {name for name, (source, _) in self._routes.skips.items() if source == stage}
        if set(left) != expected:
            raise ValueError(
                f"stage {stage} left {sorted(left) or 'nothing'} stashed, expected "
                f"{sorted(expected) or 'nothing'}: `skips` says which stage stashes and which pops each name, "
                "once in a forward"
            )

    # ---- backward ---------------------------------------------------------------------------------------------

    def _backward(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        gradients = {target: self._take(target, stage, micro_batch) for target in self._routes.schedule.targets[stage]}
        self._began = time.monotonic()
        run = self._runs[stage]
        compute = run.backward if action.kind is ActionKind.BACKWARD else run.backward_input
        with self._undisturbed(run):
            made = compute(micro_batch, gradients, lambda: self._feed.loss_gradient(micro_batch))
        for source, back in made.items():
            self._waiting[stage, source, micro_batch] = back

    def _backward_weight(self, action: Action) -> None:
        run = self._runs[action.stage]
        with self._undisturbed(run):
            run.backward_weight(action.micro_batch)

    def _undisturbed(self, run: StageRun) -> AbstractContextManager[object]:
        """Let nobody else draw while what backward computes again does; not where it waits for other ranks."""
        return undisturbed() if self._feed.draws and not run.communicates else nullcontext()


def _peer(action: Action) -> int:
    assert action.peer is not None
    return action.peer


def _drawing(stream: RandomStream | None, *, alone: bool) -> AbstractContextManager[None]:
    """Draw from the micro-batch's random numbers, if it has any."""
    return nullcontext() if stream is None else stream.drawn_from(alone=alone)
