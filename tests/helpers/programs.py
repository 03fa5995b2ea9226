"""Programs of one process, which print their stacks where they hang."""

import signal
import subprocess
import sys

from axonmpi.launch.launcher_variables import without_launcher_variables

from .limits import limit


def run_alone(code: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run source code without a launcher; fails with the program's stacks where it does not end.

    Args:
        code: What Python runs.
        options: Of the interpreter.
        env: Variables in addition to those of this process.
    """
    command = [sys.executable, "-X", "faulthandler", *options, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**without_launcher_variables(), **env}, **pipes) as process:
        try:
            out, err = process.communicate(timeout=limit(60))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            _, err = process.communicate()
            raise AssertionError(f"the program does not end:\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)
