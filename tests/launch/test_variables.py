"""What the launchers' variables mean, and what is said when they do not fit MPI's world."""

import os

import pytest

from axonmpi.launch.check import MpiLibrary, check_launch, check_protocol, check_room
from axonmpi.launch.cpu import core_to_keep_to, share_of_cores, usable_cores
from axonmpi.launch.launcher_variables import (
    CONVENTIONS,
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
PBS = {"PBS_JOBID": "7.pbs", "PBS_NODEFILE": "/var/spool/pbs/aux/7.pbs", "PBS_TASKNUM": "1", "PBS_NODENUM": "0"}
LSF = {"LSB_JOBID": "7", "LSB_DJOB_NUMPROC": "8", "LSB_MCPU_HOSTS": "n1 4 n2 4", "LS_JOBPID": "99"}
CRAY_PMI = {**PMI, "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4", "PMI_UNIVERSE_SIZE": "8", "PMI_CONTROL_PORT": "3"}
PALS_TASK = {"PALS_RANKID": "5", "PALS_NODEID": "1", "PALS_APID": "a", "PALS_APINFO": "/f", "PALS_SPOOL_DIR": "/d"}
PALS_LOCAL = {**PALS_TASK, "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"}
PALS = {**PBS, **PALS_LOCAL, **CRAY_PMI}
PALS_PMIX = {**PBS, **PALS_LOCAL, **PMIX, "PALS_PMI": "pmix"}
SRUN_CRAY = {**SLURM, **PALS_TASK, "PALS_LOCAL_RANKID": "1", **CRAY_PMI}
FLUX_TASK = {"FLUX_TASK_RANK": "5", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "8", "FLUX_JOB_NNODES": "2"}
FLUX = {**FLUX_TASK, **PMI, "PMI_FD": "11", "FLUX_JOB_ID": "f7", "FLUX_URI": "local:///run/flux/local"}
PRRTE = {**PMIX, "PRTE_LAUNCHED": "1"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
    **OPEN_MPI,
    **PMIX,
    **LSF,
}
PARASTATION = {**PMI, "PMI_ID": "k", "PMI_UNIVERSE_SIZE": "8", "PMI_APPNUM": "0", "PSP_SMP_NODE_ID": "3"}
# mpirun in a batch job: Slurm's variables are those of the daemons that mpirun has started, one on each node
DAEMONS = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
# mpirun in a shell that the system's launcher has started, as its only rank
SHELL = {
    "Slurm, pmi2": {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1"},
    "Slurm, pmix": {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},
    "PALS": {"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "1", "PMI_RANK": "0", "PMI_SIZE": "1"},
    "Flux": {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1", "PMI_RANK": "0", "PMI_SIZE": "1"},
    "jsrun": {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "1", "PMIX_RANK": "0"},
    "ParaStation": {"PSP_SMP_NODE_ID": "3", "PMI_RANK": "0", "PMI_SIZE": "1", "SLURM_PROCID": "0"},
    "PBS": PBS,
    "LSF": LSF,
}

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
    "pals": (PALS, [("PALS", *FULL)]),
    "pals, pmix": (PALS_PMIX, [("PALS", 5, None, 1, 4)]),
    "pals, slurm's leftovers": ({**PALS, **DAEMONS}, [("PALS", *FULL)]),
    "pals, slurm's leftovers, pmix": ({**PALS_PMIX, **DAEMONS}, [("PALS", 5, None, 1, 4)]),
    "srun, cray_shasta": (SRUN_CRAY, [("Slurm", 5, 8, 1, None)]),
    "flux": (FLUX, [("Flux", 5, 8, 1, None)]),
    "flux, pmix": ({**FLUX_TASK, **PMIX}, [("Flux", 5, 8, 1, None)]),
    "flux, cray-pals": ({**FLUX_TASK, **PALS_TASK, "PMI_CONTROL_PORT": "3,4"}, [("Flux", 5, 8, 1, None)]),
    "flux in a slurm job": ({**FLUX, **DAEMONS}, [("Flux", 5, 8, 1, None)]),
    "flux in a pals job": ({**PALS_TASK, "PALS_RANKID": "1", **FLUX}, [("Flux", 5, 8, 1, None)]),
    "prrte": (PRRTE, [("PRRTE", 5, None, None, None)]),
    "prrte in a batch job": ({**PRRTE, **DAEMONS}, [("PRRTE", 5, None, None, None)]),
    "prrte for open mpi": ({**PRRTE, **OPEN_MPI}, [("Open MPI", *FULL)]),
    "jsrun": (JSRUN, [("jsrun", *FULL)]),
    "parastation": (PARASTATION, [("ParaStation", 5, 8, None, None)]),
    "parastation, srun": ({**PARASTATION, **SLURM}, [("ParaStation", 5, 8, None, None)]),
    "parastation, srun, pmix": (
        {**PMIX, **SLURM, "PSP_SMP_NODE_ID": "3"},
        [("PMIx", 5, None, None, None), ("Slurm", 5, 8, 1, None)],
    ),
    "srun in a pbs job": ({**PBS, **SLURM}, [("Slurm", 5, 8, 1, None)]),
    "intel, srun": ({**PMI, **SLURM, "I_MPI_PMI_LIBRARY": "/usr/lib/libpmi2.so"}, [("PMI", 5, 8, None, None)]),
    "intel in a batch job": ({**INTEL, **DAEMONS}, [("Intel MPI", *FULL)]),
    "pbs alone": (PBS, []),
    "lsf alone": (LSF, []),
    "torchrun in an srun": ({**TORCHRUN, **DAEMONS}, [("Slurm", 1, 2, 0, None), ("torchrun", *FULL)]),
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


@pytest.mark.parametrize("system", SHELL)
@pytest.mark.parametrize(
    ("name", "env"), [("Open MPI", OPEN_MPI), ("MVAPICH", MVAPICH), ("MPICH", MPICH), ("Intel MPI", INTEL)]
)
def test_the_innermost_launcher_counts(system, name, env):
    for rank in ("0", "5"):  # rank 0 has the same number by both
        inside = {**SHELL[system], **{key: rank if value == "5" else value for key, value in env.items()}}
        assert [(one.name, one.rank, one.size) for one in detect_launchers(inside)] == [(name, int(rank), 8)]


def test_every_convention_is_recognised():
    found = {launcher[0] for _, launchers in RECOGNISED.values() for launcher in launchers}
    assert found == {convention.name for convention in CONVENTIONS}


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        ({}, 1),
        (PALS_PMIX, 6),
        ({**PALS_PMIX, "PALS_RANKID": "0", "PMIX_RANK": "0"}, 4),
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


@pytest.mark.parametrize("env", [env for env, found in RECOGNISED.values() if found])
def test_nothing_is_recognised_once_launcher_variables_are_taken_away(env):
    kept = without_launcher_variables({**env, PARENT_RANK: "3"})
    assert (detect_launchers(kept), parent_rank(kept)) == ([], None)
    settings = {"SLURM_NTASKS", "MASTER_ADDR", "MASTER_PORT", "FLUX_URI", "PALS_PMI", "I_MPI_PMI_LIBRARY"}
    assert kept.keys() <= settings | PBS.keys() | LSF.keys()


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
CRAY_LIBRARY = MpiLibrary("Cray MPICH", "8.1.30", "/opt/cray/libmpi_gnu_123.so.12", None)
UNKNOWN_LIBRARY = MpiLibrary("Some MPI", "1.0", None, None)


SILENT = [
    *((env, 5, 8) for env in ({}, OPEN_MPI, MVAPICH, MPICH, INTEL, PMIX, TORCHRUN)),
    *((env, 5, 8) for env in ({**PMI, **SLURM}, {**PMIX, **SLURM}, {**MPICH, **RANK})),
    *((env, 0, 1) for env in ({}, {"WORLD_SIZE": "1", "RANK": "0"}, {"PMIX_RANK": "0"}, {"SLURM_NTASKS": "8"})),
    ({"WORLD_SIZE": "8"}, 5, 8),
    *((env, 5, 8) for env in (PALS, PALS_PMIX, SRUN_CRAY, FLUX, PRRTE, JSRUN, {**PARASTATION, **SLURM})),
    *((env, 2, 8) for env in (SLURM, PALS, SRUN_CRAY, FLUX)),  # MPI may number the ranks in another order
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
    "srun, cray mpich": (SLURM, CRAY_LIBRARY, "srun --mpi=cray_shasta -n 8 python", "Cray MPICH"),
    "srun cray_shasta, open mpi": (SRUN_CRAY, OPEN_MPI_LIBRARY, "srun --mpi=pmix -n 8 python", BY_OPEN_MPI),
    "pals, open mpi": (PALS, OPEN_MPI_LIBRARY, "mpiexec --pmi=pmix -n 8 python", "mpiexec has to speak"),
    "pals pmix, cray mpich": (PALS_PMIX, CRAY_LIBRARY, "mpiexec --pmi=cray -n N python", "Cray MPICH"),
    "flux, open mpi": (FLUX, OPEN_MPI_LIBRARY, "flux run -o pmi=pmix -n 8 python", BY_OPEN_MPI),
    "flux pmix, mpich": ({**FLUX_TASK, **PMIX}, MPICH_LIBRARY, "flux run -n 8 python", "flux has to speak"),
    "parastation, open mpi": (PARASTATION, OPEN_MPI_LIBRARY, "PSSLURM_PMI_TYPE=pmix srun -n 8", BY_OPEN_MPI),
    "jsrun, open mpi": (JSRUN, OPEN_MPI_LIBRARY, BY_OPEN_MPI, "belongs to another"),
    "prrte, mpich": (PRRTE, MPICH_LIBRARY, "/opt/mpich/bin/mpirun -n N", "belongs to another"),
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


OTHER = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
CONTRADICTIONS = {
    "two mpiruns": ({**MPICH, **OTHER}, "Open MPI", "MPICH", "OMPI_COMM_WORLD_RANK=2", "PMI_RANK=5"),
    "flux and pmi": ({**FLUX, "PMI_RANK": "3"}, "Flux", "PMI", "FLUX_TASK_RANK=5", "PMI_RANK=3"),
    "pals and pmi": ({**PALS, "PMI_RANK": "3"}, "PALS", "PMI", "PALS_RANKID=5", "PMI_RANK=3"),
    "pmix and slurm": ({**PMIX, **DAEMONS}, "PMIx", "Slurm", "PMIX_RANK=5", "SLURM_PROCID=1"),
    "jsrun and slurm": ({**JSRUN, **DAEMONS}, "jsrun", "Slurm", "JSM_NAMESPACE_RANK=5", "SLURM_PROCID=1"),
}


@pytest.mark.parametrize(("env", "one", "other", "by_one", "by_other"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_launchers_that_contradict_each_other_are_refused_by_name(env, one, other, by_one, by_other):
    message = check_launch(detect_launchers(env), 0, 1, MPICH_LIBRARY)
    assert message.startswith(f"two launchers contradict each other: by the variables of {one} this is rank ")
    for said in (f", by those of {other} rank ", by_one, by_other, f"if {other} has started", "type:   unset "):
        assert said in message


def test_only_the_wrong_launchers_variables_are_to_be_unset():
    """MPI has found its ranks by PMI_RANK; PMI_SIZE is of both launchers."""
    message = check_launch(detect_launchers({**PALS, "PALS_RANKID": "9"}), 5, 8, MPICH_LIBRARY)
    assert "unset PALS_RANKID PALS_LOCAL_RANKID PALS_LOCAL_SIZE\n" in message


def test_a_launcher_without_mpi_contradicts_none():
    """Started by another MPI's mpirun, with RANK of a former job: the mpirun is the mistake."""
    message = check_launch(detect_launchers({**MPICH, "RANK": "0", "WORLD_SIZE": "1"}), 0, 1, OPEN_MPI_LIBRARY)
    assert message.startswith("the launcher and MPI disagree: by the variables of MPICH ")


BUILT = "MPICH configure: --with-device=ch4:ofi --with-pm=hydra"
UNLIKE = "that launcher speaks PMIx, which this MPICH was built without"


@pytest.mark.parametrize(
    ("env", "library", "description", "said"),
    [
        ({**OPEN_MPI, **PMIX}, MPICH_LIBRARY, BUILT, (UNLIKE, "/opt/mpich/bin/mpirun -n 8 python")),
        ({**PMIX, **SLURM}, MPICH_LIBRARY, BUILT, (UNLIKE, "srun --mpi=pmi2")),
        (PRRTE, MPICH_LIBRARY, BUILT, (UNLIKE, "by the variables of PRRTE this is rank 5")),
        (JSRUN, MPICH_LIBRARY, BUILT, (UNLIKE, "by the variables of jsrun this is rank 5 of 8")),
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
