"""`axonmpi run`: scripts for torchrun run unchanged under mpirun, and end as they do without the command."""

import textwrap

import pytest
from helpers.limits import limit

from axonmpi.testing import LaunchResult, launch

EVERY_NAME = """
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from neighbour import NUMBER
from torch.distributed.device_mesh import init_device_mesh

assert __name__ == "__main__" and sys.argv[0] == __file__ and NUMBER == 5
expected = sys.argv[1]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert size == 2 and dist.is_torchelastic_launched()
for name in sys.argv[2:]:
    if name == "mesh":
        init_device_mesh("cpu", (size,))
    elif name == "options":
        dist.init_process_group("gloo", rank=rank, world_size=size, pg_options=object())
    else:
        dist.init_process_group(None if name == "none" else name)
    others = dist.new_group([1, 0], backend="gloo", timeout=timedelta(days=10_000))
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=others)
    others.monitored_barrier()
    dist.monitored_barrier(others, timedelta(hours=1), wait_all_ranks=True)
    dist.monitored_barrier()
    seen = dist.get_backend(), dist.get_backend(others), dist.get_rank(), dist.get_world_size(), tensor.tolist()
    assert seen == (expected, expected, rank, size, [6.0] * 3), (name, seen)
    dist.destroy_process_group()
print("all is well")
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that writes a script, and runs it by the command on two ranks."""

    def run_script(code: str, *arguments: str, options: tuple[str, ...] = ()) -> LaunchResult:
        (tmp_path / "neighbour.py").write_text("NUMBER = 5\n")
        (tmp_path / "script.py").write_text(textwrap.dedent(code))
        command = ["axonmpi", "run", *options, str(tmp_path / "script.py"), *arguments]
        done = launch(2, "-m", *command, timeout=limit(60), env={"OMP_NUM_THREADS": "1"})
        assert (done.timed_out, done.leftover) == (False, ()), done.stderr
        return done

    return run_script


def test_axonmpi_answers_whatever_backend_a_script_names(run) -> None:
    names = ("gloo", "nccl", "mpi", "cpu:gloo,cuda:nccl", "none", "mesh", "options")
    done = run(EVERY_NAME, "axonmpi", *names, options=("--backend", "axonmpi"))
    assert (done.returncode, done.stdout.count("all is well")) == (0, 2), done.stderr
    assert done.stderr.count("axonmpi run: 2 ranks; torch.distributed uses axonmpi\n") == 1


def test_gloo_answers_or_what_the_script_names(run) -> None:
    done = run(EVERY_NAME, "gloo", "nccl", "mpi", options=("--backend", "gloo"))
    assert (done.returncode, done.stdout.count("all is well")) == (0, 2), done.stderr
    done = run(EVERY_NAME, "gloo", "gloo")
    assert (done.returncode, done.stdout.count("all is well"), done.stderr) == (0, 2, ""), done.stderr


WORKERS = """
import os
import sys

from torch.utils.data import DataLoader, Dataset

class Ranks(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return int(os.environ["RANK"])

if __name__ == "__main__":
    assert os.path.isabs(__file__) and sys.argv[0] == "script.py"
    rank = int(os.environ["RANK"])
    for method in ("fork", "spawn"):
        loader = DataLoader(Ranks(), num_workers=1, multiprocessing_context=method)
        assert [int(seen) for seen in loader] == [rank, rank], method
    print("all is well")
"""


def test_workers_of_a_script_see_torchruns_variables(tmp_path) -> None:
    (tmp_path / "script.py").write_text(WORKERS)
    done = launch(2, "-m", "axonmpi", "run", "script.py", timeout=limit(60), cwd=tmp_path)
    assert (done.returncode, done.stdout.count("all is well")) == (0, 2), done.stderr


@pytest.mark.parametrize("options", [("-m", "package.module"), ("-mpackage.module",)], ids=["apart", "together"])
def test_a_module_runs_as_by_python_m(tmp_path, options) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("import os, sys; print(os.environ['RANK'], *sys.argv)\n")
    command = ("axonmpi", "run", *options, "--backend", "mine", "--", "-m")
    done = launch(2, "-m", *command, timeout=limit(60), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    name = tmp_path / "package" / "module.py"
    assert sorted(done.stdout.splitlines()) == [f"{rank} {name} --backend mine -- -m" for rank in range(2)]


def test_an_error_has_the_lines_of_the_script_alone(run) -> None:
    done = run(
        """
        import os

        def step():
            if os.environ["RANK"] == "1":
                raise KeyError("missing")
            input()  # there is none: this rank is ended

        step()
        """
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("[rank 1]")]
    assert done.returncode == 1
    assert lines[0] == "[rank 1] Traceback (most recent call last):"
    assert [line.rpartition(" in ")[2] for line in lines if " File " in line] == ["<module>", "step"]
    assert lines[-1] == "[rank 1] KeyError: 'missing'"


def test_exit_codes_are_the_scripts(run) -> None:
    assert run("import sys; sys.exit(3)").returncode == 3
    done = run("1 +")
    assert (done.returncode, "SyntaxError" in done.stderr, "runpy" in done.stderr) == (1, True, False)
    done = run("raise ModuleNotFoundError('gone', name='yaml')")
    assert (done.returncode, "ModuleNotFoundError: gone" in done.stderr) == (1, True)


def test_a_script_that_does_not_exist_is_refused_once(tmp_path) -> None:
    done = launch(2, "-m", "axonmpi", "run", "absent.py", timeout=limit(60), cwd=tmp_path)
    assert done.returncode == 2
    said = "axonmpi run: error: expected a script, got 'absent.py', which does not exist\n"
    assert done.stderr.count(said) == 1, done.stderr
    done = launch(1, "-m", "axonmpi", "run", timeout=limit(60))
    assert (done.returncode, done.stderr) == (2, "axonmpi run: error: expected a script, or -m and a module\n")
