"""However a rank ends, the job ends with it: with a code that says so, and with nothing left behind."""

import re

import pytest

STAND_IN = """
import os, sys, threading, types
import axonmpi as ax
from axonmpi.launch import exit as exits

sys.excepthook = lambda kind, error, trace: print("my hook saw", kind.__name__, file=sys.stderr)

class World:
    both_end = False

    def Get_size(self):
        return 2

    def Get_rank(self):
        return 1

    def Dup(self):
        return self

    def Ibarrier(self):
        return types.SimpleNamespace(Test=lambda: self.both_end)

    def Abort(self, code):
        print("aborted", flush=True)
        os._exit(code)

world = World()
mpi = types.SimpleNamespace(
    COMM_WORLD=world, Is_finalized=lambda: False, Finalize=lambda: print("finalised"), Exception=RuntimeError
)
exits.FAILED_END_SECONDS = exits.CAUSE_SECONDS = 0.05
exits.install(mpi, finalize=True)
exits.set_end_communicator(world)
"""
"""Rank 1 of 2 on a stand-in of MPI; rank 0 goes on for ever unless the program says that both ranks end."""


def last_words(code):
    return f"has ended with exit code {code} while other ranks go on, and ends the job"


# ---- real jobs --------------------------------------------------------------------------------------------------


def test_an_exception_ends_the_job_with_one_traceback_after_all_output(job):
    """Also one in a backward, and one of many lines."""
    ended = job(
        2,
        """
        x = torch.ones(2, requires_grad=True)

        def hook(gradient):
            for number in range(5000):
                print("line", number)
            raise ValueError("the loss\\n" + "\\n".join(f"detail {number}" for number in range(500)))

        if world.rank == 1:
            x.register_hook(hook)
        (x * 2).sum().backward()
        ax.barrier()
        """,
    )
    first, *lines = ended.lines_of(1)
    assert (ended.code, first) == (1, "Traceback (most recent call last):")
    assert lines[-501:] == ["ValueError: the loss", *(f"detail {number}" for number in range(500))]
    assert (ended.err.count("Traceback"), ended.out.count("line")) == (1, 5000)


@pytest.mark.parametrize(
    ("rank", "does", "said"),
    [
        (0, "os._exit(0)", "ended before axonmpi.init_process_group()"),
        (1, "time.sleep(3600)", "has not come to axonmpi.init_process_group() in 4 s"),
    ],
)
def test_a_rank_that_never_comes_ends_the_job(job, rank, does, said):
    ended = job(
        3,
        "",
        before=f"""
        import os, time
        if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "{rank}":
            {does}
        import axonmpi as ax
        ax.init_process_group(timeout=4)
        """,
    )
    assert ended.code != 0
    # Open MPI itself notices a rank that ends after another one has begun to start MPI.
    assert re.search(rf"axonmpi: rank {rank} {re.escape(said)}|due to process rank {rank} ", ended.err)
    assert ended.err.count("axonmpi:") <= 1


def test_an_exit_of_one_rank_is_the_jobs_and_waits_for_no_thread(job):
    """Also where `sys.exit` was looked up before the world was started. Only 8 bits of a code count."""
    ended = job(
        2,
        "",
        before="""
        import sys, threading
        import torch
        import axonmpi as ax

        def main():
            world = ax.init_process_group()
            ax.all_reduce(torch.ones(1000))
            if world.rank == 1:
                threading.Thread(target=ax.recv, args=(torch.zeros(1), 0)).start()
                return 256 + 3
            ax.all_reduce(torch.ones(1000))

        sys.exit(main())
        """,
    )
    assert (ended.code, ended.lines_of(1), "Traceback" in ended.err) == (3, [last_words(3)], False)


def test_a_job_that_wants_to_be_started_again_ends_with_its_own_code_when_all_ranks_have_come(job):
    ended = job(
        2,
        """
        from axonmpi.launch import exit as exits

        exits.FAILED_END_SECONDS = 0.05
        if world.rank == 0:
            time.sleep(1)  # the other rank waits for it
            print("saved", flush=True)
        sys.exit(ax.REQUEUE_EXIT_CODE)
        """,
    )
    assert (ended.code, ended.out, *map(ended.lines_of, range(2))) == (85, "saved\n", [], [])


# ---- one rank, on a stand-in of MPI -----------------------------------------------------------------------------

ENDS = {
    "a message": ("raise SystemExit('no such file')", 1, ["no such file", last_words(1)], "aborted\n"),
    "a code while a thread waits": (
        "threading.Thread(target=threading.Event().wait).start()\nsys.exit(5)", 5, [last_words(5)], "aborted\n",
    ),
    "both ranks end with a code": ("world.both_end = True\nsys.exit(7)", 7, [], "finalised\n"),
    "an interrupt, which a hook from before prints": (
        "raise KeyboardInterrupt", 130, ["my hook saw KeyboardInterrupt"], "aborted\n",
    ),
    "an exception, of which a hook set later prints nothing": (
        "sys.excepthook = lambda *error: None\nraise ValueError", 1, [last_words(1)], "aborted\n",
    ),
    "a rank that ends well waits, and says so when it takes long": (
        """
exits.PATIENCE_SECONDS = 0.05
World.both_end = property(lambda self: os.fstat(2).st_size > 0)
        """,
        0, ["has come to the end of its program and waits for the other ranks"], "finalised\n",
    ),
}  # fmt: skip
"""How a rank ends, its exit code, what it says, and what it does with MPI."""


@pytest.mark.parametrize(("program", "code", "said", "done"), ENDS.values(), ids=ENDS)
def test_the_end_of_a_rank(alone, program, code, said, done):
    ended = alone(STAND_IN + program)
    assert (ended.code, ended.out, ended.lines_of(1), "Traceback" in ended.err) == (code, done, said, False)


def test_an_exception_in_a_thread_ends_the_job(alone):
    ended = alone(
        STAND_IN
        + """
def work():
    raise KeyError("reader")

threading.Thread(target=work, name="reader-thread").start()
threading.Event().wait()
"""
    )
    first, *_, last = ended.lines_of(1)
    assert (ended.code, ended.out, ended.err.count("Traceback")) == (1, "aborted\n", 1)
    assert (first, last) == ("Exception in thread reader-thread:", "KeyError: 'reader'")


@pytest.mark.parametrize(
    ("closing", "seconds", "said", "done"),
    [
        ("raise OSError('worker is stuck')", 60, "OSError: worker is stuck", "aborted\n"),
        ("threading.Event().wait()", 0.05, "Timeout", ""),
    ],
    ids=["raises", "blocks"],
)
def test_a_worker_that_cannot_be_stopped_ends_the_job(alone, closing, seconds, said, done):
    ended = alone(
        STAND_IN
        + f"""
def close():
    {closing}

exits.CLOSING_SECONDS = {seconds}
exits.before_finalize(close)
world.both_end = True
"""
    )
    assert (ended.code, ended.out, said in ended.err) == (1, done, True), ended.err


def test_what_is_no_exit_of_a_rank(alone):
    """SystemExit is itself where it is caught, in a thread it ends the thread, and a fork ends alone."""
    ended = alone(
        STAND_IN
        + """
import argparse, copy, pickle, warnings

warnings.simplefilter("ignore")  # since Python 3.12 it warns of a fork in a process with several threads
for leave in (lambda: sys.exit(3), lambda: exit(3), lambda: argparse.ArgumentParser().exit(3)):
    try:
        leave()
    except SystemExit as error:
        assert error.code == 3 and error.args == (3,) and str(error) == "3", error
        assert type(error) is SystemExit
        assert pickle.loads(pickle.dumps(error)).code == copy.copy(error).code == 3
        error.code = 4
        assert error.code == 4
for nothing in (lambda: sys.exit(), lambda: sys.exit(None)):
    try:
        nothing()
    except SystemExit as error:
        assert error.code is None

thread = threading.Thread(target=sys.exit, args=(3,))
thread.start()
thread.join()
for ending in ("sys.exit(5)", "raise ValueError('only here')", "pass"):
    if not (child := os.fork()):
        exec(ending)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    world.both_end = True
"""
    )
    assert (ended.code, ended.err) == (0, "my hook saw ValueError\n")
    assert ended.out.splitlines()[:4] == ["5", "1", "0", "finalised"]
