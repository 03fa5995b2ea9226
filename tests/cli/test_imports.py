"""Commands import only the packages that they need: without the extra `train`, those for users in trouble work."""

import pytest
from helpers.programs import run_alone

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("matplotlib", "rich", "tyro", "yaml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import axonmpi
from axonmpi.cli import main
"""


@pytest.mark.parametrize("command", ["why nosuchjob", "doctor"])
def test_without_the_packages_of_the_extra_a_job_can_be_examined(command):
    ended = run_alone(f"{WITHOUT}\nprint('END', main({command.split()!r}))")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == ("END 2" if "why" in command else "END 0")
    assert "not installed" not in ended.stderr


def test_a_command_that_needs_them_names_the_extra():
    ended = run_alone(f"{WITHOUT}\nprint('END', main(['top']), main(['train', '--steps=1']))")
    assert ended.stdout == "END 2 2\n", ended.stderr
    messages = [line for line in ended.stderr.splitlines() if "pip install" in line]
    assert messages == [
        "axonmpi top: error: rich is not installed: pip install 'axonmpi[train]'",
        "axonmpi train: error: tyro is not installed: pip install 'axonmpi[train]'",
    ]
