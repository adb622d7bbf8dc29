from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asynckfold.data.sources import load_source
from asynckfold.data.sources.text_files import header_of
from tests.here import Inspected, RefusedError, inspected

Look = Callable[..., Inspected]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Inspect a table, from its text."""

    def look_at(text: str, **options: str) -> Inspected:
        (tmp_path / "table.csv").write_bytes(text.encode())
        return inspected(f"csv:{tmp_path}/table.csv", **options)

    return look_at


PLAIN = "1.5,2,a\n2.5,4,b\n3.5,6,a\n4.5,8,b\n"


def test_rows_are_read_whatever_the_delimiter_and_the_ends_of_lines(tmp_path: Path) -> None:
    titled = "x,y,kind\n" + PLAIN
    spaced = "\ufeffx, y, kind\n\n1.5, 2, a \n\n2.5, 4, b\n3.5 , 6,a\n4.5, 8, b\n\n"
    texts = [PLAIN, titled, spaced, titled.replace("\n", "\r\n")]
    texts += [titled.replace(",", delimiter) for delimiter in ";\t"]
    for text in texts:
        (tmp_path / "table.csv").write_bytes(text.encode())
        source = load_source(f"csv:{tmp_path}/table.csv")
        rows = [source.dataset[index][0].tolist() for index in range(4)]
        assert rows == [[1.5, 2], [2.5, 4], [3.5, 6], [4.5, 8]]
        assert source.targets.tolist() == [0, 1, 0, 1]
        assert source.classes == source.dataset.classes == ("a", "b")
        assert source.features == ("x", "y") if text != PLAIN else ("column 0", "column 1")
    assert (source.kind, source.standardize, source.sample_shape) == ("table", True, (2,))


def test_what_the_first_row_is_is_told(look: Look) -> None:
    assert look(PLAIN).notes == ("no header; the class is column 2: a, b",)
    titled = look("width,length,kind\n" + PLAIN)
    assert titled.features == ("width", "length")
    assert titled.notes == ("the first row is the header; the class is column 'kind': a, b",)


def test_the_target_by_name_and_by_position(look: Look) -> None:
    for target in ("kind", "2", "-1"):
        assert look("x,y,kind\n" + PLAIN, target=target).features == ("x", "y")
    named = look("kind,1\na,5\nb,6\na,5\nb,6\n", target="1", header="yes")
    assert (named.features, named.classes) == (("kind=a", "kind=b"), ("5", "6"))


@pytest.mark.parametrize(
    ("target", "remedy"),
    [("knd", "Columns: x, y, kind. Did you mean 'kind'"), ("3", "Columns:"), ("-4", "Columns:")],
)
def test_a_missing_target_column_is_named(look: Look, target: str, remedy: str) -> None:
    with pytest.raises(RefusedError, match=f"--target must be a column .*'{target}'.*{remedy}"):
        look("x,y,kind\n" + PLAIN, target=target)


def test_a_name_that_stands_twice_is_refused(look: Look) -> None:
    with pytest.raises(RefusedError, match="different names: received 'x' more than once"):
        look("x,x,kind\n" + PLAIN)


def test_too_many_names_are_refused(look: Look) -> None:
    with pytest.raises(RefusedError, match=r"at most 50 different ones: received code \(51\)"):
        look("code,kind\n" + "".join(f"n{row % 51},{'ab'[row % 2]}\n" for row in range(60)))
    assert look("code,kind\n" + "".join(f"n{row % 50},{'ab'[row % 2]}\n" for row in range(60)))


def test_all_problems_are_told_at_once(look: Look) -> None:
    with pytest.raises(RefusedError) as caught:
        look("x,y,z,kind\n1,,1,a\n2,2,inf,b\n3,3,3,\n4,4,4,b\n")
    text = str(caught.value)
    assert "3 problems" in text
    assert "target column 'kind' must have no missing labels: received 1 missing" in text
    assert "y (1 cell, first in row 1)" in text
    assert "z (1 cell, first in row 2, 'inf')" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold rows: received an empty file"),
        ("\n \n", "must hold rows: received an empty file"),
        ("x\n1\n2\n", "must hold a feature besides the target: received none"),
        ("x,kind\n1,2,a\n", "with the columns of the first: .*Expected 2 fields in line 2, saw 3"),
        ("1,a\n2,b\n3,a,9\n", "with the columns of the first"),
        ("1,a\n2,a\n3,a\n", "two classes or more: received 'a' in all 3 rows"),
        ("1,a\n2,b\n3,c\n4,d\n", "class labels: received 4 different values in 4 rows"),
    ],
)
def test_files_that_hold_no_labelled_rows(look: Look, text: str, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        look(text)


def test_a_header_without_rows_is_refused(look: Look) -> None:
    with pytest.raises(RefusedError, match="must hold rows: received a header only"):
        look("x,kind\n", header="yes")


def test_a_continuous_target_is_refused(look: Look) -> None:
    text = "".join(f"{row % 7},{row % 60 / 7}\n" for row in range(300))
    with pytest.raises(
        RefusedError, match="column 1 must hold class labels: received 60 different"
    ):
        look(text)
    whole = look("".join(f"{row % 7},{row % 60}\n" for row in range(300)))
    assert len(whole.classes) == 60
    text = "the 60 different numbers of column 1 are taken as classes, not as amounts: for these "
    assert f"{text}pass --task regression" in whole.notes


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([["x", "kind"], ["1", "a"], ["2", "b"]], True),
        ([["1", "a"], ["1", "a"], ["2", "b"]], False),
        ([["", "x"], ["1", "2"]], True),  # an unnamed index column
        ([["?", "?"], ["1", "2"]], False),  # a row of missing values
        ([["kind", "colour"], ["a", "red"], ["b", "blue"]], True),
        ([["a", "red"], ["a", "blue"], ["b", "red"]], False),
        ([["2019", "2020"], ["1.5", "2.5"]], False),
        ([["2019", "2020", "2021"], ["1.5", "2.5", "2"]], None),
        ([["0", "1", "kind"], ["1.5", "2.5", "2"]], None),
        ([["0", "1", "a"], *([["1.5", "2.5", "a"], ["1.5", "2.5", "b"]] * 9)], False),
        ([["1.5", "a"], ["x", "b"]], False),
        ([["a", "b"]], False),
    ],
)
def test_the_header_rule(table: list[list[str]], expected: bool | None) -> None:
    has_header, why = header_of(table)
    assert has_header is bool(expected)
    assert bool(why) is (expected is None)


def test_the_header_can_be_forced(look: Look) -> None:
    text = "2019,2020\n1,0\n2,1\n3,0\n4,1\n"
    assert look(text, header="yes").features == ("2019",)
    assert look(text, header="yes").counts == {"0": 2, "1": 2}
    with pytest.raises(RefusedError, match=r"not both: .*'x'.*--header yes"):
        look("x,kind\n1,a\n2,b\n3,a\n4,b\n", header="no")
