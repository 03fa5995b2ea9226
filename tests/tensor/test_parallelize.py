"""Dividing models of somebody's own by a plan, and mistakes in plans."""

import copy
import functools
from typing import Any

import pytest
import torch
from helpers.compare import assert_close, assert_equal, gradients_of, refused
from helpers.layouts import loss_of
from helpers.models import built
from helpers.transformer_parts import floats, randn, seeded
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.tensor import (
    Assign,
    Column,
    HeadDropout,
    copies,
    full_state_dict,
    load_full_state_dict,
    local_state_dict,
    parallel_cross_entropy,
    tensor_parallelize,
)

WORDS, WIDTH, HEADS, LENGTH = 11, 8, 4, 8


class Attention(nn.Module):
    """Queries, keys and values in one matrix; keys and values may be of fewer heads."""

    def __init__(self, pairs: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.num_pairs, self.dropout = HEADS, pairs, dropout
        if pairs == HEADS:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.query, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, pairs * WIDTH // HEADS)
            self.values = nn.Linear(WIDTH, pairs * WIDTH // HEADS, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = hasattr(self, "query")
        projected = [self.query(x), self.keys(x), self.values(x)] if split else self.qkv(x).chunk(3, -1)
        counts = self.num_heads, self.num_pairs, self.num_pairs
        heads = [t.unflatten(-1, (count, -1)).transpose(1, 2) for t, count in zip(projected, counts, strict=True)]
        options = {"dropout_p": self.dropout if self.training else 0.0, "is_causal": True, "enable_gqa": True}
        return self.out(F.scaled_dot_product_attention(*heads, **options).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, pairs: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(pairs, dropout)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x))))), "more"


class Words(nn.Module):
    """A language model with a parameter of its own and a tied output."""

    def __init__(self, pairs: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(pairs, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.logits = nn.Linear(WIDTH, WORDS, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.positions[: words.shape[1]]
        for block in self.blocks:
            x, _ = block(x)
        return self.logits(self.norm(x))


def plan(pairs: int = HEADS) -> dict[str, Any]:
    grouped = {
        "*.query": Column(heads=HEADS),
        "*.keys": f"column:heads={pairs},shared",
        "*.values": f"column:heads={pairs},shared",
    }
    return {
        "embedding": "vocab",
        "blocks.0": "split",
        "*.norm?": "sequence",
        "*.attention": ["divide:num_heads", "divide_shared:num_pairs", HeadDropout(HEADS)],
        **({"*.qkv": f"column:3,heads={HEADS}"} if pairs == HEADS else grouped),
        "*.out": "row",
        "*.up": "column",
        "*.down": "row",
        "*.drop": "dropout",
        "norm": ["sequence", "join"],
        "logits": "vocab",
    }


def words(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(0, WORDS, (batch, length), generator=seeded(5))


def assert_like_whole(model: nn.Module, whole: nn.Module, x: Tensor) -> None:
    """Compare values, outputs and gradients of a divided model with those of the whole one."""
    assert_equal(full_state_dict(model), whole.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
    outputs = [one(x) for one in (model, whole)]
    assert_close(*outputs)
    torch.autograd.backward([output.square().mean() for output in outputs])
    assert_close(full_state_dict(model, gradients_of(model)), gradients_of(whole))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("pairs", [4, 2, pytest.param(1, marks=pytest.mark.real_ranks)])
def test_a_model_of_ones_own(world, pairs):
    """Logits, gradients, their norm; with parts of the sequence for every second number of heads and of ranks."""
    make = functools.partial(Words, pairs)
    whole, options = built(make), {"sequence_parallel": (pairs < HEADS) == (world.size == 2)}
    model = tensor_parallelize(built(make), plan(pairs), **options)
    assert_like_whole(model, whole, words())
    numbers = copies(model)
    assert numbers["embedding.weight"] == numbers["blocks.1.up.bias"] == 1
    assert numbers["positions"] == numbers["blocks.0.norm1.weight"] == numbers["norm.bias"] == world.size
    assert pairs == HEADS or numbers["blocks.0.attention.keys.bias"] == max(1, world.size // pairs)
    expected = nn.utils.get_total_norm([parameter.grad for parameter in whole.parameters()])
    assert_close(ax.clip_grad_norm(model, 1e9, group=world.default_group, copies=numbers), expected)


def simple() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, WORDS))


SIMPLE = {"0": "vocab", "1": "column", "3": "row", "4": "vocab"}


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.ranks(4)
def test_logits_that_stay_divided(world):
    whole, model = built(simple), tensor_parallelize(built(simple), {**SIMPLE, "4": "vocab:parallel"})
    logits = model(words())
    assert logits.shape[-1] == -(-WORDS // world.size)
    losses = parallel_cross_entropy(logits, words(), vocabulary=WORDS), loss_of(whole(words()), words())
    assert_close(*losses)
    torch.autograd.backward(losses)
    assert_close(full_state_dict(model, gradients_of(model)), gradients_of(whole))


class Gathered(nn.Module):
    """Layers whose outputs are needed whole, one under two names, and one of two unequal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 12)
        self.again = self.first
        self.last = nn.Linear(12, 8)
        self.scale = 3

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.again(x) + self.first(x)).cumsum(-1)).cumsum(-1) * self.scale


class Gauge(nn.Module):
    """A norm of each head, computed with a number of heads, and an output of several things."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.RMSNorm(2)
        self.down = nn.Linear(8, 4)
        self.heads, self.width = 4, 2

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x).unflatten(-1, (self.heads, self.width))).flatten(-2))


STYLES = {"0": ["divide:heads", Assign("width", 2)], "*.up": "column:heads=4", "*.norm": "sum", "*.down": "row"}
GATHERED = {"again": Column(parts=(8, 4), gather_output=True), "last": "column:gather"}
PLANS = {
    "layers alone": (simple, SIMPLE, {}, words(4)),
    "sequence first": (simple, SIMPLE, {"sequence_parallel": True, "sequence_dim": 0}, words(4)),
    "sequence second": (simple, SIMPLE, {"sequence_parallel": True, "sequence_dim": 1}, words(4)),
    "gathered, of unequal parts, with two names": (Gathered, GATHERED, {}, floats(3, 4)),
    "attributes, and norms of divided heads": (lambda: nn.Sequential(Gauge()), STYLES, {}, floats(3, 4)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", PLANS)
def test_plans(world, name):
    """With sequence parallelism embeddings and logits divide the sequence and put it together."""
    make, own, options, x = PLANS[name]
    model = built(make)
    assert tensor_parallelize(model, own, **options) is model
    assert_like_whole(model, built(make), x)


@pytest.mark.ranks(2)
def test_what_layers_were_stays(world):
    """Dtype, whether they train, what is frozen, the padding's row."""
    model = built(Words).bfloat16().eval()
    model.blocks.requires_grad_(False)
    tensor_parallelize(model, plan())
    training = [part.training for part in model.modules() if any(True for _ in part.parameters(recurse=False))]
    assert ({p.dtype for p in model.parameters()}, any(training)) == ({torch.bfloat16}, False)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["positions", "embedding.weight", "norm.weight", "norm.bias"]
    loss_of(model.train()(words()), words()).backward()
    assert model.blocks[0].up.weight.grad is None
    assert_equal(full_state_dict(model)["embedding.weight"], built(Words).bfloat16().embedding.weight)


@pytest.mark.ranks(2)
def test_a_model_without_values_gets_them_from_a_state_dict(world):
    with torch.device("meta"):
        model = Words()
    tensor_parallelize(model, plan(), sequence_parallel=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    whole = built(Words)
    load = functools.partial(load_full_state_dict, model, whole.state_dict())
    refused(ValueError, (load, "the model is on the meta device: call its to_empty"))
    model.to_empty(device="cpu")
    model.logits.weight = model.embedding.weight  # torch does not keep ties here
    load()
    assert_close(model(words()), whole(words()))


# ---- beside data parallelism ------------------------------------------------------------------------------------


@pytest.mark.real_ranks
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("wrapper", "sequence_parallel"), [(ax.DDP, True), (ax.FSDP, False)])
def test_inside_data_parallelism(world, wrapper, sequence_parallel, monkeypatch):
    """Groups made by hand; two micro-batches in a step, the first of which is not shared yet."""
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", "1" if sequence_parallel else "")
    of_model = [world.new_group([0, 1]), world.new_group([2, 3])][world.rank // 2]
    of_data = [world.new_group([0, 2]), world.new_group([1, 3])][world.rank % 2]
    make = functools.partial(Words, 1)
    whole = built(make)
    divided = tensor_parallelize(built(make), plan(1), of_model, sequence_parallel=sequence_parallel)
    model = wrapper(divided, process_group=of_data)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (whole, model)]
    for seed in range(2):
        batch = torch.randint(0, WORDS, (8, LENGTH), generator=seeded(seed))
        loss_of(whole(batch), batch).backward()
        first, second = batch.chunk(2)[of_data.rank].chunk(2)
        with model.no_sync():
            (loss_of(model(first), first) / 2).backward()
        (loss_of(model(second), second) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if wrapper is ax.DDP:
        assert_close(full_state_dict(model), whole.state_dict(), 1e-4)
        return
    assert_close(full_state_dict(model, model.full_state_dict()), whole.state_dict(), 1e-4)
    only_one = full_state_dict(model, model.full_state_dict(rank0_only=True), rank0_only=True)
    assert_close(only_one, whole.state_dict() if world.rank == 0 else {}, 1e-4)
    model.load_full_state_dict(local_state_dict(model, built(make).state_dict()))
    assert_equal(full_state_dict(model, model.full_state_dict()), built(make).state_dict())


# ---- dropout of attention weights -------------------------------------------------------------------------------


def plain_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, masks: Tensor) -> Tensor:
    """Compute the formula; a position that may see nothing gets zeros."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1).nan_to_num() * masks) @ value


class Attending(nn.Module):
    def forward(self, *tensors: Tensor, **options: Any) -> Tensor:
        if len(tensors) == 1:
            return F.dropout(*tensors, 0.5)
        return F.scaled_dot_product_attention(*tensors, dropout_p=0.5, **options)


def beside_a_layer(module: nn.Module, style: Any, **options: Any) -> nn.Module:
    """Divide a model of a module and of a layer, without which there is nothing to divide; return the module."""
    model = nn.ModuleDict({"a": module, "layer": built(perceptron)})
    return tensor_parallelize(model, {"a": style, "layer.0": "column"}, **options)["a"]


def test_attention_with_dropout_is_that_of_the_formula():
    """With every kind of mask, also where a position may see nothing, and with grouped heads."""
    query = randn(2, HEADS, 5, 3, seed=1).requires_grad_()
    key, value = (randn(2, 2, 5, 3, seed=seed) for seed in (2, 3))
    allowed = torch.rand(2, 1, 5, 5, generator=seeded(4)) < 0.5
    allowed[1, :, 2] = False
    least, partly, generator = torch.finfo(torch.float64).min, allowed | (torch.arange(5) == 0), seeded(1)
    everything = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    alone = ax.ProcessGroup.mock()
    attention = beside_a_layer(Attending(), f"head_dropout:{HEADS}", group=alone, generator=generator)
    for options, seen in (
        ({}, everything),
        ({"is_causal": True}, everything.tril()),
        ({"attn_mask": allowed}, allowed),
        ({"attn_mask": torch.zeros(2, 1, 5, 5, dtype=torch.float64).masked_fill(~partly, least)}, partly),
    ):
        state, query.grad = generator.get_state(), None
        masks = attention(torch.ones(2, HEADS, 5, 5, dtype=torch.float64))
        generator.set_state(state)  # the same is drawn again
        found = attention(query, key, value, enable_gqa=True, **options)
        assert_close(found, plain_attention(query, key, value, seen, masks))
        found.sum().backward()
        assert query.grad.isfinite().all()


def test_dropout_is_taken_over_only_while_the_module_runs():
    """Not after it, nor after it has raised; other tensors, and no dropout at all, go the usual way."""
    generator, alone = seeded(1), ax.ProcessGroup.mock()
    module = beside_a_layer(Attending(), "head_dropout:4", group=alone, generator=generator)
    before = generator.get_state()
    for _ in range(2):
        refused(
            IndexError,
            (lambda: module(torch.ones(2, 4, 5, 5), torch.ones(3), torch.ones(3)), "Dimension out of range"),
        )
        assert F.dropout(torch.ones(2, 4, 5, 5), 0.5).unique().numel() == 2
    assert module(torch.ones(64, 64)).unique().numel() == 2
    assert torch.equal(generator.get_state(), before)
    module(torch.ones(2, 4, 5, 5))
    assert not torch.equal(generator.get_state(), before)


# ---- mistakes ---------------------------------------------------------------------------------------------------


class Lists(nn.Module):
    """What can be wrong with a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.uneven = nn.Linear(7, 9)
        self.hooked = nn.Linear(4, 8)
        self.hooked.register_forward_hook(lambda module, args, output: output)
        self.watched = nn.Linear(4, 8)
        self.watched.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        self.limited = nn.Embedding(4, 4, max_norm=1.0)
        self.attention = nn.MultiheadAttention(4, 2)
        self.batch_norm = nn.BatchNorm1d(4)
        self.replaced = nn.LayerNorm(4)
        self.replaced.forward = self.replaced.forward
        self.bilinear = nn.Bilinear(4, 4, 4)
        self.embedding, self.tied = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.tied.weight = self.embedding.weight
        self.alpha = nn.AlphaDropout()
        self.number, self.name = 6, "Lists"


class Layer(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def wrong() -> nn.Module:
    return nn.ModuleDict({"lists": Lists(), "own": Layer(4, 4), "scaled": Scaled(4, 4)})


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no such module": (
        {"lists.layers": "column"},
        r"plan\['lists.layers'\]: no submodule .*near it are lists.layer",
    ),
    "no such style": ({"lists.layer": "columns"}, r"plan\['lists.layer'\]: expected one of the styles"),
    "no layer": ({"lists": "column"}, r"module 'lists': expected an nn.Linear, got .*Lists"),
    "no linear layer": ({"lists.bilinear": "row"}, r"'lists.bilinear': expected an nn.Linear, got torch.*Bilinear"),
    "no embedding": ({"lists.batch_norm": "vocab"}, r"expected an nn.Embedding or nn.Linear, got .*BatchNorm1d"),
    "not for embeddings": ({"lists.embedding": "row"}, r"expected an nn.Linear, got .*Embedding"),
    "a layer of another kind": ({"own": "column"}, r"module 'own': expected an nn.Linear, got .*Layer"),
    "an embedding of another kind": ({"scaled": "vocab"}, r"with the forward of nn.Embedding, got .*Scaled"),
    "an embedding with options": ({"lists.limited": "vocab"}, r"'lists.limited': .*without max_norm"),
    "outputs that do not divide": ({"lists.uneven": "column"}, r"'lists.uneven': .*multiple of the 2 ranks.*got 9"),
    "inputs that do not divide": ({"lists.uneven": "row"}, r"'lists.uneven': .*multiple of the 2 ranks.*got 7"),
    "parts that do not divide": ({"lists.layer": "column:8"}, r"multiple of the 2 ranks of the group, got 1"),
    "parts that are not all": ({"lists.layer": Column(parts=(4, 2))}, r"8 outputs together, got parts=\(4, 2\)"),
    "no whole heads": ({"lists.layer": "column:heads=3"}, r"expected outputs that are 3 heads, got 8 outputs"),
    "too few heads": ({"lists.layer": "column:heads=1"}, r"heads: expected a multiple of the 2 ranks.*got 1"),
    "heads in parts": ({"lists.layer": "column:2,heads=1,shared"}, r"heads: expected a multiple of the 2 ranks"),
    "the same heads gathered": ({"lists.layer": "column:heads=1,shared,gather"}, r"divided outputs where several"),
    "attention of torch": ({"*.out_proj": "row"}, r"MultiheadAttention does not call its layers"),
    "a norm across positions": ({"*.batch_norm": "sequence"}, r"treats each position alone, got .*BatchNorm1d"),
    "a norm with its own forward": (
        {"*.replaced": "sequence"},
        r"with the forward of its class, got one of its own",
    ),
    "no dropout": ({"lists.layer": "dropout"}, r"expected an nn.Dropout, got .*Linear"),
    "another dropout": ({"lists.alpha": "dropout"}, r"expected an nn.Dropout, got .*AlphaDropout"),
    "heads of dropout": ({"lists.layer": "head_dropout:3"}, r"heads: expected a multiple of the 2 ranks"),
    "no attribute": ({"lists": "divide:count"}, r"Lists has no attribute 'count'"),
    "no attribute to set": ({"lists": Assign("count", 1)}, r"Lists has no attribute 'count'"),
    "no number": ({"lists": "divide:name"}, r"name: expected a number that can be divided, got 'Lists'"),
    "an odd number": ({"lists": "divide_shared:number,name"}, r"name: expected a number"),
    "hooks": ({"lists.hooked": "column"}, r"'lists.hooked': it has hooks"),
    "hooks of parameters": ({"lists.watched": "column"}, r"'lists.watched': it has hooks"),
    "two styles for one": ({"lists.layer": ["column", "row"]}, r"expected one style for a layer, got Column.*Row"),
    "half of a tie": (
        {"lists.embedding": "vocab"},
        r"lists.embedding.weight and lists.tied.weight are one parameter",
    ),
    "a tie cut twice": (
        {"*.embedding": "vocab", "*.tied": "row"},
        r"embedding.weight and lists.tied.weight are one",
    ),
}


@pytest.mark.ranks(2)
def test_mistakes_in_a_plan_change_nothing(world):
    model = built(wrong)
    before, parts = dict(model.named_parameters()), list(model.modules())
    for mistaken, message in MISTAKES.values():
        call = functools.partial(tensor_parallelize, model, {"lists.layer": "column", **mistaken})
        refused(ValueError, (call, message))
    assert list(model.modules()) == parts
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.ranks(2)
def test_arguments_of_a_wrong_kind(world):
    model = built(perceptron)
    refused(
        TypeError,
        (lambda: tensor_parallelize(3, {"0": "row"}), "module: expected a torch.nn.Module, got int"),
        (lambda: tensor_parallelize(model, ["row"]), "plan: expected a mapping"),
        (lambda: tensor_parallelize(model, {"0": 3}), r"plan\['0'\]: expected a style"),
        (lambda: tensor_parallelize(model, {"0": "column"}, "tp"), "^group: expected an axonmpi.ProcessGroup or"),
    )


@pytest.mark.real_ranks
@pytest.mark.ranks(2)
def test_a_mistake_of_one_rank_is_told_on_all(world):
    own = {"0": "column", "2": "row"} if world.rank == 0 else {"0": "column", "3": "row"}
    model = built(perceptron)
    refused(ValueError, (lambda: tensor_parallelize(model, own), r"^rank 1: plan\['3'\]: no submodule"))
    refused(
        TypeError,
        (
            lambda: tensor_parallelize(model if world.rank else None, {"0": "column"}),
            r"^rank 0: module: expected a torch.nn.Module, got NoneType",
        ),
    )


@pytest.mark.ranks(2)
def test_ranks_that_do_not_agree(world):
    first, own = world.rank == 0, {"0": "column", "2": "row"}
    longer = built(perceptron if first else lambda: nn.Sequential(*perceptron(), nn.Linear(4, 4)))
    other_values, model = built(perceptron, seed=world.rank), built(perceptron)
    before = copy.deepcopy([one.state_dict() for one in (model, longer, other_values)])
    divide = functools.partial(tensor_parallelize, model)
    refused(
        ValueError,
        (lambda: divide(own if first else {"0": "column"}), r"'plan: 0' .*Column.*\n.*no further|'plan: 2'"),
        (
            lambda: divide(own if first else {**own, "0": "column:gather"}),
            r"rank 0: .*gather_output=False.*\n.*rank 1: .*gather_output=True",
        ),
        (
            lambda: divide(own, sequence_parallel=not first),
            r"sequence_parallel.* False\n.*sequence_parallel.* True",
        ),
        (
            lambda: tensor_parallelize(longer, own),
            r"rank 0: no further .*\n.*rank 1: parameter '3.weight' float32 \[4, 4\]",
        ),
        (lambda: divide(own, generator=seeded(world.rank)), r"generator.* state"),
        (
            lambda: tensor_parallelize(other_values, own),
            r"values are not the same .*\n  rank 0: parameter '0.weight' .*\n  rank 1: .*\nBuild .* the same seed",
        ),
    )
    assert_equal([one.state_dict() for one in (model, longer, other_values)], before)


@pytest.mark.ranks(2)
def test_a_model_is_divided_once(world):
    model = tensor_parallelize(built(perceptron), {"0": "column", "2": "row"})
    wrapped, whole = {"module.0": "column", "module.2": "row"}, "divide the model before it is wrapped"
    once = "module: 0 is divided already; tensor_parallelize is called once"
    refused(
        ValueError,
        (lambda: tensor_parallelize(model, {"0": "column"}), once),
        (lambda: tensor_parallelize(model, {"1": "region"}), once),
        (lambda: tensor_parallelize(ax.DDP(built(perceptron)), wrapped), whole),
        (lambda: tensor_parallelize(ax.FSDP(built(perceptron)), wrapped), whole),
    )


@pytest.mark.ranks(2)
def test_parts_of_a_sequence_reach_only_what_the_plan_knows(world):
    """Gradients of other parameters would be those of a part of the sequence, without anybody noticing."""
    without = {pattern: style for pattern, style in plan().items() if pattern != "*.norm?"}
    tensor_parallelize(built(Words), without)
    refused(
        ValueError,
        (
            lambda: tensor_parallelize(built(Words), without, sequence_parallel=True),
            r"blocks.0.norm1 has parameters \(weight, bias\) behind the 'split' at blocks.0",
        ),
    )
    frozen = built(Words)
    nn.ModuleList([norm for block in frozen.blocks for norm in (block.norm1, block.norm2)]).requires_grad_(False)
    tensor_parallelize(frozen, without, sequence_parallel=True)
    module = beside_a_layer(Attending(), "split", sequence_parallel=True)
    refused(
        ValueError,
        (
            lambda: module(torch.ones(2, 2, dtype=torch.int64)),
            "Attending: expected a floating-point tensor as input, got none; 'split'",
        ),
    )


class Answering(nn.Module):
    def forward(self, x: Tensor, answer: Any) -> Any:
        return (x, *answer) if isinstance(answer, tuple) else answer


@pytest.mark.ranks(2)
def test_what_is_put_together_is_a_tensor_or_the_first_of_several(world):
    module = beside_a_layer(Answering(), ["split", "join"], sequence_parallel=True)
    x, message = randn(2, 4, 3), "Answering: expected a tensor as output, .*got {}; 'join' has to be"
    assert_close(module(x, ("more",)), (x, "more"))
    assert_close(module(x=x, answer=x.chunk(2, 1)[world.rank]), x)
    refused(
        TypeError,
        (lambda: module(x, {"x": x}), message.format("dict")),
        (lambda: module(x, None), message.format("NoneType")),
    )


@pytest.mark.ranks(3)
def test_a_group_of_other_ranks(world):
    group = world.new_group([2, 0])
    divide = functools.partial(tensor_parallelize, built(perceptron), {"0": "column", "2": "row"}, group)
    if world.rank == 1:
        refused(ValueError, (divide, "rank 1 is not in this group"))
    else:
        assert_like_whole(divide(), built(perceptron), floats(3, 4))
