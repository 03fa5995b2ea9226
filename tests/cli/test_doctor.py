"""axonmpi doctor: one report for all ranks, and an exit code that says whether a launch works."""

import json
import mmap
import resource
from types import SimpleNamespace

import pytest
import torch

from axonmpi.backends.nccl import devices, library
from axonmpi.cli.doctor import gpus as doctor
from axonmpi.cli.doctor import limits, memory, network, ranks
from axonmpi.cli.doctor.findings import Finding, as_json, as_text, problem_of
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
    assert "PROBLEM" not in well
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

    def doctor(*options, of=(0, 1, 2), **env):
        if rank in of:
            os.environ.update(env)
        code = main(["doctor", *options])
        if rank == 0:
            print("code", code, "END", flush=True)
        for name in env:
            os.environ.pop(name, None)

    def refuse(offered, total):
        raise PermissionError(errno.EACCES, "Permission denied", f"/proc/{offered[0]}/fd/{offered[1]}")

    doctor()
    doctor("--json")
    doctor(AXONMPI_RANKS_PER_NODE="2")
    doctor(AXONMPI_RANKS_PER_NODE="1")
    doctor(AXONMPI_COLLECTIVES="plain")
    doctor(of=[1], AXONMPI_COLLECTIVES="plain")
    doctor(of=[1], AXONMPI_COLLECTIVES="shared")
    doctor(of=[1], AXONMPI_RANKS_PER_NODE="x")
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
    well, as_data, nodes, alone, plain, uneven, unknown, no_number, left_over, permission, limit = reports
    data = json.loads(as_data.rpartition("code 0")[0])
    assert data["problem"] == ""
    lines = {line["name"]: line for section in data["sections"].values() for line in section}
    for name in ("affinity", "clocks", "nofile", "memlock", "stack", "nproc", "/dev/shm", "fabric", "all-reduce"):
        assert lines[name]["state"] in ("ok", "warn")
        assert f"  {lines[name]['state']:4}  {name:13} " in well
    assert lines["clocks"]["text"].startswith("at most ")
    assert "ranks         3 on 1 node" in well
    for rank in range(3):
        assert well.count(f"local rank {rank} of 3, CPUs ") == 1
    assert well.count("1 thread (OMP_NUM_THREADS=1 is set)") == 3
    assert "path          node: through memory that all ranks share" in well
    assert "path          nodes: through memory that the ranks of a node share, by MPI between nodes" in nodes
    assert "path          plain: by MPI alone, as no two ranks are on one node" in alone
    assert "path          plain: by MPI alone, as AXONMPI_COLLECTIVES=plain wants it" in plain
    for report in (well, nodes, alone, plain):
        assert "PROBLEM" not in report  # a busy machine may be worth a warning
        assert report.endswith("\ncode 0 ")
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
        assert "All works, with " in report
    assert "because of PermissionError: [Errno 13] Permission denied: '/proc/" in permission
    assert "do: ranks have to be processes of one user who see each other" in permission
    assert "because of OSError: [Errno 27] File too large" in limit
    assert "ulimit -f unlimited" in limit


def test_what_is_not_well_says_what_to_do():
    report = {
        "memory": [Finding("/dev/shm", "4 MiB\nsmall", "warn", "enlarge it")],
        "MPI": [Finding("library", "there is none", "fail", "install one"), Finding("other", "fine")],
    }
    assert as_text(report).splitlines() == [
        "memory",
        "  warn  /dev/shm      4 MiB",
        "                      small",
        "                      do: enlarge it",
        "MPI",
        "  fail  library       there is none",
        "                      do: install one",
        "  ok    other         fine",
        "",
        "PROBLEM: there is none",
    ]
    assert json.loads(as_json(report))["sections"]["memory"][0]["todo"] == "enlarge it"
    del report["MPI"]
    assert as_text(report).endswith("All works, with 1 warning.\n")
    assert problem_of(report) == ""


def test_ranks_on_one_core_beside_idle_ones_and_clocks_that_differ():
    one, other = frozenset([0]), frozenset([0, 1])
    assert ranks.affinity([(0, one, 4), (1, other, 2), (0, one, 4), (1, other, 2)]).text == (
        "ranks 0, 2 share cores, and nothing runs on 3 other cores of their nodes"
    )
    assert ranks.affinity([(0, one, 1), (0, one, 1), (1, other, 2)]).state == "ok"  # more ranks than cores
    found = ranks.clock_skew([0.0, 0.02, -3.0])
    assert (found.state, found.text) == ("warn", "up to 3.02 s apart; not as rank 0's: rank 2")
    assert ranks.clock_skew([0.0, 0.02]).text == "at most 20 ms apart"


def test_limits_that_are_low_on_some_ranks(monkeypatch):
    of = {limit.name: limit for limit in limits._LIMITS}
    low = limits.judged(of["nofile"], [1024, 64, resource.RLIM_INFINITY])
    assert (low.state, low.text.partition(":")[0]) == ("warn", "64 on rank 1")
    assert limits.judged(of["stack"], [resource.RLIM_INFINITY]) == Finding("stack", "unlimited")
    monkeypatch.setattr(limits, "_locked_memory", lambda ranks: 0)
    assert limits.judged(of["memlock"], [8 << 20]) == Finding("memlock", "8 MiB")


def test_files_of_jobs_that_have_ended(tmp_path):
    for name in ("mpich_shm_1_0", "vader_segment.n1.0.2", "somebody's", "mpich_shm_2_0"):
        (tmp_path / name).write_bytes(bytes(4096))
    with open(tmp_path / "mpich_shm_2_0") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert memory.left_by_jobs(tmp_path) == [("mpich_shm_1_0", 4096), ("vader_segment.n1.0.2", 4096)]
    assert len(memory.left_by_jobs(tmp_path)) == 3
    assert memory.left_by_jobs(tmp_path / "none") == []


def test_an_all_reduce_that_is_slow():
    assert network.judged_speed(1e-5, 1e-3, 1).text == "4 bytes 10 µs, 1 MiB 1.00 ms: 1.05 GB/s a rank"
    for latency, seconds in ((2e-3, 1e-3), (1e-5, 1.0)):
        assert network.judged_speed(latency, seconds, 2).state == "warn"


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
            lines = doctor.gpus(SimpleNamespace(comm=comm, topology=Topology.of(nodes, rank)))
        return "\n".join(f"{line.name}: {line.text}" for line in lines)


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
        "sharing: several ranks use one GPU:",
        *report.splitlines()[6:-2],
        "peer access: between all 2 GPUs, on the node of rank 0",
        "peer access: not known, as each process sees one GPU, on the node of rank 2",
    ]
    assert "ranks 0, 2: use GPU uuid-0" in report


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
    assert "NCCL: nccl4py cannot be imported\nInstall it, with NCCL: pip install" in report
    assert "rank 0: no GPU that can be used: nccl4py" in report
