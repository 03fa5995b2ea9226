"""Two nodes on one machine: network namespaces joined by a virtual cable, each with a /dev/shm of its own.

As a command it runs a script on ranks of both nodes, to see what a network of a given bandwidth does to it:

    python tests/nodes/two_nodes.py --rate 1gbit --ranks 2 2 script.py arguments
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from axonmpi.testing.mpirun import find_mpirun

LINK_SECONDS = 20.0
_NAMESPACES = ("--net", "--uts", "--mount", "--ipc")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_SETUP = "hostname {name} && mount -t tmpfs tmpfs /dev/shm && mount --bind {hosts} /etc/hosts && ip link set lo up"
_AGENT = """#!/bin/sh
# Stands for ssh: HOST COMMAND...
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
case $host in {cases} esac
exec nsenter -t "$process" -n -u -m -i --wdns="$PWD" -- {pin}/bin/sh -c "$*"
"""


class TwoNodes:
    """The two nodes, n1 and n2; a context manager.

    Args:
        rate: Bandwidth of the cable in each direction, as `tc` takes it ("1gbit"); None: as quick as memory.
        own_cores: Whether each has cores of its own, as machines do; else both use all of them.
    """

    def __init__(self, rate: str | None = None, *, own_cores: bool = False) -> None:
        self._rate = rate
        self._own_cores = own_cores
        self._holders: list[subprocess.Popen[str]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="axonmpi-nodes-")

    @staticmethod
    def obstacle() -> str | None:
        """Say why there can be no such nodes here, if so."""
        try:
            tried = subprocess.run(
                ["unshare", *_NAMESPACES, "ip", "link"], capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"network namespaces cannot be made: {error}"
        return None if tried.returncode == 0 else f"network namespaces are not permitted: {tried.stderr.strip()}"

    def __enter__(self) -> TwoNodes:
        folder = Path(self._folder.name)
        hosts = folder / "hosts"
        hosts.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{a} n{i}\n" for i, a in enumerate(_ADDRESSES, start=1))
        )
        for number in (1, 2):
            setup = _SETUP.format(name=f"n{number}", hosts=hosts)
            # The namespaces last as long as a process in them, and that one until its input ends.
            command = ["unshare", *_NAMESPACES, "sh", "-c", f"{setup} && echo ready && exec cat"]
            holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._holders.append(holder)
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n", "a node could not be set up"
        second = self._holders[1].pid
        self._inside(0, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second))
        for node, address in enumerate(_ADDRESSES):
            self._inside(node, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
            self._inside(node, "ip", "link", "set", "eth0", "up")
            if self._rate:
                limit = ("rate", self._rate, "burst", "256k", "latency", "50ms")
                self._inside(node, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        for node in (0, 1):
            self._wait_for_link(node)
        agent = folder / "ssh"
        cores = sorted(os.sched_getaffinity(0))
        cases = " ".join(
            f"n{i + 1}|{address}) process={self._holders[i].pid}; cores={','.join(map(str, cores[i::2]))};;"
            for i, address in enumerate(_ADDRESSES)
        )
        pin = 'taskset -c "$cores" ' if self._own_cores and len(cores) > 1 else ""
        agent.write_text(_AGENT.format(cases=cases, pin=pin))
        agent.chmod(0o755)
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait(10)
            assert holder.stdout is not None
            holder.stdout.close()
        self._folder.cleanup()

    def enter(self, node: int, folder: Path | None = None) -> list[str]:
        """Return the words before a command that let it run on a node, 0 or 1, in a folder, by default this one."""
        return [
            "nsenter",
            "-t",
            str(self._holders[node].pid),
            "-n",
            "-u",
            "-m",
            "-i",
            f"--wdns={folder or os.getcwd()}",
            "--",
        ]

    def _inside(self, node: int, *command: str) -> str:
        done = subprocess.run([*self.enter(node), *command], check=True, capture_output=True, text=True, timeout=20)
        return done.stdout

    def processes(self, node: int) -> set[int]:
        """Return the numbers of the processes that run on a node, but for the one that holds it."""
        holder = self._holders[node].pid
        network = os.readlink(f"/proc/{holder}/ns/net")
        found = set()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if entry.name.isdecimal() and os.readlink(entry / "ns/net") == network:
                    found.add(int(entry.name))
        return found - {holder}

    def _wait_for_link(self, node: int) -> None:
        """Wait until the node's end of the cable works, which it does not as soon as both are set up."""
        deadline = time.monotonic() + LINK_SECONDS
        while "state UP" not in (state := self._inside(node, "ip", "-o", "link", "show", "eth0")):
            assert time.monotonic() < deadline, f"the cable does not work: {state}"

    def run(
        self, ranks: tuple[int, int], *arguments: str, timeout: float, env: dict[str, str] | None = None
    ) -> str:
        """Run Python with `arguments` on so many ranks of each node; returns what they printed.

        Raises:
            AssertionError: The job failed or took longer than `timeout` seconds; all of it was ended.
        """
        agent = str(Path(self._folder.name) / "ssh")
        mpirun = str(find_mpirun())
        hosts = ",".join(f"n{i}:{n}" for i, n in enumerate(ranks, start=1) if n)
        kind = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
        extra = {"OMP_NUM_THREADS": "1", **(env or {})}
        if "HYDRA" in kind.upper():
            start = [mpirun, "-launcher-exec", agent, "-hosts", hosts]
        else:
            start = [mpirun, "--prtemca", "plm_ssh_agent", agent, "--host", hosts, "--bind-to", "none"]
            start += [part for name in (*extra, "PYTHONPATH") for part in ("-x", name)]
            extra |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        extra["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        return self._wait_for([*start, "-n", str(sum(ranks)), sys.executable, *arguments], timeout, extra)

    def run_script(self, script: str, folder: Path, *, timeout: float, env: dict[str, str] | None = None) -> str:
        """Run a shell script on the first node, from where `ssh` leads to both; returns what it printed.

        Raises:
            AssertionError: It failed or took longer than `timeout` seconds; all of it was ended.
        """
        programs = os.pathsep.join([self._folder.name, str(Path(sys.executable).parent), os.environ["PATH"]])
        return self._wait_for(["bash", "-euc", script], timeout, {**(env or {}), "PATH": programs}, folder)

    def _wait_for(
        self, command: Sequence[str], timeout: float, env: dict[str, str], folder: Path | None = None
    ) -> str:
        job = subprocess.Popen(
            [*self.enter(0, folder), *command], env={**os.environ, **env}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            output, _ = job.communicate()
            raise AssertionError(f"the job was not complete after {timeout:g} s:\n{output}") from None
        assert job.returncode == 0, f"exit code {job.returncode}:\n{output}"
        return output


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script on two nodes."""
    parser = argparse.ArgumentParser(description="Run a Python script on two nodes in network namespaces.")
    parser.add_argument("--rate", help="bandwidth of the network in each direction, such as 1gbit")
    parser.add_argument("--ranks", type=int, nargs=2, default=(2, 2), help="ranks on each node (default: 2 2)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if (obstacle := TwoNodes.obstacle()) is not None:
        raise SystemExit(obstacle)
    with TwoNodes(options.rate, own_cores=True) as nodes:
        print(nodes.run(tuple(options.ranks), *options.script, timeout=options.timeout), end="")


if __name__ == "__main__":
    main()
