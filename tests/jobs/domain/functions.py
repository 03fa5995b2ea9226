"""Drawn settings: reductions, losses, products, attention, shapes and functions along whole dimensions."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod
from typing import Any

import torch
from jobs.domain.layers import Cut, Draw, Setting
from torch import Tensor
from torch.nn import functional as F

from axonmpi.domain import attention

SEVERAL = ["sum", "nansum", "mean", "nanmean", "amax", "amin", "logsumexp"]
ONE = ["prod", "max", "min"]
OTHERS = ["norm", "any", "all", "other", "other"]


# ---- reductions, products, attention ----------------------------------------------------------------------------


def reductions(draw: Draw) -> Setting:
    count = draw.randint(1, 4)
    x, one, keepdim = draw.tensor(*draw.sizes(count)), draw.dim(count), draw.chance(0.5)
    x = x.round() if draw.chance(0.3) else x  # with equal elements
    several: Any = draw.choice([one, draw.sample(range(count), draw.randint(1, count)), list(range(count))])
    name = draw.choice([*SEVERAL, *ONE, "var_mean", "std", *OTHERS])
    options: dict[str, Any] = {"dim": one if name in ONE else several, "keepdim": keepdim}
    if name in ("var_mean", "std"):
        x, options["correction"] = torch.cat([x, x + 1]), draw.choice([0, 0.5])
        x = x if name == "var_mean" else torch.cat([x, x.roll(1, one) * 2 + draw.tensor(*x.shape)], one)
    p = draw.choice([1, 2, 2.5, 3, inf, -inf, 0])
    others = [
        lambda x: F.normalize(x, dim=one),
        lambda x: F.cosine_similarity(x, x.exp(), one),
        lambda x: F.pairwise_distance(x, x.exp()),
        lambda x: torch.aminmax(x, dim=one),
        lambda x: torch.count_nonzero(x.round(), several),
        lambda x: (x.argmax(one, keepdim), x.argmin()),
        lambda x: x.sum() * x.max() + x.prod() + x.norm() + x.mean(),
        lambda x: x.square().sum(dim=several, keepdim=True).sqrt() * x,
    ]
    other = draw.choice(others)
    functions: dict[str, Callable[[Tensor], Any]] = {
        "norm": lambda x: torch.linalg.vector_norm(x, p, **options),
        "any": lambda x: (x > 0.5).any(**options),
        "all": lambda x: (x > -1).all(**options),
        "other": other,
    }
    function = functions.get(name, lambda x: getattr(torch, name)(x, **options))
    return Setting(function, [x], [draw.cut(count)], options=(name, options, others.index(other)))


def losses(draw: Draw) -> Setting:
    shape = [draw.randint(1, 4), 3, *draw.sizes(draw.randint(1, 3))]
    options = {"reduction": draw.choice(["none", "sum", "mean"])}
    x, cut = draw.tensor(*shape), draw.spatial(len(shape))
    other = draw.choice([cut, None])
    kinds: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, t: F.mse_loss(x, t, **options),
        lambda x, t: F.l1_loss(x, t, **options),
        lambda x, t: F.huber_loss(x, t, delta=0.7, **options),
        lambda x, t: F.smooth_l1_loss(x, t, beta=0.5, **options),
        lambda x, t: F.binary_cross_entropy_with_logits(x, t.sigmoid(), **options),
        lambda x, t: F.binary_cross_entropy(x.sigmoid(), t.sigmoid(), **options),
        lambda x, t: F.kl_div(x, t, log_target=True, **{**options, "reduction": "sum"}),
        lambda x, t: F.gaussian_nll_loss(x, t, t.exp(), **options),
        lambda x, t: F.poisson_nll_loss(x, t.exp().detach(), full=True, **options),
        lambda x, t: F.cross_entropy(x, t.softmax(1), label_smoothing=0.1, **options),
    ]
    number = draw.randrange(len(kinds) + 6)
    if number < len(kinds):
        return Setting(kinds[number], [x, draw.tensor(*shape)], [cut, other], options=(number, options))
    weight = draw.choice([None, draw.tensor(3).abs()])
    classes = draw.integers(3, shape[0], *shape[2:])
    classes[draw.integers(4, *classes.shape) == 0] = -100
    dims = {axis: dim % len(shape) for axis, dim in (other or {}).items()}
    cuts = None if 1 in dims.values() else {axis: dim - (dim > 1) for axis, dim in dims.items()} or None
    return Setting(
        lambda x, t: F.cross_entropy(x, t, weight, label_smoothing=0.2, **options), [x, classes], [cut, cuts],
        options=("classes", options),
    )  # fmt: skip


def products(draw: Draw) -> Setting:
    sizes = dict(zip("abcdef", draw.sizes(3) + draw.numbers(3, 1, 7), strict=True))
    kind = draw.choice(["einsum", "einsum", "linear", "matmul", "bilinear", "addmm", "embedding"])
    a, b, c, d, *_ = sizes.values()
    function: Callable[..., Tensor]
    if kind == "einsum":
        terms = ["".join(draw.sample("abcdef", draw.randint(1, 3))) for _ in range(draw.randint(1, 3))]
        letters = sorted(set("".join(terms)))
        kind = f"{','.join(terms)}->{''.join(draw.sample(letters, draw.randint(0, min(len(letters), 4))))}"
        shapes = [[sizes[letter] for letter in term] for term in terms]
        function = lambda *operands: torch.einsum(kind, *operands)  # noqa: E731
    elif kind == "matmul":
        shapes = [[draw.choice([1, d]), a, b][draw.randint(0, 2) :], [d, b, c][draw.randint(0, 1) :]]
        function = torch.matmul
    elif kind == "bilinear":
        shapes, function = [[a, d], [a, b], [3, d, b], [3]], F.bilinear
    elif kind == "addmm":
        shapes, function = [[c], [a, b], [b, c]], lambda *t: torch.addmm(*t, beta=0.5, alpha=2)
    else:
        shapes, function = [[d, a, b][draw.randint(0, 2) :], [c, b], [c]], F.linear
    tensors = [draw.tensor(*shape) for shape in shapes]
    if kind == "embedding":
        tensors, function = [draw.integers(5, a, b), draw.tensor(5, d)], F.embedding
    cuts = [draw.cut(x.dim()) if draw.chance(0.6) else None for x in tensors]
    if kind == "embedding" or not any(cuts):
        cuts = [draw.cut(tensors[0].dim()), *[None] * (len(tensors) - 1)]
    return Setting(function, tensors, cuts, options=kind)


def attentions(draw: Draw) -> Setting:
    heads, groups, rows, width = draw.randint(1, 4), draw.choice([1, 1, 2]), draw.randint(1, 26), draw.randint(1, 8)
    keys, batch = draw.choice([rows, draw.randint(1, 26)]), draw.randint(1, 2)
    shapes = [[batch, heads * groups, rows, width], [batch, heads, keys, width], [batch, heads, keys, 3]]
    tensors = [draw.tensor(*shape) for shape in shapes]
    options: dict[str, Any] = {"scale": draw.choice([None, 0.4]), "enable_gqa": groups > 1}
    window = draw.choice([None, None, (draw.randint(0, 5), draw.randint(0, 5))])
    causal, has_mask = draw.chance(0.5), draw.chance(0.3)
    if has_mask:
        mask = draw.tensor(*(draw.choice([1, n]) for n in (batch, heads * groups)), rows, keys)
        tensors.append(mask > -1 if draw.chance(0.3) else mask)
    causal = causal and not has_mask
    method = draw.choice(["auto", "ring", "alltoall"])
    distance = torch.arange(keys) - torch.arange(rows)[:, None]
    before, after = window or (99, 99)
    seen = (distance >= -before) & (distance <= (0 if causal else after))

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        if type(q) is type(k) is type(v) is Tensor:
            float_mask = mask is not None and mask.dtype is not torch.bool
            whole = mask.masked_fill(~seen, -inf) if float_mask else seen if mask is None else mask & seen
            return F.scaled_dot_product_attention(q, k, v, whole, **options)
        if window is None and method == "auto":
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, **options)
        return attention(q, k, v, mask, is_causal=causal, window=window, method=method, **options)

    dims = draw.choice([(-2, -3), (-2, -3), (-3, -2), (-2, 0)])
    first = dict(zip(draw.axes, dims, strict=False))
    cuts: list[Cut] = [first, first, first, None]
    if draw.chance(0.3):
        cuts[draw.randint(1, 2)] = None
    return Setting(function, tensors, cuts, options=(causal, window, method, options))


# ---- shapes, pieces, indices, whole dimensions ------------------------------------------------------------------


def shapes(draw: Draw) -> Setting:
    shape = draw.sizes(draw.randint(3, 4))
    count, dim, order = len(shape), draw.randrange(len(shape)), draw.sample(range(len(shape)), len(shape))
    divisor = draw.choice([n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0])
    other, row = draw.tensor(*shape), draw.randint(-shape[dim], shape[dim] - 1)
    mode = draw.choice(["circular", "reflect", "replicate"])
    shifts, repeats = draw.numbers(2, -9, 9), draw.numbers(count, 1, 2)
    key = tuple(slice(draw.choice([None, 0, 1, -2]), None, draw.randint(1, 3)) for _ in shape[: draw.randint(1, 3)])
    constant = [draw.randint(-1 if n > 2 else 0, 3) for n in shape[::-1] for _ in range(2)]
    constant = constant[: 2 * draw.randint(1, count)]
    sides = [draw.randint(0, n - (mode == "reflect")) for n in shape[:1:-1] for _ in range(2)]
    rows = draw.integers(shape[dim], 4) - draw.choice([0, shape[dim]])
    lead = (slice(None),) * dim

    def assigned(x: Tensor) -> Tensor:
        y = x * 2
        y[(*lead, slice(1, None, 2))] = 3
        y[(*lead, row)] = 4.0
        y[y < -1] = 0
        return y * x

    functions: list[Callable[[Tensor], Any]] = [
        lambda x: x.flatten(min(dim, count - 2), min(dim, count - 2) + 1),
        lambda x: x.permute(order).reshape(-1),
        lambda x: x.permute(order).reshape(prod(shape) // shape[order[-1]], -1) * 2,
        lambda x: x.unflatten(dim, (divisor, -1)).square().flatten(dim, dim + 1) + x,
        lambda x: x.unflatten(dim, (-1, divisor)).transpose(dim, dim + 1).flatten(0, 1),
        lambda x: x.squeeze().unsqueeze(-1).expand(*x.squeeze().shape, 3),
        lambda x: x.mT.movedim(0, -1).contiguous(),
        lambda x: x.repeat(repeats).roll(1, -1),
        lambda x: x.repeat_interleave(2, dim) * x.tile(repeats[:1]).sum(),
        lambda x: torch.cat([other, x, x.flip(dim) * 2], dim),
        lambda x: torch.stack([x, other], dim),
        lambda x: x.chunk(3, dim)[0] * x.split(2, dim)[-1].sum() + sum(x.unbind(dim)).sum(),
        lambda x: x[key] * 2,
        lambda x: x[..., None, row % shape[-1]],
        lambda x: x.select(dim, row) * x.narrow(dim, row % shape[dim], 1).sum(),
        lambda x: torch.roll(x, shifts, order[:2]).flip(order[:2]),
        lambda x: F.pad(x, constant, value=1.5),
        lambda x: F.pad(x, sides, mode),
        lambda x: x.tril(shifts[0]) + x.triu(shifts[1]),
        lambda x: x.unfold(dim, 1 + divisor // 2, 2),
        lambda x: x[(*lead, rows)],
        lambda x: x[(*lead, rows)][other.flatten()[: len(rows)].sum() > 0 :],
        lambda x: x[other > 0],
        lambda x: x.index_select(dim, rows % shape[dim]),
        lambda x: x.masked_fill(other > 0, 0.5) + torch.where(x > 0, x, other),
        assigned,
    ]
    number = draw.randrange(len(functions))
    return Setting(
        functions[number], [draw.tensor(*shape)], [draw.cut(count)], options=(number, dim, divisor, order)
    )


def along(draw: Draw) -> Setting:
    shape = draw.sizes(draw.randint(1, 3))
    dim, norm = draw.dim(len(shape)), draw.choice([None, "ortho", "forward"])
    n = draw.choice([None, draw.randint(1, 14)])
    real: list[Callable[[Tensor], Any]] = [
        lambda x: F.softmax(x, dim=dim),
        lambda x: x.log_softmax(dim),
        lambda x: x.cumsum(dim),
        lambda x: torch.cumprod(x, dim),
        lambda x: x.cummax(dim),
        lambda x: torch.logcumsumexp(x, dim),
        lambda x: x.sort(dim=dim, descending=True),
        lambda x: x.argsort(dim),
        lambda x: x.topk((x.shape[dim] + 1) // 2, dim),
        lambda x: x.kthvalue(1, dim, keepdim=True),
        lambda x: x.median(dim),
        lambda x: torch.diff(x, dim=dim),
        lambda x: F.glu(torch.cat([x, x * 2], dim), dim),
        lambda x: torch.fft.rfft(x, n, dim, norm),
        lambda x: torch.fft.ihfft(x, n, dim, norm),
        lambda x: torch.fft.rfftn(x, norm=norm),
        lambda x: torch.fft.irfft(x * (1 + 2j), n, dim, norm) if n or x.shape[dim] > 1 else x.sin(),
        lambda x: torch.fft.fftn(x * (1 + 2j), norm=norm),
        lambda x: torch.fft.fftshift(torch.fft.hfft(x * (1 + 2j), n or 4, dim, norm)),
    ]
    number = draw.randrange(len(real))
    return Setting(real[number], [draw.tensor(*shape)], [draw.cut(len(shape))], options=(number, dim, norm, n))


FUNCTIONS = [reductions, losses, products, attentions, shapes, shapes, along]
