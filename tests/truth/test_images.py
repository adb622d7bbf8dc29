"""What is read from folders of images and from arrays: samples of the classes, each once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from asynckfold import InputError
from asynckfold.cli import main
from asynckfold.cli.parser import make_parser
from asynckfold.cli.sweep_file import sweep_parts
from asynckfold.data.sources import load_samples, load_source
from asynckfold.data.sources.images import open_rgb
from tests.here import RefusedError, inspected


def image(path: Path, level: int = 40, size: tuple[int, int] = (6, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (level, level, level)).save(path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of three images each."""
    for kind, level in (("cat", 40), ("dog", 200)):
        for at in range(3):
            image(tmp_path / "photos" / kind / f"{at}.png", level + at)
    return tmp_path / "photos"


# Folders


def test_what_is_no_sample_is_left_out_and_told(photos: Path) -> None:
    image(photos / "lost.png")
    image(photos / "cat" / ".hidden.png")
    image(photos / ".cache" / "x.png")
    image(photos / "__MACOSX" / "cat" / "x.png")
    (photos / "cat" / "._0.png").write_bytes(b"\0\5\x16\7 no image")
    (photos / "cat" / "notes.txt").write_text("x")
    (photos / "cat" / "film.gif").write_bytes(b"GIF89a")
    source = inspected(f"folder:{photos}")
    assert source.counts == {"cat": 3, "dog": 3}
    assert source.notes[1:] == (
        "left out: 1 images outside the class folders: lost.png",
        "left out: 2 files (no image extension, or a link to a folder): cat/film.gif, "
        "cat/notes.txt",
        "left out: 2 hidden folders: .cache, __MACOSX",
    )


def test_an_ordinary_folder_has_nothing_to_tell(photos: Path) -> None:
    image(photos / "cat" / "UPPER.PNG")
    source = inspected(f"folder:{photos}")
    assert source.samples == 7
    assert source.notes == ("7 images in 2 classes, all read as RGB",)
    # A folder within a class belongs to it.
    image(photos / "cat" / "2019" / "0.png", 99)
    assert inspected(f"folder:{photos}").counts == {"cat": 5, "dog": 3}


@pytest.mark.parametrize(
    "names",
    [
        ("train", "test"),
        ("Train", "Validation"),
        ("train", "test", "annotations"),
        ("seg_train", "seg_test", "seg_pred"),
        ("training_set", "test_set"),
        ("fold1", "fold2", "fold3"),
    ],
)
def test_parts_are_no_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        image(tmp_path / name / "cat" / "0.png")
        image(tmp_path / name / "dog" / "0.png")
    with pytest.raises(
        RefusedError, match=r"must be classes, .*Cross-validation divides the data itself"
    ):
        inspected(f"folder:{tmp_path}")


@pytest.mark.parametrize(
    "names", [("train", "car"), ("bus", "train", "tram"), ("protest", "contest"), ("fold1", "cat")]
)
def test_classes_with_such_names_are_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        image(tmp_path / name / "0.png")
    assert inspected(f"folder:{tmp_path}").classes == tuple(sorted(names))


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_an_image_under_two_names_is_refused(photos: Path, link: Any) -> None:
    link(photos / "cat" / "0.png", photos / "cat" / "again.png")
    with pytest.raises(RefusedError, match=r"there once: received 1 under several names, such as"):
        inspected(f"folder:{photos}")


def test_a_link_to_a_class_is_followed_and_a_circle_is_not(photos: Path, tmp_path: Path) -> None:
    image(tmp_path / "elsewhere" / "0.png", 7)
    (photos / "eel").symlink_to(tmp_path / "elsewhere")
    (photos / "cat" / "round").symlink_to(photos)
    source = inspected(f"folder:{photos}")
    assert source.counts == {"cat": 3, "dog": 3, "eel": 1}
    assert any("a link to a folder): cat/round" in note for note in source.notes)


def test_classes_that_differ_in_case_only_are_refused(photos: Path) -> None:
    image(photos / "Cat" / "0.png")
    with pytest.raises(RefusedError, match="differ by more than upper and lower case"):
        inspected(f"folder:{photos}")


def test_samples_to_predict_are_found_alike(photos: Path) -> None:
    (photos / "cat" / "._0.png").write_bytes(b"no image")
    (photos / "cat" / "notes.txt").write_text("x")
    samples = load_samples(f"folder:{photos}")
    assert samples.names == tuple(f"{kind}/{at}.png" for kind in ("cat", "dog") for at in range(3))
    assert samples.labels == ("cat",) * 3 + ("dog",) * 3
    assert samples.notes == (
        "left out: 1 files (no image extension, or a link to a folder): cat/notes.txt",
    )


# What is in an image file


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_deep_images_are_refused(tmp_path: Path, dtype: type) -> None:
    """PIL makes white of what exceeds 255."""
    Image.fromarray((np.arange(64).reshape(8, 8) * 1000).astype(dtype)).save(tmp_path / "x.tif")
    with pytest.raises(InputError, match="must have 8 bits a channel: received an image of mode"):
        open_rgb(str(tmp_path / "x.tif"))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_images_of_other_modes_are_read_as_pil_reads_them(tmp_path: Path, mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    path = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    Image.fromarray(pixels).convert(mode).save(path)
    with Image.open(path) as original:
        np.testing.assert_array_equal(open_rgb(str(path)), original.convert("RGB"))


def test_a_turned_camera_turns_the_image(tmp_path: Path) -> None:
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, :20] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "x.jpg", exif=exif, quality=100)
    found = np.asarray(open_rgb(str(tmp_path / "x.jpg")))
    assert found.shape == (40, 20, 3)
    assert found[:20].min() > 250
    assert found[20:].max() < 5


# Augmentation


def test_augmentation_is_for_the_training_view_only(photos: Path) -> None:
    words = ["run", "--data", f"folder:{photos}", "--augment", "--root", "r", "--quiet"]
    sweep = sweep_parts(make_parser().parse_args(words))
    train, evaluation = (
        {type(step).__name__ for step in sweep.settings[f"{view}_transform"].transforms}
        for view in ("train", "eval")
    )
    assert train - evaluation == {"RandomCrop", "RandomHorizontalFlip"}
    assert not any(name.startswith("Random") for name in evaluation)
    assert any("letters and digits" in note for note in sweep.settings["about"]["data notes"])


def test_what_a_flip_may_change_is_not_augmented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("Left hand", "right hand", "foot"):
        image(tmp_path / "hands" / name / "0.png")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 6), np.uint8)
    np.savez(tmp_path / "x.npz", X=pixels, y=np.arange(8) % 2)
    for data, text in (
        (f"folder:{tmp_path}/hands", "whose class left hand becomes another"),
        (f"npz:{tmp_path}/x.npz", "crops and flips must keep the class"),
        ("digits", "crops and flips must keep the class"),
    ):
        words = ["run", "--data", data, "--augment", "--root", str(tmp_path / "run")]
        assert main(words) == 2
        assert text in capsys.readouterr().err


# A part of the samples


def test_a_part_is_drawn_from_all_classes_of_a_sorted_file(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], 100)
    np.savez(tmp_path / "x.npz", X=draw.normal(size=(300, 2)), y=y)
    source = inspected(f"npz:{tmp_path}/x.npz", limit=30, seed=4)
    assert list(source.counts.values()) == [10, 10, 10]
    assert "30 of 300 samples, classes balanced, drawn with seed 4" in source.notes


# Arrays


def arrays(folder: Path, **given: Any) -> str:
    np.savez(folder / "x.npz", **given)
    return f"npz:{folder / 'x.npz'}"


def test_a_column_of_an_array_that_counts_is_no_feature(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    X = draw.normal(size=(90, 3))
    X[:, 1] = draw.permutation(90)
    y = np.where(X[:, 1] < 45, 0, 1)
    data = arrays(tmp_path, X=X, y=y)
    source = load_source(data)
    assert source.features == ("column 0", "column 2")
    assert source.notes == ("column 1 is left out: it counts the samples (--keep 1 uses it)",)
    assert load_source(data, keep=["1"]).features == ("column 0", "column 1", "column 2")
    assert load_source(data, drop=["0"]).features == ("column 2",)
    samples = load_samples(arrays(tmp_path, X=X[:5]), source)
    np.testing.assert_array_equal(samples.dataset.tensors[0], X[:5][:, [0, 2]])  # type: ignore[attr-defined]


def test_other_arrays_in_the_file_are_told(tmp_path: Path) -> None:
    X, y = np.random.default_rng(0).normal(size=(8, 2)), np.arange(8) % 2
    source = inspected(arrays(tmp_path, X=X, y=y, X_test=X, y_test=y))
    assert source.notes == ("only X and y are read, not X_test, y_test",)
    with pytest.raises(RefusedError, match="with an array X: received x_train, x_test"):
        inspected(arrays(tmp_path, x_train=X, x_test=X))
