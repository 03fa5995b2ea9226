"""`axonmpi bench tensor`: a transformer's two blocks, sharded: axonmpi, torch on two backends, and the ideal.

The blocks are a perceptron (width to 4 x width and back) and causal self-attention. For each number of tokens five
variants take turns, each a forward and a backward: the computation of a rank alone, with no messages; the two
all-reduces alone, of the tokens' activations; axonmpi; and torch's tensor parallelism, on gloo and on axonmpi's
backend of torch.distributed. The ideal is the first two together.

Before anything is timed, the output and the gradients of axonmpi and of torch are compared with one process's.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ...comm import all_reduce
from ...groups.world import World
from ...tensor import ColumnParallelLinear, ParallelMLP, RowParallelLinear, tensor_parallel_attention
from .harness.benchmark import Benchmark, Figures, check_error, check_multiple, largest_error
from .harness.options import number, numbers
from .harness.table import BAR, Column, figure, ratio, table_lines, text
from .harness.timing import MILLISECONDS, interleave
from .harness.torch_groups import ON_AXONMPI, ON_GLOO, torch_groups

_STEPS_PER_BLOCK = 3

Step = Callable[[], None]
Groups = Mapping[str, dist.ProcessGroup]
"""Groups of all ranks in torch.distributed, by the names of the variants on them."""


# ---- blocks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparedBlock:
    """A block of the transformer in each variant's form, with the same parameters.

    Attributes:
        full: On one process.
        ours: axonmpi's, sharded.
        by_torch: torch's, sharded over each of its groups.
        shard: A module of the size of a rank's shard, which communicates with no other rank.
    """

    full: nn.Module
    ours: nn.Module
    by_torch: Mapping[str, nn.Module]
    shard: nn.Module


class Attention(nn.Module):
    """Causal self-attention of one process, or as much of it as one of several ranks computes.

    Args:
        width: Features of a token.
        heads: Of all ranks.
        ranks: The number of ranks.
        projections: 1 for queries, keys and values by one product, which is the fastest; 3 for one each, which
            torch shards.
    """

    def __init__(self, width: int, heads: int, ranks: int = 1, projections: int = 1) -> None:
        super().__init__()
        self.head_width = width // heads
        features = 3 * width // projections // ranks
        self.projections = nn.ModuleList(nn.Linear(width, features) for _ in range(projections))
        self.output = nn.Linear(width // ranks, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, D] of [B, T, D]."""
        projected = [projection(x) for projection in self.projections]
        if len(projected) == 1:
            projected = projected[0].chunk(3, -1)
        query, key, value = (each.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in projected)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


def _perceptron(width: int, ranks: int = 1) -> nn.Sequential:
    up = nn.Linear(width, 4 * width // ranks)
    down = nn.Linear(4 * width // ranks, width)
    return nn.Sequential(OrderedDict(up=up, activation=nn.GELU(), down=down))


def _build_perceptron(groups: Groups, world: World, options: argparse.Namespace) -> ComparedBlock:
    ours = ParallelMLP(options.width, 4 * options.width)
    full = _perceptron(options.width)
    _copy([ours.up, ours.down], [full.get_submodule("up"), full.get_submodule("down")])
    shard = _perceptron(options.width, world.size)
    return ComparedBlock(full, ours, _parallelized(groups, full, "up", "down"), shard)


def _build_attention(groups: Groups, world: World, options: argparse.Namespace) -> ComparedBlock:
    width, heads = options.width, options.heads
    ours = tensor_parallel_attention(width, heads)
    assert ours.query_key_value is not None
    full, separate = Attention(width, heads), Attention(width, heads, projections=3)
    _copy([ours.query_key_value, ours.output, ours.output], [full.projections[0], full.output, separate.output])
    fused = {name: tensor.chunk(3) for name, tensor in full.projections[0].state_dict().items()}
    for index, projection in enumerate(separate.projections):
        projection.load_state_dict({name: chunks[index] for name, chunks in fused.items()})
    shard = Attention(width, heads, world.size)
    return ComparedBlock(full, ours, _parallelized(groups, separate, "projections.*", "output"), shard)


BLOCKS = {"mlp": _build_perceptron, "attention": _build_attention}


def _copy(sharded: Sequence[ColumnParallelLinear | RowParallelLinear], plain: Sequence[nn.Module]) -> None:
    for source, target in zip(sharded, plain, strict=True):
        target.load_state_dict({"weight": source.full_weight(), "bias": source.full_bias()})


def _parallelized(groups: Groups, module: nn.Module, first: str, last: str) -> dict[str, nn.Module]:
    """Return copies of a module that torch shards over the ranks of each group; collective.

    Args:
        groups: The groups.
        module: A module of one process.
        first: The names of its layers that are sharded by columns.
        last: The name of its layer that is sharded by rows.
    """
    # These take a second to import, which the other benchmarks need not spend.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {first: ColwiseParallel(), last: RowwiseParallel()}
    meshes = {name: DeviceMesh.from_group(group, "cpu") for name, group in groups.items()}
    return {name: parallelize_module(deepcopy(module), mesh, plan) for name, mesh in meshes.items()}


# ---- measuring --------------------------------------------------------------------------------------------------


class Tokens:
    """The same tokens, and the same gradient of the output, on all ranks.

    Args:
        sequences: Number of sequences.
        length: Tokens of a sequence.
        width: Features of a token.
    """

    def __init__(self, sequences: int, length: int, width: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = sequences, length, width
        self.input = torch.randn(shape, generator=generator).requires_grad_()
        self.gradient = torch.randn(shape, generator=generator)
        self._activations = torch.zeros(shape)

    def step(self, module: nn.Module) -> Step:
        """Return a function that computes the gradients of a module and of the tokens."""

        def run() -> None:
            module.zero_grad()
            self.input.grad = None
            module(self.input).backward(self.gradient)

        return run

    def collectives(self) -> None:
        """Sum as many activations as a step does, once in forward and once in backward; collective."""
        all_reduce(self._activations)
        all_reduce(self._activations)

    def results(self, module: nn.Module) -> list[Tensor]:
        """Return the output, the gradient of the tokens, and the squared norm of the parameters' gradients."""
        self.step(module)()
        assert self.input.grad is not None
        return [module(self.input).detach(), self.input.grad.clone(), _squared_norm(module)]


def _squared_norm(module: nn.Module) -> Tensor:
    """Return the squared norm of the full gradient; collective if the module is sharded."""
    total = torch.zeros(())
    for layer in module.modules():
        shards = getattr(layer, "shards", {})
        for name, parameter in layer.named_parameters(recurse=False):
            gradient = parameter.grad
            assert gradient is not None
            if hasattr(gradient, "full_tensor"):  # torch's sharded tensors have it
                gradient = gradient.full_tensor()
            squares = gradient.square().sum()
            if name in shards:
                all_reduce(squares)
            total += squares
    return total


def check_results(block: ComparedBlock, tokens: Tokens, world: World) -> None:
    """Compare the results of each variant with one process; collective.

    Raises:
        RuntimeError: The output, the tokens' gradient or a rank's gradients are not the same; on all ranks.
    """
    expected = tokens.results(block.full)
    for name, module in {"axonmpi": block.ours, **block.by_torch}.items():
        check_error(name, "results", largest_error(tokens.results(module), expected), world)


def measure(world: World, options: argparse.Namespace) -> Figures:
    """Measure on the ranks of a world; collective; the figures are in milliseconds.

    Raises:
        RuntimeError: A variant's results are not those of one process; on all ranks.
        ValueError: A size does not fit these ranks.
    """
    check_multiple("heads", options.heads, world.size, "ranks")
    check_multiple("width", options.width, options.heads, "heads")

    groups = torch_groups()
    figures: Figures = {}
    for name, build in BLOCKS.items():
        block = build(groups, world, options)
        figures[name] = {}
        for length in options.lengths:
            tokens = Tokens(options.sequences, length, options.width)
            check_results(block, tokens, world)
            variants = {
                "compute": tokens.step(block.shard),
                "collectives": tokens.collectives,
                "axonmpi": tokens.step(block.ours),
                **{variant: tokens.step(module) for variant, module in block.by_torch.items()},
            }
            figures[name][str(options.sequences * length)] = interleave(
                variants, blocks=options.blocks, calls=_STEPS_PER_BLOCK, unit=MILLISECONDS
            )
    sizes = {name: getattr(options, name) for name in ("width", "heads", "sequences", "lengths")}
    return {**sizes, "blocks": figures}


# ---- table ------------------------------------------------------------------------------------------------------

_COLUMNS: list[Column] = [
    ("block", text("block")),
    ("tokens", text("tokens")),
    *((name, figure(name, form=".2f")) for name in ("compute", "collectives", "axonmpi", ON_GLOO, ON_AXONMPI)),
    BAR,
    ("ours / (compute + collectives)", figure("over ideal", form=".2f")),
    ("gloo / ours", ratio(ON_GLOO, "axonmpi")),
]


def table(results: list[Figures]) -> str:
    """Format the figures of several numbers of ranks."""
    lines = [f"forward and backward at width {results[0]['width']}, float32; ms, medians"]
    for result in results:
        lines.append(
            f"\n{result['ranks']} ranks, {result['cores']} cores, threads of a rank: {result['threads']}, "
            f"{result['heads']} heads, {result['sequences']} at once"
        )
        lines += table_lines(_COLUMNS, _rows(result["blocks"]), left=[0])
    return "\n".join(lines)


def _rows(blocks: Figures) -> list[Figures]:
    rows = []
    for block, of_block in blocks.items():
        for tokens, times in of_block.items():
            over_ideal = times["axonmpi"] / (times["compute"] + times["collectives"])
            rows.append({"block": block, "tokens": tokens, **times, "over ideal": over_ideal})
    return rows


TENSOR = Benchmark(
    "a perceptron and an attention divided among the ranks: ours, torch's on gloo and on ours, and the ideal",
    measure,
    table,
    options={
        "--width": number("features of a token, a multiple of the heads", 1024),
        "--heads": number("heads of the attention, a multiple of the ranks", 16),
        "--sequences": number("sequences at once", 1),
        "--lengths": numbers("tokens of a sequence, each measured", (16, 64, 256)),
    },
)
