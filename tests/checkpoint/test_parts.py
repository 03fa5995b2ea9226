"""Parts of models: the ranks' parts put together are the state dict of the whole model in plain torch."""

from __future__ import annotations

import pytest
import torch
from helpers.assembled import assembled
from helpers.layouts import LAYOUTS, laid_out, optimizer_for, train_alone, whole_model
from helpers.models import assert_close

import axonmpi as ax
from axonmpi.checkpoint.model_parts import model_parts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.ranks(1, 2, 4)
def test_every_layout_has_the_whole_model_in_parts(world: ax.World, layout: str, tied: bool) -> None:
    laid = laid_out(layout, world, tied=tied)
    found = model_parts(laid.model, world.default_group)
    with found.stable():
        tensors, times, rest = assembled(world, found.parts)
    expected = whole_model(tied=tied)
    buffers = {name for name, _ in expected.named_buffers()}
    values = dict(expected.state_dict())
    names = world.default_group.all_gather_object(found.aliases)
    if tied:
        assert {name: of for own in names for name, of in own.items()} == {"head.weight": "embedding.weight"}
        del values["head.weight"]
    assert sorted(tensors) == sorted(values)
    tp = laid.mesh.size("tp") if "tp" in laid.mesh.axes else 1
    is_cut = {
        name
        for name in values
        if "gate_up" in name or name.endswith(("down.weight", "embedding.weight", "head.weight"))
    }
    for name, value in values.items():
        assert torch.equal(tensors[name], value), name
        copies = 1 if name in is_cut else tp
        replicas = _replicas(laid.mesh, layout, is_buffer=name in buffers)
        assert (name, times[name], rest[name]) == (
            name,
            copies * replicas,
            (copies, name not in buffers and value.dim() > 0),
        )


def _replicas(mesh: ax.DeviceMesh, layout: str, *, is_buffer: bool) -> int:
    shared = {"ddp": ("dp",), "dp_tp": ("dp",), "pp_dp": ("dp",), "hybrid": ("replica",)}.get(layout, ())
    axes = [axis for axis in mesh.axes if axis not in ("tp", "pp")] if is_buffer else list(shared)
    return mesh.size(*axes) if axes else 1
