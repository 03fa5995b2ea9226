"""Blocks of a transformer, self-attention and perceptrons, that are divided equal those of one process."""

from __future__ import annotations

import pytest
import torch
from helpers import whole_models as whole
from helpers.settings import all_pairs
from helpers.whole_models import assert_close, built, compare, part, randn, rows_of_heads, seeded, together
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


def own_part(world, heads: int = HEADS, pairs: int = HEADS, width: int = WIDTH):
    """Return a function from a parameter's name and the whole of it to this rank's part."""
    parts = {"query_key_value": [heads] * 3, "query": [heads], "key_value": [pairs] * 2}

    def own(name: str, tensor: Tensor) -> Tensor:
        layer = name.partition(".")[0]
        if name == "output.bias":
            return tensor
        rows = rows_of_heads(parts.get(layer, [heads]), width, world.rank, world.size)
        return tensor[:, rows] if layer == "output" else tensor[rows]

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
    x, masks = randn(batch, 8, HIDDEN), None
    alone = built(lambda: whole.Attention(HIDDEN, HEADS, pairs, WIDTH, **options), seed)
    options |= {"num_kv_heads": pairs, "head_dim": WIDTH, "sequence_parallel": divided, "dropout": dropout}
    block = together(lambda: tensor_parallel_attention(HIDDEN, HEADS, **options), seed)
    if dropout:
        of_all = ax.ShardedDropout(dropout, ax.ProcessGroup.mock(), 1, HEADS, generator=seeded(5))
        masks = of_all(torch.ones(batch, HEADS, 8, 8))
        block.dropout.generator = seeded(5)
    compare(world, block, alone, own_part(world, pairs=pairs), x=x, divided=divided, masks=masks)
    own, expected = (part(t, world) if divided else t for t in (x, alone(x)))
    assert_close(block.eval()(own), expected)


def chance(world) -> float:
    """The chance of dropout from the default generator: none where mock ranks have one for all of them."""
    return 0.0 if len(world.peers) > 1 else 0.5


@pytest.mark.real_ranks
@pytest.mark.ranks(1, 2, 4)
def test_dropout_from_the_default_generator_under_checkpointing(world):
    p = chance(world)
    x, weights = randn(2, 8, HIDDEN), randn(2, 8, HIDDEN, seed=2)
    alone = built(lambda: tensor_parallel_attention(HIDDEN, HEADS, ProcessGroup.mock(), dropout=p))
    block = together(lambda: tensor_parallel_attention(HIDDEN, HEADS, dropout=p))
    results = []
    for module, run in [
        (alone, alone),
        (block, block),
        (block, lambda x: checkpoint(block, x, use_reentrant=False)),
        (block, lambda x: checkpoint(block, x, use_reentrant=True)),
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
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            assert_close(found, expected)


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


def whole_block() -> Block:
    norms = [nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN)]
    attention = whole.Attention(HIDDEN, HEADS, 1, WIDTH, rotary=True)
    return Block(norms, attention, whole.GatedMLP(HIDDEN, 16))


def own_part_of_block(group, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of the whole block's state."""
    cut = own_part(group, pairs=1)
    gate_up, down = (rows_of_heads([16] * parts, 1, group.rank, group.size) for parts in (2, 1))
    own = {
        name: cut(name.partition(".")[2], value) for name, value in state.items() if name.startswith("attention")
    }
    own |= {"mlp.gate_up.weight": state["mlp.gate_up.weight"][gate_up]}
    own |= {"mlp.down.weight": state["mlp.down.weight"][:, down]}
    return {name: own.get(name, value) for name, value in state.items()}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wrapper", [ax.DDP, pytest.param(ax.FSDP, marks=pytest.mark.real_ranks)])
def test_replicas_of_a_divided_layer_train_as_one_process_does(world, wrapper):
    divided = wrapper is ax.FSDP
    options = {"units": (nn.LayerNorm, nn.RMSNorm)} if divided else {}
    mesh = ax.DeviceMesh({"dp": 2, "tp": 2})
    alone = built(whole_block)
    block = together(lambda: divided_block(mesh.group("tp"), sequence_parallel=divided))
    block.load_state_dict(own_part_of_block(mesh.group("tp"), alone.state_dict()))
    wrapped = wrapper(block, mesh.group("dp"), **options)
    x, targets = randn(4, 8, HIDDEN), randn(4, 8, HIDDEN, seed=2)
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9) for module in (wrapped, alone)]
    for _ in range(2):
        own = [t.chunk(2)[mesh.rank("dp")] for t in (x, targets)]
        own = [t.chunk(2, 1)[mesh.rank("tp")] for t in own] if divided else own
        for optimizer, loss in zip(
            optimizers,
            (((wrapped(own[0]) - own[1]) ** 2).sum() / 192, ((alone(x) - targets) ** 2).mean()),
            strict=True,
        ):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    state = wrapped.full_state_dict() if wrapper is ax.FSDP else wrapped.state_dict()
    for name, value in own_part_of_block(mesh.group("tp"), alone.state_dict()).items():
        assert_close(state[name], value, name)


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
    x, targets = randn(4, 8, HIDDEN), randn(4, 8, HIDDEN, seed=2)
    own = [t.chunk(2, 1)[mesh.rank("tp")] for t in (x, targets)]
    options = {"schedule": PipelineSchedule.ZERO_BUBBLE, "num_microbatches": 2, "loss_fn": F.mse_loss, "seed": seed}
    ax.Pipeline.from_modules(list(blocks), mesh.group("pp"), **options).train_step(*own)
    with torch.random.fork_rng(devices=[]):
        for micro_batch, rows in enumerate((slice(0, 2), slice(2, 4))):
            torch.manual_seed(microbatch_seed(seed, 0, micro_batch))
            (F.mse_loss(alone(x[rows]), targets[rows]) / 2).backward()
    block, one = blocks[mesh.rank("pp")], alone[mesh.rank("pp")]
    expected = own_part_of_block(mesh.group("tp"), {name: q.grad for name, q in one.named_parameters()})
    for name, parameter in block.named_parameters():
        # a loss is the mean over a part of the sequence
        assert_close(parameter.grad / 2, expected[name], name)


@pytest.mark.ranks(2)
def test_inference_first_and_other_dtypes(world):
    block = together(lambda: tensor_parallel_attention(HIDDEN, 2, rotary=True))
    x = randn(2, 8, HIDDEN)
    with torch.inference_mode():
        longer = block(x)
    output = block(x[:, :5])
    assert_close(output, longer[:, :5])
    output.sum().backward()  # with the table of positions made above
    with torch.autocast("cpu", torch.bfloat16):
        low = block(x)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), longer, rtol=0.05, atol=0.05)
    for dropout in (0.0, 0.5):
        options = {"num_kv_heads": 1, "dropout": dropout, "dtype": torch.bfloat16}
        half = together(lambda: tensor_parallel_attention(HIDDEN, 2, **options))  # noqa: B023
        half.dropout.generator = seeded(1)
        output = half(x.bfloat16())
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        assert half.key_value.weight.grad.dtype == torch.bfloat16
    meta = tensor_parallel_attention(HIDDEN, 2, device="meta")
    assert meta.query_key_value.weight.shape == (3 * HIDDEN // 2, HIDDEN)
    assert meta.query_key_value.weight.is_meta


@pytest.mark.ranks(4)
def test_ranks_that_share_a_head_begin_alike_and_stay_so(world):
    block = together(lambda: tensor_parallel_attention(HIDDEN, HEADS, num_kv_heads=2, head_dim=WIDTH))
    assert block.key_value.shards["weight"].copies == 2
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        (block(randn(2, 8, HIDDEN, seed=step)) ** 2).sum().backward()
        optimizer.step()
        values = ax.all_gather(torch.cat([p.detach().flatten() for p in block.key_value.parameters()])[None])
        assert torch.equal(values[0], values[1])
        assert torch.equal(values[2], values[3])
        assert not torch.equal(values[0], values[2])


@pytest.mark.ranks(4)
def test_mistakes_in_attention(world):
    for arguments, options, message in [
        ((12, 6), {}, "num_heads: expected a multiple of the 4 ranks of the group, got 6"),
        ((12, 0), {}, "num_heads: expected a multiple of the 4 ranks of the group, got 0"),
        ((12, 12), {"num_kv_heads": 5}, "num_kv_heads: expected a divisor of num_heads = 12, got 5"),
        ((12, 12), {"num_kv_heads": 6}, "num_kv_heads: expected a multiple or a divisor of the 4 ranks .* got 6"),
        (
            (10, 4),
            {},
            "hidden: expected a multiple of num_heads = 4, got 10; use another size, or say with head_dim=",
        ),
        ((12, 4), {"rotary": True}, "head_dim: expected an even number, as rotary positions need pairs, got 3"),
        ((12, 4), {"head_dim": 0}, "head_dim: expected at least 1, got 0"),
        ((12, 4), {"dropout": -1}, "p: expected the chance"),
    ]:
        with pytest.raises(ValueError, match=message):
            tensor_parallel_attention(*arguments, **options)
    block = together(lambda: tensor_parallel_attention(HIDDEN, HEADS))
    for shape in [(2, HIDDEN), (2, 4, HIDDEN + 1)]:
        with pytest.raises(ValueError, match=rf"\[batch, sequence, 12\], got shape .* on rank {world.rank}"):
            block(torch.ones(shape))
    assert "hidden=12, heads=4, kv_heads=4, causal=True" in repr(block)


# ---- perceptrons ------------------------------------------------------------------------------------------------


def own_part_of_mlp(world, halves: int):
    """Return a function from a parameter's name and the whole of it to this rank's part."""

    def own(name: str, tensor: Tensor) -> Tensor:
        if name == "down.bias":
            return tensor
        if name == "down.weight":
            return tensor[:, rows_of_heads([BETWEEN], 1, world.rank, world.size)]
        return tensor[rows_of_heads([BETWEEN] * halves, 1, world.rank, world.size)]

    return own


KINDS = [
    (ParallelMLP, whole.MLP, {}, {}),
    (ParallelMLP, whole.MLP, {"activation": "relu", "bias": False}, {"activation": F.relu, "bias": False}),
    (ParallelMLP, whole.MLP, {"activation": torch.tanh}, {"activation": torch.tanh}),
    (ParallelMLP, whole.MLP, {"activation": "gelu_tanh"}, {"activation": lambda x: F.gelu(x, approximate="tanh")}),
    (ParallelGatedMLP, whole.GatedMLP, {}, {}),
    (ParallelGatedMLP, whole.GatedMLP, {"activation": "gelu", "bias": True}, {"activation": F.gelu, "bias": True}),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("divided", [False, True])
def test_everything_equals_the_whole_perceptron(world, divided):
    for seed, (kind, of_torch, options, torch_options) in enumerate(KINDS):
        alone = built(lambda: of_torch(HIDDEN, BETWEEN, **torch_options), seed)  # noqa: B023
        block = together(lambda: kind(HIDDEN, BETWEEN, sequence_parallel=divided, **options), seed)  # noqa: B023
        halves = 2 if kind is ParallelGatedMLP else 1
        compare(world, block, alone, own_part_of_mlp(world, halves), x=randn(2, 8, HIDDEN), divided=divided)
        for name, layer in alone.named_children():
            assert torch.equal(block.get_submodule(name).full_weight(), layer.weight)
            bias = block.get_submodule(name).full_bias()
            assert bias is layer.bias is None or torch.equal(bias, layer.bias)


@pytest.mark.ranks(2)
def test_dropout_of_a_perceptron_is_the_same_at_any_width_and_with_parts_of_the_sequence(world):
    x, p = randn(2, 8, HIDDEN), 0.4
    alone = built(lambda: whole.MLP(HIDDEN, BETWEEN))
    mask = ax.ShardedDropout(p, ax.ProcessGroup.mock(), 1, generator=seeded(5))(torch.ones(2, 8, HIDDEN))
    for divided in (False, True):
        block = together(lambda: ParallelMLP(HIDDEN, BETWEEN, dropout=p, sequence_parallel=divided))  # noqa: B023
        block.dropout.generator = seeded(5)
        own = part(x, world) if divided else x
        expected = alone(x) * mask
        assert_close(block(own), part(expected, world) if divided else expected)
        assert_close(block.eval()(own), part(alone(x), world) if divided else alone(x))


@pytest.mark.ranks(2)
def test_mistakes_in_perceptrons(world):
    for kind in (ParallelMLP, ParallelGatedMLP):
        with pytest.raises(
            ValueError, match="intermediate: expected a multiple of the 2 ranks of the group, got 15"
        ):
            kind(HIDDEN, 15)
        with pytest.raises(ValueError, match=r"activation: expected one of 'gelu', .* or a function, got 'swish'"):
            kind(HIDDEN, BETWEEN, activation="swish")
        with pytest.raises(ValueError, match=r"activation: expected one without parameters, got PReLU"):
            kind(HIDDEN, BETWEEN, activation=nn.PReLU())
    with pytest.raises(ValueError, match="p: expected the chance"):
        ParallelMLP(HIDDEN, BETWEEN, dropout=2.0)


@pytest.mark.ranks(2)
def test_devices_and_dtypes(world):
    block = ParallelMLP(HIDDEN, BETWEEN, device="meta", dtype=torch.bfloat16)
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in block.parameters())
    assert block.up.weight.shape == (BETWEEN // 2, HIDDEN)
    gated = ParallelGatedMLP(HIDDEN, BETWEEN, device="meta", dtype=torch.float64)
    assert gated.gate_up.weight.shape == (BETWEEN, HIDDEN)
    assert gated.down.weight.dtype == torch.float64
