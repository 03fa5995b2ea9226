"""Comparisons: tensors with a reference, ranks with each other, errors with what they have to say."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axonmpi as ax

ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 4e-2}
"""How far results of the order of 1 may be apart."""


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5, what: str = "") -> None:
    """Compare tensors, and mappings or sequences of tensors, within an absolute and relative tolerance.

    Names, their order, dtypes and shapes have to be equal; other values and None, too.
    """
    _compare(found, expected, what, tolerance)


def assert_equal(found: Any, expected: Any, what: str = "") -> None:
    """Compare as `assert_close`, to the last bit."""
    _compare(found, expected, what, 0.0)


def assert_precise(found: Any, expected: Any, what: str = "") -> None:
    """Compare as `assert_close`, within a tolerance for rounding in each tensor's dtype."""
    _compare(found, expected, what, None)


def _compare(found: Any, expected: Any, what: str, tolerance: float | None) -> None:
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if found.dtype == expected.dtype and not found.is_sparse and torch.equal(found, expected):
            return  # what torch would import for a comparison takes a process a second
        limit = ROUNDING[expected.dtype] if tolerance is None else tolerance
        torch.testing.assert_close(
            found.detach(), expected.detach(), atol=limit, rtol=limit, msg=lambda text: f"{what}: {text}"
        )
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), what
        for name, value in expected.items():
            _compare(found[name], value, f"{what} {name}", tolerance)
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        assert len(found) == len(expected), what
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            _compare(one, other, f"{what} {number}", tolerance)
    else:
        assert found == expected, what


def assert_same_on_all_ranks(world: ax.World, values: Any) -> None:
    """Compare tensors, and whatever holds them, with those of rank 0, to the last bit; collective."""
    first, *others = ax.all_gather_object(values, world.default_group)
    for rank, other in enumerate(others, 1):
        assert_equal(other, first, f"rank {rank} differs from rank 0:")


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Copy the gradients, by name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def gradients_alone(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor | None]:
    """Return the gradients of one backward in a copy of a model that is not wrapped."""
    model = copy.deepcopy(module)
    model.zero_grad()
    loss(model).backward()
    return gradients_of(model)


def assert_gradients(model: ax.FSDP, plain: nn.Module, tolerance: float = 1e-5) -> None:
    """Compare the shards of all ranks with the gradients of one process, by name; collective."""
    everywhere = model.process_group.all_gather_object(gradients_of(model))
    for name, parameter in plain.named_parameters():
        shards = [own[name].flatten() for own in everywhere if own[name] is not None]
        expected = None if parameter.grad is None else parameter.grad.flatten()
        assert_close(torch.cat(shards) if shards else None, expected, tolerance, name)


def assert_said(printed: str, *texts: str, times: int | None = None) -> None:
    """Look for texts in what was printed: each at least once, or just so many times."""
    counts = {text: printed.count(text) for text in texts}
    wrong = {text: count for text, count in counts.items() if (not count if times is None else count != times)}
    assert not wrong, f"printed so many times: {wrong} in\n{printed}"


def refused(
    kind: type[BaseException] | tuple[type[BaseException], ...], *mistakes: tuple[Callable[[], object], str]
) -> None:
    """Make mistakes, each of which raises an error whose text matches a pattern."""
    for call, message in mistakes:
        with pytest.raises(kind, match=message):
            call()
