"""Cutting models into stages: balance against brute force, stages against the model, times by a set clock."""

import copy
import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from helpers.compare import assert_equal, refused
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.pipeline import pop, split_module, splitting, stash
from axonmpi.pipeline.splitting import balanced_bounds

# ---- balance ----------------------------------------------------------------------------------------------------

Row = list[dict[int, int]]


@st.composite
def rows(draw: st.DrawFn) -> tuple[Row, int]:
    """Pieces made of a few things that cost something, which they share; and a number of parts."""
    highest = draw(st.sampled_from([1, 3, 100]))  # small costs make ties
    costs = draw(st.lists(st.integers(0, highest), min_size=6, max_size=6))
    pieces = draw(st.lists(st.sets(st.integers(0, 5), max_size=3), min_size=1, max_size=8))
    return [{key: costs[key] for key in piece} for piece in pieces], draw(st.integers(1, len(pieces)))


def load(pieces: Sequence[dict[int, int]]) -> int:
    return sum({key: cost for piece in pieces for key, cost in piece.items()}.values())


def best_cut(row: Row, parts: int) -> list[tuple[int, int]]:
    """Try all cuts: the cheapest most expensive part, then even numbers of pieces, then more in the first parts."""

    def rank(bounds: list[tuple[int, int]]) -> tuple[int, int, list[int]]:
        sizes = [stop - start for start, stop in bounds]
        most = max(load(row[start:stop]) for start, stop in bounds)
        return most, sum(size**2 for size in sizes), [-size for size in sizes]

    inner = itertools.combinations(range(1, len(row)), parts - 1)
    return min((list(itertools.pairwise((0, *cuts, len(row)))) for cuts in inner), key=rank)


@given(rows())
def test_no_cut_is_better(drawn):
    row, parts = drawn
    assert balanced_bounds(row, parts) == best_cut(row, parts)


def test_known_cuts():
    for costs, parts, expected in [
        ([1] * 10, 4, [3, 3, 2, 2]),
        ([0] * 5, 2, [3, 2]),
        ([9, 1, 1, 1, 1], 3, [1, 2, 2]),
        ([1, 1, 1, 1, 9], 2, [4, 1]),
        ([10**15, 10**15 + 1, 1], 2, [1, 2]),  # beyond what float32 tells apart
        ([4, 4, 1, 4, 4], 3, [2, 2, 1]),
        ([7], 1, [1]),
    ]:
        bounds = balanced_bounds([{place: cost} for place, cost in enumerate(costs)], parts)
        assert [stop - start for start, stop in bounds] == expected, costs


def test_many_pieces():
    row = [{place: place * 7919 % 101} for place in range(600)]
    bounds = balanced_bounds(row, 32)
    assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]
    assert max(load(row[start:stop]) for start, stop in bounds) < 1.2 * load(row) / 32


# ---- stages -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def run(stages: Sequence[nn.Module], value: Tensor) -> Tensor:
    for stage in stages:
        value = stage(value)
    return value


def linears(stages: Sequence[nn.Module]) -> list[list[str]]:
    """The names of the linear layers in each stage."""
    return [[name for name, module in stage.named_modules() if isinstance(module, nn.Linear)] for stage in stages]


def assert_splits(model: nn.Module, stages: Sequence[nn.Module], sample: Tensor) -> None:
    """The stages have the model's modules, under its names, and compute what it computes."""
    assert_equal(run(stages, sample), model(sample) if isinstance(model, nn.Sequential) else run(model, sample))
    assert identities(stages) == identities([model])
    assert {type(stage) for stage in stages} == {nn.Sequential}
    containers = [module for stage in stages for module in stage.modules() if type(module) is nn.Sequential]
    assert {module.training for module in containers} == {model.training}


def identities(stages: Sequence[nn.Module]) -> list[tuple[str, int]]:
    """Return the names of parameters and buffers, and which tensors they are."""
    states = [stage.state_dict(keep_vars=True) for stage in stages]
    return [(name, id(value)) for state in states for name, value in state.items()]


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def pair() -> nn.Sequential:
    return nn.Sequential(linear(), linear())


def test_nested_models_are_opened_as_far_as_needed():
    inner = nn.Sequential(OrderedDict(first=pair(), second=nn.Linear(4, 4)))
    model = nn.Sequential(OrderedDict(start=pair(), middle=inner, nothing=nn.Sequential(), end=nn.Linear(4, 4)))
    for num_stages, training in itertools.product(range(1, 8), (True, False)):
        model.train(training)
        assert_splits(model, split_module(model, num_stages), torch.randn(3, 4))
    first, second = ["start.0", "start.1"], ["middle.first.0", "middle.first.1"]
    for num_stages, expected in {
        2: [first, [*second, "middle.second", "end"]],
        5: [first, second, ["middle.second"], [], ["end"]],
        7: [*([name] for name in (*first, *second, "middle.second")), [], ["end"]],
    }.items():
        assert linears(split_module(model, num_stages)) == expected
    refused(
        ValueError,
        (
            partial(split_module, model, 8),
            "num_stages: expected 1 to 7, as many as the model has pieces, got 8: use",
        ),
    )


def test_what_a_container_does_besides_stays_with_it():
    class Doubling(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    seen, (hooked, replaced, with_parameter) = [], [pair() for _ in range(3)]
    hooked.register_forward_hook(lambda *_: seen.append("hook"))
    replaced.forward = lambda x: x + 1
    with_parameter.register_parameter("extra", nn.Parameter(torch.ones(1)))
    of_its_own = r"module: a (Doubling|Sequential) with a forward, hooks, .* of its own"
    for special in (Doubling(linear(), linear()), hooked, replaced, with_parameter):
        model = nn.Sequential(special, nn.Sequential(linear(), nn.Tanh()))
        assert_splits(model, split_module(model, 3), torch.randn(2, 4))
        refused(
            ValueError,
            (partial(split_module, model, 4), "num_stages: expected 1 to 3, "),
            (partial(split_module, special, 2), of_its_own),
        )
    assert seen


def test_head_blocks_and_tail():
    parts = [
        nn.Linear(5, 8),
        nn.ModuleList(Block(8) for _ in range(6)),
        nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3)),
    ]
    sample = torch.randn(4, 5)
    for model in (parts, tuple(parts), nn.ModuleList(parts)):
        stages = split_module(model, 3)
        assert_equal(run(stages, sample), run([parts[0], *parts[1], parts[2]], sample))
        assert identities(stages) == identities([nn.ModuleList(parts)])
    assert [sorted({name.split(".mlp")[0] for name in stage}) for stage in linears(stages)] == [
        ["0", "1.0", "1.1"],
        ["1.2", "1.3"],
        ["1.4", "1.5", "2.1"],
    ]
    assert [stage.training for stage in split_module(parts, 3)] == [True] * 3
    nn.ModuleList(parts).eval()
    assert [stage.training for stage in split_module(parts, 3)] == [False] * 3
    assert [stage.training for stage in split_module(nn.ModuleList(parts), 3)] == [True] * 3


def test_modules_and_parameters_that_come_several_times():
    shared, activation = Block(4), nn.Tanh()
    model = nn.Sequential(shared, activation, shared, activation, nn.Linear(4, 4))
    for num_stages in range(1, 6):
        stages = split_module(model, num_stages)
        assert_equal(run(stages, torch.ones(2, 4)), model(torch.ones(2, 4)))
        assert [name for stage in stages for name in stage._modules] == ["0", "1", "2", "3", "4"]
    tied = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 30), nn.Linear(30, 30, bias=False))
    tied[1].weight = tied[0].weight
    # two layers of one weight cost hardly more than one, if they are in the same stage
    assert linears(split_module(tied, 2)) == [["0", "1"], ["2"]]
    tied[2].weight = tied[0].weight
    first, last = split_module(tied, 2)
    assert next(first.parameters()) is next(last.parameters()) is tied[0].weight


def test_frozen_parameters_count():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[0].requires_grad_(False)
    assert linears(split_module(model, 2)) == [["0", "1"], ["2", "3"]]


# ---- times ------------------------------------------------------------------------------------------------------


class Clock(threading.local):
    """Time that passes only while pieces compute; each thread has a time of its own."""

    now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(splitting, "perf_counter_ns", clock := Clock())
    return clock


class Takes(nn.Module):
    """Lets time pass: in the first run the first number, in the next the next, and so on."""

    def __init__(self, clock: Clock, *nanoseconds: int) -> None:
        super().__init__()
        self.clock, self.nanoseconds = clock, itertools.cycle(nanoseconds)

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += next(self.nanoseconds)
        return x


def sizes(stages: Sequence[nn.Sequential]) -> list[int]:
    return [len(stage) for stage in stages]


def by_time(model, num_stages: int = 2, sample=torch.ones(1), **options) -> list[nn.Sequential]:  # noqa: B008
    return split_module(model, num_stages, balance="time", sample=sample, **options)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([[20], [1], [1], [1]], [1, 3]),
        ([[1], [1], [1], [20]], [3, 1]),
        ([[1], [1], [20], [20]], [3, 1]),
        # the median of several runs, without the first
        ([[1, 90], [5], [5], [5], [5]], [1, 4]),
        ([[900, 1], [5], [5], [5], [5]], [3, 2]),
        ([[1, 1, 90, 90], [5], [5], [5], [5]], [1, 4]),
        ([[1, 90, 90, 1], [5], [5], [5], [5]], [1, 4]),
        ([[90, 1, 900, 1], [5], [5], [5], [5]], [3, 2]),
        ([[1, 1, 1, 900], [5], [5], [5], [5]], [3, 2]),
    ],
)
def test_each_piece_is_timed(clock, costs, expected):
    repeats = max(1, len(costs[0]) - 1)
    assert sizes(by_time([Takes(clock, *nanoseconds) for nanoseconds in costs], repeats=repeats)) == expected


def test_by_real_time():
    """Where the cut is depends on the machine."""
    model, tokens = nn.Sequential(nn.Embedding(400, 32), nn.Linear(32, 32), nn.Linear(32, 5)), torch.arange(400)
    assert sizes(split_module(model, 2)) == [1, 2]
    assert_splits(model, by_time(model, 2, tokens), tokens)


class Drawing(nn.Module):
    """Draws from all kinds of generators, and has all kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("cache", None)
        self.register_buffer("wide", torch.zeros(1).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.cache = x.mean(0)
        if not hasattr(self, "late"):
            self.register_buffer("late", x.clone())
        noise = torch.rand(x.shape, generator=self.generator)
        return F.relu_(self.norm(F.dropout(x + noise, 0.5, self.training)))


def seen_of(model: nn.Module) -> list[object]:
    """Return the identities and versions of buffers by name, and the modes of modules."""
    buffers = [(name, id(buffer), buffer._version) for name, buffer in model.named_buffers()]
    return [*buffers, *(module.training for module in model.modules())]


def test_nothing_is_left_behind():
    model = nn.Sequential(nn.ReLU(inplace=True), Drawing(), nn.Dropout(), nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    model[4].register_buffer("shared", model[1].norm.running_mean)
    sample = torch.randn(6, 4).requires_grad_()
    failing = nn.Sequential(*model, nn.Linear(5, 5))
    before = copy.deepcopy(model), sample.clone(), torch.get_rng_state(), model[1].generator.get_state()
    seen_before = seen_of(model)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            by_time(model, 2, sample)
            refused(ValueError, (partial(by_time, failing, 2, sample), "failed"))
            assert torch.is_grad_enabled() == grad
    assert seen_of(model) == seen_before
    assert_equal(dict(model.named_buffers()), dict(before[0].named_buffers()))
    assert_equal([sample, torch.get_rng_state(), model[1].generator.get_state()], before[1:])
    assert (model[1].cache, {parameter.grad for parameter in model.parameters()}) == (None, {None})


def test_pieces_compute_as_they_will_in_training():
    seen = []

    class Seeing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.training, torch.is_grad_enabled()))
            return x

    by_time(nn.Sequential(Seeing(), Seeing().eval()), repeats=2)
    assert seen == [(True, False), (False, False)] * 3


def test_nested_samples_and_connections_past_stages(clock):
    class Joining(nn.Module):
        def forward(self, given: dict[str, tuple[Tensor, Tensor] | int]) -> tuple[Tensor, int]:
            first, second = given["pair"]
            stash("first", first.clone())
            return first.add_(second), given["times"]

    class Using(nn.Module):
        def forward(self, given: tuple[Tensor, int]) -> Tensor:
            return given[0] * given[1] + pop("first")

    sample = {"pair": (torch.ones(2), torch.ones(2)), "times": 3}
    stash("first", "of someone else")
    stages = by_time([Joining(), Takes(clock, 9), Using()], 2, sample)
    assert (pop("first"), sample["pair"][0].tolist()) == ("of someone else", [1, 1])
    assert run(stages, sample).tolist() == [7, 7]
    sample["pair"][0].fill_(1)
    refused(
        ValueError,
        (
            partial(by_time, [Joining(), nn.Linear(2, 2)], 2, sample),
            r"'1', a Linear, failed on float32\[2\]: TypeError",
        ),
        (partial(pop, "first"), r"pop\('first'\): nothing was stashed"),
    )


# ---- groups -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_all_ranks_cut_as_rank_0_of_the_group_does(world, clock):
    costs = [[9, 1, 1, 1], [1, 1, 1, 9], [1, 1, 1, 1]][world.rank]
    model = nn.Sequential(*(Takes(clock, cost) for cost in costs))
    assert [sizes(by_time(model, process_group=group)) for group in (None, world.default_group)] == [[1, 3]] * 2
    group = world.new_group(list(reversed(range(world.size))))
    assert sizes(by_time(model, process_group=group)) == ([3, 1] if world.size == 2 else [2, 2])
    group.close()
    sample = torch.ones(1) if world.rank == 0 else None
    assert sizes(split_module(model, 2, balance="time", sample=sample)) == [1, 3]
    assert sizes(by_time(model, process_group=ax.ProcessGroup.mock())) == [[1, 3], [3, 1], [2, 2]][world.rank]


@pytest.mark.ranks(3)
def test_what_fails_on_rank_0_is_raised_on_all_ranks(world):
    failing = nn.Sequential(linear(), nn.Linear(3, 3))
    no_sample = r"sample: balance='time' needs the input of the first stage .* got None"
    plans = ("rank 0: 1 stages of 2 pieces", "rank 1: 2 stages of 2 pieces", "rank 2: 2 stages of 3 pieces")
    model, sample = nn.Sequential(*(linear() for _ in range(3 if world.rank == 2 else 2))), torch.ones(2, 4)
    refused(
        ValueError,
        (partial(by_time, failing, 2, sample), r"piece 2 of 2, '1', a Linear, failed on float32\[2, 4\]"),
        (partial(split_module, failing, 2, balance="time"), no_sample),
        (partial(by_time, model, 2 if world.rank else 1, sample), r"\n *".join(plans)),
    )
    in_group = partial(by_time, model, 2, sample, process_group=world.new_group([0, 1]))
    if world.rank == 2:
        refused(ValueError, (in_group, "rank 2 is not in this group"))
    else:
        assert sizes(in_group()) == [1, 1]


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (
            linear,
            {},
            TypeError,
            "module: expected a .*Sequential or a sequence of modules, got Linear: give its head",
        ),
        (lambda: {"a": linear()}, {}, TypeError, "module: expected .* a sequence of modules, got dict"),
        (lambda: nn.ModuleDict({"a": linear()}), {}, TypeError, "a sequence of modules, got ModuleDict"),
        (
            lambda: [linear(), F.relu],
            {},
            TypeError,
            "module: expected modules, got '1', a function: call it in the",
        ),
        (lambda: [linear(), [linear()]], {}, TypeError, "module: expected modules, got '1', a list"),
        (
            lambda: [linear(), nn.ModuleDict()],
            {},
            TypeError,
            "module: '1', a ModuleDict, has no forward: give the mod",
        ),
        (lambda: nn.Sequential(), {}, ValueError, "module: expected at least one module to run, got none"),
        (lambda: [nn.ModuleList()], {}, ValueError, "module: expected at least one module to run, got none"),
        (
            lambda: [linear(), nn.LazyLinear(3)],
            {},
            ValueError,
            "module: '1', a LazyLinear, .* run one forward before",
        ),
        (
            lambda: [linear()],
            {},
            ValueError,
            "num_stages: expected 1 to 1, as many as the model has pieces, got 2: ",
        ),
        (lambda: [linear()] * 2, {"num_stages": 0}, ValueError, "num_stages: expected at least 1, got 0"),
        (lambda: [linear()] * 2, {"num_stages": 2.0}, TypeError, "num_stages: expected an integer, got 2.0"),
        (lambda: [linear()] * 2, {"num_stages": True}, TypeError, "num_stages: expected an integer, got True"),
        (lambda: [linear()] * 2, {"repeats": 0}, ValueError, "repeats: expected at least 1, got 0"),
        (
            lambda: [linear()] * 2,
            {"balance": "flops"},
            ValueError,
            "balance: .* 'parameters' or 'time', got 'flops'",
        ),
        (lambda: [linear()] * 2, {"balance": ["time"]}, ValueError, r"balance: expected .* got \['time'\]"),
        (
            lambda: [linear()] * 2,
            {"balance": "time"},
            ValueError,
            "sample: balance='time' needs the input .* got None",
        ),
        (lambda: [linear()] * 2, {"process_group": 3}, TypeError, "process_group: expected .* or None, got int"),
        (
            lambda: nn.Sequential(linear(), nn.Sequential(linear(), nn.Linear(5, 5))),
            {"num_stages": 3, "balance": "time", "sample": torch.ones(2, 4)},
            ValueError,
            r"sample: piece 3 of 3, '1.1', a Linear, failed on float32\[2, 4\]: RuntimeError: .*\nGive",
        ),
    ],
)
def test_what_cannot_be_cut(make, arguments, error, message):
    refused(error, (partial(split_module, make(), **{"num_stages": 2, **arguments}), message))
