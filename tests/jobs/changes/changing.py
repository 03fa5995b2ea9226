"""Random changes of the files of a checkpoint, each of which has to be an error that names the file."""

import json
import os
import random
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import axonmpi as ax

STATE = "state.json"


class Changes:
    """Two checkpoints of one model, of which one is changed again and again.

    Args:
        root: A folder for them.
        chance: Draws the changes.
    """

    def __init__(self, root: Path, chance: random.Random) -> None:
        self._root = root
        self._chance = chance
        self._group = ax.ProcessGroup.mock()
        self._objects = self._made()
        model, optimizer, schedule = self._objects
        for step in (1000, 2000):
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            schedule.step()
            ax.save_checkpoint(
                root / str(step), model, optimizer, step=step, scheduler=schedule, extra={"seen": (1, 0.5)},
                max_file_size=600_000, group=self._group,
            )  # fmt: skip
        self.names = sorted(os.listdir(root / "1000"))

    def _made(self) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 300))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def check(self, name: str) -> None:
        """Change a file, and load."""
        folder = self._root / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._root / "1000", folder)
        way = self._change(folder / name)
        print(f"{name}: {way}")  # pytest shows it after a failure
        model, optimizer, schedule = self._objects
        states = [each.state_dict() for each in self._objects]
        before = deepcopy(states), torch.get_rng_state(), self._content(folder)
        with pytest.raises(ax.CheckpointError) as error:
            ax.load_checkpoint(folder, model, optimizer, scheduler=schedule, group=self._group)
        assert name in str(error.value), f"{name}: {way}: {error.value}"
        after = [each.state_dict() for each in self._objects], torch.get_rng_state(), self._content(folder)
        torch.testing.assert_close(after[:2], before[:2], rtol=0, atol=0)
        assert after[2] == before[2], f"{name}: {way}: the folder was changed"

    def _content(self, folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    def _change(self, path: Path) -> str:
        data = path.read_bytes()
        ways = [self._flip, self._delete, self._exchange_bytes, self._cut, self._of_other_step, self._missing]
        if path.suffix == ".json":
            ways += [self._value] * 3
        while True:
            way = self._chance.choice(ways)
            told = way(path, data)
            if not path.exists() or path.read_bytes() != data:
                return told

    def _flip(self, path: Path, data: bytes) -> str:
        at, bit = self._chance.randrange(len(data)), self._chance.randrange(8)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        return f"bit {bit} of byte {at}"

    def _delete(self, path: Path, data: bytes) -> str:
        at = self._chance.randrange(len(data))
        count = self._chance.randint(1, 40)
        path.write_bytes(data[:at] + data[at + count :])
        return f"{count} bytes deleted at {at}"

    def _exchange_bytes(self, path: Path, data: bytes) -> str:
        one, two = sorted(self._chance.sample(range(len(data)), 2))
        middle = data[one + 1 : two]
        path.write_bytes(data[:one] + data[two : two + 1] + middle + data[one : one + 1] + data[two + 1 :])
        return f"bytes {one} and {two} exchanged"

    def _cut(self, path: Path, data: bytes) -> str:
        size = self._chance.choice([0, self._chance.randrange(len(data))])
        os.truncate(path, size)
        return f"cut off at {size}"

    def _of_other_step(self, path: Path, data: bytes) -> str:
        path.write_bytes((self._root / "2000" / path.name).read_bytes())
        return "that of another step"

    def _missing(self, path: Path, data: bytes) -> str:
        path.unlink()
        return "missing"

    def _value(self, path: Path, data: bytes) -> str:
        """Replace, remove or add a value somewhere, as JSON that is right."""
        document = json.loads(data)
        at: Any = document
        while True:
            key = self._chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not isinstance(at[key], dict | list) or not at[key] or self._chance.random() < 0.3:
                break
            at = at[key]
        value = self._chance.choice(
            [None, True, -1, 7, 1e300, float("nan"), "x", [], {}, 1 << 70, 0.5, "remove", "add"]
        )
        if value == "remove":
            del at[key]
        elif value == "add" and isinstance(at, dict):
            at["added"] = 1
        else:
            at[key] = value
        path.write_text(json.dumps(document, indent=2) + "\n")
        return f"{key!r} is {value!r}"
