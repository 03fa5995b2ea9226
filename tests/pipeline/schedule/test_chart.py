"""Charts as text and as pictures, traces, and the command that draws them."""

import json
from functools import partial
from xml.etree import ElementTree

import pytest
from helpers import REPOSITORY
from helpers.compare import refused
from helpers.pipelines import GPIPE, ONE_F_ONE_B, ZERO_BUBBLE

from axonmpi import cli
from axonmpi.pipeline import Costs, Span, Timeline, make_schedule, parse_action, simulate
from axonmpi.pipeline.schedule import chart as module
from axonmpi.pipeline.schedule.chart import describe, draw_chart, text_chart
from axonmpi.pipeline.schedule.trace import last_step, read_trace, write_trace

PNG = b"\x89PNG\r\n\x1a\n"

ONE_F_ONE_B_CHART = """\
rank 0  F0 F1 F2             B0--- F3 B1---    B2---    B3---
rank 1     F0 F1       B0--- F2 B1--- F3 B2---    B3---
rank 2        F0 B0--- F1 B1--- F2 B2--- F3 B3---"""


EVENT = {"cat": "pipeline", "name": "F0.0", "pid": 0, "ts": 0, "dur": 1}


def event_file(event: dict) -> str:
    return json.dumps({"traceEvents": [event], "otherData": {"name": ""}})


@pytest.fixture
def timeline() -> Timeline:
    return simulate(make_schedule(ONE_F_ONE_B, 3, 4))


# ---- text -------------------------------------------------------------------------------------------------------


def test_a_chart_in_the_terminal_names_stages_where_a_rank_has_several(timeline):
    assert text_chart(timeline) == ONE_F_ONE_B_CHART
    assert text_chart(simulate(make_schedule(ZERO_BUBBLE, 1, 1, 2))) == "rank 0  F0.0 F1.0 I1.0 W1.0 I0.0 W0.0"
    assert describe(timeline) == "1F1B on 3 ranks: bubble 33.3%, peak activations 3, 2, 1"
    assert describe(simulate(make_schedule(GPIPE, 1, 2))) == "GPipe on 1 rank: bubble 0.0%, peak activations 2"


def test_the_chart_in_the_docstring_and_on_the_page():
    assert ONE_F_ONE_B_CHART in module.__doc__.replace("\n    ", "\n")
    longer = simulate(make_schedule(ONE_F_ONE_B, 4, 8))
    page = REPOSITORY / "docs" / "schedules.md"
    assert f"```text\n{describe(longer)}\n\n{text_chart(longer)}\n```" in page.read_text(encoding="utf-8")


def test_a_chart_keeps_to_its_width(timeline):
    for width in (60, 45, 30, 12):
        lengths = [len(line) for line in text_chart(timeline, width).splitlines()]
        assert (len(lengths), max(lengths) <= width) == (3, True)
    assert text_chart(timeline, 8 + 2 * 18).splitlines()[2] == "rank 2      F0B0- F1B1- F2B2- F3B3-"


def test_a_chart_of_times_in_seconds_and_of_nothing():
    quick = simulate(make_schedule(ONE_F_ONE_B, 3, 4), Costs(forward=1e-4, backward=2e-4))
    assert text_chart(quick) == ONE_F_ONE_B_CHART
    assert text_chart(quick, scale=2e4).splitlines()[2] == "rank 2      F0B0- F1B1- F2B2- F3B3-"
    for nothing in (Timeline("empty", ((), ())), simulate(make_schedule(GPIPE, 2, 1), Costs(0, 0))):
        assert text_chart(nothing) == "rank 0\nrank 1"


# ---- pictures ---------------------------------------------------------------------------------------------------


def test_pictures(tmp_path, timeline):
    large = simulate(make_schedule(GPIPE, 2, 200))  # whose boxes are too narrow for numbers
    for name, drawn in (("chart.png", timeline), ("large.png", large)):
        draw_chart(drawn, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(PNG)

    measured = simulate(make_schedule(ONE_F_ONE_B, 3, 4), Costs(transfer=1.0))
    draw_chart(timeline, tmp_path / "both.svg", measured)
    text = (tmp_path / "both.svg").read_text()
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    comments = f"ideal: {describe(timeline)}", f"measured: {describe(measured)}", "forward", "backward"
    assert [text.count(f"<!-- {comment} -->") for comment in comments] == [1, 1, 2, 2]
    # boxes, and one in the legend
    assert [text.count(f"fill: {color}") for color in ("#4c86c6", "#57a773")] == [2 * (12 + 1)] * 2

    refused(
        ValueError,
        (
            partial(draw_chart, timeline, tmp_path / "chart.pdf"),
            r"path: expected a name that ends in \.png or \.svg, got '.*chart\.pdf'",
        ),
    )


# ---- traces -----------------------------------------------------------------------------------------------------


def test_a_trace_is_what_viewers_expect(tmp_path):
    path = tmp_path / "run.json"
    forward, send, backward = map(parse_action, ("F0.0", "SF0.0>1", "B1.0"))
    write_trace(path, [[Span(forward, 2.0, 2.5), Span(send, 2.5, 2.75)], [Span(backward, 3.0, 3.25)]], "1F1B")
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["name"]): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert names == {
        (0, "process_name"): "rank 0",
        (0, "thread_name"): "stages 0",
        (1, "process_name"): "rank 1",
        (1, "thread_name"): "stages 1",
    }
    complete = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in complete] == [
        ("F0.0", 0, 0, 2_000_000.0, 500_000.0),
        ("SF0.0>1", 0, 0, 2_500_000.0, 250_000.0),
        ("B1.0", 1, 1, 3_000_000.0, 250_000.0),
    ]
    assert complete[1]["args"] == {"kind": "send_forward", "stage": 0, "micro_batch": 0}
    assert read_trace(path) == Timeline("1F1B", ((Span(forward, 0.0, 0.5),), (Span(backward, 1.0, 1.25),)))
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_that_cannot_be_written_leaves_the_old_one(tmp_path, timeline):
    path = tmp_path / "run.json"
    write_trace(path, timeline.spans)
    before = path.read_text()
    with pytest.raises(TypeError):
        write_trace(path, [[Span(parse_action("F0.0"), "soon", "later")]])
    assert (path.read_text(), list(tmp_path.iterdir())) == (before, [path])


def test_other_files_are_no_traces(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(event_file(EVENT))
    assert read_trace(path).makespan == 1e-6
    changes = ({"name": "F0"}, {"dur": 0}, {"pid": 7}, {"ts": "0"})
    wrong = [{"cat": "other"}, {"cat": "pipeline", "name": "F0.0"}, *({**EVENT, **change} for change in changes)]
    empty = '{"traceEvents": [], "otherData": {"name": ""}}'
    for text in ("no json", "[]", '{"traceEvents": []}', empty, *map(event_file, wrong)):
        path.write_text(text)
        refused(ValueError, (partial(read_trace, path), r"expected a trace of a pipeline in '.*run\.json', got"))


def test_the_last_of_several_steps(timeline):
    schedule = make_schedule(ONE_F_ONE_B, 3, 4)
    later = [[Span(s.action, s.start + 100.0, s.end + 100.0) for s in spans] for spans in timeline.spans]
    run = Timeline("run", tuple((*first, *second) for first, second in zip(timeline.spans, later, strict=True)))
    assert last_step(run, schedule) == Timeline("run", timeline.spans)
    cut, of_two = Timeline("run", (timeline.spans[0][:-2], *timeline.spans[1:])), make_schedule(ONE_F_ONE_B, 2, 4)
    refused(
        ValueError,
        (partial(last_step, run, of_two), "expected a run with 2 ranks, got one with 3"),
        (
            partial(last_step, cut, make_schedule(GPIPE, 3, 4)),
            r"a run of GPipe with 3 stages on 3 .* where rank 0 ends with F0\.2 B0\.0",
        ),
    )


# ---- the command ------------------------------------------------------------------------------------------------


def chart(capsys, *arguments) -> str:
    assert cli.main(["chart", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_command_prints_a_chart(capsys, timeline):
    shown = chart(capsys, "--schedule", "1f1b", "--stages", 3, "--micro-batches", 4)
    assert shown == f"{describe(timeline)}\n\n{ONE_F_ONE_B_CHART}\n"
    two = ("--stages", 2, "--micro-batches", 1)
    slow = chart(capsys, "--schedule", "gpipe", *two, "--backward", 3, "--transfer", 1)
    assert slow.splitlines()[2:] == [f"rank 0  F0{' ' * 19}B0------", "rank 1        F0 B0------"]
    halves = ("--backward-input", 2, "--backward-weight", 3, "--forward", 4)
    schedule = make_schedule(ZERO_BUBBLE, 1, 1, 2)
    expected = simulate(schedule, Costs(forward=4, backward_input=2, backward_weight=3))
    shown = chart(capsys, "--schedule", "zero-bubble", "--chunks", 2, *two, *halves)
    assert shown == f"{describe(expected)}\n\n{text_chart(expected)}\n"


def test_the_command_shows_a_real_run_beside_the_ideal(capsys, tmp_path):
    schedule = make_schedule(ONE_F_ONE_B, 2, 3)
    real = simulate(schedule, Costs(forward=0.25, backward=0.5, transfer=0.5))
    write_trace(tmp_path / "run.json", real.spans, "a run")
    flags = ("--stages", 2, "--micro-batches", 3, "--trace", tmp_path / "run.json")
    first, *shown, last = chart(capsys, *flags, "--output", tmp_path / "chart.svg").splitlines()
    ideal = simulate(schedule, Costs(forward=0.25, backward=0.5))
    ratio = f"{real.makespan / ideal.makespan:.3f}"
    assert (first, last) == (f"ideal: {describe(ideal)}", f"measured / ideal time: {ratio}")
    assert f"measured: {describe(real)}".replace("1F1B", "a run") in shown
    assert "<!-- measured: a run on 2 ranks" in (tmp_path / "chart.svg").read_text()


def test_the_command_refuses_what_does_not_fit(capsys, tmp_path):
    both = ("--stages", 4, "--micro-batches", 2)
    three = ("--stages", 3, "--micro-batches", 2, "--chunks", 3)
    for flags, message in (
        (("--stages", 5, "--micro-batches", 2, "--chunks", 2), "expected a multiple of --chunks"),
        (("--schedule", "zero-bubble", *three), "expected 1 or 2 stages"),
        (("--micro-batches", 2), "--stages"),
        (("--stages", 0, "--micro-batches", 2), "expected a positive number, got '0'"),
        ((*both, "--forward=-1"), "forward: expected times of at least 0, got -1.0"),
        ((*both, "--forward=x"), "--forward: invalid float value: 'x'"),
        ((*both, "--output", tmp_path / "chart.pdf"), "ends in .png or .svg"),
        ((*both, "--output", tmp_path / "none" / "chart.png"), "in a folder that exists"),
        ((*both, "--trace", tmp_path / "none.json"), "No such file"),
        ((*both, "--schedule", "fast"), "invalid choice: 'fast'"),
    ):
        try:
            code = cli.main(["chart", *map(str, flags)])
        except SystemExit as end:
            code = end.code
        assert code == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_rank_speaks_and_writes(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert chart(capsys, "--stages", 2, "--micro-batches", 1, "--output", tmp_path / "chart.svg") == ""
    assert list(tmp_path.iterdir()) == []
