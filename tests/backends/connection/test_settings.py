"""What decides whether memory is shared, what happens where it cannot be, and wrong arguments of allocations."""

import errno
import itertools
import os
import re
import resource
from functools import partial

import pytest
import torch
from helpers.collective_checks import CollectiveChecks
from helpers.compare import refused
from helpers.limits import limit
from helpers.placements import REAL, Places, is_shared, shared_mappings

import axonmpi as ax
from axonmpi import CollectiveMismatchError, CommunicatorError, MpiBackend, ProcessGroup, ReduceOp
from axonmpi.backends.connection.segment import remedy
from axonmpi.backends.reduction import DTYPES
from axonmpi.errors import DtypeError
from axonmpi.testing import launch


@pytest.fixture
def no_memory():
    """Return a function that lets this process share no further memory with others, until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_every_operation(group: ProcessGroup) -> None:
    """On ordinary tensors and on those that the group would put in shared memory."""
    for kind in ("whole", "mixed"):
        checks = CollectiveChecks(group, label=kind, put=Places(group, kind, 120_000).put)
        for number, count in enumerate((0, 1, 28, 29, 1000, 30_000)):
            checks.every_symmetric_operation(torch.float32, (count,), ReduceOp.SUM, number)
            checks.every_symmetric_operation(torch.bfloat16, (count,), ReduceOp.MAX, number)
        checks.finish()
    line = torch.arange(700_000, dtype=torch.int32)
    group.all_reduce(tensor := line * group.rank)
    assert torch.equal(tensor, line * sum(range(group.size)))


# ---- AXONMPI_COLLECTIVES --------------------------------------------------------------------------------------


@REAL
@pytest.mark.ranks(2)
def test_the_way_can_be_chosen(world, monkeypatch) -> None:
    for setting, path in (("auto", "node"), ("plain", "plain")):
        monkeypatch.setenv("AXONMPI_COLLECTIVES", setting)
        group = world.new_group(range(world.size)[::-1])
        assert group.backend.path == path
        check_every_operation(group)
        group.close()
    monkeypatch.setenv("AXONMPI_COLLECTIVES", "shared")
    refused(
        ValueError,
        (
            lambda: MpiBackend(world.default_group.backend.mpi_comm),
            "AXONMPI_COLLECTIVES: expected 'auto' or 'plain', got 'shared'",
        ),
    )


# ---- caches that are far apart ----------------------------------------------------------------------------------


@REAL
@pytest.mark.ranks(2)
def test_every_operation_with_many_buffers(world, near_caches, monkeypatch) -> None:
    """Where writing a line that another rank has read takes longer than any limit, each rank has many buffers."""
    before = sum(map(len, shared_mappings()))
    world.new_group(range(world.size))
    middle = sum(map(len, shared_mappings()))
    monkeypatch.setattr("axonmpi.backends.connection.connection.SLOW_LINE_SECONDS", 0.0)
    group = world.new_group(range(world.size))
    assert sum(map(len, shared_mappings())) - middle > 4 * (middle - before)
    check_every_operation(group)


# ---- no memory ------------------------------------------------------------------------------------------------


@REAL
@pytest.mark.filterwarnings("ignore:no memory could be shared:RuntimeWarning")
@pytest.mark.parametrize("short", ["from the beginning", "later"])
@pytest.mark.ranks(2)
def test_a_group_that_finds_no_memory_works(world, near_caches, no_memory, short) -> None:
    """Later, when the first large collective asks for memory, smaller pieces have to do."""
    if short == "from the beginning":
        no_memory()
    group = world.new_group(range(world.size))
    world.barrier()
    no_memory()
    assert group.backend.path == ("node" if short == "later" else "plain")
    assert not is_shared(group.symmetric_empty((5,), torch.float32))
    check_every_operation(group)


@REAL
@pytest.mark.filterwarnings("ignore:no memory could be shared:RuntimeWarning")
@pytest.mark.parametrize("short", [(0, 1, 2, 3), (2, 3)], ids=str)
@pytest.mark.ranks(4)
def test_a_group_on_several_nodes_finds_no_memory_later(world, no_memory, monkeypatch, short) -> None:
    """A node that is short of memory has smaller buffers, and the others, which have theirs, go by these."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "2")
    group = world.new_group(range(world.size))
    world.barrier()
    if world.rank in short:
        no_memory()
    check_every_operation(group)
    assert group.backend.path == "nodes"
    for number in range(60):  # what small operations use stands in for the buffers, and is not written too early
        group.broadcast(large := torch.full((37_500,), float(number if world.rank == 0 else -1)))
        gathered = group.all_gather(torch.full((500,), float(world.rank)))
        assert (bool(large.eq(number).all()), gathered.view(4, 500)[:, 0].tolist()) == (True, [0, 1, 2, 3])


ON_TWO_RANKS = """
import os, resource, warnings
import torch
import axonmpi as ax
from mpi4py import MPI

def limit(kind, count):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (count, before[1]))
    return before

def new_group():
    return world.new_group(range(world.size))

world = ax.init_process_group()
group = world.default_group
assert group.backend.path == "node"
group.all_reduce(torch.ones(300_000))  # the group has what it needs
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")

    # Memory: ordinary memory serves.
    before = limit(resource.RLIMIT_FSIZE, 4096)
    for tensor in [ax.symmetric_empty((1 << 24,), torch.float64) for _ in range(3)]:
        assert tensor.shape == (1 << 24,) and tensor.dtype is torch.float64
    tensor[:100] = world.rank
    group.all_reduce(tensor[:100])
    assert bool((tensor[:100] == 1).all())
    assert new_group().backend.path == "plain"
    resource.setrlimit(resource.RLIMIT_FSIZE, before)

    # Descriptors: groups without shared memory, until others are closed.
    made = [new_group() for _ in range(3)]
    before = limit(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) - 1)  # one was open for listing
    plain = [new_group() for _ in range(2)]
    assert [group.backend.path for group in (*made, *plain)] == ["node"] * 3 + ["plain"] * 2
    for group in (*plain, *made):
        assert group.all_gather_object(world.rank) == [0, 1]
        group.close()
    assert new_group().backend.path == "node"
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
assert [warning.category for warning in seen] == [RuntimeWarning], seen
assert "no memory could be shared with the other ranks" in str(seen[0].message)
assert "ulimit -f unlimited" in str(seen[0].message)

# Communicators: MPICH has room for 2,048; Open MPI for as many as there is memory for.
groups, others = [], []
try:
    others.extend(MPI.COMM_SELF.Dup() for _ in range(2000))
    groups.extend(new_group() for _ in range(20))
except ax.CommunicatorError as error:
    assert "MPI cannot make another group" in str(error) and "group.close()" in str(error)
    assert groups
else:
    assert not MPI.Get_library_version().startswith("MPICH")
for group in groups:
    group.close()
assert new_group().all_gather_object(world.rank) == [0, 1]
print("done")
"""


def test_a_process_that_may_have_no_more_of_something_says_so_once_and_goes_on() -> None:
    result = launch(2, ON_TWO_RANKS, timeout=limit(40), env={"OMP_NUM_THREADS": "1"})
    assert (result.returncode, result.leftover, result.stderr) == (0, (), ""), result.stdout
    assert result.stdout.count("done") == 2


def test_what_helps_is_named() -> None:
    for reason, words in (
        (os.strerror(errno.EMFILE), "ulimit -n.* group\\.close"),
        ("/proc/17/fd/3: no such file", "in one container"),
        (os.strerror(errno.EFBIG), "ulimit -f unlimited"),
    ):
        assert re.search(words, remedy(reason)), reason


# ---- arguments ------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_wrong_arguments_of_allocations(world) -> None:
    group = world.new_group(range(world.size))
    for shape, dtype, error, words in (
        (None, torch.float32, TypeError, "shape: expected a sequence of integers, got None"),
        ("34", torch.float32, TypeError, "shape: expected a sequence of integers, got '34'"),
        (3.0, torch.float32, TypeError, "shape: expected a sequence of integers, got 3.0"),
        ((3.0,), torch.float32, TypeError, r"shape: expected integers, got \(3.0,\)"),
        ((3, True), torch.float32, TypeError, r"shape: expected integers, got \(3, True\)"),
        ((3, None), torch.float32, TypeError, r"shape: expected integers, got \(3, None\)"),
        (((3,), 4), torch.float32, TypeError, r"shape: expected integers, got \(\(3,\), 4\)"),
        (-1, torch.float32, ValueError, r"shape: expected sizes of at least 0, got \(-1,\)"),
        ((3, -2), torch.float32, ValueError, r"shape: expected sizes of at least 0, got \(3, -2\)"),
        ((2,), "float32", TypeError, r"dtype: expected a torch\.dtype, got 'float32'"),
        ((2,), float, TypeError, r"dtype: expected a torch\.dtype, got <class 'float'>"),
        ((2,), None, TypeError, r"dtype: expected a torch\.dtype, got None"),
        ((2,), torch.qint8, DtypeError, r"dtype: tensors of dtype torch\.qint8 cannot be sent; use another one"),
    ):
        for allocate in (group.symmetric_empty, ax.symmetric_empty):
            refused(error, (partial(allocate, shape, dtype), words))
    refused(
        TypeError,
        (
            lambda: ax.symmetric_empty((2,), torch.float32, 3),
            r"group: expected an axonmpi\.ProcessGroup or None, got int",
        ),
    )
    assert getattr(group.backend, "log", []) == []
    first = world.rank == 0
    for own in (
        ((3,) if first else (4,), torch.float32),
        ((3,), torch.float32 if first else torch.int32),
        ((6,) if first else (2, 3), torch.float32),
        ((0,) if first else (1 << 20,), torch.uint8),
    ):
        refused(CollectiveMismatchError, (partial(group.symmetric_empty, *own), r"symmetric_empty\("))
    assert group.symmetric_empty((2,), torch.float32).shape == (2,)
    group.close()
    refused(
        CommunicatorError,
        (
            lambda: group.symmetric_empty((2,), torch.float32),
            "symmetric_empty: this group cannot be used: it was closed",
        ),
    )


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.ranks(1, 3)
def test_tensors_of_every_shape_and_dtype(world) -> None:
    """On the ranks of a group, and on them only."""
    group = world.new_group(range(min(2, world.size)))
    if not group.contains(world.rank):
        refused(
            ValueError,
            (lambda: group.symmetric_empty((2,), torch.float32), r"rank 2 is not in this group of ranks \[0, 1\]"),
        )
        return
    shapes = ((), 5, (0,), [2, 3], torch.Size([4, 0, 2]), (1, 1000), range(2, 4))
    for dtype, shape in itertools.product(DTYPES, shapes):
        tensor = group.symmetric_empty(shape, dtype).zero_()
        assert (tensor.shape, tensor.dtype) == (torch.empty(shape if shape == 5 else tuple(shape)).shape, dtype)
        assert (tensor.is_contiguous(), tensor.device.type, tensor.requires_grad) == (True, "cpu", False)
