"""Errors of one rank that all ranks raise, and work of the first rank for all."""

from pathlib import Path

import pytest
from helpers.compare import refused

from axonmpi.checkpoint.rank_errors import RankErrors, first_rank_does
from axonmpi.errors import CheckpointError


@pytest.mark.ranks(1, 2)
def test_errors_of_one_rank_are_raised_on_all(world):
    errors = RankErrors(Path("there"))
    assert errors.raise_on_all(world.default_group, world.rank) == [*range(world.size)]
    if world.rank == world.size - 1:
        for error in (OSError(28, "No space left on device"), CheckpointError("damaged"), KeyError("weight")):
            with errors.recorded():
                raise error
    message = r"(?s)^save: .*there: No space left on device\n  damaged\n  there: KeyError: 'weight'$"
    refused(CheckpointError, (lambda: errors.raise_on_all(world.default_group, None, "save: "), message))


@pytest.mark.ranks(1, 2)
def test_the_first_rank_acts_and_all_get_its_result_or_its_error(world):
    def fail():
        raise PermissionError(1, "Operation not permitted", "file")

    assert first_rank_does(world.default_group, Path("there"), lambda: [world.rank]) == [0]
    mistake = (lambda: first_rank_does(world.default_group, Path("there"), fail), "^file: Operation not permitted$")
    refused(CheckpointError, mistake)
