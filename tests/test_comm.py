"""Wrong arguments of the collectives: a clear error on every rank, nothing sent, the group usable afterwards."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

import axonmpi as ax
from axonmpi import ProcessGroup, ReduceOp
from axonmpi.errors import DtypeError

pytestmark = pytest.mark.ranks(2)
ON_REAL_RANKS = pytest.mark.real_ranks

Operation = Callable[[ProcessGroup, Tensor], object]

WRITING: dict[str, Operation] = {
    "all_reduce": lambda g, t: g.all_reduce(t),
    "all_reduce async": lambda g, t: g.all_reduce(t, async_op=True),
    "reduce": lambda g, t: g.reduce(t, 0),
    "scan": lambda g, t: g.scan(t, exclusive=True),
    "broadcast": lambda g, t: g.broadcast(t),
    "recv": lambda g, t: g.recv(t, 0),
    "irecv": lambda g, t: g.irecv(t, 0),
    "sync_gradient": lambda g, t: ax.sync_gradient(t, g),
    "sync_gradients": lambda g, t: ax.sync_gradients([torch.ones(2), t], g),
    "all_reduce_sum": lambda g, t: ax.all_reduce_sum(t, g),
    "all_reduce_mean": lambda g, t: ax.all_reduce_mean(t, g),
    "broadcast_from": lambda g, t: ax.broadcast_from(t, 0, g),
}
READING: dict[str, Operation] = {
    "all_gather": lambda g, t: g.all_gather(t),
    "reduce_scatter": lambda g, t: g.reduce_scatter(t),
    "gather": lambda g, t: g.gather(t),
    "scatter": lambda g, t: g.scatter(t, g.rank),  # each rank as its own source: others' tensors are not looked at
    "all_to_all": lambda g, t: g.all_to_all([torch.ones(2)] * (g.size - 1) + [t]),
    "isend": lambda g, t: g.isend(t, 0),
    "send": lambda g, t: g.send(t, (g.rank + 1) % g.size) if g.size > 1 else g.isend(t, 0),
}
WITH_ROOT: dict[str, Callable[[ProcessGroup, object], object]] = {
    "reduce": lambda g, root: g.reduce(torch.ones(2), root),
    "broadcast": lambda g, root: g.broadcast(torch.ones(2), root),
    "gather": lambda g, root: g.gather(torch.ones(2), root),
    "scatter": lambda g, root: g.scatter(torch.ones(2), root),
    "send": lambda g, root: g.send(torch.ones(2), root),
    "recv": lambda g, root: g.recv(torch.ones(2), root),
    "isend": lambda g, root: g.isend(torch.ones(2), root),
    "irecv": lambda g, root: g.irecv(torch.ones(2), root),
    "broadcast_object": lambda g, root: g.broadcast_object("x", root),
    "ax.reduce": lambda g, root: ax.reduce(torch.ones(2), root, group=g),
    "ax.gather_tensor": lambda g, root: ax.gather_tensor(torch.ones(2), root, g),
    "ax.scatter_tensor": lambda g, root: ax.scatter_tensor(torch.ones(2), root, g),
}
WITH_TAG: dict[str, Callable[[ProcessGroup, object], object]] = {
    "send": lambda g, tag: g.send(torch.ones(2), 0, tag),
    "recv": lambda g, tag: g.recv(torch.ones(2), 0, tag),
    "isend": lambda g, tag: g.isend(torch.ones(2), 0, tag),
    "irecv": lambda g, tag: g.irecv(torch.ones(2), 0, tag),
}


class Refusals:
    """A group of all ranks, of which wrong calls are made."""

    def __init__(self, world: ax.World) -> None:
        self.group = world.new_group(range(world.size))
        self.notes = self.group.backend.notes
        self.log = self.group.backend.notes = Mock()

    def expect(self, error: type[Exception], words: Iterable[str], call: Callable[..., object], *args: Any) -> None:
        """The call raises, with all of these words, and nothing is sent."""
        log = getattr(self.group.backend, "log", [])
        log.clear()
        with pytest.raises(error) as caught:
            call(*args)
        for word in words:
            assert word in str(caught.value), f"{call}{args}"
        assert log == self.log.mock_calls == [], f"{call}{args}"


@pytest.fixture
def refused(world: ax.World) -> Iterator[Refusals]:
    """A group for wrong calls, which works afterwards as if nothing had been called."""
    refusals = Refusals(world)
    yield refusals
    group = refusals.group
    group.backend.notes = refusals.notes
    group.all_reduce(tensor := torch.full((3,), float(group.rank)))
    ranks = list(range(group.size))
    assert (tensor.tolist(), group.all_gather_object(group.rank)) == ([sum(ranks)] * 3, ranks)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*quant")
def test_what_no_operation_takes(refused) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    on_meta = (f"the {refused.group.backend.name} backend takes tensors on cpu", "got one on meta", ".cpu()")
    not_dense = "expected a dense tensor"
    for operation in (*WRITING.values(), *READING.values()):
        for thing in ([1.0, 2.0], np.ones(2), 1.0, None):
            refused.expect(
                TypeError, ("expected a", "tensor", f"got {type(thing).__name__}"), operation, refused.group, thing
            )
        for tensor, error, words in (
            (torch.ones(3, device="meta"), ValueError, on_meta),
            (torch.eye(3).to_sparse(), ValueError, (not_dense, "got layout torch.sparse_coo", "use .to_dense()")),
            (nested, ValueError, (not_dense, "got a nested one", "use .to_padded_tensor()")),
            (quantized, DtypeError, ("dtype torch.qint8 cannot be sent", "convert them")),
        ):
            refused.expect(error, words, operation, refused.group, tensor)
    refused.expect(TypeError, ("wrap it in torch.as_tensor()",), refused.group.all_reduce, np.ones(2))


@ON_REAL_RANKS
@pytest.mark.ranks(2, 4)
def test_tensors_that_cannot_be_written_into(refused) -> None:
    leaf = torch.ones(3, requires_grad=True)
    with_grad = ("writes into a tensor that requires grad", "axonmpi.autograd", "torch.no_grad()")
    expanded = ("writes into an expanded tensor", "share memory", ".clone() it")
    for operation in WRITING.values():
        for tensor in (leaf, 2 * leaf, torch.nn.Parameter(torch.ones(2))):
            refused.expect(ValueError, with_grad, operation, refused.group, tensor)
        for tensor in (torch.ones(1).expand(3), torch.ones(2, 1, 3).expand(2, 4, 3)):
            refused.expect(ValueError, expanded, operation, refused.group, tensor)
    refused.group.backend.notes = refused.notes  # the short way of calls that were made before has to ask as well
    for _ in range(2):
        refused.group.all_reduce(torch.ones(3))
    refused.expect(ValueError, with_grad, refused.group.all_reduce, leaf)
    # What is only read may be expanded.
    assert refused.group.all_gather(torch.ones(1).expand(3)).tolist() == [1] * (3 * refused.group.size)


def test_a_root_that_is_no_rank(refused) -> None:
    size = refused.group.size
    for operation in WITH_ROOT.values():
        for root in (-1, size, size + 100):
            refused.expect(
                ValueError,
                ("expected a rank of the group", f"0 to {size - 1}, got {root}"),
                operation,
                refused.group,
                root,
            )
        for thing in ("0", 0.0, True, None, torch.tensor(0)):
            refused.expect(
                TypeError,
                ("expected a rank of the group as an int", f"got {thing!r}"),
                operation,
                refused.group,
                thing,
            )
    refused.expect(
        ValueError,
        (f"send: rank {refused.group.rank} would wait for itself", "use isend"),
        refused.group.send,
        torch.ones(2),
        refused.group.rank,
    )


def test_dimensions_and_tags_that_there_are_not(refused) -> None:
    group = refused.group
    for operation in (group.all_gather, lambda t, dim: group.reduce_scatter(t, dim=dim)):
        for dim in (2, -3):
            refused.expect(
                IndexError,
                ("dim: expected -2 to 1 for a tensor of 2 dimensions", f"got {dim}"),
                operation,
                torch.ones(2, 2),
                dim,
            )
        for thing in ("0", 0.0, True, None):
            refused.expect(
                TypeError, ("dim: expected an int", f"got {thing!r}"), operation, torch.ones(2, 2), thing
            )
    refused.expect(
        IndexError,
        ("expected a tensor of at least 1 dimension, got a 0-d one", "use .reshape(1)"),
        group.reduce_scatter,
        torch.tensor(1.0),
    )
    deep = torch.ones((1,) * 13)
    for tensor in (torch.tensor(1.0), deep):
        refused.expect(
            ValueError,
            ("scatter: expected a tensor of 1 to 12 dimensions", f"got {tensor.dim()}"),
            group.scatter,
            tensor,
            group.rank,
        )
    refused.expect(ValueError, ("at most 12 dimensions",), group.all_to_all, [deep] * group.size)
    for operation, tag in itertools.product(WITH_TAG.values(), (-1, 32768, 2**40, 1.0, "1", True, None)):
        refused.expect(ValueError, ("tag: expected an int from 0 to 32767", f"got {tag!r}"), operation, group, tag)


REDUCING: tuple[Callable[[ProcessGroup, Tensor, object], object], ...] = (
    lambda g, t, op: g.all_reduce(t, op),
    lambda g, t, op: g.all_reduce(t, op, async_op=True),
    lambda g, t, op: g.reduce(t, 0, op),
    lambda g, t, op: g.reduce_scatter(t, op),
    lambda g, t, op: g.scan(t, op),
    lambda g, t, op: ax.all_reduce(t, op, g),
    lambda g, t, op: ax.reduce(t, 0, op, g),
)


@ON_REAL_RANKS
@pytest.mark.ranks(2, 4)
def test_something_else_than_a_reduction(refused) -> None:
    group, tensor = refused.group, torch.ones(3)
    group.backend.notes = refused.notes
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT):  # equal to 0 and 1 as numbers, and remembered from now on
        group.all_reduce(tensor, op)
        group.all_reduce(tensor, op, async_op=True).wait()
        group.reduce(tensor, 0, op)
        group.reduce_scatter(tensor, op)
        group.scan(tensor, op)
    others = (0, 1, True, None, torch.add, torch.distributed.ReduceOp.SUM, [ReduceOp.SUM])
    for op, operation in itertools.product(others, REDUCING):
        words = ("op: expected an axonmpi.ReduceOp", f"got {op!r}")
        refused.expect(TypeError, words, operation, refused.group, tensor, op)


def test_what_a_scan_does_not_take(refused) -> None:
    group, tensor = refused.group, torch.ones(3)
    for op in (ReduceOp.AVERAGE, "average"):
        words = ("op: expected SUM, PRODUCT, MIN or MAX for a scan", "got AVERAGE")
        refused.expect(ValueError, words, group.scan, tensor, op)
    for flag in (None, 1, group):
        refused.expect(
            TypeError, ("exclusive: expected True or False",), partial(group.scan, exclusive=flag), tensor
        )
        refused.expect(TypeError, ("exclusive: expected",), partial(ax.scan, group=group, exclusive=flag), tensor)


def test_reductions_that_a_dtype_does_not_allow(refused) -> None:
    integers = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.uint16)
    for op, dtypes, advice in (
        (ReduceOp.AVERAGE, integers, ".float() or use ReduceOp.SUM"),
        (ReduceOp.MIN, (torch.complex64, torch.complex128), "reduce .abs() or .real"),
        (ReduceOp.MAX, (torch.complex64, torch.complex128), "reduce .abs() or .real"),
    ):
        for dtype, operation in itertools.product(dtypes, REDUCING):
            refused.expect(
                DtypeError,
                (f"ReduceOp.{op.name} needs", f"got {dtype}", advice),
                operation,
                refused.group,
                torch.ones(3).to(dtype),
                op,
            )
    assert {TypeError, ValueError} <= set(DtypeError.__mro__)
    integer, is_average = torch.ones(3).long(), ("ReduceOp.AVERAGE needs a floating-point or complex tensor, got",)
    for function in (ax.all_reduce_mean, ax.reduce_scatter_mean, ax.sync_gradient):
        refused.expect(DtypeError, is_average, function, integer, refused.group)
    refused.expect(DtypeError, is_average, ax.sync_gradients, [torch.ones(3), integer], refused.group)
    refused.expect(
        DtypeError, ("MAX needs an ordered dtype",), ax.all_reduce_max, torch.ones(2) * 1j, refused.group
    )


def test_lists_of_something_else(refused) -> None:
    group, size = refused.group, refused.group.size
    for count in (0, size - 1, size + 1):
        refused.expect(
            ValueError,
            (f"all_to_all: expected {size} tensors, one for each rank of the group", f"got {count}"),
            group.all_to_all,
            [torch.ones(1)] * count,
        )
    for thing in (torch.ones(size), (torch.ones(1) for _ in range(size)), 3):
        refused.expect(
            TypeError,
            ("all_to_all: expected a list of tensors, one a rank", f"got {type(thing).__name__}"),
            group.all_to_all,
            thing,
        )
    for things, words in (
        (torch.ones(3), ("expected a list of tensors, got one tensor", "put it into a list")),
        ((torch.ones(2) for _ in range(2)), ("expected a list of tensors, got generator", "list(...)")),
        ([torch.ones(2), 1.0], ("expected a list of tensors", "got float at position 1")),
        ([None, torch.ones(2)], ("expected a list of tensors", "got NoneType at position 0")),
    ):
        refused.expect(TypeError, words, ax.sync_gradients, things, group)
    with pytest.raises((TypeError, AttributeError, ValueError), match=r"[Pp]ickle|get local object"):
        group.all_gather_object(lambda: None)
    assert refused.log.mock_calls == []


def test_ranks_of_a_new_group(world, refused) -> None:
    size = world.size
    backend = world.default_group.backend
    notes, backend.notes = backend.notes, Mock()
    for ranks, error, words in (
        ([], ValueError, ("ranks: expected at least one rank, got none",)),
        ([0, 0], ValueError, ("ranks: expected different ranks, got [0, 0]",)),
        ([size], ValueError, (f"ranks: expected a rank of the group, 0 to {size - 1}", f"got {size}")),
        ([-1], ValueError, ("ranks: expected a rank of the group", "got -1")),
        (["0"], TypeError, ("ranks: expected a rank of the group as an int, got '0'",)),
        ([0.0], TypeError, ("ranks: expected a rank of the group as an int, got 0.0",)),
        ([False], TypeError, ("ranks: expected a rank of the group as an int, got False",)),
        (0, TypeError, ("ranks: expected a list of ranks, got 0",)),
        (None, TypeError, ("ranks: expected a list of ranks, got None",)),
    ):
        refused.expect(error, words, world.new_group, ranks)
        refused.expect(error, words, ax.new_group, ranks)
    log, backend.notes = backend.notes, notes
    assert log.mock_calls == []
