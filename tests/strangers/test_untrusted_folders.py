"""A run's folder may come from anyone: it names no code, files or hosts, and fits in memory."""

from __future__ import annotations

import hashlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from asynckfold import AsyncKFold, StoreCorruptError, load_results
from asynckfold.cli import main
from asynckfold.results.report.summary import PICTURES, pictures_of
from asynckfold.store import RunStore, arrays
from tests.synthetic import Synthetic, write_run
from tests.toy import Tiny, adam, samples

LINE = "run --data digits --limit 60 --models mlp --epochs 1 --folds 2 -q"


@pytest.fixture
def run(root: Path) -> Path:
    return write_run(root, Synthetic(models=("mlp",), lr_schedules=("constant",), folds=2))


def store_command(root: Path, words: list[str], folder: Path) -> None:
    with RunStore.hold(root) as store, store.file.transaction():
        about = store.reader.about | {"cli": words, "folder": str(folder)}
        store.file.put("about", json.dumps(about))


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
        "--config /srv/theirs.yaml",
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


# Arrays


def replace_splits(root: Path, **stored: Any) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **stored)
    (root / "splits.npz").write_bytes(buffer.getvalue())
    with RunStore.hold(root) as store, store.file.transaction():
        store.file.put("splits", hashlib.sha256(buffer.getvalue()).hexdigest())


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes up to which anything may unpack: 1 MiB, for 256."""
    monkeypatch.setattr(arrays, "ALWAYS_BYTES", 1 << 20)
    return 1 << 20


@pytest.mark.parametrize("name", ["targets", "repeat0-fold0-train", "not-of-the-plan"])
def test_a_small_file_does_not_unpack_to_a_large_array(run: Path, name: str, little: int) -> None:
    with np.load(run / "splits.npz") as known:
        stored = dict(known)
    replace_splits(run, **{**stored, name: np.zeros(little // 8 + 1)})
    with pytest.raises(StoreCorruptError, match=r"splits\.npz is damaged: unpacked it has 1,0"):
        load_results(run)


def test_a_fold_has_no_more_samples_than_there_are(run: Path) -> None:
    with np.load(run / "splits.npz") as known:
        stored = dict(known)
    stored["repeat0-fold0-train"] = np.zeros(len(stored["targets"]) + 1, np.int64)
    replace_splits(run, **stored)
    with pytest.raises(StoreCorruptError, match="more samples than there are targets"):
        load_results(run)


def test_pictures_that_unpack_to_much_more_are_left_out(run: Path, little: int) -> None:
    buffer = io.BytesIO()
    zeros = np.zeros((1, 8, little, 1), np.uint8)
    np.savez_compressed(buffer, samples=np.zeros(1, int), pictures=zeros)
    (run / PICTURES).parent.mkdir()
    (run / PICTURES).write_bytes(buffer.getvalue())
    with RunStore.read(run) as store:
        assert pictures_of(store) == {}


def test_targets_that_compress_far_are_written_as_they_are(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a million labels in order, or masks without an object."""
    monkeypatch.setattr(arrays, "ALWAYS_BYTES", 0)
    monkeypatch.setattr(arrays, "MOST_RATIO", 1)
    kfold = AsyncKFold(
        2, samples(), root, nn.CrossEntropyLoss(), 10, verbose=0, parallelize=False, baseline=None
    )
    kfold([Tiny], ["cosine"], adam, {"epochs": 1})
    assert load_results(root).n_samples == 60
