"""Saves on a small disk that is full at random points: all ranks get the error, the checkpoint before is whole."""

import os
import random
import sys
from pathlib import Path

import torch
from jobs.kills.whole import check_whole
from killed_job import LAYERS, WIDTH, fill
from torch import nn

import axonmpi as ax

MEBIBYTE = 1 << 20


def main() -> int:
    world = ax.init_process_group()
    root, number = Path(sys.argv[1]), int(sys.argv[2])
    model = ax.FSDP(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, WIDTH)).sum().backward()
    optimizer.step()
    chance = random.Random(0)
    written = failed = 0
    for step in range(1, number + 1):
        fill(model, optimizer, step)
        if world.rank == 0 and step > 1:
            state = os.statvfs(root)
            free = state.f_bavail * state.f_frsize
            room = chance.randrange(6 * MEBIBYTE)
            with (root / "ballast").open("wb") as ballast:
                ballast.write(bytes(max(0, free - room)))
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
        failed, written = failed + bool(failure), written + (not failure)
        if world.rank == 0:
            assert "No space left" in failure or not failure, failure
            (root / "ballast").unlink(missing_ok=True)
            assert check_whole(root / "it")["step"] == last
            assert os.listdir(root) == ["it"], os.listdir(root)
        ax.barrier()
    if world.rank == 0:
        print(f"{number} saves on {world.size} ranks: {written} were written, {failed} failed for want of space")
        print("on all ranks; the checkpoint before was whole after each, and nothing else was left")
    ax.destroy_process_group()
    return 0 if failed and written else 1


if __name__ == "__main__":
    sys.exit(main())
