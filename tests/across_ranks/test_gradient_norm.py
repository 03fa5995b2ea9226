"""The norm of a gradient over several ranks and axes, against torch's own on one process with the whole model."""

import copy
import math
import random
from functools import partial

import pytest
import torch
from helpers.compare import refused
from helpers.models import Whole, built
from torch import Tensor, nn
from torch.nn import functional as F

import axonmpi as ax
from axonmpi.testing import run_ranks

TYPES = (0.5, 1, 2.0, 3, math.inf)


CLOSE = {"rtol": 1e-4, "atol": 1e-6, "equal_nan": True}


def meshes(world: ax.World, *shapes: dict[str, int]) -> list[ax.DeviceMesh]:
    """Return the meshes that the world has as many ranks for."""
    return [ax.DeviceMesh(shape) for shape in shapes if math.prod(shape.values()) == world.size]


def parameters_with(gradients: list[Tensor]) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = gradient.clone()
    return made


@pytest.mark.ranks(4)
def test_any_parameters_on_any_number_of_ranks(world: ax.World, seed: int) -> None:
    """Each parameter has a part for each set of ranks that share it out; the ranks of a set have the same part.

    Of these the first counts alone, or all of them count in part. One element may not be finite.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(25):
        parts = [(draw.randint(0, 5), draw.choice([1, 2, 4])) for _ in range(draw.randint(0, 5))]
        norm_type, limit = draw.choice(TYPES), draw.choice([0.5, 0.5, 0.0, 1e6, math.inf])
        gradients = [torch.randn(4, size, generator=generator) for size, _ in parts]
        for gradient in gradients[:1]:
            gradient[-1:, :1] += draw.choice([0.0, 0.0, math.inf, -math.inf, math.nan])
        whole = parameters_with(gradients)
        # torch has no largest value of an empty gradient
        expected = nn.utils.clip_grad_norm_([p for p in whole if p.numel()], limit, norm_type)
        here = parameters_with([g[world.rank // c * c :][:c] for g, (_, c) in zip(gradients, parts, strict=True)])
        copies = {p: c for p, (_, c) in zip(here, parts, strict=True)}
        if draw.random() < 0.5:
            copies = {p: math.inf if world.rank % c else 1 for p, c in copies.items()}
        norm = ax.clip_grad_norm(here, limit, norm_type, copies=copies)
        torch.testing.assert_close(norm, expected.float(), **CLOSE)
        for mine, parameter, (_, c) in zip(here, whole, parts, strict=True):
            torch.testing.assert_close(mine.grad, parameter.grad[world.rank // c * c :][:c], **CLOSE)


@pytest.mark.ranks(2)
def test_a_norm_that_is_not_finite_is_an_error_where_asked_for(world) -> None:
    for bad in (math.inf, math.nan):
        (parameter,) = parameters_with([torch.tensor([1.0, 2.0, bad if world.rank else 3.0])])
        clip = partial(ax.clip_grad_norm, parameter, 1.0, error_if_nonfinite=True)
        refused(RuntimeError, (clip, r"the norm of the gradient is (inf|nan), so it cannot be clipped"))
        assert parameter.grad[:2].tolist() == [1, 2]


@pytest.mark.ranks(1, 2)
def test_what_parameters_may_be(world) -> None:
    model, size = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), world.size
    for parameter in list(model.parameters())[:3]:
        parameter.grad = torch.full_like(parameter, 2.0)
    squares = [24.0, 8.0, 16.0]
    for parameters, copies, expected in (
        (model, None, size * sum(squares)),
        (model.parameters(), size, sum(squares)),
        (model, {"0.weight": size, "1.bias": size}, squares[0] + size * (squares[1] + squares[2])),
        (model[0].weight, None, size * squares[0]),
        (iter([model[0].bias]), {model[0].bias: size, model[1].bias: 7}, squares[1]),
        (model, lambda p: size if p.dim() > 1 else 1, squares[0] + size * squares[1] + squares[2]),
        (model, {model[0].weight: math.inf}, size * (squares[1] + squares[2])),
        ([], None, 0.0),
        (model[1].bias, None, 0.0),
    ):
        norm = ax.clip_grad_norm(parameters, math.inf, copies=copies)
        torch.testing.assert_close(norm, torch.tensor(math.sqrt(expected)))
    assert model[1].bias.grad is None
    assert all(bool((p.grad == 2).all()) for p in list(model.parameters())[:3])


@pytest.mark.ranks(2)
def test_dtypes(world) -> None:
    """Half precision is summed in float32; dtypes may be mixed; large numbers overflow to infinity."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        gradients = [torch.full((50,), 300.0, dtype=dtype), torch.full((30,), 0.5)]
        here = parameters_with(gradients)
        norm = ax.clip_grad_norm(here, 1.0)
        torch.testing.assert_close(norm, torch.tensor(math.sqrt(2 * (50 * 300.0**2 + 30 * 0.25))))
        for parameter, gradient in zip(here, gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient / norm.to(gradient.dtype), rtol=1e-2, atol=1e-6)
    (large,) = parameters_with([torch.tensor([1e200], dtype=torch.float64)])
    assert ax.clip_grad_norm(large, math.inf) == math.inf


@pytest.mark.ranks(2)
def test_mistakes(world: ax.World) -> None:
    (parameter,) = parameters_with([torch.ones(3)])
    model, size = nn.Linear(2, 2), world.size
    for kind, copies, message in (
        (ValueError, size + 1, rf"copies: expected 1 to {size}, the ranks of the group, got {size + 1}"),
        (ValueError, 0, "got 0 for weight"),
        (ValueError, {"bias": 0.5}, "got 0.5 for bias"),
        (ValueError, math.nan, "got nan"),
        (TypeError, True, "copies: expected a number of ranks, got True"),
        (TypeError, {"bias": "two"}, "got 'two'"),
        (ValueError, {"basi": 1}, "names of parameters, got 'basi'; names here are 'bias', 'weight', ..."),
    ):
        refused(kind, (partial(ax.clip_grad_norm, model, 1.0, copies=copies), message))
    not_all = world.new_group([1])
    same = "expected the same on all ranks of the group, got"
    refused(
        (ValueError, TypeError),
        (lambda: ax.clip_grad_norm(parameter, -1.0), "max_norm: expected 0 or more, got -1.0"),
        (lambda: ax.clip_grad_norm(parameter, math.nan), "max_norm"),
        (
            lambda: ax.clip_grad_norm(parameter, 1.0, 0),
            "norm_type: expected a positive number or infinity",
        ),
        (lambda: ax.clip_grad_norm(parameter, 1.0, math.nan), "norm_type"),
        (lambda: ax.clip_grad_norm([1.0], 1.0), "parameters: expected a module or tensors, got float"),
        (lambda: ax.clip_grad_norm(parameter, "much"), "max_norm: expected a number, got .much."),
        (
            lambda: ax.clip_grad_norm(model.parameters(), 1.0, copies={"bias": 1}),
            "got 'bias'; parameters without a module have none",
        ),
        (lambda: ax.clip_grad_norm(parameter, float(world.rank)), rf"max_norm: {same} \[0.0, 1.0"),
        (lambda: ax.clip_grad_norm(parameter, 1.0, 1 + world.rank), rf"norm_type: {same} \[1.0, 2.0"),
    )
    if world.rank == 0:
        refused(ValueError, (lambda: ax.clip_grad_norm(parameter, 1.0, group=not_all), "is not in this group"))
    assert parameter.grad.tolist() == [1] * 3
    world.default_group.barrier()


@pytest.mark.not_over_double("looks at the mock's log of operations")
def test_one_message_a_norm() -> None:
    def logged(world: ax.World) -> list[tuple[str, int]]:
        ax.clip_grad_norm(parameters_with([torch.ones(3), torch.ones(2, 2)]), 1.0)
        return [(entry.operation, entry.nbytes) for entry in world.default_group.backend.log]

    assert run_ranks(2, logged) == [[("all_gather", 24)]] * 2


# ---- with wrappers, on a mesh ------------------------------------------------------------------------------------


def divided(whole: Whole, group: ax.ProcessGroup) -> nn.Module:
    """The same with the hidden layer cut over a group, everything else copied."""
    return ax.tensor_parallelize(copy.deepcopy(whole), {"up": "column", "down": "row"}, group)


def data(seed: int = 5) -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(seed))
    return inputs, targets


def trained_alone(blocks: list[Whole], limit: float, norm_type: float) -> Tensor:
    """One step of the blocks one behind the other; return the norm."""
    model = nn.Sequential(*blocks)
    inputs, targets = data()
    F.mse_loss(model(inputs), targets).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return norm


@pytest.mark.real_ranks
@pytest.mark.ranks(2, 4, 8)
def test_fsdp_on_one_axis_tensor_parallel_on_another(world) -> None:
    shapes = [{"dp": 2, "fsdp": 2, "tp": 2}, {"dp": 1, "fsdp": 2, "tp": 2}, {"dp": 2, "fsdp": 1, "tp": 2}]
    shapes += [{"dp": 1, "fsdp": 2, "tp": 1}]
    for number, mesh in enumerate(meshes(world, *shapes)):
        norm_type, limit = TYPES[1 + number % 4], (0.02, 5e-3)[number % 2]
        whole = built(Whole)
        part = divided(whole, mesh.group("tp"))
        by_name = ax.tensor.copies(part)
        options = {"sharding_strategy": ax.ShardingStrategy.HYBRID_SHARD, "units": ax.ColumnParallelLinear}
        model = ax.FSDP(part, (mesh.group("fsdp"), mesh.group("dp")), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        mine = mesh.rank("dp", "fsdp")
        inputs, targets = (t.tensor_split(mesh.size("dp", "fsdp"))[mine] for t in data())
        F.mse_loss(model(inputs), targets).backward()
        expected = trained_alone([whole], limit, norm_type)
        for axes in (("fsdp", "tp"), ("dp", "fsdp", "tp")):  # replicas are found by themselves
            measured = model.clip_grad_norm(math.inf, norm_type, group=mesh.group(*axes), copies=by_name)
            torch.testing.assert_close(measured, expected, **CLOSE)
        norm = model.clip_grad_norm(limit, norm_type, group=mesh.group(), copies=by_name)
        torch.testing.assert_close(norm, expected, **CLOSE)
        optimizer.step()
        state = ax.tensor.full_state_dict(model, model.full_state_dict())
        torch.testing.assert_close(dict(state), dict(whole.state_dict()))


@pytest.mark.ranks(4)
def test_pipelines_of_tensor_parallel_and_sharded_stages(world) -> None:
    """Two stages whose norms are tied, each cut over tp and divided over dp."""
    for number, mesh in enumerate(meshes(world, {"dp": 2, "pp": 2, "tp": 1}, {"dp": 1, "pp": 2, "tp": 2})):
        norm_type, limit = TYPES[2 + number], 0.02
        whole = [built(Whole), built(Whole, 1)]
        whole[1].norm = whole[0].norm
        tied = [[(stage, f"norm.{name}") for stage in (0, 1)] for name in ("weight", "bias")]
        own, stages = mesh.rank("pp"), [None, None]
        part = divided(whole[own], mesh.group("tp"))
        stages[own] = ax.FSDP(part, mesh.group("dp"))
        pipeline = ax.Pipeline.from_modules(
            stages, mesh.group("pp"), ties=tied, num_microbatches=2, loss_fn=F.mse_loss
        )
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=1.0)
        inputs, targets = (t.tensor_split(mesh.size("dp"))[mesh.rank("dp")] for t in data())
        pipeline.train_step(inputs, targets)
        expected = trained_alone(whole, limit, norm_type)
        numbers = ax.tensor.copies(part)
        copied = {p: numbers[name] for name, p in stages[own].named_parameters()}
        norm = pipeline.clip_grad_norm(limit, norm_type, group=mesh.group(), copies=copied)
        torch.testing.assert_close(norm, expected, **CLOSE)
        optimizer.step()
        state = ax.tensor.full_state_dict(stages[own], stages[own].full_state_dict())
        torch.testing.assert_close(dict(state), dict(whole[own].state_dict()))


@pytest.mark.ranks(4)
def test_groups_that_leave_ranks_out_are_refused(world: ax.World) -> None:
    mesh = ax.DeviceMesh({"pp": 2, "tp": 2})
    whole, tp = built(Whole), mesh.group("tp")
    model = ax.FSDP(divided(whole, tp), mesh.group("pp"))
    pipeline = ax.Pipeline.from_modules(
        [divided(whole, tp) for _ in range(2)], mesh.group("pp"), loss_fn=F.mse_loss
    )
    refused(
        ValueError,
        (
            lambda: model.clip_grad_norm(1.0, group=tp),
            "group: expected one with all ranks that share the parameters out",
        ),
        (
            lambda: model.clip_grad_norm(1.0, group=mesh.group(), copies={"normal": 2}),
            "copies: expected names of parameters, got 'normal'",
        ),
        (lambda: pipeline.clip_grad_norm(1.0, group=tp), "group: expected one with all ranks of the pipeline"),
    )
