"""The commands of the page on clusters, on two machines that know each other by `ssh` and a file of hosts."""

import json
import subprocess

import pytest
from helpers import REPOSITORY
from helpers.fences import Fence, fences_of
from helpers.limits import limit

from axonmpi.testing.mpirun import find_mpirun

PROBE = REPOSITORY / "tests/jobs/nodes/probe.py"
LIBRARIES = {"# MPICH": "HYDRA", "# Open MPI": "Open MPI"}
"""A line that says which library a block is for, and what its mpirun says of itself."""


def is_for_this_mpi(fence: Fence) -> bool:
    version = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True, check=False).stdout
    return all(said in version for mark, said in LIBRARIES.items() if f"{mark}\n" in fence.code)


FENCES = fences_of(REPOSITORY / "docs/cluster.md")
SCRIPTS = [f for f in FENCES if f.language == "sh" and not f.fresh_machine and is_for_this_mpi(f)]


@pytest.mark.parametrize("fence", SCRIPTS, ids=lambda fence: f"line {fence.line}")
def test_scripts_of_the_page_run_on_the_ranks_that_they_name(fence, nodes, tmp_path):
    for shown in FENCES:
        if shown.file_name:
            (tmp_path / shown.file_name).write_text(shown.code)
    machines = tmp_path / "nodefile"
    machines.write_text("n1\nn1\nn2\nn2\n")
    variables = {
        "PBS_NODEFILE": str(machines),
        "PBS_O_WORKDIR": str(tmp_path),
        "PBS_JOBNAME": "gpt",
        "PBS_JOBID": "17.server",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_hwloc_default_binding_policy": "none",  # there are fewer cores here than ranks
        "OMP_NUM_THREADS": "1",
    }
    script = fence.code.replace("axonmpi ", f"python {PROBE} ")
    printed = nodes.run_script(script, tmp_path, timeout=limit(60), env=variables)
    said = next(json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    assert said["nodes"] == ["n1", "n1", "n2", "n2"]
    if "PBS" in script:
        assert said["arguments"] == ["train", "--steps", "3", "--name", "gpt-17.server"]
    else:
        assert "2 nodes: " in printed, printed
