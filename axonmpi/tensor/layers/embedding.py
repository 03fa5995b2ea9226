"""An embedding with rows, one for each word, that are sharded over the ranks of a group.

    ids   7 2 5          rank 0 has rows 0 to 3      .  r2 .
                         rank 1 has rows 4 to 7      r7 .  r5
                                                     r7 r2 r5     the sum over the ranks

Each rank looks up its own rows and leaves zeros for all other ids. A vocabulary that does not divide is padded with
rows of zeros. Source: Shoeybi et al. 2019, "Megatron-LM".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...groups.process_group import ProcessGroup
from ...utils.arguments import check_flags, integer
from ...utils.device import device_at
from ..regions import check_sequence, leave
from ..shards import Shard
from .sharded_layer import ShardedLayer, group_third

_ID_DTYPES = (torch.int64, torch.int32)


class VocabParallelEmbedding(ShardedLayer):
    """A `torch.nn.Embedding` with its rows sharded over the ranks; construction is collective.

    Forward is collective: one all-reduce, or one reduce-scatter with sequence parallelism. Backward is local, or
    one all-gather. First values are those of `torch.nn.Embedding` under rank 0's seed.

    Args:
        num_embeddings: Rows of the full embedding, any number: the last ranks' rows are padded with zeros.
        embedding_dim: Size of each row.
        padding_idx: A row that is zero at first and gets no gradient; negative ones count from the end. Or the
            group, which all layers take third.
        process_group: The ranks; None means all.
        sequence_parallel: Return this rank's slice of the sequence.
        sequence_dim: Dimension of the sequence in the output.
        device: Of the parameters; "meta" leaves them without values and sends nothing.
        dtype: Of the parameters.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: A size is not positive, or `padding_idx` is no row.

    Source: Shoeybi et al. 2019 (Megatron-LM).
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | ProcessGroup | None = None,
        process_group: ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        padding, group = group_third("padding_idx", padding_idx, process_group, None)
        check_flags(sequence_parallel=sequence_parallel)
        integer("num_embeddings", num_embeddings, minimum=1)
        integer("embedding_dim", embedding_dim, minimum=1)
        if padding is not None and not -num_embeddings <= integer("padding_idx", padding) < num_embeddings:
            raise ValueError(f"padding_idx: expected one of {num_embeddings} rows or None, got {padding}")
        shard = Shard.padded(0, num_embeddings, group.size)
        super().__init__(
            {"weight": (num_embeddings, embedding_dim)}, {"weight": shard}, group, device=device, dtype=dtype
        )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding is None else padding % num_embeddings
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = integer("sequence_dim", sequence_dim)
        self.reset_parameters()

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        process_group: ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
    ) -> VocabParallelEmbedding:
        """Make a layer of this rank's rows of an embedding, which all ranks have; local.

        Args:
            embedding: The full embedding; it is not changed.
            process_group: The ranks; None means all.
            sequence_parallel: As for the class.
            sequence_dim: As for the class.

        Raises:
            TypeError: `embedding` is none.
            ValueError: It has `max_norm`, `scale_grad_by_freq` or `sparse` set.
        """
        if not isinstance(embedding, nn.Embedding):
            raise TypeError(f"embedding: expected a torch.nn.Embedding, got {type(embedding).__name__}")
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ValueError(
                "embedding: max_norm, scale_grad_by_freq and sparse are not supported where rows are cut over "
                "ranks; leave this embedding whole"
            )
        layer = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            process_group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            device="meta",
            dtype=embedding.weight.dtype,
        )
        layer._take(embedding)
        return layer

    def _whole_layer(self) -> nn.Module:
        return nn.Embedding(
            self.num_embeddings,
            self.embedding_dim,
            self.padding_idx,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )

    def full_weight(self) -> Tensor:
        """Return the full weight, [num_embeddings, embedding_dim], without padding; collective."""
        return self._full("weight")

    def extra_repr(self) -> str:
        """Describe the layer and this rank's rows in `repr()`."""
        start = self.process_group.rank * self.shards["weight"].local
        stop = start + self.shards["weight"].rows(self.process_group.rank)
        return f"{self.num_embeddings}, {self.embedding_dim}, rows {start} to {stop} here"

    def forward(self, input: Tensor) -> Tensor:
        """Look rows up; collective.

        Args:
            input: [...] int64 or int32, row numbers, the same on all ranks.

        Returns:
            [..., embedding_dim]; with sequence parallelism this rank's slice of it along `sequence_dim`.

        Raises:
            TypeError: `input` has another dtype.
            ValueError: A number is no row, or the sequence cannot be divided; on all ranks.
        """
        self.mark_parts()
        self._check(input)
        rank, shard = self.process_group.rank, self.shards["weight"]
        start, rows = rank * shard.local, shard.rows(rank)
        padding = None if self.padding_idx is None else self.padding_idx - start
        if padding is not None and not 0 <= padding < rows:
            padding = None
        elsewhere = (input < start) | (input >= start + rows)
        local = (input - start).masked_fill_(elsewhere, 0)
        found = F.embedding(local, self.weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0)
        return leave(
            found,
            self.process_group,
            sequence_parallel=self.sequence_parallel,
            sequence_dim=self.sequence_dim,
        )

    def _check(self, input: Tensor) -> None:
        if input.dtype not in _ID_DTYPES:
            raise TypeError(f"expected row numbers of dtype int64 or int32, got {input.dtype}")
        if self.sequence_parallel:
            shape = (*input.shape, self.embedding_dim)
            check_sequence(shape, self.process_group, self._dim_of_sequence(shape))
        if not input.numel():
            return

        def message(least: int, most: int) -> str:
            return (
                f"expected row numbers from 0 to {self.num_embeddings - 1}, got {least} to {most} on rank "
                f"{self.process_group.rank}"
            )

        device_at(input.device).check_range(input, self.num_embeddings, message)
