"""Datasets on many ranks: prepared by one rank, held once on a node, and dealt to all.

    main_process_first    a block that one rank runs before the others: a download, a cache
    node_shared           an array or a tensor that the ranks of a node share
    DistributedSampler    the samples of an epoch dealt to the ranks, also from its middle on

It imports `groups` and `backends`.
"""

from __future__ import annotations

from .first_rank import main_process_first
from .sampler import DistributedSampler
from .shared_memory import node_shared

__all__ = ["DistributedSampler", "main_process_first", "node_shared"]
