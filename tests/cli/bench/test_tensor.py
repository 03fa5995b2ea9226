"""The benchmark of tensor parallelism: figures hang together, sizes are checked, wrong results are noticed."""

from argparse import Namespace
from functools import partial

import pytest
import torch
from helpers.compare import refused

from axonmpi.cli.bench.tensor import ComparedBlock, Tokens, check_results, measure, table

SIZES = {"width": 32, "heads": 4}


def test_table_shows_the_ratios():
    ours = {"compute": 6.0, "collectives": 2.0, "axonmpi": 10.0}
    figures = {**ours, "torch on gloo": 25.0, "torch on axonmpi": 20.0}
    sizes = {"ranks": 2, "cores": 2, "threads": 1, "width": 32, "heads": 4, "sequences": 1}
    row = table([{**sizes, "blocks": {"mlp": {"8": figures}}}]).splitlines()[-1]
    assert row.split() == ["mlp", "8", "6.00", "2.00", "10.00", "25.00", "20.00", "|", "1.25", "2.50"]


@pytest.mark.ranks(2)
def test_sizes_that_do_not_fit_are_named(world):
    complaints = {
        ("heads", 3): "heads: expected a multiple of ranks = 2, got 3",
        ("width", 30): "width: expected a multiple of heads = 4, got 30",
    }
    for (name, value), complaint in complaints.items():
        refused(ValueError, (partial(measure, world, Namespace(**{**SIZES, name: value})), complaint))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("wrong", ["output", "gradient"])
def test_wrong_results_are_noticed(world, wrong):
    full, stock = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
    tokens = Tokens(1, 4, 32)
    check_results(ComparedBlock(full, full, {"torch": full}, full), tokens, world)
    if wrong == "gradient":
        stock.load_state_dict(full.state_dict())
        stock.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(RuntimeError, match="torch on 1 ranks: results are not those of one process"):
        check_results(ComparedBlock(full, full, {"torch": stock}, full), tokens, world)
