"""The benchmark of collectives: figures hang together, options are checked, wrong results are noticed."""

import itertools

import pytest
import torch

import axonmpi as ax
from axonmpi.cli.bench.collectives.cases import OPERATIONS, CollectiveCase, Variant, check_results
from axonmpi.cli.bench.collectives.comparison import plot, table
from axonmpi.cli.bench.collectives.mpi_alone import add
from axonmpi.cli.bench.command import BENCHMARKS, make_parser
from axonmpi.cli.bench.harness import benchmark
from axonmpi.cli.bench.harness.torch_groups import start_torch
from axonmpi.testing import run_ranks
from axonmpi.utils.device import KINDS, Device

MULTIPLE, FUNNELED = "MPI_THREAD_MULTIPLE", "MPI_THREAD_FUNNELED"
PNG = b"\x89PNG\r\n\x1a\n"


def figures(ranks: int = 2) -> dict:
    """Figures of one operation, of two sizes, made up."""
    times = {"symmetric": 2.0, "ordinary": 4.0, "mpi": 8.0, "gloo": 3000.0, "memcpy": 1.0}
    without_mpi = {name: value for name, value in times.items() if name != "mpi"}
    kinds = [("float32", 4, times), ("float32", 65536, times), ("bfloat16", 4, without_mpi)]
    cases = [
        {"operation": "all_reduce", "dtype": dtype, "bytes": nbytes, "microseconds": microseconds}
        | {"mpi_microseconds": {MULTIPLE: times["mpi"]} if "mpi" in microseconds else {}}
        | {"line_nanoseconds": 1.5 if dtype == "float32" else None}
        for dtype, nbytes, microseconds in kinds
    ]
    return {"ranks": ranks, "cores": 2, "path": "node", "mpi": "Intel MPI", "blocks": 1, "cases": cases}


# ---- figures ----------------------------------------------------------------------------------------------------


def test_table_shows_times_and_ratios():
    lines = table([figures()]).splitlines()
    title = "2 ranks, 2 cores; path between the ranks: node, through memory that they share"
    assert (lines[:2], "Intel MPI" in lines[4]) == ([title, "Intel MPI: at MPI_THREAD_MULTIPLE"], True)
    small, large = (next(line for line in lines if line.lstrip().startswith(start)) for start in ("4 B", "64 KiB"))
    times, ratios, line = (part.split() for part in small.split("|"))
    assert " ".join(times[2:] + line) == "2.00 µs 4.00 µs 8.00 µs 3.00 ms 1.00 µs 1.5 ns"
    assert ratios == large.split("|")[1].split() == ["2.00", "4.00", "2.00", "1500.00"]


@pytest.mark.parametrize(("alone", "quicker"), [(3.0, 3.0), (9.0, 8.0)])
def test_the_quicker_job_is_mpi(alone, quicker):
    result = figures()
    cases = [{"operation": "all_reduce", "bytes": nbytes, "microseconds": alone} for nbytes in (4, 65536)]
    add(result, lambda: {"level": FUNNELED, "cases": cases})
    for case in result["cases"][:2]:
        of_mpi = (case["microseconds"]["mpi"], case["mpi_microseconds"])
        assert of_mpi == (quicker, {MULTIPLE: 8.0, FUNNELED: alone})
    assert "mpi" not in result["cases"][2]["microseconds"]
    result["cases"] = result["cases"][2:]
    add(result, lambda: pytest.fail("a job was started for nothing"))
    assert MULTIPLE not in table([result])


def test_table_without_mpi_and_with_a_path_that_it_does_not_know():
    assert "path between the ranks: other\n" in table([{**figures(), "path": "other"}])
    _, ratios, line = (part.split() for part in table([figures()]).splitlines()[-1].split("|"))
    assert (ratios, line) == (["2.00", "-", "-", "1500.00"], ["-"])
    for block in table([figures()]).split("\n\n"):
        assert len({len(line) for line in block.splitlines() if "|" in line}) <= 1


def test_plot_is_a_picture(tmp_path):
    plot(tmp_path / "figures.png", [figures(2), figures(4)])
    assert (tmp_path / "figures.png").read_bytes().startswith(PNG)


def test_table_of_gpus_shows_what_the_cpu_spends_on_a_call():
    case = {
        "operation": "all_reduce",
        "dtype": "float32",
        "bytes": 1024,
        "line_nanoseconds": None,
        "microseconds": {"ordinary": 6.0, "torch": 9.0, "memcpy": 3.0},
        "cpu_microseconds": {"ordinary": 21.0, "torch": 17.0, "memcpy": 5.0},
        "mpi_microseconds": {},
    }
    result = {**figures(1), "path": "nccl", "mpi": "", "cases": [case]}
    opening, _, _, names, row = (line for line in table([result]).splitlines() if line)
    assert opening == "1 rank, 2 cores; path between the ranks: NCCL"
    assert [part.split() for part in names.split("|")] == [
        ["size", "ordinary", "torch", "memcpy"],
        ["/", "memcpy", "/", "ordinary"],
        ["ordinary", "torch"],
    ]
    assert [part.split() for part in row.split("|")[1:]] == [["2.00", "1.50"], ["21.00", "µs", "17.00", "µs"]]
    case |= {"microseconds": {"ordinary": 6.0, "memcpy": 3.0}, "cpu_microseconds": {"ordinary": 21.0}}
    assert table([result]).splitlines()[-1].split("|")[1].split() == ["2.00", "-"]


# ---- measuring --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "wanted"),
    [
        # rank 0 puts in 0 1 2 0 1 2, rank 1 puts in 1 2 3 1 2 3; of an all-gather, half of that
        ("all_reduce", [1, 3, 5, 1, 3, 5]),
        ("reduce", [1, 3, 5, 1, 3, 5]),
        ("broadcast", [0, 1, 2, 0, 1, 2]),
        ("all_gather", [0, 1, 2, 1, 2, 3]),
        ("reduce_scatter", [1, 3, 5]),
    ],
)
def test_expected_results(operation, wanted):
    case = CollectiveCase(operation, torch.float32, 24, rank=1, ranks=2)
    found = case.expected(torch.arange(case.result_numel)).tolist()
    assert (found, case.source_numel) == (wanted, 3 if operation == "all_gather" else 6)
    smallest = CollectiveCase(operation, torch.float32, 4, rank=0, ranks=4)
    assert min(smallest.source_numel, smallest.result_numel) >= 1


@pytest.mark.parametrize("wrong", [0, 7, 21, 999])
def test_a_wrong_element_is_noticed(wrong):
    case = CollectiveCase("all_reduce", torch.float32, 4000, rank=0, ranks=1)
    source = torch.zeros(1000)
    assert (Variant(case, source, lambda: None, source).is_right(), bool(source.any())) == (True, False)
    assert not Variant(case, source, lambda: source[wrong:].add_(1), source).is_right()


class Telling(Device):
    """A device that would compute later, if it did not compute on the CPU."""

    is_asynchronous = True


@pytest.mark.parametrize("torch_has_nccl", [True, False])
def test_a_device_that_computes_later_is_compared_with_torch_where_torch_can(monkeypatch, torch_has_nccl):
    monkeypatch.setitem(KINDS, "cpu", Telling)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: torch_has_nccl)
    started = []

    def start(world, backend):
        started.append(backend)
        start_torch(world)

    monkeypatch.setattr(benchmark, "start_torch", start)
    flags = ["--blocks=2", "--dtypes=float32", "--sizes=4KiB", "--operations", *OPERATIONS]
    options = make_parser().parse_args(["collectives", *flags])
    (result,) = run_ranks(1, BENCHMARKS["collectives"].figures, options)
    assert started == ["nccl"] * torch_has_nccl
    ways = {"ordinary", "memcpy", *(["torch"] if torch_has_nccl else [])}
    assert [case["operation"] for case in result["cases"]] == list(OPERATIONS)
    for case, kind in itertools.product(result["cases"], ("microseconds", "cpu_microseconds")):
        assert (set(case[kind]), min(case[kind].values()) > 0) == (ways, True)
    assert "NCCL" in table([result])


@pytest.mark.ranks(2)
def test_a_wrong_result_of_one_rank_is_raised_on_all(world):
    case = CollectiveCase("all_reduce", torch.float32, 64, world.rank, world.size)
    source = torch.zeros(16)

    def call() -> None:
        ax.all_reduce(source)
        source[3] += world.rank

    with pytest.raises(RuntimeError, match=r"all_reduce of 64 B .* on 2 ranks: wrong result of spoiled"):
        check_results({"spoiled": Variant(case, source, call, source)})
