"""FSDP where the model computes on another device than the CPU: which memory it takes, and who waits for copies."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import Blocks, built, equals_alone, own_data, train
from helpers.steps import adamw, usual_step
from torch import nn

import axonmpi as ax
from axonmpi import CPUOffload, ShardingStrategy
from axonmpi.fsdp.offload import PinnedMemory
from axonmpi.utils.device import Device

ELSEWHERE = torch.device("cuda", 1)


@pytest.mark.ranks(2)
def test_parameters_where_the_ranks_have_no_memory_are_refused(world, monkeypatch):
    monkeypatch.setattr(world.default_group.backend, "on", lambda _place: SimpleNamespace(place=ELSEWHERE))
    with pytest.raises(ValueError, match=r"expected parameters on cuda:1, where .*, got them on cpu; start with"):
        ax.FSDP(built(Blocks))


@pytest.mark.ranks(1)
def test_parameters_on_several_devices_are_refused(world, monkeypatch):
    monkeypatch.setattr("axonmpi.fsdp.wrapper.devices_of", lambda model: {torch.device("cpu"), ELSEWHERE})
    with pytest.raises(ValueError, match="expected parameters on one device, got them on cpu, cuda:1"):
        ax.FSDP(built(Blocks))


@pytest.mark.ranks(2)
@pytest.mark.not_over_double("pretends memory elsewhere itself")
def test_buckets_lie_where_the_gradients_do(world, monkeypatch):
    memory = SimpleNamespace(place=ELSEWHERE, overlaps=False)  # as of threads that have tensors on a GPU
    monkeypatch.setattr(world.default_group.backend, "on", lambda _place: memory)
    model = ax.DDP(nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    assert model.module.weight.grad.device.type == "cpu"


@pytest.mark.ranks(2)
def test_whole_states_lie_where_they_are_wanted(world, model):
    optimizer = train(model, world, 1, adamw)
    for options, place in (({"device": "meta"}, "meta"), ({}, "cpu")):  # the first has no room for anything
        assert {value.device.type for value in model.full_state_dict(**options).values()} == {place}
    state = model.full_optimizer_state_dict(optimizer, device="meta")["state"]["head.weight"]
    places = {key: value.device.type for key, value in state.items()}
    assert places == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


# ---- offload ----------------------------------------------------------------------------------------------------


class Noted(Device):
    """A device that takes note of what it is told, with a number for each stream and event."""

    is_asynchronous = True

    def __init__(self, place: torch.device) -> None:
        super().__init__(place)
        self.notes: list[tuple[str, Any]] = []
        self.streams = 0

    def new_stream(self, apart_from: Any = ()) -> Any:
        self.streams += 1
        return f"stream {self.streams}"

    def current_stream(self) -> Any:
        return "computing"

    def record(self, stream: Any) -> Any:
        return f"event of {stream}"

    def block(self, event: Any) -> None:
        self.notes.append(("block", event))

    def wait(self, stream: Any, event: Any) -> None:
        self.notes.append((stream, event))


@pytest.fixture
def noted(monkeypatch):
    device = Noted(torch.device("cpu"))
    monkeypatch.setattr("axonmpi.fsdp.wrapper.device_at", lambda place: device)
    return device


@pytest.mark.ranks(1)
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_a_step_begins_after_the_copies_of_what_it_changes(world, noted, strategy):
    model = ax.FSDP(built(Blocks), sharding_strategy=strategy, cpu_offload=CPUOffload.FULL)
    optimizer = train(model, world, 1, adamw)
    with torch.no_grad():
        model(own_data(model, world)[0])
    noted.notes.clear()
    optimizer.step()
    assert noted.notes == [("block", "event of stream 1")]
    noted.notes.clear()
    model.load_full_state_dict(model.full_state_dict())
    assert noted.notes[0] == ("block", "event of stream 1")


@pytest.mark.ranks(1)
def test_each_unit_is_copied_while_the_one_before_computes(world, noted):
    model = ax.FSDP(built(Blocks), cpu_offload=CPUOffload.PARAMS)
    uploads: list[str] = []
    for unit in model.runtime.units:
        begin = unit.begin_gather

        def begin_gather(begin: Any = begin, name: str = unit.name) -> None:
            uploads.append(name)
            begin()

        unit.begin_gather = begin_gather
        unit.module.register_forward_pre_hook(lambda *_, name=unit.name: uploads.append(f"compute {name}"))
    with torch.no_grad():
        for _ in range(2):  # the first one learns the order
            uploads.clear()
            model(own_data(model, world)[0])
    for before, after in pairwise([unit.name for unit in model.runtime.units if unit.lent is not None]):
        assert uploads.index(after) < uploads.index(f"compute {before}")


@pytest.mark.over_double
@pytest.mark.ranks(2)
def test_gradients_lie_in_memory_of_the_cpu(world):
    model = ax.FSDP(built(Blocks), cpu_offload=CPUOffload.PARAMS)
    train(model, world, 2)
    assert all(isinstance(flat.pinned, PinnedMemory) and not flat.in_place for flat in model.runtime.flats)
    for gradient in model.runtime.queue.gradients:
        own = [parameter.sharded.grad for parameter in gradient.flat.parameters if parameter.own.numel()]
        assert own
        assert len({grad.untyped_storage().data_ptr() for grad in (*own, gradient.shard)}) == 1


@pytest.mark.over_double
@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@pytest.mark.parametrize("options", [{}, {"mixed_precision": ax.MixedPrecision(param_dtype=torch.float64)}])
def test_offloaded_from_a_gpu_equals_one_process(world, strategy, options):
    equals_alone(world, Blocks, usual_step, sharding_strategy=strategy, cpu_offload=CPUOffload.FULL, **options)
