"""The mesh: places, groups along axes and joined axes, against numpy's grids; what it costs; bad shapes."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
from helpers.compare import refused
from hypothesis import given, settings
from hypothesis import strategies as st

import axonmpi as ax
from axonmpi.launch.topology import Topology
from axonmpi.mesh import nearest_shapes

SHAPES = (
    *({"all": 1}, {"all": 4}, {"dp": 1, "pp": 4, "tp": 1}, {"dp": 2, "pp": 1, "tp": 2}, {"dp": 2, "pp": 2}),
    *({"dp": 2, "pp": 2, "tp": 2}, {"dp": 4, "pp": 1, "tp": 2}, {"dp": 2, "tp": 4}, {"dp": 8, "tp": 1}),
)


@pytest.mark.real_ranks
@pytest.mark.ranks(1, 4, 8)
def test_places_and_groups_are_those_of_a_grid(world: ax.World) -> None:
    for shape in (shape for shape in SHAPES if math.prod(shape.values()) == world.size):
        mesh = ax.DeviceMesh(shape)
        grid = np.arange(world.size).reshape(tuple(shape.values()))
        place = dict(zip(shape, np.argwhere(grid == world.rank)[0].tolist(), strict=True))
        assert mesh.coordinates == place == mesh.coordinates_of(world.rank)
        assert (mesh.axes, mesh.shape) == (tuple(shape), shape)
        assert [mesh.rank_at(**mesh.coordinates_of(rank)) for rank in mesh.ranks()] == list(range(world.size))
        assert [mesh.rank_at(**{axis: 0}) for axis in shape] == [mesh.ranks(axis)[0] for axis in shape]
        assert (mesh.rank_at(), mesh.rank(), mesh.size()) == (world.rank, world.rank, world.size)
        for axes in itertools.chain(*(itertools.combinations(shape, count + 1) for count in range(len(shape)))):
            block = tuple(slice(None) if axis in axes else at for axis, at in place.items())
            group, ranks = mesh.group(*axes), grid[block].flatten().tolist()
            expected = ranks, ranks.index(world.rank), len(ranks)
            assert (list(group.ranks), group.rank, group.size) == expected, axes
            assert (list(mesh.ranks(*axes)), mesh.rank(*axes), mesh.size(*axes)) == expected, axes
            assert group.all_gather_object(world.rank) == ranks
            assert mesh.group(*reversed(axes)) is group
        world.close_groups()


@pytest.mark.ranks(2, 4)
def test_few_groups_are_made_and_released_with_the_world(world) -> None:
    before = world.groups
    mesh = ax.DeviceMesh({"dp": world.size, "pp": 1, "tp": 1})
    assert world.groups == before
    assert mesh.group("dp") is mesh.group() is mesh.group("tp", "dp") is world.default_group
    assert mesh.group("pp") is mesh.group("tp") is mesh.group("pp", "tp")
    if world.size < 4:
        return
    mesh = ax.DeviceMesh({"dp": 2, "one": 1, "tp": 2})
    assert len(world.groups) == len(before) + 2
    assert mesh.group("one", "tp") is mesh.group("tp")
    assert mesh.group("dp", "tp") is world.default_group
    tp = mesh.group("tp")
    world.close_groups(keep=before)
    refused(ax.CommunicatorError, (tp.barrier, "this group cannot be used: it was closed"))
    world.default_group.barrier()


@pytest.mark.ranks(8)
@pytest.mark.not_over_double("looks at the mock's log of operations")
def test_joined_axes_are_made_once_by_one_call(world) -> None:
    mesh = ax.DeviceMesh({"dp": 2, "pp": 2, "tp": 2})
    log = world.default_group.backend.log
    before = world.groups
    joined = mesh.group("dp", "tp")
    assert mesh.group("tp", "dp") is joined
    assert (world.groups, len(before)) == ((*before, joined), 3)
    assert joined.ranks == ((0, 1, 4, 5), (2, 3, 6, 7))[mesh.rank("pp")]
    assert [entry.operation for entry in log].count("partition") == 4
    assert len(log) == 4 + 3  # two comparisons, and the ranks' nodes


@pytest.mark.ranks(4)
def test_one_size_may_be_inferred_and_bad_shapes_are_refused(world: ax.World) -> None:
    assert ax.DeviceMesh({"dp": -1, "tp": 2}).shape == {"dp": 2, "tp": 2}
    assert ax.DeviceMesh({"dp": 4, "tp": -1}).shape == {"dp": 4, "tp": 1}
    for shape, error, message in (
        ({"dp": 3, "tp": 3}, ValueError, "product is 4, the number of ranks in the world, got dp=3 x tp=3"),
        ({"dp": 3, "tp": 3}, ValueError, "or start 9 ranks"),
        (
            {"dp": -1, "tp": 3},
            ValueError,
            "product divides 4, the number of ranks in the world, got tp=3",
        ),
        ({"dp": -1, "tp": -1}, ValueError, "at most one size of -1, got 2: dp, tp"),
        ({"dp": 0}, ValueError, "dp: expected a number of ranks from 1, or -1 for the ranks left, got 0"),
        ({"dp": -2}, ValueError, "got -2"),
        ({"dp": 2.0}, TypeError, "dp: expected an integer, got 2.0"),
        ({"dp": True}, TypeError, "got True"),
        ({1: 4}, TypeError, "expected names of axes, got 1"),
        ({"": 4}, TypeError, "expected names of axes"),
        ({}, ValueError, "at least one axis"),
        ([2, 2], TypeError, "expected a mapping"),
    ):
        refused(error, (partial(ax.DeviceMesh, shape), message))
    world.default_group.barrier()


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_one_rank_with_another_shape_is_an_error_on_all(world) -> None:
    last, is_last = world.size - 1, world.rank == world.size - 1
    differ = rf"shape: the mesh is not the same on all ranks; .*\n  rank.*\n  rank {last}: {{"
    for own, others, message in (
        ({"dp": world.size, "tp": 1}, {"dp": 1, "tp": world.size}, differ),
        ({"dp": world.size, "tp": 1}, {"tp": 1, "dp": world.size}, differ),
        ({"dp": world.size}, {"pp": world.size}, differ),
        ({"dp": 0}, {"dp": -1}, "got 0" if is_last else f"rank {last}: dp: expected a number"),
    ):
        refused(ValueError, (partial(ax.DeviceMesh, own if is_last else others), message))
    world.default_group.barrier()


@pytest.mark.ranks(4)
def test_bad_names_and_places_are_refused(world) -> None:
    mesh = ax.DeviceMesh({"dp": -1, "tp": 1})
    asks = (mesh.group, mesh.ranks, mesh.rank, mesh.size)
    refused(
        ValueError,
        *((lambda ask=ask: ask("dp", "pp"), "expected one of the mesh's, 'dp', 'tp', got 'pp'") for ask in asks),
        *((lambda ask=ask: ask("dp", "dp"), "axes: expected different ones") for ask in asks),
        (lambda: mesh.rank_at(pp=0), "got 'pp'"),
        (lambda: mesh.rank_at(dp=4), "dp: expected a place from 0 to 3, got 4"),
        (lambda: mesh.coordinates_of(-1), "rank: expected one of the world's, .* got -1"),
        (lambda: mesh.coordinates_of(4), "rank: expected one of the world's, .* got 4"),
    )


def test_without_a_world() -> None:
    if not ax.is_initialized():
        refused(ax.CommunicatorError, (lambda: ax.DeviceMesh({"dp": 1}), "no process group yet"))
    mesh = ax.DeviceMesh({"dp": 1}, ax.World.mock())
    assert (mesh.describe(), repr(mesh)) == ("dp 1: 1 rank on 1 node", "DeviceMesh({'dp': 1}, rank=0)")


@pytest.mark.ranks(8)
def test_the_table_says_which_rank_is_where(world) -> None:
    shape = {"dp": 2, "ep": 1, "pp": 2, "tp": 2}
    table = """\
dp pp ranks along tp
 0  0 0 1
 0  1 2 3
 1  0 4 5
 1  1 6 7"""
    for ranks_per_node, nodes in (
        (8, "1 node"),
        (4, "2 nodes\ngroups across nodes: dp"),
        (3, "3 nodes\ngroups across nodes: dp, pp, tp"),
        (1, "8 nodes\ngroups across nodes: dp, pp, tp"),
    ):
        topology = Topology.of([rank // ranks_per_node for rank in range(world.size)], world.rank)
        mesh = ax.DeviceMesh(shape, ax.World(world.default_group.backend, topology))
        assert mesh.describe() == f"dp 2 x ep 1 x pp 2 x tp 2: 8 ranks on {nodes}\n{table}"
    rows = mesh.describe(max_rows=3).splitlines()[2:]
    assert rows == ["dp pp ranks along tp", " 0  0 0 1", " 0  1 2 3", "... 1 row more", " 1  1 6 7"]


def test_long_rows_are_shortened() -> None:
    told = ax.testing.run_ranks(12, lambda world: ax.DeviceMesh({"dp": 12}).describe())[5]
    assert told == "dp 12: 12 ranks on 1 node\nranks along dp\n0 1 2 3 4 5 ... 11"


@settings(max_examples=25)
@given(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from([-1, 1, 2, 3, 5, 8]), min_size=1),
    st.integers(1, 24),
)
def test_nearest_shapes_are_all_there_are_in_order(asked, num_ranks) -> None:
    found = nearest_shapes(asked, num_ranks, None)
    every = itertools.product(range(1, num_ranks + 1), repeat=len(asked))
    valid = [dict(zip(asked, sizes, strict=True)) for sizes in every if math.prod(sizes) == num_ranks]
    assert sorted(map(str, found)) == sorted(map(str, valid))
    away = [sum(abs(np.log(shape[axis] / size)) for axis, size in asked.items() if size > 0) for shape in found]
    assert all(one <= other + 1e-6 for one, other in itertools.pairwise(away))
    assert nearest_shapes(asked, num_ranks, 2) == found[:2]
