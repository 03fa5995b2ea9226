"""The executor: performs the actions of any schedule.

Every kind of action has a method. Compute actions wait for their data; sends and receives only begin. A stage sends
a *parcel* to another stage: its output, for the next stage; the tensors that it has stashed for that stage; and the
state of the micro-batch's random numbers.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...record import Phase, enter_phase
from ...utils.device import device_at
from ..randomness import RandomStream, undisturbed
from ..schedule.actions import Action, ActionKind, Schedule
from ..schedule.timeline import Span
from ..skips import skip_scope
from .mailboxes import Line, last_uses
from .payload import Forms, check_form, form_of, pack, unpack
from .stage import StageRun
from .step import Step
from .transport import Wire
from .wires import MessageWire

_PHASES = {
    ActionKind.FORWARD: Phase.FORWARD,
    ActionKind.BACKWARD: Phase.BACKWARD,
    ActionKind.BACKWARD_INPUT: Phase.BACKWARD,
    ActionKind.BACKWARD_WEIGHT: Phase.BACKWARD,
}
"""The phase that a rank's record shows during an action; transfers count as OTHER."""


class Parcel(NamedTuple):
    """The payload from one stage to another.

    Attributes:
        output: The stage's output; None for a skip connection to a later stage.
        skips: The values stashed for that stage, by name.
        random: States of the micro-batch's random numbers; None without a seed, and for other stages.
    """

    output: Any
    skips: dict[str, Any]
    random: Sequence[Tensor] | None


class Executor:
    """One step of one rank.

    Args:
        schedule: The actions of all ranks.
        rank: This rank.
        skips: Source and target stage of each skip connection, by name.
        runs: This rank's stages.
        wires: This rank's ends of the lines to other ranks.
        forms: Of the payloads; filled in the first step.
        step: Inputs, targets, outputs and losses.
        times: Filled with the start and end of each action, in seconds, without waiting for other ranks; None
            measures nothing. With times, the rank waits for its GPU after each action.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        skips: Mapping[str, tuple[int, int]],
        runs: Mapping[int, StageRun],
        wires: Mapping[Line, Wire],
        forms: Forms,
        *,
        step: Step,
        times: list[Span] | None = None,
    ) -> None:
        self._schedule = schedule
        self._actions = schedule.actions[rank]
        self._skips = skips
        self._runs = runs
        self._wires = wires
        self._forms = forms
        self._learning = not forms.are_complete
        self._step = step
        self._times = times
        self._began = 0.0
        self._waiting: dict[tuple[Line, int], list[Tensor]] = {}
        self._unposted: defaultdict[int, deque[tuple[Line, int]]] = defaultdict(deque)

    def run(self) -> None:
        """Perform all actions of this rank in order; collective over the pipeline's ranks."""
        perform = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.BACKWARD_INPUT: self._backward,
            ActionKind.BACKWARD_WEIGHT: self._backward_weight,
            ActionKind.SEND_FORWARD: self._send,
            ActionKind.SEND_BACKWARD: self._send,
            ActionKind.RECV_FORWARD: self._post,
            ActionKind.RECV_BACKWARD: self._post,
        }
        frees = last_uses(trains=self._step.trains)
        with torch.set_grad_enabled(self._step.trains):
            for action in self._actions:
                self._began = self._now()
                enter_phase(_PHASES.get(action.kind, Phase.OTHER), action)
                perform[action.kind](action)
                if self._times is not None:
                    self._times.append(Span(action, self._began, self._now()))
                if action.kind in frees:
                    for (_, target), wire in self._wires.items():
                        if target == action.stage:
                            wire.free(action.micro_batch)
        enter_phase(Phase.OTHER)

    def _now(self) -> float:
        """Return the time in seconds after the device has finished its work; 0 if no times are wanted."""
        if self._times is None:
            return 0.0
        device = device_at(self._step.device)
        device.block(device.record(device.current_stream()))
        return time.monotonic()

    # ---- transfers --------------------------------------------------------------------------------------------

    def _send(self, action: Action) -> None:
        line, micro_batch = action.line, action.micro_batch
        wire = self._wires[line]
        tensors = self._waiting.pop((line, micro_batch))
        if self._learning and action.kind is ActionKind.SEND_FORWARD:
            assert isinstance(wire, MessageWire)
            wire.send_form(micro_batch, self._forms[line, micro_batch])
        wire.send(micro_batch, tensors)

    def _post(self, action: Action) -> None:
        line, micro_batch = action.line, action.micro_batch
        if self._learning:  # the form is not known yet
            self._unposted[self._schedule.placement[line[0]]].append((line, micro_batch))
        else:
            self._wires[line].post(micro_batch, self._forms.carried(line, micro_batch))

    def _take(self, line: Line, micro_batch: int) -> list[Tensor]:
        """Return the tensors that one stage has sent to another stage, on this rank."""
        if self._schedule.is_local(*line):
            return self._waiting.pop((line, micro_batch))
        if self._learning:
            self._learn(line, micro_batch)
        return self._wires[line].take(micro_batch, self._forms.carried(line, micro_batch))

    def _learn(self, line: Line, micro_batch: int) -> None:
        """Receive the form of a message and of earlier messages from the same rank, and post their receives."""
        unposted = self._unposted[self._schedule.placement[line[0]]]
        while (line, micro_batch) in unposted:
            other, number = unposted.popleft()
            wire = self._wires[other]
            if other[0] < other[1]:
                assert isinstance(wire, MessageWire)
                self._forms[other, number] = wire.take_form(number)
            wire.post(number, self._forms.carried(other, number))

    # ---- forward ----------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        stage, micro_batch, step = action.stage, action.micro_batch, self._step
        arrived = {source: self._leaves((source, stage), micro_batch) for source in self._schedule.sources[stage]}
        self._began = self._now()
        parcels: dict[int, Parcel] = {
            source: unpack(self._forms[(source, stage), micro_batch].skeleton, tensors)
            for source, tensors in arrived.items()
        }
        skips = {name: value for parcel in parcels.values() for name, value in parcel.skips.items()}
        if stage == 0:
            given, stream = step.inputs[micro_batch], step.begin_random(micro_batch)
        else:
            given, stream = parcels[stage - 1].output, RandomStream(parcels[stage - 1].random, step.device)
        run, loss = self._runs[stage], None
        with skip_scope(skips) as stashed:
            with stream.drawn_from(alone=not run.communicates):
                output = run.module(given)
                if stage == self._schedule.num_stages - 1:
                    loss = step.finish(micro_batch, output)
            left = dict(stashed)
        self._check_stashed(stage, left)
        sent = {}
        for target in self._schedule.targets[stage]:
            skips = {name: left[name] for name, route in self._skips.items() if route == (stage, target)}
            follows = target == stage + 1
            parcel = Parcel(output if follows else None, skips, stream.states if follows else None)
            sent[target] = self._hand_over((stage, target), micro_batch, parcel)
        if step.trains:
            run.keep(micro_batch, arrived, sent, loss, 0.0 if loss is None else step.weights[micro_batch])

    def _leaves(self, line: Line, micro_batch: int) -> list[Tensor]:
        """Return the tensors from another stage as leaves of autograd."""
        tensors = self._take(line, micro_batch)
        forms = self._forms[line, micro_batch].tensors
        return [t.requires_grad_(form.requires_grad) for t, form in zip(tensors, forms, strict=True)]

    def _hand_over(self, line: Line, micro_batch: int, parcel: Parcel) -> list[Tensor]:
        """Make the parcel for another stage ready; return its tensors."""
        skeleton, tensors = pack(parcel)
        if self._learning:
            self._forms[line, micro_batch] = form_of(skeleton, tensors)
        else:
            check_form(self._forms[line, micro_batch], skeleton, tensors, f"the output of stage {line[0]}")
        self._waiting[line, micro_batch] = [tensor.detach() for tensor in tensors]
        return tensors

    def _check_stashed(self, stage: int, left: Mapping[str, Any]) -> None:
        """Raise unless a stage has stashed the values of its skip connections, and has popped all others."""
        expected = {name for name, (source, _) in self._skips.items() if source == stage}
        if set(left) != expected:
            raise ValueError(
                f"stage {stage} left {sorted(left) or 'nothing'} stashed, expected "
                f"{sorted(expected) or 'nothing'}: `skips` says which stage stashes and which pops each name, "
                "once in a forward"
            )

    # ---- backward ---------------------------------------------------------------------------------------------

    def _backward(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        gradients = {t: self._take((t, stage), micro_batch) for t in self._schedule.targets[stage]}
        self._began = self._now()
        run = self._runs[stage]
        with self._undisturbed(run):
            made = run.backward(micro_batch, gradients, divided=action.kind is ActionKind.BACKWARD_INPUT)
        for source, tensors in made.items():
            self._waiting[(stage, source), micro_batch] = tensors

    def _backward_weight(self, action: Action) -> None:
        run = self._runs[action.stage]
        with self._undisturbed(run):
            run.backward_weight(action.micro_batch)

    def _undisturbed(self, run: StageRun) -> AbstractContextManager[object]:
        """Lock random draws while backward recomputes, unless it waits for other ranks."""
        return undisturbed if self._step.seed is not None and not run.communicates else nullcontext()
