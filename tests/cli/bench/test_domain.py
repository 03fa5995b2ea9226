"""The benchmark of domains: sizes are checked, wrong gradients are noticed, ratios are of the right figures."""

from argparse import Namespace

import pytest
from torch import nn

from axonmpi.cli.bench import domain
from axonmpi.cli.bench.domain import measure, table

SIZES = {"field": 8, "volume": 8, "image": 16, "channels": 2, "samples": 2, "blocks": 1}


def test_table_shows_the_ratios():
    of_model = {
        "milliseconds": {"compute": 10.0, "axonmpi": 11.0},
        "memory": {"one process": 40 << 20, "compute": 20 << 20, "axonmpi": 22 << 20},
    }
    row = table([{**SIZES, "ranks": 2, "cores": 2, "models": {"vit": of_model}}]).splitlines()[-1]
    assert row.split() == ["vit", "2", "10.0", "11.0", "1.10", "|", "40", "20", "22", "0.55"]


@pytest.mark.ranks(2)
def test_samples_that_cannot_be_dealt_are_named(world):
    with pytest.raises(ValueError, match="samples: expected a multiple of ranks = 2, got 3"):
        measure(world, Namespace(**{**SIZES, "samples": 3}))


@pytest.mark.ranks(2)
def test_wrong_gradients_are_noticed(world, monkeypatch):
    """A model that sees the size of its part gives the parts other gradients than the whole."""

    class OfPart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.layer(x) * getattr(x, "to_local", lambda: x)().shape[2]

    monkeypatch.setattr(domain, "VisionTransformer", OfPart)
    with pytest.raises(RuntimeError, match="axonmpi on 2 ranks: gradients are not those of one process"):
        measure(world, Namespace(**SIZES, models=["vit"]))
