"""Checkpoints of a model and its training state: standard safetensors files with full tensors.

All ranks write the files together, each rank its own shards, and any number of ranks in any layout loads them: DDP,
FSDP, tensor parallelism and pipelines have the same files. `saving.py` and `loading.py` have the two calls,
`folder.py` the checkpoints of a run, and `preemption.py` decides when to save before a job ends.

    saving, loading, folder, preemption     the public calls
    shards/                                 this rank's shards of a model, an optimizer and random states
    global_specs, global_plan               the layout of the files, which all ranks compute alike
    writing/, reading                       bytes, to files and from them
    files/                                  formats, checksums, the folder and its lock
    tools/                                  inspect, verify and convert, without a model

It imports wrappers and pipelines, and packages below them; nothing there depends on checkpoints.
"""

from __future__ import annotations

from .folder import CheckpointFolder
from .loading import CheckpointInfo, load_checkpoint
from .preemption import PreemptionGuard
from .saving import save_checkpoint

__all__ = ["CheckpointFolder", "CheckpointInfo", "PreemptionGuard", "load_checkpoint", "save_checkpoint"]
