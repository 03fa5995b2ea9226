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
from axonmpi.testing import launch, run_ranks
from axonmpi.train.trainer import Trainer

LANGUAGES = {"python", "sh", "text", "toml", "yaml", "{eval-rst}"}  # the last one is a directive for Sphinx
RUN_ELSEWHERE = {"slurm.md": "tests/slurm", "testing.md": "tests/harness/test_real_sessions.py"}
"""Pages whose commands other tests run."""
QUICK = ["--data-limit=0.2", "--held-out-sequences=8", "--sample-length=0", "--sequence-length=32", "--no-plot"]
"""What the trainer is told besides what a page says, to be quicker about it."""
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
        self._env = {**command_environment(programs), "OMP_NUM_THREADS": "1"}
        self._ended: set[Path] = set()

    def folder(self, page: Path) -> Path:
        """Return the page's folder, once its commands have run there."""
        folder = self._root / page.name
        if page not in self._ended:
            furnish(folder, fences_of(page))
            self._ended.add(page)
            for fence in fences_of(page):
                if fence.language == "sh" and not fence.fresh_machine and page.name not in RUN_ELSEWHERE:
                    check_commands(page, fence, folder, self._env)
        return folder

    def run_examples(self, ranks: int) -> str:
        """Run the examples of all pages for a number of ranks, 0 for those without; return what they print."""
        given = [
            {"page": str(page), "folder": str(self.folder(page)), "fences": blocks}
            for page in PAGES
            if (blocks := [[fence.line, fence.code] for fence in examples_of(page) if fence.ranks == ranks])
        ]
        file = self._root / f"examples-{ranks}.json"
        file.write_text(json.dumps(given))
        if ranks:
            job = launch(ranks, RUN_FENCES, file, cwd=self._root, timeout=300, env={"OMP_NUM_THREADS": "1"})
            ended = Ended(job.returncode, job.stdout + job.stderr)
        else:
            ended = run([sys.executable, str(RUN_FENCES), str(file)], self._root, self._env)
        assert ended.code == 0, ended.output
        return ended.output


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Return where each page's commands and examples run."""
    return Site(tmp_path_factory.mktemp("site"))


@pages
def test_commands_of_a_page_run(page, site):
    assert site.folder(page).is_dir()


@pytest.mark.parametrize("ranks", sorted({fence.ranks for page in PAGES for fence in examples_of(page)}))
def test_examples_run(ranks, site):
    printed = site.run_examples(ranks)
    if ranks == examples_of(REPOSITORY / "README.md")[0].ranks:  # the loss of the first one falls
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) on 4 ranks", printed)]
        assert len(losses) == 4
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0] / 10


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


def check_commands(page: Path, fence: Fence, folder: Path, env: dict[str, str]) -> None:
    """Run the lines of a block; what the trainer and charts do needs no processes of its own."""
    if fence.takes_minutes:
        assert run(["bash", "-n", "-c", fence.code], folder, env).code == 0, f"{page.name}, line {fence.line}"
    for line in fence.code.splitlines():
        words = shlex.split(line, comments=True)
        ranks = int(words[2]) if words[:2] == ["mpirun", "-n"] else 1
        name, *arguments = words[words.index("axonmpi") + 1 :] if "axonmpi" in words else [""]
        if fence.takes_minutes:
            check_arguments(name, arguments)
        elif name in ("train", "chart"):
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                if name == "train":
                    config = train.parse([*arguments, *QUICK])
                    run_ranks(ranks, lambda world, config=config: Trainer(config, world).run(), timeout=120)
                else:
                    assert cli.main([name, *arguments]) == 0
        elif words:
            ended = run(["bash", "-e", "-c", line], folder, env)
            assert ended.code == 0, f"{page.name}, line {fence.line}:\n{ended.output}"


def check_arguments(name: str, arguments: list[str]) -> None:
    """Check the arguments of a command that takes too long to be run."""
    if name == "train":
        train.parse(arguments)
    elif name:
        with pytest.raises(SystemExit) as end:
            cli.main([name, *arguments, "--help"])  # what stands before --help is checked first
        assert end.value.code == 0, shlex.join(arguments)
