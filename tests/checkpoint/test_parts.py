"""Parts of models: the ranks' parts put together are the state dict of the whole model in plain torch."""

from __future__ import annotations

import pytest
import torch
from helpers.assembled import assembled
from helpers.layouts import LAYOUTS, laid_out, whole_model

import axonmpi as ax
from axonmpi.checkpoint.model_parts import model_parts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.ranks(1, 2, 4)
def test_every_layout_has_the_whole_model_in_parts(world: ax.World, layout: str, tied: bool) -> None:
    laid = laid_out(layout, world, tied=tied)
    found = model_parts(laid.model, world.default_group)
    with found.stable():
        tensors = assembled(world, found.parts)
    expected = whole_model(tied=tied)
    values = dict(expected.state_dict())
    names = world.default_group.all_gather_object(found.aliases)
    if tied:
        assert {name: of for own in names for name, of in own.items()} == {"head.weight": "embedding.weight"}
        del values["head.weight"]
    assert sorted(tensors) == sorted(values)
    for name, value in values.items():
        assert torch.equal(tensors[name], value), name
    trained = {name for name, _ in expected.named_parameters()}
    assert {part.name for part in found.parts if part.is_split} <= {name for name in trained if "scale" not in name}
