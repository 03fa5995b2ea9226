"""Drawn settings: layers with their options, and small networks of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from helpers.cut_tensors import Cut
from torch import Tensor, nn
from torch.nn import functional as F

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@dataclass
class Setting:
    """A function, and tensors for it.

    Attributes:
        function: Called with tensors and then buffers; returns one or several.
        tensors: Whole tensors; those of floating point have gradients.
        cuts: [tensors].
        buffers: Ordinary tensors that the function may change.
        options: Drawn numbers, for messages.
    """

    function: Callable[..., Any]
    tensors: Sequence[Tensor]
    cuts: Sequence[Cut]
    buffers: Sequence[Tensor] = ()
    options: Any = ""


class Draw(random.Random):
    """Draws of one setting, the same on all ranks.

    Args:
        seed: Of everything that is drawn.
        axes: The mesh's axes.
    """

    def __new__(cls, seed: int, axes: Sequence[str]) -> Draw:
        return super().__new__(cls, seed)

    def __init__(self, seed: int, axes: Sequence[str]) -> None:
        super().__init__(seed)
        self.axes = axes

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def tensor(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.getrandbits(32))
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=torch.Generator().manual_seed(self.getrandbits(32)))

    def sizes(self, count: int) -> list[int]:
        """Draw sizes from 1 to 26, smaller ones if there are many."""
        most = {0: 26, 1: 26, 2: 26, 3: 12}.get(count, 6)
        return [self.choice([1, 2, 3, self.randint(1, most), self.randint(1, most)]) for _ in range(count)]

    def numbers(self, count: int, low: int, high: int) -> list[int]:
        return [self.randint(low, high) for _ in range(count)]

    def cut(self, count: int, first: int = 0) -> Cut:
        """Draw a dimension for each axis, as long as there are any from `first` on; some count from the end."""
        dims = self.sample(range(first, count), min(count - first, len(self.axes)))
        return {axis: dim - self.choice([0, count]) for axis, dim in zip(self.axes, dims, strict=False)} or None

    def spatial(self, count: int) -> Cut:
        """Draw mostly dimensions behind batch and channels."""
        return self.cut(count, self.choice([2, 2, 2, 0]))

    def dim(self, count: int) -> int:
        return self.randrange(-count, count)


def in_factors(draw: Draw, setting: Setting) -> Setting:
    """Divide a dimension of the first tensor, if one can be, so that the function gets it cut in factors."""
    x, *others = setting.tensors
    divisors = [(dim, size) for dim, rows in enumerate(x.shape) for size in range(2, rows) if rows % size == 0]
    if not divisors:
        return setting
    dim, size = draw.choice(divisors)
    opened = x.unflatten(dim, (size, -1))
    return replace(
        setting,
        function=lambda x, *tensors: setting.function(x.flatten(dim, dim + 1), *tensors),
        tensors=[opened, *others],
        cuts=[draw.cut(opened.dim()), *setting.cuts[1:]],
        options=(setting.options, "factors", dim),
    )


# ---- windows, resampling, norms ---------------------------------------------------------------------------------


def windows(draw: Draw) -> Setting:
    count, groups = draw.randint(1, 3), draw.choice([1, 2])
    x = draw.tensor(draw.randint(1, 2), 4, *draw.sizes(count))
    kernel, stride, dilation = (draw.numbers(count, 1, most) for most in (4, 3, 2))
    padding: Any = draw.numbers(count, 0, 3)
    kind = draw.choice(["conv", "conv", "mode", "transposed", "max", "avg"])
    options: dict[str, Any] = {"stride": stride, "padding": padding}
    tensors, cuts = [x], [draw.spatial(count + 2)]
    words = {"max": "max_pool", "avg": "avg_pool", "transposed": "conv_transpose"}
    name = f"{words.get(kind, 'conv')}{count}d"
    of_torch = getattr(F, name)
    if kind in ("conv", "mode", "transposed"):
        tensors += [draw.tensor(4, 4 // groups, *kernel), draw.tensor(4)]
        tensors = tensors[: draw.choice([2, 3])]
        options |= {"dilation": dilation, "groups": groups}
        if kind == "transposed":
            options["output_padding"] = [
                draw.randint(0, max(pair) - 1) for pair in zip(stride, dilation, strict=True)
            ]
        elif kind == "mode":
            mode = draw.choice(["circular", "reflect", "replicate"])
            sides = [side for size in padding[::-1] for side in (size, size - draw.choice([0, 0, 1]) * (size > 0))]
            options["padding"] = 0
            return Setting(
                lambda x, *w: of_torch(F.pad(x, sides, mode), *w, **options), tensors, [*cuts, None, None],
                options=(name, mode, sides, options),
            )  # fmt: skip
        elif draw.chance(0.2):
            options |= {"stride": 1, "padding": "same"}
    else:
        options |= {"padding": [draw.randint(0, size // 2) for size in kernel], "kernel_size": kernel}
        options["ceil_mode"] = draw.chance(0.5)
        if kind == "max":
            options["dilation"] = dilation
            with suppress(RuntimeError):  # of sizes that torch refuses
                if of_torch(tensors[0], **options).isinf().any():  # torch's backward of a padding writes anywhere
                    options |= {"dilation": 1, "ceil_mode": False}
        else:
            options["count_include_pad"] = draw.chance(0.5)
            if count > 1 and draw.chance(0.3):
                options["divisor_override"] = 5
    return Setting(lambda *t: of_torch(*t, **options), tensors, [*cuts, None, None], options=(name, options))


def resampling(draw: Draw) -> Setting:
    count = draw.randint(1, 3)
    sizes = draw.sizes(count)
    x, cut = draw.tensor(draw.randint(1, 2), 2, *sizes), draw.spatial(count + 2)
    kind = draw.choice(["nearest", "nearest-exact", "area", LINEAR[count], LINEAR[count], "avg", "max", "power"])
    kind = "bicubic" if count == 2 and kind == "bilinear" and draw.chance(0.4) else kind
    options: dict[str, Any] = {}
    function: Any = F.interpolate
    if kind in ("avg", "max"):
        function = getattr(F, f"adaptive_{kind}_pool{count}d")
        options["output_size"] = [draw.choice([1, n, max(n // 2, 1), draw.randint(1, n)]) for n in sizes]
    elif kind == "power":
        function, x = getattr(F, f"lp_pool{count}d"), x.abs() + 0.1
        kernel, stride = (draw.numbers(count, 1, 3) for _ in range(2))
        options = {"norm_type": draw.choice([1, 2, 2.5, inf]), "ceil_mode": draw.chance(0.5)}
        options |= {"kernel_size": kernel, "stride": stride} if count > 1 else {"kernel_size": kernel[0]}
    else:
        options["mode"] = kind
        if draw.chance(0.5):
            options["size"] = [draw.choice([n, 2 * n, 1, draw.randint(1, 2 * n + 3)]) for n in sizes]
        else:
            options["scale_factor"] = [draw.choice([2.0, 1.0, 0.5, 3.0, draw.uniform(0.3, 3.3)]) for _ in sizes]
            options["recompute_scale_factor"] = draw.choice([None, True])
        if kind in ("linear", "bilinear", "trilinear", "bicubic"):
            options["align_corners"] = draw.chance(0.5)
            options["antialias"] = kind in ("bilinear", "bicubic") and draw.chance(0.3)
    if kind.startswith("nearest"):  # torch's own backward rounds otherwise than its forward at some factors
        return Setting(lambda x: function(x.detach(), **options), [x], [cut], options=options)
    return Setting(lambda x: function(x, **options), [x], [cut], options=(kind, options))


def norms(draw: Draw) -> Setting:
    shape = [draw.randint(1, 3), draw.choice([2, 4, 6]), *(max(n, 2) for n in draw.sizes(draw.randint(1, 3)))]
    kind = draw.choice(["batch", "running", "eval", "instance", "group", "layer", "rms", "response"])
    channels = shape[1]
    of_weights = shape[draw.randrange(len(shape)) :] if kind in ("layer", "rms") else [channels]
    count = 0 if kind == "response" else draw.choice([0, 1] if kind == "rms" else [0, 1, 2, 2])
    weights = [draw.tensor(*of_weights) for _ in range(count)]
    has_buffers = kind in ("eval", "running") or (kind == "batch" and draw.chance(0.7))
    buffers = [draw.tensor(channels), draw.tensor(channels).abs() + 0.1] if has_buffers else []
    groups = draw.choice([number for number in range(1, channels + 1) if channels % number == 0])

    def function(x: Tensor, *others: Tensor) -> Tensor:
        affine, running = (
            [*part, None, None][: 1 if kind == "rms" else 2] for part in (others[:count], others[count:])
        )
        if kind in ("batch", "eval"):
            return F.batch_norm(x, *running, *affine, kind == "batch", 0.3, 1e-3)
        if kind in ("running", "instance"):
            return F.instance_norm(x, *running, *affine, True, 0.3, 1e-3)
        if kind == "group":
            return F.group_norm(x, groups, *affine, 1e-3)
        if kind == "response":
            return F.local_response_norm(x, 3, 0.1)
        if kind == "layer":
            return F.layer_norm(x, of_weights, *affine, 1e-3)
        return F.rms_norm(x, of_weights, *affine)

    x = draw.tensor(*shape) + draw.choice([0, 0.5])
    return Setting(function, [x, *weights], [draw.spatial(len(shape)), *[None] * count], buffers, (kind, groups))


# ---- networks ---------------------------------------------------------------------------------------------------


def networks(draw: Draw) -> Setting:
    """A few layers of torch.nn one after the other, with running statistics, a skip and a loss."""
    count = draw.randint(1, 3)
    sizes = [max(size, 4) for size in draw.sizes(count)]

    def layer() -> nn.Module:
        own, mode = draw.numbers(count, 1, 4), draw.choice(["circular", "replicate"])
        kinds: list[Callable[[], nn.Module]] = [
            lambda: getattr(nn, f"Conv{count}d")(4, 4, own, draw.numbers(count, 1, 2), draw.numbers(count, 0, 2)),
            lambda: getattr(nn, f"Conv{count}d")(4, 4, 3, padding=1, padding_mode=mode),
            lambda: getattr(nn, f"ConvTranspose{count}d")(4, 4, 3, 2, 1, 1),
            lambda: getattr(nn, f"BatchNorm{count}d")(4, eps=1e-3),
            lambda: nn.GroupNorm(2, 4, eps=1e-3),
            lambda: getattr(nn, f"MaxPool{count}d")(2, 1, 1),
            lambda: getattr(nn, f"AvgPool{count}d")(3, 2, 1, ceil_mode=True),
            lambda: nn.Upsample(scale_factor=draw.choice([1.5, 2.0]), mode=LINEAR[count]),
            lambda: nn.GELU(),
            lambda: nn.LeakyReLU(0.1, inplace=True),
        ]
        return draw.choice(kinds)()

    model = nn.Sequential(*(layer() for _ in range(draw.randint(2, 5)))).double()
    values = [draw.tensor(*p.shape) / 3 for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]

    def function(x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        state = dict(zip(names, others, strict=False))
        state |= dict(zip((name for name, _ in buffers), others[len(names) :], strict=True))
        result = torch.func.functional_call(model, state, (x * 1,))
        skip = torch.cat([F.interpolate(result, size=sizes, mode=LINEAR[count]), x], 1)
        return result, F.mse_loss(skip, torch.zeros_like(skip)) + skip.abs().mean()

    tensors = [draw.tensor(draw.randint(1, 2), 4, *sizes), *values]
    cuts = [draw.cut(count + 2, 2), *[None] * len(values)]
    return Setting(function, tensors, cuts, [buffer.clone() for _, buffer in buffers], [*map(str, model)])


LAYERS = [windows, windows, resampling, norms, networks]
