"""The verb ``data`` prints what a run would read, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from asynckfold.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table with a counter, names, numbers and two equal rows."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "nr": draw.permutation(60),
            "size": draw.normal(size=60).round(3),
            "colour": list("rgb") * 20,
            "kind": ["x"] * 40 + ["y"] * 14 + ["z"] * 6,
        }
    )
    # Equal but for the counter, which is not used.
    frame.loc[8, ["size", "colour"]] = frame.loc[6, ["size", "colour"]]
    frame.to_csv(tmp_path / "t.csv", index=False)
    return tmp_path / "t.csv"


def printed(capsys: Capture, *words: str, code: int = 0) -> tuple[str, str]:
    assert main(["data", *words]) == code
    texts = capsys.readouterr()
    return texts.out, texts.err


def printed_json(capsys: Capture, *words: str, code: int = 0) -> Any:
    return json.loads(printed(capsys, *words, "--json", code=code)[0])


def test_a_table_is_told(table: Path, capsys: Capture) -> None:
    out, err = printed(capsys, f"csv:{table}")
    lines = [line.rstrip() for line in out.splitlines()]
    assert err == ""
    assert lines[0] == f"csv:{table}: 60 rows, 4 features, 3 classes"
    assert lines[1] == "the first row is the header; the class is column 'kind': x, y, z"
    assert any(line.split()[:4] == ["nr", "left", "out", "int64"] for line in lines)
    assert "column 'nr' is left out: it counts the samples (--keep nr uses it)" in lines
    assert any(line.split()[:3] == ["colour", "feature", "names"] for line in lines)
    assert any(line.split() == ["x", "40", "66.7", "%"] for line in lines)
    assert "1 row equals an earlier one, perhaps on the other side of a fold" in lines
    assert "the rarest class, z, has 6 samples: at most 6 folds" in lines
    out, _ = printed(capsys, f"csv:{table}", "--drop", "nr")
    assert "left out by --drop: column 'nr'" in out


def test_what_is_told_is_what_a_run_takes(table: Path, capsys: Capture) -> None:
    for words in ([], ["--target", "colour"], ["--keep", "nr"]):
        data = printed_json(capsys, f"csv:{table}", *words)
        settings = ["--folds", "2", "--epochs", "1", "--engine", "serial", "--json"]
        assert main(["plan", "--data", f"csv:{table}", *words, *settings]) == 0
        out, err = capsys.readouterr()
        plan = json.loads(out)
        assert data["samples"] == sum(fold["valid"] for fold in plan["folds"])
        assert list(data["classes"]) == plan["classes"]
        assert all(note in err for note in data["notes"])
        assert data["problems"] == []


def test_a_table_that_would_be_refused_is_told_first(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,when,kind\n1,2020-01-01,a\n,2020-01-02,b\n2,2020-01-03,a\n3,2020-01-04,b\n")
    out, err = printed(capsys, f"csv:{path}", code=2)
    assert "4 rows, 0 features, 2 classes" in out
    assert [line.split()[1] for line in out.splitlines()[4:6]] == ["refused", "refused"]
    assert "2 problems, nothing was started" in err
    assert "received x (1 cell, first in row 2)" in err
    data = printed_json(capsys, f"csv:{path}", code=2)
    assert [problem["received"][:4] for problem in data["problems"]] == ["x (1", "when"]
    assert [item["missing"] for item in data["columns"]] == [1, 0, 0]


def test_a_wide_table_is_cut_for_people_and_whole_for_programs(
    tmp_path: Path, capsys: Capture
) -> None:
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", X=draw.normal(size=(40, 100)), y=np.arange(40) % 2)
    out, _ = printed(capsys, f"npz:{tmp_path}/x.npz")
    assert "40 rows, 100 features, 2 classes" in out
    assert "… and 70 more features" in out
    assert len(printed_json(capsys, f"npz:{tmp_path}/x.npz")["columns"]) == 100


def test_arrays_of_images_are_told(tmp_path: Path, capsys: Capture) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 5, 3), np.uint8)
    pixels[3] = pixels[0]
    np.savez(tmp_path / "x.npz", X=pixels, y=list("abab" * 2))
    out, _ = printed(capsys, f"npz:{tmp_path}/x.npz")
    assert "8 images of 3×6×5, 2 classes" in out
    assert "X is read as RGB images of 6×5" in out
    assert "1 image equals an earlier one" in out


def test_a_folder_is_told_with_what_cannot_be_read(tmp_path: Path, capsys: Capture) -> None:
    draw = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / "p" / kind).mkdir(parents=True)
        for at in range(3):
            pixels = draw.integers(0, 256, (6 + at, 5, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "p" / kind / f"{at}.png")
    first = tmp_path / "p" / "cat" / "0.png"
    (tmp_path / "p" / "dog" / "again.png").write_bytes(first.read_bytes())
    out, err = printed(capsys, f"folder:{tmp_path}/p")
    assert "7 images of 3×6×5, 2 classes" in out
    assert "1 image equals an earlier one" in out
    assert err == ""
    torn = tmp_path / "p" / "dog" / "1.png"
    torn.write_bytes(torn.read_bytes()[:60])
    (tmp_path / "p" / "dog" / "2.png").write_bytes(b"no image")
    out, err = printed(capsys, f"folder:{tmp_path}/p", code=2)
    assert "7 images of 3×6×5, 2 classes" in out
    assert "dog/1.png must be a readable image" in err
    assert "dog/2.png must be a readable image" in err


def test_digits_and_a_part_of_them(capsys: Capture) -> None:
    out, _ = printed(capsys, "digits")
    assert "digits: 1797 images of 1×8×8, 10 classes" in out
    data = printed_json(capsys, "digits", "--limit", "105", "--seed", "3")
    assert (data["samples"], sum(data["classes"].values())) == (105, 105)
    assert {*data["classes"].values()} <= {10, 11}
    _, err = printed(capsys, "digits", "--limit", "9", code=2)
    assert "limit must leave a sample of each of the 10 classes" in err


def test_a_table_is_told_without_torch(table: Path) -> None:
    check = (
        "import sys; from asynckfold.cli import main; main(sys.argv[1:]); "
        "sys.exit('imported torch' if 'torch' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", check, "data", f"csv:{table}"], check=True, timeout=100)
