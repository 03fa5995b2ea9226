"""What stands for `python` where tests start jobs; the program runs in a fork of the server.

Whoever has started this process deals with it: its exit status, its signals and its end are the program's.
Where a fork would not be the same, a new interpreter takes this process's place.
"""

import _signal
import _socket
import array
import marshal
import os
import resource
import struct
import sys

# Only what Python starts with, as this runs before each rank.

PASSED_ON = [
    getattr(_signal, name) for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGCONT")
]
SETTINGS_OF_PYTHON = {b"PYTHONPATH", b"PYTHONUNBUFFERED", b"PYTHONDONTWRITEBYTECODE"}
"""Those that the server follows; it leaves others to a new interpreter."""
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
MOST_FILES = 200
"""How many one message can carry, with some to spare."""
HIGHEST_FILE = 600
"""From here on numbers are the server's."""


def main(python: str, address: str) -> None:
    arguments = sys.argv[1:]
    server = connected(address) if can_be_forked(arguments) else None
    if server is None:
        os.execv(python, [python, *arguments])
    # This process's end, however it comes about, ends the program: it closes this pipe.
    alive, _held = os.pipe()
    own = (server.fileno(), alive, _held)
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if number not in own and is_open(number)]
    if len(files) > MOST_FILES or max(files, default=0) >= HIGHEST_FILE:
        os.execv(python, [python, *arguments])
    ignored = [number for number in PASSED_ON if _signal.getsignal(number) == _signal.SIG_IGN]
    request = marshal.dumps(
        {
            "executable": sys.argv[0],
            "arguments": arguments,
            "environment": dict(os.environb),
            "folder": os.getcwd(),
            "umask": umask(),
            "cores": sorted(os.sched_getaffinity(0)),
            "limits": [(limit, resource.getrlimit(limit)) for limit in LIMITS],
            "ignored": ignored,
            "files": files,
            "process": os.getpid(),
        }
    )
    _signal.pthread_sigmask(_signal.SIG_BLOCK, PASSED_ON)
    descriptors = array.array("i", [alive, *files])
    server.sendmsg([struct.pack("<q", len(request))], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)])
    rest = memoryview(request)
    while rest:
        rest = rest[server.send(rest) :]
    os.close(alive)
    program = number_from(server)
    for number in PASSED_ON:
        if number not in ignored:
            _signal.signal(number, lambda received, _frame: pass_on(program, received))
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, PASSED_ON)
    status = number_from(server)
    _signal.pthread_sigmask(_signal.SIG_BLOCK, PASSED_ON)
    end_like(status)


def can_be_forked(arguments: list[str]) -> bool:
    """Say whether a fork does what a new interpreter would."""
    if not arguments or (arguments[0] not in ("-c", "-m") and not os.path.isfile(arguments[0])):
        return False
    settings = {name for name in os.environb if name.startswith(b"PYTHON")}
    # The server has read how many threads there should be, when it imported torch.
    return settings <= SETTINGS_OF_PYTHON and os.environb.get(b"OMP_NUM_THREADS") == b"1"


def connected(address: str) -> "_socket.socket | None":
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        server.connect(address)
    except OSError:
        return None
    return server


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False  # the one of the listing
    return True


def umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def pass_on(program: int, number: int) -> None:
    try:  # noqa: SIM105 - contextlib would have to be imported
        os.kill(program, number)
    except ProcessLookupError:
        pass  # it has ended by itself, and how is on its way here


def number_from(server: "_socket.socket") -> int:
    received = b""
    while len(received) < 4:
        part = server.recv(4 - len(received))
        if not part:
            sys.exit("the server of warm interpreters has ended")
        received += part
    return struct.unpack("<i", received)[0]


def end_like(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left its own
        if number not in (_signal.SIGKILL, _signal.SIGSTOP):
            _signal.signal(number, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))
