"""What the launchers' variables mean, and what is said when they do not fit MPI's world."""

import os

import pytest

from axonmpi.launch.check import MpiLibrary, check_launch, check_protocol, check_room
from axonmpi.launch.cpu import core_to_keep_to, share_of_cores, usable_cores
from axonmpi.launch.launcher_variables import (
    PARENT_RANK,
    child_environment,
    detect_launchers,
    launched_ranks,
    parent_rank,
    variables_for_mpi,
    without_launcher_variables,
)
from axonmpi.launch.user_variables import user_threads

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8"}
MPICH = {**PMI, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
INTEL = {**MPICH, "I_MPI_MPIRUN": "mpirun"}
PMIX = {"PMIX_RANK": "5", "PMIX_NAMESPACE": "job"}
SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}
RANK = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN = {
    **RANK,
    "TORCHELASTIC_RUN_ID": "none",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "n7",
    "MASTER_PORT": "29500",
}
# mpirun in a batch job: Slurm's variables are those of the daemons that mpirun has started, one on each node
DAEMONS = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}

FULL = (5, 8, 1, 4)
RECOGNISED = {
    "nothing": ({"PATH": "/bin"}, []),
    "open mpi": (OPEN_MPI, [("Open MPI", *FULL)]),
    "open mpi with pmix": ({**OPEN_MPI, **PMIX}, [("Open MPI", *FULL)]),
    "open mpi in a batch job": ({**OPEN_MPI, **PMIX, **DAEMONS}, [("Open MPI", *FULL)]),
    "mvapich": (MVAPICH, [("MVAPICH", *FULL)]),
    "mvapich in a batch job": ({**MVAPICH, **DAEMONS}, [("MVAPICH", *FULL)]),
    "mpich": (MPICH, [("MPICH", *FULL)]),
    "mpich in a batch job": ({**MPICH, **DAEMONS}, [("MPICH", *FULL)]),
    "intel": (INTEL, [("Intel MPI", *FULL)]),
    "srun, pmi2": ({**PMI, **SLURM}, [("PMI", 5, 8, None, None)]),
    "srun, pmix": ({**PMIX, **SLURM}, [("PMIx", 5, None, None, None), ("Slurm", 5, 8, 1, None)]),
    "srun, none": (SLURM, [("Slurm", 5, 8, 1, None)]),
    "a batch script": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, []),
    "torchrun": (TORCHRUN, [("torchrun", *FULL)]),
    "set by hand": ({"WORLD_SIZE": "2", "RANK": "0"}, [("RANK/WORLD_SIZE", 0, 2, None, None)]),
    "size alone": ({"WORLD_SIZE": "2"}, [("RANK/WORLD_SIZE", None, 2, None, None)]),
    "rank alone": ({"RANK": "3"}, []),
    "no numbers": ({"RANK": "gold", "WORLD_SIZE": "big", "PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": "-1"}, []),
    "two at once": ({**MPICH, **RANK}, [("MPICH", *FULL), ("RANK/WORLD_SIZE", *FULL)]),
}


@pytest.mark.parametrize(("env", "expected"), RECOGNISED.values(), ids=RECOGNISED)
def test_launchers_are_recognised(env, expected):
    found = detect_launchers(env)
    assert [(one.name, one.rank, one.size, one.local_rank, one.local_size) for one in found] == expected
    for one in found:
        assert dict(one.variables).items() <= env.items()


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        ({}, 1),
        (OPEN_MPI, 8),
        ({**MPICH, **DAEMONS}, 8),
        (SLURM, 8),
        (PMIX, 6),
        ({"PMIX_RANK": "0"}, 1),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, 4),
    ],
)
def test_number_of_launched_ranks(env, ranks):
    assert launched_ranks(env) == ranks


def test_the_process_environment_is_the_default(monkeypatch):
    for name in set(os.environ) - set(without_launcher_variables(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert (launched_ranks(), [one.size for one in detect_launchers()]) == (7, [7])
    assert "WORLD_SIZE" not in without_launcher_variables()


@pytest.mark.parametrize("env", [OPEN_MPI, MVAPICH, MPICH, INTEL, PMIX, {**PMI, **SLURM}, TORCHRUN])
def test_nothing_is_recognised_once_launcher_variables_are_taken_away(env):
    kept = without_launcher_variables({**env, PARENT_RANK: "3"})
    assert (detect_launchers(kept), parent_rank(kept)) == ([], None)
    assert kept.keys() <= {"SLURM_NTASKS", "MASTER_ADDR", "MASTER_PORT"}


def test_settings_and_the_allocation_stay_for_the_next_job():
    settings = {
        "PATH": "/bin",
        "OMPI_MCA_btl": "tcp,self",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "HYDRA_LAUNCHER": "ssh",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "MASTER_ADDR": "n1",
    }
    of_this_job = {
        **OPEN_MPI,
        "OMPI_MCA_num_procs": "8",
        "OMPI_FILE_LOCATION": "/tmp/x",
        "PMIX_SERVER_URI41": "u",
        "PRTE_LAUNCHED": "1",
        "PMI_FD": "9",
        "HYDI_CONTROL_FD": "7",
        "SLURM_STEP_ID": "0",
    }
    assert without_launcher_variables({**settings, **of_this_job}) == settings


# ---- launch check -----------------------------------------------------------------------------------------------

MPICH_LIBRARY = MpiLibrary("MPICH", "5.0.2", "/opt/mpich/lib/libmpi.so.12", "/opt/mpich/bin/mpirun")
OPEN_MPI_LIBRARY = MpiLibrary("Open MPI", "5.0.11", "/opt/ompi/lib/libmpi.so.40", "/opt/ompi/bin/mpirun")
UNKNOWN_LIBRARY = MpiLibrary("Some MPI", "1.0", None, None)


SILENT = [
    *((env, 5, 8) for env in ({}, OPEN_MPI, MVAPICH, MPICH, INTEL, PMIX, TORCHRUN)),
    *((env, 5, 8) for env in ({**PMI, **SLURM}, {**PMIX, **SLURM}, {**MPICH, **RANK})),
    *((env, 0, 1) for env in ({}, {"WORLD_SIZE": "1", "RANK": "0"}, {"PMIX_RANK": "0"}, {"SLURM_NTASKS": "8"})),
    ({"WORLD_SIZE": "8"}, 5, 8),
    (SLURM, 2, 8),  # it may number the ranks in another order
]


@pytest.mark.parametrize(("env", "rank", "size"), SILENT)
def test_agreement_is_silent(env, rank, size):
    for library in (MPICH_LIBRARY, OPEN_MPI_LIBRARY, UNKNOWN_LIBRARY):
        assert check_launch(detect_launchers(env), rank, size, library) is None


BY_MPICH = "/opt/mpich/bin/mpirun -n 8 python"
BY_OPEN_MPI = "/opt/ompi/bin/mpirun -n 8 python"
MISTAKES = {
    "mpirun of open mpi, library mpich": (OPEN_MPI, MPICH_LIBRARY, BY_MPICH, "belongs to another"),
    "mpirun of mpich, library open mpi": (
        MPICH,
        OPEN_MPI_LIBRARY,
        BY_OPEN_MPI,
        "belongs to another",
    ),
    "mpirun of intel, library open mpi": (
        INTEL,
        OPEN_MPI_LIBRARY,
        BY_OPEN_MPI,
        "belongs to another",
    ),
    "mvapich, library mpich": (MVAPICH, MPICH_LIBRARY, BY_MPICH, "belongs to another"),
    "rank 0": ({**MPICH, "PMI_RANK": "0"}, OPEN_MPI_LIBRARY, BY_OPEN_MPI, "rank 0 of 8"),
    "no mpirun found": (MPICH, UNKNOWN_LIBRARY, "the mpirun that belongs to Some MPI -n 8", "an unknown place"),
    "srun none, mpich": (SLURM, MPICH_LIBRARY, "srun --mpi=pmi2 -n 8 python", BY_MPICH),
    "srun none, open mpi": (SLURM, OPEN_MPI_LIBRARY, "srun --mpi=pmix -n 8 python", BY_OPEN_MPI),
    "srun pmi2, open mpi": ({**PMI, **SLURM}, OPEN_MPI_LIBRARY, "srun --mpi=pmix -n 8 python", "has to speak"),
    "srun pmix, mpich": ({**PMIX, **SLURM}, MPICH_LIBRARY, "srun --mpi=pmi2 -n", "has to speak"),
    "torchrun": (
        TORCHRUN,
        MPICH_LIBRARY,
        BY_MPICH,
        "torchrun starts processes that MPI knows",
    ),
    "set by hand": (
        RANK,
        MPICH_LIBRARY,
        "unset RANK WORLD_SIZE LOCAL_RANK",
        "if 8 ranks are wanted",
    ),
}


@pytest.mark.parametrize(("env", "library", "typed", "explained"), MISTAKES.values(), ids=MISTAKES)
def test_single_ranks_are_refused_with_what_to_type(env, library, typed, explained):
    message = check_launch(detect_launchers(env), 0, 1, library)
    loaded = f"{library.vendor} {library.version} from {library.path or 'an unknown place'}"
    variables = [f"{name}={value}" for name, value in detect_launchers(env)[0].variables]
    for said in (typed, explained, "by MPI it is rank 0 of 1", loaded, *variables):
        assert said in message


@pytest.mark.parametrize(
    ("env", "rank", "size", "said"),
    [
        ({**MPICH, "WORLD_SIZE": "2"}, 5, 8, "by the variables of RANK/WORLD_SIZE this is a process of 2"),
        ({**MPICH, "WORLD_SIZE": "8", "RANK": "4"}, 5, 8, "this is rank 4 of 8, by MPI it is rank 5 of 8"),
        (OPEN_MPI, 5, 4, "this is rank 5 of 8, by MPI it is rank 5 of 4"),
        (PMIX, 2, 8, "this is rank 5, by MPI it is rank 2 of 8"),
        (SLURM, 1, 2, "this is rank 5 of 8, by MPI it is rank 1 of 2"),
    ],
)
def test_leftover_variables_are_refused_in_a_real_world(env, rank, size, said):
    message = check_launch(detect_launchers(env), rank, size, MPICH_LIBRARY)
    assert all(each in message for each in (said, "type:   unset "))
    assert "ranks are wanted" not in message


BUILT = "MPICH configure: --with-device=ch4:ofi --with-pm=hydra"
UNLIKE = "that launcher speaks PMIx, which this MPICH was built without"


@pytest.mark.parametrize(
    ("env", "library", "description", "said"),
    [
        ({**OPEN_MPI, **PMIX}, MPICH_LIBRARY, BUILT, (UNLIKE, "/opt/mpich/bin/mpirun -n 8 python")),
        ({**PMIX, **SLURM}, MPICH_LIBRARY, BUILT, (UNLIKE, "srun --mpi=pmi2")),
        ({**OPEN_MPI, **PMIX}, MPICH_LIBRARY, BUILT + " --with-pmix=/usr", None),
        ({**OPEN_MPI, **PMIX}, OPEN_MPI_LIBRARY, "Open MPI v5.0.11", None),
        (MPICH, MPICH_LIBRARY, BUILT, None),
    ],
)
def test_mpich_without_pmix_is_refused_before_it_starts(env, library, description, said):
    message = check_protocol(env, library, description)
    assert (message is None) == (said is None)
    assert all(each in message for each in said or ())


def test_too_little_memory_in_common_is_refused_before_mpich_crashes(tmp_path):
    for library, folder, ranks in (
        (MPICH_LIBRARY, tmp_path, 1),
        (MPICH_LIBRARY, tmp_path / "none", 1),
        (OPEN_MPI_LIBRARY, tmp_path, 1 << 40),
    ):
        assert check_room(library, folder, ranks) is None
    message = check_room(MPICH_LIBRARY, tmp_path, 1 << 40)
    assert message.startswith(f"{tmp_path} of this node has ")
    assert "and MPICH would crash: its 1099511627776 ranks need at least" in message
    assert f"mount -o remount,size=1g {tmp_path}" in message


# ---- cores and threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "masks", "threads"),
    [
        ({0, 1}, [{0, 1}], 2),
        ({0, 1}, [{0, 1}] * 2, 1),
        ({0, 1}, [{0, 1}] * 4, 1),
        (set(range(64)), [set(range(64))] * 4, 16),
        (set(range(64)), [set(range(64))] * 3, 21),
        ({0, 1, 2}, [{0, 1, 2}, {3, 4, 5}], 3),
        ({0, 1, 2, 3}, [{0, 1, 2, 3}, {2, 3, 4, 5}], 3),
        ({0, 1, 2}, [{0, 1, 2}, {0, 1, 2}, {0, 1, 2}], 1),
        (set(), [set(), set()], 1),
    ],
)
def test_a_ranks_share_of_the_cores(own, masks, threads):
    assert share_of_cores(own, [frozenset(mask) for mask in masks]) == threads


def test_usable_cores_are_those_of_the_affinity_mask():
    gone = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(gone, 0)
    assert (usable_cores(), usable_cores(gone)) == (os.sched_getaffinity(0), frozenset())
    assert usable_cores(os.getppid())


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "3"}, "OMP_NUM_THREADS=3"),
        ({"MKL_NUM_THREADS": "2"}, "MKL_NUM_THREADS=2"),
        ({"OMP_NUM_THREADS": "", "MKL_NUM_THREADS": "2"}, "MKL_NUM_THREADS=2"),
    ],
)
def test_threads_that_the_user_has_set(env, said):
    assert user_threads(env) == said


QUIET = {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_btl_tcp_flags": "send"}
YIELDING = {**QUIET, "OMPI_MCA_mpi_yield_when_idle": "1"}
OF_THE_USER = {**OPEN_MPI, "OMPI_MCA_mpi_yield_when_idle": "0", "OMPI_MCA_osc": "sm"}


@pytest.mark.parametrize(
    ("env", "cores", "expected"),
    [
        ({}, 2, QUIET),
        (OPEN_MPI, 4, QUIET),
        (OPEN_MPI, 3, YIELDING),
        (OF_THE_USER, 1, {"OMPI_MCA_btl_tcp_flags": "send"}),
    ],
)
def test_settings_before_mpi_starts(env, cores, expected):
    assert variables_for_mpi(env, cores, "") == expected


@pytest.mark.parametrize(
    ("env", "devices", "chosen"),
    [
        ({**PMI, **SLURM}, "ucx ofi", "ofi"),
        ({**PMI, **SLURM}, "ofi,ucx", "ofi"),
        ({**PMI, **SLURM}, "ucx", None),
        ({**PMI, **SLURM, "MPIR_CVAR_CH4_NETMOD": "ucx"}, "ucx ofi", None),
        ({**MPICH, **DAEMONS}, "ucx ofi", None),
        (PMI, "ucx ofi", None),
    ],
)
def test_mpich_uses_ofi_where_srun_cannot_carry_the_addresses_of_ucx(env, devices, chosen):
    description = f"MPICH Version:      5.0.2\nMPICH Device:       ch4:{devices}\n"
    assert variables_for_mpi(env, 8, description).get("MPIR_CVAR_CH4_NETMOD") == chosen


def test_a_childs_environment_names_its_rank(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "2")
    monkeypatch.setenv("PMI_SIZE", "4")
    child = child_environment(2)
    assert (parent_rank(child), detect_launchers(child)) == (2, [])
    assert (os.environ["PMI_RANK"], parent_rank()) == ("2", None)


ALL = frozenset({0, 1})


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ([ALL] * 4, [0, 1, 0, 1]),
        ([frozenset({4, 2, 9})] * 5, [2, 4, 9, 2, 4]),
        ([ALL] * 2, [None, None]),  # a core for each
        ([frozenset({3})] * 4, [None] * 4),  # bound by the launcher
        ([frozenset({0}), frozenset({1}), ALL, ALL], [None] * 4),  # some are
    ],
)
def test_ranks_that_outnumber_the_cores_are_dealt_out(masks, expected, monkeypatch):
    monkeypatch.delenv("AXONMPI_BIND", raising=False)
    assert [core_to_keep_to(rank, masks) for rank in range(len(masks))] == expected
    monkeypatch.setenv("AXONMPI_BIND", "none")
    assert core_to_keep_to(0, masks) is None
