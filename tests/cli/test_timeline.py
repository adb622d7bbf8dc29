"""The pictures in text say what they are given, and fit the terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asynckfold.cli.plan import IDLE, gantt
from asynckfold.jobs.placement import NodeSize, Request
from asynckfold.planning.forecast import Span, simulate

durations = st.lists(st.floats(0, 1e6), max_size=30)


@given(durations, st.integers(1, 8), st.integers(40, 120))
def test_every_row_fits_and_no_time_is_drawn_as_idle_that_is_not(
    seconds: list[float], cores: int, width: int
) -> None:
    jobs = [Request(f"LeNet5/cosine/fold-{number}", time) for number, time in enumerate(seconds)]
    simulation = simulate(jobs, [NodeSize(cores)])
    *rows, times = gantt(simulation.spans, range(cores), width)
    assert len(rows) == cores
    assert max(map(len, [*rows, times])) <= width
    assert len({len(row) for row in rows}) == 1
    label = len("core 0  ")
    for core, row in enumerate(rows):
        assert row.startswith(f"core {core}  ")
        columns = width - label
        held = sum(span.end - span.start for span in simulation.spans if span.cores == (core,))
        drawn = columns - row[label:].count(IDLE)
        if simulation.makespan:
            # Each bar begins and ends within half a column of where it should.
            assert abs(drawn - columns * held / simulation.makespan) <= len(seconds)


def test_names_stand_in_their_bars() -> None:
    spans = [
        Span("LeNet5/cosine/fold-0", 0.0, 4.0, (0, 1)),
        Span("LeNet5/cosine/fold-1", 4.0, 5.0, (1,), 0),
        Span("LeNet5/cosine/fold-1", 7.0, 10.0, (1,), 0),
    ]
    assert gantt(spans, range(3), width=58) == [
        f"core 0  [LeNet5/cosine/f…-0]{IDLE * 30}",
        f"core 1  [LeNet5/cosine/f…-0][LeN]{IDLE * 10}[LeNet5/cos…-1]",
        f"core 2  {IDLE * 50}",
        f"GPU 0   {IDLE * 20}[LeN]{IDLE * 10}[LeNet5/cos…-1]",
        f"        0.00 s{'':38}10.0 s",
    ]


def test_a_job_too_short_to_be_drawn_is_seen_where_nothing_else_is() -> None:
    spans = [Span("short", 0.0, 0.001, (0,)), Span("long", 50.0, 100.0, (0,))]
    row, _ = gantt(spans, [0], width=48)
    assert row == f"core 0  |{IDLE * 19}[long==============]"


def test_a_large_machine_is_cut_and_the_rest_is_counted() -> None:
    jobs = [Request(f"job-{number}", 1.0, gpu=number < 2) for number in range(100)]
    simulation = simulate(jobs, [NodeSize(100, 2)])
    lines = gantt(simulation.spans, range(100), most_rows=5)
    assert len(lines) == 5 + 1 + 1
    gpus = {span.gpu for span in simulation.spans if span.gpu is not None}
    assert f"and {100 + len(gpus) - 5} more" in lines[-2]
    assert max(map(len, lines)) <= 100


def test_nothing_is_drawn_as_nothing() -> None:
    row, times = gantt([], [7], width=40)
    assert row == f"core 7  {IDLE * 32}"
    assert times.split() == ["0.00", "s", "0.00", "s"]
