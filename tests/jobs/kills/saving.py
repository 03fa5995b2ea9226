"""Jobs that save checkpoints of one value each, and the check of these by the safetensors package, zlib and json.

    saving.py FOLDER                 until it is killed
    saving.py FOLDER NUMBER SEED     so many times on a small disk
    saving.py FOLDER path|folder     until it is killed, beside another job that saves there, too

Some saves go on beside the program, the others do not.
"""

import json
import os
import random
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import axonmpi as ax

LAYERS, WIDTH = 6, 256
MEBIBYTE = 1 << 20


def check_whole(folder: Path) -> dict[str, Any]:
    """Check every block and every tensor; all values are the number of the step. Return the state."""
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    sums = load_file(folder / "checksums.safetensors")
    assert {"model.safetensors", "optimizer.safetensors"} <= sums.keys()
    for name, expected in sums.items():
        data = (folder / name).read_bytes()
        found = [zlib.crc32(data[at : at + MEBIBYTE]) for at in range(0, len(data), MEBIBYTE)]
        assert found == expected.tolist(), f"{folder / name} is damaged"
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: value for name, value in load_file(folder / "optimizer.safetensors").items() if "exp" in name}
    wrong = [name for name, value in tensors.items() if not bool((value == state["step"]).all())]
    assert not wrong, f"{folder}: {wrong} are not those of step {state['step']}"
    return state


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer that has state."""
    model = ax.FSDP(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, WIDTH)).sum().backward()
    optimizer.step()
    return model, optimizer


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, value: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            states = optimizer.state.get(parameter, {})
            for tensor in (parameter, *(state for name, state in states.items() if name != "step")):
                tensor.fill_(value)


def save_until_killed(root: Path) -> None:
    """Go on from the newest checkpoint; check that the job before has left nothing else."""
    model, optimizer = trained()
    folder = ax.CheckpointFolder(root, keep=2)
    info = folder.load_latest(model, optimizer)
    step = info.step if info else 0
    newest = folder.latest()
    if ax.is_main_process() and newest is not None:
        assert check_whole(Path(newest))["step"] == step
        names = [name for name in os.listdir(root) if name != ".latest.axonmpi-lock"]  # of this job
        strays = [name for name in names if name != "latest" and (not name.startswith("step-") or "." in name)]
        assert not strays, names
        assert len(names) <= 4, names  # one more than is kept, until the next save
    os.write(1, f"saving {os.getpid()}\n".encode())  # at once, so that lines of ranks do not mix
    while True:
        step += 1
        fill(model, optimizer, step)
        work = folder.save(model, optimizer, step=step, blocking=step % 2 == 0)
        if work is not None:
            work.wait()


def save_on_full_disk(root: Path, number: int, seed: int) -> None:
    """Leave little room for a save: all ranks get the error, and the checkpoint before is whole."""
    model, optimizer = trained()
    chance = random.Random(seed)
    written = 0
    for step in range(1, number + 1):
        fill(model, optimizer, step)
        if ax.is_main_process() and step > 1:
            state = os.statvfs(root)
            room = chance.randrange(6 * MEBIBYTE)
            (root / "ballast").write_bytes(bytes(max(0, state.f_bavail * state.f_frsize - room)))
        ax.barrier()
        try:
            work = ax.save_checkpoint(root / "it", model, optimizer, step=step, blocking=step % 2 == 0)
            if work is not None:
                work.wait()
            last, failure = step, ""
        except ax.CheckpointError as error:
            failure = str(error)
        failures = ax.all_gather_object(failure)
        assert len(set(failures)) == 1, failures
        written += not failure
        if ax.is_main_process():
            assert "No space left" in failure or not failure, failure
            (root / "ballast").unlink(missing_ok=True)
            assert check_whole(root / "it")["step"] == last
            assert os.listdir(root) == ["it"], os.listdir(root)
        ax.barrier()
    assert 0 < written < number, "too few saves"
    if ax.is_main_process():
        print(f"{number} saves: {written} were written, {number - written} failed for want of space on all ranks;")
        print("the checkpoint before was whole after each, and nothing else was left")


def save_beside_another(root: Path, kind: str) -> None:
    """Save to one path, or to one `CheckpointFolder`, and say what comes of it; refusals name the other job."""
    model, optimizer = trained()
    step, folder = 0, None
    while True:
        step += 1
        fill(model, optimizer, step)
        try:
            if kind == "folder":
                folder = folder or ax.CheckpointFolder(root, keep=2)
                work = folder.save(model, optimizer, step=step, blocking=step % 2 == 0)
            else:
                work = ax.save_checkpoint(root / "it", model, optimizer, step=step, blocking=step % 2 == 0)
            if work is not None:
                work.wait()
            line = "saved"
        except ax.CheckpointError as error:
            line = f"refused: {error}"
        if ax.is_main_process():
            os.write(1, f"{line}\n".encode())


def main() -> None:
    ax.init_process_group()
    folder, *arguments = sys.argv[1:]
    if arguments in (["path"], ["folder"]):
        save_beside_another(Path(folder), *arguments)
    save = save_on_full_disk if arguments else save_until_killed
    save(Path(folder), *map(int, arguments))


if __name__ == "__main__":
    main()
