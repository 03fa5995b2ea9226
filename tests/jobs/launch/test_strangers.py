"""Jobs beside another user of the machine, who makes the library's names in /dev/shm first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.limits import limit

from axonmpi.launch.launcher_variables import without_launcher_variables
from axonmpi.testing.mpirun import find_mpirun, mpirun_command

STRANGER = 54321
PROGRAM = """
import axonmpi as ax
from axonmpi.launch import pmi_connection
from axonmpi.record import files
from axonmpi.launch.launcher_variables import number_in
from axonmpi.observe import records_of, watchdog
ax.init_process_group()
record = files.own_record()
folder = record.path.parent.name if record.path else "none"
ranks = len(records_of(record.identity["job"])) if record.path else 0
needs = number_in(None, "PMI_FD") is not None and record.path is not None
as_needed = bool(pmi_connection._held) == needs
print(f"{folder} ranks={ranks} watched={watchdog._watchdog is not None} held={as_needed}\\n", end="", flush=True)
"""


def run_beside(planting: str, folder: Path, mode: int = 1777) -> subprocess.CompletedProcess[str]:
    """Run two ranks in a mount namespace of their own, where a stranger runs `planting` first.

    Args:
        planting: Commands of a shell.
        folder: Folder for the program.
        mode: Of /dev/shm, in octal digits.
    """
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command, variables = mpirun_command(find_mpirun(), 2)
    as_stranger = f"setpriv --reuid {STRANGER} --regid {STRANGER} --clear-groups sh -c {planting!r}"
    script = f'mount -t tmpfs -o mode={mode} tmpfs /dev/shm && {as_stranger} && shift && exec "$@"'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-ec", script, "sh", "", *command, sys.executable, str(program)],
        env={**without_launcher_variables(), **variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit(60),
        check=False,
    )


@pytest.fixture(scope="module", autouse=True)
def second_user():
    """Skip where no process of another user can be started in a mount namespace of its own."""
    trial = ["unshare", "--mount", "setpriv", "--reuid", str(STRANGER), "--clear-groups", "true"]
    try:
        allowed = os.geteuid() == 0 and subprocess.run(trial, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("needs root, unshare and setpriv, to be two users")


PLANTS = {
    "link": "ln -s {victim} /dev/shm/axonmpi-0",
    "folders": "mkdir -m 700 /dev/shm/axonmpi-0 && mkdir -m 777 /dev/shm/axonmpi-0-0123456789abcdef",
}
"""Other kinds of files are planted in `tests/record/test_record.py`."""


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_a_planted_name_takes_no_file_and_the_job_is_watched_all_the_same(tmp_path, plant) -> None:
    victim = tmp_path / "runs"
    victim.mkdir(mode=0o700)
    files = {victim / name for name in ("train-0001.csv", "weights-2.bin", "0123abcd-0.stacks")}
    for file in files:
        file.touch()
    ended = run_beside(plant.format(victim=victim), tmp_path)
    lines = ended.stdout.splitlines()
    assert (ended.returncode, len(lines), set(victim.iterdir())) == (0, 2, files), ended.stderr
    for line in lines:
        folder, _, rest = line.partition(" ")
        assert (folder.startswith("axonmpi-0-"), folder.endswith("0123456789abcdef")) == (True, False)
        assert rest == "ranks=2 watched=True held=True"
    assert "Warning" not in ended.stderr


def test_where_names_cannot_be_protected_it_is_said_once(tmp_path) -> None:
    ended = run_beside("true", tmp_path, mode=777)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["none ranks=0 watched=False held=True"] * 2
    assert ended.stderr.count("expected mode 1777") == 1
    assert "ranks 0, 1" in ended.stderr
