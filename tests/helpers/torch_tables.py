"""The schedules of torch.distributed.pipelining as lists of our actions, made by torch's own generators."""

from types import ModuleType

from axonmpi.pipeline import Action, ActionKind
from axonmpi.pipeline.schedule.actions import ComputeLists


def torch_schedules() -> ModuleType:
    """Torch's module, which takes longer to import than all tests to collect: sessions of others spare it."""
    from torch.distributed.pipelining import schedules

    return schedules


def torch_lists(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> ComputeLists:
    """The order in which torch's ranks compute; no process and no stage is needed for it.

    Raises:
        ValueError: Torch has no such schedule for these numbers.
    """
    made = object.__new__(getattr(torch_schedules(), name))
    rounds = max(1, num_microbatches // num_ranks)
    if "Interleaved" in name and num_microbatches % rounds:
        raise ValueError(f"{num_microbatches} micro-batches are no multiple of {rounds} rounds")
    made.pp_group_size, made.n_local_stages, made._n_microbatches = num_ranks, chunks, num_microbatches
    made.num_stages = made._num_stages = num_ranks * chunks
    made._stages = [None] * chunks
    made.microbatches_per_round = num_microbatches // rounds
    if chunks == 1 and hasattr(made, "_get_pipeline_order"):
        orders = made._get_pipeline_order()
    else:
        orders = {rank: made._calculate_single_rank_operations(rank) for rank in range(num_ranks)}
    return tuple(tuple(_ours(entry) for entry in orders[rank] if _computes(entry)) for rank in range(num_ranks))


def _computes(entry) -> bool:
    return entry is not None and entry.computation_type.value in ("F", "B", "I", "W")


def _ours(entry) -> Action:
    return Action(ActionKind(entry.computation_type.value), entry.stage_index, entry.microbatch_index)


def torch_actions(actions) -> list:
    """Our actions as torch's."""
    action = torch_schedules()._Action
    return [action.from_str(f"{a.stage}{a.kind.value}{a.micro_batch}") for a in actions]
