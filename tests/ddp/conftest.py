"""The model of most tests."""

import pytest
from helpers.models import built, mlp, wrapped

import axonmpi as ax


@pytest.fixture
def model(world: ax.World) -> ax.DDP:
    """A small model, wrapped with the usual settings."""
    return wrapped(world, built(mlp))
