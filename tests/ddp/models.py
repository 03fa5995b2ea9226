"""Small models, their data, and training them in one process: what data parallelism is compared with.

Nothing here uses the package under test but `wrapped`. torch's global random numbers belong to the process and mock
ranks are threads of it, so models are built under a lock.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax

STEPS = 20
BATCH = 12
"""Samples in the joined batch: the same number on each of 1, 2, 3, 4 ranks."""

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


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)


# ---- training ---------------------------------------------------------------------------------------------------


@functools.cache
def trained_alone(make: Callable[[], nn.Module], accumulation: int = 1, steps: int = STEPS) -> dict[str, Tensor]:
    """Train in one process on the joined batches, and return the state dict."""
    model = built(make)
    optimizer = adamw(model)
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
    optimizer = adamw(model)
    numbers = itertools.count()
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(accumulation):
            inputs, targets = part_of(batch_of(model.module, next(numbers)), world.rank, world.size)
            with contextlib.nullcontext() if micro == accumulation - 1 else model.no_sync():
                (loss_of(model(inputs), targets) / accumulation).backward()
        model.sync_gradients()
        optimizer.step()


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


@contextlib.contextmanager
def logged(world: ax.World) -> Iterator[Log]:
    """Record the operations that this rank runs, on mock and on real ranks."""
    backend = world.default_group.backend
    log = Log()
    backend.observer = log
    try:
        yield log
    finally:
        backend.observer = None


class Log:
    """An observer that keeps the name and size of each operation."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def enter(self, operation: str, nbytes: int) -> None:
        if operation != "wait":
            self.calls.append((operation, nbytes))

    def leave(self, operation: str) -> None:
        pass
