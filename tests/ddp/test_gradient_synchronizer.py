"""GradientSynchronizer: the average in float64 for every strategy, bucket size, order of adding and dtype."""

from unittest.mock import ANY, Mock, call

import numpy as np
import pytest
import torch
from helpers.compare import assert_equal, refused
from helpers.models import AUTOMATIC, NO_SYNC, OVERLAPPED, SYNCHRONOUS
from helpers.settings import each_pair

import axonmpi as ax
from axonmpi import CollectiveMismatchError, GradientSynchronizer, GradSyncStrategy

SHAPES = [(3, 4), (), (0, 2), (7,), (40,), (2, 2, 2), (1,)]
DTYPES = {
    "float32": [torch.float32],
    "float64": [torch.float64],
    "bfloat16": [torch.bfloat16],
    "float16": [torch.float16],
    "complex64": [torch.complex64],
    "mixed": [torch.float32, torch.bfloat16, torch.float64],
}


def gradients_of(rank: int, dtypes: list[torch.dtype], shapes=SHAPES, seed: int = 0) -> list[torch.Tensor]:
    """What a rank has before; any rank can compute those of all others."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    wide = [torch.randn(shape, generator=generator, dtype=torch.complex128) for shape in shapes]
    kinds = [dtypes[index % len(dtypes)] for index in range(len(shapes))]
    return [(t if kind.is_complex else t.real).to(kind) for t, kind in zip(wide, kinds, strict=True)]


def exact(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()


def tolerance(dtype: torch.dtype) -> float:
    # Partial sums of four normal numbers stay below 16; each is rounded once, and the mean once more.
    return 16 * torch.finfo(dtype).eps


def assert_average(found: list[torch.Tensor], per_rank: list[list[torch.Tensor]]) -> None:
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in per_rank[0]]
    for tensor, *gradients in zip(found, *per_rank, strict=True):
        expected = np.mean([exact(gradient) for gradient in gradients], axis=0)
        np.testing.assert_allclose(exact(tensor), expected, rtol=0, atol=tolerance(tensor.dtype))


def add_all(synchronizer: GradientSynchronizer, gradients: list[torch.Tensor], order=None) -> None:
    for index in order if order is not None else range(len(gradients)):
        synchronizer.add_gradient(int(index), gradients[index])


def prepared(count: int = 2, *arguments, **options) -> GradientSynchronizer:
    synchronizer = GradientSynchronizer(*arguments, **options)
    synchronizer.prepare(count)
    return synchronizer


def averages(gradients: list[torch.Tensor], *arguments, group=None, **options) -> list[torch.Tensor]:
    """Return what one round gives."""
    synchronizer = prepared(len(gradients), *arguments, **options)
    add_all(synchronizer, gradients)
    synchronizer.sync_all(group)
    return synchronizer.gradients()


# ---- the average ------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
@each_pair(
    dtypes=list(DTYPES),
    bucket_size=[1, 5, 12, 20, 1000],
    strategy=[SYNCHRONOUS, OVERLAPPED],
    own_order=[True, False],
)
def test_averages_over_the_group(world, dtypes, bucket_size, strategy, own_order) -> None:
    """Whatever the order in which each rank adds; a round does not disturb the one before."""
    kinds = DTYPES[dtypes]
    synchronizer = prepared(len(SHAPES), strategy, bucket_size=bucket_size)
    rounds = []
    for seed in range(2):
        order = np.random.default_rng([seed, world.rank]).permutation(len(SHAPES)) if own_order else None
        add_all(synchronizer, gradients_of(world.rank, kinds, seed=seed), order)
        synchronizer.sync_all(world.default_group)
        rounds.append(synchronizer.gradients())
        synchronizer.clear()
    for seed, found in enumerate(rounds):
        assert_average(found, [gradients_of(rank, kinds, seed=seed) for rank in range(world.size)])


@pytest.mark.ranks(1, 2, 4)
def test_strategies_give_the_same_bits_on_each_number_of_ranks(world) -> None:
    per_rank = [gradients_of(rank, DTYPES["mixed"]) for rank in range(world.size)]
    found = [averages(per_rank[world.rank], strategy, bucket_size=9) for strategy in (SYNCHRONOUS, OVERLAPPED)]
    assert_average(found[0], per_rank)
    assert_equal(*found)


@pytest.mark.ranks(2)
def test_no_sync_leaves_gradients_as_they_are(world) -> None:
    gradients = gradients_of(world.rank, DTYPES["mixed"])
    if world.rank == 0:  # local: the others need not come
        assert_equal(averages(gradients, NO_SYNC, group=world.default_group, bucket_size=3), gradients)


@pytest.mark.ranks(2)
@each_pair(strategy=list(GradSyncStrategy), added=[[0, 2, 5], [6], []])
def test_gradients_that_no_rank_added_are_left_out(world, strategy, added) -> None:
    per_rank = [gradients_of(rank, DTYPES["mixed"]) for rank in range(world.size)]
    synchronizer = prepared(len(SHAPES), strategy, bucket_size=9)
    add_all(synchronizer, per_rank[world.rank], added[::-1])
    synchronizer.sync_all(world.default_group)
    reduced = per_rank[world.rank : world.rank + 1] if strategy is NO_SYNC else per_rank
    assert_average(synchronizer.gradients(), [[gradients[index] for index in added] for gradients in reduced])


@pytest.mark.ranks(3)
@AUTOMATIC
def test_averages_over_a_subgroup_only(world, strategy) -> None:
    group = world.new_group([2, 0])
    if group.contains(world.rank):
        (found,) = averages([torch.full((3,), float(world.rank))], strategy, group=group)
        assert found.tolist() == [1, 1, 1]


@pytest.mark.ranks(2)
@AUTOMATIC
def test_strided_gradients(world, strategy) -> None:
    base = torch.arange(12.0).view(3, 4) + 12 * world.rank
    given = [base.t(), base[:, ::2], base[:1].expand(3, 4), torch.view_as_complex(base.view(3, 2, 2)).conj()]
    expected = [tensor - (2 * world.rank - 1) * (6 - 6j if tensor.is_complex() else 6) for tensor in given]
    for bucket_size in (1, 1000):
        assert_equal(averages(given, strategy, bucket_size=bucket_size), expected)


# ---- how many reductions ----------------------------------------------------------------------------------


def reductions(world: ax.World, strategy: GradSyncStrategy, shapes, bucket_size: int, dtypes) -> list[int]:
    """Return the sizes of the gradients that a mock rank reduced, in elements."""
    backend = world.default_group.backend
    before = len(backend.log)
    averages(gradients_of(world.rank, dtypes, shapes), strategy, bucket_size=bucket_size)
    reduced = [call for call in backend.log[before:] if call.operation == "all_reduce"]
    return [call.shape[0] for call in reduced if call.dtype in dtypes]  # fingerprints are integers


@pytest.mark.parametrize(
    ("strategy", "sizes", "bucket_size", "dtypes", "expected"),
    [
        (SYNCHRONOUS, [3, 4, 5, 6], 7, [torch.float32], [7, 5, 6]),
        (OVERLAPPED, [3, 40, 4, 3], 7, [torch.float32], [3, 40, 7]),
        (SYNCHRONOUS, [3, 4, 5, 6], 100, [torch.float32, torch.float64], [8, 10]),
        (OVERLAPPED, [], 7, [torch.float32], []),
    ],
)
@pytest.mark.not_over_double("looks at the mock's log of operations")
def test_one_reduction_for_each_bucket(strategy, sizes, bucket_size, dtypes, expected) -> None:
    per_rank = ax.testing.run_ranks(2, reductions, strategy, [(size,) for size in sizes], bucket_size, dtypes)
    assert per_rank == [expected, expected]


def test_overlapped_reductions_are_all_started_before_any_is_waited_for(monkeypatch) -> None:
    group, works = ax.ProcessGroup.mock(), Mock()
    monkeypatch.setattr(group, "all_reduce", works.start)
    averages([torch.ones(2)] * 3, OVERLAPPED, group=group, bucket_size=2)
    start = call.start(ANY, ax.ReduceOp.AVERAGE, async_op=True)
    assert works.mock_calls == [start] * 3 + [call.start().wait()] * 3


# ---- copies and rounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", GradSyncStrategy)
def test_gradients_are_copied_when_they_are_added(strategy) -> None:
    reused = torch.zeros(3, requires_grad=True)
    synchronizer = prepared(2, strategy)
    for index in range(2):
        with torch.no_grad():
            reused.fill_(index + 1)
        synchronizer.add_gradient(index, reused)
    synchronizer.sync_all(ax.ProcessGroup.mock())
    found = synchronizer.gradients()
    assert [(t.tolist(), t.requires_grad) for t in found] == [([1, 1, 1], False), ([2, 2, 2], False)]
    found[0].zero_()
    assert reused.tolist() == [2, 2, 2]


# ---- ranks that differ ------------------------------------------------------------------------------------


DIFFERENCES = {
    "dtype": ([(2,), (3,)], torch.float64, 100, "gradient 0 is", "float32 [2]", "float64 [2]"),
    "shape": ([(2,), (3, 1)], torch.float32, 100, "gradient 1 is", "float32 [3]", "float32 [3, 1]"),
    "size": ([(2,), (4,)], torch.float32, 100, "gradient 1 is", "float32 [3]", "float32 [4]"),
    "missing": ([(2,)], torch.float32, 100, "gradient 1 is", "float32 [3]", "missing"),
    "bucket": ([(2,), (3,)], torch.float32, 9, "bucket_size is", "100", "9"),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_that_differ_all_learn_it_before_anything_is_reduced(world, difference) -> None:
    shapes, dtype, bucket_size, what, first, others = DIFFERENCES[difference]
    if world.rank == 0:
        shapes, dtype, bucket_size = [(2,), (3,)], torch.float32, 100
    synchronizer = prepared(2, OVERLAPPED, bucket_size=bucket_size)
    add_all(synchronizer, [torch.ones(shape, dtype=dtype) for shape in shapes])
    with pytest.raises(CollectiveMismatchError) as raised:
        synchronizer.sync_all()
    told = f"rank 0: {what} {first}\n  ranks 1, 2: {what} {others}\n", "\nAdd the same indices"
    assert [text for text in told if text not in str(raised.value)] == []
    (found,) = averages([torch.tensor([2.0 * world.rank])], OVERLAPPED)  # the group can still be used
    assert found.item() == world.size - 1


@pytest.mark.ranks(2)
def test_ranks_that_differ_in_the_number_of_gradients(world) -> None:
    synchronizer = prepared(world.rank)
    add_all(synchronizer, [torch.ones(1)] * world.rank)
    refused(CollectiveMismatchError, (synchronizer.sync_all, "rank 0: num_params is 0\n  rank 1: num_params is 1"))


# ---- bad input --------------------------------------------------------------------------------------------


def test_bad_input_is_refused() -> None:
    one, synchronizer = torch.ones(1), prepared(2)
    add, unprepared = synchronizer.add_gradient, GradientSynchronizer()
    refused(
        ValueError,
        *((lambda i=i: add(i, one), rf"index: expected 0 to 1, as prepare\(2\) said, got {i}") for i in (-1, 2)),
        (lambda: add(0, one.bool()), "t: expected a floating-point or complex .* torch.bool"),
        (lambda: add(0, torch.eye(2).to_sparse()), "t: expected a dense tensor"),
        (lambda: unprepared.add_gradient(0, one), r"prepare\(\) was not called"),
        (lambda: unprepared.sync_all(ax.ProcessGroup.mock()), r"prepare\(\) was not"),
        (lambda: GradientSynchronizer(bucket_size=0), "bucket_size: expected at least 1, got 0"),
        (lambda: GradientSynchronizer("always"), "strategy: expected .*GradSyncStrategy, .*'always'"),
        (lambda: prepared(-1), "num_params: expected at least 0, got -1"),
    )
    refused(
        TypeError,
        *((lambda i=i: add(i, one), "index: expected an integer") for i in (0.0, None, True)),
        (lambda: add(0, one.long()), "t: expected a floating-point or complex .* torch.int64"),
        (lambda: add(0, None), "t: expected a torch.Tensor, got NoneType"),
        (lambda: GradientSynchronizer(bucket_size=1e6), "bucket_size: expected an integer, got 1"),
        (lambda: prepared(2.0), "num_params: expected an integer, got 2.0"),
    )
    for index in range(2):  # nothing was taken before
        add(index, one)
    refused(ValueError, (lambda: add(1, one), "index: gradient 1 was added before"))
    assert [GradientSynchronizer(strategy).strategy for strategy in GradSyncStrategy] == list(GradSyncStrategy)
    assert unprepared.strategy is SYNCHRONOUS


def test_sync_all_comes_once_a_round_and_before_gradients() -> None:
    synchronizer, group = prepared(2), ax.ProcessGroup.mock()
    synchronizer.add_gradient(0, torch.ones(1))
    synchronizer.prepare(1)  # begins anew, of another size
    early = synchronizer.gradients, r"gradients\(\) before sync_all\(\)"
    refused(ValueError, early)
    synchronizer.add_gradient(0, torch.ones(1))
    synchronizer.sync_all(group)
    refused(
        ValueError,
        (lambda: synchronizer.sync_all(group), r"sync_all\(\) twice"),
        (lambda: synchronizer.add_gradient(0, torch.ones(1)), r"add_gradient\(\) after sync_all\(\)"),
    )
    assert len(synchronizer.gradients()) == 1
    synchronizer.clear()
    refused(ValueError, early)
