"""Domain and context parallelism: one sample cut over ranks, where its activations do not fit one of them.

A `Domain` names the axes of a mesh that cut samples; a `DomainTensor` has this rank's part and shows the whole's
shape, so that models run unchanged. Read first `domain.py`, `domain_tensor.py`, which looks up a function's rule,
and `movement.py`. It imports `wrapping`, `autograd`, `mesh`, `backends` and `utils`.

layout                how a tensor is cut: factors of its dimensions
window_arithmetic     the rows that outputs of windows need
movement, edges       rows between ranks, forward and back; memory of padded tensors
rules/                a rule for each function of torch, a file for each family
local_map             functions of a user's own
"""

from .domain import Domain
from .domain_tensor import DomainTensor
from .local_map import local_map
from .rules.attention import attention
from .window_arithmetic import Resample, Transposed, Window

__all__ = ["Domain", "DomainTensor", "Resample", "Transposed", "Window", "attention", "local_map"]
