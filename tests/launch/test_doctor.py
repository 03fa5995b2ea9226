"""axonmpi doctor: one report for all ranks, and an exit code that says whether a launch works."""

from types import SimpleNamespace

import pytest
import torch

from axonmpi.backends.nccl import devices, library
from axonmpi.cli import doctor
from axonmpi.errors import NcclError
from axonmpi.launch import start as runtime
from axonmpi.launch.topology import Topology
from axonmpi.testing import launch
from axonmpi.utils.device import KINDS, Device


def test_a_single_process(alone):
    ended = alone(
        """
        import os
        from axonmpi.cli import main
        print("END", main(["doctor"]))
        for rank in ("1", "0"):
            os.environ["OMPI_COMM_WORLD_SIZE"] = "2"
            os.environ["OMPI_COMM_WORLD_RANK"] = os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = rank
            print("END", main(["doctor"]))
        """
    )
    library = runtime.library_info()
    assert ended.returncode == 0, ended.stderr
    well, silent, speaks, last = ended.stdout.split("END ")
    assert f"{library.vendor} {library.version} from {library.path}" in well
    for part in (
        "python ",
        "torch ",
        "mpi4py ",
        "MPI_THREAD_MULTIPLE",
        "no launcher's",
        "/dev/shm",
        library.mpirun,
    ):
        assert part in well
    assert "ranks         1 on 1 node" in well
    assert "  path " not in well
    assert "GPUs\n  " in well
    assert well.endswith("All is well.\n")
    # a launch that cannot work
    assert silent == "0\n"
    assert "PROBLEM: the launcher and MPI disagree" in speaks
    assert "seen          Open MPI: OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2" in speaks
    assert (speaks[0], last) == ("1", "1\n")


def test_a_missing_library(alone):
    ended = alone("import sys; from axonmpi.cli import main; sys.exit(main(['doctor']))", MPI4PY_LIBMPI="/gone.so")
    assert ended.returncode == 1
    assert "PROBLEM: only a single rank can run: mpi4py cannot load an MPI library" in ended.stdout


DOCTORS = """
    import errno, os, resource
    from axonmpi.backends.shared import segment as shared_memory
    from axonmpi.launch import start as runtime
    from axonmpi.cli import main

    rank = runtime.start_mpi().COMM_WORLD.rank

    def doctor(of=(0, 1, 2), **env):
        if rank in of:
            os.environ.update(env)
        code = main(["doctor"])
        if rank == 0:
            print("code", code, "END", flush=True)
        for name in env:
            os.environ.pop(name, None)

    def refuse(offered, total):
        raise PermissionError(errno.EACCES, "Permission denied", f"/proc/{offered[0]}/fd/{offered[1]}")

    doctor()
    doctor(AXONMPI_RANKS_PER_NODE="2")
    doctor(AXONMPI_RANKS_PER_NODE="1")
    doctor(AXONMPI_COLLECTIVES="plain")
    doctor([1], AXONMPI_COLLECTIVES="plain")
    doctor([1], AXONMPI_COLLECTIVES="shared")
    doctor([1], AXONMPI_RANKS_PER_NODE="x")
    doctor(RANK="1", WORLD_SIZE="3")
    accept, shared_memory._accept = shared_memory._accept, refuse
    doctor()
    shared_memory._accept = accept
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    doctor()
"""


def test_ranks_give_one_report_of_each_thing_that_may_be_wrong():
    """Also of settings on one rank only, where the doctor does not wait for the others for ever."""
    result = launch(3, DOCTORS, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    reports = result.stdout.split("END\n")[:-1]
    well, nodes, alone, plain, uneven, unknown, no_number, left_over, permission, limit = reports
    assert "ranks         3 on 1 node" in well
    for rank in range(3):
        assert well.count(f"local rank {rank} of 3, CPUs ") == 1
    assert well.count("1 thread (OMP_NUM_THREADS=1 is set)") == 3
    assert "path          node: through memory that all ranks share" in well
    assert "path          nodes: through memory that the ranks of a node share, by MPI between nodes" in nodes
    assert "path          plain: by MPI alone, as no two ranks are on one node" in alone
    assert "path          plain: by MPI alone, as AXONMPI_COLLECTIVES=plain wants it" in plain
    for report in (well, nodes, alone, plain):
        assert report.endswith("All is well.\ncode 0 ")
    for report, problem in (
        (uneven, "AXONMPI_COLLECTIVES: expected the same on all ranks, got 'plain' on 1 of them only"),
        (unknown, "AXONMPI_COLLECTIVES: expected 'auto' or 'plain', got 'shared'"),
        (no_number, "AXONMPI_RANKS_PER_NODE: expected a positive number, got 'x'"),
    ):
        assert report.endswith(f"PROBLEM: {problem}\ncode 1 ")
    # variables by which no rank is the first
    assert left_over.count("PROBLEM: on ranks 0, 2 the launcher and MPI disagree") == 1
    for report in (permission, limit):
        assert "path          plain: by MPI alone, slower: the ranks of a node cannot share memory" in report
        assert report.endswith("code 0 ")
    assert "because of PermissionError: [Errno 13] Permission denied: '/proc/" in permission
    assert "in one container" in permission
    assert "because of OSError: [Errno 27] File too large" in limit
    assert "ulimit -f unlimited" in limit


class Gpus:
    """GPUs that a node seems to have, and what the doctor says of them, rank by rank."""

    def __init__(self, monkeypatch) -> None:
        self.count, self.apart, self.missing = 2, set(), None
        self.library = SimpleNamespace(version="2.30.4", cuda_variant="13.0", path="/opt/libnccl.so.2")
        self.version = SimpleNamespace(libnccl=self.library, nccl4py="0.6.0")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(library, "load", self.load)
        monkeypatch.setattr(library, "nccl_version", lambda: self.load() and (2, 30, 4))
        monkeypatch.setattr(doctor, "driver_version", lambda: "580.95.05")
        monkeypatch.setattr(doctor, "peer_access", lambda one, other: (one, other) not in self.apart)
        for module in (doctor, devices):
            monkeypatch.setattr(module, "gpu_count", lambda: self.count)
        monkeypatch.setattr(devices, "gpu_identity", lambda index: f"uuid-{index}")
        monkeypatch.setitem(KINDS, "cuda", Device)

    def load(self):
        if self.missing is not None:
            raise self.missing
        return SimpleNamespace(core=SimpleNamespace(get_version=lambda: self.version))

    def report(self, nodes: list[int], counts: list[int]) -> str:
        """What rank 0 prints, where rank i is on node `nodes[i]` and sees `counts[i]` GPUs."""
        told = []
        for rank in reversed(range(len(nodes))):
            self.count = counts[rank]
            comm = SimpleNamespace(gather=lambda own: told.insert(0, own) or list(told))
            lines = doctor._gpus(SimpleNamespace(comm=comm, topology=Topology.of(nodes, rank)))
        return "\n".join(f"{name}: {text}" for name, text in lines)


@pytest.fixture
def gpus(monkeypatch) -> Gpus:
    return Gpus(monkeypatch)


def test_gpus_of_two_nodes(gpus):
    report = gpus.report([0, 0, 1], [2, 2, 1])
    assert report.splitlines() == [
        "CUDA: 13.0 of torch, driver 580.95.05",
        "NCCL: 2.30.4 for CUDA 13.0 from /opt/libnccl.so.2, through nccl4py 0.6.0",
        "rank 0: local rank 0: GPU 0 of 2 visible, CUDA, uuid-0",
        "rank 1: local rank 1: GPU 1 of 2 visible, CUDA, uuid-1",
        "rank 2: local rank 0: GPU 0 of 1 visible, CUDA, uuid-0",
        ": several ranks use one GPU:",
        *report.splitlines()[6:-2],
        "peer access: between all 2 GPUs, on the node of rank 0",
        "peer access: not known, as each process sees one GPU, on the node of rank 2",
    ]
    assert ": ranks 0, 2: use GPU uuid-0" in report


def test_gpus_that_are_missing_do_not_reach_each_other_or_cannot_be_used(gpus):
    assert gpus.report([0, 0], [0, 0]) == "GPU: none that this process sees"
    gpus.apart = {(0, 1), (2, 0)}
    assert "but 0 and 1, 0 and 2, on the node of rank 0" in gpus.report([0], [3])
    gpus.apart = {(1, 0)}
    assert "peer access: between none of the 2 GPUs" in gpus.report([0], [2])
    report = gpus.report([0, 0, 0, 1], [2, 2, 2, 0])
    assert "rank 2: no GPU that can be used: 3 ranks on this node" in report
    assert "rank 3: no GPU\n" in report
    gpus.missing = NcclError("nccl4py cannot be imported\nInstall it, with NCCL: pip install 'axonmpi[nccl]'")
    report = gpus.report([0], [1])
    assert "NCCL: nccl4py cannot be imported\n: Install it, with NCCL: pip install" in report
    assert "rank 0: no GPU that can be used: nccl4py" in report
