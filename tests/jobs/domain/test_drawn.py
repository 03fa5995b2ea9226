"""Some of the settings of `tests/jobs/run domain`."""

from collections import Counter

import pytest
import torch
from jobs.domain.command import LAYOUTS, outcome

import axonmpi as ax


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.filterwarnings("ignore")
def test_drawn_settings_equal_one_process_or_are_refused(world: ax.World, seed: int) -> None:
    kinds: Counter[str] = Counter()
    for layout in LAYOUTS:
        if torch.Size(layout.values()).numel() != world.size:
            continue
        mesh = ax.DeviceMesh(layout, world)
        for number in range(20):
            kind, why = outcome(mesh, seed * 10**6 + number)
            assert kind != "differs", why
            kinds[kind] += 1
    assert kinds["equal"] > 0.6 * kinds.total()
