"""The harness of the benchmarks: sizes, tables, and variants that take turns."""

import argparse
import math
import time

import pytest
import torch

import axonmpi as ax
from axonmpi.cli.bench.harness.benchmark import check_error, largest_error
from axonmpi.cli.bench.harness.options import size
from axonmpi.cli.bench.harness.table import BAR, figure, format_size, format_time, gain, ratio, table_lines, text
from axonmpi.cli.bench.harness.timing import MICROSECONDS, MOST_CALLS, calls_for, interleave


@pytest.mark.parametrize(
    ("written", "nbytes"), [("4B", 4), ("64KiB", 65536), ("16MiB", 1 << 24), ("1GiB", 1 << 30), ("3 MiB", 3 << 20)]
)
def test_sizes_are_read_and_written(written, nbytes):
    assert size(written) == size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize("written", ["", "4", "KiB", "-4B", "1.5MiB", "4 b", "4B 8B", "²B", "0B"])
def test_other_texts_are_no_sizes(written):
    with pytest.raises(argparse.ArgumentTypeError, match="expected a size such as"):
        size(written)


def test_a_table_has_a_column_for_each_heading():
    columns = [
        ("name", text("name")),
        ("s", figure("seconds", "mean", form=".2f")),
        ("ms", figure("seconds", "mean", scale=1e3)),
        BAR,
        ("mean\n/ best", ratio("mean", "best", "seconds")),
    ]
    rows = [{"name": "one", "seconds": {"mean": 3.0, "best": 2.0}}, {"name": "other", "seconds": {"mean": 0.25}}]
    assert table_lines(columns, rows, left=[0]) == [
        "                     |    mean",
        "name      s      ms  |  / best",
        "one    3.00  3000.0  |    1.50",
        "other  0.25   250.0  |       -",
    ]
    assert [format_time(each) for each in (None, 2.0, 2500.0)] == ["-", "2.00 µs", "2.50 ms"]
    assert (gain(6.0, 4.0), gain(6.0, -1.0)) == ("1.5", "no overhead")


def test_errors_are_relative_to_the_largest_element():
    right = torch.tensor([1.0, -4.0])
    assert largest_error([right, right + 1], [right, right]) == 0.25
    assert largest_error([right, right * math.nan], [right, right]) == math.inf


@pytest.mark.ranks(2)
def test_an_error_of_one_rank_is_raised_on_all(world):
    check_error("exact", "results", 0.0, world)
    with pytest.raises(RuntimeError, match=r"spoiled on 2 ranks: results are not those .* off by 5.0e-01"):
        check_error("spoiled", "results", 0.5 * world.rank, world)


@pytest.mark.ranks(2)
def test_ranks_make_the_same_number_of_calls(world):
    counts = dict.fromkeys(("quick", "slow"), 0)

    def count(name: str, seconds: float) -> None:
        counts[name] += 1
        time.sleep(seconds * world.rank)

    variants = {"quick": lambda: count("quick", 0.0), "slow": lambda: count("slow", 0.02)}
    calls = {name: calls_for(call, 0.01) for name, call in variants.items()}
    assert (calls, calls["slow"]) == (ax.comm.broadcast_object(calls), 1)
    assert 1 <= calls["quick"] <= MOST_CALLS
    counts.update(quick=0, slow=0)
    times = interleave(variants, blocks=2, calls=calls, unit=MICROSECONDS)
    assert counts == {name: 3 * number for name, number in calls.items()}
    assert times["slow"] >= 0.02 * MICROSECONDS
