"""A program for torch.distributed as anybody would write it: it knows nothing of axonmpi but a backend's name.

    mpirun -n 2 python stock.py FILE [PART ...]

Each part runs over axonmpi, then over gloo, whose ranks meet by FILE, and has to give the same.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

# Their names since torch 2.13, and before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
functional_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
functional_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def model(width: int = 32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 16, generator=made), torch.randn(8, 4, generator=made)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 3) -> torch.Tensor:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(step, rank)
        loss = nn.functional.mse_loss(module(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def ddp(rank: int, size: int) -> list[torch.Tensor]:
    wrapped = DistributedDataParallel(model())
    losses = train(wrapped, torch.optim.AdamW(wrapped.parameters(), 1e-2), rank)
    return [losses, *(p.detach() for p in wrapped.parameters())]


def fsdp2_and_dcp(rank: int, size: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (size,))
    sharded = model()
    for module in (*sharded[::2], sharded):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), 1e-2)
    losses = train(sharded, optimizer, rank)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    weights, moments = get_state_dict(sharded, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder[0])
    before = [p.full_tensor().clone() for p in sharded.parameters()]
    for parameter in sharded.parameters():
        parameter.detach().zero_()
    weights, moments = get_state_dict(sharded, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder[0])
    set_state_dict(sharded, optimizer, model_state_dict=weights, optim_state_dict=moments)
    after = [p.full_tensor() for p in sharded.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return [losses, *after]


def dtensor(rank: int, size: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(float(8 * size * 6)).view(8 * size, 6)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    total = (sharded @ sharded.T.redistribute(mesh, [Replicate()])).redistribute(mesh, [Shard(1)])
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    divided = parallelize_module(nn.Sequential(*list(model())[:3]), mesh, plan)
    output = divided(batch(0, 0)[0])
    output.sum().backward()
    grads = [p.grad.full_tensor() for p in divided.parameters() if isinstance(p.grad, DTensor)]
    return [total.full_tensor(), output.detach(), *grads]


def pipeline(rank: int, size: int) -> list[torch.Tensor]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # takes long

    torch.manual_seed(2)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    inputs = torch.randn(16, 16)
    losses: list[torch.Tensor] = []
    wanted = {"target": inputs.flip(0), "losses": losses} if rank == size - 1 else {}
    schedule.step(*([inputs] if rank == 0 else []), **wanted)
    grads = torch.stack([p.grad.norm() for p in layers[rank].parameters()])
    everyone = [torch.empty_like(grads) for _ in range(size)]
    dist.all_gather(everyone, grads)
    last = torch.stack(losses).detach() if losses else torch.empty(4)
    dist.broadcast(last, size - 1)
    return [*everyone, last]


def functional(rank: int, size: int) -> list[torch.Tensor]:
    group = dist.group.WORLD
    own = torch.arange(float(4 * size)) + rank
    return [
        funcol.all_reduce(own, "sum", group),
        functional_gather(own, 0, group),
        functional_scatter(own, "sum", 0, group),
        funcol.all_to_all_single(own, None, None, group),
        funcol.broadcast(own, 0, group),
    ]


class Begin(torch.autograd.Function):
    """Begin a collective whose result autograd marks as a part of the graph before it is there."""

    @staticmethod
    def forward(ctx, own: torch.Tensor, begin, works: list[dist.Work]) -> torch.Tensor:
        result, work = begin(own)
        works.append(work)
        return result

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class End(torch.autograd.Function):
    """Wait for it."""

    @staticmethod
    def forward(ctx, result: torch.Tensor, works: list[dist.Work]) -> torch.Tensor:
        works.pop().wait()
        return result.view_as(result)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def begun_in_one_function_and_awaited_in_another(rank: int, size: int) -> list[torch.Tensor]:
    def into(collective, numel: int):
        def begin(own: torch.Tensor):
            result = own.new_empty(numel)
            return result, collective(result, own, async_op=True)

        return begin

    def in_place(collective, *arguments: object):
        def begin(own: torch.Tensor):
            result = own.clone()
            return result, collective(result, *arguments, async_op=True)

        return begin

    length = 4096 * size
    found = []
    for begin in (
        in_place(dist.all_reduce),
        in_place(dist.broadcast, size - 1),
        into(dist.all_to_all_single, length),
        into(all_gather, length * size),
        into(reduce_scatter, length // size),
    ):
        works: list[dist.Work] = []
        own = (torch.arange(float(length)) * (rank + 1)).requires_grad_()
        result = End.apply(Begin.apply(own * 2, begin, works), works)
        assert result.requires_grad
        found.append(result.detach())
    return found


def power_sgd(rank: int, size: int) -> list[torch.Tensor]:
    """A hook whose callbacks begin collectives and wait for them."""
    wrapped = DistributedDataParallel(model())
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5)
    wrapped.register_comm_hook(state, powerSGD_hook)
    losses = train(wrapped, torch.optim.SGD(wrapped.parameters(), 1e-2), rank, steps=4)
    return [losses, *(p.detach() for p in wrapped.parameters())]


def compiled(rank: int, size: int) -> list[torch.Tensor]:
    group = dist.group.WORLD

    @torch.compile(fullgraph=True)
    def step(own: torch.Tensor) -> torch.Tensor:
        total = funcol.all_reduce(own * 2, "sum", group)
        return functional_gather(total + own, 0, group).sin()

    wrapped = DistributedDataParallel(torch.compile(model()))
    losses = train(wrapped, torch.optim.SGD(wrapped.parameters(), 1e-2), rank, steps=2)
    return [step(torch.arange(8.0) + rank), losses]


LATER = begun_in_one_function_and_awaited_in_another
PARTS = (ddp, fsdp2_and_dcp, dtensor, pipeline, functional, LATER, power_sgd, compiled)


def run(names: list[str]) -> dict[str, list[torch.Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    results = {part.__name__: part(rank, size) for part in PARTS if part.__name__ in names or not names}
    results = tree_map(lambda tensor: tensor * 1, results)  # where functional collectives are waited for
    dist.destroy_process_group()
    return results


def main() -> None:
    file, *names = sys.argv[1:]
    dist.init_process_group("axonmpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    found = run(names)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    torch.testing.assert_close(found, run(names), atol=1e-6, rtol=1e-5)
    print("all is well", flush=True)


if __name__ == "__main__":
    main()
