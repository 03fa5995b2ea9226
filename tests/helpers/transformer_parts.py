"""Parts of a transformer: whole in plain torch, and divided over ranks; tiny models of `transformers`; their data.

torch's default generator belongs to the process and mock ranks are its threads: modules that draw from it are built
under a lock, by `helpers.models.built`, or on all ranks together.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.utils.device import device_at
from helpers.compare import assert_equal, assert_precise
from helpers.models import built

Cut = Callable[[str, Tensor], Tensor]
"""From the name of a parameter, and the whole of it or of its gradient, to this rank's part."""
_Made = TypeVar("_Made", bound=nn.Module)


def together(make: Callable[[], _Made], seed: int = 0) -> _Made:
    """Build a module on all ranks; collective."""
    state = device_at(torch.device("cpu")).random_state()
    ax.barrier()
    torch.manual_seed(seed)
    made = make()
    ax.barrier()
    torch.set_rng_state(state)
    return made


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def floats(*shape: int, seed: int = 1) -> Tensor:
    return randn(*shape, seed=seed, dtype=torch.float32)


def part(tensor: Tensor, world: ax.World, dim: int | None = 1) -> Tensor:
    """Return this rank's slice along a dimension, or all of it, without a history."""
    own = tensor if dim is None else tensor.chunk(world.size, dim)[world.rank]
    return own.detach().clone()


def rows_of_heads(parts: Sequence[int], width: int, rank: int, ranks: int) -> Tensor:
    """Return the rows of a rank in a matrix of several parts, each with so many heads, maybe fewer than ranks."""
    rows, start = [], 0
    for heads in parts:
        own = range(rank * heads // ranks, max((rank + 1) * heads // ranks, rank * heads // ranks + 1))
        rows += [torch.arange(start + head * width, start + (head + 1) * width) for head in own]
        start += heads * width
    return torch.cat(rows)


class Sent:
    """The operations of a mock rank since this was made, by name."""

    def __init__(self, world: ax.World) -> None:
        self._log = world.default_group.backend.log
        self._before = len(self._log)

    def take(self) -> dict[str, int]:
        entries = list(self._log)[self._before :]
        self._before = len(self._log)
        return dict(Counter(entry.operation for entry in entries))


# ---- attention --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention, head by head."""

    def __init__(self, hidden: int, heads: int, pairs: int, width: int, *, bias=True, causal=True, rotary=False):
        super().__init__()
        self.sizes = heads, pairs, width
        self.causal, self.rotary = causal, rotary
        if heads == pairs:
            self.query_key_value = nn.Linear(hidden, 3 * heads * width, bias)
        else:
            self.query = nn.Linear(hidden, heads * width, bias)
            self.key_value = nn.Linear(hidden, 2 * pairs * width, bias)
        self.output = nn.Linear(heads * width, hidden, bias)

    def forward(self, x: Tensor, masks: Tensor | None = None) -> Tensor:
        """Return [B, T, D]; attention weights are multiplied with `masks` [B, H, T, T]."""
        heads, pairs, width = self.sizes
        if heads == pairs:
            query, key, value = self.query_key_value(x).chunk(3, -1)
        else:
            query, (key, value) = self.query(x), self.key_value(x).chunk(2, -1)
        seen = []
        for head in range(heads):
            pair = head // (heads // pairs)
            own = [query[..., head * width : (head + 1) * width]]
            own += [projected[..., pair * width : (pair + 1) * width] for projected in (key, value)]
            q, k, v = ([turned(t) for t in own[:2]] + own[2:]) if self.rotary else own
            scores = q @ k.mT / width**0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            weights = (scores.masked_fill(later, -torch.inf) if self.causal else scores).softmax(-1)
            seen.append((weights if masks is None else weights * masks[:, head]) @ v)
        return self.output(torch.cat(seen, -1))


def turned(x: Tensor) -> Tensor:
    """Rotate by positions, with complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2]).double()[:, None] / 10_000 ** (torch.arange(half).double() / half)
    turns = torch.polar(torch.ones_like(angles), angles)
    numbers = torch.complex(x[..., :half].double(), x[..., half:].double()) * turns
    return torch.cat((numbers.real, numbers.imag), -1).to(x.dtype)


# ---- perceptrons ------------------------------------------------------------------------------------------------


def whole_linear(inputs: int, outputs: int, *, bias: bool = True, dtype=torch.float64, seed: int = 0) -> nn.Linear:
    return built(lambda: nn.Linear(inputs, outputs, bias, dtype=dtype), seed)


class MLP(nn.Module):
    """Two layers, whole or divided."""

    def __init__(self, up: nn.Module, down: nn.Module, activation: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.up, self.down, self.activation = up, down, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def whole_mlp(hidden: int, between: int, *, bias: bool = True, dtype=torch.float64) -> MLP:
    options = {"bias": bias, "dtype": dtype}
    return MLP(whole_linear(hidden, between, **options, seed=1), whole_linear(between, hidden, **options, seed=2))


def divided_mlp(whole: MLP, **options: Any) -> MLP:
    return MLP(
        ax.ColumnParallelLinear.from_linear(whole.up, **options),
        ax.RowParallelLinear.from_linear(whole.down, **options),
    )


OF_MLP = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, between: int, activation=F.silu, bias: bool = False):
        super().__init__()
        self.gate_up, self.down = nn.Linear(hidden, 2 * between, bias), nn.Linear(between, hidden, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.activation(gate) * up)


class Siblings(nn.Module):
    """Three layers that share their input, and what else is done with it."""

    def __init__(self, layers: list[nn.Module], output: nn.Module, enter: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = layers
        self.output, self.enter = output, enter

    def forward(self, x: Tensor) -> Tensor:
        shared = self.enter(x)
        return self.output(self.first(shared) * torch.tanh(self.second(shared)) + self.third(shared)) + x


OF_SIBLINGS = {f"{name}.{kind}": 0 for name in ("first", "second", "third") for kind in ("weight", "bias")}
OF_SIBLINGS |= {"output.weight": 1}


def siblings(world: ax.World, sequence_parallel: bool) -> tuple[Siblings, Siblings]:
    layers = [whole_linear(6, 8, seed=seed) for seed in (1, 2, 3)]
    whole = Siblings(layers, whole_linear(8, 6, seed=4), lambda x: x)
    divided = [ax.ColumnParallelLinear.from_linear(layer, input_is_entered=True) for layer in layers]
    row = ax.RowParallelLinear.from_linear(whole.output, sequence_parallel=sequence_parallel)
    options = {"sequence_parallel": sequence_parallel}
    return whole, Siblings(divided, row, lambda x: ax.tensor.enter(x, world.default_group, **options))


# ---- comparing --------------------------------------------------------------------------------------------------


def cut_along(world: ax.World, dims: Mapping[str, int]) -> Cut:
    """Cut parameters along these dimensions, and others not at all."""
    return lambda name, tensor: part(tensor, world, dims.get(name))


def assert_parts(divided: nn.Module, whole: nn.Module, cut: Cut, what: str = "") -> None:
    """Compare values and gradients of all parameters with this rank's parts of the whole ones."""
    expected = dict(whole.named_parameters())
    assert list(expected) == [name for name, _ in divided.named_parameters()]
    for name, parameter in divided.named_parameters():
        gradient = expected[name].grad
        assert_equal(parameter, cut(name, expected[name]), f"{what} {name}")
        assert_precise(parameter.grad, None if gradient is None else cut(name, gradient), f"{what} {name}")


def assert_like_whole(
    world: ax.World,
    block: nn.Module,
    whole: nn.Module,
    cut: Cut,
    x: Tensor,
    *,
    of_input: int | None = None,
    of_output: int | None = None,
    what: str = "",
    **options: Any,
) -> None:
    """Compare output, input gradient, values and gradients of parameters of a block with those of the whole one.

    Ranks have slices of the input and of the output along these dimensions, or all of them; the options are of the
    whole block's forward.
    """
    own_x, x = part(x, world, of_input).requires_grad_(), x.detach().clone().requires_grad_()
    found, expected = block(own_x), whole(x, **options)
    weights = randn(*expected.shape, seed=2, dtype=x.dtype)
    (found * part(weights, world, of_output)).sum().backward()
    (expected * weights).sum().backward()
    wanted = [part(expected, world, of_output), part(x.grad, world, of_input)]
    assert_precise([found, own_x.grad], wanted, f"{what} output, gradient of the input:")
    assert_parts(block, whole, cut, what)


# ---- models of `transformers`, built without download -----------------------------------------------------------

WORDS = 37
"""Does not divide by 2 or 4."""
LENGTH = 8


def _of_transformers(name: str, kind: str, **options: Any) -> nn.Module:
    import transformers

    return getattr(transformers, name)(getattr(transformers, f"{kind}Config")(vocab_size=WORDS, **options))


def gpt2(name: str = "GPT2LMHeadModel", dropout: float = 0.0, **options: Any) -> nn.Module:
    return _of_transformers(
        name, "GPT2", n_embd=16, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout, **options,
    )  # fmt: skip


def llama(name: str = "LlamaForCausalLM", heads: int = 4, pairs: int = 2, **options: Any) -> nn.Module:
    """Build a Llama, or a model with the same blocks, whose heads are 4 wide."""
    return _of_transformers(
        name, name.removesuffix("Model").removesuffix("ForCausalLM"), hidden_size=4 * heads, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=pairs, intermediate_size=24, max_position_embeddings=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip


def bert(name: str = "BertForMaskedLM", dropout: float = 0.0, **options: Any) -> nn.Module:
    return _of_transformers(
        name, "Bert", hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **options,
    )  # fmt: skip
