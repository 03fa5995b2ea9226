"""However a rank ends, the job ends with it: soon, with a code that says so, and with nothing left behind."""

import re
import signal

import pytest


def test_an_exception_ends_the_job_with_one_traceback_after_all_output(job):
    """Also one in a backward, and one of many lines."""
    ended = job(
        2,
        """
        x = torch.ones(2, requires_grad=True)

        def hook(gradient):
            for number in range(5000):
                print("line", number)
            fail_now()
            raise ValueError("the loss\\n" + "\\n".join(f"detail {number}" for number in range(500)))

        if world.rank == 1:
            x.register_hook(hook)
        (x * 2).sum().backward()
        ax.barrier()
        """,
    )
    assert ended.code == 1
    ended.assert_ended_soon()
    lines = ended.lines_of(1)
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-501:] == ["ValueError: the loss", *(f"detail {number}" for number in range(500))]
    assert ended.err.count("Traceback") == 1
    assert ended.out.count("line") == 5000


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leave", "code", "said"),
    [("return 3", 3, []), ("raise SystemExit('no such file')", 1, ["no such file"])],
    ids=["code", "message"],
)
def test_an_exit_of_one_rank_is_the_jobs_and_waits_for_no_thread(job, leave, code, said):
    """Also where `sys.exit` was looked up before the world was started."""
    ended = job(
        2,
        "",
        before=f"""
        import sys, threading, time
        import torch
        import axonmpi as ax

        def main():
            world = ax.init_process_group()
            try:
                ax.all_reduce(torch.ones(1000))
                if world.rank == 1:
                    threading.Thread(target=ax.recv, args=(torch.zeros(1), 0)).start()
                    print(f"failing at {{time.monotonic()}}", flush=True)
                    {leave}
                ax.all_reduce(torch.ones(1000))
            finally:
                time.sleep(0)

        sys.exit(main())
        """,
    )
    assert ended.code == code
    ended.assert_ended_soon()
    last = f"has ended with exit code {code} while other ranks go on, and ends the job"
    assert ended.lines_of(1) == [*said, last]
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_what_is_no_exit_of_a_rank_and_a_rank_that_ends_before_the_others(job):
    """SystemExit is itself where it is caught, a fork ends alone, and a rank that waits at its end says so."""
    ended = job(
        3,
        """
        import argparse, copy, pickle
        from axonmpi.launch import exit as exits

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

        def others_go_on():
            until = time.monotonic() + 1
            going = torch.ones(1)
            while going:
                if world.rank == 0:
                    going.fill_(float(time.monotonic() < until))
                    ax.send(going, dst=2)
                else:
                    ax.recv(going, src=0)
            print("rank", world.rank, "has worked", flush=True)

        if world.rank == 1:
            thread = threading.Thread(target=sys.exit, args=(3,))
            thread.start()
            thread.join()
            for ending in ("sys.exit(5)", "raise ValueError('only here')", "pass"):
                child = os.fork()
                if child == 0:
                    exec(ending)
                    break
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            else:
                exits.PATIENCE_SECONDS = 0.1
                ax.barrier()
                fail_now()
                sys.exit(0)
        else:
            ax.barrier()
            others_go_on()
        """,
    )
    assert ended.code == 0, ended.err
    assert sorted(re.findall(r"^(?:\d|rank).*", ended.out, re.M)) == [
        *("0", "1", "5", "rank 0 has worked", "rank 2 has worked")
    ]
    assert ended.seconds >= 1
    assert ended.err.count("ValueError: only here") == 1
    own = re.findall(r"\[rank .*", ended.err)
    assert own == ["[rank 1] has come to the end of its program and waits for the other ranks"]


@pytest.mark.slow
def test_ranks_that_fail_together_are_not_aborted(job):
    ended = job(2, "print('before'); ax.barrier(); sys.exit(1)")
    assert ended.code == 1
    assert ended.out.split() == ["before", "before"]
    assert ended.lines_of(0) == ended.lines_of(1) == []
    assert "Abort" not in ended.err
    assert "MPI_ABORT" not in ended.err


def test_a_job_that_wants_to_be_started_again_ends_with_its_own_code_when_all_ranks_have_come(job):
    ended = job(
        2,
        """
        from axonmpi.launch import exit as exits

        exits.FAILED_MEETING_SECONDS = 0.05
        exits.PATIENCE_SECONDS = 0.3
        if world.rank == 0:
            time.sleep(1)
            print("saved", flush=True)
        sys.exit(ax.REQUEUE_EXIT_CODE)
        """,
    )
    assert ended.code == 85
    assert ended.out == "saved\n"
    assert re.findall(r"\[rank .*", ended.err) == [
        "[rank 1] has come to the end of its program and waits for the other ranks"
    ]


def test_a_rank_killed_in_an_all_reduce(job):
    ended = job(
        2,
        """
        import signal

        rounds = 0

        def vanish():
            while rounds < 2:
                time.sleep(0.001)
            fail_now()
            os.kill(os.getpid(), signal.SIGKILL)

        if world.rank == 1:
            threading.Thread(target=vanish).start()
        data = torch.ones(1 << 22)
        while True:
            ax.all_reduce(data, ax.ReduceOp.MAX)
            rounds += 1
        """,
    )
    assert ended.code not in (0, None)
    ended.assert_ended_soon()
    number = int(signal.SIGKILL)
    assert re.search(rf"(signal|EXIT CODE:) {number}\b", ended.out + ended.err), ended.out + ended.err


@pytest.mark.slow
def test_an_interrupt_has_its_own_code_and_a_hook_that_was_there_before_prints_it(job):
    ended = job(
        2,
        """
        import signal

        if world.rank == 1:
            fail_now()
            signal.raise_signal(signal.SIGINT)
        ax.barrier()
        """,
        before="""
        import sys
        sys.excepthook = lambda kind, error, trace: print("my hook saw", kind.__name__, file=sys.stderr)
        """,
    )
    assert ended.code == 130
    ended.assert_ended_soon()
    assert ended.lines_of(1) == ["my hook saw KeyboardInterrupt"]
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
        1,
        f"""
        from axonmpi.launch import exit as exits

        exits.CLOSING_SECONDS = 0.5

        def close():
            fail_now()
            {closing}

        exits.before_finalize(close)
        """,
    )
    assert ended.code == 1
    ended.assert_ended_soon()
    assert said in ended.err
