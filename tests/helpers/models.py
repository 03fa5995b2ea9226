"""Small models, their data, and training them in one process: what data parallelism is compared with.

Nothing here uses the package under test but `wrapped` and what compares ranks. torch's global random numbers belong
to the process and mock ranks are threads of it, so models are built under a lock.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import axonmpi as ax
from axonmpi import GradSyncStrategy

SYNCHRONOUS, OVERLAPPED, NO_SYNC = GradSyncStrategy
AUTOMATIC = pytest.mark.parametrize("strategy", [SYNCHRONOUS, OVERLAPPED])
AS_VIEW = pytest.mark.parametrize("as_view", [True, False])
AFTER, IN_ORDER, BESIDE = WAYS = [
    {"sync_strategy": SYNCHRONOUS},
    {"sync_strategy": OVERLAPPED, "overlaps": False},
    {"sync_strategy": OVERLAPPED, "overlaps": True},
]
"""The ways in which gradients are averaged by themselves: beside backward, or all of them after it."""
EACH_WAY = pytest.mark.parametrize("way", WAYS, ids=["after", "in order", "beside"])
TINY, SMALL, DEFAULT = 1e-6, 0.001, 25
"""Bucket sizes in MiB: one gradient each, a few, and all of them."""
STEPS = 3
"""The first with the buckets as they were laid out, the others in the order of that one's gradients."""
BATCH = 12
"""Samples in the joined batch: the same number on each of 1, 2, 3, 4 ranks."""

Watching = TypeVar("Watching")

_global_random_numbers = threading.RLock()


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a model with the same initial values everywhere."""
    with _global_random_numbers, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def wrapped(
    world: ax.World, module: nn.Module, *, overlaps: bool | None = None, **options
) -> ax.DistributedDataParallel:
    """Wrap a model so that reductions overlap backward or do not, by default as the test's `--overlap` says."""
    backend = options.get("process_group", world.default_group).backend
    before = backend.overlaps
    backend.overlaps = before if overlaps is None else overlaps
    try:
        return ax.DistributedDataParallel(module, **options)
    finally:
        backend.overlaps = before


# ---- models -----------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 3)
    )


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.wide = nn.Linear(8, 8, dtype=torch.float64)
        self.last = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last((self.wide(hidden.double()) * self.scale).float())


class ComplexWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.spectral = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).to(torch.complex64) @ self.spectral
        return self.last(hidden.real + hidden.imag)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, stride=2, groups=2)
        self.head = nn.Linear(4 * 3 * 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))).flatten(1))


class BatchNormalised(nn.Module):
    """Buffers of two dtypes, one of them in a norm that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Words(nn.Module):
    """An embedding whose weight is also that of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.mix = nn.Linear(8, 8)
        self.logits = nn.Linear(8, 11, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(torch.tanh(self.mix(self.embedding(tokens).mean(1))))


class Nothing(nn.Module):
    """Parameters without elements, first, in the middle and last, and one with a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.none_first = nn.Parameter(torch.zeros(0))
        self.linear = nn.Linear(5, 3)
        self.none = nn.Parameter(torch.zeros(3, 0))
        self.shift = nn.Parameter(torch.zeros(()))
        self.none_last = nn.Parameter(torch.zeros(0, 7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        nothing = self.none_first.sum() + self.none.sum() + self.none_last.sum().float()
        return self.linear(x) + self.shift + nothing


def frozen_parts() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[3].requires_grad_(False)
    return model


def channels_last() -> nn.Module:
    return Convolutions().to(memory_format=torch.channels_last)


def strided_weight() -> nn.Module:
    """Weights whose memory is transposed, and one that does not fill its memory."""
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    model[5].weight = nn.Parameter(torch.randn(3, 32)[:, ::2])
    return model


def large() -> nn.Module:
    """With a large weight between small ones."""
    return nn.Sequential(nn.Linear(5, 364), nn.Tanh(), nn.Linear(364, 364), nn.Tanh(), nn.Linear(364, 3))


class Checkpointed(nn.Module):
    """Parts that are computed again in backward, two of them with the same parameters if asked for."""

    def __init__(self, reentrant: bool, shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        if shared:
            self.blocks[2] = self.blocks[0]
        self.last = nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


ZOO: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "mixed_dtypes": MixedDtypes,
    "complex_weight": ComplexWeight,
    "convolutions": Convolutions,
    "channels_last": channels_last,
    "strided_weight": strided_weight,
    "tied_embedding": Words,
    "frozen_parts": frozen_parts,
    "empty_parameters": Nothing,
    "large": large,
}


# ---- data -------------------------------------------------------------------------------------------------------


def batch_of(module: nn.Module, index: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Make batch number `index` for a model: inputs and targets."""
    generator = torch.Generator().manual_seed(7 + index)
    if isinstance(module, Words):
        tokens = torch.randint(0, 11, (size, 4), generator=generator)
        return tokens, torch.randint(0, 11, (size,), generator=generator)
    shape = (2, 7, 7) if any(isinstance(part, nn.Conv2d) for part in module.modules()) else (5,)
    return torch.randn(size, *shape, generator=generator), torch.randn(size, 3, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) if target.is_floating_point() else F.cross_entropy(output, target)


def part_of(batch: tuple[Tensor, Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return one rank's part of a joined batch."""
    inputs, targets = batch
    return inputs.chunk(size)[rank], targets.chunk(size)[rank]


def own_loss(model: nn.Module, world: ax.World, step: int = 0) -> Tensor:
    """Compute the loss of this rank's part of a batch."""
    inputs, targets = part_of(batch_of(model, step), world.rank, world.size)
    return loss_of(model(inputs), targets)


def joined_loss(model: nn.Module, step: int = 0) -> Tensor:
    """Compute the loss of a whole batch."""
    inputs, targets = batch_of(model, step)
    return loss_of(model(inputs), targets)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Take steps as large as the gradients: a wrong factor shows, which Adam divides out again."""
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


# ---- training ---------------------------------------------------------------------------------------------------


@functools.cache
def trained_alone(make: Callable[[], nn.Module], accumulation: int = 1, steps: int = STEPS) -> dict[str, Tensor]:
    """Train in one process on the joined batches, and return the state dict."""
    model = built(make)
    optimizer = sgd(model)
    numbers = itertools.count()
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulation):
            inputs, targets = batch_of(model, next(numbers))
            (loss_of(model(inputs), targets) / accumulation).backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict())


def train(
    model: ax.DistributedDataParallel,
    world: ax.World,
    *,
    accumulation: int = 1,
    steps: int = STEPS,
    set_to_none: bool = True,
) -> None:
    """Train a wrapped model on this rank's parts of the same batches."""
    optimizer = sgd(model)
    numbers = itertools.count()
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(accumulation):
            inputs, targets = part_of(batch_of(model.module, next(numbers)), world.rank, world.size)
            with contextlib.nullcontext() if micro == accumulation - 1 else model.no_sync():
                (loss_of(model(inputs), targets) / accumulation).backward()
        if model.sync_strategy is NO_SYNC:
            model.sync_gradients()
        optimizer.step()


def batch_norm_alone(
    size: int, broadcasts: bool = True, steps: int = STEPS
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Normalise each rank's part of the batch by itself, beginning with rank 0's statistics or the rank's own.

    Returns:
        The parameters, and the buffers that each rank ends with.
    """
    model = built(BatchNormalised)
    optimizer = sgd(model)
    buffers = [{name: buffer.clone() for name, buffer in model.named_buffers()} for _ in range(size)]
    for step in range(steps):
        optimizer.zero_grad()
        before = list(buffers)
        for rank in range(size):
            model.load_state_dict(before[0 if broadcasts else rank], strict=False)
            inputs, targets = part_of(batch_of(model, step), rank, size)
            (loss_of(model(inputs), targets) / size).backward()
            buffers[rank] = {name: buffer.clone() for name, buffer in model.named_buffers()}
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, buffers


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Copy the gradients, by name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def gradients_alone(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor | None]:
    """Return what one backward gives in a copy of a model that is not wrapped."""
    model = copy.deepcopy(module)
    model.zero_grad()
    loss(model).backward()
    return gradients_of(model)


# ---- comparing --------------------------------------------------------------------------------------------------


def assert_close(
    got: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float = 1e-5
) -> None:
    """Compare by name; None only equals None."""
    assert list(got) == list(expected)
    for name, value in expected.items():
        other = got[name]
        assert (other is None) == (value is None), f"{name}: {other} instead of {value}"
        if value is not None and other is not None:
            torch.testing.assert_close(
                other, value, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def assert_same_on_all_ranks(world: ax.World, values: dict[str, Tensor | None]) -> None:
    """Compare to the last bit."""
    everywhere = ax.all_gather_object({k: v for k, v in values.items() if v is not None}, world.default_group)
    for rank, other in enumerate(everywhere):
        assert other.keys() == everywhere[0].keys()
        for name, value in other.items():
            assert torch.equal(value, everywhere[0][name]), f"{name} differs between ranks 0 and {rank}"


def check_averaged(
    world: ax.World, model: ax.DDP, loss: Callable[[nn.Module], Tensor] = joined_loss, tolerance: float = 1e-5
) -> None:
    """Compare gradients with what a backward on one process gives."""
    gradients = gradients_of(model.module)
    assert_close(gradients, gradients_alone(model.module, loss), tolerance)
    assert_same_on_all_ranks(world, gradients)


@contextlib.contextmanager
def observed(world: ax.World, observer: Watching) -> Iterator[Watching]:
    """Have an observer told of the operations that this rank runs, on mock and on real ranks."""
    backend = world.default_group.backend
    backend.observer = observer
    try:
        yield observer
    finally:
        backend.observer = None


def logged(world: ax.World) -> contextlib.AbstractContextManager[Log]:
    """Record the operations that this rank runs."""
    return observed(world, Log())


class Log:
    """An observer that keeps the name and size of each operation."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def enter(self, operation: str, nbytes: int) -> None:
        if operation != "wait":
            self.calls.append((operation, nbytes))

    def leave(self, operation: str) -> None:
        pass
