import pytest
from helpers.layouts import LAYOUTS, laid_out, optimizer_for, train_alone, whole_model

import axonmpi as ax


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.ranks(1, 2, 4)
def test_every_layout_trains_as_one_process_does(world: ax.World, layout: str, tied: bool) -> None:
    model = whole_model(tied=tied)
    expected = train_alone(model, optimizer_for(model.parameters()), range(3))
    laid = laid_out(layout, world, tied=tied)
    assert [laid.step(number) for number in range(3)] == pytest.approx(expected, rel=1e-5)
