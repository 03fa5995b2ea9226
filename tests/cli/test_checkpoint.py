"""`axonmpi checkpoint`: what it prints, its exit codes, and ranks that share the work."""

import json
import sys

import pytest
import torch
from torch import nn

import axonmpi as ax
from axonmpi import cli
from axonmpi.checkpoint.files.checksums import BLOCK_BYTES
from axonmpi.cli import checkpoint, main
from axonmpi.testing import run_ranks


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with `checkpoint`, and with `damaged`, the same with a wrong byte."""
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(512, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for name in ("checkpoint", "damaged"):
        ax.save_checkpoint(name, model, optimizer, step=12, epoch=2, extra=["x"], group=ax.ProcessGroup.mock())
    with open("damaged/model.safetensors", "r+b") as file:
        file.seek(BLOCK_BYTES)
        file.write(b"\xff")
    return tmp_path


def run(capsys, *arguments):
    """Return the exit code of `axonmpi checkpoint`, and what it prints."""
    try:
        code = main(["checkpoint", *arguments])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_inspect(folder, capsys):
    code, out, err = run(capsys, "inspect", "checkpoint")
    assert (code, err) == (0, "")
    for text in ("step 12, epoch 2", "1 rank on 1 node", "SGD, 2 parameters at lr 0.5", "extra: ['x']", "2.0 MiB"):
        assert text in out
    assert "[1024, 512]" not in out
    assert "[1024, 512]" in run(capsys, "inspect", "checkpoint", "--tensors")[1]
    described = json.loads(run(capsys, "inspect", "checkpoint", "--json")[1])
    assert [each["shape"] for each in described["tensors"] if each["kind"] == "model"] == [[1024], [1024, 512]]


def test_verify(folder, capsys):
    code, out, err = run(capsys, "verify", "checkpoint")
    assert (code, err) == (0, "")
    assert "whole: 3 files" in out
    code, out, _ = run(capsys, "verify", "damaged")
    assert code == 1
    assert "in 'weight'" in out
    assert "random" not in out
    result = json.loads(run(capsys, "verify", "damaged", "--json")[1])
    assert (result["whole"], result["checksums"], result["damages"][0]["tensors"]) == (False, True, ["weight"])


def test_ranks_verify_together(folder, capsys, monkeypatch):
    started = {"launched_ranks": lambda: 2, "init_process_group": ax.get_world, "destroy_process_group": ax.barrier}
    for name, value in started.items():
        monkeypatch.setattr(checkpoint, name, value)
    monkeypatch.setattr(cli, "is_first_launched", ax.is_main_process)
    assert run_ranks(2, lambda world: main(["checkpoint", "verify", "damaged"])) == [1, 1]
    out = capsys.readouterr().out
    assert out.count("damaged\n") == 1
    assert "in 'weight'" in out


def test_convert(folder, capsys):
    code, out, err = run(capsys, "convert", "checkpoint", "weights.pt", "--only-model")
    assert (code, out, err) == (0, "weights.pt: 2 tensors of the model\n", "")
    assert list(torch.load("weights.pt", weights_only=True)) == ["bias", "weight"]
    code, out, err = run(capsys, "convert", "checkpoint", "weights.pt")
    assert (code, out) == (2, "")
    assert err.startswith("axonmpi checkpoint convert: error: ")
    assert "--overwrite" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("inspect nothing", "expected a checkpoint"),
        ("verify nothing", "expected a checkpoint"),
        ("inspect pyproject.toml", "expected a file named"),
        ("convert checkpoint there --to zip", "invalid choice: 'zip'"),
        ("heal checkpoint", "'heal'"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(arguments, message, folder, capsys):
    (folder / "pyproject.toml").write_text("")
    code, _, err = run(capsys, *arguments.split())
    assert code == 2
    assert message in err


def test_progress_is_shown_on_a_terminal_only(folder, capsys, monkeypatch):
    monkeypatch.setattr(checkpoint, "terminal_width", lambda stream: 80 if stream is sys.stderr else None)
    code, _, err = run(capsys, "verify", "checkpoint")
    assert code == 0
    assert "verifying" in err
