"""A transformer's two blocks divided among the ranks: ours, torch's on gloo and on ours, and the ideal.

The blocks are a perceptron (width to 4 x width and back) and causal self-attention. For each number of tokens five
variants take turns, each a forward and a backward: the computation of a rank alone, with no
messages; the two all-reduces alone, of the tokens' activations; ours; and torch's tensor parallelism, on gloo and
on axonmpi's backend of torch.distributed. The ideal is the first two together.

Before anything is timed, the output and the gradients of ours and of torch's are compared with one process's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ...comm import all_reduce, all_reduce_max
from ...groups.world import World
from ...tensor import ColumnParallelLinear, ParallelMLP, RowParallelLinear, tensor_parallel_attention
from .harness.timing import count_cores, interleave, start_gloo, stock_groups

STEPS_PER_BLOCK = 3
_TOLERANCE = 1e-4

_VARIANTS = ("compute", "collectives", "axonmpi", "torch on gloo", "torch on axonmpi")

Step = Callable[[], None]
Groups = Mapping[str, dist.ProcessGroup]
"""Groups of torch.distributed by the names of the variants on them."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the blocks and of the batch.

    Attributes:
        width: Features of a token.
        heads: Of the attention.
        sequences: How many at once.
        lengths: Tokens of a sequence; each is measured.
    """

    width: int = 1024
    heads: int = 16
    sequences: int = 1
    lengths: tuple[int, ...] = (16, 64, 256)


class Perceptron(nn.Module):
    """One rank's part of it, or with one part the whole."""

    def __init__(self, sizes: Sizes, parts: int) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.width, 4 * sizes.width // parts)
        self.down = nn.Linear(4 * sizes.width // parts, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, D] of [B, T, D]."""
        output: Tensor = self.down(F.gelu(self.up(x)))
        return output


class Attention(nn.Module):
    """With three projections, as torch divides it; with one part the whole."""

    def __init__(self, sizes: Sizes, parts: int) -> None:
        super().__init__()
        self.head_width = sizes.width // sizes.heads
        self.query, self.key, self.value = (nn.Linear(sizes.width, sizes.width // parts) for _ in range(3))
        self.output = nn.Linear(sizes.width // parts, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, D] of [B, T, D]."""
        projected: Tensor = self.output(_attend((self.query(x), self.key(x), self.value(x)), self.head_width))
        return projected


class FusedAttention(nn.Module):
    """With one projection for queries, keys and values: a rank's part, as fast as it can be."""

    def __init__(self, sizes: Sizes, parts: int) -> None:
        super().__init__()
        self.head_width = sizes.width // sizes.heads
        self.projection = nn.Linear(sizes.width, 3 * sizes.width // parts)
        self.output = nn.Linear(sizes.width // parts, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, D] of [B, T, D]."""
        projected: Tensor = self.output(_attend(self.projection(x).chunk(3, -1), self.head_width))
        return projected


def _attend(parts: Sequence[Tensor], head_width: int) -> Tensor:
    query, key, value = (part.unflatten(-1, (-1, head_width)).transpose(1, 2) for part in parts)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


# ---- variants ---------------------------------------------------------------------------------------------------


class Task:
    """The same block and the same tokens on all ranks, in each variant's form; made collectively.

    Args:
        world: The ranks.
        sizes: Of the blocks and of the batch.
        block: Which of `BLOCKS`.
        length: Tokens of a sequence.
        groups: Of torch's variants, all ranks in each.
    """

    def __init__(self, world: World, sizes: Sizes, block: str, length: int, groups: Groups) -> None:
        self.world = world
        generator = torch.Generator().manual_seed(0)
        shape = sizes.sequences, length, sizes.width
        self.tokens = torch.randn(shape, generator=generator).requires_grad_()
        self.gradient = torch.randn(shape, generator=generator)
        self.whole, self.ours, self.stock, build = BLOCKS[block](groups, sizes)
        self.part = build(sizes, world.size)
        self._sent = torch.zeros(shape)

    def variants(self) -> dict[str, Step]:
        """Return the variants, which take turns."""
        return {
            "compute": self.step(self.part),
            "collectives": self._collectives,
            "axonmpi": self.step(self.ours),
            **{name: self.step(module) for name, module in self.stock.items()},
        }

    def step(self, module: nn.Module) -> Step:
        """Return a function that computes the gradients of a module and of the tokens."""

        def run() -> None:
            module.zero_grad()
            self.tokens.grad = None
            module(self.tokens).backward(self.gradient)

        return run

    def _collectives(self) -> None:
        all_reduce(self._sent)
        all_reduce(self._sent)


Forms = tuple[nn.Module, nn.Module, dict[str, nn.Module], Callable[..., nn.Module]]
"""A block on one process, ours, torch's on each group, and a function that builds a rank's part of the
computation."""


def _mlp_forms(groups: Groups, sizes: Sizes) -> Forms:
    ours = ParallelMLP(sizes.width, 4 * sizes.width)
    whole = Perceptron(sizes, 1)
    _copy([ours.up, ours.down], [whole.up, whole.down])
    return whole, ours, _parallelized(groups, whole, ["up"], "down"), Perceptron


def _attention_forms(groups: Groups, sizes: Sizes) -> Forms:
    ours = tensor_parallel_attention(sizes.width, sizes.heads)
    assert ours.query_key_value is not None
    whole, stock = FusedAttention(sizes, 1), Attention(sizes, 1)
    _copy([ours.query_key_value, ours.output], [whole.projection, whole.output])
    _copy([ours.output], [stock.output])
    thirds = zip(
        (stock.query, stock.key, stock.value),
        whole.projection.weight.detach().chunk(3),
        whole.projection.bias.detach().chunk(3),
        strict=True,
    )
    for layer, weight, bias in thirds:
        layer.load_state_dict({"weight": weight, "bias": bias})
    return whole, ours, _parallelized(groups, stock, ["query", "key", "value"], "output"), FusedAttention


BLOCKS: dict[str, Callable[[Groups, Sizes], Forms]] = {"mlp": _mlp_forms, "attention": _attention_forms}


def _copy(divided: Sequence[ColumnParallelLinear | RowParallelLinear], plain: Sequence[nn.Linear]) -> None:
    for source, target in zip(divided, plain, strict=True):
        target.load_state_dict({"weight": source.full_weight(), "bias": source.full_bias()})


def _parallelized(groups: Groups, module: nn.Module, first: Sequence[str], last: str) -> dict[str, nn.Module]:
    """Return a copy of a module divided by torch among the ranks of each group; collective."""
    # These take a second to import, which is none of the other benchmarks' business.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {**{name: ColwiseParallel() for name in first}, last: RowwiseParallel()}
    meshes = {name: DeviceMesh.from_group(group, "cpu") for name, group in groups.items()}
    return {name: parallelize_module(deepcopy(module), mesh, plan) for name, mesh in meshes.items()}


# ---- measuring --------------------------------------------------------------------------------------------------


def measure(world: World, blocks: int, sizes: Sizes) -> dict[str, Any]:
    """Measure on the ranks of a world; collective; the figures are in milliseconds.

    Args:
        world: The ranks.
        blocks: How often each variant takes its turn.
        sizes: Of the blocks and of the batch.

    Raises:
        RuntimeError: A variant's results are not those of one process; on all ranks.
        ValueError: A size is not as it has to be for these ranks.
    """
    _check_sizes(world, sizes)
    start_gloo(world)
    groups = stock_groups()
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for block in BLOCKS:
        figures[block] = {}
        for length in sizes.lengths:
            task = Task(world, sizes, block, length, groups)
            check_results(task)
            seconds = interleave(task.variants(), blocks=blocks, calls=STEPS_PER_BLOCK)
            figures[block][str(sizes.sequences * length)] = {name: value * 1e3 for name, value in seconds.items()}
    dist.destroy_process_group()
    return {
        "ranks": world.size,
        "cores": count_cores(world),
        "threads": torch.get_num_threads(),
        **asdict(sizes),
        "blocks": figures,
    }


def check_results(task: Task) -> None:
    """Compare the results of each variant with one process; collective.

    Raises:
        RuntimeError: The output, the tokens' gradient or a rank's gradients are not the same; on all ranks.
    """
    wanted = _results(task, task.whole)
    for name, module in {"axonmpi": task.ours, **task.stock}.items():
        found = _results(task, module)
        worst = torch.tensor(max(_error(*pair) for pair in zip(found, wanted, strict=True)))
        all_reduce_max(worst)
        if not worst <= _TOLERANCE:
            raise RuntimeError(
                f"{name} on {task.world.size} ranks: results are not those of one process, off by {worst:.1e} of "
                f"the largest, expected at most {_TOLERANCE:.0e}"
            )


def _results(task: Task, module: nn.Module) -> list[Tensor]:
    """Return the output, the gradient of the tokens, and the squared norm of the parameters' gradients."""
    task.step(module)()
    assert task.tokens.grad is not None
    return [module(task.tokens).detach(), task.tokens.grad.clone(), _squared_norm(module)]


def _squared_norm(module: nn.Module) -> Tensor:
    """Return that of the whole gradient; collective where it is divided."""
    total = torch.zeros(())
    for layer in module.modules():
        divided = getattr(layer, "shards", {})
        for name, parameter in layer.named_parameters(recurse=False):
            gradient = parameter.grad
            assert gradient is not None
            whole = getattr(gradient, "full_tensor", None)  # torch's divided tensors have it
            part = (gradient if whole is None else whole()).square().sum()
            if name in divided:
                all_reduce(part)
            total += part
    return total


def _error(found: Tensor, right: Tensor) -> float:
    error = float((found - right).abs().max() / right.abs().max())
    return error if math.isfinite(error) else math.inf


# ---- table ------------------------------------------------------------------------------------------------------


def table(results: list[dict[str, Any]]) -> str:
    """Format the figures of several numbers of ranks."""
    lines = [f"forward and backward at width {results[0]['width']}, float32; ms, medians"]
    for result in results:
        lines.append(
            f"\n{result['ranks']} ranks, {result['cores']} cores, threads of a rank: {result['threads']}, "
            f"{result['heads']} heads, {result['sequences']} at once"
        )
        lines.append(
            f"{'block':<10} {'tokens':>7} {'compute':>8} {'collectives':>12} {'axonmpi':>8} "
            f"{'torch on gloo':>14} {'torch on axonmpi':>17} | {'ours / (compute + collectives)':>30} "
            f"{'gloo / ours':>12}"
        )
        for block, of_block in result["blocks"].items():
            lines += [_row(block, tokens, figures) for tokens, figures in of_block.items()]
    return "\n".join(lines)


def _row(block: str, tokens: str, figures: dict[str, float]) -> str:
    compute, collectives, ours, gloo, stock = (figures[name] for name in _VARIANTS)
    return (
        f"{block:<10} {tokens:>7} {compute:8.2f} {collectives:12.2f} {ours:8.2f} {gloo:14.2f} {stock:17.2f} | "
        f"{ours / (compute + collectives):30.2f} {gloo / ours:12.2f}"
    )


# ---- options ----------------------------------------------------------------------------------------------------

_HELP = {
    "width": "features of a token, a multiple of the heads",
    "heads": "heads of the attention, a multiple of the ranks",
    "sequences": "sequences at once",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for sizes; local."""
    defaults = asdict(Sizes())
    for name, text in _HELP.items():
        parser.add_argument(
            f"--{name}", type=int, default=defaults[name], help=f"{text} (default: {defaults[name]})", metavar="N"
        )
    lengths = " ".join(map(str, defaults["lengths"]))
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=defaults["lengths"],
        help=f"tokens of a sequence, each measured (default: {lengths})",
        metavar="N",
    )


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Return the sizes that options say; local."""
    return Sizes(**{name: getattr(options, name) for name in _HELP}, lengths=tuple(options.lengths))


def _check_sizes(world: World, sizes: Sizes) -> None:
    """Raise ValueError unless the sizes fit all variants."""
    divisors = {"width": (sizes.heads, f"heads = {sizes.heads}"), "heads": (world.size, f"ranks = {world.size}")}
    numbers: Iterable[tuple[str, int]] = [
        ("heads", sizes.heads),
        ("width", sizes.width),
        ("sequences", sizes.sequences),
        *(("lengths", length) for length in sizes.lengths),
    ]
    for name, value in numbers:
        divisor, meaning = divisors.get(name, (1, ""))
        if value < 1 or value % divisor:
            expected = f"a multiple of {meaning}" if divisor > 1 else "a positive number"
            raise ValueError(f"{name}: expected {expected}, got {value}")
