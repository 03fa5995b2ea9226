"""Who writes what: each byte once, and about as many on each rank."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from axonmpi.checkpoint.writing.local_plan import PAGE_BYTES, Stretch, _evenly


def counts(stretches: Sequence[Stretch], nbytes: int) -> np.ndarray:
    """Return how often each byte of a file is written."""
    written = np.zeros(nbytes, np.int8)
    for stretch in stretches:
        written[stretch.start : stretch.start + stretch.nbytes] += 1
    return written


@pytest.mark.parametrize("equal", [1, 2, 3, 5])
def test_ranks_with_the_same_tensors_write_each_byte_once(equal, seed):
    draw, stretches, end = random.Random(seed), [], 0
    for _ in range(12):
        numel = draw.choice([1, 7, draw.randrange(1, 3 * PAGE_BYTES)])
        stretches.append(Stretch(0, end, torch.empty(numel, dtype=torch.float64), 0, numel, may_wait=False))
        end += numel * 8 + draw.choice([0, 8, PAGE_BYTES])
    of_ranks = [list(_evenly(stretches, equal, own)) for own in range(equal)]
    assert (counts([cut for own in of_ranks for cut in own], end) == counts(stretches, end)).all()
    starts = {id(stretch.view): stretch.start for stretch in stretches}
    assert all(cut.start == starts[id(cut.view)] + 8 * cut.first for own in of_ranks for cut in own)
    share = sum(stretch.nbytes for stretch in stretches) / equal
    assert all(abs(sum(cut.nbytes for cut in own) - share) <= 2 * PAGE_BYTES for own in of_ranks)
