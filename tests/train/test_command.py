"""The command line: flags, the settings file, refusals, and real runs of it."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from plain import plain_run

import axonmpi as ax
from axonmpi import cli
from axonmpi.cli import train
from axonmpi.environment import Launcher, process_environment, without_launcher_variables
from axonmpi.train import Config, Trainer

SMALL = [
    *("--layers=1", "--width=16", "--heads=2", "--sequence-length=16", "--global-batch=8", "--steps=12"),
    *("--held-out-sequences=8", "--data-limit=0.05", "--sample-length=5"),
]


@pytest.fixture
def no_start(monkeypatch):
    """Fail the test if MPI would be started."""

    def started():
        pytest.fail("the world was started")

    monkeypatch.setattr(train, "init_process_group", started)


def test_flags_set_what_they_name():
    config = train.parse(
        ["--lr", "1e-4", "--layers", "2", "--no-plot", "--data", "a.txt", "--positions", "learned"]
    )
    expected = {"lr": 1e-4, "layers": 2, "plot": False, "data": "a.txt", "positions": "learned"}
    assert config == Config().replace(**expected)
    assert train.parse([]) == Config()
    config = train.parse(
        ["--pp=2", "--schedule=zero-bubble", "--micro-batches=8", "--chunks=2", "--trace=a/b.json"]
    )
    expected = {"pp": 2, "schedule": "zero-bubble", "micro_batches": 8, "chunks": 2, "trace": "a/b.json"}
    assert config == Config().replace(**expected)
    config = train.parse(["--dp=2", "--tp=4", "--sequence-parallel", "--fsdp=full", "--pp=2"])
    assert config == Config().replace(dp=2, tp=4, sequence_parallel=True, fsdp="full", pp=2)


@pytest.mark.parametrize("flag", ["--config {}", "--config={}"])
def test_flags_override_the_file(tmp_path, flag):
    file = tmp_path / "settings.toml"
    file.write_text("lr = 0.5\nsteps = 7\n")
    config = train.parse([*flag.format(file).split(), "--lr", "1e-3"])
    assert config == Config().replace(lr=1e-3, steps=7)


def test_every_setting_is_a_flag_with_help(capsys):
    with pytest.raises(SystemExit) as ended:
        train.parse(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    missing = [name for name in ("config", *Config().flat()) if f"--{name.replace('_', '-')}" not in shown]
    assert missing == []
    assert "Bytes that the model sees at once" in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--stepz 3", ["--stepz", "--steps"]),
        ("--learning-rate 3", ["--learning-rate"]),
        ("extra", ["extra"]),
        ("--steps three", ["--steps", "three"]),
        ("--steps 0", ["steps: expected at least 1, got 0"]),
        ("--steps", ["--steps"]),
        ("--width 30", ["width: expected a multiple of heads = 4, got 30"]),
        ("--norm none", ["--norm", "rmsnorm"]),
        ("--pp 8", ["pp: expected at most layers = 4 stages", "8 x 1 = 8"]),
        ("--tp 8", ["tp: expected 1 or 2 or 4, which divide heads = 4, got 8"]),
        ("--tp 4 --sequence-parallel --sequence-length 30", ["sequence_length: expected a multiple of tp = 4"]),
        ("--dp -1", ["dp: expected at least 0, got -1"]),
        ("--schedule zero-bubble --chunks 3", ["chunks: expected 1 or 2 with zero-bubble"]),
        ("--lr nan", ["lr: expected a finite number"]),
        ("--config nowhere.toml", ["config file nowhere.toml cannot be read"]),
        ("--config", ["--config"]),
        ("--config settings.ini", [".toml, .yaml or .yml"]),
    ],
)
def test_bad_flags_are_refused_before_anything_starts(no_start, capsys, monkeypatch, arguments, expected):
    monkeypatch.setattr(train, "detect_launchers", list)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *arguments.split()])
    shown = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2
    assert [text for text in expected if text not in shown] == []


def test_an_unknown_key_in_the_file_is_refused_with_similar_ones(no_start, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "detect_launchers", list)
    file = tmp_path / "settings.yaml"
    file.write_text("global_bach: 8\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--config", str(file)])
    assert ended.value.code == 2
    assert "unknown setting 'global_bach': did you mean global_batch" in capsys.readouterr().err


def test_a_text_that_cannot_be_used_is_refused_before_anything_starts(no_start, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "detect_launchers", list)
    (tmp_path / "empty").touch()
    (tmp_path / "small").write_bytes(b"abc")
    refused = {
        "nowhere": "No such file",
        "empty": "expected text, found none",
        "small": "expected at least 258 bytes",
    }
    for name, expected in refused.items():
        assert cli.main(["train", "--data", str(tmp_path / name)]) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "launchers", [[], [Launcher("MPICH", 0, 1, 0, 1, ())], [Launcher("MPICH", 1, 4, 1, 4, ())]]
)
def test_on_one_node_a_missing_text_is_missing_for_all_ranks(no_start, monkeypatch, launchers):
    monkeypatch.setattr(train, "detect_launchers", lambda: launchers)
    assert cli.main(["train", "--data", "nowhere"]) == 2


@pytest.mark.parametrize(
    "launcher",
    [
        Launcher("MPICH", 1, 4, 1, 2, ()),
        Launcher("PMI", 1, 4, None, None, ()),
        Launcher("PMIx", 1, None, None, None, ()),
    ],
)
def test_a_rank_whose_node_lacks_the_text_meets_the_others_before_it_leaves(monkeypatch, capsys, launcher):
    group = SimpleNamespace(all_gather_object=lambda problem: ["", problem, "", ""])
    monkeypatch.setattr(train, "detect_launchers", lambda: [launcher])
    monkeypatch.setattr(train, "init_process_group", lambda: SimpleNamespace(default_group=group))
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--data", "nowhere"])
    assert ended.value.code == 2
    assert "error: rank 1: --data nowhere: cannot read nowhere: No such file" in capsys.readouterr().err


def test_what_only_the_started_world_knows_is_refused_too(capsys, monkeypatch):
    monkeypatch.setattr(train, "init_process_group", lambda: ax.World.mock(1))
    monkeypatch.setattr(train, "destroy_process_group", lambda: None)
    assert cli.main(["train", *SMALL, "--accumulation", "3"]) == 2
    assert "axonmpi train: error: global_batch: expected a multiple of" in capsys.readouterr().err


def test_divergence_is_an_exit_code_and_a_message(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(train, "init_process_group", lambda: ax.World.mock(1))
    monkeypatch.setattr(train, "destroy_process_group", lambda: None)
    assert cli.main(["train", *SMALL, "--lr", "1e30", "--gradient-clip", "0", "--out", str(tmp_path)]) == 1
    assert "training has diverged; try a smaller lr" in capsys.readouterr().err


def test_unknown_commands_are_refused(capsys):
    assert cli.main(["tran"]) == 2
    assert "unknown command 'tran': did you mean train" in capsys.readouterr().err
    assert cli.main(["fly"]) == 2
    assert "expected one of train, bench, chart, doctor" in capsys.readouterr().err
    assert cli.main([]) == 2
    assert "no command given" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-h", "--help", "help"])
def test_help_names_the_commands(capsys, flag):
    assert cli.main([flag]) == 0
    shown = capsys.readouterr().out
    assert [name for name in ("train", "bench", "doctor", "mpirun -n 4") if name not in shown] == []


@pytest.mark.parametrize(("rank", "shows"), [(0, True), (1, False), (None, True)])
def test_only_rank_zero_shows_help(capsys, monkeypatch, rank, shows):
    if rank is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert cli.main(["--version"]) == 0
    assert bool(capsys.readouterr().out) == shows
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    assert bool(capsys.readouterr().out) == shows


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Run the command on one rank, without a launcher; return the process's result and its folder."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-m", "axonmpi", "train", *SMALL, "--name", "first"]
    environment = {**without_launcher_variables(process_environment()), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    return finished, folder / "axonmpi-runs" / "first"


@pytest.mark.slow
def test_the_command_without_a_launcher(alone):
    finished, folder = alone
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "on 1 rank" in finished.stdout
    assert "unigram entropy" in finished.stdout
    files = ["loss.png", "metrics.jsonl", "sample.txt", "summary.json"]
    assert sorted(file.name for file in folder.iterdir()) == files
    assert len(losses(folder)) == 12


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_command_on_real_ranks_gives_the_same_losses(alone, tmp_path, ranks):
    result = ax.testing.launch(ranks, "-m", "axonmpi", "train", *SMALL, "--out", tmp_path, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(f"on {ranks} ranks") == 2  # the opening and the end, by rank 0 only
    assert losses(tmp_path) == pytest.approx(losses(alone[1]), abs=1e-4)


@pytest.mark.slow
def test_a_pipeline_on_real_ranks_gives_the_same_losses(tmp_path):
    flags = [*SMALL, "--layers=2", "--schedule=zero-bubble", "--trace", tmp_path / "trace.json"]
    result = ax.testing.launch(2, "-m", "axonmpi", "train", *flags, "--pp=2", "--out", tmp_path, timeout=240)
    assert (result.returncode, result.stderr) == (0, "")
    assert "a pipeline: zero bubble on 2 ranks" in result.stdout
    files = ["loss.png", "metrics.jsonl", "pipeline.png", "sample.txt", "summary.json", "trace.json"]
    assert sorted(file.name for file in tmp_path.iterdir()) == files
    config = train.parse([*SMALL, "--layers=2", "--out", str(tmp_path / "alone")])
    single = Trainer(config, ax.World.mock(1))
    single.run()
    assert losses(tmp_path) == pytest.approx([step.loss for step in single.steps], abs=1e-4)


@pytest.mark.slow
def test_eight_real_ranks_in_three_dimensions(tmp_path):
    settings = [*SMALL, "--layers=2", "--steps=30", "--lr=2e-3", "--warmup-steps=10"]
    layout = ["--dp=2", "--tp=2", "--pp=2", "--fsdp=full", "--sequence-parallel", "--schedule=zero-bubble"]
    result = ax.testing.launch(8, "-m", "axonmpi", "train", *settings, *layout, "--out", tmp_path, timeout=280)
    assert (result.returncode, result.stderr) == (0, "")
    assert "mesh: dp 2 x pp 2 x tp 2 = 8 ranks" in result.stdout
    assert losses(tmp_path) == pytest.approx(plain_run(train.parse(settings)).losses, abs=1e-4)


OTHER_FLAGS_ON_RANK_1 = """
import sys
from axonmpi import cli
from axonmpi.cli import train
from axonmpi.environment import detect_launchers

train._on_several_nodes = lambda: True
flags = sys.argv[2:] if detect_launchers()[0].rank == 1 else []
sys.exit(cli.main(["train", "--out", sys.argv[1], *flags]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "/nowhere"], "cannot read /nowhere: No such file"),
        (["--pp", "3"], "ranks 0 and 1 differ in pp"),
    ],
)
def test_what_one_rank_cannot_use_ends_the_job(tmp_path, flags, message):
    result = ax.testing.launch(2, OTHER_FLAGS_ON_RANK_1, tmp_path, *flags, timeout=240)
    assert (result.returncode, result.timed_out, result.leftover) == (2, False, ())
    assert message in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stepz", "3"], "--stepz"),
        (["--data", "/nowhere"], "No such file"),
        ([*SMALL, "--global-batch", "9"], "global_batch: expected a multiple of"),
        (["--pp", "3"], "tp x pp = 1 x 3 = 3, but there are 2 ranks: take for example dp x tp x pp = "),
    ],
)
def test_real_ranks_refuse_together_with_code_2(flags, message):
    result = ax.testing.launch(2, "-m", "axonmpi", "train", *flags, timeout=240)
    assert result.returncode == 2
    assert result.stderr.count(message) == 1
    assert result.leftover == ()
