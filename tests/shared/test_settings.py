"""What decides whether memory is shared, what happens where it cannot be, and wrong arguments of allocations."""

from __future__ import annotations

import pytest
import torch

import axonmpi as ax
from axonmpi import CommunicatorError
from axonmpi.backends.reduction import DTYPES
from axonmpi.errors import DtypeError

SUBSET = """
    from axonmpi import ReduceOp

    def check():
        size, rank = world.size, world.rank
        for count in (0, 1, 28, 29, 1000, 300_000):
            for make in (torch.empty, lambda count, dtype: ax.symmetric_empty((count,), dtype)):
                def filled(value, dtype=torch.float32):
                    return make(count, dtype=dtype).fill_(value)

                tensor = filled(rank + 1)
                group.all_reduce(tensor)
                assert torch.equal(tensor, torch.full((count,), float(sum(range(1, size + 1)))))
                tensor = filled(rank, torch.bfloat16)
                group.all_reduce(tensor, ReduceOp.MAX, async_op=True).wait()
                assert torch.equal(tensor, torch.full((count,), size - 1, dtype=torch.bfloat16))
                tensor = filled(rank, torch.int64)
                group.reduce(tensor, size - 1)
                assert torch.equal(tensor, torch.full((count,), sum(range(size)) if rank == size - 1 else rank))
                tensor = filled(rank)
                group.broadcast(tensor, size - 1)
                assert torch.equal(tensor, torch.full((count,), size - 1.0))
                gathered = group.all_gather(filled(rank))
                assert torch.equal(gathered, torch.arange(float(size)).repeat_interleave(count))
                part = group.reduce_scatter(filled(1.0))
                assert torch.equal(part, torch.full((count,), float(size)).tensor_split(size)[rank])
"""


# ---- AXONMPI_COLLECTIVES --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "path"), [("plain", "plain"), ("auto", "node"), (None, "node")])
def test_the_way_can_be_chosen(job, setting, path) -> None:
    code = SUBSET + "\n    check()\n    print(group.backend.path, ax.new_group([1, 0]).backend.path)\n"
    ended = job(2, code, **({"AXONMPI_COLLECTIVES": setting} if setting else {}))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(path) == 4
    assert ended.stderr == ""


def test_a_setting_that_there_is_not(job) -> None:
    ended = job(2, "print('made')", AXONMPI_COLLECTIVES="shared")
    assert ended.returncode == 1
    assert "ValueError: AXONMPI_COLLECTIVES: expected 'auto' or 'plain', got 'shared'" in ended.stderr
    assert "made" not in ended.stdout


# ---- no memory ------------------------------------------------------------------------------------------------

LIMITED = """
    def limit_files(nbytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""


def test_symmetric_tensors_where_no_memory_can_be_shared(job) -> None:
    """Ordinary memory, one warning, the same results."""
    code = """
    group.all_reduce(torch.ones(300_000))  # the group has what it needs
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        limit_files(4096)
        big = [ax.symmetric_empty((1 << 24,), torch.float64) for _ in range(3)]
        for tensor in big:
            assert group.backend._paths.address(tensor) == 0
            assert tensor.shape == (1 << 24,) and tensor.dtype is torch.float64
        big[0].fill_(world.rank)
        group.all_reduce(big[0])
        assert bool((big[0] == sum(range(world.size))).all())
    assert [warning.category for warning in seen] == [RuntimeWarning], seen
    assert "no memory could be shared with the other ranks" in str(seen[0].message)
    assert "ulimit -f unlimited" in str(seen[0].message)
    check()
    print("done")
    """
    ended = job(2, LIMITED + SUBSET + code)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 2
    assert ended.stderr == ""


def test_a_group_that_finds_no_memory_works(job) -> None:
    """From its making on: the limit comes before it."""
    code = """
    limit_files(4096)
    group = ax.new_group(range(world.size))
    print(group.backend.path)
    ax.symmetric_empty = group.symmetric_empty
    check()
    """
    ended = job(2, LIMITED + SUBSET + code)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("plain") == 2
    assert "RuntimeWarning: no memory could be shared" in ended.stderr


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
    print("done")
    """
    ended = job(2, code.replace("BEFORE", str(before)))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 2


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
    print("done")
    """
    ended = job(2, code)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 2


def test_a_group_that_finds_no_memory_later_works(job) -> None:
    """The first large collective asks for memory; without it, smaller pieces or another way have to do."""
    code = """
    warnings.simplefilter("ignore")
    limit_files(4096)
    check()
    print(group.backend.path)
    """
    ended = job(2, LIMITED + SUBSET + code)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("node") == 2


def test_ordinary_tensors_again_and_again_where_memory_is_short(job) -> None:
    """Often enough for many places in shared memory to be tried, for which there is none."""
    code = """
    warnings.simplefilter("ignore")
    group.barrier()
    limit_files(4096)
    for repeat in range(40):
        for count in (16_000, 300_000, 1_000_003):
            line = (torch.arange(count) % 1000).float()
            tensor = line * (world.rank + 1)
            group.all_reduce(tensor)
            assert torch.equal(tensor, line * sum(range(1, world.size + 1)))
    print(group.backend.path, "done")
    """
    ended = job(2, LIMITED + SUBSET + code)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("node done") == 2


@pytest.mark.parametrize(("ranks", "short"), [(4, (0, 1, 2, 3)), (4, (2, 3)), (3, (0, 1)), (3, (2,))], ids=str)
def test_a_group_on_several_nodes_finds_no_memory_later(job, ranks, short) -> None:
    """A node that is short of memory has smaller buffers, and the others, which have theirs, go by these."""
    code = f"""
    warnings.simplefilter("ignore")
    group.barrier()
    if world.rank in {short}:
        limit_files(4096)
    check()
    large = (torch.arange(1_000_003) % 1000).float()
    tensor = large * (world.rank + 1)
    group.all_reduce(tensor)
    assert torch.equal(tensor, large * sum(range(1, world.size + 1)))
    assert group.backend.path == "nodes"
    assert (group.backend._paths._scratch.chunk_bytes < 1 << 20) == (world.rank in {short})
    print("done")
    """
    ended = job(ranks, LIMITED + SUBSET + code, AXONMPI_RANKS_PER_NODE="2")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == ranks


# ---- arguments ------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 4)
def test_shapes_that_there_are_not(world) -> None:
    group = world.new_group(range(world.size))
    log = getattr(group.backend, "log", [])
    for allocate in (group.symmetric_empty, lambda shape, dtype: ax.symmetric_empty(shape, dtype, group)):
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
            with pytest.raises(error, match=words):
                allocate(shape, torch.float32)
    assert log == []
    assert group.symmetric_empty((2,), torch.float32).shape == (2,)


@pytest.mark.ranks(1, 2, 4)
def test_dtypes_that_there_are_not(world) -> None:
    group = world.new_group(range(world.size))
    for thing in ("float32", float, None, 3):
        with pytest.raises(TypeError, match=rf"dtype: expected a torch\.dtype, got {thing!r}"):
            group.symmetric_empty((2,), thing)
    with pytest.raises(DtypeError, match=r"dtype: tensors of dtype torch\.qint8 cannot be sent; use another one"):
        group.symmetric_empty((2,), torch.qint8)
    with pytest.raises(TypeError, match=r"group: expected an axonmpi\.ProcessGroup or None, got int"):
        ax.symmetric_empty((2,), torch.float32, 3)
    group.barrier()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.ranks(1, 2, 4)
def test_tensors_of_every_shape_and_dtype(world) -> None:
    group = world.new_group(range(world.size))
    for dtype in DTYPES:
        for shape in ((), 5, (0,), [2, 3], torch.Size([4, 0, 2]), (1, 1000), range(2, 4)):
            for tensor in (group.symmetric_empty(shape, dtype), ax.symmetric_empty(shape, dtype)):
                assert tensor.shape == torch.empty((shape,) if isinstance(shape, int) else tuple(shape)).shape
                assert tensor.dtype is dtype
                assert tensor.is_contiguous()
                assert tensor.device.type == "cpu"
                assert not tensor.requires_grad
                assert tensor.zero_().numel() == tensor.view(-1).shape[0]


@pytest.mark.ranks(1, 2)
def test_a_closed_group_allocates_nothing(world) -> None:
    group = world.new_group(range(world.size))
    group.close()
    with pytest.raises(CommunicatorError, match="symmetric_empty: this group cannot be used: it was closed"):
        group.symmetric_empty((2,), torch.float32)


@pytest.mark.ranks(3, 4)
def test_outside_a_group_nothing_is_allocated(world) -> None:
    group = world.new_group([0, 1])
    if group.contains(world.rank):
        assert group.symmetric_empty((2,), torch.float32).shape == (2,)
    else:
        with pytest.raises(ValueError, match=rf"rank {world.rank} is not in this group of ranks \[0, 1\]"):
            group.symmetric_empty((2,), torch.float32)
