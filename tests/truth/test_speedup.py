"""No speedup that is not true: one decision, and every door says the same."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from asynckfold import AsyncKFold, Baseline, CVResults, InputError, Result, RunStore, load_results
from asynckfold.cli import main
from asynckfold.cli.summary import _numbers, result_lines
from asynckfold.results.utilization import mean_use
from asynckfold.store import Sample
from tests.results.report.reports import report_again, report_of
from tests.results.test_cv_results import all_scores, make_results
from tests.synthetic import Synthetic
from tests.toy import Tiny, adam, samples

NUMBER = re.compile(r"\d(\.\d+)?\s?[x×]( as fast|,|:)")
JOBS = make_results({}).plan.jobs[:4]
ENDED = ("done", "failed", "diverged", "cancelled")


@pytest.fixture(autouse=True)
def without_png(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no PNG files, which takes seconds."""
    monkeypatch.setattr("asynckfold.results.report.page.update_figures", lambda *_, **__: None)


@given(
    states=st.lists(st.sampled_from([*ENDED, "pending"]), min_size=4, max_size=4),
    kind=st.sampled_from(["measured", "estimated"]),
    others=st.sampled_from([0.0, 0.2, 0.21, 1.8, math.nan]),
    packed_others=st.sampled_from([0.0, 0.2, 0.5, 1.8, math.nan]),
    cores=st.sampled_from([0, 2, 64]),
    seconds=st.lists(st.floats(0.1, 1e4), min_size=4, max_size=4),
    packed=st.floats(0.1, 1e4),
)
def test_a_speedup_needs_equal_work_two_measured_times_and_an_idle_machine(
    states: list[str],
    kind: str,
    others: float,
    packed_others: float,
    cores: int,
    seconds: list[float],
    packed: float,
) -> None:
    names = [job.id for job in JOBS]
    ended = {
        name: Result(name, 1, state)
        for name, state in zip(names, states, strict=True)
        if state != "pending"
    }
    by_job = dict(zip(names, seconds, strict=True))
    baseline = Baseline(
        kind,
        sum(seconds),
        2,
        others=others,
        seconds_by_job=by_job,
        packed_others=packed_others,
        cores=cores,
    )
    made = make_results({}, results=ended, seconds=packed, baseline=baseline)
    found = replace(made, plan=replace(made.plan, jobs=JOBS)).timing
    done = [each for each, state in zip(seconds, states, strict=True) if state == "done"]
    # A loop that races, too, would not train those that are left out.
    raced = len(states) - states.count("cancelled")
    quiet = others <= 0.2 and packed_others <= max(0.2, 0.1 * cores)
    told = quiet and 0 < len(done) == raced
    assert (found.ratio is not None) == (told and kind == "measured")
    assert (found.estimate is not None) == (told and kind == "estimated")
    assert bool(found.why_not) == (not told)
    if told:
        assert (found.ratio or found.estimate) == pytest.approx(math.fsum(done) / packed)
    else:
        assert found.text.startswith("speedup not reported: ")
        assert not NUMBER.search(found.text)


def doors(results: CVResults) -> list[str]:
    """Everything that a user may read the speedup from, without a page."""
    lines = "\n".join(result_lines(results))
    return [repr(results), results._repr_html_(), lines, json.dumps(_numbers(results))]


QUIET = Baseline("measured", 25.0, 2, cores=2)


@pytest.mark.parametrize(
    ("baseline", "why"),
    [
        (
            replace(QUIET, others=1.7),
            "other programs used 1.7 of 2 cores while the serial loop was timed",
        ),
        (replace(QUIET, packed_others=1.7), "1.7 of 2 cores during the packed run"),
        (replace(QUIET, kind="estimated", others=1.7), "other programs used 1.7 of 2 cores"),
    ],
)
def test_no_output_shows_a_speedup_of_a_disturbed_timing(baseline: Baseline, why: str) -> None:
    results = make_results(all_scores(), baseline=baseline)
    assert results.speedup is None
    assert why in results.speedup_note
    assert "Measure again on an idle machine" in results.speedup_note
    for text in doors(results):
        assert why in text
        assert not NUMBER.search(text)
        assert "2.5" not in re.sub(r"\b25\.0\b", "", text)
        assert "too high" not in text


def test_every_output_shows_a_measured_speedup_and_labels_an_estimate() -> None:
    measured = make_results(all_scores(), baseline=QUIET)
    assert measured.speedup == 2.5
    for text in doors(measured):
        assert "speedup: 2.50x, serial loop 25.0 s (measured, 2 threads) / packed 10.0 s" in text
    estimated = make_results(all_scores(), baseline=replace(QUIET, kind="estimated"))
    assert estimated.speedup is None
    for text in doors(estimated):
        assert re.search(r"estimated speedup: about 2\.5x", text)
        assert "speedup: 2.5" not in text.replace("estimated speedup", "")
    assert _numbers(estimated)["speedup"] is None
    assert _numbers(estimated)["estimated_speedup"] == 2.5
    none = make_results(all_scores())
    assert none.speedup is None
    assert "speedup" not in repr(none)
    assert none.speedup_note.startswith("speedup not reported: no serial loop was run; baseline=")


@pytest.mark.nightly(but=["measured"])
@pytest.mark.parametrize(
    "run",
    [
        Synthetic(others=1.7, epochs=1),
        Synthetic(baseline="estimated", epochs=1),
        Synthetic(
            status=lambda job: "diverged" if job.model == "MLP" else "done", epochs=1, others=0
        ),
        Synthetic(epochs=1),
    ],
    ids=["disturbed", "estimated", "diverged", "measured"],
)
def test_the_page_and_its_files_agree_with_the_results(root: Path, run: Synthetic) -> None:
    report = report_of(root, run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        results = load_results(root)
    told = report.numbers["speedup"]
    assert told["ratio"] == results.speedup
    assert told["estimate"] == results.timing.estimate
    assert told["why_not"] == results.timing.why_not
    leads = re.search(r'class="big">[^<]*× as fast', report.page)
    assert bool(leads) == (results.speedup is not None)
    assert ('id="figure-speedup"' in report.page) == (not results.timing.why_not)
    if run.status(results.plan.jobs[-1]) == "diverged":
        assert results.speedup is None
        assert results.baseline is not None
        assert results.timing.serial_seconds is not None
        assert results.timing.serial_seconds < 0.9 * results.baseline.seconds
        assert "10 of 20 jobs did not succeed" in report.page


def held(
    job: str,
    seconds: float,
    cores: tuple[int, ...],
    device: str,
    start: float,
    end: float,
    pid: int,
) -> Result:
    return Result(
        *(job, 1, "done"),
        fit_seconds=seconds,
        cores=cores,
        device=device,
        started=start,
        ended=end,
        pid=pid,
    )


def packed_seconds(*jobs: Result) -> dict[str, float]:
    """By candidate, of a run of 14 s."""
    ended = {item.job_id: item for item in jobs}
    frame = make_results({}, results=ended, seconds=14.0, baseline=QUIET).to_frame()
    names = frame["model"] + "/" + frame["scheduler"]
    return {
        name: seconds
        for name, seconds in zip(names, frame["packed_seconds"], strict=True)
        if not math.isnan(seconds)
    }


ON_CORES = held("A/warm/fold-0", 20.0, (1, 2, 3), "cpu", 0.0, 20.0, 9)


@pytest.mark.parametrize(
    "alone",
    [
        [held("A/cosine/fold-0", 10.0, (0,), "cuda:0", 0.0, 10.0, 1)],
        # Two jobs as one, which divide its seconds.
        [held(f"A/cosine/fold-{fold}", 5.0, (0,), "cuda:0", 0.0, 10.0, 1) for fold in (0, 1)],
        # Two in turn in one worker.
        [held(f"A/cosine/fold-{fold}", 5.0, (0,), "cuda:0", 5.0 * fold, 5.0 * fold + 5.0, 1)
         for fold in (0, 1)],
    ],
)  # fmt: skip
def test_a_candidates_packed_seconds_count_what_its_jobs_had_of_a_gpu(alone: list[Result]) -> None:
    others = [
        held("B<b>/cosine/fold-0", 10.0, (0,), "cuda:0", 10.0, 20.0, 2),
        held("B<b>/warm/fold-0", 10.0, (0,), "cuda:0", 10.0, 20.0, 3),
    ]
    # The GPU counts as 4 cores: 10 s of all of it, twice 10 s of one half, 20 s of 3 cores.
    assert packed_seconds(*alone, *others, ON_CORES) == pytest.approx(
        {"A/cosine": 4.0, "B<b>/cosine": 2.0, "B<b>/warm": 2.0, "A/warm": 6.0}
    )


def test_a_second_gpu_is_another_part_of_the_machine() -> None:
    jobs = [
        held(f"A/cosine/fold-{number}", 10.0, (number,), f"cuda:{number}", 0.0, 10.0, number)
        for number in (0, 1)
    ]
    # Each counts as 2 of 4 cores; a job on cores alone counts those.
    cores = held("B<b>/warm/fold-0", 10.0, (2, 3), "cpu", 0.0, 10.0, 9)
    named = packed_seconds(*jobs, cores)
    assert (named["A/cosine"], named["B<b>/warm"]) == pytest.approx((14 * 2 / 3, 14 / 3))
    on_cores = [replace(item, device="cpu") for item in jobs]
    named = packed_seconds(*on_cores, cores)
    assert (named["A/cosine"], named["B<b>/warm"]) == pytest.approx((7.0, 7.0))
    # As is one of the same number on another node.
    places = {"A/cosine": ("x", 0), "A/warm": ("x", 1), "B<b>/warm": ("y", 0)}
    jobs = [
        replace(held(f"{name}/fold-0", 10.0, (core,), "cuda:0", 0.0, 10.0, 5 + core), node=node)
        for name, (node, core) in places.items()
    ]
    # Each GPU counts as one and a half of the three cores: two jobs share that of x.
    named = packed_seconds(*jobs)
    assert [named[name] for name in places] == pytest.approx([4.0, 4.0, 6.0])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["cpu", "cuda:0", "cuda:1"]),
            st.integers(0, 3),
            st.integers(0, 20),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_packed_seconds_of_all_candidates_add_up_to_the_runs(
    drawn: list[tuple[str, int, int, int]],
) -> None:
    jobs = make_results({}).plan.jobs
    found = packed_seconds(
        *(
            held(job.id, seconds + 1.0, tuple(range(pid)), device, start, start + seconds, pid)
            for job, (device, pid, start, seconds) in zip(jobs, drawn, strict=False)
        )
    )
    assert math.fsum(found.values()) == pytest.approx(14.0)
    assert all(seconds > 0 for seconds in found.values())


# A run


class Odd(Tiny):
    """Diverges, and is not to be trained once more for a time to compare with."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * math.nan


class Later(Tiny):
    """Fails until what it needs is there: the environment, as its code stays the same."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training and "REPAIRED" not in os.environ:
            raise RuntimeError("not yet")
        return super().forward(inputs)


def run_of(root: Path, *models: type[nn.Module]) -> CVResults:
    words: dict[str, Any] = {
        "parallelize": False,
        "report": False,
        "verbose": 0,
        "baseline": "measure",
    }
    kfold = AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 10, **words)
    return kfold(models, ["step"], adam, {"epochs": 1})


@pytest.mark.filterwarnings("ignore::asynckfold.JobsFailedWarning")
def test_the_serial_loop_trains_only_what_the_packed_run_finished(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_of(root, Tiny, Odd, Later)
    assert first.baseline is not None
    assert set(first.baseline.seconds_by_job) == {"Tiny/step/fold-0", "Tiny/step/fold-1"}
    monkeypatch.setenv("REPAIRED", "yes")
    again = run_of(root, Tiny, Odd, Later)
    assert again.counts["done"] == 4
    # What is done only now has no time yet: so the loop runs again, over all that is done.
    assert again.baseline is not None
    assert {name.split("/")[0] for name in again.baseline.seconds_by_job} == {"Tiny", "Later"}
    assert again.baseline.seconds == pytest.approx(sum(again.baseline.seconds_by_job.values()))


def test_the_page_names_the_digits_dataset(root: Path) -> None:
    words = "run --data digits --limit 60 --folds 2 --epochs 1 --baseline none --no-report -q"
    words += " --engine serial"
    assert main([*words.split(), "--root", str(root)]) == 0
    first_screen = report_again(root).page.partition("Ranking</h2>")[0]
    assert "digits (scikit-learn), 60 samples of 8×8, 1 epoch" in first_screen


# What other programs used


def test_the_use_of_a_phase_is_a_mean_over_its_time() -> None:
    def sample(at: float, phase: str, used: float, own: float) -> Sample:
        return Sample(at, phase, used, own, ())

    # Samples become rarer the longer a phase lasts: others came in its second half.
    dense = [sample(0.25 * number, "packed", 1.0, 1.0) for number in range(41)]
    rare = [sample(12.5 + 2.5 * number, "packed", 2.0, 1.0) for number in range(4)]
    later = [sample(100.0, "serial", 0.5, 0.5), sample(101.0, "serial", 1.0, 0.0)]
    used, own = mean_use([*dense, *rare, *later], "packed")
    assert (used - own, own) == pytest.approx((0.5, 1.0), abs=0.02)
    assert mean_use([*dense, *rare, *later], "serial") == pytest.approx((0.75, 0.25))
    assert math.isnan(mean_use(dense, "serial")[0])
    assert math.isnan(mean_use([], "serial")[0])


def test_a_use_that_is_not_known_gives_no_speedup(root: Path) -> None:
    report_of(root, Synthetic(epochs=1, folds=2))
    with RunStore.hold(root) as store:
        known = store.reader.baseline
        assert known is not None
        store.set_baseline(replace(known, others=math.nan))
    found = load_results(root).timing
    assert found.ratio is None
    assert found.why_not == (
        "the use of the cores by other programs is not known while the serial loop was timed. "
        "Measure again on an idle machine"
    )


class Slow(Tiny):
    """Takes long enough for a reading of the load."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return super().forward(inputs)


@pytest.mark.nightly
def test_no_speedup_beside_another_program_where_all_is_trained_in_this_process(root: Path) -> None:
    core = min(os.sched_getaffinity(0))
    hog = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(1, flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", hog], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            results = run_of(root, Slow)
        finally:
            other.kill()
    assert results.baseline is not None
    assert results.baseline.others > 0.2
    assert results.speedup is None
    assert re.match(r"other programs used [12]\.\d of \d+ cores ", results.timing.why_not)


@pytest.mark.parametrize("disturbed", ["others", "packed_others"])
def test_a_disturbed_serial_loop_is_timed_again_by_the_same_call(
    root: Path, disturbed: str
) -> None:
    torch.manual_seed(0)
    first = run_of(root, Tiny).baseline
    assert first is not None
    noted = replace(first, **{"others": 0.0, "packed_others": 0.0, disturbed: 1.7})
    with RunStore.hold(root) as store:
        store.set_baseline(noted)
    remedy = "Measure again on an idle machine, in a new folder"
    needs_new = load_results(root).timing.why_not.endswith(remedy)
    assert needs_new == (disturbed == "packed_others")
    torch.manual_seed(0)
    again = run_of(root, Tiny).baseline
    assert (again == noted) == (disturbed == "packed_others")


def test_no_serial_loop_runs_unless_it_is_asked_for(root: Path) -> None:
    data = TensorDataset(torch.zeros(24, 8), torch.arange(24) % 3)
    words: dict[str, Any] = {"parallelize": False, "report": False, "verbose": 0}
    results = AsyncKFold(2, data, root, nn.CrossEntropyLoss(), 8, **words)(
        [Tiny], ["step"], adam, {"epochs": 1}
    )
    assert results.baseline is None
    page = report_again(root).page
    assert "no serial loop was run; baseline=&#39;measure&#39; (--baseline measure)" in page


def test_seconds_of_a_disturbed_or_estimated_loop_are_marked_and_not_compared(root: Path) -> None:
    for name, run in (
        ("disturbed", Synthetic(others=1.7, epochs=1)),
        ("estimated", Synthetic(baseline="estimated", epochs=1)),
    ):
        page = report_of(root / name, run).page
        assert len(re.findall(rf">[\d.]+ \({name}\)</td>", page)) == 4
        results = load_results(root / name)
        rows = results.to_frame()
        assert rows["speedup"].isna().all()
        assert rows["estimated_serial_seconds"].notna().all() == (name == "estimated")
        assert rows["serial_seconds"].notna().all() == (name == "disturbed")
        # No dashed line of the serial loop beside the packed one.
        if name == "disturbed":
            assert "serial" not in results.plot("loss_vs_time").axes[0].get_title("left")
        else:
            with pytest.raises(InputError, match="loss_vs_time needs numbers that this run"):
                results.plot("loss_vs_time")
