"""One copy of an array or tensor for the ranks of a node: its form, its memory, and what is refused."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.compare import assert_equal, refused
from helpers.placements import REAL, is_shared, shared_mappings
from torch import Tensor, nn

import axonmpi as ax
from axonmpi.errors import RankFailedError
from axonmpi.utils.process_memory import available_memory

MIB = 1 << 20


def on_ranks(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.real_ranks(pytest.mark.ranks(1, 2, 4)(test))


def numbers(*shape: int) -> Tensor:
    return torch.arange(24.0).view(*shape)


RECORD = np.dtype([("a", "i1"), ("b", ">f8"), ("c", "U2")], align=True)
ARRAYS = {
    "float64": lambda: np.arange(6.0).reshape(2, 3),
    "Fortran order": lambda: np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": lambda: np.arange(24, dtype=np.int16).reshape(4, 6)[::2, ::-3],
    "expanded": lambda: np.broadcast_to(np.float32(3), (4, 5)),
    "0-d": lambda: np.array(5, dtype=np.uint8),
    "empty": lambda: np.empty((0, 3), dtype=np.float32),
    "big-endian": lambda: np.arange(5, dtype=">i4"),
    "structured": lambda: np.array([(1, 2.5, "x")], dtype=RECORD),
    "times": lambda: np.array(["2024-02-29", "NaT"], dtype="datetime64[D]"),
    "complex": lambda: np.array([1 + 2j, -3j], dtype=np.complex64),
    "bool": lambda: np.array([True, False]),
    "texts": lambda: np.array(["é", "abc"]),
    "read-only": lambda: np.frombuffer(b"bytes", dtype=np.uint8),
}
TENSORS = {
    "float32": lambda: numbers(4, 6),
    "bfloat16": lambda: numbers(24).to(torch.bfloat16),
    "float8": lambda: numbers(24).to(torch.float8_e4m3fn),
    "uint16": lambda: numbers(24).to(torch.uint16),
    "bool": lambda: numbers(24) > 3,
    "conjugate": lambda: torch.tensor([1 + 2j, -3j]).conj(),
    "transposed": lambda: numbers(4, 6).t(),
    "expanded": lambda: torch.tensor([1.0, 2.0]).expand(3, 2),
    "0-d": lambda: torch.tensor(7, dtype=torch.int64),
    "empty": lambda: torch.empty(3, 0, dtype=torch.float64),
    "with gradients": lambda: numbers(24).requires_grad_() * 2,
    "parameter": lambda: nn.Parameter(numbers(24)),
}


@on_ranks
def test_arrays_keep_dtype_shape_and_values_and_cannot_be_changed(world) -> None:
    for name, make in ARRAYS.items():
        expected, shared = make(), ax.node_shared(make)
        assert (type(shared), shared.dtype, shared.shape) == (np.ndarray, expected.dtype, expected.shape), name
        assert shared.flags.c_contiguous, name
        assert shared.tolist() == expected.tolist(), name
        refused(ValueError, (lambda shared=shared, same=expected: shared.__setitem__(..., same), "read-only"))


@on_ranks
def test_tensors_keep_dtype_shape_and_values(world) -> None:
    for name, make in TENSORS.items():
        expected, shared = make().detach(), ax.node_shared(make)
        assert (type(shared), shared.dtype, shared.shape) == (Tensor, expected.dtype, expected.shape), name
        assert (shared.is_contiguous(), shared.requires_grad, shared.is_conj()) == (True, False, False), name
        assert_equal(*(each.double() if name == "float8" else each for each in (shared, expected)), name)


@on_ranks
def test_the_ranks_of_a_node_have_one_copy_and_one_of_them_makes_it(world, monkeypatch) -> None:
    """On two simulated nodes, whose data differ in size."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", str(max(world.size // 2, 1)))
    group, made = world.new_group(range(world.size)), []
    node = group.backend.node_ranks
    first = node[0]

    def make() -> Tensor:
        made.append(group.rank)
        return torch.full((1000 + first,), float(first))

    shared = ax.node_shared(make, group)
    assert made == ([first] if group.rank == first else [])
    assert shared.tolist() == [first] * (1000 + first)
    if world.default_group.backend.name == "mpi" and len(node) > 1:
        assert is_shared(shared)
    group.barrier()
    if group.rank == node[-1]:
        shared[5] = -1
    group.barrier()
    assert shared[5] == -1


@on_ranks
def test_a_group_of_some_ranks(world) -> None:
    group = world.new_group([world.size - 1])
    if group.contains(world.rank):
        assert ax.node_shared(lambda: np.arange(3), group).tolist() == [0, 1, 2]
    else:
        refused(ValueError, (lambda: ax.node_shared(lambda: np.arange(3), group), "is not in this group"))
    ax.barrier()


class Masked(Tensor):
    """A subclass with more than its values."""


@on_ranks
def test_an_error_of_one_rank_is_raised_by_all(world) -> None:
    """Whether `fn` raised it, or its result cannot be shared."""

    def fail() -> Tensor:
        raise OSError("no such file")

    too_many = available_memory() // 2
    cases = (
        (fail, OSError, "no such file"),
        (lambda: [1, 2], TypeError, "expected it to return a numpy.ndarray or a torch.Tensor, got list"),
        (lambda: {"x": np.ones(2)}, TypeError, "got dict; convert it, and call node_shared once for each"),
        (lambda: np.float64(3), TypeError, "got float64"),
        (lambda: np.ma.masked_array([1, 2]), TypeError, "got MaskedArray"),
        (lambda: torch.ones(2).as_subclass(Masked), TypeError, "got Masked"),
        (lambda: np.array([{}, None]), TypeError, "array of numbers or fixed bytes, got dtype object"),
        (lambda: torch.eye(3).to_sparse(), ValueError, "expected a dense tensor, got layout torch.sparse_coo"),
        (lambda: torch.empty(3, device="meta"), ValueError, "takes tensors on cpu, got one on meta"),
        (
            lambda: np.broadcast_to(np.uint32(1), (too_many,)),
            MemoryError,
            "expected at most .* MiB, which",
        ),
        (lambda: torch.ones(1).expand(too_many), MemoryError, "or leave the array in its file"),
    )
    first = world.default_group.backend.node_ranks[0]
    for make, kind, text in cases:
        if world.rank == first:
            refused(kind, (lambda make=make: ax.node_shared(make), text))
        else:
            expected = f"fn of node_shared failed on rank {first}: {kind.__name__}: .*{text}"
            refused(RankFailedError, (lambda make=make: ax.node_shared(make), expected))
    refused(TypeError, (lambda: ax.node_shared(np.ones(3)), "expected a function that returns an array"))
    assert ax.node_shared(lambda: np.arange(3)).tolist() == [0, 1, 2]


@REAL
@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_memory_and_files_go_back_with_the_last_reference(world) -> None:
    def use() -> tuple[int, int]:
        return sum(map(len, shared_mappings())), len(os.listdir("/proc/self/fd"))

    ax.node_shared(lambda: np.ones(3))
    ax.barrier()
    before = use()
    kept = []
    for number in range(30):
        array = ax.node_shared(lambda: np.ones(MIB, dtype=np.uint8))
        tensor = ax.node_shared(lambda: torch.ones(MIB // 4))
        if number < 3:
            kept.append((array[7:9], tensor[7:9]))
    del array, tensor
    mapped, files = use()
    assert (mapped - before[0], files) == (6 * MIB, before[1])
    assert [(int(some.sum()), float(other.sum())) for some, other in kept] == [(2, 2.0)] * 3
    kept.clear()
    assert use() == before


def look_at(array: np.ndarray, tensor: Tensor, file: Path) -> None:
    addresses, spans = (array.ctypes.data, tensor.data_ptr()), shared_mappings()
    shared = [any(address in span for span in spans) for address in addresses]
    file.write_text(f"{int(array.sum())} {int(tensor.sum())} {shared}")


@REAL
@pytest.mark.real_ranks
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("method", "is_same"), [("fork", True), ("spawn", False)])
def test_a_forked_process_reads_the_same_memory_and_a_spawned_one_a_copy(world, tmp_path, method, is_same) -> None:
    array, tensor = ax.node_shared(lambda: np.arange(10)), ax.node_shared(lambda: torch.arange(5))
    if world.rank == 0:
        child = multiprocessing.get_context(method).Process(target=look_at, args=(array, tensor, tmp_path / "seen"))
        child.start()
        child.join()
        assert (tmp_path / "seen").read_text() == f"45 10 {[is_same, is_same]}"
    ax.barrier()
