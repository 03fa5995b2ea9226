"""Installations without the internet: the page's commands; beside a site's packages, read-only, for two users."""

import os
import re
import shutil
import subprocess
import sys
import venv
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY
from helpers.fences import fences_of
from helpers.limits import limit
from helpers.project import PROJECT
from helpers.sites import link_packages
from packaging.requirements import Requirement

import axonmpi as ax
from axonmpi.checkpoint.tools.verify import verify_checkpoint
from axonmpi.launch.launcher_variables import without_launcher_variables
from axonmpi.testing import run_ranks
from axonmpi.testing.mpirun import find_mpirun, mpirun_command

PAGE = REPOSITORY / "docs" / "cluster.md"
COLLECT, *INSTALL = [fence.code for fence in fences_of(PAGE) if fence.fresh_machine]
TRAINING = next(fence.code for fence in fences_of(PAGE) if fence.file_name == "train.py")
(FROM_SOURCES,) = re.findall(r"`(pip install [^`]*--no-build-isolation [^`]*)`", PAGE.read_text())
THREE = ("torch", "mpi4py", "numpy")
TRAIN = map(Requirement, PROJECT["optional-dependencies"]["train"])
EXTRA = ("isal", *(each.name for each in TRAIN if each.marker is None or each.marker.evaluate()))
QUICK = "--layers=1 --data-limit=0.2 --held-out-sequences=8 --sample-length=20 --sequence-length=32 --device=cpu"
NOT_NEEDED = ("c++", "cc", "clang", "g++", "gcc", "nvcc", "rsh", "ssh")
"""Programs that no job may start."""
BASE = Path(sys.base_prefix, "bin")
MPI = find_mpirun().parent
KEPT = ("OMPI_", "PRTE_", "OMP_NUM_THREADS")
"""Beginnings of variables with this machine's settings."""


@dataclass
class User:
    """A user of a cluster, with a home directory that stays empty.

    Attributes:
        folder: Everything of this user; the home directory and temporary files are in it.
        uid: The user's number; None is the user of this process.
    """

    folder: Path
    uid: int | None = None

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True)
        for path in (self.folder, self.folder / "tmp", self.folder / "bin"):
            path.mkdir(exist_ok=True)
            if self.uid is not None:
                os.chown(path, self.uid, self.uid)
        for name in NOT_NEEDED:
            program = self.folder / "bin" / name
            program.write_text(f'#!/bin/sh\necho "$0 $*" >> {self.folder}/called\nexit 1\n')
            program.chmod(0o755)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def start(self, script: str, **variables: str) -> subprocess.Popen[str]:
        """Start a script of a shell in the user's folder, with few variables."""
        kept = {name: value for name, value in without_launcher_variables().items() if name.startswith(KEPT)}
        path = ":".join(map(str, [self.folder / "bin", BASE, MPI, "/usr/bin", "/bin"]))
        of_site = {"PATH": path, "LD_LIBRARY_PATH": str(MPI.parent / "lib")}
        of_user = {"HOME": str(self.home), "TMPDIR": str(self.folder / "tmp")}
        of_pip = {"PIP_CACHE_DIR": str(self.folder / "tmp" / "pip"), "PIP_CONFIG_FILE": os.devnull}
        command = ["bash", "-euc", script]
        if self.uid is not None:  # may read everything, as folders of this session are closed to others
            ids = [f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
            reads = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
            command = ["setpriv", *ids, *reads, *command]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**kept, **of_site, **of_user, **of_pip, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> str:
        """Return the output of a script; it has to succeed, with an empty home directory and no compiler or ssh."""
        output, _ = process.communicate(timeout=limit(120))
        assert process.returncode == 0, output
        assert [*self.home.rglob("*")] == []
        called = self.folder / "called"
        assert not called.exists(), called.read_text()
        return output


def mpirun(*program: object) -> str:
    command, settings = mpirun_command(MPI / "mpirun", 2)
    return " ".join(["env", *(f"{name}={value}" for name, value in settings.items()), *command, *map(str, program)])


# ---- the page ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheels(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of wheels that the page's first command fills; of the packages only axonmpi's own is built."""
    _, sdist = distributions
    folder = tmp_path_factory.mktemp("sources")
    shutil.unpack_archive(sdist, folder, filter="data")
    (clone,) = folder.iterdir()
    no_downloads = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0: without it
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, **no_downloads, "PATH": path}
    subprocess.run(["bash", "-euc", COLLECT], cwd=clone, env=env, check=True, timeout=limit(60))
    assert [wheel.name for wheel in (clone / "wheels").iterdir()] == [f"axonmpi-{ax.__version__}-py3-none-any.whl"]
    return clone / "wheels"


@pytest.mark.parametrize("commands", INSTALL, ids=["wheels of all packages", "the site's packages"])
def test_the_commands_of_the_page(commands: str, wheels: Path, tmp_path: Path) -> None:
    """A site's module, a folder in PYTHONPATH, has the packages that are not to be downloaded here."""
    assert len(INSTALL) == 2
    user = User(tmp_path / "user")
    shutil.copytree(wheels, user.folder / "wheels")
    (user.folder / "train.py").write_text(TRAINING)
    from_wheels = "--find-links" in commands
    link_packages(tmp_path / "site", *THREE, *(EXTRA if from_wheels else ()))
    script = commands.replace("mpirun -n 2", mpirun()).replace("axonmpi train", f"axonmpi train {QUICK}")
    output = user.finish(user.start(script, PYTHONPATH=str(tmp_path / "site")))
    if from_wheels:
        assert "tokens/s" in output
        written = {path.name for path in (user.folder / "axonmpi-runs" / "gpt").iterdir()}
        assert {"loss.png", "checkpoints"} <= written
    else:
        (loss,) = re.findall(r"loss ([\d.]+) on 2 ranks", output)
        assert float(loss) < 0.5
        assert verify_checkpoint(user.folder / "model").is_whole


# ---- beside three packages, read-only, for two users -------------------------------------------------------------


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A checkpoint that this process has written, with isal's checksums."""

    def save(_: ax.World) -> None:
        model = torch.nn.Linear(8, 1)
        ax.save_checkpoint(tmp_path / "given", model, torch.optim.AdamW(model.parameters()), step=7)

    run_ranks(1, save)
    return tmp_path / "given"


def test_jobs_beside_three_packages(distributions: tuple[Path, Path], given: Path, tmp_path: Path) -> None:
    """Two users, if this process may be them, run it at once from one installation that neither can write to."""
    _, sdist = distributions
    command = FROM_SOURCES.replace(sdist.name, str(sdist))
    assert str(sdist) in command
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    installed = tmp_path / "installed"
    env = {**os.environ, "PATH": path, "PIP_TARGET": str(installed), "PIP_NO_COMPILE": "1"}
    subprocess.run(["bash", "-euc", command], env=env, check=True, timeout=limit(60))
    link_packages(tmp_path / "site", *THREE, metadata=False)  # some sites have none
    venv.create(tmp_path / "python")  # whatever else the Python of this machine has
    for folder, _, _ in os.walk(installed):
        os.chmod(folder, 0o555)
    before = sorted(installed.rglob("*"))

    uids = [65533, 65534] if os.geteuid() == 0 and shutil.which("setpriv") else [None]
    # Open MPI asks access(), which knows no capabilities, about the program; env starts Python with them
    python = ("/usr/bin/env", tmp_path / "python" / "bin" / "python")
    job = mpirun(*python, Path(__file__).with_name("offline_job.py"), given, "out")
    variables = {"PYTHONPATH": f"{installed}:{tmp_path / 'site'}"}
    with ExitStack() as stack:
        users = [User(tmp_path / f"user{uid}", uid) for uid in uids]
        jobs = [stack.enter_context(user.start(job, **variables)) for user in users]
        outputs = [user.finish(process) for user, process in zip(users, jobs, strict=True)]
    assert all(sorted(re.findall(r"rank (\d) is done", output)) == ["0", "1"] for output in outputs), outputs
    assert all(verify_checkpoint(user.folder / "out" / "checkpoint").is_whole for user in users)
    assert sorted(installed.rglob("*")) == before
