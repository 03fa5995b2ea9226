"""Settings: what they accept, what they refuse, and the files they come from."""

import inspect
import math
from pathlib import Path

import pytest
from helpers.compare import refused

from axonmpi.train import (
    CheckpointConfig,
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    TextConfig,
    load_config,
)


def test_names_lead_to_values_whatever_their_group():
    changed = Config().replace(lr=0.5, layers=2, name="other", data="text.txt")
    assert (changed.optimizer.lr, changed.model.layers, changed.run.name) == (0.5, 2, "other")
    assert (changed.text.data, changed.run.folder) == (Path("text.txt"), Path("axonmpi-runs/other"))
    assert Config().replace(out="elsewhere").run.folder == Path("elsewhere")


def test_flat_settings_make_the_same_configuration_again():
    original = Config().replace(data="a/b", lr=1e-4, positions="learned", plot=False)
    assert Config.from_mapping(original.flat()) == original


def test_names_are_unique_over_the_groups():
    groups = ModelConfig, TextConfig, OptimizerConfig, RunConfig, PipelineConfig, MeshConfig, CheckpointConfig
    names = [name for group in groups for name in inspect.signature(group).parameters]
    assert len(names) == len(set(names)) == len(Config().flat())


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("layers", 0, "at least 1"),
        ("width", -4, "at least 1"),
        ("heads", 3, "multiple of heads = 3"),
        ("mlp_ratio", 0, "at least 1"),
        ("sequence_length", 0, "at least 1"),
        ("positions", "absolute", "'rotary', 'learned'"),
        ("norm", "batchnorm", "'rmsnorm', 'layernorm'"),
        ("data_limit", 0, "more than 0"),
        ("held_out_fraction", 0, "more than 0"),
        ("held_out_fraction", 0.6, "at most 0.5"),
        ("lr", 0, "more than 0"),
        ("lr", math.nan, "finite"),
        ("lr", math.inf, "finite"),
        ("lr_final", 1.5, "0 to 1"),
        ("warmup_steps", -1, "at least 0"),
        ("weight_decay", -0.1, "at least 0"),
        ("beta1", -0.1, "0 to 1"),
        ("beta2", 1.0, "less than 1"),
        ("gradient_clip", -1, "at least 0"),
        ("name", "", "without slashes"),
        ("name", "..", "without slashes"),
        ("name", "a/b", "without slashes"),
        ("seed", -1, "at least 0"),
        ("steps", 0, "at least 1"),
        ("global_batch", 0, "at least 1"),
        ("accumulation", 0, "at least 1"),
        ("strategy", "eager", "'overlapped', 'synchronous', 'no_sync'"),
        ("evaluate_every", -1, "at least 0"),
        ("held_out_sequences", -1, "at least 0"),
        ("sample_length", -1, "at least 0"),
        ("temperature", -0.5, "at least 0"),
        ("prompt", "", "at least one character"),
        ("progress", "loud", "'auto', 'live', 'plain', 'off'"),
        ("dp", -1, "at least 0"),
        ("tp", 0, "at least 1"),
        ("tp", 3, "1 or 2 or 4, which divide heads = 4, got 3; or take a multiple of 3 heads"),
        ("pp", 0, "at least 1"),
        ("pp", 5, "at most layers = 4 stages, .*5 x 1 = 5"),
        ("micro_batches", -1, "at least 0"),
        ("chunks", -1, "at least 0"),
        ("schedule", "2f2b", "'gpipe', '1f1b', 'interleaved-1f1b', 'zero-bubble'"),
    ],
)
def test_values_out_of_range_are_refused(name, value, expected):
    with pytest.raises(ValueError, match=expected) as caught:
        Config().replace(**{name: value})
    assert name in str(caught.value) or name == "heads"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("layers", 2.5), ("layers", True), ("layers", "2"), ("lr", "fast"), ("lr", True), ("plot", 1)),
        ("data", 3),
    ],
)
def test_values_of_a_wrong_type_are_refused(name, value):
    refused((TypeError, ValueError), (lambda: Config().replace(**{name: value}), f"{name}: expected"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pp": 2, "chunks": 3}, r"pp x chunks = 2 x 3 = 6: take fewer, or more layers"),
        ({"schedule": "zero-bubble", "chunks": 3}, "chunks: expected 1 or 2 with zero-bubble, got 3"),
        ({"cpu_offload": "full"}, "cpu_offload: 'full' needs fsdp to be full, grad or hybrid"),
        ({"fsdp": "full", "strategy": "no_sync"}, "strategy: 'no_sync' is for data parallelism"),
        ({"width": 12}, "learned positions"),
        (
            {"tp": 4, "sequence_parallel": True, "sequence_length": 18},
            r"sequence_length: .* tp = 4 with sequence_parallel, got 18: take .* 20",
        ),
    ],
)
def test_settings_that_contradict_others(settings, message):
    refused(ValueError, (lambda: Config().replace(**settings), message))


def test_settings_that_fit_others():
    assert Config().replace(width=12, heads=4, positions="learned").model.width == 12
    assert Config().replace(pp=2, chunks=3, layers=6).pipeline.stages_per_rank(6) == 3
    assert Config().replace(tp=4, sequence_length=18).mesh.tp == 4
    assert Config().replace(tp=2, sequence_parallel=True, sequence_length=18).mesh.sequence_parallel


def test_a_pipeline_is_wanted_as_soon_as_one_of_its_settings_is_given():
    assert not Config().replace(pp=1, schedule="1f1b", steps=3).pipeline.is_wanted
    for settings in ({"pp": 2}, {"schedule": "gpipe"}, {"micro_batches": 1}, {"chunks": 1}):
        assert Config().replace(**settings).pipeline.is_wanted


def test_names_and_groups_that_are_not_there():
    refused(
        (TypeError, ValueError),
        (lambda: Config(optimizer={"lr": 1.0}), "optimizer: expected OptimizerConfig, got dict"),
        (lambda: Config().replace(warmup_step=3), "'warmup_step': did you mean warmup_steps"),
        (lambda: Config().replace(zzz=3), "'zzz': expected one of accumulation, beta1"),
    )


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("toml", 'lr = 0.002\nglobal-batch = 32\ndata = "text.txt"\nplot = false\n'),
        ("toml", '[optimizer]\nlr = 2e-3\n[run]\nglobal_batch = 32\nplot = false\n[text]\ndata = "text.txt"\n'),
        ("yaml", "lr: 2e-3\nglobal_batch: 32\ndata: text.txt\nplot: false\n"),  # YAML takes 2e-3 for text
        ("yml", "pipeline: {}\nrun:\n  global-batch: 32\n  plot: false\ntext:\n  data: text.txt\nlr: 0.002\n"),
    ],
)
def test_files_of_both_kinds_flat_or_in_tables(tmp_path, suffix, content):
    file = tmp_path / f"settings.{suffix}"
    file.write_text(content)
    assert load_config(file) == Config().replace(lr=0.002, global_batch=32, data="text.txt", plot=False)
    file.write_text("")
    assert load_config(file) == Config()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", "{}", "ending in .toml, .yaml or .yml"),
        ("a.toml", "lr = ", "a.toml"),
        ("a.yaml", "lr: [", "not valid YAML"),
        ("a.yaml", "- lr\n- steps\n", "NAME: VALUE, got list"),
        ("a.toml", "learning_rate = 1", "unknown setting 'learning_rate'"),
        ("a.toml", "warmup = 1", "did you mean warmup_steps"),
        ("a.yaml", "2: 3", "unknown setting '2'"),
        ("a.toml", "[run]\nlr = 1.0", "belongs to the table optimizer, got it in run"),
        ("a.toml", "[run]\nstep = 1", "did you mean steps"),
        ("a.toml", "lr = 1.0\n[optimizer]\nlr = 1.0", "lr is given twice"),
        ("a.toml", "run = 3", "unknown setting 'run'"),
        ("a.toml", "steps = 1.5", "steps: expected a value of type int"),
        ("a.toml", "steps = 0", "steps: expected at least 1"),
    ],
)
def test_bad_files_are_named_with_what_is_wrong(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=expected) as caught:
        load_config(tmp_path / name)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["missing.toml", "folder.toml", "binary.yaml"])
def test_files_that_cannot_be_read(tmp_path, name):
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    refused(ValueError, (lambda: load_config(tmp_path / name), "cannot be read"))
