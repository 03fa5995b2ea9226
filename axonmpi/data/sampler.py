"""A sampler that deals a dataset to ranks and resumes in the middle of an epoch at another number of ranks.

An epoch is one fixed order of all samples, the same on every rank: a permutation made from the seed and the epoch,
or 0, 1, 2, … without shuffling. Ranks take samples from this order in turn. The progress of an epoch is therefore a
single number, the position up to which samples were consumed, with the same meaning at any number of ranks:

    order of the epoch   7  2  9  0  5  1  8  3  6  4
    three ranks          0  1  2  0  1  2  │              two samples each consumed: position 6
    then two ranks                         0  1  0  1     resume at position 6
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch.utils.data import Sampler

from ..groups.world import current_world
from ..utils.arguments import check_flags, integer

__all__ = ["DistributedSampler"]

_STATE_KEYS = ("epoch", "length", "position", "seed", "shuffle")


@dataclass
class _Pass:
    """One pass through an epoch, or through the rest of a resumed epoch.

    Attributes:
        start: First position in the epoch's order, counted over all ranks.
        begun: True once it is iterated.
        yielded: Number of samples that this rank has received.
        complete: True after the last sample.
    """

    start: int = 0
    begun: bool = False
    yielded: int = 0
    complete: bool = False

    def count(self, indices: Sequence[int]) -> Iterator[int]:
        """Yield indices and count them."""
        for index in indices:
            self.yielded += 1
            # Set before the last sample is yielded: a loop may stop there without asking for a further one.
            self.complete = self.yielded == len(indices)
            yield index
        self.complete = True


class DistributedSampler(Sampler[int]):
    """Yields this rank's indices of a dataset, equal to the indices of torch's sampler of this name.

    Every rank gets the same number of indices. If the number of samples is not divisible by the number of ranks,
    the epoch's first samples are repeated at its end, or with `drop_last` its last samples are left out.

    Local: nothing is communicated. All ranks must have the same arguments, except `rank`.

    Args:
        dataset: A dataset with `len()`, or the number of samples; at least 1. The length is read once.
        num_replicas: Number of ranks that share the dataset; None means the size of the default group, or 1
            before `init_process_group()`.
        rank: This rank's number among them; None means the rank in the default group, or 0.
        shuffle: Draw another permutation of the samples in each epoch.
        seed: Seed of the permutations; epoch `e` uses `seed + e`. The same on all ranks.
        drop_last: Leave out the samples that do not fill a round of all ranks, instead of repeating some.
        dataset_or_length: Another name of `dataset`.

    Raises:
        ValueError: No samples, a rank outside `0 … num_replicas - 1`, or a seed beyond 64 bits.
        TypeError: A dataset without `len()`, or a number that is not an integer.

    Attributes:
        dataset: The dataset, or the number of samples.
        epoch: The current epoch; set by `set_epoch`.
        length: Number of samples in the dataset.
    """

    def __init__(
        self,
        dataset: Sized | int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        dataset_or_length: Sized | int | None = None,
    ) -> None:
        if dataset_or_length is not None:
            if dataset is not None:
                raise TypeError(
                    "dataset: expected it once, got it also as dataset_or_length=, which means the same"
                )
            dataset = dataset_or_length
        check_flags(shuffle=shuffle, drop_last=drop_last)
        self.dataset = dataset
        self.length = _length(dataset)
        self.num_replicas, self.rank = _size_and_rank(num_replicas, rank)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = integer("seed", seed)
        self.epoch = 0
        self._check_seed(self.epoch)
        self._pass = _Pass()
        self._later_epoch: int | None = None  # was set before a state of an earlier epoch was loaded

    @property
    def num_samples(self) -> int:
        """Number of this rank's indices in a full epoch."""
        return self._share(self.length)

    @property
    def total_size(self) -> int:
        """Number of all ranks' indices in a full epoch."""
        return self.num_samples * self.num_replicas

    def _share(self, samples: int) -> int:
        return samples // self.num_replicas if self.drop_last else -(-samples // self.num_replicas)

    def __len__(self) -> int:
        """Return the number of this rank's indices in a pass: in a resumed epoch, in the rest of it."""
        return self._share(self.length - self._pass.start)

    def __iter__(self) -> Iterator[int]:
        """Begin a pass through the epoch, or through the rest of a resumed epoch."""
        # StatefulDataLoader loads its state when it is iterated, after set_epoch() of a new epoch. If the state is
        # of the end of an epoch, it begins a second pass, which is the new epoch.
        if self._pass.begun and self._later_epoch is not None:
            self.set_epoch(self._later_epoch)
        self._pass = _Pass(start=0 if self._pass.complete else self._pass.start, begun=True)
        self._pass.complete = len(self) == 0
        return self._pass.count(self._indices())

    def _indices(self) -> list[int]:
        """Return this rank's indices of the current pass."""
        first = self._pass.start + self.rank
        positions = first + self.num_replicas * torch.arange(len(self), device="cpu")
        positions %= self.length
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator, device="cpu")
            positions = order[positions]
        indices: list[int] = positions.tolist()
        return indices

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, which has its own order of the samples.

        Call it on every rank before each epoch's loop. The epoch of a loaded state begins at the loaded position: a
        loop that calls `set_epoch(state["epoch"])` after `load_state_dict(state)` resumes in the middle of that
        epoch, and runs later epochs in full.

        Args:
            epoch: Number of the epoch, at least 0.

        Raises:
            ValueError: `epoch` is negative.
            TypeError: `epoch` is not an integer.
        """
        epoch = integer("epoch", epoch, minimum=0)
        self._check_seed(epoch)
        self._pass = _Pass(start=self._pass.start if epoch == self.epoch else 0)
        self._later_epoch = None
        self.epoch = epoch

    def state_dict(self, samples_consumed: int | None = None) -> dict[str, int | bool]:
        """Return the progress of the epoch, to resume from with any number of ranks.

        The workers of a `DataLoader` prefetch up to `prefetch_factor * num_workers` batches of indices. A resumed
        run would skip these batches, so give the number of samples trained on: `samples_consumed=steps *
        batch_size`. The default, the number of indices yielded, is right without workers and between epochs.
        torchdata's `StatefulDataLoader` calls this for each batch, and saves the state of the last returned one.

        Local. All ranks have the same state after a full step, so one rank may save it for all. Its values are
        plain integers and booleans.

        Args:
            samples_consumed: Samples that this rank has consumed since the beginning of the epoch, or since the
                position at which a resumed epoch began.

        Returns:
            `epoch`; `position`, the number of samples of the epoch that all ranks have consumed; `length`, `seed`
            and `shuffle`, which `load_state_dict` compares.

        Raises:
            ValueError: `samples_consumed` is negative, or more than the indices yielded in this pass.
            TypeError: `samples_consumed` is not an integer.
        """
        given = self._pass.yielded
        consumed = given if samples_consumed is None else integer("samples_consumed", samples_consumed, 0)
        if consumed > given:
            raise ValueError(
                f"samples_consumed: expected at most {given}, what this rank was given in this pass through "
                f"epoch {self.epoch}, got {consumed}; count the samples of this rank only, from the beginning "
                "of the epoch or, in a resumed epoch, from where it was resumed"
            )
        return {
            "epoch": self.epoch,
            "length": self.length,
            "position": min(self._pass.start + consumed * self.num_replicas, self.length),
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume at the position of another sampler of the same dataset, at any number of ranks.

        The rest of the epoch is dealt to this sampler's ranks, so that both runs together take each sample once;
        samples are repeated or left out only at the end of the epoch. Length, seed and shuffling decide the epoch's
        order and must be equal: a difference is an error, since the run was set up in another way.

        Local. Load the same state on every rank, before the `DataLoader` is iterated.

        Args:
            state: The result of `state_dict` on any rank.

        Raises:
            ValueError: Entries are missing or unknown, the state is of a sampler with another length, seed
                or shuffling, or its numbers are out of range. The sampler is then unchanged.
            TypeError: The state is not a mapping, or an entry is of a wrong type.
        """
        _check_keys(state)
        for name in ("length", "seed", "shuffle"):
            mine, saved = getattr(self, name), state[name]
            if saved != mine:
                raise ValueError(
                    f"state: expected {name}={mine!r} as in this sampler, got {name}={saved!r}, which means "
                    "another order of the samples; construct the sampler as it was when the state was saved, "
                    "or begin without the state"
                )
        epoch = integer("epoch", state["epoch"], minimum=0)
        position = integer("position", state["position"], minimum=0)
        if position > self.length:
            raise ValueError(f"position: expected at most {self.length}, the length, got {position}")
        self._check_seed(epoch)
        self._later_epoch = self.epoch if self.epoch > epoch else None
        self.epoch = epoch
        self._pass = _Pass(start=position)

    def _check_seed(self, epoch: int) -> None:
        if not -(2**63) <= self.seed + epoch < 2**64:
            raise ValueError(
                f"seed: expected seed + epoch from -2**63 to 2**64 - 1, as torch.Generator takes, got "
                f"seed={self.seed} and epoch={epoch}; choose a smaller seed"
            )


def _length(dataset: object) -> int:
    # A tensor of one element is a dataset and would pass for an integer: len() decides first.
    if isinstance(dataset, Sized):
        length = len(dataset)
    elif isinstance(dataset, SupportsIndex):
        length = integer("dataset", dataset)
    else:
        raise TypeError(
            "dataset: expected a dataset with len() or a number of samples, got "
            f"{type(dataset).__name__}; give the number of samples instead"
        )
    if length < 1:
        raise ValueError(f"dataset: expected at least 1 sample, got {length}")
    return length


def _size_and_rank(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and this rank, each from the default group if it is None."""
    world = current_world()
    size, own = (1, 0) if world is None else (world.size, world.rank)
    num_replicas = integer("num_replicas", size if num_replicas is None else num_replicas, minimum=1)
    rank = integer("rank", own if rank is None else rank)
    if not 0 <= rank < num_replicas:
        raise ValueError(
            f"rank: expected 0 to {num_replicas - 1} for num_replicas={num_replicas}, got {rank}; give both, "
            "or neither after init_process_group()"
        )
    return num_replicas, rank


def _check_keys(state: Mapping[str, object]) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"state: expected the mapping of state_dict(), got {type(state).__name__}")
    if set(state) != set(_STATE_KEYS):
        raise ValueError(
            f"state: expected the entries {', '.join(_STATE_KEYS)} of a sampler's state_dict(), got "
            f"{', '.join(sorted(map(str, state))) or 'none'}"
        )
