"""Programs of the tests' warm Python see and do what they would in a Python of their own."""

import marshal
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.skipif(not warm.WarmPython.is_possible(), reason="needs Linux, and a short TMPDIR")

SURROUNDINGS = """
import os, resource, signal, sys, threading
print(sys.argv[1:], sys.path[0], sys.path[1:3], __name__, os.getcwd(), os.environ["MINE"])
print(oct(os.umask(0)), resource.getrlimit(resource.RLIMIT_NOFILE), sorted(os.sched_getaffinity(0)))
print([signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)])
print([stream.encoding for stream in (sys.stdin, sys.stdout, sys.stderr)], sys.stdout.line_buffering)
print(threading.active_count(), os.read(int(sys.argv[1]), 5), os.get_inheritable(int(sys.argv[1])))
print(repr(sys.stdin.read()), file=sys.stderr)
"""
ENDS = {
    "at its end": "print('done')",
    "with a code": "raise SystemExit(3)",
    "with a message": "import sys; sys.exit('no')",
    "by os._exit": "import os; os._exit(7)",
    "by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "by a crash": "import ctypes; ctypes.string_at(0)",
    "after its threads": "import threading; threading.Timer(0.1, print, ['after']).start(); print('before')",
    "with what is to be done then": "import atexit; atexit.register(print, 'at the end'); print('before')",
    "as one that there is not": None,
}


def run(python, *program, **options):
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "MINE": "a ü"}
    return subprocess.run(
        [python, *program], env=variables, capture_output=True, timeout=60, text=True, check=False, **options
    )


def in_ways(code, folder):
    """Return the arguments of Python that run code, in each of its ways."""
    if code is None:
        return [[str(folder / "nowhere.py")]]
    (folder / "program.py").write_text(code)
    return [[str(folder / "program.py")], ["-c", code], ["-m", "program"]]


@pytest.mark.parametrize(
    ("variables", "arguments", "forked"),
    [
        ({}, [], True),
        ({"OMP_NUM_THREADS": "2"}, [], False),
        ({"PYTHONHASHSEED": "3"}, [], False),
        ({}, ["-W", "error"], False),
    ],
    ids=str,
)
def test_a_program_is_a_fork_where_that_is_the_same(cold_python, variables, arguments, forked):
    command = [sys.executable, *arguments, "-c", "import sys; print('torch' in sys.modules, sys.executable)"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    seen = subprocess.run(command, env={**env, **variables}, capture_output=True, text=True, timeout=60, check=True)
    assert seen.stdout == f"{forked} {sys.executable if forked else cold_python}\n"


def test_surroundings(cold_python, tmp_path):
    def surround():
        resource.setrlimit(resource.RLIMIT_NOFILE, (321, 512))
        os.umask(0o027)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def seen_by(python, way):
        reading, writing = os.pipe()
        os.write(writing, b"given")
        try:
            options = {"cwd": tmp_path, "input": "said\n", "pass_fds": [reading], "preexec_fn": surround}
            return run(python, *way, str(reading), "ü", **options)
        finally:
            os.close(reading)
            os.close(writing)

    for way in in_ways(SURROUNDINGS, tmp_path):
        forked, own = seen_by(sys.executable, way), seen_by(cold_python, way)
        assert own.returncode == 0, own.stderr
        assert (forked.returncode, forked.stdout, forked.stderr) == (0, own.stdout, own.stderr)


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_ends(cold_python, tmp_path, code):
    for way in in_ways(code, tmp_path):
        forked, own = (run(python, *way, cwd=tmp_path) for python in (sys.executable, cold_python))
        assert (forked.returncode, forked.stdout) == (own.returncode, own.stdout)
        assert forked.stderr.replace(sys.executable, cold_python) == own.stderr


def test_an_exception(cold_python, tmp_path):
    code = "def fail():\n    raise OSError('no such thing')\n\nfail()\n"
    for way in in_ways(code, tmp_path):
        forked, own = (run(python, *way, cwd=tmp_path) for python in (sys.executable, cold_python))
        assert forked.returncode == own.returncode == 1
        last = own.stderr.splitlines()[-3 if way[0] == "-c" else -5 :]
        assert forked.stderr.splitlines()[-len(last) :] == last


def test_what_is_random_differs():
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    assert len({number for _ in range(2) for number in run(sys.executable, "-c", code).stdout.split()}) == 4


WAITING = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"got it\\n"))
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


def test_signals_are_passed_on_and_a_killed_python_leaves_no_program():
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", WAITING], env=env, stdout=subprocess.PIPE, text=True) as process:
        program = int(process.stdout.readline())
        assert program != process.pid
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "got it\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while Path(f"/proc/{program}").exists():
        assert time.monotonic() < deadline, "the program is still there"
        os.sched_yield()


@pytest.mark.parametrize("sent", ["nothing", "half", "all"])
def test_a_client_that_ends_early_is_no_ones_trouble(sent):
    address = str(Path(sys.executable).parent / "server")
    reading, writing = os.pipe()
    request = marshal.dumps({"files": [1]})
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        if sent != "nothing":
            socket.send_fds(client, [struct.pack("<q", len(request))], [reading, writing])
            client.sendall(request if sent == "all" else request[:3])
    os.close(writing)
    assert run(sys.executable, "-c", "print('served')").stdout == "served\n"
    with open(reading, "rb") as pipe:
        assert pipe.read() == b""  # nobody else has it open for writing
