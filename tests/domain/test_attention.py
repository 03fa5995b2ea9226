"""Attention whose tokens, heads or samples are cut, against torch's on the whole tensors."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from helpers.compare import assert_close, refused
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.domain import Domain, DomainTensor, attention, blockwise
from axonmpi.errors import DomainError

pytestmark = pytest.mark.ranks(2, 3, 4)
SETTINGS = 16


class Case(NamedTuple):
    """Drawn operands, how each is cut (None: all ranks have it), and options."""

    operands: list[Tensor]
    cuts: list[dict[str, int] | None]
    options: dict[str, Any]

    def alone(self, operands: list[Tensor]) -> Tensor:
        """Torch's result on whole tensors."""
        options = dict(self.options)
        window, causal, _ = (options.pop(name) for name in ("window", "is_causal", "method"))
        q, k, v, *masks = operands
        mask = masks[0] if masks else None
        distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
        before, after = window or (99, 99)
        seen = (distance >= -before) & (distance <= (0 if causal else after))
        if mask is not None and mask.dtype is not torch.bool:
            mask = mask.masked_fill(~seen, -torch.inf)
        else:
            mask = seen if mask is None else seen & mask
        return F.scaled_dot_product_attention(q, k, v, mask, **options)


def normal(seed: int, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def draw_mask(draw: random.Random, shape: list[int]) -> list[Tensor]:
    """None, or a mask of a shape that broadcasts to another."""
    sizes = [1 if draw.random() < 0.2 else size for size in shape][draw.choice([0, 0, -2]) :]
    mask = normal(draw.randrange(1000), sizes)
    return draw.choice([[], [], [mask > -1], [mask], [mask.masked_fill(mask < -1, -torch.inf)]])


def drawn(seed: int, axes: list[str]) -> Case:
    draw = random.Random(seed)
    lead, heads, groups = (
        [draw.randint(1, 2)] * draw.choice([0, 1, 1, 2]),
        draw.randint(1, 4),
        draw.choice([1, 1, 2, 3]),
    )
    rows, features, values = draw.randint(1, 16), draw.randint(1, 8), draw.randint(1, 8)
    keys = draw.choice([rows, draw.randint(1, 16)])
    shapes = [[heads * groups, rows, features], [heads, keys, features], [heads, keys, values]]
    operands = [normal(seed + number, [*lead, *shape]) for number, shape in enumerate(shapes)]
    operands += draw_mask(draw, [*lead, heads * groups, rows, keys])
    dims = [dict(zip(axes, draw.choice([(-2, -3), (-2, -3), (-3, -2), (-2, 0)]), strict=False)) for _ in operands]
    cuts: list[dict[str, int] | None] = [dims[0]] * 3 if draw.random() < 0.6 else [*dims[:3]]
    if draw.random() < 0.3:
        cuts[draw.randrange(3)] = None
    cuts += [draw.choice([None, {axes[0]: -2}])] * (len(operands) - 3)
    if not any(cuts):
        cuts[0] = dims[0]
    window = draw.choice([None, (draw.randint(0, 5), draw.randint(0, 5))])
    causal = draw.random() < 0.5
    options = {"is_causal": causal, "window": window, "scale": draw.choice([None, 0.4]), "enable_gqa": groups > 1}
    methods = ["auto", "ring", "alltoall"][: 2 if len(axes) > 1 else 3]  # heads may be cut by the second axis
    return Case(operands, cuts, options | {"method": draw.choice(methods)})


def cut_like(mesh: ax.DeviceMesh, tensor: Tensor, cut: dict[str, int] | None) -> tuple[Tensor, Tensor, Any]:
    """This rank's leaf, the operand that shows the whole, and which part of the whole the leaf is."""
    if cut is not None and len({dim % tensor.dim() for dim in cut.values()}) < len(cut):
        cut = {axis: dim for axis, dim in cut.items() if dim == -2}
    if not cut:
        leaf = tensor.clone().requires_grad_(tensor.is_floating_point())
        return leaf, leaf, ...
    domain = Domain(mesh, cut)
    part = domain.slices(tensor.shape)
    leaf = tensor[part].clone().requires_grad_(tensor.is_floating_point())
    return leaf, domain.from_local(leaf, tensor.shape), part


def compare(mesh: ax.DeviceMesh, case: Case, tolerance: float) -> None:
    """Compare results and gradients with those of torch on the whole tensors."""
    wholes = [each.double().requires_grad_() if each.is_floating_point() else each for each in case.operands]
    expected = case.alone(wholes)
    leaves, operands, parts = zip(
        *(cut_like(mesh, each.detach(), cut) for each, cut in zip(case.operands, case.cuts, strict=True)),
        strict=True,
    )
    result = attention(*operands, **case.options)
    found = result.full_tensor() if isinstance(result, DomainTensor) else result
    assert_close(found.double(), expected, tolerance, str(case.options))
    slope = normal(0, expected.shape)
    (result.double() * slope).sum().backward()
    expected.backward(slope)
    for leaf, whole, part in zip(leaves, wholes, parts, strict=True):
        if leaf.is_floating_point():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            assert_close(gradient.double(), whole.grad[part], tolerance, str((case.cuts, case.options)))


def test_results_and_gradients_are_those_of_the_whole(world: ax.World, seed: int) -> None:
    meshes = [ax.DeviceMesh({"cp": world.size})]
    meshes += [ax.DeviceMesh({"cp": 2, "y": 2})] if world.size == 4 else []
    for number in range(seed, seed + SETTINGS):
        mesh = meshes[number % len(meshes)]
        compare(mesh, drawn(number, list(mesh.axes)), 1e-10)


def test_on_devices_without_the_fast_kernel(world: ax.World, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are written out, a few rows at a time."""
    monkeypatch.setattr(blockwise, "rows_of_a_tile", lambda *args, **options: (False, 3))
    mesh = ax.DeviceMesh({"cp": world.size})
    for number in range(seed, seed + SETTINGS // 4):
        compare(mesh, drawn(number, ["cp"]), 1e-10)


def test_in_single_precision(world: ax.World, seed: int) -> None:
    mesh = ax.DeviceMesh({"cp": world.size})
    for number in range(seed, seed + SETTINGS // 4):
        case = drawn(number, ["cp"])
        operands = [each.float() if each.is_floating_point() else each for each in case.operands]
        compare(mesh, case._replace(operands=operands), 1e-4)


def errors_and_gradients(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> tuple[Tensor, ...]:
    result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return result, *torch.autograd.grad((result * slope).sum(), (q, k, v))


@pytest.mark.ranks(2, 4)
def test_error_in_bfloat16_is_that_of_torch(world: ax.World) -> None:
    """At most 1.5 times as large, in the mean and at most."""
    shape = (1, 2, 301, 32)
    domain = Domain(ax.DeviceMesh({"cp": world.size}), {"cp": 2})
    wholes = [normal(number, shape, torch.bfloat16).requires_grad_() for number in range(3)]
    slope = normal(3, shape, torch.bfloat16)
    exact = errors_and_gradients(*(each.detach().double().requires_grad_() for each in wholes), slope.double())
    alone = errors_and_gradients(*wholes, slope)
    parts = [each.detach()[domain.slices(each.shape)].clone().requires_grad_() for each in wholes]
    result = F.scaled_dot_product_attention(*(domain.from_local(p, slope.shape) for p in parts), is_causal=True)
    (result * slope).sum().backward()
    gradients = [domain.from_local(each, slope.shape).full_tensor() for each in (p.grad for p in parts)]
    for expected, own, cut in zip(exact, alone, [result.full_tensor(), *gradients], strict=True):
        errors = [(each.double() - expected).detach() for each in (cut, own)]
        for norm in (2.0, torch.inf):
            found, allowed = (float(error.flatten().norm(norm)) for error in errors)
            assert found <= 1.5 * allowed


@pytest.mark.ranks(4)
def test_a_window_fetches_its_halo_alone(world: ax.World) -> None:
    """And causal attention no keys behind its queries."""
    keys = tuple(((start, start + 8),) for start in range(0, 32, 8))
    windowed = blockwise.Blocks(world.default_group, keys, keys, 3, 1, 1.0)
    fetched = [
        sum(run.stop - run.start for plan in windowed.plans.values() for run in plan.foreign(r)) for r in range(4)
    ]
    assert fetched == [1, 4, 4, 3]
    assert list(windowed.plans) == [1, 3]  # of the rank behind and of the rank before

    causal = blockwise.Blocks(world.default_group, keys, keys, torch.inf, 0, 1.0)
    assert [plan.rows(0) for plan in causal.plans.values()] == [0, 0, 0]


@pytest.mark.ranks(4)
def test_causal_ranks_have_as_many_scores_to_compute_in_each_step(world: ax.World) -> None:
    """32 tokens in 8 chunks: two on the diagonal and one below it, then two below it of each other rank."""
    chunks = tuple(blockwise.zigzag(32, 4))
    blocks = blockwise.Blocks(world.default_group, chunks, chunks, torch.inf, 0, 1.0)
    starts = {0: 0} | {step: plan.ranges[world.rank][0] for step, plan in blocks.plans.items()}
    scores = []
    for step, start in starts.items():
        owner = (world.rank + step) % 4
        tiles = list(blocks.tiles(owner, start - 8 * owner if step else 0, None))
        sizes = [
            (each.rows.stop - each.rows.start, each.keys.stop - each.keys.start, each.causal) for each in tiles
        ]
        scores.append(sum(rows * (rows + 1) // 2 if causal else rows * keys for rows, keys, causal in sizes))
    assert scores == [2 * 10 + 16, 32, 32, 32]


def test_refusals(world: ax.World) -> None:
    domain = Domain(ax.DeviceMesh({"cp": world.size}), {"cp": -2})
    q = domain.shard(torch.ones(1, 2, 8, 4))
    flat = domain.shard(torch.ones(8, 4))
    twice = Domain(ax.DeviceMesh({"cp": world.size, "y": 1}), {"cp": -2, "y": 1}).shard(torch.ones(1, 2, 8, 4))
    other = Domain(ax.DeviceMesh({"cp": world.size}), {"cp": -2}).shard(torch.ones(1, 2, 8, 4))
    refused(
        DomainError,
        (lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1), "dropout_p=0.1"),
        (lambda: attention(q, other, other), "two meshes"),
        (lambda: attention(flat, flat, flat, method="alltoall"), "no heads that are free"),
        (lambda: attention(twice, twice, twice, method="alltoall"), "free to be cut"),
    )
    refused(
        ValueError,
        (lambda: attention(q, q, q, method="ulysses"), "auto, ring, alltoall"),
        (lambda: attention(q, q, q, window=(-1, 0)), "at least 0"),
        (lambda: attention(q, q, torch.ones(1, 2, 7, 4)), r"\[H, S, E\]"),
        (lambda: attention(q, q, q, torch.ones(7, 7)), r"a mask \[H, T, S\]"),
        (lambda: attention(q, q.double(), q), "one dtype"),
    )


# ---- layers and models ------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """A small GPT with grouped heads and rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        names = {"q": 16, "k": 8, "v": 8, "out": 16}
        self.blocks = nn.ModuleList(nn.ModuleDict({n: nn.Linear(16, w) for n, w in names.items()}) for _ in "ab")
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] * torch.tensor([1.0, 1.0, 0.1, 0.1], dtype=torch.float64)
        signs = torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
        for block in self.blocks:
            normed = self.norm(x)
            q, k, v = (block[name](normed).unflatten(-1, (-1, 4)).movedim(1, 2) for name in "qkv")
            q, k = (each * angles.cos() + each * signs * angles.sin() for each in (q, k))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + block["out"](mixed.movedim(1, 2).flatten(-2))
        return x


def layer(seed: int, kind: type[nn.Module], *args: Any, **options: Any) -> nn.Module:
    """A layer in float64 whose parameters follow from a seed."""
    made = kind(*args, **options).double()
    for number, parameter in enumerate(made.parameters()):
        parameter.data = normal(seed + number, parameter.shape) / 4
    return made


def gradients(module: nn.Module, result: Tensor) -> list[Tensor | None]:
    module.zero_grad()
    (result * normal(7, result.shape)).sum().backward()
    return [parameter.grad for parameter in module.parameters()]


def test_a_model_with_rotary_positions_is_that_of_one_process(world: ax.World) -> None:
    domain = Domain(ax.DeviceMesh({"cp": world.size}), {"cp": 1})
    for length in (1, 3, 16, 21):
        model = layer(length, Rotary)
        tokens = torch.arange(2 * length).reshape(2, length) % 11
        alone, cut = model(tokens), model(domain.shard(tokens))
        assert_close(cut.full_tensor(), alone, 1e-10)
        assert_close(gradients(model, cut), gradients(model, alone), 1e-10)


@pytest.mark.parametrize("batch_first", [True, False])
def test_multi_head_attention_is_that_of_one_process(world: ax.World, batch_first: bool) -> None:
    domain = Domain(ax.DeviceMesh({"cp": world.size}), {"cp": 1 if batch_first else 0})
    module = layer(0, nn.MultiheadAttention, 12, 3, batch_first=batch_first)
    x = normal(1, [2, 9, 12] if batch_first else [9, 2, 12])
    hidden = torch.arange(9) > torch.tensor([[8], [5]])
    causal = torch.ones(9, 9, dtype=torch.bool).triu(1)
    for masks in (
        {},
        {"key_padding_mask": hidden},
        {"attn_mask": causal, "is_causal": True},
        {"attn_mask": causal, "key_padding_mask": hidden},
        {"attn_mask": normal(2, [6, 9, 9])},
    ):
        alone, cut = (module(each, each, each, need_weights=False, **masks)[0] for each in (x, domain.shard(x)))
        assert_close(cut.full_tensor(), alone, 1e-10)
        assert_close(gradients(module, cut), gradients(module, alone), 1e-10)

    extra = layer(0, nn.MultiheadAttention, 12, 3, batch_first=batch_first, add_bias_kv=True)
    cut = domain.shard(x)
    refused(
        DomainError,
        (lambda: module(cut, cut, cut), "need_weights=False"),
        (lambda: extra(cut, cut, cut, need_weights=False), "add_bias_kv"),
    )
