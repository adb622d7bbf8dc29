"""The benchmarks run and say what they measured; how fast this machine is, no test asserts."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from torch import nn

from asynckfold.cli import bench, main
from asynckfold.cli.bench import (
    checkpoints,
    crowd,
    engines,
    formats,
    fusion,
    images,
    loops,
    packing,
    partitions,
    peers,
    place,
    speed,
    trainers,
    use,
)
from asynckfold.cli.bench.checkpoints import Work
from asynckfold.cli.bench.table import BenchTable
from asynckfold.cli.parser import SUBJECTS
from asynckfold.errors import InterruptedRunError
from asynckfold.results.report.charts.scaling import ScalingLine, draw_scaling
from tests.engines.ray_start import needs_ray


def test_checkpoints_are_timed_in_real_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    work = Work("linear", lambda: nn.Linear(8, 10), (8,), 64)
    table = checkpoints.table([work], epoch_seconds=0.05, epochs=2)
    (row,) = table.to_json()["rows"]
    parameters = 8 * 10 + 10
    assert row["model"] == "linear"
    # Weights and Adam's two moments, as float32; what grows with the number of samples, and so with
    # the speed of this machine, stays far below a million bytes.
    assert 3 * 4 * parameters < row["checkpoint MB"] * 1e6 < 3 * 4 * parameters + 1_000_000
    assert row["checkpoint ms"] > 0
    assert 0 < row["share of the run %"] < 100
    assert not list(tmp_path.iterdir())


def test_decisions_are_timed_on_a_busy_and_on_an_empty_machine() -> None:
    table = place.table((5, 200), repeats=3)
    few, many, cluster = table.to_json()["rows"]
    assert (few["pending jobs"], many["pending jobs"]) == (5, 200)
    assert (few["nodes"], cluster["nodes"], cluster["pending jobs"]) == (1, 64, 200)
    assert cluster["empty: decisions"] == 200
    assert 1 <= few["empty: decisions"] <= 5 < many["empty: decisions"] <= 64
    timed = [name for name in few if name.endswith(("ms", "µs"))]
    assert len(timed) == 6
    assert all(row[name] > 0 for row in (few, many, cluster) for name in timed)


@pytest.mark.nightly
@pytest.mark.timeout(600)  # threads without limits on a busy machine: that is the point
def test_a_sweep_is_timed_in_each_way_and_all_learn_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Each fold at once is an interpreter that imports torch.
    monkeypatch.setattr(packing, "FOLDS", 2)
    work = packing.Work("MLP", loops.digits_mlp, (64,), 200, 5)
    assert packing._at_once(work, 1, limit=0.0) is None
    monkeypatch.setattr(packing, "AT_ONCE_LIMIT", 1e6)
    table = packing.table([work], turns=1)
    (row,) = table.to_json()["rows"]
    timed = [name for name in row if name.endswith(" s") or " s, " in name]
    assert len(timed) == 6
    assert all(row[name] > 0 for name in timed)
    best = min(row["serial s, 1 thread"], row["serial s, all threads"])
    assert row["against best serial"] == best / row["asynckfold s"]
    accuracies = [value for name, value in row.items() if name.startswith("accuracy")]
    assert len(accuracies) == 3
    assert min(accuracies) > 0.2  # chance is 0.1
    assert max(accuracies) - min(accuracies) < 0.1
    assert not list(tmp_path.iterdir())


def test_the_use_of_the_cores_is_that_of_real_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = use.table([use.Case("few", (8, 16), 2, 60, 2)], turns=1)
    (row,) = table.to_json()["rows"]
    assert row["jobs"] == 4
    assert 0 < row["training %"] < row["use %"] <= 100
    assert 0 < row["overhead ms a job"] < row["wall ms a job beside its training"]
    assert 0 < row["use %"] <= 100
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
@needs_ray
@pytest.mark.timeout(600)
def test_engines_are_timed_beside_plain_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A Ray stays in the process that measured; its address is for the account of what is left.
    code = (
        "import json; from asynckfold.cli.bench import engines; "
        "table = engines.table(engines.Size(2, 6, 8, 1, 8), turns=1); "
        "print(json.dumps(table.to_json()['rows']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["unit"] for row in rows] == ["ms", "s", "s", "s"]
    for row in rows[1:]:
        assert all(row[way] > 0 for way in (*engines.ENGINES, engines.PLAIN))
        assert row["ray / plain"] == row["ray"] / row[engines.PLAIN]
    assert not list(tmp_path.iterdir())


def test_trainers_are_timed_on_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    compared = [trainers.Way("plain"), trainers.Way("averaging", 2)]
    monkeypatch.setattr(trainers, "ways", lambda: compared)
    work = trainers.Work("MLP", loops.digits_mlp, 8, epochs=3, target=0.5, samples=400)
    hard = replace(work, name="hard", epochs=1, target=1.1)
    rows = trainers.table([work, hard], turns=1).to_json()["rows"]
    assert [(row["trainer"], row["processes"]) for row in rows] == [
        ("plain", 1),
        ("averaging", 2),
    ] * 2
    assert all(row["samples/s"] > 0 and row["accuracy"] > 0.2 for row in rows)
    assert rows[0]["speed against one"] == 1
    assert rows[0]["seconds to it"] > 0
    assert rows[2]["seconds to it"] is None
    assert not list(tmp_path.iterdir())


def test_parts_that_overlap_are_trained_until_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    compared = [partitions.Division(1, 320), partitions.Division(2, 240)]
    monkeypatch.setattr(partitions, "divisions", lambda count, most: compared)
    work = trainers.Work("MLP", loops.digits_mlp, 8, epochs=9, samples=400)
    rows = partitions.table(work, turns=1, target_loss=1.0).to_json()["rows"]
    assert [(row["partition size"], row["overlap %"]) for row in rows] == [(320, 0), (240, 50)]
    for row in rows:
        assert row["loss"] <= 1.0
        assert 1 < row["iterations"] < 9
        seen = row["samples × iterations of a process"]
        assert seen == row["iterations"] * row["partition size"]
        assert row["time against one"] == pytest.approx(rows[0]["seconds"] / row["seconds"])
    assert not list(tmp_path.iterdir())


def test_a_loss_that_was_not_reached_has_no_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {1: 2.0, 2: None}
    monkeypatch.setattr(partitions, "cores", lambda: 2)
    monkeypatch.setattr(
        partitions,
        "_trained",
        lambda work, samples, division, loss: partitions.Outcome(
            ended[division.processes], 40, 40 * division.size, 0.2, 0.9
        ),
    )
    rows = partitions.table(turns=2).to_json()["rows"]
    assert [row["seconds"] for row in rows] == [2.0, None, None, None]
    assert [row["time against one"] for row in rows] == [1.0, None, None, None]
    assert [row["overlap %"] for row in rows] == [0, 0, 50, 100]


def test_the_verb_finds_each_subject(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def given(**settings: object) -> BenchTable:
        return BenchTable("Table", "given", ((sorted(settings),),))

    known = {"nodes": ["data", "tell"], "packing": ["tell"], "trainers": ["data", "tell"]}
    known["engines"] = ["tell"]
    known["speed"] = ["data", "tell", "with_peers"]
    monkeypatch.setattr(partitions, "table", given)
    for subject in SUBJECTS:
        module = importlib.import_module(f"asynckfold.cli.bench.{subject}")
        monkeypatch.setattr(module, "table", given)
        assert main(["dev", "bench", subject, "--json"]) == 0
        assert main(["dev", "bench", subject, "--quick", "--json"]) == 0
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        plain = known.get(subject, [])
        quick = sorted([*plain, *module.QUICK])
        assert [item["rows"] for item in told] == [[{"given": plain}], [{"given": quick}]]
        assert all(item["machine"]["cores"] >= 1 for item in told)
        assert all(len(item.get("more", ())) == (subject == "trainers") for item in told)


def test_the_verb_prints_and_saves_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = BenchTable("Checkpoints", "model | ms", (("mlp", 1.2345),), ("A note.",))
    monkeypatch.setattr(checkpoints, "table", lambda **settings: table)
    page = tmp_path / "table.md"
    assert main(["dev", "bench", "checkpoints", "--save", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "mlp" in printed
    assert "1.23" in printed
    assert "A note." in printed
    assert "| mlp | 1.23 |" in page.read_text()
    assert main(["dev", "bench", "checkpoints", "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [{"model": "mlp", "ms": 1.2345}]


@pytest.mark.parametrize("page", ["", "missing/table.md"])
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    monkeypatch.setattr(checkpoints, "table", lambda **settings: measured.append("table"))
    assert main(["dev", "bench", "checkpoints", "--save", str(tmp_path / page)]) == 2
    assert "--save must name a file in a folder" in capsys.readouterr().err
    assert not measured


def test_a_page_has_further_tables_and_pictures_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawing = draw_scaling("MLP", {"more tasks": [ScalingLine("tasks", {1: 2.0, 2: 1.5})]}, 2.0)
    more = BenchTable("Further", "kind | s", (("small", 3),), ("Another note.",))
    table = BenchTable("First", "model | ms", (("mlp", 1),), ("A note.",), figures={"mlp": drawing})
    monkeypatch.setattr(trainers, "table", lambda **_: table)
    monkeypatch.setattr(partitions, "table", lambda **_: more)
    page = tmp_path / "page.md"
    assert main(["dev", "bench", "trainers", "--save", str(page)]) == 0
    printed = capsys.readouterr().out
    for text in ("A note.", "Further", "small", "Another note.", "picture: ", "page-mlp.svg"):
        assert text in printed
    written = page.read_text()
    places = [written.index(text) for text in ("| mlp | 1 |", "](page-mlp.png)", "- A note.")]
    assert places == sorted(places)
    assert written.endswith(
        "## Further\n\n| kind | s |\n|---|---|\n| small | 3 |\n\n- Another note.\n"
    )
    with Image.open(tmp_path / "page-mlp.png") as picture:
        assert picture.width > 500
    assert b"<svg" in (tmp_path / "page-mlp.svg").read_bytes()


@pytest.mark.nightly
@pytest.mark.timeout(600)  # two cold starts
def test_the_same_work_is_done_in_several_ways_and_all_learn_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(peers, "installed", lambda peer: False)
    monkeypatch.setattr(speed, "cores", lambda: 1)
    work = speed.Work("MLP", loops.digits_mlp, "digits", 200, 10, counts=(2,))
    table = speed.table([work], turns=2, with_peers=True)
    rows = table.to_json()["rows"]
    assert [row["jobs"] for row in rows] == [10] * 9
    ways = [row["way"] for row in rows[:9]]
    assert ways[:5] == ["loader", "serial, 1 thread", "serial, all threads", "skorch", "ray"]
    assert ways[5:] == [f"asynckfold{part}" for part in (", unfused", ", arrays", "", ", cold")]
    timed = [row for row in rows if row["seconds"] != "not installed"]
    assert len(timed) == 7
    for row in timed:
        loader = next(other for other in timed if other["jobs"] == row["jobs"])
        assert row["against loader"] == loader["seconds"] / row["seconds"]
        assert row["of the peak %"] > 0
        assert (row["spread %"] is None) == row["way"].endswith("cold")
    accuracies = [row["accuracy"] for row in timed]
    assert min(accuracies) > 0.3  # chance is 0.1
    assert max(accuracies) - min(accuracies) < 0.3
    assert "digits: real." in table.notes
    assert not list(tmp_path.iterdir())


def test_images_are_what_a_folder_holds_or_generated(tmp_path: Path) -> None:
    assert images.images_of("mnist", tmp_path, 4) is None
    assert images.images_of("cifar10", tmp_path, 4) is None
    for name, grey in (("cat", 10), ("dog", 200)):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (32, 32), (grey,) * 3).save(folder / f"{number}.png")
    found, targets = images.images_of("cifar10", tmp_path, 4)
    assert found.shape == (4, 32, 32, 3)
    assert [int(image[0, 0, 0]) for image in found] == [(10, 200)[target] for target in targets]
    work = speed.Work("LeNet5", nn.Identity, "mnist", 4, size=32)
    dataset, origin = speed._dataset(work, tmp_path)
    assert dataset[0][0].shape == (1, 32, 32)
    assert origin.startswith("generated")


def test_flags_of_one_subject_are_refused_with_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dev", "bench", "place", "--peers", "--data", "here"]) == 2
    told = capsys.readouterr().err
    assert "--data applies to nodes, speed, trainers only" in told
    assert "--peers applies to speed only" in told
    assert main(["dev", "bench", "speed", "--data", "/nowhere/at/all"]) == 2
    assert "data must name an existing folder" in capsys.readouterr().err


def test_an_unknown_subject_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["dev", "bench", "everything"]) == 2
    assert "must be one of checkpoints, crowd, " in capsys.readouterr().err


def test_steps_are_timed_plain_and_fused() -> None:
    case = loops.Case("linear", lambda: nn.Linear(8, 10), (8,))
    table = fusion.table([case], (5, 10), seconds=0.0)
    one, two = table.to_json()["rows"]
    assert (one["jobs"], two["jobs"]) == (5, 10)
    assert one["MFLOP a step"] == pytest.approx(2 * 2 * 32 * 8 * 10 / 1e6)
    for row in (one, two):
        assert row["plain / fused"] == pytest.approx(row["plain ms"] / row["fused ms"])
        assert row["turns"] >= 3


@pytest.mark.nightly
def test_steps_are_timed_beside_others_however_threads_wait() -> None:
    before = len(os.sched_getaffinity(0))
    table = crowd.table([loops.Case("VGG", loops.small_vgg, batch_size=2)], 0.0, turns=2)
    assert [row[2] for row in table.rows] == sorted({0, 1, before, 3 * before})
    for _, count, _, spinning, little, ratio, low, high, *waits in table.rows:
        assert count == before
        assert spinning > 0
        assert little > 0
        assert low <= ratio <= high
        assert min(waits) >= 0


def test_steps_are_timed_in_both_memory_formats() -> None:
    table = formats.table([loops.Case("VGG", loops.small_vgg, batch_size=2)], 0.0)
    ((name, products, narrow, *seconds, turns, rule),) = table.rows
    assert (name, narrow, rule) == ("VGG", 0.0, "channels last")
    assert products == pytest.approx(261, abs=1)
    assert all(isinstance(value, float) and value > 0 for value in seconds)
    assert turns >= 3


def test_an_interrupted_benchmark_says_that_it_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*args: object, **settings: object) -> None:
        cause = InterruptedRunError("interrupted by SIGTERM", 143)
        raise InterruptedRunError("finished jobs are stored in x", 143) from cause

    monkeypatch.setattr(bench, "measure", measure)
    assert main(["dev", "bench", "use"]) == 143
    assert capsys.readouterr().err == "interrupted by SIGTERM; a benchmark keeps nothing\n"
