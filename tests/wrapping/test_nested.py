"""Tensors in a model's output, for whose backward wrappers watch."""

from dataclasses import dataclass
from typing import Any

import torch

from axonmpi.wrapping.nested import tensors_in


@dataclass
class Output:
    logits: Any
    states: Any


def test_tensors_of_nested_outputs():
    tensors = [torch.ones(1) for _ in range(5)]
    output = {"first": tensors[0], "rest": [tensors[1], (tensors[2], 3)], "last": Output(tensors[3], (tensors[4],))}
    assert [id(tensor) for tensor in tensors_in(output)] == [id(tensor) for tensor in tensors]
    assert list(tensors_in([None, "text", Output])) == []
