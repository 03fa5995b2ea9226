"""What decides whether memory is shared, what happens where it cannot be, and wrong arguments of allocations."""

from __future__ import annotations

import resource

import pytest
import torch
from helpers.placements import REAL, Places, is_shared, shared_mappings
from helpers.symmetric_checks import SymmetricChecks

import axonmpi as ax
from axonmpi import CollectiveMismatchError, CommunicatorError, MpiBackend, ProcessGroup, ReduceOp
from axonmpi.backends.reduction import DTYPES
from axonmpi.errors import DtypeError


@pytest.fixture
def no_memory():
    """Return a function that lets this process share no further memory with others, until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_every_operation(group: ProcessGroup) -> None:
    """On ordinary tensors and on those that the group would put in shared memory."""
    for kind in ("whole", "mixed"):
        checks = SymmetricChecks(group, Places(group, kind, 120_000))
        for number, count in enumerate((0, 1, 28, 29, 1000, 30_000)):
            checks.every_symmetric_operation(torch.float32, (count,), ReduceOp.SUM, number)
            checks.every_symmetric_operation(torch.bfloat16, (count,), ReduceOp.MAX, number)
        checks.finish()
    line = torch.arange(700_000, dtype=torch.int32)
    tensor = line * group.rank
    group.all_reduce(tensor)
    assert torch.equal(tensor, line * sum(range(group.size)))


# ---- AXONMPI_COLLECTIVES --------------------------------------------------------------------------------------


@REAL
@pytest.mark.ranks(2, 4)
def test_the_way_can_be_chosen(world, monkeypatch) -> None:
    for setting, path in (("auto", "node"), ("plain", "plain")):
        monkeypatch.setenv("AXONMPI_COLLECTIVES", setting)
        group = world.new_group(range(world.size)[::-1])
        assert group.backend.path == path
        check_every_operation(group)
        group.close()
    monkeypatch.setenv("AXONMPI_COLLECTIVES", "shared")
    with pytest.raises(ValueError, match="AXONMPI_COLLECTIVES: expected 'auto' or 'plain', got 'shared'"):
        MpiBackend(world.default_group.backend.mpi_comm)


# ---- caches that are far apart ----------------------------------------------------------------------------------


@REAL
@pytest.mark.ranks(2, 4)
def test_every_operation_with_many_buffers(world, near_caches, monkeypatch) -> None:
    """Where writing a line that another rank has read takes longer than any limit, each rank has many buffers."""
    before = sum(map(len, shared_mappings()))
    usual = world.new_group(range(world.size))
    middle = sum(map(len, shared_mappings()))
    monkeypatch.setattr("axonmpi.backends.connect.SLOW_LINE_SECONDS", 0.0)
    group = world.new_group(range(world.size))
    assert sum(map(len, shared_mappings())) - middle > 4 * (middle - before)
    check_every_operation(group)
    group.close()
    usual.close()


# ---- no memory ------------------------------------------------------------------------------------------------


@REAL
@pytest.mark.filterwarnings("ignore:no memory could be shared:RuntimeWarning")
@pytest.mark.parametrize("short", ["from the beginning", "later"])
@pytest.mark.ranks(2, 4)
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
    group.close()


@REAL
@pytest.mark.filterwarnings("ignore:no memory could be shared:RuntimeWarning")
@pytest.mark.parametrize("short", [(0, 1, 2, 3), (2, 3)], ids=str)
@pytest.mark.ranks(4)
def test_a_group_on_several_nodes_finds_no_memory_later(world, no_memory, monkeypatch, short) -> None:
    """A node that is short of memory has smaller buffers, and the others, which have theirs, go by these."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "2")
    group = world.new_group(range(world.size))
    assert group.backend.path == "nodes"
    world.barrier()
    if world.rank in short:
        no_memory()
    check_every_operation(group)
    group.close()


def test_what_is_told_where_no_memory_can_be_shared(job) -> None:
    """Once in a process, and that ordinary memory serves."""
    code = """
    assert group.backend.path == "node"
    group.all_reduce(torch.ones(300_000))  # the group has what it needs
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        for tensor in [ax.symmetric_empty((1 << 24,), torch.float64) for _ in range(3)]:
            assert tensor.shape == (1 << 24,) and tensor.dtype is torch.float64
        tensor[:100] = world.rank
        group.all_reduce(tensor[:100])
        assert bool((tensor[:100] == 1).all())
        assert world.new_group([0, 1]).backend.path == "plain"
    assert [warning.category for warning in seen] == [RuntimeWarning], seen
    assert "no memory could be shared with the other ranks" in str(seen[0].message)
    assert "ulimit -f unlimited" in str(seen[0].message)
    """
    job(2, code)


@pytest.mark.parametrize("before", [0, 3])
def test_a_group_that_finds_no_descriptors_works_after_one_warning(job, before) -> None:
    code = """
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made = [world.new_group(range(world.size)) for _ in range(BEFORE)]
        limit = len(os.listdir("/proc/self/fd")) - 1  # of which one was open for listing
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        group, another = (world.new_group(range(world.size)) for _ in range(2))
    assert [made.backend.path for made in made] == ["node"] * BEFORE
    assert group.backend.path == another.backend.path == "plain"
    assert [warning.category for warning in seen] == [RuntimeWarning], seen
    assert "ulimit -n" in str(seen[0].message) and "group.close()" in str(seen[0].message)
    for made in (group, *made):
        assert made.all_gather_object(world.rank) == [0, 1]
        made.close()
    made = world.new_group(range(world.size))
    assert made.backend.path == ("node" if BEFORE else "plain")  # what was closed has made room
    """
    job(2, code.replace("BEFORE", str(before)))


def test_a_group_that_finds_no_communicator_says_what_to_do(job) -> None:
    """MPICH has room for 2,048 communicators; Open MPI for as many as there is memory for."""
    code = """
    from mpi4py import MPI

    groups, others = [], []
    try:
        others.extend(MPI.COMM_SELF.Dup() for _ in range(2000))
        groups.extend(world.new_group(range(world.size)) for _ in range(20))
    except ax.CommunicatorError as error:
        assert "MPI cannot make another group" in str(error) and "group.close()" in str(error)
        assert groups
    else:
        assert not MPI.Get_library_version().startswith("MPICH")
    for group in groups:
        group.close()
    group = world.new_group(range(world.size))
    assert group.all_gather_object(world.rank) == [0, 1]
    """
    job(2, code)


# ---- arguments ------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_wrong_arguments_of_allocations(world) -> None:
    group = world.new_group(range(world.size))
    for shape, error, words in (
        (None, TypeError, "shape: expected a sequence of integers, got None"),
        ("34", TypeError, "shape: expected a sequence of integers, got '34'"),
        (3.0, TypeError, "shape: expected a sequence of integers, got 3.0"),
        ((3.0,), TypeError, r"shape: expected integers, got \(3.0,\)"),
        ((3, True), TypeError, r"shape: expected integers, got \(3, True\)"),
        ((3, None), TypeError, r"shape: expected integers, got \(3, None\)"),
        (((3,), 4), TypeError, r"shape: expected integers, got \(\(3,\), 4\)"),
        (-1, ValueError, r"shape: expected sizes of at least 0, got \(-1,\)"),
        ((3, -2), ValueError, r"shape: expected sizes of at least 0, got \(3, -2\)"),
    ):
        for allocate in (group.symmetric_empty, ax.symmetric_empty):
            with pytest.raises(error, match=words):
                allocate(shape, torch.float32)
    for thing in ("float32", float, None, 3):
        with pytest.raises(TypeError, match=rf"dtype: expected a torch\.dtype, got {thing!r}"):
            group.symmetric_empty((2,), thing)
    with pytest.raises(DtypeError, match=r"dtype: tensors of dtype torch\.qint8 cannot be sent; use another one"):
        group.symmetric_empty((2,), torch.qint8)
    with pytest.raises(TypeError, match=r"group: expected an axonmpi\.ProcessGroup or None, got int"):
        ax.symmetric_empty((2,), torch.float32, 3)
    assert getattr(group.backend, "log", []) == []
    first = world.rank == 0
    for own in (
        ((3,) if first else (4,), torch.float32),
        ((3,), torch.float32 if first else torch.int32),
        ((6,) if first else (2, 3), torch.float32),
        ((0,) if first else (1 << 20,), torch.uint8),
    ):
        with pytest.raises(CollectiveMismatchError, match=r"symmetric_empty\("):
            group.symmetric_empty(*own)
    assert group.symmetric_empty((2,), torch.float32).shape == (2,)
    group.close()
    with pytest.raises(CommunicatorError, match="symmetric_empty: this group cannot be used: it was closed"):
        group.symmetric_empty((2,), torch.float32)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.ranks(1, 3)
def test_tensors_of_every_shape_and_dtype(world) -> None:
    """On the ranks of a group, and on them only."""
    group = world.new_group(range(min(2, world.size)))
    if not group.contains(world.rank):
        with pytest.raises(ValueError, match=r"rank 2 is not in this group of ranks \[0, 1\]"):
            group.symmetric_empty((2,), torch.float32)
        return
    for dtype in DTYPES:
        for shape in ((), 5, (0,), [2, 3], torch.Size([4, 0, 2]), (1, 1000), range(2, 4)):
            tensor = group.symmetric_empty(shape, dtype)
            assert tensor.shape == torch.empty((shape,) if isinstance(shape, int) else tuple(shape)).shape
            assert tensor.dtype is dtype
            assert tensor.is_contiguous()
            assert tensor.device.type == "cpu"
            assert not tensor.requires_grad
            assert tensor.zero_().numel() == tensor.view(-1).shape[0]
