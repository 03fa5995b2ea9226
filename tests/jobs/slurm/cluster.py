"""A Slurm cluster on this machine: two nodes in network namespaces, with Slurm's own daemons.

    n1   munged, slurmctld, slurmd; where the commands (sbatch, scontrol ...) run as well
    n2   slurmd

Everything is in one temporary folder, and listens in the namespaces only: nobody else sees ports and addresses.
It ends with the namespaces.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from helpers.limits import limit
from helpers.nodes import Nodes

from axonmpi.launch.launcher_variables import without_launcher_variables
from axonmpi.utils.waiting import Backoff, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
NODES = ("n1", "n2")
CPUS = 32
"""Of a node, as Slurm is told: what the templates ask for, however many this machine has."""
PRETENDED_GPUS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
"""Slurm deals out files; nobody opens them here."""
START_SECONDS = 30.0
COMMAND_SECONDS = 30.0
TIDY_SECONDS = 10.0
"""Slurm kills what has not ended after KillWait."""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}

CONFIGURATION = """\
ClusterName=axonmpi
SlurmctldHost=n1(10.77.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
SlurmdParameters=config_overrides
TmpFS={folder}/temporary-%n
KillWait=5
MailProg=/bin/true
PropagateResourceLimits=NONE
GresTypes=gpu
NodeName=n1 NodeHostname=n1 NodeAddr=10.77.0.1 CPUs={cpus} RealMemory=4000 Gres=gpu:4
NodeName=n2 NodeHostname=n2 NodeAddr=10.77.0.2 CPUs={cpus} RealMemory=4000 Gres=gpu:4
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE PriorityTier=2
"""


class Cluster:
    """The cluster; a context manager.

    Attributes:
        nodes: The namespaces.
        folder: Configuration, logs and state.
    """

    def __init__(self) -> None:
        self.nodes = Nodes(2)
        self.folder = Path()
        self._opened = ExitStack()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._own: set[int] = set()

    @staticmethod
    def obstacle() -> str | None:
        """Say why there can be no cluster here, if so."""
        if missing := [name for name in PROGRAMS if shutil.which(name, path=Cluster.path()) is None]:
            return f"Slurm is not installed (tests/jobs/run slurm installs it): no {', '.join(missing)}"
        return "a Slurm cluster is started by root only" if os.geteuid() else Nodes.obstacle()

    @staticmethod
    def path() -> str:
        """Return PATH with this interpreter's programs, and the folders of daemons."""
        return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"])

    # ---- its daemons ------------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="axonmpi-slurm-")))
            stack.callback(self._wait_for_end)
            stack.enter_context(self.nodes)  # ends all that runs on them
            self._write_configuration()
            self._start()
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _write_configuration(self) -> None:
        of_nodes = (f"{name}-{node}" for name in ("spool", "temporary") for node in NODES)
        for name in ("munge", "state", *of_nodes):
            (self.folder / name).mkdir(mode=0o711)
        key = self.folder / "munge/key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.folder, cpus=CPUS))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={file}\n" for file in PRETENDED_GPUS))

    def _start(self) -> None:
        munge = self.folder / "munge"
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self._start_daemon(0, "munged", "--foreground", "--force", f"--socket={munge}/socket", *files)
        self._wait_for_start((munge / "socket").exists)
        self._start_daemon(0, "slurmctld", "-D", "-i")
        for node, name in enumerate(NODES):
            self._start_daemon(node, "slurmd", "-D", "-N", name)
        self._wait_for_start(self._is_idle)
        self._own = self._processes()  # slurmctld has a child

    def _start_daemon(self, node: int, program: str, *arguments: str) -> None:
        name = f"{program}-{NODES[node]}"
        with (self.folder / f"{name}.out").open("wb") as output:
            self._daemons[name] = subprocess.Popen(
                [*self.nodes.enter(node), program, *arguments],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _wait_for_start(self, ready: Callable[[], bool]) -> None:
        def looked() -> bool:
            return ready() or any(daemon.poll() is not None for daemon in self._daemons.values())

        if not wait_until(looked, Backoff(0, 0.01, 0.1), limit(START_SECONDS)) or not ready():
            ends = "".join(
                f"\n{name}: code {daemon.poll()}\n{(self.folder / f'{name}.out').read_text()[-2000:]}"
                for name, daemon in self._daemons.items()
            )
            raise AssertionError(f"the cluster did not start:{ends}")

    def _is_idle(self) -> bool:
        return self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(len(NODES))

    def _wait_for_end(self) -> None:
        for daemon in self._daemons.values():
            daemon.wait(limit(TIDY_SECONDS))

    # ---- its use ----------------------------------------------------------------------------------------------

    def leftovers(self) -> dict[int, str]:
        """Return the processes of jobs that run on the nodes, with their command lines."""
        found = {}
        for process in self._processes() - self._own:
            with suppress(OSError):
                found[process] = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def cancel_all(self) -> None:
        """Cancel all jobs that have not ended."""
        self.run("scancel", "--user=root")

    def check_tidy(self) -> None:
        """Wait until no process of a job is left; AssertionError where that takes longer than Slurm's own end."""
        if not wait_until(lambda: not self.leftovers(), Backoff(0, 0.02, 0.1), limit(TIDY_SECONDS)):
            raise AssertionError(f"left on the nodes: {self.leftovers()}")

    def _processes(self) -> set[int]:
        return self.nodes.processes(0) | self.nodes.processes(1)

    def run(
        self, *command: str | Path, folder: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on n1, in a folder and with further variables."""
        return subprocess.run(
            [*self.nodes.enter(0, folder), *command],
            env=self._environment() | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit(COMMAND_SECONDS),
            check=False,
        )

    def checked(self, *command: str | Path, folder: Path | None = None, **variables: str) -> str:
        """Run a command that has to succeed; return what it prints."""
        ended = self.run(*command, folder=folder, **variables)
        assert ended.returncode == 0, f"{command}: code {ended.returncode}\n{ended.stdout}"
        return ended.stdout

    def submit(self, *arguments: str | Path, folder: Path, **variables: str) -> Job:
        """Submit a batch script from a folder; `arguments` are those of sbatch."""
        return Job(self, self.checked("sbatch", "--parsable", *arguments, folder=folder, **variables).strip())

    def _environment(self) -> dict[str, str]:
        inherited = without_launcher_variables(os.environ)
        return {
            **{name: value for name, value in inherited.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "PATH": Cluster.path(),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            # More ranks than cores, and root: what Open MPI asks for in tests only.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
        }


@dataclass(frozen=True)
class Job:
    """A job, or a task of an array.

    Attributes:
        cluster: Where it was submitted.
        id: Its number, or ARRAY_TASK.
    """

    cluster: Cluster
    id: str

    def task(self, number: int) -> Job:
        """Return one task of this array."""
        return Job(self.cluster, f"{self.id}_{number}")

    def shown(self) -> dict[str, str]:
        """Return what `scontrol show job` shows."""
        return dict(re.findall(r"(\w+)=(\S*)", self.cluster.checked("scontrol", "show", "job", "-o", self.id)))

    @property
    def state(self) -> str:
        """Its state, such as RUNNING."""
        return self.shown()["JobState"]

    @property
    def output(self) -> str:
        """What it has printed so far."""
        path = Path(self.shown()["StdOut"])
        return path.read_text() if path.exists() else ""

    def wait(self, ready: Callable[[], object], seconds: float = 60) -> None:
        """Wait until `ready()` is true; AssertionError with the job's state and output where it does not come."""
        if not wait_until(ready, Backoff(0, 0.02, 0.2), limit(seconds)):
            raise AssertionError(f"after {limit(seconds):g} s: {self.shown()}\n{self.output}")

    def end(self, seconds: float = 90) -> str:
        """Wait until it has ended; return its state and exit code, as `"COMPLETED 0:0"`."""
        self.wait(lambda: self.state in ENDED, seconds)
        shown = self.shown()
        return f"{shown['JobState']} {shown['ExitCode']}"

    def _is_held_back(self) -> bool:
        shown = self.shown()
        return (shown["JobState"], shown["Reason"]) == ("PENDING", "BeginTime")

    def start_again(self) -> None:
        """Wait until it is requeued, and have Slurm hold it back for two seconds instead of two minutes.

        A node refuses a job that comes back in the second in which it ended, as it revokes what is older.
        """
        self.wait(self._is_held_back)
        self.cluster.checked("scontrol", "update", f"jobid={self.id}", "StartTime=now+2")
