"""`axonmpi bench domain`: a training step of a sample cut over the ranks, its time and memory, and the ideal.

Models are a U-Net of fields, a U-Net of volumes, and a vision transformer. Four ranks cut two dimensions of a field
or volume, and the rows of an image. Two variants take turns, each a forward, a backward and a step of SGD: axonmpi,
and the computation alone. For the latter each rank computes a block of the field or volume as if it were the whole,
or its share of the images, all ranks at once, and nobody sends anything.

Before that each variant runs once by itself, as does one process with the whole, whose gradients axonmpi's have to
equal. The memory of that step is the largest growth of the process's resident memory, beyond the parameters. It is
that of tensors alone if malloc keeps no freed ones, as with MALLOC_MMAP_THRESHOLD_=262144 in the environment, at
which steps take longer.

torch has no variant here. Its DTensor returns wrong sizes of padded convolutions along a cut dimension (torch 2.13
and 2.14), and its context parallelism needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...domain import Domain
from ...groups.world import World
from ...mesh import DeviceMesh
from ...utils.process_memory import peak_growth
from .harness.benchmark import Benchmark, Figures, check_error, check_multiple, largest_error
from .harness.options import choices, number
from .harness.table import BAR, Column, figure, ratio, table_lines, text
from .harness.timing import MILLISECONDS, OVER_AXONMPI, interleave, release_memory

_LEVELS = 3
_PATCH, _WIDTH, _LAYERS = 8, 256, 4
_MEBIBYTES = 2**-20

Step = Callable[[], None]


# ---- models -----------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Two convolutions with batch norm on the way down and on the way up, around a U-Net of half the resolution.

    Args:
        dims: Dimensions of a field (2) or volume (3).
        before: Channels of the input.
        channels: Channels of the result; the next level has twice as many.
        levels: Number of resolutions.
    """

    def __init__(self, dims: int, before: int, channels: int, levels: int = _LEVELS) -> None:
        super().__init__()
        kind: dict[str, Any] = {
            name: getattr(nn, f"{name}{dims}d") for name in ("Conv", "ConvTranspose", "BatchNorm")
        }

        def convolutions(inputs: int) -> nn.Sequential:
            layers = []
            for width in (inputs, channels):
                layers += [kind["Conv"](width, channels, 3, padding=1, bias=False), kind["BatchNorm"](channels)]
                layers.append(nn.SiLU())  # a smooth model: rounding changes its gradients little
            return nn.Sequential(*layers)

        self.first = convolutions(before)
        self.below = None
        if levels > 1:
            down = kind["Conv"](channels, channels, 3, stride=2, padding=1, bias=False)
            up = kind["ConvTranspose"](2 * channels, channels, 2, stride=2)
            self.below = nn.Sequential(down, UNet(dims, channels, 2 * channels, levels - 1), up)
            self.last = convolutions(2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, channels, ...] of [N, before, ...]."""
        high: Tensor = self.first(x)
        return high if self.below is None else self.last(torch.cat([high, self.below(high)], 1))


class VisionTransformer(nn.Module):
    """Transformer blocks on the patches of images."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.patches = nn.Conv2d(3, _WIDTH, _PATCH, stride=_PATCH)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(_WIDTH, _WIDTH // 64, 4 * _WIDTH, **options) for _ in range(_LAYERS))
        )
        self.pixels = nn.ConvTranspose2d(_WIDTH, 3, _PATCH, stride=_PATCH)

    def forward(self, images: Tensor) -> Tensor:
        """Return [N, 3, rows, columns] of as many."""
        patches = self.patches(images)
        tokens = self.blocks(patches.flatten(2).transpose(1, 2))
        images = self.pixels(tokens.transpose(1, 2).view(patches.shape))
        return images


@dataclass(frozen=True)
class _Case:
    """A model, its input's shape, and whether the ideal is a block of the input; else it is some of its samples."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    of_block: bool = True


def _cases(options: argparse.Namespace) -> dict[str, _Case]:
    field, volume, channels = options.field, options.volume, options.channels
    return {
        "unet2d": _Case(
            lambda: nn.Sequential(UNet(2, 3, channels), nn.Conv2d(channels, 3, 1)), (1, 3, field, field)
        ),
        "unet3d": _Case(
            lambda: nn.Sequential(UNet(3, 1, channels), nn.Conv3d(channels, 1, 1)), (1, 1, *[volume] * 3)
        ),
        "vit": _Case(VisionTransformer, (options.samples, 3, options.image, options.image), of_block=False),
    }


# ---- measuring --------------------------------------------------------------------------------------------------


def step_of(model: nn.Module, x: Tensor) -> Step:
    """Return a function that runs a step towards the input: forward, backward and SGD's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()

    return step


def measure(world: World, options: argparse.Namespace) -> Figures:
    """Measure on the ranks of a world; collective; the figures are in milliseconds and bytes of one rank.

    Raises:
        RuntimeError: The gradients are not those of one process; on all ranks.
        ValueError: The samples cannot be dealt to these ranks.
    """
    check_multiple("samples", options.samples, world.size, "ranks")
    columns = 2 if world.size % 2 == 0 and world.size > 2 else 1
    blocks = Domain(DeviceMesh({"y": world.size // columns, "x": columns}), {"y": 2, "x": 3})
    rows = Domain(DeviceMesh({"y": world.size}), {"y": 2})
    cases = _cases(options)
    models = {name: _measured(cases[name], blocks, rows, world, options.blocks) for name in options.models}
    sizes = {name: getattr(options, name) for name in ("field", "volume", "image", "samples", "channels")}
    return {**sizes, "models": models}


def _measured(case: _Case, blocks: Domain, rows: Domain, world: World, turns: int) -> Figures:
    torch.manual_seed(0)
    model, whole = case.build(), torch.randn(case.shape)
    domain = blocks if case.of_block else rows
    own = whole[blocks.slices(case.shape)] if case.of_block else whole.chunk(world.size)[world.rank]
    inputs = {"compute": own.clone(), "one process": whole, "axonmpi": domain.shard(whole)}
    models = {name: deepcopy(model) for name in inputs}
    steps = {name: step_of(models[name], inputs[name]) for name in inputs}

    steps["compute"]()  # torch loads its code
    memory = {}
    for name, step in steps.items():
        release_memory()
        memory[name] = int(OVER_AXONMPI.maximum(peak_growth(step)))
    gradients = [_gradients(models[name]) for name in ("axonmpi", "one process")]
    check_error("axonmpi", "gradients", largest_error(gradients[:1], gradients[1:]), world)

    del steps["one process"]
    return {"milliseconds": interleave(steps, blocks=turns, calls=1, unit=MILLISECONDS), "memory": memory}


def _gradients(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters in one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# ---- table ------------------------------------------------------------------------------------------------------

_COLUMNS: list[Column] = [
    ("model", text("model")),
    ("ranks", text("ranks")),
    ("compute, ms", figure("milliseconds", "compute")),
    ("axonmpi", figure("milliseconds", "axonmpi")),
    ("ours / compute", ratio("axonmpi", "compute", "milliseconds")),
    BAR,
    ("one process, MiB", figure("memory", "one process", form=".0f", scale=_MEBIBYTES)),
    ("compute", figure("memory", "compute", form=".0f", scale=_MEBIBYTES)),
    ("axonmpi", figure("memory", "axonmpi", form=".0f", scale=_MEBIBYTES)),
    ("ours / one process", ratio("axonmpi", "one process", "memory")),
]


def table(results: list[Figures]) -> str:
    """Format the figures of several numbers of ranks."""
    first = results[0]
    title = (
        f"a step of one sample: field {first['field']}², volume {first['volume']}³, {first['channels']} channels; "
        f"{first['samples']} images of {first['image']}²; medians, {first['cores']} cores"
    )
    rows = [
        {"model": name, "ranks": result["ranks"], **figures}
        for name in first["models"]
        for result in results
        for figures in [result["models"][name]]
    ]
    return "\n".join([title, *table_lines(_COLUMNS, rows, left=[0])])


DOMAIN = Benchmark(
    "a step of a sample cut over the ranks, its time and memory: U-Nets and a vision transformer, and the ideal",
    measure,
    table,
    ranks=(1, 2, 4),
    blocks=5,
    uses_torch=False,
    options={
        "--models": choices(("unet2d", "unet3d", "vit")),
        "--field": number("rows and columns of the field", 512),
        "--volume": number("rows, columns and layers of the volume", 96),
        "--channels": number("channels of the U-Nets at full resolution", 16),
        "--image": number(f"rows and columns of an image, of patches of {_PATCH}", 256),
        "--samples": number("images, a multiple of the ranks", 4),
    },
)
