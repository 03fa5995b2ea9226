"""Memory for large flat tensors."""

import torch

from axonmpi.utils.memory import flat_zeros


def test_flat_zeros() -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.complex128):
        for numel in (0, 3, 1 << 18):
            assert torch.equal(flat_zeros(numel, dtype), torch.zeros(numel, dtype=dtype))
    assert flat_zeros(3, torch.float32, torch.device("meta")).is_meta
