"""Flags and groups of every public call: what is none is refused by name, and nothing is sent."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.public_calls import Arguments, PublicCall, public_calls

import axonmpi as ax

CALLS = public_calls()
WITH_FLAGS = [call for call in CALLS if call.flags]
WITH_GROUP = [call for call in CALLS if call.group]
BLOCKING = ("send", "recv")
SIMPLE = re.compile(r"(int|float|bool|str|ReduceOp \| str)( \| None)?")

pytestmark = pytest.mark.ranks(2)


def belongs_to(call: PublicCall, world: ax.World) -> bool:
    """Whether the world's backend is of the class that the call is a method of."""
    backend = type(world.default_group.backend).__name__
    return call.name.partition(".")[0] not in {"MockBackend", "MpiBackend", "NcclBackend"} - {backend}


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4)
def test_flags(world: ax.World, tmp_path: Path) -> None:
    names = {call.name for call in WITH_FLAGS}
    assert {"DDP", "FSDP", "all_reduce", "ColumnParallelLinear", "DistributedSampler", "tensor.enter"} <= names
    assert len(names) > 70  # so that one without arguments in the table fails below
    arguments = Arguments(world, tmp_path)
    for call in filter(lambda call: belongs_to(call, world), WITH_FLAGS):
        for flag in call.flags:
            wrong = [1, "True", np.True_, torch.tensor(True)]
            wrong += [] if "ProcessGroup" in flag.annotation else [arguments.group]
            for value in wrong:
                with pytest.raises(TypeError, match=f"{flag.name}: expected") as caught:
                    arguments.call(call, **{flag.name: value})
                assert value is not arguments.group or "as group=" in str(caught.value), call.name
    arguments.finish()


def test_a_group_has_one_name_and_one_place(world: ax.World, tmp_path: Path) -> None:
    assert {"Pipeline.from_modules", "testing.parallel_assert"} <= {call.name for call in WITH_GROUP}
    arguments = Arguments(world, tmp_path)
    for call in WITH_GROUP:
        if call.name not in BLOCKING:
            arguments.call(call, **{call.group: arguments.group})
        other = "group" if call.group == "process_group" else "process_group"
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{other}'"):
            arguments.call(call, **{other: arguments.group})
        for thing in (world, "world", 0, True, torch.ones(2), world.default_group.backend):
            with pytest.raises(TypeError, match=r"group: expected an axonmpi.ProcessGroup or None, got"):
                arguments.call(call, **{call.group: thing})
        for parameter in call.parameters:
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and SIMPLE.fullmatch(parameter.annotation):
                with pytest.raises(
                    (TypeError, ValueError), match=f"{parameter.name}: expected .*; name the group, as group="
                ):
                    arguments.call(call, **{parameter.name: arguments.group})
    arguments.finish()
