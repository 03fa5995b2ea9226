"""The command line: flags, the settings file, refusals, and real runs of it."""

import itertools
import signal
from types import SimpleNamespace

import pytest
from helpers.compare import refused
from helpers.limits import limit
from helpers.plain_training import metrics_in, plain_run

import axonmpi as ax
from axonmpi import cli
from axonmpi.cli import train
from axonmpi.launch.launcher_variables import Launcher
from axonmpi.train import Config, trainer

SMALL = [
    *("--layers=1", "--width=16", "--heads=2", "--sequence-length=16", "--global-batch=8", "--steps=12"),
    *("--held-out-sequences=8", "--data-limit=0.05", "--sample-length=5", "--device=cpu"),
]


def code_of(*arguments):
    """Run a command in this process, and return its exit code."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as ended:
        return ended.code


@pytest.fixture
def no_start(monkeypatch):
    """Fail the test if MPI would be started; there is no launcher."""
    monkeypatch.setattr(train, "init_process_group", lambda: pytest.fail("the world was started"))
    monkeypatch.setattr(train, "detect_launchers", list)


@pytest.fixture
def mock_start(monkeypatch):
    """Start a world of one mock rank in place of MPI."""
    monkeypatch.setattr(train, "init_process_group", lambda: ax.World.mock(1))
    monkeypatch.setattr(train, "destroy_process_group", lambda: None)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {}),
        ("--lr 1e-4 --layers 2 --no-plot", {"lr": 1e-4, "layers": 2, "plot": False}),
        ("--data a.txt --positions learned", {"data": "a.txt", "positions": "learned"}),
        ("--pp=2 --schedule=zero-bubble --chunks=2", {"pp": 2, "schedule": "zero-bubble", "chunks": 2}),
        ("--micro-batches=8 --trace=a/b", {"micro_batches": 8, "trace": "a/b"}),
        (
            "--dp=2 --tp=4 --sequence-parallel --fsdp=full",
            {"dp": 2, "tp": 4, "sequence_parallel": True, "fsdp": "full"},
        ),
    ],
)
def test_flags_set_what_they_name(flags, expected):
    assert train.parse(flags.split()) == Config().replace(**expected)


def test_flags_override_the_file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("lr = 0.5\nsteps = 7\n")
    for flags in (["--config", str(file)], [f"--config={file}"]):
        assert train.parse([*flags, "--lr", "1e-3"]) == Config().replace(lr=1e-3, steps=7)


def test_every_setting_is_a_flag_with_help(capsys):
    assert code_of("train", "--help") == 0
    shown = capsys.readouterr().out
    assert [name for name in ("config", *Config().flat()) if f"--{name.replace('_', '-')}" not in shown] == []
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
        ("--cp 2 --tp 2", ["cp: expected 1 together with tp or a pipeline, got 2"]),
        ("--dp -1", ["dp: expected at least 0, got -1"]),
        ("--schedule zero-bubble --chunks 3", ["chunks: expected 1 or 2 with zero-bubble"]),
        ("--lr nan", ["lr: expected a finite number"]),
        ("--config nowhere.toml", ["config file nowhere.toml cannot be read"]),
        ("--config", ["--config"]),
        ("--config settings.ini", [".toml, .yaml or .yml"]),
    ],
)
def test_bad_flags_are_refused_before_anything_starts(no_start, capsys, arguments, expected):
    assert code_of("train", *arguments.split()) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert [text for text in expected if text not in shown] == []


def test_a_file_or_a_text_that_cannot_be_used_is_refused_before_anything_starts(no_start, capsys, tmp_path):
    for name, content in (("settings.yaml", "global_bach: 8\n"), ("empty", ""), ("small", "abc")):
        (tmp_path / name).write_text(content)
    for flag, name, expected in (
        ("--config", "settings.yaml", "unknown setting 'global_bach': did you mean global_batch"),
        ("--data", "nowhere", "No such file"),
        ("--data", "empty", "expected text, found none"),
        ("--data", "small", "at least 258 bytes"),
    ):
        assert code_of("train", flag, tmp_path / name) == 2
        assert expected in capsys.readouterr().err


def test_on_one_node_a_missing_text_is_missing_for_all_ranks(no_start, monkeypatch):
    for launchers in ([], [Launcher("MPICH", 0, 1, 0, 1, ())], [Launcher("MPICH", 1, 4, 1, 4, ())]):
        monkeypatch.setattr(train, "detect_launchers", lambda launchers=launchers: launchers)
        assert code_of("train", "--data", "nowhere") == 2


def test_a_rank_whose_node_lacks_the_text_meets_the_others_before_it_leaves(monkeypatch, capsys):
    group = SimpleNamespace(all_gather_object=lambda problem: ["", problem, "", ""])
    monkeypatch.setattr(train, "init_process_group", lambda: SimpleNamespace(default_group=group))
    for name, size, local in (("MPICH", 4, 2), ("PMI", 4, None), ("PMIx", None, None), ("PALS", None, 4)):
        launcher = Launcher(name, 1, size, local and 1, local, ())
        monkeypatch.setattr(train, "detect_launchers", lambda launcher=launcher: [launcher])
        assert code_of("train", "--data", "nowhere") == 2
        assert "error: rank 1: --data nowhere: cannot read nowhere: No such file" in capsys.readouterr().err


def test_what_is_found_later_is_an_exit_code_and_a_message_too(mock_start, capsys, tmp_path):
    diverging = ("--lr", 1e30, "--gradient-clip", 0, "--out", tmp_path)
    for flags, code, message in (
        (("--accumulation", 3), 2, "axonmpi train: error: global_batch: expected a multiple of"),
        (diverging, 1, "training has diverged; try a smaller lr"),
    ):
        assert code_of("train", *SMALL, *flags) == code
        assert message in capsys.readouterr().err


def test_a_signal_stops_the_run_with_its_own_code_and_more_of_them_do_nothing(mock_start, monkeypatch, tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    settings = ["train", *SMALL, "--no-plot", "--progress=off", "--resume=auto", "--out", tmp_path]
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "learning_rate", lambda *_: signal.raise_signal(signal.SIGUSR1) or 1e-3)
        assert code_of(*settings) == ax.REQUEUE_EXIT_CODE == 85
    signal.raise_signal(signal.SIGUSR1)  # while the process ends
    signal.signal(signal.SIGUSR1, before)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for _ in range(2):  # to the end; then there is nothing to do
        assert (code_of(*settings), len(losses(tmp_path))) == (0, 12)
    assert signal.getsignal(signal.SIGUSR1) == before
    monkeypatch.setenv("AXONMPI_STOP_SIGNAL", "9")
    assert code_of(*settings) == 2


def test_a_last_checkpoint_that_cannot_be_written_is_an_exit_code_and_a_message(
    mock_start, monkeypatch, capsys, tmp_path
):
    blocked = tmp_path / "checkpoints" / "step-00000012.partial"
    settings = ["train", *SMALL, "--no-plot", "--progress=off", "--out", tmp_path]

    def block(*_):
        blocked.parent.mkdir(exist_ok=True)
        return blocked.write_text("in the way") * 1e-4

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "learning_rate", block)
        assert code_of(*settings) == 1
    assert f"error: {blocked.with_suffix('')}: the checkpoint was not written: " in capsys.readouterr().err
    assert not (tmp_path / "summary.json").exists()
    blocked.unlink()
    assert code_of(*settings) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tran"], "unknown command 'tran': did you mean train"),
        (["fly"], "expected one of train, run, bench, chart, checkpoint, doctor, why, trace, top"),
        ([], "no command given"),
    ],
)
def test_unknown_commands_are_refused(capsys, arguments, message):
    assert code_of(*arguments) == 2
    assert message in capsys.readouterr().err


def test_help_is_shown_by_the_first_rank(capsys, monkeypatch):
    for flag in ("-h", "--help", "help"):
        assert cli.main([flag]) == 0
        shown = capsys.readouterr().out
        assert [name for name in ("train", "bench", "doctor", "mpirun -n 4") if name not in shown] == []
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    for rank, arguments in itertools.product((0, 1), (["--version"], ["train", "--help"])):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
        assert code_of(*arguments) == 0
        assert bool(capsys.readouterr().out) == (rank == 0)


def raised(error):
    if error is not None:
        raise error


class Start:
    """Worlds of one rank in place of MPI's and NCCL's, beside ranks that are only told of.

    Attributes:
        started: The backends of the worlds that were started.
        others: The device of each other rank, and why.
        problem: Raised when GPUs are connected, if given.
    """

    def __init__(self, monkeypatch, others=()) -> None:
        self.started, self.others, self.problem, self.gpus, self.missing = [], others, None, 0, None
        monkeypatch.setattr(train, "init_process_group", self.init)
        monkeypatch.setattr(train, "destroy_process_group", lambda: self.started.append("closed"))
        monkeypatch.setattr(ax.NcclBackend, "device_count", lambda: self.gpus)
        monkeypatch.setattr(ax.NcclBackend, "nccl_version", lambda: raised(self.missing) or (2, 30, 0))
        monkeypatch.setattr("axonmpi.cli.train.gpu_identity", str)

    def init(self, backend="mpi"):
        self.started.append(backend)
        raised(self.problem if backend == "nccl" else None)
        group = SimpleNamespace(all_gather_object=lambda own: [own, *(self.others if own else ())])
        return SimpleNamespace(default_group=group)


def test_the_world_is_one_of_gpus_where_there_are_gpus_and_nccl(monkeypatch, capsys):
    start = Start(monkeypatch)
    for gpus, missing, wanted, expected, shown in (
        (0, None, "auto", ["mpi"], ""),
        (1, None, "auto", ["mpi", "closed", "nccl"], ""),
        (1, ax.NcclError("no nccl4py"), "auto", ["mpi"], "on the CPU, though there is a GPU: no nccl4py\n"),
        (1, None, "cpu", ["mpi"], ""),
        (0, None, "cuda", ["mpi", "closed", "nccl"], ""),
    ):
        start.started, start.gpus, start.missing = [], gpus, missing
        train._start(wanted)
        assert (start.started, capsys.readouterr().out) == (expected, shown)


def test_ranks_on_different_devices_and_gpus_that_cannot_be_connected_are_refused(monkeypatch, capsys):
    start = Start(monkeypatch, [("cpu", ""), ("cpu", "")])
    start.gpus = 1
    refused(SystemExit, (lambda: train._start("auto"), "2"))
    assert start.started == ["mpi"]
    assert "different devices:\n  rank 0: cuda\n  ranks 1, 2: cpu\nTake --device cpu" in capsys.readouterr().err
    start.others, start.problem = [], ax.NcclError("two ranks use one GPU")
    refused(SystemExit, (lambda: train._start("auto"), "2"))
    assert "error: two ranks use one GPU\nOr train on the CPU: --device cpu" in capsys.readouterr().err


# ---- whole jobs -------------------------------------------------------------------------------------------------


def losses(folder):
    return [line["loss"] for line in metrics_in(folder) if "loss" in line]


def check_losses(folder, flags):
    assert losses(folder) == pytest.approx(plain_run(train.parse(flags)).losses, abs=1e-4)


def test_the_command_without_a_launcher(mock_start, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert code_of("train", *SMALL, "--name", "first") == 0
    shown, folder = capsys.readouterr(), tmp_path / "axonmpi-runs" / "first"
    assert (shown.err, "on 1 rank" in shown.out) == ("", True)
    files = ["checkpoints", "loss.png", "metrics.jsonl", "sample.txt", "summary.json"]
    assert sorted(file.name for file in folder.iterdir()) == files
    check_losses(folder, SMALL)


def test_the_command_on_real_ranks_gives_the_same_losses(tmp_path):
    settings = [*SMALL, "--layers=2"]
    layout = ["--pp=2", "--schedule=zero-bubble", "--trace", tmp_path / "traced"]
    command = ["-m", "axonmpi", "train", *settings, *layout, "--out", tmp_path]
    result = ax.testing.launch(2, *command, timeout=limit(60))
    assert (result.returncode, result.stderr) == (0, "")
    for text in ("a pipeline: zero bubble on 2 ranks", "on 2 ranks, "):  # by rank 0 only
        assert result.stdout.count(text) == 1
    assert {"pipeline.png", "traced"} <= {path.name for path in tmp_path.iterdir()}
    check_losses(tmp_path, settings)


OTHER_FLAGS_ON_RANK_1 = """
import sys
from axonmpi import cli
from axonmpi.cli import train
from axonmpi.launch.launcher_variables import detect_launchers

train._on_several_nodes = lambda: True
flags = sys.argv[1:] if detect_launchers()[0].rank == 1 else []
sys.exit(cli.main(["train", "--name", "never-begun", *flags]))
"""


def test_what_one_rank_cannot_use_ends_the_job_with_code_2():
    result = ax.testing.launch(2, OTHER_FLAGS_ON_RANK_1, "--data", "/nowhere", timeout=limit(60))
    assert (result.returncode, result.timed_out, result.leftover) == (2, False, ())
    assert result.stderr.count("cannot read /nowhere: No such file") == 1
