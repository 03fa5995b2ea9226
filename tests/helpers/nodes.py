"""Several nodes on one machine: network namespaces joined by a switch, each with a /dev/shm of its own.

    n1 ── eth0 ══ v1 ┐
    n2 ── eth0 ══ v2 ┤ a bridge, in a namespace of its own
    n3 ── eth0 ══ v3 ┘

A cable is a pair of virtual interfaces, limited at both ends where a bandwidth is asked for. Names and addresses
are known within these namespaces only: sessions on a machine do not see each other's nodes. A node ends, with all
that runs on it, when the session does.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from axonmpi.testing.mpirun import find_mpirun
from axonmpi.utils.waiting import Backoff, wait_until
from helpers import node_holder
from helpers.limits import limit

Placement = Literal["block", "round robin"]

LINK_SECONDS = COMMAND_SECONDS = 20.0
_NAMESPACES = ("--net", "--uts", "--mount", "--ipc")
_SETUP = """
hostname {name} && mount -t tmpfs tmpfs /dev/shm && mount --bind {hosts} /etc/hosts && ip link set lo up &&
exec {holder}
"""
_AGENT = """#!/bin/sh
# Stands for ssh: HOST COMMAND...
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
case $host in {cases} esac
exec nsenter -t "$process" -n -u -m -i --wdns="$PWD" -- $pin /bin/sh -c "$*"
"""


class Nodes:
    """The nodes n1, n2 and so on; a context manager.

    Args:
        count: How many.
        rate: Bandwidth of a node's cable in each direction, as `tc` takes it ("1gbit"); None: as quick as memory.
        own_cores: Whether each has cores of its own, as machines do, in turn where they outnumber the cores; else
            all of them use all cores.
    """

    def __init__(self, count: int, rate: str | None = None, *, own_cores: bool = False) -> None:
        self._addresses = [f"10.77.0.{number}" for number in range(1, count + 1)]
        self._rate = rate
        self._own_cores = own_cores
        self._holders: list[subprocess.Popen[str]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="axonmpi-nodes-")

    @staticmethod
    def obstacle() -> str | None:
        """Say why there can be no such nodes here, if so."""
        try:
            tried = subprocess.run(
                ["unshare", *_NAMESPACES, "ip", "link"],
                capture_output=True,
                text=True,
                timeout=limit(COMMAND_SECONDS),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"network namespaces cannot be made: {error}"
        return None if tried.returncode == 0 else f"network namespaces are not permitted: {tried.stderr.strip()}"

    # ---- their making -------------------------------------------------------------------------------------------

    def __enter__(self) -> Nodes:
        hosts = Path(self._folder.name) / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} n{i}" for i, address in enumerate(self._addresses, 1))]
        hosts.write_text("\n".join(lines) + "\n")
        count = len(self._addresses)
        for name in (*(f"n{number}" for number in range(1, count + 1)), "switch"):
            holder = shlex.join([sys.executable, "-S", node_holder.__file__])
            command = ["unshare", *_NAMESPACES, "sh", "-c", _SETUP.format(name=name, hosts=hosts, holder=holder)]
            self._holders.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,  # a signal to the group of the session must not end it too soon
                )
            )
        for holder in self._holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n", "a node could not be set up"
        self._inside(count, "ip", "link", "add", "bridge", "up", "type", "bridge")
        for node in range(count):
            self._connect(node)
        for node in range(count):
            self._wait_for_link(node)
        self._write_agent()
        return self

    def _connect(self, node: int) -> None:
        """Lay a cable from a node to the switch."""
        switch, end, holder = len(self._addresses), f"v{node + 1}", str(self._holders[node].pid)
        self._inside(switch, "ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", holder)
        self._inside(switch, "ip", "link", "set", end, "master", "bridge", "up")
        self._inside(node, "ip", "addr", "add", f"{self._addresses[node]}/24", "dev", "eth0")
        self._inside(node, "ip", "link", "set", "eth0", "up")
        if self._rate:
            self.set_rate(node, self._rate)

    def set_rate(self, node: int, rate: str) -> None:
        """Give a node's cable another bandwidth in each direction, as `tc` takes it."""
        limit = ("root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms")
        self._inside(node, "tc", "qdisc", "replace", "dev", "eth0", *limit)
        self._inside(len(self._addresses), "tc", "qdisc", "replace", "dev", f"v{node + 1}", *limit)

    def _wait_for_link(self, node: int) -> None:
        """Wait until the node's end of the cable works, which it does not as soon as both are set up."""

        def is_up() -> bool:
            return "state UP" in self._inside(node, "ip", "-o", "link", "show", "eth0")

        assert wait_until(is_up, Backoff(0, 0.01), limit(LINK_SECONDS)), "the cable does not work"

    def _write_agent(self) -> None:
        cases = " ".join(
            f"n{node + 1}|{address}) process={self._holders[node].pid}; pin='{' '.join(self._pin(node))}';;"
            for node, address in enumerate(self._addresses)
        )
        agent = Path(self._folder.name) / "ssh"
        agent.write_text(_AGENT.format(cases=cases))
        agent.chmod(0o755)

    def _pin(self, node: int) -> list[str]:
        """Return the words before a command that keep it to the node's cores."""
        cores = sorted(os.sched_getaffinity(0))
        own = cores[node % len(cores) :: len(self._addresses)]
        return ["taskset", "-c", ",".join(map(str, own))] if self._own_cores else []

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait(limit(COMMAND_SECONDS))
            assert holder.stdout is not None
            holder.stdout.close()
        self._folder.cleanup()

    # ---- their use ----------------------------------------------------------------------------------------------

    def enter(self, node: int, folder: Path | None = None) -> list[str]:
        """Return the words before a command that let it run on a node, from 0, in a folder, by default this one."""
        place = f"--wdns={folder or os.getcwd()}"
        return ["nsenter", "-t", str(self._holders[node].pid), "-n", "-u", "-m", "-i", place, "--"]

    def cut(self, node: int, *, healed: bool = False) -> None:
        """Cut a node's cable, or mend it."""
        self._inside(len(self._addresses), "ip", "link", "set", f"v{node + 1}", "up" if healed else "down")

    def resize_shared_memory(self, node: int, size: str) -> None:
        """Give a node's /dev/shm another size, such as "1m"."""
        self._inside(node, "mount", "-o", f"remount,size={size}", "/dev/shm")

    def shared_memory(self, node: int) -> list[str]:
        """Return the names of the files in a node's /dev/shm."""
        return sorted(self._inside(node, "find", "/dev/shm", "-mindepth", "1", "-printf", "%P\\n").splitlines())

    def clear_shared_memory(self, node: int) -> None:
        """Remove all files of a node's /dev/shm."""
        self._inside(node, "find", "/dev/shm", "-mindepth", "1", "-delete")

    def _inside(self, node: int, *command: str) -> str:
        done = subprocess.run(
            [*self.enter(node), *command], capture_output=True, text=True, timeout=limit(COMMAND_SECONDS)
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def processes(self, node: int) -> set[int]:
        """Return the numbers of the processes that run on a node, but for the one that holds it."""
        holder = self._holders[node].pid
        return node_holder.processes_in(os.readlink(f"/proc/{holder}/ns/net")) - {holder}

    def run(
        self,
        ranks: Sequence[int],
        *arguments: str,
        timeout: float,
        placement: Placement = "block",
        env: dict[str, str] | None = None,
    ) -> str:
        """Run Python with `arguments` on so many ranks of each node; returns what they printed.

        Args:
            ranks: How many of each node, none on those that are not named.
            arguments: Of Python.
            timeout: In seconds on a quiet machine.
            placement: Whether ranks are numbered node by node, or dealt to the nodes in turn.
            env: Further variables.

        Raises:
            AssertionError: The job failed or took longer than its time-out; all of it was ended.
        """
        command, variables = self.job(ranks, *arguments, placement=placement, env=env)
        return self._wait_for(command, timeout, variables)

    def job(
        self,
        ranks: Sequence[int],
        *arguments: str,
        placement: Placement = "block",
        env: dict[str, str] | None = None,
        mpirun: Path | None = None,
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command that starts such a job on the first node, and the variables that it needs.

        Args:
            ranks: As for `run`.
            arguments: As for `run`.
            placement: As for `run`.
            env: As for `run`.
            mpirun: Another launcher than the one that belongs to the MPI library.
        """
        agent = str(Path(self._folder.name) / "ssh")
        launcher = str(find_mpirun(mpirun))
        kind = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False).stdout
        extra = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "TMPDIR": self._folder.name,  # launchers keep files there by the name of the node
            **(env or {}),
        }
        order = _nodes_of_ranks(ranks, placement)
        if "HYDRA" in kind.upper():
            hosts = ",".join(f"n{node}:{number or 1}" for node, number in enumerate(ranks, 1))
            start = [launcher, "-launcher-exec", agent, "-hosts", hosts, "-rankmap", ",".join(map(str, order))]
        else:
            hosts = ",".join(f"n{node + 1}" for node in order)
            start = [launcher, "--prtemca", "plm_ssh_agent", agent, "--host", hosts, "--map-by", "seq"]
            start += ["--bind-to", "none"]
            if len(order) > len(os.sched_getaffinity(0)):  # which ranks of one node do not see
                extra.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
            start += [part for name in extra for part in ("-x", name)]
            extra |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return [*start, "-n", str(sum(ranks)), sys.executable, *arguments], extra

    def run_script(self, script: str, folder: Path, *, timeout: float, env: dict[str, str] | None = None) -> str:
        """Run a shell script on the first node, from where `ssh` leads to all; returns what it printed.

        Raises:
            AssertionError: It failed or took longer than its time-out; all of it was ended.
        """
        programs = os.pathsep.join([self._folder.name, str(Path(sys.executable).parent), os.environ["PATH"]])
        return self._wait_for(
            ["bash", "-euc", script],
            timeout,
            {"TMPDIR": self._folder.name, **(env or {}), "PATH": programs},
            folder,
        )

    def _wait_for(
        self, command: Sequence[str], timeout: float, env: dict[str, str], folder: Path | None = None
    ) -> str:
        job = subprocess.Popen(
            [*self.enter(0, folder), *self._pin(0), *command], env={**os.environ, **env}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = job.communicate(timeout=limit(timeout))
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            for node in range(len(self._addresses)):  # ranks are children of daemons that outlive a killed mpirun
                node_holder.kill(self.processes(node))
            output, _ = job.communicate()
            raise AssertionError(f"the job was not complete after {limit(timeout):g} s:\n{output}") from None
        assert job.returncode == 0, f"exit code {job.returncode}:\n{output}"
        return output


def _nodes_of_ranks(ranks: Sequence[int], placement: Placement) -> list[int]:
    """Return the node of each rank, in the order of ranks."""
    if placement == "block":
        return [node for node, number in enumerate(ranks) for _ in range(number)]
    return [node for turn in range(max(ranks)) for node, number in enumerate(ranks) if turn < number]
