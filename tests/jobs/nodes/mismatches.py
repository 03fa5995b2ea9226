"""Random collectives, a third of which do not match; a script for ranks on several nodes.

All ranks draw the same calls from one seed. Where one or more ranks make another call than the others, all raise
`CollectiveMismatchError` and no tensor has changed; where all match, the result is what numpy makes of the ranks'
whole numbers. Whether a rank waits for its call or goes on with the next ones is its own choice.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import axonmpi as ax

MOST_PENDING = 3
ROWS = (0, 1, 2, 7, 64, 1000, 10_000, 100_000)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8)
REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVERAGE")
AGREED = {
    "all_reduce": ("dtype", "rows", "columns", "op"),
    "reduce": ("dtype", "rows", "columns", "op", "root"),
    "broadcast": ("dtype", "rows", "columns", "root"),
    "all_gather": ("dtype", "columns"),
    "reduce_scatter": ("dtype", "rows", "columns", "op"),
    "gather": ("dtype", "columns", "root"),
    "scatter": ("root",),
    "all_to_all": (),
    "barrier": (),
}
"""Operations, and what ranks have to agree on."""
IN_PLACE = ("all_reduce", "reduce", "broadcast")


@dataclass(frozen=True)
class Call:
    """One rank's call, on a tensor of [rows, columns]; what its operation does not need is ignored."""

    operation: str
    dtype: torch.dtype
    rows: int
    columns: int
    op: str
    root: int

    @classmethod
    def draw(cls, chance: random.Random, size: int) -> Call:
        """Draw a call of a group of `size` ranks."""
        dtype = chance.choice(DTYPES)
        return cls(
            operation=chance.choice(list(AGREED)),
            dtype=dtype,
            rows=chance.choice(ROWS),
            columns=chance.choice((1, 3)),
            op=chance.choice(REDUCTIONS if dtype in FLOATS else REDUCTIONS[:-1]),
            root=chance.randrange(size),
        )

    def other(self, chance: random.Random, size: int) -> Call:
        """Draw a call that does not match this one: another operation, or one thing else."""
        name = chance.choice(["operation", *AGREED[self.operation]])
        while True:
            drawn = Call.draw(chance, size)
            other = drawn if name == "operation" else replace(self, **{name: getattr(drawn, name)})
            if getattr(other, name) != getattr(self, name) and (other.op != "AVERAGE" or other.dtype in FLOATS):
                return other

    def __str__(self) -> str:
        return ", ".join(str(getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True)
class Job:
    """The ranks' calls of one number; `calls[r]` is that of rank r."""

    seed: int
    number: int
    calls: tuple[Call, ...]

    @classmethod
    def draw(cls, seed: int, number: int, size: int) -> Job:
        """Draw the calls, the same on all ranks; every third does not match."""
        chance = random.Random(f"{seed} {number}")
        common = Call.draw(chance, size)
        others = chance.sample(range(size), chance.randrange(1, size)) if chance.random() < 1 / 3 else []
        return cls(
            seed,
            number,
            tuple(common.other(chance, size) if rank in others else common for rank in range(size)),
        )

    @property
    def matches(self) -> bool:
        """Whether all ranks make the same call."""
        return len(set(self.calls)) == 1

    def numbers(self, rank: int) -> np.ndarray[Any, Any]:
        """Return what a rank puts in: small whole numbers, whose sums and products every dtype holds."""
        call = self.calls[rank]
        further = rank if call.operation in ("all_gather", "gather") else 0  # the ranks may differ in rows
        generator = np.random.default_rng([self.seed, self.number, rank])
        return generator.integers(0, 4, (call.rows + further, call.columns), np.int8)

    def tensor(self, numbers: np.ndarray[Any, Any], rank: int) -> Tensor:
        """Return numbers in the dtype of a rank's call."""
        return torch.from_numpy(numbers).to(self.calls[rank].dtype)

    def expected(self, rank: int) -> Any:
        """Return the right result of a rank: a tensor, a list of them, or None."""
        call, size = self.calls[rank], len(self.calls)
        given = [self.numbers(other) for other in range(size)]
        parts = [np.array_split(numbers, size) for numbers in given]
        results: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: reduced(given, call.op),
            "reduce": lambda: reduced(given, call.op) if rank == call.root else given[rank],
            "broadcast": lambda: given[call.root],
            "all_gather": lambda: np.concatenate(given),
            "reduce_scatter": lambda: np.array_split(reduced(given, call.op), size)[rank],
            "gather": lambda: given if rank == call.root else None,
            "scatter": lambda: parts[call.root][rank],
            "all_to_all": lambda: [cut[rank] for cut in parts],
            "barrier": lambda: None,
        }
        result = results[call.operation]()
        if isinstance(result, list):
            return [self.tensor(each, rank) for each in result]
        return None if result is None else self.tensor(result, rank)


def reduced(given: list[np.ndarray[Any, Any]], op: str) -> np.ndarray[Any, Any]:
    """Reduce by numpy, in int64 or, of averages, in float64."""
    functions = {"SUM": np.sum, "PRODUCT": np.prod, "MIN": np.min, "MAX": np.max, "AVERAGE": np.mean}
    return np.asarray(functions[op](np.stack(given).astype(np.int64), axis=0))


class Started:
    """A call that this rank has made, to be looked at once it is complete."""

    def __init__(self, job: Job, group: ax.ProcessGroup, asynchronous: bool) -> None:
        self.job = job
        self.rank = group.rank
        self.tensor = job.tensor(job.numbers(group.rank), group.rank)
        self.error: ax.CollectiveMismatchError | None = None
        self.returned: Any = None
        try:
            self.returned = self._call(group, asynchronous)
        except ax.CollectiveMismatchError as error:
            self.error = error

    def _call(self, group: ax.ProcessGroup, asynchronous: bool) -> Any:
        call, tensor = self.job.calls[self.rank], self.tensor
        settings: dict[str, Any] = {"async_op": asynchronous}
        if "op" in AGREED[call.operation]:
            settings["op"] = call.op
        if "root" in AGREED[call.operation]:
            settings["src" if call.operation in ("broadcast", "scatter") else "dst"] = call.root
        if call.operation == "barrier":
            return group.barrier(**settings)
        given = list(tensor.tensor_split(group.size)) if call.operation == "all_to_all" else tensor
        return getattr(group, call.operation)(given, **settings)

    def check(self) -> None:
        """Wait for the call, and compare what has come of it; AssertionError where that is not right."""
        result = self._result()
        call = self.job.calls[self.rank]
        named = f"call {self.job.number}: {call}"
        given = self.job.tensor(self.job.numbers(self.rank), self.rank)
        if not self.job.matches:
            assert self.error is not None, f"{named}: no error, though {[str(each) for each in self.job.calls]}"
        elif self.error is not None:
            raise AssertionError(f"{named}: an error, though the calls match") from self.error
        elif call.operation in IN_PLACE:
            given = self.job.expected(self.rank)
        else:
            wanted = self.job.expected(self.rank)
            torch.testing.assert_close(result, wanted, msg=lambda text: f"{named}: {text}")
        torch.testing.assert_close(self.tensor, given, msg=lambda text: f"{named}: the tensor: {text}")

    def _result(self) -> Any:
        if not isinstance(self.returned, ax.Work):
            return self.returned
        try:
            return self.returned.result()
        except ax.CollectiveMismatchError as error:
            self.error = error
            return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    world = ax.init_process_group(timeout=60)
    own = random.Random(f"{options.seed} of rank {world.rank}")
    pending: deque[Started] = deque()
    found: Counter[bool] = Counter()
    for number in range(options.calls):
        job = Job.draw(options.seed, number, world.size)
        found[job.matches] += 1
        pending.append(Started(job, world.default_group, asynchronous=own.random() < 0.5))
        for _ in range(len(pending) - own.randint(0, MOST_PENDING)):
            pending.popleft().check()
    for started in pending:
        started.check()
    places = ax.all_gather_object(world.node_rank)
    if world.rank == 0:
        print(f"ranks on nodes {places}: {found[True]} calls were right, {found[False]} mismatches raised on all")
    ax.destroy_process_group()


if __name__ == "__main__":
    main()
