"""Resampling and pools with given output sizes: rows, results and gradients are torch's."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from helpers.compare import refused
from helpers.cut_tensors import assert_as_whole, drawn_cut, drawn_mesh, randn
from torch import Tensor
from torch.nn import functional

import axonmpi as ax
from axonmpi.domain import Domain, DomainTensor, Resample

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def drawn_scale(draw: random.Random, rows: int) -> dict[str, Any]:
    """A number of outputs, or a factor, for one dimension."""
    if draw.random() < 0.5:
        return {"size": draw.choice([rows, 2 * rows, draw.randint(1, 3 * rows)])}
    factor = draw.choice([2, 0.5, draw.randint(1, 9) / draw.randint(1, 9), draw.randint(4, 30) * 0.1])
    return {"scale_factor": max(factor, 1 / rows)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "cubic"])
def test_rows_and_weights_are_those_of_torch(mode: str, dtype: torch.dtype, seed: int) -> None:
    """Along the last dimension of one, two and three; the second is a small image or not."""
    draw = random.Random(seed)
    for _ in range(50):
        rows, count = draw.randint(1, 60), 2 if mode == "cubic" else draw.randint(1, 3)
        scale = drawn_scale(draw, rows)
        corners = draw.random() < 0.5 if mode in ("linear", "cubic") else None
        name = {"linear": LINEAR[count], "cubic": "bicubic"}.get(mode, mode)
        all_scales = {key: [2 if key == "size" else 1.0] * (count - 1) + [value] for key, value in scale.items()}
        x = torch.eye(rows, dtype=dtype).view(rows, *[1] * count, rows).expand(rows, 1, *[2] * (count - 1), rows)
        columns = functional.interpolate(x, mode=name, align_corners=corners, **all_scales)
        expected = columns[:, 0].reshape(rows, -1, columns.shape[-1])[:, 0].T

        outputs, small = len(expected), count == 2 and 2 + len(expected) <= 128
        resample = Resample(mode, scale.get("size"), scale.get("scale_factor"), bool(corners), dtype, small)
        assert resample.size(rows) == outputs
        sources, weights = resample.sources(rows, torch.arange(outputs))
        found = torch.zeros(outputs, rows, dtype=dtype).scatter_add(1, sources, weights)
        tolerance = 0 if mode.startswith("nearest") else 1e-4 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0, msg=f"{scale} of {rows}, {count}")
        low, high = sorted(draw.sample(range(outputs), 2)) if outputs > 1 else (0, 0)
        start, stop = resample.needs(rows, low, high)
        assert set(sources[low : high + 1].flatten().tolist()) <= set(range(start, stop))


@pytest.mark.ranks(2, 3, 4)
def test_drawn_functions_equal_one_process(world: ax.World, seed: int) -> None:
    for number in range(seed, seed + 15):
        draw = random.Random(number)
        mesh, count = drawn_mesh(draw, world), draw.randint(1, 3)
        shape = [draw.randint(1, 2), draw.randint(1, 3), *(draw.randint(1, 9) for _ in range(count))]
        cuts = drawn_cut(draw, mesh, range(draw.choice([0, 2]), len(shape)))
        kind = draw.choice([LINEAR[count], LINEAR[count], "bicubic", "nearest", "area", "avg", "max", "power"])
        options: dict[str, Any] = {}
        if kind in ("avg", "max"):
            sizes = [draw.choice([1, rows, rows // 2 + 1, draw.randint(1, rows)]) for rows in shape[2:]]
            function = getattr(functional, f"adaptive_{kind}_pool{count}d")
            options = {"output_size": sizes} | ({"return_indices": True} if kind == "max" else {})
        elif kind == "power":
            function = getattr(functional, f"lp_pool{count}d")
            options = {"norm_type": draw.choice([2.0, float("inf")]), "kernel_size": 1, "stride": 2}
        else:
            kind = LINEAR[count] if count != 2 and kind == "bicubic" else kind
            function = functional.interpolate
            options = (
                drawn_scale(draw, shape[2]) if count == 1 else {"size": [draw.randint(1, 12) for _ in shape[2:]]}
            )
            options["mode"] = kind
            if kind not in ("nearest", "area"):
                options["align_corners"] = draw.random() < 0.5
                options["antialias"] = count == 2 and draw.random() < 0.3
            elif kind == "nearest":
                options.pop("scale_factor", None)
                options.setdefault("size", shape[2] * 2)
        x = randn(number, *shape) if kind != "power" else randn(number, *shape).abs()
        assert_as_whole(mesh, partial(function, **options), [x], [cuts], what=(number, shape, cuts, options))


@pytest.mark.ranks(2, 3, 4)
def test_integers_are_resampled_and_wrong_options_raise_everywhere(world: ax.World) -> None:
    domain = Domain(ax.DeviceMesh({"y": world.size}), {"y": 2})
    whole = torch.arange(14, dtype=torch.uint8).view(1, 2, 7, 1)
    x = domain.shard(whole)
    for mode in ("nearest", "bilinear"):
        resampled = functional.interpolate(x, size=(3, 2), mode=mode)
        assert isinstance(resampled, DomainTensor)
        assert torch.equal(resampled.full_tensor(), functional.interpolate(whole, size=(3, 2), mode=mode))

    def resized(**options: Any) -> Tensor:
        return functional.interpolate(x, **options)

    refused(
        (RuntimeError, ValueError, NotImplementedError),
        (lambda: resized(size=(3, 1), scale_factor=2), "only one of size or scale_factor"),
        (lambda: resized(size=3, mode="trilinear"), "Got 4D input"),
        (lambda: resized(size=(0, 3)), "sizes should be greater than 0"),
        (lambda: functional.grid_sample(x, torch.zeros(1, 2, 2, 2)), "has no rule"),
        (lambda: functional.fractional_max_pool2d(x, 1, output_size=1), "has no rule"),
    )
