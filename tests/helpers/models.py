"""Small models, their batches, and training them: wrapped on ranks, and in one process of plain torch.

torch's global random numbers belong to the process and mock ranks are threads of it, so models are built under a
lock.
"""

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axonmpi as ax
from axonmpi import GradSyncStrategy
from helpers.compare import assert_close, assert_same_on_all_ranks, gradients_alone, gradients_of
from helpers.once import once, one_thread
from helpers.steps import Batch, Optimizing, Step, again, loss_of, sgd, sync_gradients, usual_step

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
STRATEGIES = list(ax.ShardingStrategy)
TINY, SMALL, DEFAULT = 1e-6, 0.001, 25
"""Bucket sizes in MiB: one gradient each, a few, and all of them."""
STEPS = 3
"""The first with the buckets as they were laid out, the others in the order of that one's gradients."""
BATCH = 12
"""Samples in the joined batch: the same number on each of 1, 2, 3, 4 ranks."""


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a model with the same initial values everywhere."""
    with one_thread, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def in_turn(argument: str, cases: Iterable[Any]) -> pytest.MarkDecorator:
    """Run each case where units take turns in memory, and in another setting in turn."""
    others = itertools.cycle(("one_node", "kept", "replicas"))
    rows = [(case, setting) for case in cases for setting in ("apart", next(others))]
    ids = [f"{name_of(case)}-{setting}" for case, setting in rows]
    return pytest.mark.parametrize((argument, "setting"), rows, ids=ids, indirect=["setting"])


def name_of(case: Any) -> str:
    """Return the name of a case: of each value, the same in each process."""
    return "-".join(map(name_of, case)) if isinstance(case, tuple) else getattr(case, "__name__", str(case))


# ---- models -----------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 3)
    )


def large() -> nn.Module:
    """With a large weight between small ones."""
    return nn.Sequential(nn.Linear(5, 364), nn.Tanh(), nn.Linear(364, 364), nn.Tanh(), nn.Linear(364, 3))


def strided_weight() -> nn.Module:
    """Weights whose memory is transposed, and one that does not fill its memory."""
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    model[5].weight = nn.Parameter(torch.randn(3, 32)[:, ::2])
    return model


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.wide = nn.Linear(8, 8, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.spectral = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(torch.tanh(self.first(x)).double()) * self.scale
        hidden = hidden.to(torch.complex64) @ self.spectral
        return self.last(hidden.real + hidden.imag)


def convolutions() -> nn.Module:
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, groups=2), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 3 * 3, 3))


def channels_last() -> nn.Module:
    return convolutions().to(memory_format=torch.channels_last)


def batch_norm() -> nn.Module:
    """Buffers of two dtypes."""
    layers = {"conv": nn.Conv2d(2, 4, 3), "norm": nn.BatchNorm2d(4), "relu": nn.ReLU()}
    return nn.Sequential(OrderedDict(layers, pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(4, 3)))


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


class Residual(nn.Module):
    """A block that returns a tuple, and takes a keyword."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + scale * self.down(hidden), {"hidden": hidden}


class Blocks(nn.Module):
    """Blocks between an embedding-like layer and a head, with a parameter of the model's own."""

    def __init__(self, depth: int = 4, width: int = 12) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden, _ = block(hidden, scale=0.5)
        return self.head(hidden * self.scale)


class TiedBlocks(nn.Module):
    """Words in, words out, through one matrix; two blocks share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Residual(8) for _ in range(3))
        self.blocks[2].up = self.blocks[0].up
        self.logits = nn.Linear(8, 11, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).mean(1)
        for block in self.blocks:
            hidden, _ = block(hidden)
        return self.logits(hidden)


def frozen_blocks() -> nn.Module:
    model = Blocks()
    for part in (model.blocks[1], model.first.weight, model.blocks[2].norm):
        part.requires_grad_(False)
    return model


def fail(*_: object) -> None:
    """A hook that raises an error in the middle of forward or backward."""
    raise ArithmeticError("in the middle")


class MayFail(Blocks):
    """Fails in the middle of forward or backward, when told to."""

    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for index, block in enumerate(self.blocks):
            hidden, _ = block(hidden)
            if index == 1 and self.fails == "forward":
                fail()
            if index == 1 and self.fails == "backward":
                hidden.register_hook(fail)
        return self.head(hidden * self.scale)


class PassesNothing(torch.autograd.Function):
    """Passes the first input on; backward has no gradient for the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unused: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Whole(nn.Module):
    """A pair of layers that may be divided over ranks, and a norm that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(nn.functional.pad(x, (0, 2)))[..., :6])))


class Weights(nn.Module):
    """Parameters, and a function of them and of the inputs."""

    def __init__(self, compute: Callable[..., Tensor], weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.compute, self.weights = compute, nn.ParameterList(weights)

    def forward(self, *inputs: Any) -> Tensor:
        return self.compute(self.weights, *inputs)


class Checkpointed(nn.Sequential):
    """Layers that are computed once more in backward, the first and the last of them the same if asked for."""

    def __init__(self, reentrant: bool, shared: bool = False) -> None:
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
        super().__init__(nn.Linear(5, 8), *blocks[:2], blocks[0 if shared else 2], nn.Linear(8, 3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        for block in list(self)[1:4]:
            x = again(block, x, self.reentrant)
        return self[4](x)


ZOO: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "mixed_dtypes": MixedDtypes,
    "convolutions": convolutions,
    "channels_last": channels_last,
    "strided_weight": strided_weight,
    "tied_embedding": TiedBlocks,
    "frozen_parts": frozen_blocks,
    "empty_parameters": Nothing,
    "large": large,
}


# ---- data ------------------------------------------------------------------------------------


def batch_of(module: nn.Module, index: int, size: int = BATCH) -> Batch:
    """Make batch number `index` for a model: inputs and targets."""
    generator = torch.Generator().manual_seed(7 + index)
    if any(isinstance(part, nn.Embedding) for part in module.modules()):
        tokens = torch.randint(0, 11, (size, 4), generator=generator)
        return tokens, torch.randint(0, 11, (size,), generator=generator)
    shape = (2, 7, 7) if any(isinstance(part, nn.Conv2d) for part in module.modules()) else (5,)
    return torch.randn(size, *shape, generator=generator), torch.randn(size, 3, generator=generator)


def part_of(batch: Batch, rank: int, size: int) -> Batch:
    """Return one rank's part of a joined batch."""
    inputs, targets = batch
    return inputs.chunk(size)[rank], targets.chunk(size)[rank]


def own_data(model: nn.Module, world: ax.World, index: int = 0) -> Batch:
    """Make this rank's part of a batch."""
    return part_of(batch_of(model, index), world.rank, world.size)


def own_loss(model: nn.Module, world: ax.World, step: int = 0) -> Tensor:
    """Compute the loss of this rank's part of a batch."""
    inputs, targets = own_data(model, world, step)
    return loss_of(model(inputs), targets)


def joined_loss(model: nn.Module, step: int = 0) -> Tensor:
    """Compute the loss of a whole batch."""
    inputs, targets = batch_of(model, step)
    return loss_of(model(inputs), targets)


# ---- training ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_group(world: ax.World, overlaps: bool | None = None) -> Iterator[ax.ProcessGroup]:
    """Make a group of all ranks, which are where the test has put them; collective."""
    group = world.new_group(range(world.size))
    if overlaps is not None:
        group.backend.overlaps = overlaps
    yield group
    group.close()


def wrapped(world: ax.World, module: nn.Module, *, overlaps: bool | None = None, **options: Any) -> ax.DDP:
    """Wrap a model so that reductions overlap backward or do not, by default as the test's `--overlap` says."""
    backend = options.get("process_group", world.default_group).backend
    before = backend.overlaps
    backend.overlaps = before if overlaps is None else overlaps
    try:
        return ax.DDP(module, **options)
    finally:
        backend.overlaps = before


def train(
    model: nn.Module, world: ax.World, steps: int = STEPS, make: Optimizing = sgd, step: Step = usual_step
) -> torch.optim.Optimizer:
    """Train a wrapped model on this rank's parts of batches."""
    optimizer = make(model)
    for number in range(steps):
        step(model, optimizer, own_data(model, world, number))
    return optimizer


@once
def trained_alone(
    make: Callable[[], nn.Module], steps: int = STEPS, make_optimizer: Optimizing = sgd, step: Step = usual_step
) -> nn.Module:
    """Train a plain model on whole batches."""
    model = built(make)
    optimizer = make_optimizer(model)
    for number in range(steps):
        step(model, optimizer, batch_of(model, number))
    return model


def equals_alone(
    world: ax.World,
    make: Callable[[], nn.Module],
    step: Step = usual_step,
    make_optimizer: Optimizing = sgd,
    *,
    wrapper: Callable[..., Any] = ax.FSDP,
    steps: int = 2,
    tolerance: float = 1e-5,
    overlaps: bool | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Train a wrapped model on parts of batches and a plain one on the whole; compare, and return the state."""
    plain = trained_alone(make, steps, make_optimizer, step)
    with new_group(world, overlaps) as group:
        model = wrapper(built(make), **{"process_group": group, **options})
        train(model, world, steps, make_optimizer, step)
        state = model.full_state_dict() if isinstance(model, ax.FSDP) else model.state_dict()
    assert_close(state, plain.state_dict(), tolerance)
    assert_same_on_all_ranks(world, state)
    return state


def check_averaged(
    world: ax.World, model: ax.DDP, loss: Callable[[nn.Module], Tensor] = joined_loss, tolerance: float = 1e-5
) -> None:
    """Compare gradients with what a backward on one process gives."""
    gradients = gradients_of(model.module)
    assert_close(gradients, gradients_alone(model.module, loss), tolerance)
    assert_same_on_all_ranks(world, gradients)


def check_backward(world: ax.World, model: ax.DDP, step: int = 0, factor: float = 1) -> None:
    """Compute the gradients of a batch anew, and compare them with a multiple of those on one process."""
    model.zero_grad()
    own_loss(model, world, step).backward()
    sync_gradients(model)
    check_averaged(world, model, lambda alone: factor * joined_loss(alone, step))
