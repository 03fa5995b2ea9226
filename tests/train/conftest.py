"""A trainer small enough to run in a test: about two thousand parameters on the source of one library module."""

import argparse
from pathlib import Path

import pytest

from axonmpi.train import Config


@pytest.fixture
def tiny() -> Config:
    return Config().replace(
        data=Path(argparse.__file__),
        layers=1,
        width=16,
        heads=2,
        sequence_length=16,
        global_batch=8,
        steps=20,
        warmup_steps=4,
        evaluate_every=0,
        held_out_sequences=10,
        sample_length=0,
        progress="off",
        plot=False,
    )
