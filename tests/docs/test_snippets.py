"""Every command and every example in the README and in the pages runs."""

import json
import re
import shlex
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import REPOSITORY
from helpers.doubled_worlds import doubled
from helpers.fences import PAGES, Fence, fences_of
from helpers.limits import limit

import axonmpi as ax
from axonmpi import cli
from axonmpi.cli import train
from axonmpi.testing import launch, run_ranks
from axonmpi.train.trainer import Trainer

LANGUAGES = {"python", "sh", "text", "toml", "yaml", "{eval-rst}"}  # the last one is a directive for Sphinx
RUN_ELSEWHERE = {
    "cluster.md": "tests/jobs/nodes/test_host_files.py and tests/docs/test_offline.py",
    "slurm.md": "tests/jobs/slurm",
    "testing.md": "tests/testing/plugin/test_real_plugin.py",
}
"""Pages whose commands other tests run."""
QUICK = [
    "--data-limit=0.2",
    "--held-out-sequences=8",
    "--sample-length=0",
    "--sequence-length=32",
    "--no-plot",
    "--device=cpu",
]
"""Further arguments of the trainer's commands on pages, so that they take seconds."""
RUN_FENCES = Path(__file__).with_name("run_fences.py")
OF_OTHERS = re.compile(r"^(?:from|import) (accelerate|lightning|torchdata)\b", re.MULTILINE)
"""Packages of the extra `interop`: programs that need them run if they are installed."""


def examples_of(page: Path) -> list[Fence]:
    return [fence for fence in python_of(page) if not fence.file_name and not fence.gpus]


def python_of(page: Path) -> list[Fence]:
    return [fence for fence in fences_of(page) if fence.language == "python"]


pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pages
def test_blocks_have_a_language_that_is_run_or_only_shown(page):
    wrong = [(fence.line, fence.language) for fence in fences_of(page) if fence.language not in LANGUAGES]
    assert not wrong, f"expected a language of {sorted(LANGUAGES)}"


@pages
def test_a_file_that_a_page_shows_is_used_by_one_of_its_commands(page):
    commands = "".join(fence.code for fence in fences_of(page) if fence.language == "sh")
    unused = [fence.file_name for fence in fences_of(page) if fence.file_name and fence.file_name not in commands]
    assert not unused


def programs_of(page: Path) -> list[tuple[int, int, str]]:
    """Return numbers of ranks, lines and code of a page's examples, and of its commands that are jobs."""
    found = [(fence.ranks, fence.line, fence.code) for fence in examples_of(page)]
    files = {fence.file_name: fence.code for fence in fences_of(page)}
    for fence, ranks, words in commands_of(page):
        if words[0] == "python" and words[1] in files:
            found.append((ranks, fence.line, files[words[1]]))
        elif words[:2] == ["axonmpi", "doctor"]:
            found.append((ranks, fence.line, "from axonmpi.cli import main\nassert main(['doctor']) == 0\n"))
    return [program for program in found if all(map(find_spec, OF_OTHERS.findall(program[2])))]


def commands_of(page: Path) -> list[tuple[Fence, int, list[str]]]:
    """Return the commands of a page that run here, each with a number of ranks, 0 for one that starts alone."""
    if page.name in RUN_ELSEWHERE:
        return []
    found = []
    for fence in fences_of(page):
        if fence.language == "sh" and not fence.fresh_machine:
            for line in fence.code.splitlines():
                words = shlex.split(line, comments=True)
                ranks = 0
                if words[:2] == ["mpirun", "-n"]:
                    ranks, words = int(words[2]), words[3:]
                if words:
                    found.append((fence, ranks, words))
    return found


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Return a function that gives a page's folder, once its commands have run there."""
    root = tmp_path_factory.mktemp("site")

    @cache
    def folder_of(page: Path) -> Path:
        folder = root / page.name
        furnish(folder, fences_of(page))
        for fence, ranks, words in commands_of(page):
            run_command(fence, max(ranks, 1), words, folder)
        return folder

    return folder_of


@pages
def test_commands_of_a_page_run(page, folder_of):
    assert folder_of(page).is_dir()


@pytest.mark.parametrize("ranks", sorted({ranks for page in PAGES for ranks, *_ in programs_of(page)}))
def test_examples_run(ranks, folder_of, tmp_path):
    """Examples may read files that the commands of their page have written.

    All that are for the same number of ranks run in one job, page after page; those for no number of ranks on one
    rank. A job takes longer to start than its examples to run.
    """
    given = []
    for page in PAGES:
        if fences := [(line, code) for count, line, code in programs_of(page) if count == ranks]:
            given.append({"page": str(page), "folder": str(folder_of(page)), "fences": fences})
    file = tmp_path / "examples.json"
    file.write_text(json.dumps(given))
    env = {"OMP_NUM_THREADS": "1"}
    job = launch(max(ranks, 1), RUN_FENCES, file, cwd=tmp_path, timeout=limit(120), env=env)
    assert job.returncode == 0, job.stdout + job.stderr
    if ranks in {count for count, *_ in programs_of(REPOSITORY / "README.md")}:  # its loss falls
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) on 4 ranks", job.stdout)]
        assert len(losses) == 4
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] / 10


GPU_PROGRAMS = [
    (page, number)
    for page in PAGES
    for number in sorted({fence.gpus for fence in python_of(page)} - {0}, reverse=True)
]


@pytest.mark.parametrize(("page", "ranks"), GPU_PROGRAMS, ids=lambda value: getattr(value, "name", value))
def test_examples_for_gpus_run_over_a_double_of_nccl(page, ranks, monkeypatch):
    """An example for fewer GPUs continues the program of those for more."""
    fences = [fence for fence in python_of(page) if fence.gpus >= ranks]
    codes = [compile("\n" * fence.line + fence.code, str(page), "exec") for fence in fences]

    def start(backend: str) -> ax.World:
        assert backend in ("nccl", "mpi+nccl")
        return ax.get_world()

    def program(world: ax.World) -> None:
        namespace = {"__name__": "__main__"}
        for code in codes:
            exec(code, namespace)

    monkeypatch.setattr(ax, "init_process_group", start)
    with doubled():
        run_ranks(ranks, program, timeout=limit(60))


def furnish(folder: Path, fences: tuple[Fence, ...]) -> None:
    """Make a folder with links to the repository's files, and with the files that a page shows."""
    folder.mkdir()
    for entry in REPOSITORY.iterdir():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    for fence in fences:
        if fence.file_name:
            with (folder / fence.file_name).open("x") as file:
                file.write(fence.code)


def run_command(fence: Fence, ranks: int, words: list[str], folder: Path) -> None:
    """Run a command as far as it needs no processes of its own: the trainer's ranks are mock ranks."""
    if fence.takes_minutes:
        if "axonmpi" in words:
            check_arguments(*words[words.index("axonmpi") + 1 :])
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if words[:2] == ["axonmpi", "train"]:
            config = train.parse([*words[2:], *QUICK])
            run_ranks(ranks, lambda world: Trainer(config, world).run(), timeout=limit(60))
        elif words[:2] in (["axonmpi", "chart"], ["axonmpi", "trace"]):
            assert cli.main(words[1:]) == 0
        elif words[:2] in (["axonmpi", "run"], ["python", "-m"]):  # these change the process
            module = ["-m", *words] if words[0] == "axonmpi" else words[1:]
            job = launch(ranks, *module, cwd=folder, timeout=limit(60), env={"OMP_NUM_THREADS": "1"})
            assert job.returncode == 0, job.stderr
        else:
            assert words[0] == "python" or words == ["axonmpi", "doctor"], f"no test runs {shlex.join(words)}"


def check_arguments(name: str, *arguments: str) -> None:
    """Check the arguments of a command that takes too long to be run."""
    if name == "train":
        train.parse(arguments)
        return
    with pytest.raises(SystemExit) as end:
        cli.main([name, *arguments, "--help"])  # arguments before --help are checked first
    assert end.value.code == 0, shlex.join(arguments)
