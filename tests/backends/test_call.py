"""Fingerprints of calls: different for whatever the ranks have to agree on."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from axonmpi import ReduceOp
from axonmpi.backends.buffers import DESCRIPTION_BYTES, describe, described
from axonmpi.backends.call import Call, mismatch_error
from axonmpi.backends.checks import Sizes
from axonmpi.backends.ranks import check_parts
from axonmpi.backends.reduction import DTYPES

FLOAT, SHAPE = torch.float32, (3, 4)
CALLS = {
    "all_reduce(float32 [3, 4], SUM)": Call("all_reduce", FLOAT, SHAPE, ReduceOp.SUM),
    "all_reduce(float32 [4, 3], SUM)": Call("all_reduce", FLOAT, (4, 3), ReduceOp.SUM),
    "all_reduce(float32 [12], SUM)": Call("all_reduce", FLOAT, (12,), ReduceOp.SUM),
    "all_reduce(float32 [], SUM)": Call("all_reduce", FLOAT, (), ReduceOp.SUM),
    "all_reduce(float32 [0], SUM)": Call("all_reduce", FLOAT, (0,), ReduceOp.SUM),
    "all_reduce(float64 [3, 4], SUM)": Call("all_reduce", torch.float64, SHAPE, ReduceOp.SUM),
    "all_reduce(int32 [3, 4], SUM)": Call("all_reduce", torch.int32, SHAPE, ReduceOp.SUM),
    "all_reduce(float32 [3, 4], MAX)": Call("all_reduce", FLOAT, SHAPE, ReduceOp.MAX),
    "reduce(float32 [3, 4], SUM, root=0)": Call("reduce", FLOAT, SHAPE, ReduceOp.SUM, 0),
    "reduce(float32 [3, 4], SUM, root=1)": Call("reduce", FLOAT, SHAPE, ReduceOp.SUM, 1),
    "broadcast(float32 [3, 4], root=0)": Call("broadcast", FLOAT, SHAPE, None, 0),
    "all_gather(float32 [*, 4], dim=0)": Call("all_gather", FLOAT, (-1, 4), dim=0),
    "all_gather(float32 [3, *], dim=1)": Call("all_gather", FLOAT, (3, -1), dim=1),
    "reduce_scatter(float32 [3, 4], SUM, dim=1)": Call("reduce_scatter", FLOAT, SHAPE, ReduceOp.SUM, dim=1),
    "gather(float32 [*, 4], root=0)": Call("gather", FLOAT, (-1, 4), None, 0),
    "scatter(root=0)": Call("scatter", None, (), None, 0),
    "all_to_all()": Call("all_to_all"),
    "barrier()": Call("barrier"),
    "split(ranks=[0, 1])": Call("split", parts=check_parts([[0, 1]], 2)),
    "split(ranks=[1, 0])": Call("split", parts=check_parts([[1, 0]], 2)),
    "partition([0, 1])": Call("partition", parts=check_parts([[0, 1]], 2)),
    "partition([0], [1])": Call("partition", parts=check_parts([[0], [1]], 2)),
    "all_reduce(float32 [12], SUM, made of 1 tensor: float32 [12])": Call(
        "all_reduce", FLOAT, (12,), ReduceOp.SUM, layout=((FLOAT, (12,)),)
    ),
    "all_reduce(float32 [12], SUM, made of 2 tensors: float32 [5], float32 [7])": Call(
        "all_reduce", FLOAT, (12,), ReduceOp.SUM, layout=((FLOAT, (5,)), (FLOAT, (7,)))
    ),
    "all_reduce(float32 [12], SUM, made of 2 tensors: float32 [7], float32 [5])": Call(
        "all_reduce", FLOAT, (12,), ReduceOp.SUM, layout=((FLOAT, (7,)), (FLOAT, (5,)))
    ),
    "all_reduce(float32 [0], SUM, made of no tensors)": Call("all_reduce", FLOAT, (0,), ReduceOp.SUM, layout=()),
}


def test_calls_are_named_as_they_were_made_and_every_difference_shows() -> None:
    for text, call in CALLS.items():
        again = replace(call)
        assert (str(call), again, again.key) == (text, call, call.key)
        assert 0 <= call.key < 2**62
    for (first, one), (second, other) in combinations(CALLS.items(), 2):
        assert (one == other, one.key == other.key) == (False, False), (first, second)


def test_sizes() -> None:
    reduction, gather = (
        Call("all_reduce", torch.complex128, (3, 4), ReduceOp.SUM),
        CALLS["all_gather(float32 [*, 4], dim=0)"],
    )
    assert (reduction.numel, reduction.nbytes, gather.nbytes, CALLS["barrier()"].nbytes) == (12, 192, 0, 0)


def test_long_layouts_are_cut_short_and_still_told_apart() -> None:
    layouts = [tuple((FLOAT, (size,)) for size in [1] * 100 + tail) for tail in ([1, 2], [2, 1])]
    texts = [str(Call("all_reduce", FLOAT, (103,), ReduceOp.SUM, layout=layout)) for layout in layouts]
    assert texts[0] != texts[1]
    for text in texts:
        assert ("made of 102 tensors: float32 [1], " in text, len(text) < 300) == (True, True), text


def test_calls_of_thousands_of_ranks_are_cut_short_and_still_told_apart() -> None:
    ranks = np.arange(16_384)
    grid, line = ranks.reshape(512, 32), ranks.reshape(1, -1)
    sizes = [Sizes([1, *[0] * 16_383]), Sizes([*[0] * 16_383, 1])]
    gathers = [Call("all_gather_into", FLOAT, (1,), layout=((FLOAT, each),)) for each in sizes]
    parts = ((grid, ranks.reshape(32, 512)), (line, line[:, ::-1]), (grid, ranks.reshape(32, 512).T))
    partitions = [[Call("partition", parts=check_parts(each, ranks.size)) for each in two] for two in parts]
    for first, other in (gathers, *partitions):
        assert (first.key == other.key, str(first) == str(other)) == (False, False)
        assert max(len(str(first)), len(str(other))) < 512
    assert partitions[0][0] == Call("partition", parts=check_parts(grid.tolist(), ranks.size))


def test_the_error_names_the_ranks_of_each_call() -> None:
    message = str(mismatch_error(["barrier()", "all_to_all()", "barrier()", "barrier()"]))
    assert message.splitlines() == [
        "the ranks of this group made different calls, so no data was moved:",
        "  ranks 0, 2, 3: barrier()",
        "  rank 1: all_to_all()",
        "All ranks of a group have to make the same calls in the same order.",
    ]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_descriptions_of_tensors_travel() -> None:
    long = torch.empty(2**33 + 1, dtype=torch.int8, device="meta").expand(2, -1)
    shapes = ((), (0,), (5,), (2, 0, 1), tuple(range(12)), (1,) * 12)
    for tensor in (long, *(torch.empty(shape, dtype=dtype) for dtype in DTYPES for shape in shapes)):
        packed = describe(tensor)
        assert (packed.nbytes, described(packed)) == (DESCRIPTION_BYTES, (tensor.dtype, tensor.shape))
