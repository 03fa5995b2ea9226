"""The plugin in sessions of plain pytest: tests on ranks run on mock ranks."""

import pytest

IN_A_JOB = {"PMI_RANK": "0", "PMI_SIZE": "2"}
HEAD = """
    import pytest
    import axonmpi as ax
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")

    def run(source, *args, ini=""):
        pytester.makepyfile(HEAD + source)
        pytester.makeini("[pytest]\n" + ini)
        return pytester.runpytest_inprocess(*args)

    return run


def test_a_marked_test_runs_once_for_each_count(run):
    result = run(
        """
    @pytest.mark.ranks(1, 3)
    def test_size(world):
        assert ax.all_gather_object(world.rank) == list(range(world.size))
    """,
        "-v",
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["*mock ranks (threads)*", "*test_size?1rank? PASSED*", "*test_size?3ranks? PASSED*"]
    )


def test_counts_can_be_chosen_with_k(run):
    source = """
    @pytest.mark.ranks(1, 2, 4)
    def test_size(world):
        pass
    """
    run(source, "-k", "2ranks").assert_outcomes(passed=1, deselected=2)


def test_each_different_failure_appears_once_with_its_ranks(run):
    result = run("""
    @pytest.mark.ranks(4)
    def test_it(world):
        if world.rank == 0:
            raise ValueError("zero")
        if world.rank % 2:
            assert world.size == 99
        world.default_group.barrier()
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 0: ValueError: zero",
            "ranks 1, 3: assert 4 == 99",
            "*raise ValueError(*",
            "*assert world.size == 99",
            "FAILED *test_it?4ranks? - rank 0: ValueError: zero; ranks 1, 3: assert 4 == 99",
        ]
    )
    assert str(result.stdout).count("E           assert 4 == 99") == 1
    assert "RankFailedError" not in str(result.stdout)


def test_a_failure_on_the_only_rank_looks_as_always(run):
    result = run("""
    @pytest.mark.ranks(1)
    def test_it(world):
        assert [world.size] == [2]
    """)
    result.stdout.fnmatch_lines(["E*assert ?1? == ?2?", "E*At index 0 diff: 1 != 2"])
    result.stdout.no_fnmatch_line("rank 0:*")


def test_system_exit_is_a_failure_of_the_test(run):
    result = run("""
    @pytest.mark.ranks(2)
    def test_it(world):
        if world.rank == 1:
            raise SystemExit(3)
        world.default_group.barrier()

    def test_next():
        pass
    """)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["rank 1: SystemExit: 3"])


def test_a_test_that_hangs_fails_with_all_stacks_and_the_run_goes_on(run):
    result = run("""
    import torch

    def wait_in_vain(world):
        world.default_group.barrier()

    @pytest.mark.ranks(3)
    @pytest.mark.rank_timeout(0.3)
    def test_it(world):
        if world.rank == 1:
            world.default_group.recv(torch.ones(1), 0)
        wait_in_vain(world)

    def test_next():
        pass
    """)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["ranks 0, 1, 2 of 3 mock ranks did not end within 0.3 s", "*stack of ranks 0, 2*"])
    result.stdout.fnmatch_lines(["*in wait_in_vain"])


def test_a_failure_is_shown_with_the_time_out_that_it_led_to(run):
    result = run(
        """
    import threading
    stay = threading.Event()

    @pytest.mark.ranks(2)
    def test_it(world):
        if world.rank == 1:
            raise ValueError("one")
        stay.wait()

    def test_next():
        stay.set()
    """,
        ini="axonmpi_timeout = 0.3",
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["rank 0 of 2 mock ranks did not end within 0.3 s", "*failure of rank 1*"])
    result.stdout.fnmatch_lines(["*ValueError: one"])


def test_skips(run):
    result = run(
        """
    @pytest.mark.ranks(2)
    def test_on_some(world):
        if world.rank == 1:
            pytest.skip("not here")

    @pytest.mark.ranks(2)
    def test_on_all(world):
        pytest.skip("nowhere")

    @pytest.mark.ranks(2)
    def test_no_excuse(world):
        if world.rank == 0:
            pytest.skip("not here")
        assert False
    """,
        "-rs",
    )
    result.assert_outcomes(passed=1, skipped=1, failed=1)
    result.stdout.fnmatch_lines(["SKIPPED ?1? *nowhere"])


def test_expected_failures(run):
    result = run("""
    @pytest.mark.ranks(2)
    @pytest.mark.xfail(strict=True, raises=ValueError)
    def test_expected(world):
        if world.rank == 1:
            raise ValueError

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(strict=True)
    def test_unexpected_pass(world):
        pass

    @pytest.mark.ranks(2)
    def test_by_call(world):
        if world.rank == 0:
            pytest.xfail("known")

    @pytest.mark.ranks(2)
    def test_no_excuse(world):
        if world.rank == 0:
            pytest.xfail("known")
        raise ValueError("not known")
    """)
    result.assert_outcomes(xfailed=2, failed=2)
    result.stdout.fnmatch_lines(["rank 1: ValueError: not known"])


def test_fixtures_are_shared_unless_they_need_a_rank(run):
    result = run("""
    @pytest.fixture
    def shared():
        return [2]

    @pytest.fixture
    def own(world):
        return world.rank

    @pytest.mark.ranks(2)
    def test_both(world, shared, own):
        shared.append(own)
        world.default_group.barrier()
        assert sorted(shared) == [0, 1, 2]
    """)
    result.assert_outcomes(passed=1)


def test_property_based_tests_find_the_smallest_failing_example(run):
    result = run("""
    from hypothesis import given, settings, strategies as st

    @pytest.mark.ranks(2)
    @settings(database=None)
    @given(number=st.integers(0, 1000))
    def test_it(world, number):
        assert world.rank == 0 or number < 17
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["rank 1: *", "*number=17,*"])


def test_property_based_tests_have_no_deadline_but_their_own(run):
    result = run("""
    import time
    from hypothesis import Phase, given, settings, strategies as st

    once = {"database": None, "max_examples": 1, "phases": [Phase.generate]}

    @pytest.mark.ranks(1)
    @settings(**once)
    @given(number=st.integers())
    def test_slow(world, number):
        time.sleep(0.25)

    @pytest.mark.ranks(1)
    @settings(**once, deadline=50)
    @given(number=st.integers())
    def test_too_slow(world, number):
        time.sleep(0.25)
    """)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*DeadlineExceeded*"])


def test_asynchronous_tests_are_refused_as_by_pytest_itself(run):
    result = run("""
    @pytest.mark.ranks(2)
    async def test_it(world):
        assert False
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*async def functions are not natively supported*"])


def test_gpu_tests_are_skipped_where_there_is_none(run, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    source = """
    @pytest.mark.gpu
    def test_it():
        assert False
    """
    result = run(source, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*needs a CUDA device"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    run(source).assert_outcomes(failed=1)


MPI_MARKERS = """
    @pytest.mark.mpi(min_size=2)
    def test_on_all():
        assert False

    @pytest.mark.mpi_skip
    def test_alone():
        pass

    @pytest.mark.mpi_xfail
    def test_better_alone():
        pass
"""


@pytest.mark.parametrize("plugins", [[], ["-p", "no:pytest_mpi"]], ids=["with pytest-mpi", "without"])
def test_markers_of_pytest_mpi(run, plugins):
    run(MPI_MARKERS, "--strict-markers", *plugins).assert_outcomes(passed=2, skipped=1)


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("ranks()", "got ranks()"),
        ("ranks(0)", "got ranks(0)"),
        ("ranks(2, 2)", "got ranks(2, 2)"),
        ("ranks('2')", "got ranks('2')"),
        ("ranks(n=2)", "got ranks(n=2)"),
    ],
)
def test_wrong_markers_are_refused(run, marker, said):
    result = run(f"""
    @pytest.mark.{marker}
    def test_it(world):
        pass
    """)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_it: ranks: expected different numbers of ranks*"])
    assert said in str(result.stdout)


@pytest.mark.parametrize("marker", ["rank_timeout()", "rank_timeout(0)", "rank_timeout('5')", "rank_timeout(1, 2)"])
def test_wrong_time_outs_are_refused(run, marker):
    result = run(f"""
    @pytest.mark.ranks(2)
    @pytest.mark.{marker}
    def test_it(world):
        pass
    """)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*test_it*expected one positive number of seconds, got {marker}*"])


@pytest.mark.parametrize(
    "setting", ["axonmpi_timeout = 0", "axonmpi_timeout = soon", "axonmpi_grace = -1", "axonmpi_unmarked = some"]
)
def test_wrong_settings_are_refused(run, setting):
    result = run("def test_it(): pass", ini=setting)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    name, _, value = setting.partition(" = ")
    result.stderr.fnmatch_lines([f"*{name}: expected *got '{value}'*"])


def test_n_auto_starts_no_workers_under_mpirun(request, monkeypatch):
    if not request.config.pluginmanager.hasplugin("xdist"):
        pytest.skip("needs pytest-xdist")
    workers = request.config.hook.pytest_xdist_auto_num_workers
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")  # what xdist itself would take
    assert workers(config=request.config) == 3
    for name, value in IN_A_JOB.items():
        monkeypatch.setenv(name, value)
    assert workers(config=request.config) == 0


def test_a_number_of_workers_is_refused_under_mpirun(run, monkeypatch):
    for name, value in IN_A_JOB.items():
        monkeypatch.setenv(name, value)
    result = run("def test_it(): pass", "-n", "2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*xdist's -n and mpirun cannot be combined*-n auto starts none*"])


def test_without_xdist_the_plugin_is_as_always(run):
    run("\n    def test_it(): pass", "-p", "no:xdist").assert_outcomes(passed=1)
