"""The benchmarks run, and their figures hang together; how large the figures are is not tested."""

import io
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.compare import assert_said
from helpers.limits import limit

from axonmpi import cli
from axonmpi.cli.bench import domain, main, pipeline, tensor
from axonmpi.cli.bench.collectives import between_nodes as network
from axonmpi.cli.bench.collectives.cases import OPERATIONS
from axonmpi.cli.bench.collectives.comparison import VARIANTS
from axonmpi.cli.bench.command import BENCHMARKS, make_parser
from axonmpi.testing import LaunchResult, launch

MULTIPLE, FUNNELED = "MPI_THREAD_MULTIPLE", "MPI_THREAD_FUNNELED"
STOCK = ("torch on gloo", "torch on axonmpi")
WIDTHS = (32, 64, 64, 32)  # of the model in data parallelism
IN_ONE_JOB = {
    "overhead": "",
    "checkpoint": "--mebibytes 2 --folder .",
    "ddp": "",
    "collectives": f"--sizes 4B 12KiB --operations {' '.join(OPERATIONS)}",
    "network": "--sizes 4B 12KiB --seconds 0.001",
    "pipeline": "--layers 2 --width 32 --length 4 --micro-batches 4",
    "tensor": "--width 32 --heads 4 --lengths 4 8",
    "domain": "--field 24 --volume 8 --image 16 --channels 2 --samples 2",
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[LaunchResult, Path]:
    """Run benchmarks one after the other on two ranks, each for one block; figures are in files by their names."""
    folder = tmp_path_factory.mktemp("figures")
    program = f"""
        from axonmpi.cli import main
        from axonmpi.cli.bench import data_parallel
        from axonmpi.cli.bench.checkpoint import planning
        data_parallel._WIDTHS = {WIDTHS}
        planning._TURNS = 1
        for name, flags in {IN_ONE_JOB}.items():
            assert main(["bench", name, *flags.split(), "--blocks", "1", "--json", name + ".json"]) == 0
    """
    result = launch(
        2, program, cwd=folder, timeout=limit(120), env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    )
    assert result.returncode == 0, result.stderr
    return result, folder


@pytest.fixture
def printed(job: tuple[LaunchResult, Path]) -> str:
    return job[0].stdout


@pytest.fixture
def figures(job: tuple[LaunchResult, Path], request: pytest.FixtureRequest) -> dict:
    """Figures of the benchmark that the test is named after."""
    (entry,) = json.loads((job[1] / f"{request.node.name.removeprefix('test_')}.json").read_text())
    assert entry["ranks"] == 2
    return entry


def test_overhead(figures, printed):
    times = figures["microseconds"]
    differences = [times["axonmpi"] - times["mpi4py"], times["noting"] - times["not noting"]]
    assert [figures["added"], figures["notes"]] == pytest.approx(differences)
    assert min(times.values()) > 0
    assert f"  {times['axonmpi']:.2f}  " in printed


def test_checkpoint(figures, printed):
    assert figures["bytes"] == pytest.approx(2 * 2**20, rel=0.2)
    beside = figures["asynchronous"]
    assert {name: set(figures[name]) for name in ("save", "load", "memory", "asynchronous")} == {
        "save": {"axonmpi", "plain", "dcp", "hugging face"},
        "load": {"axonmpi", "plain", "dcp"},
        "memory": {"axonmpi", "dcp", "hugging face"},
        "asynchronous": {"copy", "call", "wait", "stall", "later", "at once"},
    }
    assert beside["stall"] <= beside["call"] + beside["wait"] + 1e-9  # each the slowest rank's
    planned = [seconds for turns in figures["planning"].values() for seconds in (turns["first"], turns["again"])]
    copied = [beside["copy"], beside["call"]]  # what follows has the time of a step taken off, and may be less
    assert min(*figures["save"].values(), *figures["load"].values(), *copied, *planned) > 0
    assert BENCHMARKS["checkpoint"].table([figures]) in printed
    assert not [path for path in Path(figures["folder"]).iterdir() if path.is_dir()]


def test_ddp(figures, printed):
    assert figures["parameters"] == sum(before * after + after for before, after in pairwise(WIDTHS))
    times = figures["milliseconds"]
    for name, overhead in figures["overhead"].items():
        assert overhead == pytest.approx(times[name] - times["local"])
    assert f"  {times['torch on axonmpi']:.1f}  |" in printed


def test_collectives(figures, printed):
    """One job measures MPI at the level that axonmpi needs."""
    assert_said(printed, figures["path"], f"{figures['mpi']}: at {MULTIPLE}\n")
    asked = [(name, dtype, size) for name in OPERATIONS for dtype in ("float32", "bfloat16") for size in (4, 12288)]
    assert [(case["operation"], case["dtype"], case["bytes"]) for case in figures["cases"]] == asked
    for case in figures["cases"]:
        by_mpi = case["dtype"] == "float32"
        names = set(VARIANTS) if by_mpi else set(VARIANTS) - {"mpi"}
        assert (set(case["microseconds"]), list(case["mpi_microseconds"])) == (names, [MULTIPLE] * by_mpi)
        assert min(case["microseconds"].values()) > 0
        assert 0.01 < case["line_nanoseconds"] < limit(1e4)
        assert f"{case['operation']}, {case['dtype']}, 2 ranks" in printed


def test_network(figures, printed):
    assert figures["nodes"] == 1
    asked = [(name, size) for name in network.OPERATIONS for size in (4, 12288)]
    assert [(case["operation"], case["bytes"]) for case in figures["cases"]] == asked
    for case in figures["cases"]:
        times, ratios = case["microseconds"], case["ratios"]
        assert min(times.values()) > 0
        ours = min(times[name] for name in ("symmetric", "ordinary") if name in times)
        assert [ratios["mpi"], ratios["gloo"]] == pytest.approx([ours / times["mpi"], ours / times["gloo"]])
        assert ("bfloat16" in ratios) == ("symmetric" in times) == (case["operation"] == "all_reduce")
        assert f"  {ratios['mpi']:.2f}  " in printed
    assert "all_reduce, float32, 2 ranks on 1 node" in printed


def test_pipeline(figures, printed):
    assert (figures["microbatches"], list(figures["schedules"])) == (4, list(pipeline.CASES))
    for name, of_schedule in figures["schedules"].items():
        assert min(of_schedule[who] for who in ("compute", "ideal", "axonmpi", *STOCK)) > 0
        assert 0 < of_schedule["bubble"] < 1
        splits, costs = name.startswith("zero-bubble"), of_schedule["costs"]
        positive = [{time > 0 for time in costs[kind]} for kind in ("forward", "backward_weight", "backward")]
        assert positive == [{True}, {splits}, {not splits}]
    assert [figures["schedules"][name]["peak_activations"] for name in ("gpipe", "1f1b")] == [[4, 4], [2, 1]]
    assert pipeline.table([figures]) in printed


def test_tensor(figures, printed):
    assert (figures["width"], list(figures["blocks"])) == (32, list(tensor.BLOCKS))
    for of_block in figures["blocks"].values():
        assert list(of_block) == ["4", "8"]
        for times in of_block.values():
            assert list(times) == ["compute", "collectives", "axonmpi", *STOCK]
            assert min(times.values()) > 0
    assert tensor.table([figures]) in printed


def test_domain(figures, printed):
    assert (figures["field"], list(figures["models"])) == (24, ["unet2d", "unet3d", "vit"])
    for of_model in figures["models"].values():
        assert list(of_model["milliseconds"]) == ["compute", "axonmpi"]
        assert list(of_model["memory"]) == ["compute", "one process", "axonmpi"]
        assert min(*of_model["milliseconds"].values(), *of_model["memory"].values()) > 0
    assert domain.table([figures]) in printed


def test_the_command_measures_mpi_in_a_job_of_its_own_and_takes_the_quicker(tmp_path, monkeypatch):
    """Printed to an output of few letters, which loses no figures."""
    command = "axonmpi bench collectives --ranks 1 --blocks 1 --sizes 4B --json f.json --plot f.png"
    output = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.chdir(tmp_path)
    for name, value in {"argv": command.split(), "stdout": output, "excepthook": sys.excepthook}.items():
        monkeypatch.setattr(sys, name, value)
    assert cli.main() == 0
    output.seek(0)
    text = output.read()
    (result,) = json.loads(Path("f.json").read_text())
    jobs = f"{result['mpi']}: the quicker of {MULTIPLE} and {FUNNELED}, each in its own job\n"
    assert_said(text, result["path"], "?s", jobs)  # ?s: the sign of a microsecond
    case, without_mpi = result["cases"]
    assert (result["ranks"], list(case["mpi_microseconds"])) == (1, [MULTIPLE, FUNNELED])
    assert case["microseconds"]["mpi"] == min(case["mpi_microseconds"].values()) > 0
    assert "mpi" not in without_mpi["microseconds"]
    assert Path("f.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("pipeline", {"layers": 4, "width": 192, "length": 64, "samples": 1, "microbatches": 8}),
        ("pipeline --layers 2 --samples 3 --micro-batches 6", {"layers": 2, "samples": 3, "microbatches": 6}),
        ("tensor", {"width": 1024, "heads": 16, "sequences": 1, "lengths": [16, 64, 256]}),
        ("tensor --heads 8 --lengths 2 3", {"heads": 8, "lengths": [2, 3]}),
        ("collectives --sizes 4B 1KiB", {"operations": ["all_reduce"], "sizes": [4, 1024], "device": "cpu"}),
        ("network --no-gloo", {"torch": False, "seconds": 0.02}),
        ("overhead", {"torch": False, "blocks": 15}),
        ("fsdp", {"torch": True, "batch": 64}),
        ("domain", {"torch": False, "models": ["unet2d", "unet3d", "vit"], "volume": 96}),
    ],
)
def test_options_have_defaults_and_are_read(arguments, values):
    options = vars(make_parser().parse_args(arguments.split()))
    assert {name: options[name] for name in values} == values


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("nothing", "nothing"),
        ("ddp --ranks 0", "expected a positive number, got '0'"),
        ("ddp --blocks few", "few"),
        ("ddp -x", "-x"),
        ("overhead --plot figures.png", "--plot"),  # of another benchmark
        ("collectives --operations gather", "'gather'"),
        ("collectives --dtypes float64", "'float64'"),
        ("collectives --sizes 64KB", "expected a size such as 4B, 64KiB or 16MiB, got '64KB'"),
        ("collectives --sizes 0B", "got '0B'"),
        ("collectives --sizes 6B", "expected a multiple of 4 bytes, got '6B'"),
        ("collectives --sizes", "expected at least one argument"),
        ("collectives --plot figures.pdf", "ends in .png, got 'figures.pdf'"),
        ("collectives --plot no/such/folder.png", "in a folder that exists, got 'no/such/folder.png'"),
        ("collectives --json no/such/folder", "in a folder that exists, got 'no/such/folder'"),
        ("network --operations reduce", "'reduce'"),
        ("network --sizes 6B", "expected a multiple of 4 bytes, got '6B'"),
        ("network --seconds few", "few"),
        ("pipeline --schedules dualpipe", "dualpipe"),
        ("pipeline --layers few", "few"),
        ("pipeline --samples 0", "--samples: expected a positive number, got '0'"),
        ("pipeline --chunks", "--chunks"),
        ("checkpoint --mebibytes 0", "expected a positive number, got '0'"),
        ("checkpoint --folder no/such/folder", "expected a folder that exists, got 'no/such/folder'"),
        ("tensor --width wide", "wide"),
        ("tensor --lengths", "--lengths"),
        ("tensor --lengths 4 -1", "--lengths: expected a positive number, got '-1'"),
        ("tensor --depth", "--depth"),
        ("domain --models resnet", "'resnet'"),
    ],
)
def test_wrong_arguments_are_named(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert (caught.value.code, complaint in capsys.readouterr().err) == (2, True)


def test_memory_is_shown_in_mib():
    from axonmpi.cli.bench.data_parallel import fsdp_table

    names = ("torch on gloo", "ddp", "fsdp")
    result = {
        "ranks": 2,
        "parameters": 3_000_000,
        "batch": 4,
        "milliseconds": dict.fromkeys(names, 2.0),
        "memory": {name: number << 20 for name, number in zip(names, (30, 20, 11), strict=True)},
        "theory": {"ddp": 17 << 20, "fsdp": 13 << 20},
    }
    assert [row.split() for row in fsdp_table([result]).splitlines()][-2] == [
        "2",
        "30",
        "20",
        "11",
        "|",
        "17",
        "13",
    ]
