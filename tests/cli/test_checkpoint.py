"""`axonmpi checkpoint`: what it prints, its exit codes, and ranks that share the work."""

import json
import os
import sys

import pytest
import torch
from helpers.compare import assert_said
from torch import nn

import axonmpi as ax
from axonmpi.checkpoint.files.checksums import BLOCK_BYTES
from axonmpi.cli import checkpoint, main, output
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


@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        ("inspect checkpoint", 0, ["step 12, epoch 2", "1 rank on 1 node", "extra: ['x']", "2.0 MiB"]),
        ("inspect checkpoint", 0, ["SGD, 2 parameters at lr 0.5"]),
        ("inspect checkpoint --tensors", 0, ["[1024, 512]"]),
        ("verify checkpoint", 0, ["whole: 3 files"]),
        ("verify damaged", 1, ["damaged: damaged\n", "in 'weight'"]),
        ("convert checkpoint weights.pt --only-model", 0, ["weights.pt: 2 tensors of the model\n"]),
        ("convert checkpoint there.pt", 2, ["axonmpi checkpoint convert: error: ", "--overwrite"]),
        ("inspect nothing", 2, ["expected a checkpoint"]),
        ("verify nothing", 2, ["expected a checkpoint"]),
        ("inspect pyproject.toml", 2, ["expected a file named"]),
        ("convert checkpoint there --to zip", 2, ["invalid choice: 'zip'"]),
        ("heal checkpoint", 2, ["'heal'"]),
    ],
)
def test_it_is_told_what_there_is_and_what_cannot_be_done(arguments, code, texts, folder, capsys):
    for name in ("there.pt", "pyproject.toml"):
        (folder / name).write_text("")
    ended, out, err = run(capsys, *arguments.split())
    told, untold = (err, out) if code == 2 else (out, err)
    assert (ended, untold) == (code, "")
    assert_said(told, *texts)


def odd_files(folder):
    """Make files that are none, and files with anything in them."""
    for name in ("model.safetensors", "state.json"):
        (folder / f"pipe-{name}").mkdir()
        os.mkfifo(folder / f"pipe-{name}" / name)
    torch.save({"a\x1b[31m": torch.zeros(1).expand(4)}, folder / "odd.pt")
    torch.save({"a\x1b[31m": torch.zeros(4, device="meta")}, folder / "meta.pt")
    for number, groups in enumerate((None, [3], [{}], [{"params": 3}])):
        optimizer = {"state": {}, "param_groups": groups}
        torch.save({"model": {"a": torch.ones(2)}, "optimizer": optimizer}, folder / f"groups{number}.pt")


@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        ("inspect /", 2, ["error: /: expected a folder with"]),
        ("inspect pipe-model.safetensors", 2, ["got a named pipe"]),
        ("verify pipe-model.safetensors", 1, ["got a named pipe"]),
        ("inspect pipe-state.json", 2, ["got a named pipe"]),
        ("verify pipe-state.json", 1, ["got a named pipe"]),
        ("inspect odd.pt --tensors", 0, [r"a\x1b[31m"]),
        ("convert odd.pt odd", 0, ["1 tensor of the model"]),
        ("convert meta.pt meta", 2, [r"'a\x1b[31m' is on the meta device"]),
        *(
            (f"convert groups{number}.pt new", 2, ["a list of dicts, each with a list of 'params'"])
            for number in range(4)
        ),
    ],
)
def test_any_file_ends_with_a_line(arguments, code, texts, folder, capsys):
    odd_files(folder)
    ended, out, err = run(capsys, *arguments.split())
    assert (ended, "\x1b" in out + err) == (code, False)
    assert_said(err if code == 2 else out, *texts)


def test_there_is_no_more_than_is_asked_for(folder, capsys):
    assert "[1024, 512]" not in run(capsys, "inspect", "checkpoint")[1]
    assert "random" not in run(capsys, "verify", "damaged")[1]
    run(capsys, "convert", "checkpoint", "weights.pt", "--only-model")
    assert list(torch.load("weights.pt", weights_only=True)) == ["bias", "weight"]


def test_the_same_as_json(folder, capsys):
    described = json.loads(run(capsys, "inspect", "checkpoint", "--json")[1])
    assert [each["shape"] for each in described["tensors"] if each["kind"] == "model"] == [[1024], [1024, 512]]
    result = json.loads(run(capsys, "verify", "damaged", "--json")[1])
    assert (result["whole"], result["checksums"], result["damages"][0]["tensors"]) == (False, True, ["weight"])


def test_ranks_verify_together(folder, capsys, monkeypatch):
    started = {"launched_ranks": lambda: 2, "init_process_group": ax.get_world, "destroy_process_group": ax.barrier}
    for name, value in started.items():
        monkeypatch.setattr(checkpoint, name, value)
    monkeypatch.setattr(output, "is_first_launched", ax.is_main_process)
    assert run_ranks(2, lambda world: main(["checkpoint", "verify", "damaged"])) == [1, 1]
    assert_said(capsys.readouterr().out, "damaged\n", "in 'weight'", times=1)


def test_progress_is_shown_on_a_terminal_only(folder, capsys, monkeypatch):
    monkeypatch.setattr(checkpoint, "terminal_width", lambda stream: 80 if stream is sys.stderr else None)
    code, _, err = run(capsys, "verify", "checkpoint")
    assert (code, "verifying" in err) == (0, True)
