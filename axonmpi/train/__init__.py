"""The trainer: a byte-level GPT on text, spread over the ranks of an MPI job.

    import axonmpi as ax
    from axonmpi.train import Config, Trainer

    config = Config().replace(steps=100, layers=2)
    summary = Trainer(config, ax.init_process_group()).run()
    print(summary.held_out_loss, summary.unigram_entropy)

It trains a small GPT with data, fully sharded, tensor and pipeline parallelism in any combination, and is an
example of the library's use; `axonmpi train` is the same from the command line. Read first `trainer.py`, the loop,
and `parallel_model.py`, the wrappers around the model; `config.py` has all settings. It imports every package but
`cli`.
"""

from __future__ import annotations

from .config import (
    CheckpointConfig,
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    TextConfig,
)
from .config_file import load_config
from .corpus import Corpus, load_corpus
from .model import GPT, generate
from .report.recorder import Summary
from .trainer import Trainer

__all__ = [
    "GPT",
    "CheckpointConfig",
    "Config",
    "Corpus",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "RunConfig",
    "Summary",
    "TextConfig",
    "Trainer",
    "generate",
    "load_config",
    "load_corpus",
]
