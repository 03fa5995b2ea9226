"""Processes that ranks fork or spawn leave MPI alone and see no launcher."""

import pytest

from axonmpi.testing import launch

pytestmark = pytest.mark.cold

# Workers that are spawned import the script again, so what the rank does is behind a guard.
SCRIPT = """
import multiprocessing
import os
import torch
import axonmpi as ax
from axonmpi import environment

class Look(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        seen = set(os.environ) - set(environment.without_launcher_variables(os.environ))
        try:
            ax.World.init("mpi")
        except ax.LaunchError as error:
            return sorted(seen), environment.detect_launchers(), str(error)
        return sorted(seen), [], "started"

if __name__ == "__main__":
    world = ax.init_process_group()
    before = dict(os.environ)
    assert environment.launched_ranks() == 2
    for method in ("fork", "forkserver", "spawn"):
        loader = torch.utils.data.DataLoader(
            Look(), num_workers=1, collate_fn=list, multiprocessing_context=method
        )
        for item in loader:
            (seen, launchers, message), = item
            assert seen == ["AXONMPI_PARENT_RANK"], seen
            assert launchers == []
            assert f"forked or spawned by rank {world.rank}, and MPI belongs to that rank alone" in message, message
        ax.barrier()
        assert dict(os.environ) == before
    print("done")
"""


def test_data_loader_workers():
    result = launch(2, SCRIPT, timeout=200, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["done", "done"]
    assert result.leftover == ()


def test_a_fork_server_from_before_is_noticed():
    script = """
    import multiprocessing

    def look():
        import axonmpi as ax
        try:
            ax.init_process_group()
        except ax.LaunchError as error:
            raise SystemExit(7 if "forked or spawned by a rank of the job" in str(error) else 8)

    if __name__ == "__main__":
        context = multiprocessing.get_context("forkserver")
        first = context.Process(target=print, args=("the server runs",))
        first.start()
        first.join()
        import axonmpi as ax
        world = ax.init_process_group()
        child = context.Process(target=look)
        child.start()
        child.join()
        assert child.exitcode == 7, child.exitcode
    """
    result = launch(2, script, timeout=200, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr


def test_a_group_inherited_by_a_fork_is_closed(job):
    ended = job(
        2,
        """
        child = os.fork()
        if child == 0:
            try:
                ax.barrier()
            except ax.CommunicatorError as error:
                assert f"this process is a fork of rank {world.rank}" in str(error)
                os._exit(7)
            os._exit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        ax.barrier()
        """,
    )
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "forked or spawned by rank 2"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "the launcher and MPI disagree"),
    ],
    ids=["child", "rank of a new job"],
)
def test_a_child_that_is_a_rank_of_a_new_job_may_start(alone, env, said):
    ended = alone("import axonmpi as ax; ax.init_process_group()", AXONMPI_PARENT_RANK="2", **env)
    assert ended.returncode == 1
    assert said in ended.stderr


def test_children_of_a_process_without_mpi_may_start(alone):
    ended = alone(
        """
        import multiprocessing, sys
        sys.modules["mpi4py"] = None
        import axonmpi as ax

        def work():
            ax.World.init("mpi")
            raise SystemExit(7)

        ax.init_process_group()
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join()
        assert child.exitcode == 7
        """
    )
    assert ended.returncode == 0, ended.stderr
