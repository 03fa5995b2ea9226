"""What happens at each event of forward and backward, in which order: with units and a queue that write it down."""

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers.compare import refused
from helpers.models import fail
from helpers.steps import again
from torch import Tensor, nn

from axonmpi.fsdp.runtime import FSDPRuntime
from axonmpi.fsdp.unit import LentBuffer, Unit
from axonmpi.wrapping.steps import Steps


class Fake:
    """An object with some attributes, and methods that write down that they are called."""

    def __init__(self, events: list[str], who: str, **attributes: object) -> None:
        self.__dict__.update(attributes, events=events, who=who)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.events.append(" ".join([self.who, name, *map(str, arguments)]))


class NotedUnit(Unit):
    """A unit that writes down what is done with it."""

    def __init__(self, name: str, module: nn.Module, events: list[str], resident: bool) -> None:
        flat = Fake(events, name, parameters=[], is_resident=resident, is_valid=resident, pinned=None)
        flat.gathers_ahead = True
        super().__init__(name, module, [flat], None)
        self.events, self.changed = events, 0

    def changes(self) -> int:
        return self.changed

    def begin_gather(self) -> None:
        self.events.append(f"begin {self.name}")

    def gather(self) -> None:
        self.events.append(f"gather {self.name}")
        self.flats[0].is_valid = True

    def show_full(self) -> None:
        self.events.append(f"full {self.name}")

    def show_sharded(self) -> None:
        self.shown = False
        self.events.append(f"shards {self.name}")

    def take_changes(self) -> None:
        self.events.append(f"take {self.name}")


class Running:
    """A model `all` of two layers, `a` and `b`, each a unit, and the events since they were last asked for."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, resident: str = "", cast: torch.dtype | None = None
    ) -> None:
        self.events: list[str] = []
        self.model = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.Linear(2, 2)))
        modules = {"all": self.model, "a": self.model.a, "b": self.model.b}
        self.units = [NotedUnit(name, module, self.events, name in resident) for name, module in modules.items()]
        self.all, self.a, self.b = self.units
        self.gradients = [self.gradient(unit, size) for unit, size in ((self.b, 4), (self.a, 7))]
        outermost = Fake(self.events, "", unit=self.all, flat=Fake(self.events, "", parameters=[]), full_bytes=50)
        groups = Fake(self.events, "groups", shard=Fake(self.events, "group"))
        self.sizes: list[int | None] = []

        def queue(gradients: list[Fake], groups: Fake, most_bytes: int | None) -> Fake:
            self.sizes.append(most_bytes)
            return Fake(self.events, "queue", steps=Steps())

        monkeypatch.setattr("axonmpi.fsdp.runtime.GradientQueue", queue)
        monkeypatch.setattr("axonmpi.fsdp.runtime.enter_phase", lambda phase: self.events.append(phase.name))
        self.runtime = FSDPRuntime(groups, self.units, [outermost, *self.gradients], cast)

    def gradient(self, unit: NotedUnit, size: int) -> Fake:
        sharded = nn.Parameter(torch.zeros(1))
        parameter = Fake(self.events, "", name=f"{unit.name}.weight", full=unit.module.weight, sharded=sharded)
        flat = Fake(self.events, "", parameters=[parameter])
        return Fake(self.events, "", unit=unit, flat=flat, full_bytes=size, nodes=[], arrived=set())

    def forward(self, times: int = 1) -> Tensor:
        for _ in range(times):
            output = self.model(torch.ones(1, 2))
        return output.sum()

    def happened(self) -> list[str]:
        events = self.events[:]
        self.events.clear()
        return events


@pytest.fixture
def running(monkeypatch):
    return Running(monkeypatch)


BEGINS = ["FORWARD", "take all", "take a", "take b", "gather all", "full all"]
FIRST_FORWARD = [
    *BEGINS,
    *("gather a", "full a", "shards a"),
    *("gather b", "full b", "shards b"),
    *("shards all", "OTHER"),
]
"""Nothing is gathered ahead, as the order of the units is not known."""
FORWARD = [
    *BEGINS,
    *("begin a", "gather a", "full a", "begin b", "shards a"),
    *("gather b", "full b", "shards b"),
    *("shards all", "OTHER"),
]
BACKWARD = [
    *("gather b", "begin a", "BACKWARD", "queue launch_after {}", "gather all", "queue launch_complete"),
    *("queue launch_after {}", "gather a", "begin all", "queue launch_complete"),
    *("OTHER", "queue reduce_rest"),
]
"""The output of the model is that of `b`: backward of both begins there."""
ACCUMULATING = [event for event in BACKWARD[:-1] if "launch" not in event] + ["queue keep"]
COMPUTED_AGAIN = [
    *("gather all", "full all", "gather a", "full a", "shards a", "gather b", "full b", "shards b", "shards all"),
]


def backward(*numbers: int) -> list[str]:
    """Return the events of a backward, given the numbers of the events that end the forwards of `all` and `a`."""
    left = list(numbers)
    return [event.format(left.pop(0)) if "{}" in event else event for event in BACKWARD]


def test_events_of_two_steps_and_of_an_evaluation(running):
    """Starts and ends of forwards are numbered in one row, which goes on from pass to pass."""
    for forward, numbers in ((FIRST_FORWARD, (6, 3)), (FORWARD, (12, 9))):
        loss = running.forward()
        assert running.happened() == forward
        loss.backward()
        assert running.happened() == backward(*numbers)
    assert [gradient.arrived for gradient in running.gradients] == [
        {g.flat.parameters[0]} for g in running.gradients
    ]
    with torch.no_grad():
        running.forward()
    assert running.happened() == FORWARD


def test_a_unit_is_reduced_after_its_first_forward(running):
    """Forwards are numbered while their graph is kept; the numbers are forgotten with the backward."""
    with torch.no_grad():
        running.forward()
    assert [unit.first_event for unit in running.units] == [math.inf] * 3
    loss = running.forward() + running.forward()
    assert [unit.first_event for unit in running.units] == [7, 8, 10]
    loss.backward()
    assert [unit.first_event for unit in running.units] == [math.inf] * 3


def test_events_without_averages(running):
    running.forward(2).backward()
    running.happened()
    running.runtime.enabled = False
    running.forward().backward()
    assert running.happened() == FORWARD + ACCUMULATING
    running.runtime.reduce_accumulated()
    running.runtime.begin_step()  # the ranks have met
    assert running.happened() == ["queue reduce_held"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_gathers_what_it_needs_and_counts_as_no_forward(running, reentrant):
    running.forward(2)
    running.happened()
    running.runtime.enabled = False
    loss = again(running.model, torch.ones(1, 2, requires_grad=True), reentrant).sum()
    assert running.happened() == FORWARD
    loss.backward()
    around = 0 if reentrant else 4  # else autograd comes to the output first
    assert running.happened() == ACCUMULATING[:around] + COMPUTED_AGAIN + ACCUMULATING[around:]
    running.runtime.enabled = True
    running.forward().backward()
    assert running.happened() == FORWARD + backward(24, 21)


def test_gradients_of_inputs_reduce_nothing(running):
    inputs = torch.ones(1, 2, requires_grad=True)
    output = running.model(inputs).sum()
    running.happened()
    torch.autograd.grad(output, inputs)
    assert running.happened() == ["gather b", "begin a", "gather all", "gather a", "begin all"]


# ---- what is gathered ahead ---------------------------------------------------------------------------------


def test_a_unit_that_is_called_twice_is_not_gathered_ahead_of(running):
    running.model.append(running.model.a)
    running.forward()
    running.happened()
    running.forward()
    assert [event for event in running.happened() if "begin" in event] == ["begin a"] * 2


@pytest.mark.parametrize("holder", ["other", "idle", "same"])
def test_memory_in_use_is_not_gathered_into(running, holder):
    running.forward()
    running.happened()
    running.b.lent = LentBuffer(torch.empty(0))
    if holder == "same":
        running.a.lent = running.b.lent
    else:
        running.b.lent.holder = running.all if holder == "other" else running.b  # the first computes meanwhile
    running.forward()
    assert ("begin b" in running.happened()) == (holder == "idle")


def test_units_that_are_never_gathered(monkeypatch):
    """Ranks that read each other's shards meet before a pass; complete gradients need no order."""
    running = Running(monkeypatch, resident="all a b")
    assert running.sizes == [None]
    loss = running.forward()
    meet = FIRST_FORWARD.index("gather all")
    assert running.happened() == [*FIRST_FORWARD[:meet], "group barrier", *FIRST_FORWARD[meet:]]
    loss.backward()
    reduced = ["queue launch_complete"] * 2
    assert running.happened() == ["BACKWARD", *reduced, "OTHER", "queue reduce_rest"]
    assert all(unit.flats[0].is_valid for unit in running.units)


def test_whole_gradients_of_two_blocks_may_be_under_way(running):
    assert running.sizes == [2 * 7]


# ---- exceptions ---------------------------------------------------------------------------------------------


def test_an_exception_in_forward_leaves_shards(running):
    handle = running.model.b.register_forward_pre_hook(fail)
    refused(ArithmeticError, (running.forward, "in the middle"))
    handle.remove()
    assert (running.happened(), [unit.active for unit in running.units]) == (FIRST_FORWARD, [0, 0, 0])
    running.forward()
    assert running.happened() == FORWARD


def test_gradients_of_a_backward_that_failed_are_dropped_by_the_next_forward(running):
    running.forward(2)
    loss = running.forward()
    handle = running.model.a.weight.register_hook(fail)
    running.happened()
    refused(ArithmeticError, (loss.backward, "in the middle"))
    assert running.happened() == backward(18, 15)[:9]
    handle.remove()
    running.forward().backward()
    assert running.happened() == ["FORWARD", "queue discard", *FORWARD[1:], *backward(24, 21)]


def test_what_would_give_wrong_gradients_is_refused(running):
    loss = running.forward()
    running.b.changed += 1
    refused(RuntimeError, (loss.backward, "parameters of unit 'b' were changed between forward and backward"))
    loss = running.forward()
    running.a.before = running.a.gather
    for lose in (lambda: setattr(running.a.flats[0], "is_valid", False), lambda: running.a.pending.append(None)):
        loss = running.forward()
        running.a.gather = lose
        refused(RuntimeError, (loss.backward, "of 'a.weight' was computed while unit 'a' was not gathered"))
        running.a.gather = running.a.before
    arrive = partial(running.runtime.on_sharded_gradient, running.gradients[1].flat.parameters[0])
    refused(ValueError, (lambda: arrive(torch.ones(2)), "'a.weight' was computed from"))
    arrive(torch.ones(1))
    running.runtime.gathered = Fake(running.events, "copies", shown=True)
    refused(ValueError, (lambda: arrive(torch.ones(1)), "gathered by hand"))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_graphs_of_gradients_that_are_refused(running):
    message = r"backward\(create_graph=True\): p.grad would have no graph"
    refused(ValueError, (lambda: running.forward().backward(create_graph=True), message))
    inputs = torch.ones(1, 2, requires_grad=True)

    def slope() -> Tensor:
        return torch.autograd.grad(running.model(inputs).sum(), inputs, create_graph=True)[0]

    slope()
    running.b.lent = LentBuffer(torch.empty(0))
    refused(ValueError, (slope, "create_graph=True: units take turns in the memory"))


# ---- reading, and between steps -----------------------------------------------------------------------------


def test_who_may_read_a_unit_that_is_not_gathered(running):
    """An optimizer between forwards, and whatever backward computes once more, until the backward has ended."""
    runtime, answers = running.runtime, []
    assert [runtime.may_read(running.a, computes) for computes in (False, True)] == [True, False]
    handle = running.model.b.register_forward_hook(lambda *_: answers.append(runtime.may_read(running.a, False)))
    loss = running.forward()
    handle.remove()
    running.model.b.weight.register_hook(lambda _: answers.append(runtime.may_read(running.a, True)))
    running.happened()
    loss.backward()
    assert answers == [False, True]
    events = running.happened()
    assert (events[events.index("full a") - 1], events[-1]) == ("gather a", "shards a")
    runtime.gathered = Fake(running.events, "copies", shown=True)
    with torch.no_grad():
        assert runtime.may_read(running.a, True)
        running.forward()
    assert running.happened() == []  # with the copies
    assert not runtime.may_read(running.a, True)


def test_the_ranks_meet_before_a_step_where_no_backward_has_brought_them_together(running):
    running.runtime.begin_step()
    running.runtime.end_step()
    assert running.happened() == []
    running.forward()
    running.happened()
    for _ in range(2):
        running.runtime.begin_step()
    assert running.happened() == ["group barrier"]
    running.forward().backward()
    running.happened()
    running.runtime.begin_step()
    assert running.happened() == []


def test_copies_are_hidden_for_a_step_and_shown_again(running):
    running.runtime.gathered = Fake(running.events, "copies", shown=True, writeback=True)
    taken = ["take all", "take a", "take b", "copies take_changes"]
    with running.runtime.between_steps():
        step = running.happened()
    assert step == ["group barrier", *taken, "copies hide", *taken, "group barrier"]
    assert running.happened() == ["copies show"]
    refused(ValueError, (running.runtime.gather_full, "parameters are gathered already"))
    running.runtime.reshard()
    assert running.happened() == [*taken, "copies hide"]
    running.runtime.gathered = Fake(running.events, "copies", shown=True, writeback=False)
    running.runtime.reshard()
    assert running.happened() == ["group barrier", "copies hide"]
    assert running.runtime.gathered is None


def test_inputs_are_converted(monkeypatch):
    running = Running(monkeypatch, cast=torch.float64)
    running.model.double()
    seen = []
    running.model.a.forward = lambda x, *, other, number: seen.append((x.dtype, other.dtype, number)) or x
    running.model.a(torch.ones(2), other=torch.ones(2, dtype=torch.int64), number=3)
    running.model.a(x=torch.ones(2), other=torch.ones(2), number=3)
    assert seen == [(torch.float64, torch.int64, 3), (torch.float64, torch.float64, 3)]
