"""Edges of windows that travel between nodes while other outputs are computed, against one process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from helpers.compare import assert_close
from helpers.cut_tensors import assert_as_whole, randn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import axonmpi as ax
from axonmpi.domain import Domain
from axonmpi.utils.torch_internals import plain_tensors

pytestmark = pytest.mark.ranks(2, 4)

HIDDEN = ["start", "convolution", "wait", "convolution"]
HIDDEN_BACKWARD = ["convolution_backward", "start", "convolution_backward", "wait"]


@contextmanager
def between_nodes(mesh: ax.DeviceMesh, events: list[str]) -> Iterator[None]:
    """Treat the groups of the axes as ranks on several nodes; note exchanges, and waits for them."""
    backends: list[Any] = [mesh.group(axis).backend for axis in mesh.axes]
    before = [(backend.spans_nodes, backend.overlaps, backend.exchange_rows) for backend in backends]

    def noted(exchange: Any, *args: Any, **options: Any) -> Any:
        work = exchange(*args, **options)
        if options.get("async_op"):
            events.append("start")
            work.wait = partial(waited, work.wait)
        return work

    def waited(wait: Any) -> None:
        events.append("wait")
        wait()

    for backend in backends:
        backend.spans_nodes = backend.overlaps = True
        backend.exchange_rows = partial(noted, backend.exchange_rows)
    try:
        yield
    finally:
        for backend, old in zip(backends, before, strict=True):
            backend.spans_nodes, backend.overlaps, backend.exchange_rows = old


class Convolutions(TorchDispatchMode):
    """Notes convolutions, and their gradients."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("convolution"):
            self._events.append(name)
        with plain_tensors():  # backward has parts that were saved
            return func(*args, **(kwargs or {}))


@pytest.mark.ranks(2)
def test_edges_travel_while_inner_outputs_are_computed(world: ax.World) -> None:
    """A gradient of a gradient is right, too, though its edges do not travel meanwhile."""
    mesh, events = ax.DeviceMesh({"y": 2}, world), []
    x, weight = randn(1, 1, 2, 17, 3), randn(2, 2, 2, 3, 3).requires_grad_()
    domain = Domain(mesh, {"y": 2})
    part, whole = (tensor.clone().requires_grad_() for tensor in (x[domain.slices(x.shape)], x))
    with between_nodes(mesh, events):
        with Convolutions(events):
            loss = functional.conv2d(domain.from_local(part, x.shape), weight, padding=1).pow(3).sum()
            assert events == HIDDEN
            torch.autograd.grad(loss, [part, weight], retain_graph=True)
            assert events == HIDDEN + HIDDEN_BACKWARD
        (first,) = torch.autograd.grad(loss, part, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), part)
    (expected,) = torch.autograd.grad(
        functional.conv2d(whole, weight, padding=1).pow(3).sum(), whole, create_graph=True
    )
    assert_close(first, expected[domain.slices(x.shape)], 1e-10)
    (expected,) = torch.autograd.grad(expected.pow(2).sum(), whole)
    assert_close(second, expected[domain.slices(x.shape)], 1e-9)


@pytest.mark.parametrize("ranks_per_node", ["", "2"])
def test_windows_between_nodes_are_as_on_one_process(
    world: ax.World, seed: int, monkeypatch: pytest.MonkeyPatch, ranks_per_node: str
) -> None:
    monkeypatch.setenv("AXONMPI_RANKS_PER_NODE", ranks_per_node)
    mesh, events = ax.DeviceMesh({"y": 2, "x": world.size // 2}, world), []
    with between_nodes(mesh, events):
        for case in range(seed, seed + 12):
            draw = random.Random(case)
            kernel, stride, dilation = ([draw.randint(1, most) for _ in range(2)] for most in (4, 3, 2))
            padding = [draw.randint(0, size // 2) for size in kernel]
            x, weight = randn(case, 2, 2, *(draw.randint(12, 28) for _ in range(2))), randn(case, 3, 2, *kernel)
            bias = randn(case + 1, 3)
            options: dict[str, Any] = {"stride": stride, "padding": padding}
            convolution = draw.random() < 0.6
            function = functional.conv2d if convolution else functional.avg_pool2d
            if convolution:
                options["dilation"] = dilation
            else:
                options |= {"kernel_size": kernel, "count_include_pad": draw.random() < 0.5}
            tensors = [x, weight, bias] if convolution else [x]
            cuts = [{"y": 2, "x": 3} if world.size == 4 else {"y": draw.choice((2, 3))}, None, None]
            what = f"{case}: {function.__name__}, {x.shape}, {options}"
            assert_as_whole(mesh, partial(function, **options), tensors, cuts[: len(tensors)], what=what)
    assert events.count("start") == events.count("wait")
    mesh.close()
