"""The bytes that each rank writes: each byte once, and about as many on each rank."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from axonmpi.checkpoint.shards.tensor_shard import Replicas
from axonmpi.checkpoint.writing.local_plan import PAGE_BYTES, FileSlice, _evenly


def counts(slices: Sequence[FileSlice], nbytes: int) -> np.ndarray:
    """Return how often each byte of a file is written."""
    written = np.zeros(nbytes, np.int8)
    for file_slice in slices:
        written[file_slice.start : file_slice.start + file_slice.nbytes] += 1
    return written


@pytest.mark.parametrize("equal", [1, 2, 3, 5])
def test_ranks_with_the_same_tensors_write_each_byte_once(equal, seed):
    draw, slices, end = random.Random(seed), [], 0
    for _ in range(12):
        numel = draw.choice([1, 7, draw.randrange(1, 3 * PAGE_BYTES)])
        slices.append(FileSlice(0, end, torch.empty(numel, dtype=torch.float64), 0, numel, may_wait=False))
        end += numel * 8 + draw.choice([0, 8, PAGE_BYTES])
    of_ranks = [list(_evenly(slices, Replicas(equal, own))) for own in range(equal)]
    assert (counts([cut for own in of_ranks for cut in own], end) == counts(slices, end)).all()
    starts = {id(file_slice.view): file_slice.start for file_slice in slices}
    assert all(cut.start == starts[id(cut.view)] + 8 * cut.first for own in of_ranks for cut in own)
    share = sum(file_slice.nbytes for file_slice in slices) / equal
    assert all(abs(sum(cut.nbytes for cut in own) - share) <= 2 * PAGE_BYTES for own in of_ranks)
