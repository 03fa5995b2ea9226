"""Every setting of the trainer, in six frozen dataclasses.

    Config
      ├─ model      ModelConfig       the network's shape
      ├─ text       TextConfig        what it learns from, what is held out
      ├─ optimizer  OptimizerConfig   AdamW and the course of its learning rate
      ├─ run        RunConfig         steps, batch, what is written where
      ├─ pipeline   PipelineConfig    whether ranks have stages of the model, and how they go about it
      └─ mesh       MeshConfig        how many replicas there are, and whether ranks divide the layers

The name of a setting is the same here, as a flag (`--global-batch 32`) and in a file (`global_batch = 32`).
The text under each is also what `axonmpi train --help` shows. A dataclass that exists is valid: its
constructor raises `ValueError` or `TypeError` otherwise.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from .settings import AboveZero, Count, Fraction, Limit, NotNegative, Positive, Settings

__all__ = ["Config", "MeshConfig", "ModelConfig", "OptimizerConfig", "PipelineConfig", "RunConfig", "TextConfig"]

_HeldOutFraction = Annotated[float, Limit("more than 0 and at most 0.5", lambda number: 0 < number <= 0.5)]
# with 1 nothing is ever learned
_Decay = Annotated[float, Limit("0 to 1, and less than 1", lambda number: 0 <= number < 1)]


@dataclass(frozen=True)
class ModelConfig(Settings):
    """The network's shape.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is out of range, or `width` does not divide by `heads`.
    """

    layers: Positive = 4
    """Number of transformer blocks."""
    width: Positive = 128
    """Features of each position; a multiple of heads."""
    heads: Positive = 4
    """Attention heads of each block."""
    mlp_ratio: Positive = 4
    """Hidden features of a block's perceptron, as a multiple of width."""
    sequence_length: Positive = 128
    """Bytes that the model sees at once."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How positions are told apart: by rotating queries and keys, or by a learned vector each."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalization before each attention and perceptron."""
    tied_embeddings: bool = True
    """Use one matrix for the input embedding and the output layer."""

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
    """What the model learns from.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is out of range.
    """

    data: Path | None = None
    """A file, or a folder whose files are read in sorted order; without it, Python's own library sources."""
    data_limit: AboveZero = 8.0
    """Megabytes (10^6 bytes) of text to use at most; what comes later in the order is left out."""
    held_out_fraction: _HeldOutFraction = 0.05
    """Part of the text, in whole blocks, that is never trained on."""


@dataclass(frozen=True)
class OptimizerConfig(Settings):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), and a warm-up followed by half a cosine.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is out of range.
    """

    lr: AboveZero = 3e-3
    """Learning rate at the end of the warm-up, its highest."""
    lr_final: Fraction = 0.1
    """Learning rate of the last step, as a fraction of lr."""
    warmup_steps: Count = 20
    """Steps in which the learning rate rises from near zero."""
    weight_decay: NotNegative = 0.1
    """Decay of the matrices, not of the norms."""
    beta1: _Decay = 0.9
    """Decay of the average of gradients."""
    beta2: _Decay = 0.98
    """Decay of the average of squared gradients."""
    gradient_clip: NotNegative = 1.0
    """Largest norm of the whole gradient; 0 leaves it as it is."""


@dataclass(frozen=True)
class RunConfig(Settings):
    """How long, how divided over the ranks, and what is written where.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is out of range.
    """

    name: str = "gpt"
    """Name of the run; names its folder."""
    out: Path | None = None
    """Folder for everything the run writes, default axonmpi-runs/NAME; an earlier run's files are replaced."""
    seed: Count = 0
    """Decides the initial weights, the order of the data and the sample."""
    steps: Positive = 250
    """Updates of the weights."""
    global_batch: Positive = 16
    """Sequences of each step over all ranks together, so results do not depend on the number of ranks."""
    accumulation: Positive = 1
    """Parts in which each rank goes through its sequences of a step; more need less memory."""
    strategy: Literal["overlapped", "synchronous", "no_sync"] = "overlapped"
    """When gradients are averaged: while backward runs, at its end, or by one call after it."""
    fsdp: Literal["none", "full", "grad", "hybrid"] = "none"
    """What is divided among the replicas: nothing (data parallelism), or parameters, gradients and optimizer state;
    parameters are gathered when needed (full), or kept for backward (grad); hybrid is full on each node."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in; parameters, their updates and the sums of gradients stay in float32."""
    cpu_offload: Literal["none", "params", "full"] = "none"
    """What lies in files in the run's folder instead of memory, with fsdp: parameters, or optimizer state too."""
    evaluate_every: Count = 50
    """Steps between two held-out losses; 0 means only at the beginning and the end."""
    held_out_sequences: Count = 128
    """Held-out sequences in each of them, spread evenly; 0 means all there are."""
    sample_length: Count = 200
    """Bytes of text to generate at the end; 0 generates none."""
    temperature: NotNegative = 0.7
    """Randomness of that text: 0 takes the likeliest byte each time."""
    prompt: str = "def "
    """What that text goes on from."""
    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """One line that is redrawn, a line for each tenth, or nothing; auto redraws where a terminal shows it."""
    plot: bool = True
    """Draw the loss curve at the end, and with trace the times of the pipeline."""

    @property
    def folder(self) -> Path:
        """Where the run writes."""
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
    """A pipeline: ranks have stages of the model. With all settings at their defaults there is none.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is out of range, or the schedule does not take so many chunks.
    """

    pp: Positive = 1
    """Ranks of a pipeline, which have the model's stages; where ranks are left there are several pipelines."""
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"] = "1f1b"
    """In which order the ranks of a pipeline compute; axonmpi chart draws it."""
    micro_batches: Count = 0
    """Parts in which a batch goes through the stages; 0 means 4 for each rank of a pipeline, where there are
    sequences enough."""
    chunks: Count = 0
    """Stages on each rank; 0 means 2 with interleaved-1f1b, where there are blocks enough, and else 1."""
    trace: Path | None = None
    """File for the times of the last step, which Perfetto and axonmpi chart open."""

    @property
    def is_wanted(self) -> bool:
        """Whether there is a pipeline, be it of one rank."""
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
    """How the ranks are laid out: dp x tp x pp is their number.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is out of range.
    """

    dp: Count = 0
    """Replicas of the model, each with its part of the batch; 0 means as many as the ranks are enough for."""
    tp: Positive = 1
    """Ranks that divide every layer of the model among them."""
    sequence_parallel: bool = False
    """With tp, divide what is between the layers among the same ranks as well, along the sequence."""


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

    def __post_init__(self) -> None:
        for name, group in _groups().items():
            if not isinstance(getattr(self, name), group):
                raise TypeError(f"{name}: expected {group.__name__}, got {type(getattr(self, name)).__name__}")
        self._check_tensor()
        self._check_pipeline()

    def _check_tensor(self) -> None:
        mesh, heads, length = self.mesh, self.model.heads, self.model.sequence_length
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
        """Return every setting by its name, with paths as text: what a TOML or JSON file can hold."""
        values = {name: getattr(getattr(self, group), name) for name, group in _group_of_each_setting().items()}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> Config:
        """Make a configuration from named settings, the rest at their defaults.

        Args:
            settings: Settings by name, `-` and `_` alike; they may be grouped in tables called `model`,
                `text`, `optimizer`, `run`, `pipeline` and `mesh`.

        Raises:
            ValueError: A name is unknown, stands in another group's table or comes twice, or a value is bad.
            TypeError: A value is of the wrong type.
        """
        return cls().replace(**_ungrouped(settings))


def _groups() -> dict[str, type[Settings]]:
    hints: dict[str, type[Settings]] = get_type_hints(Config)
    return hints


def _group_of_each_setting() -> dict[str, str]:
    return {setting.name: name for name, group in _groups().items() for setting in dataclasses.fields(group)}


def _ungrouped(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Lift the settings out of their groups' tables."""
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
