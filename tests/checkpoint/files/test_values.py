"""Values that go through JSON come back as they were."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

from axonmpi.checkpoint.files.values import decoded, encoded

SAME = [
    None,
    True,
    3,
    0.1,
    math.inf,
    "text",
    [1, (2, 3), {"a": (None,)}],
    {"30": 1},
    {30: 1, (1, 2): "x"},
    {"<tuple>": 1},
    Counter({30: 2}),
    {"state": {}, "betas": (0.9, 0.98)},
    torch.bfloat16,
]


@pytest.mark.parametrize("value", SAME, ids=repr)
def test_values_come_back(value):
    found = decoded(json.loads(json.dumps(encoded(value, "it"))))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)])
def test_small_tensors_come_back(dtype, shape):
    tensor = torch.randn(shape).mul(3).to(dtype)
    found = decoded(json.loads(json.dumps(encoded(tensor, "it"))))
    assert found.dtype == dtype
    assert torch.equal(found, tensor)


def test_schedules_come_back():
    def schedule():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, steps], [2])

    def rates(optimizer, scheduler, count):
        found = []
        for _ in range(count):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    uninterrupted = rates(*schedule(), 9)
    optimizer, scheduler = schedule()
    rates(optimizer, scheduler, 4)
    state = json.dumps([encoded(scheduler.state_dict(), "scheduler"), encoded(optimizer.state_dict(), "optimizer")])
    optimizer, scheduler = schedule()
    loaded = decoded(json.loads(state))
    optimizer.load_state_dict(loaded[1])
    scheduler.load_state_dict(loaded[0])
    assert rates(optimizer, scheduler, 5) == uninterrupted[4:]


class Colour(str):
    """A text of a type of its own."""


def test_other_values_are_refused_by_place():
    with pytest.raises(ValueError, match=r"extra\['a'\]\[1\]: .* got set"):
        encoded({"a": [1, {2}]}, "extra")
    with pytest.raises(ValueError, match="4096 elements, got 5000"):
        encoded(torch.zeros(5000), "extra")
    assert encoded(np.float64(0.5), "extra") == 0.5
    for value in (np.longdouble(0.5), Colour("red")):
        with pytest.raises(ValueError, match=f"got {type(value).__name__}"):
            encoded(value, "extra")
