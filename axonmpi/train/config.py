"""The trainer's settings: their names, types, defaults and texts, in seven frozen dataclasses.

    Config
      ├─ model      ModelConfig       the network's shape
      ├─ text       TextConfig        the training text and the held-out text
      ├─ optimizer  OptimizerConfig   AdamW and its learning rate
      ├─ run        RunConfig         steps, batch, output files
      ├─ pipeline   PipelineConfig    stages of the model on different ranks
      ├─ mesh       MeshConfig        replicas, ranks that sequences are cut over or layers sharded on
      └─ checkpoint CheckpointConfig  when to save, and the checkpoint to go on from

The name of a setting is the same here, as a flag (`--global-batch 32`) and in a file (`global_batch = 32`).
`axonmpi train --help` shows the text of each under `Attributes`. A group's constructor raises `TypeError` for a
value of the wrong type, and `ValueError` for one that is out of range or contradicts another setting.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from .setting_types import AboveZero, Count, Fraction, Limit, NotNegative, Positive, Settings

_HeldOutFraction = Annotated[float, Limit("more than 0 and at most 0.5", lambda number: 0 < number <= 0.5)]
# with 1 the average would keep its first value
_Decay = Annotated[float, Limit("0 to 1, and less than 1", lambda number: 0 <= number < 1)]


@dataclass(frozen=True)
class ModelConfig(Settings):
    """The network's shape.

    Attributes:
        layers: Number of transformer blocks.
        width: Features of each position; a multiple of heads.
        heads: Attention heads of each block.
        mlp_ratio: Hidden features of a block's perceptron, as a multiple of width.
        sequence_length: Bytes that the model sees at once.
        positions: The encoding of positions: rotated queries and keys, or a learned vector for each position.
        norm: Normalization before each attention and perceptron.
        tied_embeddings: Use one matrix for the input embedding and the output layer.
    """

    layers: Positive = 4
    width: Positive = 128
    heads: Positive = 4
    mlp_ratio: Positive = 4
    sequence_length: Positive = 128
    positions: Literal["rotary", "learned"] = "rotary"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    tied_embeddings: bool = True

    def _check(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width: expected a multiple of heads = {self.heads}, got {self.width}")
        if self.positions == "rotary" and self.width // self.heads % 2:
            raise ValueError(
                f"width: rotary positions need an even width / heads, got {self.width} / {self.heads} = "
                f"{self.width // self.heads}; change width or heads, or take learned positions"
            )


@dataclass(frozen=True)
class TextConfig(Settings):
    """The training text and the held-out text.

    Attributes:
        data: A file, or a folder whose files are read in sorted order; without it, Python's own library sources.
        data_limit: Megabytes (10^6 bytes) of text to use at most; files later in the order are left out.
        held_out_fraction: Fraction of the text, in blocks, that is never trained on.
    """

    data: Path | None = None
    data_limit: AboveZero = 8.0
    held_out_fraction: _HeldOutFraction = 0.05


@dataclass(frozen=True)
class OptimizerConfig(Settings):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), and a warm-up followed by half a cosine.

    Attributes:
        lr: Highest learning rate, at the end of the warm-up.
        lr_final: Learning rate of the last step, as a fraction of lr.
        warmup_steps: Steps in which the learning rate rises from near zero.
        weight_decay: Decay of the matrices, not of the norms.
        beta1: Decay of the average of gradients.
        beta2: Decay of the average of squared gradients.
        gradient_clip: Largest norm of the whole gradient; 0 leaves it as it is.
    """

    lr: AboveZero = 3e-3
    lr_final: Fraction = 0.1
    warmup_steps: Count = 20
    weight_decay: NotNegative = 0.1
    beta1: _Decay = 0.9
    beta2: _Decay = 0.98
    gradient_clip: NotNegative = 1.0


@dataclass(frozen=True)
class RunConfig(Settings):
    """Length of the run, data parallelism, and output files.

    Attributes:
        name: Name of the run and of its folder.
        out: Folder for everything the run writes, default axonmpi-runs/NAME; an earlier run's files are replaced.
        seed: Decides the initial weights, the order of the data and the sample.
        steps: Updates of the weights.
        global_batch: Sequences of each step over all ranks together, so results do not depend on the number of
            ranks.
        accumulation: Batches in which each rank processes its sequences of a step; more batches need less memory.
        strategy: When gradients are averaged: while backward runs, at its end, or by one call after it.
        fsdp: Sharding over the replicas: none (data parallelism), or of parameters, gradients and optimizer
            state; parameters are gathered when needed (full), or kept for backward (grad); hybrid is full on each
            node.
        device: Device of the model: the CPU, or a GPU for each rank; auto means GPUs if there are GPUs and NCCL.
        dtype: Dtype of the model's computation; parameters, their updates and sums of gradients stay in float32.
        cpu_offload: With fsdp, the state in files in the run's folder instead of memory, with GPUs in the CPU's
            memory: parameters, or optimizer state too.
        evaluate_every: Steps between two held-out losses; 0 means only at the beginning and the end.
        held_out_sequences: Held-out sequences in each evaluation, spread evenly; 0 means all.
        sample_length: Bytes of text to generate at the end; 0 generates none.
        temperature: Randomness of that text: 0 takes the likeliest byte each time.
        prompt: Beginning of that text.
        progress: One line that is redrawn, a line for each tenth, or nothing; auto redraws on a terminal.
        trace: Folder for a trace of the run, which axonmpi trace and Perfetto show; with pipelines it has the times
            of the last step for axonmpi chart as well.
        plot: Draw the loss curve at the end, and with trace the times of the pipeline.
    """

    name: str = "gpt"
    out: Path | None = None
    seed: Count = 0
    steps: Positive = 250
    global_batch: Positive = 16
    accumulation: Positive = 1
    strategy: Literal["overlapped", "synchronous", "no_sync"] = "overlapped"
    fsdp: Literal["none", "full", "grad", "hybrid"] = "none"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    cpu_offload: Literal["none", "params", "full"] = "none"
    evaluate_every: Count = 50
    held_out_sequences: Count = 128
    sample_length: Count = 200
    temperature: NotNegative = 0.7
    prompt: str = "def "
    progress: Literal["auto", "live", "plain", "off"] = "auto"
    trace: Path | None = None
    plot: bool = True

    @property
    def folder(self) -> Path:
        """The folder of the run's files."""
        return self.out or Path("axonmpi-runs") / self.name

    def _check(self) -> None:
        if not self.name or self.name in (".", "..") or any(sign in self.name for sign in "/\\\0"):
            raise ValueError(f"name: expected the name of a folder without slashes, got {self.name!r}; see --out")
        if self.cpu_offload != "none" and self.fsdp == "none":
            raise ValueError(f"cpu_offload: {self.cpu_offload!r} needs fsdp to be full, grad or hybrid")
        if self.fsdp != "none" and self.strategy != "overlapped":
            raise ValueError(f"strategy: {self.strategy!r} is for data parallelism; leave it out with fsdp")
        if self.sample_length and not self.prompt:
            raise ValueError("prompt: expected at least one character, got none; or set sample_length to 0")


@dataclass(frozen=True)
class PipelineConfig(Settings):
    """A pipeline, whose ranks have stages of the model; none with all settings at their defaults.

    Attributes:
        pp: Ranks of a pipeline, each with stages of the model; more ranks make several pipelines.
        schedule: Order in which the ranks of a pipeline compute; axonmpi chart draws it.
        micro_batches: Micro-batches of a batch; 0 means 4 for each rank of a pipeline, if there are sequences
            enough.
        chunks: Stages on each rank; 0 means 2 with interleaved-1f1b, if there are blocks enough, and else 1.
    """

    pp: Positive = 1
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"] = "1f1b"
    micro_batches: Count = 0
    chunks: Count = 0

    @property
    def is_wanted(self) -> bool:
        """Whether there is a pipeline, if only of one rank."""
        return self != PipelineConfig()

    def stages_per_rank(self, layers: int) -> int:
        """Return the number of stages on each rank for a model of `layers` blocks."""
        if self.chunks:
            return self.chunks
        return 2 if self.schedule == "interleaved-1f1b" and layers >= 2 * self.pp else 1

    def _check(self) -> None:
        if self.schedule == "zero-bubble" and self.chunks > 2:
            raise ValueError(
                f"chunks: expected 1 or 2 with zero-bubble, got {self.chunks}; interleaved-1f1b takes any number"
            )


@dataclass(frozen=True)
class MeshConfig(Settings):
    """The layout of the ranks: dp x cp x tp x pp is their number.

    Attributes:
        dp: Replicas of the model, each with its slice of the batch; 0 means as many as the ranks are enough for.
        cp: Ranks that every sequence is cut over, a block of its bytes each; without tp and pp.
        tp: Ranks that every layer of the model is sharded on.
        sequence_parallel: With tp, shard the activations between the layers as well, along the sequence.
    """

    dp: Count = 0
    cp: Positive = 1
    tp: Positive = 1
    sequence_parallel: bool = False


@dataclass(frozen=True)
class CheckpointConfig(Settings):
    """Checkpoints: when to save, and how to go on. They are in the folder `checkpoints` of the run.

    Attributes:
        resume: The checkpoint to go on from: none begins anew, auto takes the newest checkpoint of the run if there
            is one; else the path of a checkpoint, or of the folder of a run.
        checkpoint_every: Steps between two checkpoints; 0 means only at the end, and when the run is told to stop.
        keep: Number of checkpoints to keep, the newest.
        time_limit: Seconds after which the job is over: before that the run saves a checkpoint and stops; 0 means
            the end of the Slurm job, if this is one.
    """

    resume: str = "none"
    checkpoint_every: Count = 0
    keep: Positive = 3
    time_limit: NotNegative = 0.0

    def _check(self) -> None:
        if not self.resume:
            raise ValueError("resume: expected none, auto or the path of a checkpoint, got nothing")


@dataclass(frozen=True)
class Config:
    """All settings of a training run; the defaults make a first run of about a minute.

    Raises:
        TypeError: A group is not of its class.
        ValueError: Settings of different groups contradict each other.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    text: TextConfig = field(default_factory=TextConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        for name, group in _groups().items():
            if not isinstance(getattr(self, name), group):
                raise TypeError(f"{name}: expected {group.__name__}, got {type(getattr(self, name)).__name__}")
        self._check_tensor()
        self._check_pipeline()

    def _check_tensor(self) -> None:
        mesh, heads, length = self.mesh, self.model.heads, self.model.sequence_length
        if mesh.cp > 1 and (mesh.tp > 1 or self.pipeline.is_wanted):
            raise ValueError(
                f"cp: expected 1 together with tp or a pipeline, got {mesh.cp}: leave --tp and the settings of the "
                "pipeline out, or cp; dp and fsdp go with cp"
            )
        if heads % mesh.tp:
            valid = " or ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
            raise ValueError(
                f"tp: expected {valid}, which divide heads = {heads}, got {mesh.tp}; or take a multiple of "
                f"{mesh.tp} heads, and a width that divides by them"
            )
        if mesh.sequence_parallel and length % mesh.tp:
            raise ValueError(
                f"sequence_length: expected a multiple of tp = {mesh.tp} with sequence_parallel, got {length}: "
                f"take for example {-(-length // mesh.tp) * mesh.tp}, or leave sequence_parallel out"
            )

    def _check_pipeline(self) -> None:
        pipeline, layers = self.pipeline, self.model.layers
        chunks = pipeline.stages_per_rank(layers)
        if pipeline.pp * chunks > layers:
            raise ValueError(
                f"pp: expected at most layers = {layers} stages, since each has a block, got pp x chunks = "
                f"{pipeline.pp} x {chunks} = {pipeline.pp * chunks}: take fewer, or more layers"
            )

    def replace(self, **settings: Any) -> Config:
        """Return a copy in which some settings, from whichever group, have other values.

        Args:
            **settings: Names of settings, such as `lr=1e-3, layers=2`.

        Raises:
            ValueError: There is no setting of that name (the message names similar ones), or its value is bad.
            TypeError: A value is of the wrong type.
        """
        group_of = _group_of_each_setting()
        changes: dict[str, dict[str, Any]] = {name: {} for name in _groups()}
        for name, value in settings.items():
            if name not in group_of:
                raise ValueError(_unknown_setting(name))
            changes[group_of[name]][name] = value
        groups = {name: dataclasses.replace(getattr(self, name), **given) for name, given in changes.items()}
        return Config(**groups)

    def flat(self) -> dict[str, Any]:
        """Return every setting by its name, paths as text, for a TOML or JSON file."""
        values = {name: getattr(getattr(self, group), name) for name, group in _group_of_each_setting().items()}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> Config:
        """Make a configuration from named settings, the rest at their defaults.

        Args:
            settings: Settings by name, `-` and `_` alike; they may be grouped in tables called `model`,
                `text`, `optimizer`, `run`, `pipeline`, `mesh` and `checkpoint`.

        Raises:
            ValueError: A name is unknown, in another group's table or given twice, or a value is bad.
            TypeError: A value is of the wrong type.
        """
        return cls().replace(**_ungrouped(settings))


def _groups() -> dict[str, type[Settings]]:
    hints: dict[str, type[Settings]] = get_type_hints(Config)
    return hints


def _group_of_each_setting() -> dict[str, str]:
    return {setting.name: name for name, group in _groups().items() for setting in dataclasses.fields(group)}


def _ungrouped(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without their groups' tables."""
    groups, group_of = _groups(), _group_of_each_setting()
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        in_table = key in groups and isinstance(value, Mapping)
        for name, setting in (value if in_table else {key: value}).items():
            canonical = str(name).replace("-", "_")
            if in_table and group_of.get(canonical, key) != key:
                raise ValueError(f"{name} belongs to the table {group_of[canonical]}, got it in {key}: move it")
            if canonical in flat:
                raise ValueError(f"{name} is given twice: keep one")
            flat[canonical] = setting
    return flat


def _unknown_setting(name: str) -> str:
    near = difflib.get_close_matches(name, _group_of_each_setting(), n=3)
    if near:
        return f"unknown setting {name!r}: did you mean {' or '.join(near)}?"
    return f"unknown setting {name!r}: expected one of {', '.join(sorted(_group_of_each_setting()))}"
