"""The benchmark of tensor parallelism: figures hang together, sizes are checked, wrong results are noticed."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.compare import refused

from axonmpi.cli.bench.tensor import BLOCKS, Sizes, Task, check_results, measure, table

TINY = Sizes(width=32, heads=4, lengths=(4,))


def test_table_shows_the_ratios():
    ours = {"compute": 6.0, "collectives": 2.0, "axonmpi": 10.0}
    figures = {**ours, "torch on gloo": 25.0, "torch on axonmpi": 20.0}
    sizes = {"ranks": 2, "cores": 2, "threads": 1, "width": 32, "heads": 4, "sequences": 1}
    row = table([{**sizes, "blocks": {"mlp": {"8": figures}}}]).splitlines()[-1]
    assert row.split() == ["mlp", "8", "6.00", "2.00", "10.00", "25.00", "20.00", "|", "1.25", "2.50"]


@pytest.mark.ranks(2)
def test_sizes_that_do_not_fit_are_named(world):
    complaints = {
        Sizes(heads=3): "heads: expected a multiple of ranks = 2, got 3",
        Sizes(width=100): "width: expected a multiple of heads = 16, got 100",
        Sizes(sequences=0): "sequences: expected a positive number, got 0",
        Sizes(lengths=(4, -1)): "lengths: expected a positive number, got -1",
    }
    refused(ValueError, *((partial(measure, world, 1, each), said) for each, said in complaints.items()))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("wrong", ["output", "gradient"])
def test_wrong_results_are_noticed(world, wrong, monkeypatch):
    def build(*_: object) -> torch.nn.Module:
        return torch.nn.Linear(32, 32)

    monkeypatch.setitem(BLOCKS, "mlp", lambda groups, sizes: (build(), build(), {}, build))
    own = Task(world, TINY, "mlp", 4, {})
    of_one = {"whole": own.whole, "ours": own.whole, "stock": {"torch": own.whole}}  # all are the whole block
    task = SimpleNamespace(world=world, tokens=own.tokens, step=own.step, **of_one)
    check_results(task)
    task.stock["torch"] = stock = torch.nn.Linear(32, 32)
    if wrong == "gradient":
        stock.load_state_dict(task.whole.state_dict())
        stock.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(RuntimeError, match="torch on 1 ranks: results are not those of one process"):
        check_results(task)
