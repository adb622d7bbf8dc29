"""The verb ``predict``: other samples, from wherever they come, by the models of all folds."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from asynckfold import AsyncKFold, RunStore
from asynckfold.cli import main
from tests.toy import Tiny, adam, samples

SHORT = "--folds 2 --epochs 2 --baseline none --no-report --quiet --n-jobs 1"


pytestmark = pytest.mark.usefixtures("no_worker_stays")


def table(path: Path, count: int = 60, seed: int = 0, **options: Any) -> Path:
    """Write rows of two numbers, a colour, which tells the kind, and the kind."""
    draw = np.random.default_rng(seed)
    header = options.get("header", ["id", "width", "colour", "length", "kind"])
    lines = [",".join(header)] if options.get("named", True) else []
    for at in range(count):
        kind = at % 3
        cells = {
            "id": str(options.get("first", 0) + at),
            "width": f"{draw.normal() + kind:.3f}",
            "colour": options.get("colours", ["red", "green", "blue"])[kind],
            "length": f"{draw.normal():.3f}",
            "kind": "xyz"[kind],
        }
        lines.append(",".join(cells.get(name, "?") for name in header))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def tabled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a table."""
    folder = tmp_path_factory.mktemp("tabled")
    table(folder / "rows.csv")
    line = f"run --data csv:{folder}/rows.csv --lr 0.05 --root {folder}/run {SHORT}"
    assert main(shlex.split(line)) == 0
    return folder / "run"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def predicted(run: Path, data: str, *words: str, to: str = "predicted.csv") -> list[dict[str, str]]:
    path = run.parent / to
    path.unlink(missing_ok=True)
    assert main(["predict", str(run), "--data", data, "--to", str(path), *words]) == 0
    return read(path)


def test_a_table_is_predicted_with_and_without_its_target(
    tabled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labelled = predicted(tabled, f"csv:{table(tmp_path / 'new.csv', 30, 1)}")
    texts = capsys.readouterr()
    assert "mlp/constant, 2 models: 30 samples in " in texts.out
    accuracy = float(re.findall(r"accuracy (\S+)", texts.out)[0])
    assert list(labelled[0]) == ["sample", "prediction", "probability", "p_x", "p_y", "p_z"]
    right = [row["prediction"] == "xyz"[at % 3] for at, row in enumerate(labelled)]
    assert accuracy == pytest.approx(np.mean(right), abs=1e-4)
    assert accuracy > 0.5
    for at, row in enumerate(labelled):
        shares = {name: float(row[f"p_{name}"]) for name in "xyz"}
        assert row["sample"] == str(at)
        assert sum(shares.values()) == pytest.approx(1)
        assert float(row["probability"]) == shares[row["prediction"]] == max(shares.values())
    # Without the target, with columns in another order, more of them, and ids that count not.
    bare = ["colour", "more", "length", "id", "width"]
    path = table(tmp_path / "bare.csv", 30, 1, header=bare, first=500)
    assert predicted(tabled, f"csv:{path}") == labelled
    texts = capsys.readouterr()
    assert "accuracy" not in texts.out
    assert "column 'more' is left out: the models were not trained on it" in texts.err
    assert "column 'id' is left out" in texts.err
    # Without names, by their order; with a target that is nearly everywhere.
    path = table(tmp_path / "nameless.csv", 30, 1, named=False)
    assert predicted(tabled, f"csv:{path}") == labelled
    path.write_text(path.read_text().replace(",x\n", ",\n", 1))
    assert predicted(tabled, f"csv:{path}") == labelled
    path = table(
        tmp_path / "headless.csv", 30, 1, named=False, header=["id", "width", "colour", "length"]
    )
    assert predicted(tabled, f"csv:{path}") == labelled
    # A row alone, and one colour only: it is encoded as the run's rows were.
    path.write_text("width,colour,length\n-1.5,green,0\n")
    assert len(predicted(tabled, f"csv:{path}")) == 1


def test_the_predictions_are_those_of_the_ensemble(tabled: Path, tmp_path: Path) -> None:
    path, file = table(tmp_path / "new.csv", 20, 2), tabled.parent / "predicted.npz"
    file.unlink(missing_ok=True)
    words = ["predict", str(tabled), "mlp/constant", "--data", f"csv:{path}", "--to", str(file)]
    assert main([*words, "--json"]) == 0
    written = predicted(tabled, f"csv:{path}")
    with np.load(file) as arrays:
        assert arrays["classes"].tolist() == ["x", "y", "z"]
        assert arrays["sample"].tolist() == list(range(20))
        shares = arrays["probabilities"]
        np.testing.assert_array_equal(arrays["prediction"], shares.argmax(axis=1))
    texts = [[float(row[f"p_{name}"]) for name in "xyz"] for row in written]
    np.testing.assert_array_equal(shares, texts)


def test_json_tells_the_score_and_the_runs_own_samples_are_no_test(
    tabled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tabled.parent)
    words = ["--data", "csv:rows.csv", "--to", str(tmp_path / "own.csv"), "--json"]
    assert main(["predict", "run", *words]) == 0
    texts = capsys.readouterr()
    result = json.loads(texts.out)
    assert (result["candidate"], result["models"], result["samples"]) == ("mlp/constant", 2, 60)
    assert list(result["score"]) == ["accuracy"]
    with RunStore.read(tabled) as store:
        scores = [result.scores["accuracy"] for result in store.results().values()]
    assert (
        f"the run trained on these samples; out of fold, accuracy is {np.mean(scores):.4f}"
        in texts.err
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "width,colour\n1,red\n",
            "width, colour, without length. Add them, or correct their names",
        ),
        (
            "width,colour,length\n1,pink,2\n",
            "trained on: received colour (1 cell, first in row 1, 'pink')",
        ),
        (
            "width,colour,length\n1,,2\n",
            "no missing values: received colour (1 cell, first in row 1)",
        ),
        (
            "width,colour,length\na,red,2\n",
            "trained on: received width (1 cell, first in row 1, 'a')",
        ),
        ("1,2\n", "must have the 4 columns of csv:"),
        ("width,colour,length\n", "or their names: received 3"),
        ("", "must hold rows: received an empty file"),
    ],
)
def test_a_table_of_other_columns_is_refused(
    tabled: Path, tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text)
    words = ["--data", f"csv:{path}", "--to", str(tmp_path / "predicted.csv")]
    assert main(["predict", str(tabled), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "predicted.csv").exists()


def test_labels_that_the_run_does_not_know_have_no_score(
    tabled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.csv"
    path.write_text("width,colour,length,kind\n1,red,2,w\n2,red,1,x\n")
    assert len(predicted(tabled, f"csv:{path}")) == 2
    texts = capsys.readouterr()
    assert "no score: labels unknown to the run: w" in texts.err
    assert "accuracy" not in texts.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "{}/there.csv"], "--to must be a new file"),
        (["--to", "{}/none/new.csv"], "Make the folder first"),
        (["--to", "{}/new.txt"], "--to must be a .csv or .npz file"),
        (["mlp/warm"], "candidate must be one of mlp/constant: received 'mlp/warm'"),
        (["mlpp/warm"], "the models must be those of the run, with mlpp"),
        (["--sweep", "sweep.py"], "--sweep is for runs of a sweep file"),
        (["--models", "mlpp"], "--models must name models: received 'mlpp'. Did you mean 'mlp'?"),
        (["--models", "lenet"], "lenet needs images of 32×32"),
        (["--data", "folders:x"], "data must be a known source: received 'folders:x'"),
        (["--data", "npz:{}/none.npz"], "npz: must name an existing path"),
        (["--data", "digits"], "Its first has the form 'tensor' and the shape (5,)."),
        (["--target", "sort"], "--target must be a column of the file: received 'sort'"),
    ],
)
def test_what_cannot_be_predicted_is_told(
    tabled: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.csv").write_text("mine")
    path = table(tmp_path / "new.csv", 3)
    given = [word.format(tmp_path) for word in words]
    candidate = [] if given[0].startswith("--") else [given.pop(0)]
    common = ["--data", f"csv:{path}", "--to", str(tmp_path / "predicted.csv")]
    assert main(["predict", str(tabled), *candidate, *common, *given]) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "there.csv").read_text() == "mine"
    assert not (tmp_path / "predicted.csv").exists()


# Images and arrays


def test_images_come_from_folders_and_arrays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, new = np.random.default_rng(0), tmp_path / "new"
    for part, count in (("photos", 8), ("new", 2)):
        for kind, level in (("dark", 40), ("light", 200)):
            (tmp_path / part / kind).mkdir(parents=True)
            for at in range(count):
                pixels = draw.integers(level, level + 40, (6 + at % 2, 6, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / kind / f"{at}.png")
    line = f"run --data folder:{tmp_path}/photos --lr 0.01 --root {tmp_path}/run {SHORT}"
    assert main(shlex.split(line)) == 0
    rows = predicted(tmp_path / "run", f"folder:{new}")
    assert [row["sample"] for row in rows] == [
        *(f"dark/{at}.png" for at in range(2)),
        *(f"light/{at}.png" for at in range(2)),
    ]
    right = [row["sample"].startswith(row["prediction"]) for row in rows]
    assert f"accuracy {np.mean(right):.4f}" in capsys.readouterr().out
    # One folder alone is no class, but it has samples.
    assert [row["prediction"] for row in predicted(tmp_path / "run", f"folder:{new}/dark")] == [
        row["prediction"] for row in rows[:2]
    ]
    assert "accuracy" not in capsys.readouterr().out
    np.savez(tmp_path / "new.npz", X=draw.integers(0, 256, (3, 6, 6, 3), np.uint8))
    assert len(predicted(tmp_path / "run", f"npz:{tmp_path}/new.npz")) == 3
    empty = tmp_path / "empty"
    empty.mkdir()
    words = ["--data", f"folder:{empty}", "--to", str(tmp_path / "x.csv")]
    assert main(["predict", str(tmp_path / "run"), *words]) == 2
    assert "must name a folder with images" in capsys.readouterr().err


def test_the_run_is_read_only_and_its_data_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    draw = np.random.default_rng(0)
    np.savez("data.npz", X=draw.normal(size=(40, 3)), y=np.arange(40) % 2)
    np.savez("new.npz", X=draw.normal(size=(4, 3)))
    assert main(shlex.split(f"run --data npz:data.npz --root r {SHORT}")) == 0
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in Path("there/r").rglob("*") if path.is_file()}
    assert len(predicted(tmp_path / "there" / "r", "npz:there/new.npz")) == 4
    assert before == {
        path: path.read_bytes() for path in Path("there/r").rglob("*") if path.is_file()
    }
    # What the run was trained on has changed since.
    np.savez("there/data.npz", X=draw.normal(size=(40, 3)), y=np.arange(40) % 2)
    words = ["--data", "npz:there/new.npz", "--to", "x.csv"]
    assert main(["predict", "there/r", *words]) == 2
    assert "recorded for held-out samples: received mlp/constant/fold-0" in capsys.readouterr().err


# Code is named by whoever asks, never by a folder


SWEEP = """
import torch
from torch import nn
from tests.toy import Tiny, adam as opt_fn, samples
X, y = samples()
dataset = (X, {})
criterion = nn.{}()
models = {{"tiny": {}}}
schedulers = ["step"]
trainer_params = {{"epochs": 1}}
settings = {{"kfolds": 3, "batch_size": 10, "baseline": None, "preprocess": None}}
"""


def test_a_run_of_a_sweep_file_needs_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, run = tmp_path / "sweep.py", tmp_path / "run"
    parts = ("X[:, 0] * 2", "MSELoss", "lambda: nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))")
    sweep.write_text(SWEEP.format(*parts))
    assert main(["run", str(sweep), "--root", str(run), "--no-report", "--quiet"]) == 0
    X, _ = samples()
    rows = np.column_stack([X, X[:, 0] * 2])[:9]
    text = "\n".join(",".join(map(repr, row.tolist())) for row in rows)
    (tmp_path / "new.csv").write_text(f"{text}\n")
    capsys.readouterr()
    words = ["--data", f"csv:{tmp_path}/new.csv", "--to", str(tmp_path / "predicted.csv")]
    assert main(["predict", str(run), *words, "--target", "8"]) == 2
    texts = capsys.readouterr().err
    assert "never trusted to name code: it must be given: received a run of asynckfold run" in texts
    assert "Pass --sweep with the file" in texts
    rows = predicted(run, f"csv:{tmp_path}/new.csv", "--target", "8", "--sweep", str(sweep))
    assert list(rows[0]) == ["sample", "prediction"]
    assert re.search(r"r2 -?\d", capsys.readouterr().out)
    sweep.write_text("models = 3\n")
    words[-1] = str(tmp_path / "other.csv")
    assert main(["predict", str(run), *words, "--sweep", str(sweep)]) == 2
    assert "must define dataset, criterion" in capsys.readouterr().err


def test_a_run_of_a_script_needs_a_sweep_file(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kfold = AsyncKFold(
        3, samples(), root, nn.CrossEntropyLoss(), 10, verbose=0, baseline=None, parallelize=False
    )
    results = kfold({"tiny": Tiny}, ["step"], adam, {"epochs": 1})
    X, _ = samples()
    np.savez(tmp_path / "new.npz", X=X[:5])
    words = ["predict", str(root), "--data", f"npz:{tmp_path}/new.npz"]
    words += ["--to", str(tmp_path / "predicted.csv")]
    assert main(words) == 2
    assert "received a run of the script that started it" in capsys.readouterr().err
    sweep = tmp_path / "sweep.py"
    sweep.write_text(SWEEP.format("y", "CrossEntropyLoss", "Tiny"))
    assert main([*words, "--sweep", str(sweep)]) == 0
    shares = results.ensemble().predict_proba(torch.from_numpy(X[:5]))
    texts = [[float(row[f"p_{at}"]) for at in range(3)] for row in read(tmp_path / "predicted.csv")]
    np.testing.assert_allclose(texts, shares, rtol=1e-6)
