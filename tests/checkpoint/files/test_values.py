"""Values that go through JSON come back as they were."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from helpers.compare import assert_equal, refused

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


def through_json(value):
    return decoded(json.loads(json.dumps(encoded(value, "it"))))


@pytest.mark.parametrize("value", SAME, ids=repr)
def test_values_come_back(value):
    found = through_json(value)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)])
def test_small_tensors_come_back(dtype, shape):
    tensor = torch.randn(shape).mul(3).to(dtype)
    assert_equal(through_json(tensor), tensor)


def test_schedules_come_back():
    def schedule():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, steps], [2])

    before, after = schedule(), schedule()
    for _ in range(4):
        before.optimizer.step()
        before.step()
    after.load_state_dict(through_json(before.state_dict()))
    assert after.state_dict() == before.state_dict()


class Colour(str):
    """A text of a type of its own."""


ITSELF = []
ITSELF.append({"a": ITSELF})


def test_other_values_are_refused_by_place():
    assert encoded(np.float64(0.5), "extra") == 0.5
    refused(
        ValueError,
        (lambda: encoded({"a": [1, {2}]}, "extra"), r"extra\['a'\]\[1\]: .* got set"),
        (lambda: encoded(torch.zeros(5000), "extra"), "4096 elements, got 5000"),
        (lambda: encoded(np.longdouble(0.5), "extra"), "got longdouble"),
        (lambda: encoded(Colour("red"), "extra"), "got Colour"),
        (lambda: encoded(ITSELF, "extra"), r"extra\[0\]\['a'\].*contains itself"),
        (lambda: encoded({"a": 1 << 20000}, "extra"), r"extra\['a'\]: .* 4096 bits, got 20001"),
        (lambda: decoded({"<tuple>": [], "more": 1}), "no type that a checkpoint has"),
        (lambda: decoded({"<set>": []}), "no type that a checkpoint has"),
    )
