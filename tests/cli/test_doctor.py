"""axonmpi doctor: one report for all ranks, and an exit code that says whether a launch works."""

import json
import mmap
import re
import resource
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import mpi4py
import pytest
import torch
from helpers.compare import assert_said
from helpers.limits import limit
from helpers.programs import run_alone

from axonmpi.backends.nccl import devices, library
from axonmpi.cli import main
from axonmpi.cli.doctor import gpus as doctor
from axonmpi.cli.doctor import limits, memory, network, ranks
from axonmpi.cli.doctor.findings import Finding, as_json, as_text, problem_of
from axonmpi.errors import NcclError
from axonmpi.launch import start as runtime
from axonmpi.launch.topology import Topology
from axonmpi.testing import launch
from axonmpi.utils.device import KINDS, Device

ALONE = """
import os
from axonmpi.cli import main

print("END", main(["doctor"]))
# A launch that cannot work: the first process of a node reports it.
for rank in ("1", "0"):
    os.environ["OMPI_COMM_WORLD_SIZE"] = "2"
    os.environ["OMPI_COMM_WORLD_RANK"] = os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = rank
    print("END", main(["doctor"]))
"""


def test_a_single_process():
    ended = run_alone(ALONE)
    assert ended.returncode == 0, ended.stderr
    library = runtime.library_info()
    well, silent, speaks, last = ended.stdout.split("END ")
    versions = ("python ", "torch ", "mpi4py ", f"{library.vendor} {library.version} from {library.path}")
    launched = ("ranks         1 on 1 node", "MPI_THREAD_MULTIPLE", "no launcher's", library.mpirun)
    assert_said(well, *versions, *launched, "/dev/shm", "GPUs\n  ")
    assert_said(well, "  path ", "PROBLEM", times=0)
    assert (silent, speaks[:2], last) == ("0\n", "1\n", "1\n")
    seen = "seen          Open MPI: OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2"
    assert_said(speaks, "PROBLEM: the launcher and MPI disagree", seen)


def test_a_missing_library(monkeypatch, capsys):
    monkeypatch.delattr(mpi4py, "MPI", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    assert main(["doctor"]) == 1
    assert "PROBLEM: only a single rank can run: mpi4py cannot load an MPI library" in capsys.readouterr().out


PRELUDE = """
import errno, os, resource
from axonmpi.backends.connection import segment as shared_memory
from axonmpi.launch import start as runtime
from axonmpi.cli import main

rank = runtime.start_mpi().COMM_WORLD.rank
accept, large = shared_memory._accept, resource.getrlimit(resource.RLIMIT_FSIZE)[1]

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

def doctor_without_permission():
    shared_memory._accept = refuse
    doctor()
    shared_memory._accept = accept

def doctor_with_small_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, large))
    doctor()

"""
PLAIN = "path          plain: by MPI alone, "
UNSHARED = f"{PLAIN}slower: the ranks of a node cannot share memory"
WORKS = {
    'doctor("--json")': [],
    "doctor()": [
        *("ranks         3 on 1 node", "path          node: through memory that all ranks share"),
        *(f"local rank {rank} of 3, CPUs " for rank in range(3)),
    ],
    'doctor(AXONMPI_RANKS_PER_NODE="2")': [
        "path          nodes: through memory that the ranks of a node share, by MPI between nodes",
    ],
    'doctor(AXONMPI_RANKS_PER_NODE="1")': [f"{PLAIN}as no two ranks are on one node"],
    'doctor(AXONMPI_COLLECTIVES="plain")': [f"{PLAIN}as AXONMPI_COLLECTIVES=plain wants it"],
    "doctor_without_permission()": [
        *(UNSHARED, "because of PermissionError: [Errno 13] Permission denied: '/proc/", "All works, with "),
        "do: ranks have to be processes of one user who see each other",
    ],
    "doctor_with_small_files()": [
        *(UNSHARED, "because of OSError: [Errno 27] File too large", "All works, with ", "ulimit -f unlimited"),
    ],
}
FAILS = {
    'doctor(of=[1], AXONMPI_COLLECTIVES="plain")': (
        "AXONMPI_COLLECTIVES: expected the same on all ranks, got 'plain' on 1 of them only\n"
    ),
    'doctor(of=[1], AXONMPI_COLLECTIVES="shared")': (
        "AXONMPI_COLLECTIVES: expected 'auto' or 'plain', got 'shared'\n"
    ),
    'doctor(of=[1], AXONMPI_RANKS_PER_NODE="x")': ("AXONMPI_RANKS_PER_NODE: expected a positive number, got 'x'\n"),
    # Variables by which no rank is the first.
    'doctor(RANK="1", WORLD_SIZE="3")': "on ranks 0, 2 the launcher and MPI disagree",
}
"""What ranks do, and what the report has to say; a setting may be on one rank only."""


def test_ranks_give_one_report_of_each_thing_that_may_be_wrong():
    result = launch(3, PRELUDE + "\n".join([*FAILS, *WORKS]), timeout=limit(60), env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    reports = dict(zip([*FAILS, *WORKS], result.stdout.split("END\n")[:-1], strict=True))
    data = json.loads(reports['doctor("--json")'].rpartition("code 0")[0])
    assert data["problem"] == ""
    lines = {line["name"]: line for section in data["sections"].values() for line in section}
    well = reports["doctor()"]
    for name in ("affinity", "clocks", "nofile", "memlock", "stack", "nproc", "/dev/shm", "fabric", "all-reduce"):
        assert lines[name]["state"] in ("ok", "warn")
        assert re.search(
            rf"^  (ok  |warn)  {name:13} ", well, re.MULTILINE
        )  # a busy machine may be worth a warning
    assert re.match("(at most|up to) [0-9]", lines["clocks"]["text"])
    assert well.count("1 thread (OMP_NUM_THREADS=1 is set)") == 3
    for call, texts in WORKS.items():
        assert ("PROBLEM" in reports[call], reports[call].endswith("\ncode 0 ")) == (False, True)
        assert_said(reports[call], *texts, times=1)
    for call, problem in FAILS.items():
        assert_said(reports[call], f"PROBLEM: {problem}", "\ncode 1 ", times=1)


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
    assert (as_text(report).splitlines()[-1], problem_of(report)) == ("All works, with 1 warning.", "")


def test_what_is_measured_is_judged(monkeypatch):
    """Cores shared beside idle ones, clocks that differ, limits that are low, all-reduces that are slow."""
    monkeypatch.setattr(limits, "_locked_memory", lambda ranks: 0)
    of = {each.name: each for each in limits._LIMITS}
    one, other, unlimited = frozenset([0]), frozenset([0, 1]), resource.RLIM_INFINITY
    idle = "ranks 0, 2 share cores, and nothing runs on 3 other cores of their nodes"
    for finding, state, text in (
        (ranks.judged_affinity([(0, one, 4), (1, other, 2), (0, one, 4), (1, other, 2)]), "warn", idle),
        (ranks.judged_affinity([(0, one, 1), (0, one, 1), (1, other, 2)]), "ok", ""),  # more ranks than cores
        (ranks.clock_skew([0.0, 0.02, -3.0]), "warn", "up to 3.02 s apart; not as rank 0's: rank 2"),
        (ranks.clock_skew([0.0, 0.02]), "ok", "at most 20 ms apart"),
        (limits.judged(of["nofile"], [1024, 64, unlimited]), "warn", "64 on rank 1:"),
        (limits.judged(of["stack"], [unlimited]), "ok", "unlimited"),
        (limits.judged(of["memlock"], [8 << 20]), "ok", "8 MiB"),
        (network.judged_speed(1e-5, 1e-3, 1), "ok", "4 bytes 10 µs, 1 MiB 1.00 ms: 1.05 GB/s a rank"),
        (network.judged_speed(2e-3, 1e-3, 2), "warn", ""),
        (network.judged_speed(1e-5, 1.0, 2), "warn", ""),
    ):
        assert (finding.state, finding.text[: len(text)]) == (state, text)


def test_files_of_jobs_that_have_ended(tmp_path):
    for name in ("mpich_shm_1_0", "vader_segment.n1.0.2", "somebody's", "mpich_shm_2_0"):
        (tmp_path / name).write_bytes(bytes(4096))
    with open(tmp_path / "mpich_shm_2_0") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert memory.left_by_jobs(tmp_path) == [("mpich_shm_1_0", 4096), ("vader_segment.n1.0.2", 4096)]
    assert [len(memory.left_by_jobs(folder)) for folder in (tmp_path, tmp_path / "none")] == [3, 0]


@pytest.fixture
def report_of(monkeypatch):
    """Return a function that gives what rank 0 prints of GPUs.

    Rank i seems to be on node `nodes[i]` and to see `counts[i]` GPUs; pairs `apart` do not reach each other, and
    `missing` is the error of a missing NCCL.
    """
    libnccl = SimpleNamespace(version="2.30.4", cuda_variant="13.0", path="/opt/libnccl.so.2")
    versions = SimpleNamespace(libnccl=libnccl, nccl4py="0.6.0")
    nccl = SimpleNamespace(core=SimpleNamespace(get_version=lambda: versions))
    for module, name, value in (
        (torch.version, "cuda", "13.0"),
        (doctor, "driver_version", lambda: "580.95.05"),
        (devices, "gpu_identity", lambda index: f"uuid-{index}"),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setitem(KINDS, "cuda", Device)

    def report_of(nodes, counts, apart=(), missing=None):
        load = Mock(return_value=nccl, side_effect=missing)
        monkeypatch.setattr(library, "load", load)
        monkeypatch.setattr(library, "nccl_version", lambda: load() and (2, 30, 4))
        monkeypatch.setattr(doctor, "peer_access", lambda one, other: (one, other) not in apart)
        told = []
        for rank in reversed(range(len(nodes))):
            for module in (doctor, devices):
                monkeypatch.setattr(module, "gpu_count", Mock(return_value=counts[rank]))
            comm = SimpleNamespace(gather=lambda own: told.insert(0, own) or list(told))
            lines = doctor.gpus(SimpleNamespace(comm=comm, topology=Topology.of(nodes, rank)))
        return "\n".join(f"{line.name}: {line.text}" for line in lines)

    return report_of


def test_gpus_of_two_nodes(report_of):
    report = report_of([0, 0, 1], [2, 2, 1])
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


@pytest.mark.parametrize(
    ("seen", "texts"),
    [
        (([0, 0], [0, 0]), ["GPU: none that this process sees"]),
        (([0], [3], {(0, 1), (2, 0)}), ["but 0 and 1, 0 and 2, on the node of rank 0"]),
        (([0], [2], {(1, 0)}), ["peer access: between none of the 2 GPUs"]),
        (
            ([0, 0, 0, 1], [2, 2, 2, 0]),
            ["rank 2: no GPU that can be used: 3 ranks on this node", "rank 3: no GPU\n"],
        ),
        (
            ([0], [1], (), NcclError("nccl4py cannot be imported\nInstall it: pip install 'axonmpi[nccl]'")),
            ["NCCL: nccl4py cannot be imported\nInstall it: ", "rank 0: no GPU that can be used: nccl4py"],
        ),
    ],
    ids=["none", "apart", "all apart", "too few", "no NCCL"],
)
def test_gpus_that_are_missing_do_not_reach_each_other_or_cannot_be_used(seen, texts, report_of):
    assert_said(report_of(*seen), *texts)
