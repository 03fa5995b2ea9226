"""However a rank ends, the job ends with it: soon, with a code that says so, and with nothing left behind."""

import re
import signal

import pytest

pytestmark = pytest.mark.cold


def test_an_exception_ends_the_job_with_one_traceback(job):
    ended = job(
        4,
        """
        if world.rank == 2:
            fail_now()
            raise ValueError("the loss\\nis not finite")
        ax.barrier()
        """,
    )
    assert ended.code == 1
    ended.assert_ended_soon()
    lines = ended.lines_of(2)
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == ["ValueError: the loss", "is not finite"]
    assert ended.err.count("Traceback") == 1


def test_an_exception_in_a_thread_ends_the_job(job):
    ended = job(
        2,
        """
        def work():
            fail_now()
            raise KeyError("reader")

        if world.rank == 1:
            threading.Thread(target=work, name="reader-thread").start()
        ax.recv(torch.zeros(1), src=1 - world.rank)
        """,
    )
    assert ended.code == 1
    ended.assert_ended_soon()
    assert ended.lines_of(1)[0] == "Exception in thread reader-thread:"
    assert ended.lines_of(1)[-1] == "KeyError: 'reader'"
    assert ended.err.count("Traceback") == 1


def test_an_exception_in_backward_ends_the_job(job):
    ended = job(
        2,
        """
        x = torch.ones(2, requires_grad=True)

        def hook(gradient):
            fail_now()
            raise RuntimeError("in the hook")

        if world.rank == 1:
            x.register_hook(hook)
        (x * 2).sum().backward()
        ax.all_reduce(x.detach())
        """,
    )
    assert ended.code == 1
    ended.assert_ended_soon()
    assert ended.lines_of(1)[-1] == "RuntimeError: in the hook"


def test_sys_exit_on_one_of_four_ranks_gives_the_job_its_code(job):
    ended = job(
        4,
        """
        def main():
            try:
                ax.all_reduce(torch.ones(1000))
                if world.rank == 2:
                    fail_now()
                    sys.exit(3)
                ax.all_reduce(torch.ones(1000))
            finally:
                time.sleep(0)

        main()
        """,
    )
    assert ended.code == 3
    ended.assert_ended_soon()
    assert ended.lines_of(2) == ["has ended with exit code 3 while other ranks go on, and ends the job"]
    assert "Traceback" not in ended.err


def test_raising_system_exit_is_the_same(job):
    ended = job(
        2,
        """
        if world.rank == 1:
            fail_now()
            raise SystemExit(4)
        ax.barrier()
        """,
    )
    assert ended.code == 4
    ended.assert_ended_soon()


def test_an_exit_does_not_wait_for_other_threads(job):
    ended = job(
        2,
        """
        if world.rank == 1:
            threading.Thread(target=ax.recv, args=(torch.zeros(1), 0)).start()
            fail_now()
            sys.exit(3)
        ax.barrier()
        """,
    )
    assert ended.code == 3
    ended.assert_ended_soon()


def test_an_exit_message_is_printed_and_the_code_is_one(job):
    ended = job(
        2,
        """
        if world.rank == 1:
            fail_now()
            sys.exit("no such file")
        ax.barrier()
        """,
    )
    assert ended.code == 1
    ended.assert_ended_soon()
    assert ended.lines_of(1)[0] == "no such file"


def test_exits_that_are_caught_are_no_exits(job):
    ended = job(
        2,
        """
        import argparse, copy, pickle

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
        if world.rank == 1:
            thread = threading.Thread(target=sys.exit, args=(3,))
            thread.start()
            thread.join()
        ax.barrier()
        print("done")
        """,
    )
    assert ended.code == 0, ended.err
    assert ended.out.split() == ["done", "done"]
    assert ended.err == ""


def test_a_rank_may_end_before_the_others(job):
    ended = job(
        3,
        """
        if world.rank == 1:
            fail_now()
            sys.exit(0)
        pair = torch.ones(1)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            if world.rank == 0:
                ax.send(pair, dst=2)
            else:
                ax.recv(pair, src=0)
            until = until if world.rank == 0 or pair.item() > 0 else 0
            pair.fill_(1.0 if time.monotonic() < until else 0.0)
        if world.rank == 0:
            ax.send(torch.zeros(1), dst=2)
        print("rank", world.rank, "has worked", flush=True)
        """,
    )
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()[-2:]) == ["rank 0 has worked", "rank 2 has worked"]
    assert ended.seconds >= 1
    assert ended.err == ""


def test_ranks_that_fail_together_are_not_aborted(job):
    ended = job(2, "print('before'); ax.barrier(); sys.exit(1)")
    assert ended.code == 1
    assert ended.out.split() == ["before", "before"]
    assert ended.lines_of(0) == ended.lines_of(1) == []
    assert "Abort" not in ended.err
    assert "MPI_ABORT" not in ended.err


def test_a_waiting_rank_says_so(job):
    ended = job(
        2,
        """
        from axonmpi.backends import exits

        exits.PATIENCE_SECONDS = 0.1
        if world.rank == 1:
            time.sleep(1)
        """,
    )
    assert ended.code == 0
    assert ended.err == "[rank 0] has come to the end of its program and waits for the other ranks\n"


VANISHING = """
import signal

rounds = 0

def vanish():
    while rounds < 2:
        time.sleep(0.001)
    fail_now()
    {deed}

if world.rank == 1:
    threading.Thread(target=vanish).start()
data = torch.ones(1 << 22)
while True:
    ax.all_reduce(data, ax.ReduceOp.MAX)
    rounds += 1
"""


@pytest.mark.parametrize(("name", "ranks"), [("SIGKILL", 4), ("SIGTERM", 2)])
def test_a_rank_killed_in_an_all_reduce(job, name, ranks):
    number = int(signal.Signals[name])
    ended = job(ranks, VANISHING.format(deed=f"os.kill(os.getpid(), {number})"))
    assert ended.code not in (0, None)
    ended.assert_ended_soon()
    assert re.search(rf"(signal|EXIT CODE:) {number}\b", ended.out + ended.err), ended.out + ended.err


def test_a_rank_that_exits_at_once_in_an_all_reduce(job):
    ended = job(2, VANISHING.format(deed="os._exit(7)"))
    assert ended.code == 7
    ended.assert_ended_soon()


def test_an_interrupt_ends_the_job_with_its_own_code(job):
    ended = job(
        2,
        """
        import signal

        if world.rank == 1:
            fail_now()
            signal.raise_signal(signal.SIGINT)
        ax.barrier()
        """,
    )
    assert ended.code == 130
    ended.assert_ended_soon()
    assert ended.lines_of(1)[-1] == "KeyboardInterrupt"


def test_a_hook_that_was_there_before_prints_the_exception(job):
    ended = job(
        2,
        """
        if world.rank == 1:
            fail_now()
            raise ValueError("plain")
        ax.barrier()
        """,
        before="""
        import sys
        sys.excepthook = lambda kind, error, trace: print("my hook saw", error, file=sys.stderr)
        """,
    )
    assert ended.code == 1
    ended.assert_ended_soon()
    assert ended.lines_of(1) == ["my hook saw plain"]
    assert "Traceback" not in ended.err


def test_a_hook_set_later_still_ends_the_job(job):
    ended = job(
        2,
        """
        sys.excepthook = lambda kind, error, trace: print("my hook saw", error, file=sys.stderr, flush=True)
        if world.rank == 1:
            fail_now()
            raise ValueError("a value")
        ax.barrier()
        """,
    )
    assert ended.code == 1
    ended.assert_ended_soon()
    assert "my hook saw a value\n" in ended.err
    assert ended.lines_of(1) == ["has ended with exit code 1 while other ranks go on, and ends the job"]


@pytest.mark.parametrize(
    ("closing", "said"),
    [("raise OSError('worker is stuck')", "OSError: worker is stuck"), ("threading.Event().wait()", "Timeout")],
    ids=["raises", "blocks"],
)
def test_a_worker_that_cannot_be_stopped_ends_the_job(job, closing, said):
    ended = job(
        2,
        f"""
        from axonmpi.backends import exits

        exits.CLOSING_SECONDS = 0.5

        def close():
            fail_now()
            {closing}

        if world.rank == 1:
            exits.before_finalize(close)
        """,
    )
    assert ended.code == 1
    ended.assert_ended_soon()
    assert said in ended.err


def test_a_forked_child_ends_alone(job):
    ended = job(
        2,
        """
        for ending in ("sys.exit(5)", "raise ValueError('only here')", "pass"):
            child = os.fork()
            if child == 0:
                exec(ending)
                break
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        else:
            ax.barrier()
            print("done", flush=True)
        """,
    )
    assert ended.code == 0, ended.err
    assert sorted(ended.out.split()) == ["0", "0", "1", "1", "5", "5", "done", "done"]
    assert ended.err.count("ValueError: only here") == 2
    assert "[rank" not in ended.err


def test_all_output_arrives_before_the_job_is_aborted(job):
    ended = job(
        2,
        """
        if world.rank == 1:
            for number in range(5000):
                print("line", number)
            raise ValueError("\\n".join(f"detail {number}" for number in range(500)))
        ax.barrier()
        """,
    )
    assert ended.code == 1
    assert ended.out.count("line") == 5000
    assert len(ended.lines_of(1)) >= 500
    assert ended.lines_of(1)[-1] == "detail 499"
