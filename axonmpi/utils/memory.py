"""Large buffers on the CPU, allocated in huge pages.

Numpy asks the system for huge pages, torch's allocator does not. Copies of long-lived flat tensors, such as
gradient buckets, are faster on huge pages: far fewer addresses have to be translated.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def flat_zeros(numel: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return [numel] zeros; on the CPU in huge pages if the system has them; local."""
    if not numel or (device is not None and device.type != "cpu"):
        return torch.zeros(numel, dtype=dtype, device=device)
    # numpy has fewer dtypes than torch, but bytes are bytes.
    return torch.from_numpy(np.zeros(numel * dtype.itemsize, dtype=np.uint8)).view(dtype)
