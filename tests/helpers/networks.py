"""Networks whose first values are the same on all mock ranks, whose threads share a generator of random numbers."""

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def filled(module: M, start: float = 0.0) -> M:
    """Give the parameters some values between -0.4 and 0.4."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            numbers = torch.arange(parameter.numel(), dtype=parameter.dtype) + 100 * number + start
            parameter.copy_(numbers.mul(1.7).sin().mul(0.4).view_as(parameter))
    return module
