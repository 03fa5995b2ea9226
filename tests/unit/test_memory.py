"""Memory that is used again: when nothing refers to it, no more than was in use at one time, not by forks."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from axonmpi.utils.memory import REUSED_BYTES, ReusedMemory, flat_zeros, gradient_memory, set_gradient_memory

SHAPE = (512, 300)


def test_memory_serves_one_tensor_at_a_time() -> None:
    memory = ReusedMemory(bytearray(1 << 10))
    first = memory.take([4, 8], torch.float32)
    place, row = first.data_ptr(), first[2]
    assert memory.take([2], torch.uint8) is None
    del first
    assert memory.take([2], torch.uint8) is None
    del row
    assert memory.take([257], torch.float32) is None  # it is too small
    again = memory.take([16, 16], torch.float32)
    assert again.data_ptr() == place
    assert again.shape == (16, 16)


def test_gradients_get_memory_that_nothing_refers_to() -> None:
    weight = nn.Parameter(torch.zeros(SHAPE))
    places = {gradient_memory(weight, SHAPE, torch.float32).data_ptr() for _ in range(5)}
    held = [gradient_memory(weight, SHAPE, torch.float32) for _ in range(3)]
    assert len(places) == 1
    assert len({tensor.data_ptr() for tensor in held}) == 3
    assert places <= {tensor.data_ptr() for tensor in held}


def test_no_more_is_kept_than_was_in_use_at_one_time() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    sizes = [4000 + 1000 * number for number in range(6)]  # six models, one after the other
    before = resident()
    for size in sizes:
        held = [gradient_memory(torch.empty(1), (512, size), torch.float32).fill_(1) for _ in range(2)]
        assert all(tensor.shape == (512, size) for tensor in held)
        del held
    largest = 2 * 512 * sizes[-1] * 4
    assert resident() - before < 1.5 * largest


def test_a_process_that_is_forked_off_has_memory_of_its_own() -> None:
    weight = nn.Parameter(torch.zeros(SHAPE))
    gradient = gradient_memory(weight, SHAPE, torch.float32).fill_(1)
    gradient_memory(weight, SHAPE, torch.float32).fill_(3)  # which is free then
    child = os.fork()
    if not child:  # few numbers at once: torch's threads have stayed with the parent
        gradient[0, :8] = 2
        gradient_memory(weight, SHAPE, torch.float32)[0, :8] = 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (gradient == 1).all()
    assert (gradient_memory(weight, SHAPE, torch.float32) == 3).all()


def test_memory_of_its_own_comes_first() -> None:
    weight = nn.Parameter(torch.zeros(SHAPE))
    memory = ReusedMemory(bytearray(weight.nbytes))
    set_gradient_memory(weight, memory)
    own = gradient_memory(weight, SHAPE, torch.float32)
    assert memory.take([1], torch.uint8) is None
    place = own.data_ptr()
    assert gradient_memory(weight, SHAPE, torch.float32).data_ptr() != place
    del own
    assert gradient_memory(weight, SHAPE[::-1], torch.float32).data_ptr() != place
    assert gradient_memory(weight, SHAPE, torch.float32).data_ptr() == place


@pytest.mark.parametrize(
    "parameter",
    [torch.zeros(REUSED_BYTES // 4 - 1), torch.zeros(600, 500).t(), torch.zeros(600, 500, device="meta")],
    ids=["small", "strided", "meta"],
)
def test_gradients_for_which_new_memory_serves(parameter) -> None:
    assert gradient_memory(parameter, parameter.shape, torch.float32) is None


def test_flat_zeros() -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.complex128):
        for numel in (0, 3, 1 << 18):
            assert torch.equal(flat_zeros(numel, dtype), torch.zeros(numel, dtype=dtype))
    assert flat_zeros(3, torch.float32, torch.device("meta")).is_meta
