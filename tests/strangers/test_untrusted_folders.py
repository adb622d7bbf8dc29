"""A run's folder may come from anyone: it names no code, files or hosts, and fits in memory."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from asynckfold import RunStore
from asynckfold.cli import main
from asynckfold.jobs.decoding import encoded
from tests.synthetic import Synthetic, write_run

LINE = "run --data digits --limit 60 --models mlp --epochs 1 --folds 2 -q"


@pytest.fixture
def run(root: Path) -> Path:
    return write_run(root, Synthetic(models=("mlp",), lr_schedules=("constant",), folds=2))


def store_command(root: Path, words: list[str], folder: Path) -> None:
    with RunStore.hold(root) as store, store.file.transaction():
        about = store.reader.about | {"cli": words, "folder": str(folder)}
        store.file.put("about", encoded(about))


# Commands


@pytest.mark.parametrize(
    "more",
    [
        "--engine ray --ray-address 10.0.0.1:6379",
        "--data-root /srv/theirs",
        "--download",
        "--data cifar10",
        "--data csv:/srv/theirs.csv",
        "--plan-from /srv/theirs",
        "--models theirs:Net",
        "theirs.py",
    ],
)
def test_resume_prints_a_command_that_names_places_or_code(
    run: Path, tmp_path: Path, more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*shlex.split(f"{LINE} --root run"), *more.split()]
    store_command(run, words, tmp_path)
    before = (run / "run.db").read_bytes()
    assert main(["resume", str(run)]) == 2
    told = capsys.readouterr().err
    assert "never trusted to name code, files or hosts" in told
    again = f"it continues the run: cd {tmp_path} && {shlex.join(['asynckfold', *words])}\n"
    assert told.endswith(again)
    assert (run / "run.db").read_bytes() == before


def test_the_printed_command_names_the_folder_where_it_is_now(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store_command(run, ["run", "--root", "elsewhere", "--data", "csv:x.csv"], tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["resume", "run"]) == 2
    told = capsys.readouterr().err
    assert told.endswith(f": asynckfold run --data csv:x.csv --root {run}\n")


def test_numbers_and_names_of_built_in_things_are_taken(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"{LINE} --optimizer sgd --lr 0.1 --batch-size 16 --seed 3 --scoring accuracy"
    line += " --param momentum=0.5 --n-jobs 1 --engine serial --baseline none --no-report"
    line += f" --root {root}"
    assert main(shlex.split(line)) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["resume", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["done"] == 2


def test_predict_takes_folders_of_collections_from_its_own_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "theirs"
    words = ["run", "--data", "mnist", "--data-root", str(theirs), "--download", "--models", "mlp"]
    store_command(run, words, tmp_path)
    mine = tmp_path / "mine"
    line = ["predict", str(run), "--data", "digits", "--data-root", str(mine)]
    assert main([*line, "--to", str(tmp_path / "out.csv")]) == 2
    told = capsys.readouterr().err
    assert str(mine) in told
    assert str(theirs) not in told
