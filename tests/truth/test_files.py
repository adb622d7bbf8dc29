"""What is read from tables: no row, column or class that is not the data's own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckfold import InputError, RunStore
from asynckfold.cli import main
from asynckfold.data.sources import Source, load_samples, load_source
from tests.here import Inspected, RefusedError, inspected

Load = Callable[..., Source]
Look = Callable[..., Inspected]


def text_of(table: str | bytes | pd.DataFrame) -> bytes:
    if isinstance(table, pd.DataFrame):
        table = table.to_csv(index=False)
    return table.encode() if isinstance(table, str) else table


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Inspect a table, from its text or from a frame."""

    def look_at(table: str | bytes | pd.DataFrame, **options: Any) -> Inspected:
        (tmp_path / "table.csv").write_bytes(text_of(table))
        return inspected(f"csv:{tmp_path}/table.csv", **options)

    return look_at


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a table from its text or from a frame."""

    def load_table(table: str | bytes | pd.DataFrame, **options: Any) -> Source:
        (tmp_path / "table.csv").write_bytes(text_of(table))
        return load_source(f"csv:{tmp_path}/table.csv", **options)

    return load_table


def rows(source: Source) -> np.ndarray:
    return source.dataset.tensors[0].numpy()  # type: ignore[attr-defined]


def noise(n: int = 90, seed: int = 0) -> pd.DataFrame:
    """A table sorted by class, in which nothing tells the class but where a row stands."""
    draw = np.random.default_rng(seed)
    columns = {"a": draw.normal(size=n), "b": draw.normal(size=n).round(2)}
    return pd.DataFrame(columns | {"kind": np.repeat(list("xyz"), n // 3)})


# Columns that count


COUNTERS: dict[str, Callable[[int, np.random.Generator], Any]] = {
    "sorted": lambda n, draw: np.arange(n),
    "offset": lambda n, draw: 7_000_000 + np.arange(n),
    "steps": lambda n, draw: 10 * np.arange(n),
    "subset": lambda n, draw: np.sort(draw.choice(2 * n, n, replace=False)),
    "sparse": lambda n, draw: np.sort(draw.choice(10**9, n, replace=False)),
    "falling": lambda n, draw: np.arange(n)[::-1],
    "floats": lambda n, draw: np.arange(n) + 0.0,
    "seconds": lambda n, draw: np.arange(n) * 0.02,
    "negative": lambda n, draw: np.arange(n) - n // 2,
    "codes": lambda n, draw: [f"{at:04d}" for at in range(n)],
    "texts": lambda n, draw: [f"sample {at}" for at in range(n)],
}


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_column_that_counts_is_no_feature(look: Look, shuffled: bool) -> None:
    table, draw = noise(), np.random.default_rng(0)
    # Shuffled and sparse is what any column of numbers is.
    kinds = [kind for kind in COUNTERS if not (shuffled and kind == "sparse")]
    for kind in kinds:
        table.insert(1, kind, COUNTERS[kind](len(table), draw))
    if shuffled:
        table = table.sample(frac=1, random_state=0)
    source = look(table)
    assert source.features == ("a", "b")
    for kind in kinds:
        assert source.roles[kind] == "left out"
        assert any(note.startswith(f"column '{kind}' is left out:") for note in source.notes)


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_rows_that_are_there_twice_do_not_hide_a_counter(look: Look, share: float) -> None:
    table = noise().assign(nr=np.arange(90), name=[f"n{at}" for at in range(90)], row=range(5, 95))
    table = pd.concat([table, table.sample(frac=share, random_state=1)])
    for order in (table, table.sample(frac=1, random_state=0)):
        assert look(order[["nr", "name", "row", "a", "kind"]]).features == ("a",)


def test_identifiers_are_no_features_and_words_that_end_like_them_are(look: Look) -> None:
    names = ["id", "Id", "PassengerId", "customer_id", "index", "Unnamed: 0"]
    words = ["acid", "grid", "paid", "price_index", "MassIndex", "width"]
    draw = np.random.default_rng(0)
    values = {name: draw.choice(10**9, 90, replace=False) for name in (*names, *words)}
    table = noise().assign(**values)[[*names, *words, "kind"]]
    assert look(table).features == tuple(words)
    assert look(table, keep=names).features == (*names, *words)
    # Those that repeat stay.
    table = noise().assign(group_id=np.arange(90) % 7)[["group_id", "a", "kind"]]
    assert look(table).features == ("group_id", "a")


def test_an_unnamed_first_column_is_no_feature(look: Look) -> None:
    for values in (range(90), [0.5, 1, 2] * 30, [f"row {at}" for at in range(90)]):
        table = noise().set_axis(pd.Index(values)).to_csv()
        assert look(table).features == ("a", "b")
        if not isinstance(values[0], str):
            assert look(table, keep=["0"]).features == ("column 0", "a", "b")


def test_real_tables_keep_their_features(load: Load) -> None:
    from sklearn.datasets import load_breast_cancer, load_iris, load_wine

    for bunch in (
        load_iris(as_frame=True),
        load_wine(as_frame=True),
        load_breast_cancer(as_frame=True),
    ):
        source = load(bunch.frame)
        assert source.features == tuple(bunch.feature_names)
        np.testing.assert_array_equal(rows(source), bunch.data)
        np.testing.assert_array_equal(source.targets, bunch.target)
        assert len(source.notes) == 1


# The header


def test_a_header_of_numbers_is_asked_for(look: Look) -> None:
    draw = np.random.default_rng(0)
    body = "".join(
        ",".join([*(f"{value:.3f}" for value in draw.normal(size=4)), str(at % 2)]) + "\n"
        for at in range(20)
    )
    for header in ("0,1,2,3,4", "400,402,404,406,408", "0.5,1.0,1.5,2.0,2.5"):
        with pytest.raises(RefusedError, match="--header yes if it does, --header no if it is a"):
            look(f"{header}\n{body}")
    assert look(f"{header}\n{body}", header="yes").samples == 20
    assert look(f"{header}\n{body}", header="no").samples == 21
    assert look(body).samples == 20


def test_a_header_with_one_name_among_numbers_is_asked_for(look: Look) -> None:
    """MNIST as a table: pixels are numbered, and the label has a name."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.integers(0, 256, (30, 6))).assign(label=np.arange(30) % 3)
    with pytest.raises(RefusedError, match="'label' and '0' above numbers"):
        look(frame)
    assert look(frame, header="yes").classes == ("0", "1", "2")
    named = frame.assign(label=np.array(["cat", "dog", "eel"])[np.arange(30) % 3])
    with pytest.raises(RefusedError, match="above numbers: a series, or a sample"):
        look(named)
    assert look(named, header="yes").classes == ("cat", "dog", "eel")


# The target


def test_a_column_called_class_that_is_not_the_last_must_be_named(look: Look) -> None:
    table = noise().rename(columns={"kind": "class"})[["class", "a", "b"]]
    table["b"] = np.arange(90) % 4
    with pytest.raises(RefusedError, match="Pass --target class, or --target b"):
        look(table)
    assert look(table, target="class").classes == ("x", "y", "z")
    assert look(table, target="b").classes == ("0", "1", "2", "3")
    assert look(table[["a", "b", "class"]]).classes == ("x", "y", "z")


def test_a_column_that_gives_the_class_away_is_told(look: Look) -> None:
    table = noise()
    table.insert(0, "kind_code", table["kind"].map({"x": 3, "y": 1, "z": 2}))
    table.insert(0, "name", table["kind"].map({"x": "uno", "y": "due", "z": "tre"}))
    notes = look(table).notes
    for name in ("name", "kind_code"):
        assert any(note.startswith(f"column '{name}' tells the class") for note in notes)
    dropped = look(table, drop=["name", "kind_code"])
    assert dropped.features == ("a", "b")
    assert not any("tells the class" in note for note in look(noise()).notes)


# Cells


NASTY = {
    "missing": (["1", "", "3"], "missing values"),
    "NA": (["1", "NA", "3"], "missing values"),
    "infinity": (["1", "inf", "3"], "finite"),
    "decimal commas": (['"1,5"', '"2,5"', '"1,5"'], "decimal point"),
    "thousands": (['"1,234,567"', '"2,345,678"', '"1,000,000"'], "plain digits"),
    "apostrophes": (["1'000", "2'000", "1'000"], "plain digits"),
    "per cent": (["5%", "7%", "5%"], "plain digits"),
    "money": (["$5", "$7.50", "$5"], "plain digits"),
    "bounds": (["5", "<1", "<1"], "plain digits"),
    "dates": (["2020-01-31", "2021-02-01", "2020-01-31"], "dates and times"),
    "times": (["10:30", "11:45:10", "10:30"], "dates and times"),
    "dates with dots": (["31.1.2020", "1.2.2020", "31.1.2020"], "dates and times"),
    "codes": (["007", "010", "999"], "leading zeros"),
    "huge": (["9007199254740993", "5", "7"], "at most 2\\*\\*53"),
    "huger": (["123456789012345678901234", "5", "7"], "at most 2\\*\\*53"),
    "a typing error": (["1", "2.5O", "3"], "not both"),
    "unknowns": (["unknown", "unknown", "3"], "not both"),
    "underscores": (["1_000", "2", "3"], "not both"),
}


def test_cells_that_are_not_plain_are_refused(look: Look) -> None:
    table = {kind: [cells[at % 3] for at in range(30)] for kind, (cells, _) in NASTY.items()}
    records = zip(*table.values(), strict=True)
    body = "".join(
        f"{','.join(row)},{at * at % 11},{'ab'[at % 2]}\n" for at, row in enumerate(records)
    )
    text = ",".join(table) + ",x,kind\n" + body
    with pytest.raises(RefusedError) as caught:
        look(text)
    for kind, (_, words) in NASTY.items():
        (line,) = [
            line for line in str(caught.value).splitlines() if caught.value.why[kind] in line
        ]
        assert re.search(words, line), kind
    assert look(text, drop=list(NASTY)).features == ("x",)


def test_codes_become_names_on_request(look: Look) -> None:
    text = "zip,x,kind\n" + "".join(
        f"{('007', '7', '10')[at % 3]},{at * at % 11},{'ab'[at % 2]}\n" for at in range(30)
    )
    source = look(text, category=["zip"])
    assert source.features == ("zip=007", "zip=10", "zip=7", "x")
    assert look(text, keep=["zip"]).features == ("zip", "x")
    assert look("n,kind\n" + "1,a\n2,b\nx,a\n" * 9, category=["0"]).features == (
        "n=1",
        "n=2",
        "n=x",
    )


def test_plain_names_stay_names_and_one_like_na_is_never_a_class_in_silence(look: Look) -> None:
    names = ["3rd", "2-4", "A1", "None", "1st class", "v2"]
    text = "".join(f"{names[at % 6]},{'ab'[at % 2]}\n" for at in range(30))
    assert look("x,kind\n" + text).features == tuple(f"x={name}" for name in sorted(names))
    with pytest.raises(RefusedError, match=r"missing labels: .*spell the name out if NA is one"):
        look("x,country\n" + "1,NA\n2,DE\n4,NA\n1,DE\n")
    assert look("x,country\n" + "1,None\n2,DE\n4,None\n1,DE\n").classes == ("DE", "None")


def test_delimiters_at_the_end_of_lines_and_short_rows(look: Look) -> None:
    text = "x,y,kind,\n" + "1.5,2,a,\n2.5,4,b,\n3.5,4,a,\n"
    source = look(text, target="kind")
    assert source.features == ("x", "y")
    with pytest.raises(RefusedError, match="must have no missing labels"):
        look(text)
    with pytest.raises(RefusedError, match="missing labels: received 1 missing, first in row 3"):
        look("x,y,kind\n1,2,a\n2,3,b\n4,5\n2,2,b\n2,1,a\n")


def test_line_ends_and_separators(look: Look) -> None:
    source = look('name,x,kind\n"a\nb",1,"x, y"\n"c;d",2,z\n"a\nb",5,"x, y"\n"c;d",2,z\n')
    assert source.features == ("name=a\nb", "name=c;d", "x")
    assert source.classes == ("x, y", "z")
    # The delimiter that divides most is taken.
    assert look("1,2,a;b\n2,3,c;d\n1,3,a;b\n4,3,c;d\n").classes == ("a;b", "c;d")
    decimal = "1.5;2;a\n2.5;3;c\n1.5;3;a\n4.5;3;c\n"
    assert look(decimal).classes == ("a", "c")
    with pytest.raises(RefusedError, match="decimal point"):
        look(decimal.replace(".", ","))


def test_other_encodings_are_refused(look: Look) -> None:
    for encoding in ("latin-1", "utf-16"):
        with pytest.raises(RefusedError, match="text file in UTF-8"):
            look("größe,kind\n1,a\n2,b\n".encode(encoding))


def test_far_below_everything_is_looked_at(look: Look) -> None:
    body = "".join(f"{at * at % 17},{'ab'[at % 2]}\n" for at in range(1000))
    for row, rule in (("012,a", "leading zeros"), ("x,a", "not both"), ("1,a,b", "in line 1002")):
        with pytest.raises(RefusedError, match=rule):
            look(f"x,kind\n{body}{row}\n")


CELLS = ["0", "1", "2", "2.5", "-3", "1e5", "inf", "007", "1,5", "5%", "NA", "?", ".", "None"]
CELLS += ["True", "a", "b", "é", "#c", "2020-01-01", "-1e400", "", " 3 ", '"q,r"', '"q\nr"', '"']
CELLS += ["12345678901234567890", "9007199254740993", "x\0"]


@settings(max_examples=90, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(CELLS), min_size=1, max_size=4), max_size=14),
    st.sampled_from(",;\t"),
    st.sampled_from(["", "x,y,kind\n", "\ufeffid,x,y,z\n", "0,1,2,3\n"]),
    st.sampled_from(["auto", "yes", "no"]),
)
def test_any_text_is_refused_or_read_twice_alike(
    tmp_path_factory: pytest.TempPathFactory,
    table: list[list[str]],
    delimiter: str,
    head: str,
    header: str,
) -> None:
    path = tmp_path_factory.mktemp("table") / "table.csv"
    body = "\n".join(delimiter.join(row) for row in table)
    path.write_text(head.replace(",", delimiter) + body)
    try:
        source = load_source(f"csv:{path}", header=header)
    except InputError:
        return
    assert np.isfinite(rows(source)).all()
    assert rows(source).shape == (len(source.targets), len(source.features))
    again = load_samples(f"csv:{path}", source, header=header)
    np.testing.assert_array_equal(again.dataset.tensors[0], rows(source))  # type: ignore[attr-defined]
    assert again.labels == tuple(source.classes[at] for at in source.targets)


def test_numbers_keep_their_digits(load: Load) -> None:
    """Seconds since 1970 differ in digits that float32 does not have."""
    seconds = 1_700_000_000 + np.random.default_rng(0).integers(0, 60, 90)
    source = load(noise().assign(seconds=seconds)[["seconds", "a", "kind"]])
    np.testing.assert_array_equal(rows(source)[:, 0], seconds)
    assert rows(source).dtype == np.float64


# Another file with the same columns


def test_the_same_columns_by_name_in_any_order(load: Load, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    table = noise().assign(nr=draw.permutation(90), colour=list("rgb") * 30)
    table = table[["nr", "a", "colour", "b", "kind"]]
    like = load(table)
    new = tmp_path / "new.csv"
    table[["kind", "b", "colour", "a"]].head(7).to_csv(new, index=False)
    samples = load_samples(f"csv:{new}", like)
    np.testing.assert_array_equal(samples.dataset.tensors[0].numpy(), rows(like)[:7])  # type: ignore[attr-defined]
    assert samples.labels == tuple(table["kind"].head(7))
    assert samples.notes == ()
    # A column that counted there is not used here, and one that counts here was not left out there.
    table.head(7).assign(a=range(7)).to_csv(new, index=False)
    samples = load_samples(f"csv:{new}", like)
    assert samples.dataset.tensors[0][:, 0].tolist() == list(range(7))  # type: ignore[attr-defined]
    assert samples.notes == ("column 'nr' is left out: the models were not trained on it",)


def test_columns_by_their_order_are_told(load: Load, tmp_path: Path) -> None:
    like = load(noise())
    new = tmp_path / "new.csv"
    new.write_text("1.5,2.5\n2.5,0\n")
    samples = load_samples(f"csv:{new}", like)
    assert samples.notes == (f"columns are taken by their order, since {new} has no header",)
    like = load("".join(f"{at * at % 11}.5,{at % 3},{'ab'[at % 2]}\n" for at in range(30)))
    assert load_samples(f"csv:{new}", like).notes == ()


def test_codes_are_encoded_as_they_were(load: Load, tmp_path: Path) -> None:
    table = pd.DataFrame({"zip": [1, 2, 10] * 10, "x": np.arange(30) % 7, "kind": [*"ab"] * 15})
    like = load(table, category=["zip"])
    new = tmp_path / "new.csv"
    new.write_text("x,zip\n5,10\n6,2\n")
    samples = load_samples(f"csv:{new}", like)
    assert samples.dataset.tensors[0].tolist() == [[0, 1, 0, 5], [0, 0, 1, 6]]  # type: ignore[attr-defined]
    new.write_text("x,zip\n5,11\n")
    with pytest.raises(InputError, match="that the models were trained on: received zip"):
        load_samples(f"csv:{new}", like)


def test_a_table_for_a_run_of_arrays_is_taken_by_order(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    X[:, 1] = np.arange(40)
    np.savez(tmp_path / "x.npz", X=X, y=np.arange(40) % 2)
    like = load_source(f"npz:{tmp_path}/x.npz")
    new = tmp_path / "new.csv"
    pd.DataFrame(X[:4], columns=["a", "b", "c"]).to_csv(new, index=False)
    samples = load_samples(f"csv:{new}", like)
    rows = samples.dataset.tensors[0].numpy()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(rows, X[:4][:, [0, 2]])
    assert rows.dtype == np.float32
    assert any("taken by their order" in note for note in samples.notes)


def test_classes_that_are_equal_numbers_are_not_merged_in_silence(look: Look) -> None:
    with pytest.raises(RefusedError, match=r"must differ as numbers, too: received '07' and '7'"):
        look("x,kind\n1,07\n2,7\n4,07\n1,7\n2,8\n3,8\n")
    assert look("x,kind\n1,1.0\n2,2\n4,1\n1,2.0\n").classes == ("1.0", "2")


def test_a_compressed_table_is_read_alike(tmp_path: Path) -> None:
    table = noise().assign(code=[f"0{at % 7}" for at in range(90)])[["code", "a", "kind"]]
    table.to_csv(tmp_path / "t.csv.gz", index=False)
    with pytest.raises(RefusedError, match="leading zeros"):
        inspected(f"csv:{tmp_path}/t.csv.gz")
    assert "code=00" in inspected(f"csv:{tmp_path}/t.csv.gz", category=["code"]).features


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RefusedError, match="must name a regular file"):
        inspected(f"csv:{tmp_path}/pipe")


def test_a_run_keeps_what_was_left_out(tmp_path: Path) -> None:
    table = noise(60).assign(nr=range(60))[["nr", "a", "b", "kind"]].sample(frac=1, random_state=0)
    table.to_csv(tmp_path / "t.csv", index=False)
    root = tmp_path / "run"
    words = f"run --data csv:{tmp_path}/t.csv --folds 2 --epochs 1 --engine serial"
    more = f"--models mlp --schedulers constant --baseline none --no-report --root {root}"
    assert main([*words.split(), *more.split()]) == 0
    said = "column 'nr' is left out: it counts the samples (--keep nr uses it)"
    with RunStore.read(root) as store:
        assert said in store.about["data notes"]


def test_a_table_is_not_augmented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise().to_csv(tmp_path / "t.csv", index=False)
    words = ["run", "--data", f"csv:{tmp_path}/t.csv", "--augment", "--root", str(tmp_path / "r")]
    assert main(words) == 2
    assert "--augment crops and flips images: received it with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"drop": ["q"]}, "--drop must be a column of the file: received 'q'"),
        ({"keep": ["kind"]}, "--keep applies to features only: received the target"),
        (
            {"drop": ["a"], "keep": ["0"]},
            "a column is either a feature or none: received column 'a'",
        ),
        ({"drop": ["a", "b"]}, "must hold a feature besides the target"),
    ],
)
def test_columns_that_cannot_be_asked_for(look: Look, options: Any, rule: str) -> None:
    with pytest.raises(RefusedError, match=rule):
        look(noise(), **options)
