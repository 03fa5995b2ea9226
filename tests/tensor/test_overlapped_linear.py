"""What divided layers send, counted in the log of mock ranks, and that backward computes while it sends."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compare import assert_precise
from helpers.steps import again
from helpers.transformer_parts import Sent, part, randn, whole_linear
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

import axonmpi as ax
from axonmpi.pipeline.runtime.split_backward import input_gradients
from axonmpi.tensor.regions import enter
from axonmpi.testing import run_ranks

pytestmark = pytest.mark.not_over_double("looks at the mock's log of operations")

Counts = dict[str, int]


class Block(nn.Module):
    """Column layers, several of which share their input, and a row layer."""

    def __init__(self, columns: int, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.options = {"sequence_parallel": sequence_parallel}
        self.columns = nn.ModuleList(
            ax.ColumnParallelLinear.from_linear(
                whole_linear(8, 16, seed=seed), input_is_entered=columns > 1, **self.options
            )
            for seed in range(columns)
        )
        self.row = ax.RowParallelLinear.from_linear(whole_linear(16, 8, seed=9), **self.options)

    def project(self, x: Tensor) -> list[Tensor]:
        shared = enter(x, self.row.process_group, **self.options) if len(self.columns) > 1 else x
        return [column(shared) for column in self.columns]

    def forward(self, x: Tensor) -> Tensor:
        return self.row(nn.functional.gelu(sum(self.project(x))))


def in_forward_and_backward(
    make: Callable[[], nn.Module], *, length: int = 4, use: Callable[[nn.Module, Tensor], Tensor] | None = None
) -> list[Counts]:
    """What two ranks send in forward and in backward."""

    def body(world: ax.World) -> list[Counts]:
        model = make()
        x = randn(2, length, 8).requires_grad_()
        sent = Sent(world)
        output = model(x) if use is None else use(model, x)
        forward = sent.take()
        output.sum().backward()
        return [forward, sent.take()]

    first, second = run_ranks(2, body)
    assert first == second
    return first


def attention(pairs: int, **options: Any) -> nn.Module:
    options |= {"num_kv_heads": pairs, "rotary": True, "dtype": torch.float64}
    return ax.tensor_parallel_attention(8, 4, head_dim=4, **options)


def by_plan(sequence_parallel: bool) -> nn.Module:
    model = nn.Sequential(whole_linear(8, 16), nn.Tanh(), whole_linear(16, 8))
    return ax.tensor_parallelize(model, {"0": "column", "2": "row"}, sequence_parallel=sequence_parallel)


BLOCKS: dict[str, Callable[[bool], nn.Module]] = {
    "a pair": lambda sequence: Block(1, sequence_parallel=sequence),
    "three siblings": lambda sequence: Block(3, sequence_parallel=sequence),
    "mlp": lambda sequence: ax.ParallelMLP(8, 16, sequence_parallel=sequence, dtype=torch.float64),
    "gated": lambda sequence: ax.ParallelGatedMLP(8, 16, sequence_parallel=sequence, dtype=torch.float64),
    "attention": lambda sequence: attention(4, sequence_parallel=sequence),
    "two pairs of heads": lambda sequence: attention(2, sequence_parallel=sequence),
    "one pair of heads": lambda sequence: attention(1, sequence_parallel=sequence, bias=False),
    "by plan": by_plan,
}


@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)
def test_a_block_sums_once_forward_and_once_backward(make: Callable[[bool], nn.Module]) -> None:
    """With sequence parallelism it gathers and scatters, and backward gathers the input again."""
    assert in_forward_and_backward(lambda: make(False)) == [{"all_reduce": 1}, {"all_reduce": 1}]
    assert in_forward_and_backward(lambda: make(True)) == [
        {"all_gather": 1, "reduce_scatter": 1},
        {"all_gather": 2, "reduce_scatter": 1},
    ]


def test_other_layers() -> None:
    column = functools.partial(ax.ColumnParallelLinear.from_linear, whole_linear(8, 16), gather_output=True)
    row = functools.partial(ax.RowParallelLinear.from_linear, whole_linear(8, 6), input_is_parallel=False)
    embedding = functools.partial(ax.VocabParallelEmbedding.from_embedding, nn.Embedding(7, 4))
    of_words = functools.partial(in_forward_and_backward, use=lambda model, x: model(torch.zeros(2, 4).long()))
    assert in_forward_and_backward(column) == [{"all_gather": 1}, {"all_reduce": 1}]
    assert in_forward_and_backward(row) == [{"all_reduce": 1}, {"all_gather": 1}]
    assert of_words(embedding) == [{"all_reduce": 1}, {}]
    assert of_words(lambda: embedding(sequence_parallel=True)) == [{"reduce_scatter": 1}, {"all_gather": 1}]


def test_without_gradients_and_with_a_part_of_them() -> None:
    # Frozen weights need the input no more.
    found = in_forward_and_backward(lambda: Block(3, sequence_parallel=True).requires_grad_(False))
    assert found[1] == {"all_gather": 1, "reduce_scatter": 1}

    # An input without a gradient has no sum.
    found = in_forward_and_backward(lambda: Block(2), use=lambda model, x: model(x.detach()))
    assert found == [{"all_reduce": 1}, {}]

    # Siblings of which one is not used for the loss.
    found = in_forward_and_backward(lambda: Block(2), use=lambda model, x: model.project(x)[0] + 0 * x.sum())
    assert found == [{}, {"all_reduce": 1}]


def entered_for_several(model: nn.Module, x: Tensor) -> Tensor:
    """An entered input is summed once with what is computed of it."""
    x = enter(x, model.row.process_group)
    return model.row(model.columns[0](x) * model.columns[1](x) + model.columns[2](x.sin()))


def cast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model.float()(x.float()).float()


# forward is computed again, up to the last thing that was kept
checkpointed = functools.partial(again, reentrant=False)


@pytest.mark.parametrize(
    "use", [entered_for_several, cast, checkpointed], ids=["entered_for_several", "cast", "checkpointed"]
)
def test_no_more_is_sent(use: Callable[[nn.Module, Tensor], Tensor]) -> None:
    assert in_forward_and_backward(lambda: Block(3), use=use) == [{"all_reduce": 1}, {"all_reduce": 1}]


def test_first_values() -> None:
    """Nobody draws random numbers while rank 0 does; then its generator's state, and a part of each parameter."""

    def body(world: ax.World) -> list[str]:
        before = len(world.default_group.backend.log)
        ax.ColumnParallelLinear(4, 4)
        ax.RowParallelLinear(4, 4, device="meta")
        ax.RowParallelLinear.from_linear(whole_linear(4, 4))
        return [entry.operation for entry in list(world.default_group.backend.log)[before:]]

    assert run_ranks(2, body) == [["barrier", "broadcast", "scatter", "scatter"]] * 2


# ---- computing meanwhile -----------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Notes matrix products."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self._events.append("product")
        return func(*args, **(kwargs or {}))


def note_operations(backend: Any, events: list[str]) -> None:
    """Note which operations are started and waited for, or called at once, until the backend is gone."""

    def noted(name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        is_async = options.get("async_op", False)
        events.append(f"start {name}" if is_async else name)
        result = call(*args, **options)
        if is_async:
            result.result = functools.partial(noted, f"wait for {name}", result.result)
        return result

    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        setattr(backend, name, functools.partial(noted, name, getattr(backend, name)))


THREE_SIBLINGS = [event for index in (2, 1, 0) for event in ("product", "product", f"weight {index}")]
EVENTS = {
    "the sum goes on while the weight is computed": (
        (1, False, True),
        ["product", "start all_reduce", "product", "wait for all_reduce", "weight 0"],
    ),
    "layers that share their input sum when all of them are done": (
        (3, False, True),
        [*THREE_SIBLINGS, "all_reduce"],
    ),
    "with sequence parallelism gathering goes on too": (
        (1, True, True),
        [
            *("start all_gather", "product", "start reduce_scatter"),
            *("wait for all_gather", "product", "wait for reduce_scatter", "weight 0"),
        ],
    ),
    "siblings with sequence parallelism": (
        (2, True, True),
        [
            *("start all_gather", "product", "wait for all_gather", "product", "weight 1"),
            *("product", "product", "weight 0", "reduce_scatter"),
        ],
    ),
    "without cores to spare": ((1, False, False), ["product", "all_reduce", "product", "weight 0"]),
    "without cores to spare, sequence": (
        (1, True, False),
        ["all_gather", "product", "reduce_scatter", "product", "weight 0"],
    ),
}


@pytest.mark.parametrize(("setting", "expected"), EVENTS.values(), ids=EVENTS)
def test_events_in_backward(setting: tuple[int, bool, bool], expected: list[str]) -> None:
    columns, sequence_parallel, overlaps = setting

    def body(world: ax.World) -> list[str]:
        events: list[str] = []
        backend = world.default_group.backend
        backend.overlaps = overlaps
        model = Block(columns, sequence_parallel=sequence_parallel)
        for index, column in enumerate(model.columns):
            column.weight.register_hook(lambda gradient, index=index: events.append(f"weight {index}"))
        hidden = torch.cat(model.project(randn(2, 4, 8).requires_grad_()), -1)
        note_operations(backend, events)
        with Products(events):
            hidden.sum().backward()
        return events

    assert run_ranks(2, body) == [expected] * 2


# ---- backward in two halves --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_backward_in_halves(sequence_parallel: bool) -> None:
    """As pipelines without bubbles do it: the input's gradient first, weights' later, and nothing is sent twice."""

    def body(world: ax.World) -> list[Counts]:
        at_once, model = (Block(3, sequence_parallel=sequence_parallel) for _ in range(2))
        dim = 1 if sequence_parallel else None
        expected, leaf = (part(randn(2, 8, 8), world, dim).requires_grad_() for _ in range(2))
        output = at_once(expected.exp())
        output.backward(output.detach().sin())
        output = model(leaf.exp())
        sent = Sent(world)
        weights = input_gradients([get_gradient_edge(output)], [output.detach().sin()], [leaf])
        counts = [sent.take()]
        assert [column.weight.grad for column in model.columns] == [None] * 3
        assert_precise(leaf.grad, expected.grad)
        weights.compute()
        assert_precise([p.grad for p in model.parameters()], [p.grad for p in at_once.parameters()])
        return [*counts, sent.take()]

    in_sequence = [{"all_gather": 1, "reduce_scatter": 1}, {"all_gather": 1}]
    assert run_ranks(2, body) == [in_sequence if sequence_parallel else [{"all_reduce": 1}, {}]] * 2


def test_under_checkpointing_forward_is_not_computed_for_each_half() -> None:
    def body(world: ax.World) -> list[Counts]:
        model, x = Block(1, sequence_parallel=True), randn(2, 4, 8).requires_grad_()
        output = again(model, x.exp(), False)
        sent = Sent(world)
        weights = input_gradients([get_gradient_edge(output)], [output.detach()], [x])
        counts = [sent.take()]
        weights.compute()
        return [*counts, sent.take()]

    assert run_ranks(2, body) == [[{"all_gather": 3, "reduce_scatter": 1}, {}]] * 2
