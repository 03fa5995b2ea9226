"""The course of the learning rate."""

import pytest

from axonmpi.train import OptimizerConfig
from axonmpi.train.optimizer import learning_rate

CONFIG = OptimizerConfig(lr=2.0, lr_final=0.25, warmup_steps=4)


def test_a_straight_rise_then_half_a_cosine():
    rates = [learning_rate(step, 12, CONFIG) for step in range(12)]
    assert (rates[:4], rates[3:]) == ([0.5, 1.0, 1.5, 2.0], sorted(rates[3:], reverse=True))
    assert (rates[7], rates[-1]) == pytest.approx(((2.0 + 0.5) / 2, 2.0 * 0.25))  # half way down, and the end


def test_a_run_shorter_than_its_warm_up_only_rises():
    assert [learning_rate(step, 3, CONFIG) for step in range(3)] == [0.5, 1.0, 1.5]


def test_without_warm_up_or_a_final_rate():
    no_warm_up = OptimizerConfig(lr=2.0, warmup_steps=0)
    assert [learning_rate(0, steps, no_warm_up) for steps in (1000, 1)] == pytest.approx([2.0, 0.2], rel=1e-4)
    rates = [learning_rate(step, 10, OptimizerConfig(lr=1.0, lr_final=0.0, warmup_steps=2)) for step in range(10)]
    assert min(rates[:-1]) > 0
    assert rates[-1] == pytest.approx(0, abs=1e-15)
