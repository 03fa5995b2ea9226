"""Programs of others, run one after the other: which pass, and the output of those that do not."""

from collections.abc import Callable, Mapping

from axonmpi.testing import LaunchResult


def try_each(programs: Mapping[str, Callable[[], LaunchResult]]) -> int:
    """Run the jobs, print a line for each, and return 0 if all of them pass, else 1."""
    failed = 0
    for name, start in programs.items():
        done = start()
        print(f"{'failed' if done.returncode else 'passed'} {done.seconds:5.0f} s  {name}", flush=True)
        if done.returncode:
            failed = 1
            print(done.stdout[-3000:], done.stderr[-6000:], sep="\n")
    return failed
