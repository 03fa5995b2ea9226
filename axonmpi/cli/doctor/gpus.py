"""Lines of `axonmpi doctor` on CUDA, NCCL, and the GPU that each rank has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from ...backends import check_choices, choose_device, library_text
from ...errors import NcclError
from ...launch.start import Started
from ...utils.device import device_at, driver_version, gpu_count, peer_access
from ...utils.text import counted, name_ranks
from .findings import Finding
from .ranks import gathered


@dataclass(frozen=True)
class _Gpu:
    """The GPUs of a rank.

    Attributes:
        count: Number of GPUs that it sees.
        text: The GPU that it uses, or the reason why it uses none.
        chosen: The GPU that it uses, or None.
        peers: The visible GPUs that reach each other's memory, as text; only on the first rank of each node.
    """

    count: int
    text: str = ""
    chosen: Any = None
    peers: str = ""


def gpus(started: Started | None) -> list[Finding]:
    """Describe CUDA, NCCL and the GPU of each rank, for rank 0 to print; collective."""
    own = _own_gpu(started)
    ranks = gathered(started, own)
    if not any(gpu.count for gpu in ranks):
        text = "none that this process sees" if torch.version.cuda else "none: torch is built without CUDA"
        return [Finding("GPU", text)]
    driver = driver_version()
    findings = [
        Finding("CUDA", f"{torch.version.cuda} of torch" + (f", driver {driver}" if driver else "")),
        _nccl(),
    ]
    for rank, gpu in enumerate(ranks):
        is_bad = gpu.count and gpu.chosen is None and started is not None
        todo = "see the reason; ranks without a GPU cannot use backend='nccl'"
        findings.append(
            Finding(f"rank {rank}", gpu.text, "warn", todo) if is_bad else Finding(f"rank {rank}", gpu.text)
        )
    try:
        check_choices([gpu.chosen for gpu in ranks if gpu.chosen is not None])
    except NcclError as error:
        findings.append(Finding("sharing", str(error), "warn", "start as many ranks on a node as it has GPUs"))
    for text in dict.fromkeys(gpu.peers for gpu in ranks if gpu.peers):
        nodes = name_ranks(rank for rank, gpu in enumerate(ranks) if gpu.peers == text)
        findings.append(Finding("peer access", f"{text}, on the node of {nodes}"))
    return findings


def _own_gpu(started: Started | None) -> _Gpu:
    """Return this rank's GPUs; local."""
    count = gpu_count()
    if not count:
        return _Gpu(count, "no GPU")
    if started is None:
        return _Gpu(
            count, f"sees {counted(count, 'GPU')}; which one it uses is not known, as no ranks were started"
        )
    at = started.topology
    peers = _peers(count) if at.local_rank == 0 else ""
    try:
        chosen = choose_device(at)
    except NcclError as error:
        return _Gpu(count, f"no GPU that can be used: {error}", None, peers)
    name = device_at(torch.device("cuda", chosen.index)).name
    text = f"local rank {at.local_rank}: GPU {chosen.index} of {count} visible, {name}, {chosen.identity}"
    return _Gpu(count, text, chosen, peers)


def _nccl() -> Finding:
    try:
        return Finding("NCCL", library_text())
    except NcclError as error:
        return Finding("NCCL", str(error), "warn", "pip install 'axonmpi[nccl]'")


def _peers(count: int) -> str:
    """Name the GPUs of this process that reach each other's memory; local."""
    pairs = list(combinations(range(count), 2))
    apart = [pair for pair in pairs if not (peer_access(*pair) and peer_access(*reversed(pair)))]
    if not pairs:
        return "not known, as each process sees one GPU"
    if not apart:
        return f"between all {count} GPUs"
    if len(apart) == len(pairs):
        return f"between none of the {count} GPUs: their data go through the CPU's memory"
    return f"between all {count} GPUs but {', '.join(f'{one} and {other}' for one, other in apart)}"
