"""The plugin in sessions of plain pytest: tests on ranks run on mock ranks."""

import textwrap

import pytest

from axonmpi.testing import mock_ranks

HEAD = "import pytest\nimport axonmpi as ax\n"


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")

    def run(source, *args, ini=""):
        pytester.makepyfile(HEAD + textwrap.dedent(source))
        pytester.makeini("[pytest]\n" + ini)
        return pytester.runpytest_inprocess("-p", "no:hypothesispytest", *args)

    return run


COUNTS = """
    @pytest.mark.ranks(1, 2, 3)
    def test_size(world):
        assert ax.all_gather_object(world.rank) == list(range(world.size))
"""
HANGS = """
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
"""
SKIPS = """
    @pytest.mark.ranks(2)
    def test_skipped_on_some(world):
        if world.rank == 1:
            pytest.skip("not here")

    @pytest.mark.ranks(2)
    def test_skipped_on_all(world):
        pytest.skip("nowhere")

    @pytest.mark.ranks(2)
    def test_a_skip_is_no_excuse(world):
        if world.rank == 0:
            pytest.skip("not here")
        assert False

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
    def test_an_expected_failure_is_no_excuse(world):
        if world.rank == 0:
            pytest.xfail("known")
        raise ValueError("not known")
"""
FIXTURES = """
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
"""
SESSIONS = {
    "a marked test runs once for each count that is chosen": (
        (COUNTS, "-v", "-k", "not 2ranks"),
        {"passed": 2, "deselected": 1},
        ["*mock ranks (threads)*", "*test_size?1rank? PASSED*", "*test_size?3ranks? PASSED*"],
    ),
    "a test that hangs fails with all stacks and the run goes on": (
        (HANGS,),
        {"failed": 1, "passed": 1},
        ["ranks 0, 1, 2 of 3 mock ranks did not end within 0.3 s", "*stack of ranks 0, 2*", "*in wait_in_vain"],
    ),
    "skips and expected failures": (
        (SKIPS, "-rs"),
        {"passed": 1, "skipped": 1, "failed": 3, "xfailed": 2},
        ["rank 1: ValueError: not known", "SKIPPED ?1? *nowhere"],
    ),
    "fixtures are shared unless they need a rank": ((FIXTURES,), {"passed": 1}, []),
    "without xdist the plugin is as always": (("def test_it(): pass", "-p", "no:xdist"), {"passed": 1}, []),
}


@pytest.mark.parametrize(("session", "outcomes", "lines"), SESSIONS.values(), ids=SESSIONS)
def test_sessions(run, session, outcomes, lines):
    result = run(*session)
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines(lines)


def test_failures(run):
    """Each different one appears once with its ranks; that of the only rank looks as always."""
    result = run("""
    @pytest.mark.ranks(4)
    def test_it(world):
        if world.rank == 0:
            raise ValueError("zero")
        if world.rank % 2:
            assert world.size == 99
        world.default_group.barrier()

    @pytest.mark.ranks(1)
    def test_alone(world):
        assert [world.size] == [2]

    @pytest.mark.ranks(2)
    def test_exit(world):
        if world.rank == 1:
            raise SystemExit(3)
        world.default_group.barrier()

    @pytest.mark.ranks(2)
    async def test_asynchronous(world):
        assert False
    """)
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            "rank 0: ValueError: zero",
            "ranks 1, 3: assert 4 == 99",
            "*raise ValueError(*",
            "*assert world.size == 99",
            "E*assert ?1? == ?2?",
            "E*At index 0 diff: 1 != 2",
            "rank 1: SystemExit: 3",
            "*async def functions are not natively supported*",
            "FAILED *test_it?4ranks? - rank 0: ValueError: zero; ranks 1, 3: assert 4 == 99",
        ]
    )
    assert str(result.stdout).count("E           assert 4 == 99") == 1
    assert "RankFailedError" not in str(result.stdout)
    result.stdout.no_fnmatch_line("rank 0: assert*")


def test_a_failure_is_shown_with_the_time_out_that_it_led_to(run, monkeypatch):
    monkeypatch.setattr(mock_ranks, "_RELEASE_SECONDS", 0.0)  # nothing can release rank 0
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
    result.stdout.fnmatch_lines(
        ["rank 0 of 2 mock ranks did not end within 0.3 s", "*failure of rank 1*", "*ValueError: one"]
    )


@pytest.mark.parametrize(("marker", "argument"), [("ranks(2)", ""), ("mpi", ""), ("xfail", "world, ")])
def test_examples_of_hypothesis_on_ranks_are_refused(run, marker, argument):
    result = run(f"""
    from hypothesis import given, strategies as st

    class Test:
        @pytest.mark.{marker}
        @given(number=st.integers())
        def test_it(self, {argument}number):
            pass
    """)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_it*got a hypothesis test on ranks*Draw from a generator*"])


def test_gpu_tests_are_skipped_where_there_is_none(run, monkeypatch):
    source = """
    @pytest.mark.gpu
    def test_it():
        assert False
    """
    for gpus, expected in ((0, {"skipped": 1}), (1, {"failed": 1})):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=gpus: count)
        run(source).assert_outcomes(**expected)


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


@pytest.mark.parametrize("marker", ["ranks()", "ranks(0)", "ranks(2, 2)", "ranks('2')", "ranks(n=2)"])
def test_wrong_markers_are_refused(run, marker):
    result = run(f"@pytest.mark.{marker}\ndef test_it(world): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*test_it: ranks: expected different numbers of ranks*, got {marker}*"])


@pytest.mark.parametrize(
    ("marker", "setting"),
    [
        ("rank_timeout()", ""),
        ("rank_timeout(0)", ""),
        ("rank_timeout('5')", ""),
        ("rank_timeout(1, 2)", ""),
        ("ranks(1)", "axonmpi_timeout = 0"),
        ("ranks(1)", "axonmpi_timeout = soon"),
        ("ranks(1)", "axonmpi_grace = -1"),
        ("ranks(1)", "axonmpi_unmarked = some"),
    ],
)
def test_wrong_time_outs_and_settings_are_refused(run, marker, setting):
    result = run(f"@pytest.mark.{marker}\ndef test_it(): pass", ini=setting)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    name, _, value = setting.partition(" = ")
    wrong = f"{name}: expected *got '{value}'" if setting else f"test_it*expected one positive*, got {marker}"
    result.stderr.fnmatch_lines([f"*{wrong}*"])


def test_under_mpirun_n_auto_starts_no_workers_and_a_number_is_refused(request, run, monkeypatch):
    if not request.config.pluginmanager.hasplugin("xdist"):
        pytest.skip("needs pytest-xdist")
    workers = request.config.hook.pytest_xdist_auto_num_workers
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")  # what xdist itself would take
    assert workers(config=request.config) == 3
    for name in ("PMI_RANK", "PMI_SIZE"):
        monkeypatch.setenv(name, "2")
    assert workers(config=request.config) == 0
    result = run("def test_it(): pass", "-n", "2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*xdist's -n and mpirun cannot be combined*-n auto starts none*"])
