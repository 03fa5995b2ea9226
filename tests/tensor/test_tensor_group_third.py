"""All tensor layers take the group after their sizes: by position, on a part of the world's ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from whole import randn, together

import axonmpi as ax

LAYERS = (
    lambda group: ax.ColumnParallelLinear(6, 8, group, gather_output=True),
    lambda group: ax.RowParallelLinear(6, 8, group, input_is_parallel=False),
    lambda group: ax.ParallelMLP(6, 8, group),
    lambda group: ax.ParallelGatedMLP(6, 8, group),
    lambda group: ax.tensor_parallel_attention(6, 2, group, head_dim=4),
    lambda group: ax.VocabParallelEmbedding(10, 8, group),
)
"""Made with a group in the third place."""


@pytest.mark.ranks(4)
def test_the_group_stands_third(world) -> None:
    group = ax.DeviceMesh({"dp": 2, "tp": 2}).group("tp")
    for make in LAYERS:
        layer = together(lambda: make(group))  # noqa: B023
        parts = [part for part in layer.modules() if hasattr(part, "process_group")]
        assert {part.process_group for part in parts} == {group}
        whole = together(lambda: make(ax.ProcessGroup.mock()))  # noqa: B023
        assert sum(p.numel() for p in layer.parameters()) < sum(p.numel() for p in whole.parameters())
        whole.load_state_dict(ax.tensor.full_state_dict(layer))
        x = torch.tensor([[1, 9, 4]]) if isinstance(layer, ax.VocabParallelEmbedding) else randn(2, 3, 6)
        torch.testing.assert_close(layer(x), whole(x))


@pytest.mark.ranks(2)
def test_biases_and_padding_are_as_without(world) -> None:
    group = world.default_group
    assert ax.ColumnParallelLinear(6, 8, group).bias is not None
    assert ax.ColumnParallelLinear(6, 8, False, group).bias is None
    assert ax.RowParallelLinear(6, 8, group).bias is not None
    assert ax.VocabParallelEmbedding(10, 8, group).padding_idx is None
    assert ax.VocabParallelEmbedding(10, 8, 3, group).padding_idx == 3
    for call in (
        lambda: ax.ColumnParallelLinear(6, 8, group, group),
        lambda: ax.RowParallelLinear(6, 8, group, process_group=group),
        lambda: ax.VocabParallelEmbedding(10, 8, group, group=group),
    ):
        with pytest.raises(TypeError, match="expected one group, got two"):
            call()
    with pytest.raises(TypeError, match=r"in_features: expected an integer, got 6\.0"):
        ax.ColumnParallelLinear(6.0, 8, group)
    with pytest.raises(TypeError, match="bias: expected True or False, got Linear"):
        ax.ColumnParallelLinear(6, 8, nn.Linear(1, 1))
    ax.barrier()
