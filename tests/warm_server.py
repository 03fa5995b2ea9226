"""Forks of a Python that has imported torch: programs that start within a tenth of a second rather than in seconds.

    python warm_server.py ADDRESS

It serves until its standard input ends. What it imports is of others alone: axonmpi, MPI and the program are
imported by each fork for itself, as in a new interpreter. See `warm_client.py` for who asks.
"""

# Everything imported here has been imported in every program, too.
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import marshal
import multiprocessing.process
import os
import random
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import types

THIRD_PARTIES = ("torch", "torch._dynamo", "numpy", "mpi4py", "yaml", "pytest")
NAMESPACES = ("net", "uts", "ipc", "mnt")
F_SETSIG = 10
PATIENCE_SECONDS = 10.0
"""For a client that has begun to ask."""
ASIDE = 600
"""No program has open files with such numbers."""


def serve(address: str) -> "tuple[dict, list[int]]":
    """Fork for each request; return it in the fork."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([0, listener, *running], [], [])
        for each in ready:
            if each == 0:
                sys.exit()  # nothing is ever written there: whom this serves has ended
            if each is not listener:
                process, client = running.pop(each)
                os.close(each)
                _, status = os.waitpid(process, 0)
                tell(client, status)
                client.close()
                continue
            client, _ = listener.accept()
            files: list[int] = []
            try:
                request = request_from(client, files)
                process = os.fork()
            except (EOFError, OSError):  # the client, which has been ended, or the system's limits
                client.close()
            else:
                if process == 0:
                    for one in (listener, client, *(other for _, other in running.values())):
                        one.detach()
                    return request, files
                tell(client, process)
                running[os.pidfd_open(process)] = (process, client)
            for number in files:
                os.close(number)


def tell(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it may have ended, which ends the program, too
        client.sendall(struct.pack("<i", number))


def request_from(client: socket.socket, files: "list[int]") -> dict:
    """Receive a request, and its open files into `files`."""
    client.settimeout(PATIENCE_SECONDS)
    length, received, _, _ = socket.recv_fds(client, 8, 253)
    files += received
    if len(length) < 8:
        raise EOFError
    left = struct.unpack("<q", length)[0]
    parts = []
    while left:
        parts.append(client.recv(left))
        left -= len(parts[-1])
        if not parts[-1]:
            raise EOFError
    client.settimeout(None)
    return marshal.loads(b"".join(parts))


def become(request: dict, received: "list[int]") -> None:
    """Take on everything that a new process would have from the one that has started it."""
    aside = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, ASIDE) for number in received]
    os.closerange(0, ASIDE)
    alive, *files = aside
    for number, copy in zip(request["files"], files, strict=True):
        os.dup2(copy, number, inheritable=True)
        os.close(copy)
    end_with(alive)
    enter_namespaces(request["process"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    for limit, values in request["limits"]:
        if resource.getrlimit(limit) != values:
            resource.setrlimit(limit, values)
    os.environb.clear()
    os.environb.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = open_stream(number, mode, unbuffered) if number in request["files"] else None
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    random.seed()
    sys.modules["numpy"].random.seed()


def open_stream(number: int, mode: str, unbuffered: bool) -> io.TextIOWrapper:
    errors = "backslashreplace" if number == 2 else "strict"
    if mode == "r":
        return open(number, encoding="utf-8", errors=errors, closefd=False)
    file = io.FileIO(number, "w", closefd=False)
    lines = number == 2 or file.isatty()
    binary = file if unbuffered else io.BufferedWriter(file)
    return io.TextIOWrapper(binary, "utf-8", errors, line_buffering=lines, write_through=unbuffered)


def end_with(alive: int) -> None:
    """Have this process killed when whoever holds the pipe's other end has ended."""
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(alive)
    if poll.poll(0):
        os._exit(1)


def enter_namespaces(process: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in NAMESPACES:
        if os.readlink(f"/proc/{process}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
            file = os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY)
            if libc.setns(file, 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the {name} namespace")
            os.close(file)


def prepare(request: dict) -> "tuple[str, str, types.ModuleType]":
    """Return how to run what, and the module to run it in; set what the program sees of itself."""
    first, *rest = request["arguments"]
    sys.executable = request["executable"]
    sys.orig_argv = [sys.executable, first, *rest]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if first in ("-c", "-m"):
        kind, what, rest = first, rest[0], rest[1:]
        sys.argv = [first, *rest]
        folder = "" if kind == "-c" else os.getcwd()
    else:
        kind, what = "script", os.path.abspath(first)
        sys.argv = [first, *rest]
        folder = os.path.dirname(os.path.realpath(first))
        main.__file__ = what
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    path = os.environ.get("PYTHONPATH", "")
    sys.path[0:1] = [folder, *(os.path.abspath(entry) for entry in path.split(os.pathsep) if entry)]
    importlib.invalidate_caches()
    return kind, what, main


def code_of(kind: str, what: str) -> types.CodeType:
    if kind == "-c":
        return compile(what, "<string>", "exec")
    with open(what, "rb") as file:
        return compile(file.read(), what, "exec")


if __name__ == "__main__":
    for third_party in THIRD_PARTIES:
        importlib.import_module(third_party)
    # That of a terminal is for the tests; one for a fork waits until that is what it will be.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    gc.freeze()
    become_what, become_with = serve(sys.argv[1])
    become(become_what, become_with)
    kind, what, main = prepare(become_what)
    if kind == "-m":
        runpy._run_module_as_main(what)
    else:
        # At the end of this file, as a program ends: with its own way through Python's shutdown.
        exec(code_of(kind, what), main.__dict__)
