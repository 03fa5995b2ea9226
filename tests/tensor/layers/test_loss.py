"""Cross entropy of divided logits against torch's of the whole ones: values, gradients, options, mistakes."""

import math
from collections.abc import Callable

import pytest
import torch
from helpers.compare import assert_precise, refused
from helpers.settings import each_pair
from helpers.transformer_parts import Sent, part, randn, seeded
from torch import Tensor, nn

import axonmpi as ax
from axonmpi.testing import run_ranks


def targets_below(
    vocabulary: int, shape: tuple[int, ...], seed: int, ignored: tuple[int, float] | None = None
) -> Tensor:
    generator = seeded(seed)
    targets = torch.randint(vocabulary, shape, generator=generator)
    if ignored is not None:
        index, share = ignored
        targets[torch.rand(shape, generator=generator) < share] = index
    return targets


def of_torch(logits: Tensor, targets: Tensor, **options) -> Tensor:
    """Torch has the entries in dim 1."""
    losses = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), **options)
    return losses.view(targets.shape) if options.get("reduction") == "none" else losses


@pytest.mark.ranks(1, 4)
@each_pair(
    shape=((), (3,), (2, 4), (0, 4)),
    local=(1, 5),
    padding=(0, 1, 19),
    ignored=(None, (-100, 0.3), (-1, 0.8), (0, 1.0)),
    smoothing=(0.0, 0.1, 1.0),
    reduction=("mean", "sum", "none"),
    dtype=(torch.float32, torch.float64),
    scale=(1.0, 30.0),
    sequence_parallel=(False, True),
)
def test_against_torch(
    world, seed, shape, local, padding, ignored, smoothing, reduction, dtype, scale, sequence_parallel
) -> None:
    """With sequence parallelism losses that are not reduced are those of a slice."""
    vocabulary = max(1, local * world.size - padding)
    logits = randn(*shape, local * world.size, seed=seed, dtype=dtype).mul(scale)
    logits[..., vocabulary:] = 1e4  # as padding must not matter
    targets = targets_below(vocabulary, shape, seed, ignored)
    options = {"label_smoothing": smoothing, "reduction": reduction}
    options |= {} if ignored is None else {"ignore_index": ignored[0]}

    whole = logits.clone().requires_grad_()
    expected = of_torch(whole[..., :vocabulary], targets, **options)
    weights = randn(*expected.shape, seed=seed + 1, dtype=dtype)
    (expected * weights).sum().backward()

    own = part(logits, world, -1).requires_grad_()
    sequence_parallel = sequence_parallel and len(shape) == 2
    options |= {"vocabulary": vocabulary, "sequence_parallel": sequence_parallel}
    found = ax.parallel_cross_entropy(own, targets, **options)
    if sequence_parallel and reduction == "none":
        expected, weights = (part(tensor, world, 1) for tensor in (expected, weights))
    (found * weights).sum().backward()
    assert torch.equal(own, part(logits, world, -1))
    # means over nothing are NaN
    found, wanted = ([one.nan_to_num(7.0) for one in two] for two in ((found, own.grad), (expected, whole.grad)))
    assert_precise(found, [wanted[0], part(wanted[1], world, -1)], f"{shape} {options}")


@pytest.mark.ranks(2)
def test_large_and_infinite_logits(world) -> None:
    """Numbers whose exp is infinite; entries that are ruled out, on one rank all of them."""
    logits = randn(6, 8).mul(300)
    logits[:2] += torch.tensor([[1e5], [-1e5]])
    logits[2, 1:] = -math.inf
    logits[3, : 8 // world.size * (world.size - 1)] = -math.inf
    targets = torch.tensor([0, 3, 0, 7, 5, 2])
    whole, own = logits.clone().requires_grad_(), part(logits, world, -1).requires_grad_()
    expected = of_torch(whole, targets, reduction="none")
    found = ax.parallel_cross_entropy(own, targets, reduction="none")
    torch.autograd.backward([expected.sum(), found.sum()])
    assert_precise([found, own.grad], [expected, part(whole.grad, world, -1)])
    assert found.isfinite().all()
    for strange in (math.nan, math.inf):
        logits[4, -1] = strange
        found = ax.parallel_cross_entropy(part(logits, world, -1), targets, reduction="none")
        assert found.isnan().tolist() == [False] * 4 + [True, False]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_taken_in_float32(world, dtype: torch.dtype) -> None:
    logits, targets = randn(5, 16, dtype=dtype), targets_below(16, (5,), 1)
    whole, own = logits.float().requires_grad_(), part(logits, world, -1).requires_grad_()
    expected, found = of_torch(whole, targets), ax.parallel_cross_entropy(own, targets)
    torch.autograd.backward([expected, found])
    assert_precise(found, expected)
    assert own.grad.dtype is dtype
    torch.testing.assert_close(own.grad.float(), part(whole.grad, world, -1), rtol=2e-2, atol=1e-4)


@pytest.mark.not_over_double("looks at the mock's log of operations")
def test_one_message_and_one_tensor_of_the_size_of_the_logits() -> None:
    def body(world: ax.World) -> tuple[list[tuple[str, int]], list[int], dict[str, int]]:
        own, kept = randn(6, 50, seed=world.rank).requires_grad_(), []
        log, before = world.default_group.backend.log, len(world.default_group.backend.log)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            loss = ax.parallel_cross_entropy(own, torch.zeros(6, dtype=torch.int64))
        sent = [(entry.operation, entry.nbytes) for entry in list(log)[before:]]
        backward = Sent(world)
        loss.backward()
        return sent, sorted(kept, reverse=True), backward.take()

    for sent, (most, *rest), backward in run_ranks(2, body):
        assert (sent, most, backward) == ([("all_gather", 3 * (6 + 1) * 8)], 6 * 50, {})
        assert max(rest) <= 6


@pytest.mark.ranks(2)
def test_mistakes(world) -> None:
    logits, targets = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    uneven = torch.zeros(2, 3, 4 if world.rank else 5)

    def loss(logits: Tensor = logits, targets: Tensor = targets, **options: object) -> Callable[[], Tensor]:
        return lambda: ax.parallel_cross_entropy(logits, targets, **options)

    refused(
        ValueError,
        *(
            (
                loss(targets=targets.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(wrong))),
                rf"entries from 0 to 7, or -100 to ignore, got .*{wrong}.* on rank {world.rank}",
            )
            for wrong in (8, -1, -99)
        ),
        (loss(targets=targets + 1, vocabulary=1), "entries from 0 to 0, or"),
        (loss(targets=targets[0]), r"targets: expected shape \[2, 3\] .* got \[3\] on rank"),
        (loss(torch.tensor(1.0), torch.tensor(0)), r"targets: expected shape"),
        (loss(reduction="max"), "reduction: expected one of 'mean', 'sum', 'none', got 'max'"),
        *((loss(label_smoothing=wrong), "label_smoothing: expected 0 to 1") for wrong in (-0.1, 1.1, math.nan)),
        (loss(reduction="none", sequence_parallel=True), "a sequence whose length is a multiple"),
        (loss(uneven), "as many entries on all ranks of the group, got 5, 4; pad"),
        *((loss(vocabulary=wrong), "vocabulary: expected 1 to 8") for wrong in (0, 9)),
    )
    refused(
        TypeError,
        (loss(targets=targets.float()), r"targets: expected integers, .* got torch.float32"),
        (loss(logits.long()), r"logits: expected a floating-point dtype, got torch.int64"),
        (loss(group="tp"), "^group: expected an axonmpi.ProcessGroup or None, got str"),
    )
    ax.barrier()
