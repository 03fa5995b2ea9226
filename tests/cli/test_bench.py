"""The benchmarks run, and their figures hang together; how large the figures are is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from axonmpi.cli.bench import main


def run(folder: Path, *arguments: str) -> tuple[str, list[dict]]:
    target = folder / "figures.json"
    job = subprocess.run(
        [sys.executable, "-m", "axonmpi", "bench", *arguments, "--blocks", "1", "--json", str(target)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    return job.stdout, json.loads(target.read_text())


def test_overhead(tmp_path):
    text, figures = run(tmp_path, "overhead", "--ranks", "1", "2")
    assert [entry["ranks"] for entry in figures] == [1, 2]
    for entry in figures:
        times = entry["microseconds"]
        assert entry["added"] == pytest.approx(times["axonmpi"] - times["mpi4py"])
        assert min(times.values()) > 0
        assert f"{times['axonmpi']:9.2f}" in text


def test_ddp(tmp_path):
    text, (entry,) = run(tmp_path, "ddp", "--ranks", "2")
    assert entry["ranks"] == 2
    assert entry["parameters"] == 12_590_080
    times = entry["milliseconds"]
    for name, overhead in entry["overhead"].items():
        assert overhead == pytest.approx(times[name] - times["local"])
    assert f"{times['torch on gloo']:9.1f}" in text


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["ddp", "--ranks", "0"], ["ddp", "--blocks", "few"], ["ddp", "-x"]]
)
def test_wrong_arguments_are_named(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert arguments[-1] in capsys.readouterr().err
