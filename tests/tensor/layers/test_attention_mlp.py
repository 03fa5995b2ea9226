"""Blocks of a transformer, self-attention and perceptrons, that are divided equal those of one process."""

from functools import partial

import pytest
import torch
from helpers.compare import assert_close, assert_equal, gradients_of, refused
from helpers.models import built
from helpers.settings import all_pairs
from helpers.transformer_parts import (
    MLP,
    Attention,
    GatedMLP,
    assert_like_whole,
    floats,
    part,
    rows_of_heads,
    seeded,
    together,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import axonmpi as ax
from axonmpi import (
    ParallelGatedMLP,
    ParallelMLP,
    PipelineSchedule,
    ProcessGroup,
    sequence_parallel_norm,
    tensor_parallel_attention,
)
from axonmpi.pipeline import microbatch_seed

HIDDEN, HEADS, WIDTH, BETWEEN = 12, 4, 6, 16


def own_part(world, pairs: int):
    """Return a function from a parameter's name and the whole of it to this rank's part."""
    parts = {"query_key_value": [HEADS] * 3, "key_value": [pairs] * 2}

    def own(name: str, tensor: Tensor) -> Tensor:
        layer = name.partition(".")[0]
        rows = rows_of_heads(parts.get(layer, [HEADS]), WIDTH, world.rank, world.size)
        return tensor if name == "output.bias" else tensor[:, rows] if layer == "output" else tensor[rows]

    return own


FLAGS = {"causal": (True, False), "rotary": (True, False), "bias": (True, False), "divided": (True, False)}
SETTINGS = all_pairs(ranks=(2, 4), pairs=(HEADS, 2, 1), dropout=(0.0, 0.4), batch=(1, 3), **FLAGS)


@pytest.mark.ranks(2, 4)
def test_everything_equals_the_whole_attention(world):
    """With dropout, what is dropped is the same on any number of ranks and with parts of the sequence."""
    for seed, setting in enumerate(SETTINGS):
        if setting["ranks"] == world.size:
            check_attention(world, seed, **setting)


def check_attention(world, seed, *, ranks, pairs, dropout, batch, divided, **options):
    x, masks, dim = floats(batch, 8, HIDDEN), None, 1 if divided else None
    alone = built(lambda: Attention(HIDDEN, HEADS, pairs, WIDTH, **options), seed)
    options |= {"num_kv_heads": pairs, "head_dim": WIDTH, "sequence_parallel": divided, "dropout": dropout}
    block = together(lambda: tensor_parallel_attention(HIDDEN, HEADS, **options), seed)
    if dropout:
        of_all = ax.ShardedDropout(dropout, ax.ProcessGroup.mock(), 1, HEADS, generator=seeded(5))
        masks = of_all(torch.ones(batch, HEADS, 8, 8))
        block.dropout.generator = seeded(5)
    cut = own_part(world, pairs=pairs)
    assert_like_whole(world, block, alone, cut, x, of_input=dim, of_output=dim, masks=masks)
    assert_close(block.eval()(part(x, world, dim)), part(alone(x), world, dim))


def chance(world) -> float:
    """The chance of dropout from the default generator: none where mock ranks have one for all of them."""
    return 0.0 if len(world.peers) > 1 else 0.5


@pytest.mark.real_ranks
@pytest.mark.ranks(1, 2, 4)
def test_dropout_from_the_default_generator_under_checkpointing(world):
    p, x, weights = chance(world), floats(2, 8, HIDDEN), floats(2, 8, HIDDEN, seed=2)
    alone = built(lambda: tensor_parallel_attention(HIDDEN, HEADS, ProcessGroup.mock(), dropout=p))
    block = together(lambda: tensor_parallel_attention(HIDDEN, HEADS, dropout=p))
    results = []
    for module, run in [
        (alone, alone),
        (block, block),
        *((block, partial(checkpoint, block, use_reentrant=use_reentrant)) for use_reentrant in (False, True)),
    ]:
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            output = run(leaf)
            after = [torch.rand(4)] if p else []
            (output * weights).sum().backward()
        gradient = module.output.weight.grad
        gradient = gradient if module is alone else ax.all_gather(gradient, dim=1)
        results.append([output, leaf.grad, gradient, *after])
    assert_close(results[1:], results[:1] * 3)


class Block(nn.Module):
    """A layer of a transformer; the parts are given."""

    def __init__(self, norms: list[nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def divided_block(group, *, sequence_parallel: bool = False, dropout: float = 0.0) -> Block:
    norms = [nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN)]
    if sequence_parallel:
        norms = [sequence_parallel_norm(norm, group) for norm in norms]
    options = {"num_kv_heads": 1, "head_dim": WIDTH, "sequence_parallel": sequence_parallel}
    attention = tensor_parallel_attention(HIDDEN, HEADS, group, rotary=True, dropout=dropout, **options)
    return Block(norms, attention, ParallelGatedMLP(HIDDEN, 16, group, sequence_parallel=sequence_parallel))


def own_part_of_block(group, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of the whole block's state."""
    cuts = {"attention": own_part(group, pairs=1), "mlp": own_part_of_mlp(group, 2)}
    own = {}
    for name, value in state.items():
        layer, _, inner = name.partition(".")
        own[name] = cuts[layer](inner, value) if layer in cuts else value
    return own


@pytest.mark.real_ranks
@pytest.mark.ranks(4)
def test_divided_layers_as_stages_of_a_pipeline(world):
    """Of the schedule that takes backward apart, with parts of the sequence."""
    mesh, p, seed = ax.DeviceMesh({"pp": 2, "tp": 2}), chance(world), 3
    alone = built(lambda: nn.Sequential(*[divided_block(ProcessGroup.mock(), dropout=p) for _ in range(2)]))
    options = {"sequence_parallel": True, "dropout": p}
    blocks = together(lambda: nn.ModuleList(divided_block(mesh.group("tp"), **options) for _ in range(2)))
    for block, one in zip(blocks, alone, strict=True):
        block.load_state_dict(own_part_of_block(mesh.group("tp"), one.state_dict()))
    x, targets = floats(4, 8, HIDDEN), floats(4, 8, HIDDEN, seed=2)
    own = [part(t, mesh.group("tp")) for t in (x, targets)]
    options = {"schedule": PipelineSchedule.ZERO_BUBBLE, "num_microbatches": 2, "loss_fn": F.mse_loss, "seed": seed}
    ax.Pipeline.from_modules(list(blocks), mesh.group("pp"), **options).train_step(*own)
    with torch.random.fork_rng(devices=[]):
        for micro_batch, rows in enumerate((slice(0, 2), slice(2, 4))):
            torch.manual_seed(microbatch_seed(seed, 0, micro_batch))
            (F.mse_loss(alone(x[rows]), targets[rows]) / 2).backward()
    found, whole = (gradients_of(stages[mesh.rank("pp")]) for stages in (blocks, alone))
    # a loss is the mean over a part of the sequence
    found = {name: gradient / 2 for name, gradient in found.items()}
    assert_close(found, own_part_of_block(mesh.group("tp"), whole))


@pytest.mark.ranks(2)
def test_inference_first_and_other_dtypes(world):
    block = together(lambda: tensor_parallel_attention(HIDDEN, 2, rotary=True))
    x = floats(2, 8, HIDDEN)
    with torch.inference_mode():
        longer = block(x)
    output = block(x[:, :5])
    assert_close(output, longer[:, :5])
    output.sum().backward()  # with the table of positions made above
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(block(x), longer.bfloat16(), 0.05)
    for dropout in (0.0, 0.5):
        options = {"num_kv_heads": 1, "dropout": dropout, "dtype": torch.bfloat16}
        half = together(lambda: tensor_parallel_attention(HIDDEN, 2, **options))  # noqa: B023
        half.dropout.generator = seeded(1)
        output = half(x.bfloat16())
        output.sum().backward()
        assert {output.dtype, half.key_value.weight.grad.dtype} == {torch.bfloat16}
    meta = tensor_parallel_attention(HIDDEN, 2, device="meta").query_key_value.weight
    assert (meta.shape, meta.is_meta) == ((3 * HIDDEN // 2, HIDDEN), True)


@pytest.mark.ranks(4)
def test_mistakes_in_attention(world):
    make = tensor_parallel_attention
    block = together(lambda: make(HIDDEN, HEADS))
    shape = rf"\[batch, sequence, 12\], got shape .* on rank {world.rank}"
    refused(
        ValueError,
        (partial(make, 12, 6), "num_heads: expected a multiple of the 4 ranks of the group, got 6"),
        (partial(make, 12, 0), "num_heads: expected a multiple of the 4 ranks of the group, got 0"),
        (partial(make, 12, 12, num_kv_heads=5), "num_kv_heads: expected a divisor of num_heads = 12, got 5"),
        (partial(make, 12, 12, num_kv_heads=6), "a multiple or a divisor of the 4 ranks .* got 6"),
        (partial(make, 10, 4), "a multiple of num_heads = 4, got 10; use another size, or say with head_dim="),
        (partial(make, 12, 4, rotary=True), "an even number, as rotary positions need pairs, got 3"),
        (partial(make, 12, 4, head_dim=0), "head_dim: expected at least 1, got 0"),
        (partial(make, 12, 4, dropout=-1), "p: expected the chance"),
        (partial(block, torch.ones(2, HIDDEN)), shape),
        (partial(block, torch.ones(2, 4, HIDDEN + 1)), shape),
    )
    assert "hidden=12, heads=4, kv_heads=4, causal=True" in repr(block)


# ---- perceptrons ------------------------------------------------------------------------------------------------


def own_part_of_mlp(world, halves: int):
    """Return a function from a parameter's name and the whole of it to this rank's part."""
    rows, columns = (rows_of_heads([BETWEEN] * parts, 1, world.rank, world.size) for parts in (halves, 1))

    def own(name: str, tensor: Tensor) -> Tensor:
        return tensor if name == "down.bias" else tensor[:, columns] if name == "down.weight" else tensor[rows]

    return own


def whole_mlp(activation=F.gelu, bias: bool = True) -> MLP:
    return MLP(nn.Linear(HIDDEN, BETWEEN, bias), nn.Linear(BETWEEN, HIDDEN, bias), activation)


gated_mlp = partial(GatedMLP, HIDDEN, BETWEEN)
KINDS = [
    (ParallelMLP, whole_mlp, {}, {}),
    (ParallelMLP, whole_mlp, {"activation": "relu", "bias": False}, {"activation": F.relu, "bias": False}),
    (ParallelMLP, whole_mlp, {"activation": torch.tanh}, {"activation": torch.tanh}),
    (ParallelMLP, whole_mlp, {"activation": "gelu_tanh"}, {"activation": partial(F.gelu, approximate="tanh")}),
    (ParallelGatedMLP, gated_mlp, {}, {}),
    (ParallelGatedMLP, gated_mlp, {"activation": "gelu", "bias": True}, {"activation": F.gelu, "bias": True}),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dim", [None, 1], ids=["replicated", "sequence"])
def test_everything_equals_the_whole_perceptron(world, dim):
    for seed, (kind, of_torch, options, torch_options) in enumerate(KINDS):
        alone = built(partial(of_torch, **torch_options), seed)
        block = together(partial(kind, HIDDEN, BETWEEN, sequence_parallel=dim is not None, **options), seed)
        cut = own_part_of_mlp(world, 2 if kind is ParallelGatedMLP else 1)
        assert_like_whole(world, block, alone, cut, floats(2, 8, HIDDEN), of_input=dim, of_output=dim)
        for name, layer in alone.named_children():
            inner = block.get_submodule(name)
            assert_equal([inner.full_weight(), inner.full_bias()], [layer.weight, layer.bias])


@pytest.mark.ranks(2)
def test_dropout_of_a_perceptron_is_the_same_at_any_width_and_with_parts_of_the_sequence(world):
    x, p, alone = floats(2, 8, HIDDEN), 0.4, built(whole_mlp)
    mask = ax.ShardedDropout(p, ax.ProcessGroup.mock(), 1, generator=seeded(5))(torch.ones(2, 8, HIDDEN))
    for dim in (None, 1):
        block = together(partial(ParallelMLP, HIDDEN, BETWEEN, dropout=p, sequence_parallel=dim is not None))
        block.dropout.generator = seeded(5)
        own = part(x, world, dim)
        assert_close([block(own), block.eval()(own)], [part(y, world, dim) for y in (alone(x) * mask, alone(x))])


@pytest.mark.ranks(2)
def test_mistakes_in_perceptrons(world):
    for kind in (ParallelMLP, ParallelGatedMLP):
        own, no_parameters = partial(kind, HIDDEN), "activation: expected one without parameters, got PReLU"
        refused(
            ValueError,
            (partial(own, 15), "intermediate: expected a multiple of the 2 ranks of the group, got 15"),
            (partial(own, BETWEEN, activation="swish"), "expected one of 'gelu', .* or a function, got 'swish'"),
            (partial(own, BETWEEN, activation=nn.PReLU()), no_parameters),
        )
    refused(ValueError, (partial(ParallelMLP, HIDDEN, BETWEEN, dropout=2.0), "p: expected the chance"))


@pytest.mark.ranks(2)
def test_devices_and_dtypes(world):
    options = {"device": "meta", "dtype": torch.bfloat16}
    block, gated = (kind(HIDDEN, BETWEEN, **options) for kind in (ParallelMLP, ParallelGatedMLP))
    assert {(p.is_meta, p.dtype) for p in (*block.parameters(), *gated.parameters())} == {(True, torch.bfloat16)}
    assert (block.up.weight.shape, gated.gate_up.weight.shape) == ((BETWEEN // 2, HIDDEN), (BETWEEN, HIDDEN))
