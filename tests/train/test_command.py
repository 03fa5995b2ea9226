"""The command line: flags, the settings file, refusals, and real runs of it."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers.models import plain_run

import axonmpi as ax
from axonmpi import cli
from axonmpi.cli import train
from axonmpi.launch.variables import Launcher, without_launcher_variables
from axonmpi.train import Config, trainer

SMALL = [
    *("--layers=1", "--width=16", "--heads=2", "--sequence-length=16", "--global-batch=8", "--steps=12"),
    *("--held-out-sequences=8", "--data-limit=0.05", "--sample-length=5", "--device=cpu"),
]


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


def test_flags_set_what_they_name():
    assert train.parse([]) == Config()
    for flags, expected in (
        ("--lr 1e-4 --layers 2 --no-plot", {"lr": 1e-4, "layers": 2, "plot": False}),
        ("--data a.txt --positions learned", {"data": "a.txt", "positions": "learned"}),
        ("--pp=2 --schedule=zero-bubble --chunks=2", {"pp": 2, "schedule": "zero-bubble", "chunks": 2}),
        ("--micro-batches=8 --trace=a/b.json", {"micro_batches": 8, "trace": "a/b.json"}),
        (
            "--dp=2 --tp=4 --sequence-parallel --fsdp=full",
            {"dp": 2, "tp": 4, "sequence_parallel": True, "fsdp": "full"},
        ),
    ):
        assert train.parse(flags.split()) == Config().replace(**expected)


def test_flags_override_the_file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("lr = 0.5\nsteps = 7\n")
    for flags in (["--config", str(file)], [f"--config={file}"]):
        assert train.parse([*flags, "--lr", "1e-3"]) == Config().replace(lr=1e-3, steps=7)


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
def test_bad_flags_are_refused_before_anything_starts(no_start, capsys, arguments, expected):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *arguments.split()])
    shown = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2
    assert [text for text in expected if text not in shown] == []


def test_a_file_or_a_text_that_cannot_be_used_is_refused_before_anything_starts(no_start, capsys, tmp_path):
    (tmp_path / "settings.yaml").write_text("global_bach: 8\n")
    (tmp_path / "empty").touch()
    (tmp_path / "small").write_bytes(b"abc")
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--config", str(tmp_path / "settings.yaml")])
    assert ended.value.code == 2
    assert "unknown setting 'global_bach': did you mean global_batch" in capsys.readouterr().err
    refused = {"nowhere": "No such file", "empty": "expected text, found none", "small": "at least 258 bytes"}
    for name, expected in refused.items():
        assert cli.main(["train", "--data", str(tmp_path / name)]) == 2
        assert expected in capsys.readouterr().err


def test_on_one_node_a_missing_text_is_missing_for_all_ranks(no_start, monkeypatch):
    for launchers in ([], [Launcher("MPICH", 0, 1, 0, 1, ())], [Launcher("MPICH", 1, 4, 1, 4, ())]):
        monkeypatch.setattr(train, "detect_launchers", lambda launchers=launchers: launchers)
        assert cli.main(["train", "--data", "nowhere"]) == 2


def test_a_rank_whose_node_lacks_the_text_meets_the_others_before_it_leaves(monkeypatch, capsys):
    group = SimpleNamespace(all_gather_object=lambda problem: ["", problem, "", ""])
    monkeypatch.setattr(train, "init_process_group", lambda: SimpleNamespace(default_group=group))
    for name, size, local in (("MPICH", 4, 2), ("PMI", 4, None), ("PMIx", None, None)):
        launcher = Launcher(name, 1, size, local and 1, local, ())
        monkeypatch.setattr(train, "detect_launchers", lambda launcher=launcher: [launcher])
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", "--data", "nowhere"])
        assert ended.value.code == 2
        assert "error: rank 1: --data nowhere: cannot read nowhere: No such file" in capsys.readouterr().err


def test_what_is_found_later_is_an_exit_code_and_a_message_too(mock_start, capsys, tmp_path):
    assert cli.main(["train", *SMALL, "--accumulation", "3"]) == 2
    assert "axonmpi train: error: global_batch: expected a multiple of" in capsys.readouterr().err
    assert cli.main(["train", *SMALL, "--lr", "1e30", "--gradient-clip", "0", "--out", str(tmp_path)]) == 1
    assert "training has diverged; try a smaller lr" in capsys.readouterr().err


def test_a_signal_stops_the_run_with_its_own_code_and_more_of_them_do_nothing(mock_start, monkeypatch, tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    settings = ["train", *SMALL, "--no-plot", "--progress=off", "--resume=auto", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "learning_rate", lambda *_: signal.raise_signal(signal.SIGUSR1) or 1e-3)
        assert cli.main(settings) == ax.REQUEUE_EXIT_CODE == 85
    signal.raise_signal(signal.SIGUSR1)  # while the process ends
    signal.signal(signal.SIGUSR1, before)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert cli.main(settings) == 0
    assert len(losses(tmp_path)) == 12
    assert cli.main(settings) == 0
    assert signal.getsignal(signal.SIGUSR1) == before
    monkeypatch.setenv("AXONMPI_STOP_SIGNAL", "9")
    assert cli.main(settings) == 2


def test_a_last_checkpoint_that_cannot_be_written_is_an_exit_code_and_a_message(
    mock_start, monkeypatch, capsys, tmp_path
):
    blocked = tmp_path / "checkpoints" / "step-00000012.partial"

    def block(*_):
        blocked.parent.mkdir(exist_ok=True)
        blocked.write_text("in the way")
        return 1e-3

    settings = ["train", *SMALL, "--no-plot", "--progress=off", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "learning_rate", block)
        assert cli.main(settings) == 1
    shown = capsys.readouterr().err
    assert f"error: {blocked.with_suffix('')}: the checkpoint was not written: " in shown
    assert not (tmp_path / "summary.json").exists()
    blocked.unlink()
    assert cli.main(settings) == 0


def test_unknown_commands_are_refused(capsys):
    for arguments, message in (
        (["tran"], "unknown command 'tran': did you mean train"),
        (["fly"], "expected one of train, bench, chart, checkpoint, doctor, why, top"),
        ([], "no command given"),
    ):
        assert cli.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_help_is_shown_by_the_first_rank(capsys, monkeypatch):
    for flag in ("-h", "--help", "help"):
        assert cli.main([flag]) == 0
        shown = capsys.readouterr().out
        assert [name for name in ("train", "bench", "doctor", "mpirun -n 4") if name not in shown] == []
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    for rank in (0, 1):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
        assert cli.main(["--version"]) == 0
        assert bool(capsys.readouterr().out) == (rank == 0)
        with pytest.raises(SystemExit):
            cli.main(["train", "--help"])
        assert bool(capsys.readouterr().out) == (rank == 0)


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
        monkeypatch.setattr(ax.NcclBackend, "nccl_version", self.version)
        monkeypatch.setattr("axonmpi.cli.train.gpu_identity", str)

    def init(self, backend="mpi"):
        self.started.append(backend)
        if backend == "nccl" and self.problem is not None:
            raise self.problem
        group = SimpleNamespace(all_gather_object=lambda own: [own, *(self.others if own else ())])
        return SimpleNamespace(default_group=group)

    def version(self):
        if self.missing is not None:
            raise self.missing
        return 2, 30, 0


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
    with pytest.raises(SystemExit) as ended:
        train._start("auto")
    shown = capsys.readouterr().err
    assert (ended.value.code, start.started) == (2, ["mpi"])
    assert "different devices:\n  rank 0: cuda\n  ranks 1, 2: cpu\nTake --device cpu" in shown
    start.others, start.problem = [], ax.NcclError("two ranks use one GPU")
    with pytest.raises(SystemExit) as ended:
        train._start("auto")
    assert ended.value.code == 2
    assert "error: two ranks use one GPU\nOr train on the CPU: --device cpu" in capsys.readouterr().err


# ---- whole jobs -------------------------------------------------------------------------------------------------


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_the_command_without_a_launcher(tmp_path):
    command = [sys.executable, "-m", "axonmpi", "train", *SMALL, "--name", "first"]
    environment = {**without_launcher_variables(), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    folder = tmp_path / "axonmpi-runs" / "first"
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "on 1 rank" in finished.stdout
    files = ["checkpoints", "loss.png", "metrics.jsonl", "sample.txt", "summary.json"]
    assert sorted(file.name for file in folder.iterdir()) == files
    assert losses(folder) == pytest.approx(plain_run(train.parse(SMALL)).losses, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "shown", "layout"),
    [
        (2, "a pipeline: zero bubble on 2 ranks", ["--pp=2", "--schedule=zero-bubble"]),
        (4, "mesh: dp 2 x pp 1 x tp 2 = 4 ranks", ["--dp=2", "--tp=2", "--fsdp=full", "--sequence-parallel"]),
    ],
)
def test_the_command_on_real_ranks_gives_the_same_losses(tmp_path, ranks, shown, layout):
    settings, trace = [*SMALL, "--layers=2"], tmp_path / "trace.json"
    layout += ["--trace", trace] if "--pp=2" in layout else []
    result = ax.testing.launch(ranks, "-m", "axonmpi", "train", *settings, *layout, "--out", tmp_path, timeout=240)
    assert (result.returncode, result.stderr) == (0, "")
    assert shown in result.stdout
    assert result.stdout.count(f"on {ranks} ranks, ") == 1  # by rank 0 only
    pictures = [(tmp_path / name).exists() for name in ("pipeline.png", "trace.json")]
    assert pictures == [ranks == 2] * 2
    assert losses(tmp_path) == pytest.approx(plain_run(train.parse(settings)).losses, abs=1e-4)


OTHER_FLAGS_ON_RANK_1 = """
import sys
from axonmpi import cli
from axonmpi.cli import train
from axonmpi.launch.variables import detect_launchers

train._on_several_nodes = lambda: True
flags = sys.argv[2:] if detect_launchers()[0].rank == 1 else []
sys.exit(cli.main(["train", "--out", sys.argv[1], *flags]))
"""


def test_what_one_rank_cannot_use_ends_the_job(tmp_path):
    result = ax.testing.launch(2, OTHER_FLAGS_ON_RANK_1, tmp_path, "--data", "/nowhere", timeout=240)
    assert (result.returncode, result.timed_out, result.leftover) == (2, False, ())
    assert "cannot read /nowhere: No such file" in result.stderr


@pytest.mark.slow
def test_real_ranks_refuse_together_with_code_2():
    result = ax.testing.launch(2, "-m", "axonmpi", "train", "--pp", "3", timeout=240)
    assert (result.returncode, result.leftover) == (2, ())
    assert result.stderr.count("tp x pp = 1 x 3 = 3, but there are 2 ranks: take for example dp x tp x pp = ") == 1


STOPPED = """
import signal, sys
from axonmpi import cli
from axonmpi.launch.variables import detect_launchers
from axonmpi.train import trainer

rate = trainer.learning_rate

def told_in_step_5(step, *others):
    if step == 4 and detect_launchers()[0].rank == 1:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.raise_signal(number)
    return rate(step, *others)

trainer.learning_rate = told_in_step_5
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_real_ranks_stop_after_a_signal_to_one_of_them_and_go_on_later(tmp_path):
    settings = [*SMALL, "--fsdp=full", "--resume=auto", "--out", tmp_path]
    stopped = ax.testing.launch(2, STOPPED, *settings, timeout=240)
    assert (stopped.returncode, stopped.leftover) == (85, ())
    assert stopped.stdout.count(f"stopped after step 5 of 12, saved {tmp_path}") == 1
    assert "[rank" not in stopped.stderr
    assert not (tmp_path / "summary.json").exists()
    ended = ax.testing.launch(2, "-m", "axonmpi", "train", *settings, timeout=240)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "going on after step 5, from " in ended.stdout
    assert losses(tmp_path) == pytest.approx(plain_run(train.parse(SMALL)).losses, abs=1e-4)
