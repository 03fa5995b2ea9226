"""What torch or a user does to shards of parameters and gradients is as on one process, or refused on all ranks."""

import copy
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compare import assert_close, assert_equal, refused
from helpers.models import built
from torch import Tensor, nn
from torch.nn import init, utils
from torch.nn.utils import parametrizations, prune

import axonmpi as ax

ONE_GENERATOR = threading.Lock()
"""Ranks that are threads share one generator of random numbers."""
PAGE = Path(__file__).resolve().parents[2] / "docs/fsdp.md"


class Model(nn.Module):
    """Of its seven parameters some are empty on some of four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 7, bias=False)
        self.head = nn.Linear(7, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.kernel = nn.Parameter(torch.randn(2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.head(self.embedding(x))) * self.scale + self.kernel.square().sum()


@torch.enable_grad()
def trained(model: nn.Module) -> nn.Module:
    (model(torch.linspace(-1, 1, 12).view(3, 4)) ** 2).sum().backward()
    return model


# What is as on one process, for each parameter `p` of a model `m`.
RIGHT: dict[str, Callable[[Any, Any], Any]] = {
    "p + p": lambda m, p: p + p,
    "2 - p / 3": lambda m, p: 2 - p / 3,
    "p ** 2": lambda m, p: p**2,
    "p.grad / p": lambda m, p: p.grad / p,
    "p > 0": lambda m, p: p > 0,
    "p.grad.isnan()": lambda m, p: p.grad.isnan(),
    "torch.where(p > 0, p, p.grad)": lambda m, p: torch.where(p > 0, p, p.grad),
    "p.data.mul_(0.5)": lambda m, p: p.data.mul_(0.5),
    "p.add_(p.grad, alpha=-0.1)": lambda m, p: p.add_(p.grad, alpha=-0.1),
    "p.lerp_(p.grad, 0.1)": lambda m, p: p.lerp_(p.grad, 0.1),
    "p.addcdiv_(p.grad, p.grad.abs() + 1)": lambda m, p: p.addcdiv_(p.grad, p.grad.abs() + 1),
    "p.grad.clamp_(-0.1, 0.1)": lambda m, p: p.grad.clamp_(-0.1, 0.1),
    "p.grad.zero_()": lambda m, p: p.grad.zero_(),
    "p.copy_(p.grad)": lambda m, p: p.copy_(p.grad),
    "p.fill_(3)": lambda m, p: p.fill_(3),
    "torch.zeros_like(p)": lambda m, p: torch.zeros_like(p),
    "torch.zeros(p.shape) + p": lambda m, p: torch.zeros(p.shape) + p,
    "p.detach().clone()": lambda m, p: p.detach().clone(),
    "copy.deepcopy(p)": lambda m, p: copy.deepcopy(p),
    "p.double()": lambda m, p: p.double(),
    "p.flatten()": lambda m, p: p.flatten(),
    "p.view(-1)": lambda m, p: p.view(-1),
    "torch._foreach_mul([p], 2)": lambda m, p: torch._foreach_mul([p], 2)[0],
    "init.zeros_(p)": lambda m, p: init.zeros_(p),
    "init.ones_(p)": lambda m, p: init.ones_(p),
    "init.constant_(p, 0.3)": lambda m, p: init.constant_(p, 0.3),
    "utils.clip_grad_value_([p], 0.1)": lambda m, p: utils.clip_grad_value_([p], 0.1) or p.grad,
}
# What is refused, for one parameter.
REDUCTIONS = """
    sum() mean() std() var() norm() max() min() amax() amin() aminmax() argmax() argmin() median() prod() all()
    any() count_nonzero() nansum() logsumexp(0) cumsum(0) sort() topk(1) quantile(0.5) unique() nonzero() histc()
    softmax(0) item() tolist() numpy()
"""
OTHERS = """
    dot(p) matmul(p) mm(p) mv(p) outer(p) inner(p) vdot(p) kron(p) dist(p)
    t() transpose(0,1) permute(1,0) reshape(7,7) expand(7,7) repeat(2) unsqueeze(0) squeeze() chunk(1) select(0,0)
    normal_() uniform_() bernoulli_() exponential_() log_normal_() random_() geometric_(0.5)
"""
REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    **{f"p.{call}": lambda m, p, call=call: eval(f"p.{call}") for call in (REDUCTIONS + OTHERS).split()},
    **{f"p.grad.{call}": lambda m, p, call=call: eval(f"p.grad.{call}") for call in REDUCTIONS.split()},
    "p.abs().max()": lambda m, p: p.abs().max(),
    "p.grad.pow(2).sum()": lambda m, p: p.grad.pow(2).sum(),
    "p.data.norm()": lambda m, p: p.data.norm(),
    "torch.linalg.vector_norm(p)": lambda m, p: torch.linalg.vector_norm(p),
    "torch._foreach_norm([p])": lambda m, p: torch._foreach_norm([p]),
    "(p ** 2).sum() in a loss": lambda m, p: (p**2).sum(),
    "float(p)": lambda m, p: float(p),
    "bool(p.isnan().any())": lambda m, p: bool(p.isnan().any()),
    "p[0]": lambda m, p: p[0],
    "p[0] = 0": lambda m, p: p.__setitem__(0, 0),
    "p.unbind()": lambda m, p: p.unbind(),
    "p.T": lambda m, p: p.T,
    "p * torch.ones(7, 7)": lambda m, p: p * torch.ones(7, 7),
    "torch.cat([p, p])": lambda m, p: torch.cat([p, p]),
    "torch.stack([p])": lambda m, p: torch.stack([p]),
    "torch.randn_like(p)": lambda m, p: torch.randn_like(p),
    "torch.nn.functional.dropout(p)": lambda m, p: nn.functional.dropout(p),
    "torch.nn.functional.mse_loss(p, p)": lambda m, p: nn.functional.mse_loss(p, p),
    "p.data = torch.zeros(7)": lambda m, p: setattr(p, "data", torch.zeros(7)),
    "p.data = q.data": lambda m, p: setattr(p, "data", m.embedding.weight.data),
    "ax.all_reduce(p.grad)": lambda m, p: ax.all_reduce(p.grad),
    "ax.broadcast(p.data)": lambda m, p: ax.broadcast(p.data),
    "init.uniform_": lambda m, p: init.uniform_(p),
    "init.normal_": lambda m, p: init.normal_(p),
    "init.trunc_normal_": lambda m, p: init.trunc_normal_(p),
    "init.eye_": lambda m, p: init.eye_(p),
    "init.dirac_": lambda m, p: init.dirac_(p),
    "init.xavier_uniform_": lambda m, p: init.xavier_uniform_(p),
    "init.xavier_normal_": lambda m, p: init.xavier_normal_(p),
    "init.kaiming_uniform_": lambda m, p: init.kaiming_uniform_(p),
    "init.kaiming_normal_": lambda m, p: init.kaiming_normal_(p),
    "init.orthogonal_": lambda m, p: init.orthogonal_(p),
    "init.sparse_": lambda m, p: init.sparse_(p, 0.1),
    "utils.clip_grad_norm_": lambda m, p: utils.clip_grad_norm_([p], 1.0),
    "utils.get_total_norm": lambda m, p: utils.get_total_norm([p.grad]),
    "utils.parameters_to_vector": lambda m, p: utils.parameters_to_vector([p]),
    "utils.vector_to_parameters": lambda m, p: utils.vector_to_parameters(torch.zeros(99), [p]),
}
# What changes a model, and is refused by its next forward at the latest.
CHANGED: dict[str, Callable[[Any], Any]] = {
    "m.head = nn.Linear(7, 4)": lambda m: setattr(m, "head", nn.Linear(7, 4)),
    "m.head.weight = nn.Parameter(...)": lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(4, 7))),
    "m.head.weight = m.embedding.weight": lambda m: setattr(m.head, "weight", m.embedding.weight),
    "m.add_module(...)": lambda m: m.add_module("more", nn.Linear(2, 2)),
    "m.register_parameter(...)": lambda m: m.register_parameter("more", nn.Parameter(torch.ones(2))),
    "del m.head.weight": lambda m: delattr(m.head, "weight"),
    "m.apply(reset_parameters)": lambda m: m.apply(lambda part: getattr(part, "reset_parameters", int)()),
    "m.load_state_dict(full)": lambda m: m.load_state_dict(built(Model).state_dict()),
    "m.load_state_dict(full, assign=True)": lambda m: m.load_state_dict(built(Model).state_dict(), assign=True),
    "utils.parametrizations.weight_norm": lambda m: parametrizations.weight_norm(m.head),
    "utils.parametrizations.orthogonal": lambda m: parametrizations.orthogonal(m.head),
    "utils.prune.l1_unstructured": lambda m: prune.l1_unstructured(m.head, "weight", 2),
    "utils.prune.random_unstructured": lambda m: prune.random_unstructured(m.head, "weight", 2),
}


def joined(shard: Tensor) -> Tensor:
    """Lay the shards of all ranks end to end."""
    own = shard.detach().as_subclass(Tensor).reshape(-1)
    return torch.cat(ax.all_gather_object(own))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shard_by", ["elements", "parameters"])
def test_what_treats_each_element_by_itself_is_as_on_one_process(world, shard_by):
    with torch.no_grad():
        for name, function in RIGHT.items():
            plain, model = trained(built(Model)), trained(ax.FSDP(built(Model), shard_by=shard_by))
            for (own, p), shard in zip(plain.named_parameters(), model.parameters(), strict=True):
                whole, result = function(plain, p), function(model.module, shard)
                assert_close(joined(result), whole.detach().flatten(), what=f"{name} of {own}")
                refused(ValueError, (lambda result=result: result.sum(), "needs the full tensor"))


def outcome_of(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def refuse(name: str, call: Callable[[], Any]) -> None:
    error = outcome_of(call)
    assert isinstance(error, ValueError), f"{name}: {error}"
    assert re.search("needs the full|same parameter|would write over", str(error)), f"{name}: {error}"


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shard_by", ["elements", "parameters"])
def test_what_needs_the_full_tensor_is_refused_on_all_ranks(world, shard_by):
    model = trained(ax.FSDP(built(Model), shard_by=shard_by))
    before = model.full_state_dict()
    for name, function in REFUSED.items():
        for shard in model.parameters():
            if name != "p.data = q.data" or shard is not model.module.embedding.weight:
                refuse(name, lambda f=function, p=shard: f(model.module, p))
    assert_equal(model.full_state_dict(), before)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("change", CHANGED)
def test_what_changes_the_model_is_refused_on_all_ranks(world, change):
    model = ax.FSDP(built(Model))

    def changed() -> None:
        CHANGED[change](model.module)
        trained(model)

    with pytest.raises((ValueError, RuntimeError, TypeError)):
        changed()


@pytest.mark.ranks(2, 4)
def test_initialising_gathered_parameters_gives_what_one_process_has(world):
    functions = (init.xavier_uniform_, init.kaiming_normal_, init.orthogonal_)
    plain, model = built(Model), ax.FSDP(built(Model))

    def initialise(module: nn.Module) -> None:
        with ONE_GENERATOR:
            torch.manual_seed(3)
            for function in functions:
                for p in module.parameters():
                    if p.dim() >= 2:
                        function(p)
            module.apply(lambda part: getattr(part, "reset_parameters", int)())

    initialise(plain)
    with model.full_parameters():
        initialise(model.module)
    assert_equal(model.full_state_dict(), plain.state_dict())


@pytest.mark.ranks(2, 4)
def test_full_parameters_are_ordinary(world):
    plain, model = trained(built(Model)), trained(ax.FSDP(built(Model)))
    with model.full_parameters(), torch.no_grad():
        for own, p in zip(plain.parameters(), model.parameters(), strict=True):
            assert_equal([p.norm(), p.abs().max(), p.sum()], [own.norm(), own.abs().max(), own.sum()])
            refused(ValueError, (lambda p=p: p.grad.norm(), "needs the full tensor"))
    refused(ValueError, (lambda: model.module.scale.norm(), "needs the full tensor"))


class Scaled(torch.optim.Optimizer):
    """As LAMB: the step of a parameter is scaled with its norm."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p) * group["lr"])

    def direction(self, p: Any) -> Tensor:
        return p.grad * (p.norm() / (p.grad.norm() + 1))


class Momentum(Scaled):
    """One that is elementwise."""

    def direction(self, p: Any) -> Tensor:
        average = self.state[p].setdefault("average", torch.zeros_like(p))
        return average.lerp_(p.grad, 0.1).sign()


@pytest.mark.ranks(2, 4)
def test_optimizers_from_elsewhere(world):
    cut = ax.FSDP(built(lambda: nn.Linear(4, 9, bias=False)))
    refused(
        ValueError,
        (lambda: Scaled(trained(cut).parameters(), 0.1).step(), "shard_by='parameters'"),
    )
    for make, shard_by in ((Scaled, "parameters"), (Momentum, "parameters"), (Momentum, "elements")):
        plain, model = built(Model), ax.FSDP(built(Model), shard_by=shard_by)
        optimizers = [make(each.parameters(), 0.1) for each in (plain, model)]
        for _ in range(3):
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                optimizer.zero_grad()
                trained(each)
                optimizer.step()
        assert_close(model.full_state_dict(), plain.state_dict())


@pytest.mark.ranks(2, 4)
def test_closures_of_a_step_see_shards(world):
    """Also after a step that has raised."""
    plain, model = built(Model), ax.FSDP(built(Model))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (plain, model)]

    def closure(of: nn.Module, penalty: Callable[[Tensor], Tensor]) -> Tensor:
        of.zero_grad()
        loss = (of(torch.ones(3, 4)) ** 2).sum()
        (loss + penalty(next(of.parameters()))).backward()
        return loss

    with pytest.raises(ValueError, match="norm needs the full tensor"):
        optimizers[1].step(lambda: closure(model, lambda p: p.norm()))
    for _ in range(2):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.step(closure=lambda each=each: closure(each, lambda p: torch.zeros(())))
        refused(ValueError, (lambda: next(model.parameters()).norm(), "needs the full tensor"))
    assert_close(model.full_state_dict(), plain.state_dict())


def test_the_page_has_the_table():
    expected = table()
    assert expected in PAGE.read_text("utf-8"), f"docs/fsdp.md: expected\n{expected}"


def table() -> str:
    """Return the rows of the page, made of what the tests above run."""
    outcomes = {
        "as on one process, for this rank's elements": RIGHT,
        "`ValueError` on every rank": REFUSED,
        "an error on every rank, of the next forward at the latest": CHANGED,
    }
    rows = ["| operation | outcome |", "| --- | --- |"]
    for outcome, names in outcomes.items():
        kinds = {"init.": [], "utils.": [], "": []}
        for name in names:
            kinds[next(kind for kind in kinds if name.startswith(kind))].append(f"`{name}`")
        rows += [f"| {', '.join(kind)} | {outcome} |" for kind in kinds.values() if kind]
    return "\n".join(rows)
