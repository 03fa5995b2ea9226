"""Every command and every example in the README and in the pages runs."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from fences import PAGES, REPOSITORY, Fence, fences_of
from shell_commands import Ended, command_environment, run

from axonmpi import cli
from axonmpi.cli import train
from axonmpi.testing import launch

LANGUAGES = {"python", "sh", "text", "toml", "yaml", "{eval-rst}"}  # the last one is a directive for Sphinx
RUN_FENCES = Path(__file__).with_name("run_fences.py")


def examples_of(page: Path) -> list[Fence]:
    return [fence for fence in fences_of(page) if fence.language == "python" and not fence.file_name]


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


class Site:
    """A folder for each page, with what its commands and examples write.

    Examples may look at what the commands of their page have written. All examples for the same number of ranks
    run in one job, page after page, since a job takes longer to start than its examples to run.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        programs = root / "programs"
        programs.mkdir()
        # Threads of a command would wait for a core that another test uses: seconds for every small operation.
        self.env = {**command_environment(programs), "OMP_NUM_THREADS": "1"}
        self._ended: set[Path] = set()

    def folder(self, page: Path) -> Path:
        """Return the page's folder, once its commands have run there."""
        folder = self._root / page.name
        if page not in self._ended:
            furnish(folder, fences_of(page))
            self._ended.add(page)
            for fence in fences_of(page):
                if fence.language == "sh" and not fence.fresh_machine:
                    check_command(page, fence, folder, self.env)
        return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Return where each page's commands and examples run."""
    return Site(tmp_path_factory.mktemp("site"))


@pytest.mark.rank_timeout(400)
@pages
def test_commands_of_a_page_run(page, site):
    assert site.folder(page).is_dir()


def test_the_loss_of_the_first_example_falls(tmp_path):
    first = examples_of(REPOSITORY / "README.md")[0]
    job = launch(first.ranks, first.code, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert job.returncode == 0, job.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) on 4 ranks", job.stdout)]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 10


@pytest.mark.rank_timeout(900)
@pytest.mark.parametrize("ranks", sorted({fence.ranks for page in PAGES for fence in examples_of(page)}))
def test_examples_run(ranks, site, tmp_path):
    given = [
        {"page": str(page), "folder": str(site.folder(page)), "fences": blocks}
        for page in PAGES
        if (blocks := [[fence.line, fence.code] for fence in examples_of(page) if fence.ranks == ranks])
    ]
    file = tmp_path / "pages.json"
    file.write_text(json.dumps(given))
    check_examples(ranks, file, tmp_path, site.env)


def furnish(folder: Path, fences: tuple[Fence, ...]) -> None:
    """Make a folder with what is seen at the top of the repository, and the files that a page shows."""
    folder.mkdir()
    for entry in REPOSITORY.iterdir():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    for fence in fences:
        if fence.file_name:
            with (folder / fence.file_name).open("x") as file:
                file.write(fence.code)


def check_command(page: Path, fence: Fence, folder: Path, env: dict[str, str]) -> None:
    options = ["-n"] if fence.takes_minutes else ["-e", "-x", "-o", "pipefail"]
    ended = run(["bash", *options, "-c", fence.code], folder, env)
    assert ended.code == 0, f"{page.name}, line {fence.line}:\n{ended.output}"
    if fence.takes_minutes:
        check_arguments(fence)


def check_arguments(fence: Fence) -> None:
    """Check the arguments of commands that take too long to be run."""
    lines = [shlex.split(line, comments=True) for line in fence.code.splitlines()]
    commands = [line[line.index("axonmpi") + 1 :] for line in lines if "axonmpi" in line]
    assert commands, "expected a command of axonmpi in a block that takes minutes"
    for name, *arguments in commands:
        if name == "train":
            train.parse(arguments)
            continue
        with pytest.raises(SystemExit) as end:
            cli.main([name, *arguments, "--help"])  # what stands before --help is checked first
        assert end.value.code == 0, shlex.join(arguments)


def check_examples(ranks: int, given: Path, folder: Path, env: dict[str, str]) -> None:
    if ranks:
        job = launch(ranks, RUN_FENCES, given, cwd=folder, timeout=300, env={"OMP_NUM_THREADS": "1"})
        ended = Ended(job.returncode, job.stdout + job.stderr)
    else:
        ended = run([sys.executable, str(RUN_FENCES), str(given)], folder, env)
    assert ended.code == 0, ended.output
