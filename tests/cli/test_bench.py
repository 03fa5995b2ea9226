"""The benchmarks run, and their figures hang together; how large the figures are is not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from axonmpi.cli.bench import main
from axonmpi.cli.bench.collectives_cases import OPERATIONS
from axonmpi.cli.bench.collectives_table import VARIANTS
from axonmpi.cli.bench.pipeline import CASES
from axonmpi.cli.bench.pipeline import table as pipeline_table
from axonmpi.cli.bench.tensor import BLOCKS
from axonmpi.cli.bench.tensor import table as tensor_table
from axonmpi.testing import LaunchResult, launch

MULTIPLE, FUNNELED = "MPI_THREAD_MULTIPLE", "MPI_THREAD_FUNNELED"
IN_ONE_JOB = {
    "overhead": "",
    "ddp": "",
    "collectives": "--sizes 4B",
    "pipeline": "--layers 2 --width 32 --length 4 --micro-batches 4",
    "tensor": "--width 32 --heads 4 --lengths 4 8",
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[LaunchResult, Path]:
    """Run benchmarks one after the other on two ranks, each for one block; figures are in files by their names."""
    folder = tmp_path_factory.mktemp("figures")
    program = f"""
        from axonmpi.cli import main
        for name, flags in {IN_ONE_JOB}.items():
            assert main(["bench", name, *flags.split(), "--blocks", "1", "--json", name + ".json"]) == 0
    """
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    result = launch(2, program, cwd=folder, timeout=200, env=env)
    assert result.returncode == 0, result.stderr
    return result, folder


@pytest.fixture
def printed(job: tuple[LaunchResult, Path]) -> str:
    return job[0].stdout


@pytest.fixture
def figures(job: tuple[LaunchResult, Path], request: pytest.FixtureRequest) -> dict:
    """Figures of the benchmark that the test is named after."""
    name = request.node.name.removeprefix("test_")
    (entry,) = json.loads((job[1] / f"{name}.json").read_text())
    assert entry["ranks"] == 2
    return entry


def test_overhead(figures, printed):
    times = figures["microseconds"]
    assert figures["added"] == pytest.approx(times["axonmpi"] - times["mpi4py"])
    assert min(times.values()) > 0
    assert f"{times['axonmpi']:9.2f}" in printed


def test_ddp(figures, printed):
    assert figures["parameters"] == 12_590_080
    times = figures["milliseconds"]
    for name, overhead in figures["overhead"].items():
        assert overhead == pytest.approx(times[name] - times["local"])
    assert f"{times['torch on gloo']:9.1f}" in printed


def test_collectives(figures, printed):
    """One job measures MPI at the level that axonmpi needs."""
    wanted = {"float32": [MULTIPLE], "bfloat16": []}
    assert {case["dtype"]: list(case["mpi_microseconds"]) for case in figures["cases"]} == wanted
    assert f"{figures['mpi']}: at {MULTIPLE}\n" in printed


def test_pipeline(figures, printed):
    assert figures["microbatches"] == 4
    assert list(figures["schedules"]) == list(CASES)
    for name, of_schedule in figures["schedules"].items():
        assert min(of_schedule[who] for who in ("compute", "ideal", "axonmpi", "torch")) > 0
        assert 0 < of_schedule["bubble"] < 1
        splits = name.startswith("zero-bubble")
        assert all(time > 0 for time in of_schedule["costs"]["forward"])
        assert all((time > 0) == splits for time in of_schedule["costs"]["backward_weight"])
        assert all((time > 0) != splits for time in of_schedule["costs"]["backward"])
    held = {name: of_schedule["peak_activations"] for name, of_schedule in figures["schedules"].items()}
    assert held["gpipe"] == [4, 4]
    assert held["1f1b"] == [2, 1]
    assert pipeline_table([figures]) in printed


def test_tensor(figures, printed):
    assert figures["width"] == 32
    assert list(figures["blocks"]) == list(BLOCKS)
    for of_block in figures["blocks"].values():
        assert list(of_block) == ["4", "8"]
        for times in of_block.values():
            assert list(times) == ["compute", "plain", "collectives", "axonmpi", "torch"]
            assert min(times.values()) > 0
    assert tensor_table([figures]) in printed


def test_all_collectives_in_jobs_of_the_command(tmp_path):
    """A job for each thread level of MPI; printed by a process whose output has few letters."""
    command = (
        "axonmpi bench collectives --ranks 2 --blocks 1 --sizes 4B 12KiB --json f.json --plot f.png --operations"
    )
    run = subprocess.run(
        [sys.executable, "-m", *command.split(), *OPERATIONS],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    (result,) = json.loads((tmp_path / "f.json").read_text())
    assert result["ranks"] == 2
    assert result["mpi"] in run.stdout
    assert result["path"] in run.stdout
    assert "?s" in run.stdout  # the sign of a microsecond
    assert f"{result['mpi']}: the quicker of {MULTIPLE} and {FUNNELED}, each in its own job\n" in run.stdout
    asked = [(name, dtype, size) for name in OPERATIONS for dtype in ("float32", "bfloat16") for size in (4, 12288)]
    assert [(case["operation"], case["dtype"], case["bytes"]) for case in result["cases"]] == asked
    for case in result["cases"]:
        expected = VARIANTS if case["dtype"] == "float32" else [name for name in VARIANTS if name != "mpi"]
        assert sorted(case["microseconds"]) == sorted(expected)
        assert min(case["microseconds"].values()) > 0
        assert list(case["mpi_microseconds"]) == ([MULTIPLE, FUNNELED] if "mpi" in case["microseconds"] else [])
        if case["mpi_microseconds"]:
            assert case["microseconds"]["mpi"] == min(case["mpi_microseconds"].values()) > 0
        assert 0.01 < case["line_nanoseconds"] < 1e4
        assert f"{case['operation']}, {case['dtype']}, 2 ranks" in run.stdout
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


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
        ("pipeline --schedules dualpipe", "dualpipe"),
        ("pipeline --layers few", "few"),
        ("pipeline --chunks", "--chunks"),
        ("tensor --width wide", "wide"),
        ("tensor --lengths", "--lengths"),
        ("tensor --depth", "--depth"),
    ],
)
def test_wrong_arguments_are_named(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err
