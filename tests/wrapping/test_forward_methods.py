"""Methods other than forward that compute, and models that would not stay the same on all ranks."""

from typing import Any

import pytest
import torch
from helpers.compare import assert_close, assert_equal, refused
from helpers.models import built
from torch import Tensor, nn

import axonmpi as ax


class Coder(nn.Module):
    """As a variational autoencoder, whose two halves are called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        self.decoder = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4))

    def encode(self, x: Tensor, *, shift: float = 0.0) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(x) * self.scale + shift
        return hidden, hidden.exp()

    def decode(self, z: Tensor) -> dict[str, Tensor]:
        return {"x": self.decoder(z - self.mean)}

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x)[0])["x"]

    def fails(self, x: Tensor) -> Tensor:
        raise KeyError("no output")


def batch(rank: int, size: int) -> Tensor:
    return torch.linspace(-1, 1, 16 * size).view(size, 4, 4)[rank]


def loss(model: Any, x: Tensor) -> Tensor:
    mean, spread = model.encode(x, shift=0.5)
    return (model.decode(mean * spread)["x"] ** 2).mean()


WRAPPERS = {
    "ddp": ax.DDP,
    "full": ax.FSDP,
    "grad": lambda module: ax.FSDP(module, sharding_strategy="grad"),
    "mixed": lambda module: ax.FSDP(module, mixed_precision=ax.MixedPrecision(buffer_dtype=torch.bfloat16)),
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_methods_compute_and_train_as_forward_does(world, kind):
    plain, model = built(Coder), WRAPPERS[kind](built(Coder))
    for name in ("encode", "decode", "fails"):
        model.register_forward_method(name)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(2):
        loss(model, batch(world.rank, world.size)).backward()
        torch.stack([loss(plain, batch(rank, world.size)) for rank in range(world.size)]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        refused(KeyError, (lambda: model.fails(batch(0, 1)), "no output"))
    found = model.state_dict() if kind == "ddp" else model.full_state_dict()
    found = {name: value.float() for name, value in found.items()}  # buffers may be in bfloat16
    assert_close(found, dict(plain.state_dict()), 2e-2 if kind == "mixed" else 1e-5)
    with torch.no_grad():
        assert_close(model.encode(batch(0, 1))[0].float(), plain.encode(batch(0, 1))[0], 5e-2)
        assert_close(model(batch(0, 1)).float(), plain(batch(0, 1)), 5e-2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_names_of_methods_are_checked(world, kind):
    model = WRAPPERS[kind](built(Coder))
    refused(AttributeError, (lambda: model.encode(batch(0, 1)), "no attribute 'encode'"))
    refused(
        TypeError,
        (lambda: model.register_forward_method("encoded"), "expected the name of a method of the wrapped Coder"),
        (lambda: model.register_forward_method(model.module.encode), "expected the name of a method"),
        (lambda: model.register_forward_method("mean"), "expected the name of a method"),
    )
    for name in ("state_dict", "forward"):
        refused(ValueError, (lambda name=name: model.register_forward_method(name), "has itself"))


@pytest.mark.ranks(2)
def test_without_its_registration_a_method_is_refused_with_what_to_do(world):
    model = ax.FSDP(built(Coder))
    refused(ValueError, (lambda: model.module.encode(batch(0, 1)), r"register_forward_method\(name\)"))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("wrap", [ax.DDP, ax.FSDP])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_change_in_forward_are_refused(world, wrap, kind):
    def make() -> nn.Module:
        return nn.Sequential(nn.ReLU(), kind(8, 4, max_norm=1.0))

    refused(ValueError, (lambda: wrap(make()), f"module: 1 is a {kind.__name__} with max_norm=1.0.*renorm_"))
    wrap(nn.Sequential(kind(8, 4)))


@pytest.mark.ranks(2, 4)
def test_a_parameter_of_another_shape_gets_rank_0s_values(world):
    """As resizing the embeddings of a model for more words does it."""
    model = ax.DDP(built(lambda: nn.Embedding(5, 3)))
    model(torch.arange(5)).sum().backward()
    model.zero_grad()
    model.module.weight.data = torch.full((8, 3), float(world.rank))
    model(torch.tensor([world.rank, 7])).sum().backward()
    assert_equal(model.module.weight.detach(), torch.zeros(8, 3))
    expected = torch.zeros(8, 3)
    for rank in range(world.size):
        expected[[rank, 7]] += 1 / world.size
    assert_close(model.module.weight.grad, expected)
