"""What models see is what the user gave: transforms and preprocess, types, positions, batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA
from sklearn.feature_selection import SelectKBest
from sklearn.impute import SimpleImputer
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    OneHotEncoder,
    StandardScaler,
    TargetEncoder,
)
from sklearn.random_projection import GaussianRandomProjection
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from asynckfold import (
    AsyncKFold,
    CVResults,
    Fold,
    InputError,
    RunStore,
    fit,
)
from asynckfold.data.arrays import as_given, rounded
from asynckfold.data.batches import Batches
from asynckfold.data.duplicates import copies
from asynckfold.data.prepare import prepare
from asynckfold.data.transforms.random_numbers import seeded
from asynckfold.jobs.folds import make_folds
from asynckfold.training.preprocessing import fit_transform
from tests.toy import Tiny, adam, samples

X, Y = samples()
TRAIN, VALID = np.arange(40), np.arange(40, 60)
FOLD = [(TRAIN, VALID)]


pytestmark = pytest.mark.usefixtures("no_worker_stays")


def trained(
    root: Path, dataset: Any = (X, Y), model: Any = Tiny, *, epochs: int = 2, **settings: Any
) -> CVResults:
    settings = {"verbose": 0, "baseline": None, "parallelize": False, "cv": 3, **settings}
    kfold = AsyncKFold(None, dataset, root, nn.CrossEntropyLoss(), 10, **settings)
    return kfold({"tiny": model}, ["constant"], adam, {"epochs": epochs})


def weights(results: CVResults) -> list[str | None]:
    return [result.weights for result in results.results.values()]


def told(results: CVResults) -> str:
    """The events of a run."""
    with RunStore.read(results.root_dir) as store:
        return "\n".join(event.text for event in store.events())


def accuracy(results: CVResults) -> float:
    return float(np.mean([result.scores["accuracy"] for result in results.results.values()]))


def batches(dataset: Any, *transforms: Any, preprocessed: bool = True) -> Batches:
    found = as_given(dataset, *(transforms or (None, None)), preprocessed=preprocessed)
    data = prepare(
        found.dataset, train_transform=found.train_transform, eval_transform=found.eval_transform
    )
    handle = data.handle()
    return handle.open(handle.fds)


def linear() -> nn.Module:
    return nn.Linear(8, 3)


# ---- transforms and preprocess ----


def erased(sample: Any) -> Any:
    return sample * 0 + 1


def shaken(sample: Any) -> Any:
    return sample + torch.randn(8).numpy()


def halved(sample: Any) -> Any:
    return sample / 2 + 1


class Augmented(Dataset[Any]):
    """Samples with a transform of their own."""

    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        sample = X[index].copy()
        return self.transform(sample) if self.transform else sample, int(Y[index])


def test_a_transform_of_the_train_view_acts_with_preprocess(tmp_path: Path) -> None:
    """Nothing can be learned of samples that are all the same."""
    settings = {"epochs": 6, "preprocess": StandardScaler()}
    kept = trained(tmp_path / "kept", **settings)
    views = {"train_transform": erased, "eval_transform": np.array}
    found = trained(tmp_path / "erased", **views, **settings)
    assert accuracy(kept) > 0.7
    assert accuracy(found) < 0.6


def test_preprocess_comes_after_the_transforms_of_both_views(tmp_path: Path) -> None:
    """As in a loop whose data set transforms a sample first and scales it then."""
    scaler = StandardScaler().fit((X / 2 + 1)[TRAIN])

    def scaled(sample: Any) -> Any:
        return scaler.transform(sample[None])[0].astype(np.float32)

    one = trained(
        tmp_path / "one",
        cv=FOLD,
        preprocess=StandardScaler(),
        train_transform=lambda sample: halved(sample) * 3,
        eval_transform=halved,
    )
    other = trained(
        tmp_path / "other",
        cv=FOLD,
        train_transform=lambda sample: scaled(halved(sample) * 3),
        eval_transform=lambda sample: scaled(halved(sample)),
    )
    assert weights(one) == weights(other)


@pytest.mark.parametrize(
    ("dataset", "transforms"),
    [((X, Y), (shaken, np.array)), (Augmented(shaken), (None, None))],
    ids=["train_transform", "of the data set"],
)
@pytest.mark.parametrize("scaler", [StandardScaler(), PCA(3)])
def test_random_transforms_are_drawn_anew_and_then_preprocessed(
    dataset: Any, transforms: Any, scaler: Any
) -> None:
    data = batches(dataset, *transforms)
    seen = fit_transform(data, scaler, TRAIN)
    by_hand = scaler.fit(X[TRAIN])
    rows = np.array([3, 41, 7])
    assert np.allclose(seen.eval(rows)[0], by_hand.transform(X[rows]), atol=1e-5)
    for epoch in (0, 1):
        raw = data.train(rows, 5, epoch)[0].numpy()
        assert not np.allclose(raw, X[rows], atol=0.1)
        drawn = seen.train(rows, 5, epoch)[0]
        assert drawn.dtype == torch.float32
        assert np.allclose(drawn, by_hand.transform(raw), atol=1e-5)
    assert not torch.equal(seen.train(rows, 5, 0)[0], seen.train(rows, 5, 1)[0])
    # Jobs that are trained as one get the bits that each gets alone.
    pairs = torch.tensor([[3, 41, 7], [1, 2, 3]])
    together = seen.train_together(pairs, [5, 6], 1)[0]
    alone = [seen.train(own, seed, 1)[0] for own, seed in zip(pairs, (5, 6), strict=True)]
    assert torch.equal(together, torch.stack(alone))


def test_jobs_trained_as_one_have_augmented_and_preprocessed_samples(tmp_path: Path) -> None:
    settings = {
        "preprocess": StandardScaler(),
        "train_transform": shaken,
        "eval_transform": np.array,
    }
    plain = trained(tmp_path / "plain", model=linear, fuse=False, **settings)
    fused = trained(tmp_path / "fused", model=linear, fuse=3, n_jobs=1, **settings)
    assert fused.plan.groups
    for name, result in plain.results.items():
        outputs = result.outputs, fused.results[name].outputs
        np.testing.assert_allclose(*outputs, atol=1e-3)  # type: ignore[call-overload]


def test_a_transformer_that_would_see_other_training_samples_later_is_refused(
    tmp_path: Path,
) -> None:
    encoder = TargetEncoder(target_type="multiclass")
    rest = FunctionTransformer(lambda rows: rows * 1e4)
    with pytest.raises(InputError, match=r"train_transform.*ColumnTransformer"):
        trained(
            tmp_path,
            (np.round(X[:, :2]), Y),
            lambda: nn.Linear(4, 3),
            preprocess=ColumnTransformer([("codes", encoder, [0]), ("rest", rest, [1])]),
            train_transform=lambda sample: sample,
            eval_transform=lambda sample: sample + 0,
        )


@pytest.mark.parametrize(
    "step",
    [
        StandardScaler(),
        SelectKBest(k=2),
        SimpleImputer(),
        StandardScaler().set_output(transform="pandas"),
        OneHotEncoder(handle_unknown="ignore"),
        TargetEncoder(target_type="multiclass"),
        ColumnTransformer([("one", StandardScaler(), [0, 2])]),
        make_pipeline(SimpleImputer(), StandardScaler(), PCA(3)),
    ],
    ids=lambda step: type(step).__name__,
)
def test_what_comes_out_is_what_a_pipeline_of_scikit_learn_gives(step: Any) -> None:
    x = np.round(X.astype(np.float64), 0)
    if not isinstance(step, (OneHotEncoder, TargetEncoder, SelectKBest)):
        x[::7, 1] = np.nan
    if isinstance(step, PCA):
        x = np.nan_to_num(x)
    pipeline = make_pipeline(step)
    found = fit_transform(batches((x, Y)), step, TRAIN)
    with seeded(0):
        own, rest = pipeline.fit_transform(x[TRAIN], Y[TRAIN]), pipeline.transform(x[VALID])
    for rows, wanted in ((TRAIN, own), (VALID, rest)):
        dense = wanted.toarray() if sparse.issparse(wanted) else np.asarray(wanted)
        for seen in (found.eval(rows)[0], found.train(rows, 0, 0)[0]):
            assert np.allclose(seen, dense, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("step", "received"),
    [
        (FunctionTransformer(lambda rows: rows[::2]), r"shape \(20, 8\) for 40 samples"),
        (FunctionTransformer(lambda rows: rows * 1j), "complex"),
        (FunctionTransformer(lambda rows: rows.astype(str)), "real numbers"),
        (ColumnTransformer([("a", StandardScaler(), ["a"])]), "ValueError: Specifying"),
        (PCA(90), "ValueError: n_components=90 must be"),
        (StandardScaler, "preprocess must work on .*: Cannot clone object"),
        ("scale", "preprocess must work on .*: Cannot clone object"),
    ],
    ids=["fewer", "complex", "texts", "names", "components", "class", "name"],
)
def test_what_comes_out_must_be_numbers_for_each_sample(
    tmp_path: Path, step: Any, received: str
) -> None:
    with pytest.raises(InputError, match=received):
        trained(tmp_path, preprocess=step)


def test_a_transformer_without_a_seed_is_the_same_in_each_attempt(tmp_path: Path) -> None:
    """Same numbers: what it draws is no matter of what the process drew before."""
    found = []
    for seed in range(2):
        np.random.seed(seed)  # noqa: NPY002
        results = trained(tmp_path / str(seed), preprocess=GaussianRandomProjection(8))
        found.append(weights(results))
        assert results.ensemble().predict(X).shape == (60,)
    assert found[0] == found[1]


def test_an_identity_changes_no_bit(tmp_path: Path) -> None:
    views = {"train_transform": shaken, "eval_transform": np.array}
    bare = trained(tmp_path / "bare", **views)
    same = trained(tmp_path / "same", preprocess=FunctionTransformer(), **views)
    assert weights(bare) == weights(same)


# ---- types ----

FAR = X.astype(np.float64) + 1e9


def test_preprocess_gets_doubles(tmp_path: Path) -> None:
    """1e9 + small are a few values only in float32."""
    near = trained(tmp_path / "near", model=linear, cv=2, preprocess=StandardScaler())
    for name, dataset, settings in (
        ("frame", (pd.DataFrame(FAR, index=np.arange(60) * 3), Y), {}),
        ("list", (FAR.tolist(), Y.tolist()), {}),
        ("data set", list(zip(FAR, Y.tolist(), strict=True)), {}),
        ("tensors", TensorDataset(torch.from_numpy(FAR), torch.from_numpy(Y)), {}),
        ("transformed", (FAR, Y), {"train_transform": np.array}),
    ):
        far = trained(
            tmp_path / name, dataset, linear, cv=2, preprocess=StandardScaler(), **settings
        )
        for job, result in near.results.items():
            outputs = result.outputs, far.results[job].outputs
            np.testing.assert_allclose(*outputs, atol=1e-3)  # type: ignore[call-overload]
        assert "float32" not in told(far)
        given = np.asarray(dataset[0]) if isinstance(dataset, tuple) else dataset
        answers = near.ensemble().outputs(X), far.ensemble().outputs(given)
        np.testing.assert_allclose(*answers, atol=1e-3)


def test_a_transform_gets_doubles() -> None:
    data = batches((FAR, Y), lambda row: row - 1e9, None, preprocessed=False)
    for seen in (data.eval(VALID)[0], data.train(VALID, 0, 0)[0]):
        assert seen.dtype == torch.float32
        assert np.array_equal(seen, (FAR[VALID] - 1e9).astype(np.float32))


def test_what_float32_loses_is_named_with_its_column(tmp_path: Path) -> None:
    table = pd.DataFrame(X.astype(np.float64), columns=list("abcdefgh"))
    table["when"] = 1.7e9 + np.linspace(0, 50, 60)
    results = trained(tmp_path / "cast", (table, Y), lambda: nn.Linear(9, 3))
    assert "column 'when' of X loses up to" in told(results)
    assert "pass preprocess=StandardScaler()" in told(results)
    kept = trained(
        tmp_path / "kept", (table, Y), lambda: nn.Linear(9, 3), preprocess=FunctionTransformer()
    )
    assert "column 8 of what preprocess gives loses up to" in told(kept)
    small = trained(tmp_path / "small", (X.astype(np.float64), Y))
    assert "converted from float64" in told(small)
    assert "loses" not in told(small)


def test_columns_that_float32_spoils_are_named_and_ordinary_ones_are_not() -> None:
    near = X[:, 0].astype(np.float64)
    ordinary = [
        [0.0, 1.0, 0.3] * 20,
        np.full(60, 0.1),
        2000 + np.arange(60) % 50,
        np.exp(near * 5),
        np.where(near > 1, np.nan, X[:, 1]),
        np.where(np.arange(60) == 3, 1e30, near),
        np.arange(60),
    ]
    spoiled = [
        1e9 + near,
        np.where(np.arange(60) % 7 == 0, -999.0, 1e9 + near),
        np.arange(60) + 2**30,
        np.arange(60) + 2**60,
        near * 1e39,
    ]
    for column in ordinary:
        assert rounded(np.asarray(column)[:, None]) == ""
    for column in spoiled:
        assert "column 0 of X loses up to" in rounded(np.asarray(column)[:, None])


def test_any_type_of_real_numbers_is_preprocessed_exactly() -> None:
    for kind in ("uint8", "int16", "int32", "bool", "float16", "bfloat16", "float32", "float64"):
        given = (torch.from_numpy(X) * 4).abs().to(getattr(torch, kind))
        data = batches(TensorDataset(given, torch.from_numpy(Y)))
        seen = fit_transform(data, StandardScaler(), TRAIN).eval(VALID)[0]
        exact = given.double().numpy()
        by_hand = StandardScaler().fit(exact[TRAIN]).transform(exact[VALID])
        assert np.allclose(seen, by_hand, atol=1e-5), kind
    whole = np.arange(60)[:, None] + 2**40
    seen = fit_transform(batches((whole, Y)), StandardScaler(), TRAIN).eval(VALID)[0]
    by_hand = StandardScaler().fit(whole[TRAIN]).transform(whole[VALID])
    assert np.array_equal(seen, by_hand.astype(np.float32)), "beyond float32"
    with pytest.raises(InputError, match=r"real numbers: received torch\.complex64"):
        fit_transform(batches((torch.from_numpy(X) * 1j, Y)), StandardScaler(), TRAIN)


def test_half_precision_is_trained_on_and_predicted_in_float32(tmp_path: Path) -> None:
    x = torch.from_numpy(X).to(torch.bfloat16)
    half = trained(tmp_path / "half", TensorDataset(x, torch.from_numpy(Y)))
    whole = trained(tmp_path / "whole", (x.float(), Y))
    assert weights(half) == weights(whole)
    assert "X was converted from" in told(half)
    assert np.array_equal(half.ensemble().outputs(x), whole.ensemble().outputs(x.float()))


def test_missing_features_are_told_where_they_are(tmp_path: Path) -> None:
    holed = X.copy()
    holed[::6, 2] = np.nan
    filled = trained(tmp_path / "filled", (holed, Y), preprocess=SimpleImputer())
    assert "10 of 60 samples hold NaN or infinite features before preprocess" in told(filled)
    assert "after preprocess" not in told(filled)
    with pytest.raises(
        InputError, match=r"NaN or infinity in the inputs of sample 0.*SimpleImputer"
    ):
        trained(tmp_path / "kept", (holed, Y), preprocess=StandardScaler())


# ---- positions ----

GAPS = np.random.default_rng(1).permutation(60) * 3


def test_an_index_of_pandas_changes_no_bit(tmp_path: Path) -> None:
    names = np.array(["a", "b", "c"])[Y]
    plain = trained(tmp_path / "plain", (X, names), groups=np.arange(60) // 2)
    tables = {
        "both": (pd.DataFrame(X, index=GAPS), pd.Series(names, index=GAPS[::-1])),
        "column": (pd.DataFrame(X, index=GAPS), pd.Series(names, index=GAPS, dtype="category")),
    }
    groups = pd.Series(np.arange(60) // 2, index=GAPS)
    for name, dataset in tables.items():
        found = trained(tmp_path / name, dataset, groups=groups)
        assert weights(found) == weights(plain), name
        assert np.array_equal(found.ensemble().outputs(dataset[0]), plain.ensemble().outputs(X))


def test_targets_and_folds_of_pandas_are_positions(tmp_path: Path) -> None:
    cv = [(TRAIN, VALID)]
    plain = trained(tmp_path / "plain", cv=cv, targets=Y[::-1].copy())
    for name, targets in {
        "series": pd.Series(Y[::-1], index=GAPS),
        "nullable": pd.Series(Y[::-1], index=GAPS, dtype="Int64"),
        "frame": pd.DataFrame({"y": Y[::-1]}, index=GAPS),
    }.items():
        found = trained(
            tmp_path / name,
            cv=[(pd.Index(TRAIN), pd.Series(VALID, index=VALID * 2))],
            targets=targets,
        )
        assert weights(found) == weights(plain), name


def test_fit_takes_positions(tmp_path: Path) -> None:
    def of(name: str, dataset: Any, valid: Any) -> Any:
        found = fit(
            linear,
            dataset,
            adam,
            nn.CrossEntropyLoss(),
            tmp_path / name,
            10,
            valid=valid,
            epochs=2,
            verbose=0,
            parallelize=False,
            preprocess=StandardScaler(),
        )
        return found.result.weights

    frame, series = pd.DataFrame(FAR, index=GAPS), pd.Series(Y, index=GAPS)
    wanted = of("arrays", (FAR, Y), VALID)
    assert of("numbers", (frame, series), pd.Series(VALID, index=VALID + 1)) == wanted
    assert (
        of("mask", (frame, series), pd.Series(np.isin(np.arange(60), VALID), index=GAPS)) == wanted
    )
    parts = (frame.iloc[TRAIN], series.iloc[TRAIN]), (frame.iloc[VALID], series.iloc[VALID])
    assert of("parts", *parts) == wanted
    with pytest.raises(InputError, match=r"a mask, must have an entry for each of the 60 samples"):
        of("short", (FAR, Y), np.ones(7, bool))
    named = [part.set_axis(list("abcdefgh"), axis=1) for part, _ in parts]
    reordered = (named[1][list("bacdefgh")], Y[VALID])
    assert of("columns", (named[0], Y[TRAIN]), reordered) == wanted
    with pytest.raises(InputError, match=r"columns of the data set.*where 'b' is missing"):
        of("lacking", (named[0], Y[TRAIN]), (named[1].drop(columns="b"), Y[VALID]))


def test_columns_in_another_order_are_predicted_by_name(tmp_path: Path) -> None:
    table = pd.DataFrame(X, columns=list("abcdefgh"))
    ensemble = trained(tmp_path, (table, Y)).ensemble()
    assert np.array_equal(ensemble.outputs(table), ensemble.outputs(X))
    reordered = table[list("hgfedcba")].assign(more=0)
    assert np.array_equal(ensemble.outputs(reordered), ensemble.outputs(X))
    with pytest.raises(InputError, match=r"'c' is missing"):
        ensemble.outputs(table.drop(columns="c"))


def test_tables_of_several_types_become_numbers() -> None:
    table = pd.DataFrame(
        {
            "whole": np.arange(4),
            "yes": [True, False, True, True],
            "nullable": pd.array([1, None, 3, 4], dtype="Int64"),
            "maybe": pd.array([True, None, False, True], dtype="boolean"),
            "object": np.array([1, 2.5, None, 4], dtype=object),
        },
        index=[9, 1, 4, 7],
    )
    found = as_given((table, Y[:4]), None, None, preprocessed=True).dataset[0]
    nan = np.nan
    wanted = [[0, 1, 1, 1, 1], [1, 0, nan, nan, 2.5], [2, 1, 3, 0, nan], [3, 1, 4, 1, 4]]
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == np.float64


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (sparse.csr_matrix(X), r"dense array: received csr_matrix\. Pass X\.toarray\(\)"),
        (sparse.coo_array(X), "dense array: received coo_array"),
        (torch.from_numpy(X).to_sparse(), r"dense array: received torch\.sparse_coo"),
        (np.ma.masked_greater(X, 2), r"not be masked: received an array with \d+ masked values"),
        (
            pd.DataFrame({"a": X[:, 0], "town": list("xyz") * 20, "day": pd.Timestamp("2020")}),
            r"numbers: received columns 'town' \((str|object)\), 'day' \(datetime64.*preprocess=",
        ),
        (pd.DataFrame({"a": pd.Categorical([1, 2] * 30)}), r"columns 'a' \(category\)"),
        (np.full((60, 2), "1.5"), "numbers: received an array of <U3"),
        ([[1, 2]] * 59 + [[1]], "X must be an array: received list"),
    ],
    ids=["csr", "coo", "torch", "masked", "mixed", "category", "texts", "ragged"],
)
def test_what_is_no_array_of_numbers_is_refused(tmp_path: Path, x: Any, text: str) -> None:
    # A preprocess gets a table as it is.
    more = [] if isinstance(x, pd.DataFrame) else [{"preprocess": StandardScaler()}]
    for settings in ({}, *more):
        with pytest.raises(InputError, match=text):
            trained(tmp_path, (x, Y), **settings)


def test_what_is_masked_nowhere_and_texts_with_a_transform_are_taken(tmp_path: Path) -> None:
    whole = np.ma.masked_greater(X, 1e9)
    assert weights(trained(tmp_path / "masked", (whole, Y))) == weights(trained(tmp_path / "plain"))
    texts = pd.DataFrame({"a": [f"{value:.3f}" for value in X[:, 0]]})
    read = trained(
        tmp_path / "texts",
        (texts, Y),
        lambda: nn.Linear(1, 3),
        train_transform=lambda row: torch.tensor([float(row[0])]),
    )
    assert read.counts["done"] == 3


@pytest.mark.parametrize(
    ("cv", "settings", "text"),
    [
        (KFold(3), {"groups": np.arange(60) % 30}, "a group must not be on both sides"),
        (StratifiedKFold(3), {"groups": np.arange(60) % 30}, "a group must not be on both sides"),
        ([(TRAIN, VALID)], {"groups": np.arange(60) // 7}, r"1 groups? in both"),
        (3, {"groups": [None, *range(59)]}, r"1 missing, the first of sample 0"),
        (3, {"groups": pd.Series([1.0, np.nan] * 30)}, "30 missing, the first of sample 1"),
        ([(np.arange(41), VALID)], {}, r"must not share samples: received 1 in both"),
        ([(np.ones(7, bool), VALID)], {}, r"a mask of all samples: received bool of shape \(7,\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:The groups parameter is ignored")
def test_folds_that_leak_are_refused(
    tmp_path: Path, cv: Any, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        trained(tmp_path, cv=cv, **settings)


# ---- copies ----


def test_copies_among_the_validation_samples_are_counted(tmp_path: Path) -> None:
    twice = np.concatenate([X, X]), np.concatenate([Y, Y])
    results = trained(tmp_path / "twice", twice, cv=KFold(4, shuffle=True, random_state=0))
    fold = results.folds[1]
    count = np.isin(fold.valid % 60, fold.train % 60).sum()
    assert "validation samples that equal a training sample: " in told(results)
    assert f"{count} of 30 in fold 1" in told(results)
    grouped = trained(tmp_path / "grouped", twice, groups=np.arange(120) % 60)
    assert "equal a training sample" not in told(grouped)
    assert "equal a training sample" not in told(trained(tmp_path / "plain"))


def test_samples_that_are_validated_on_by_intent_are_no_copies(tmp_path: Path) -> None:
    found = fit(
        linear,
        (X, Y),
        adam,
        nn.CrossEntropyLoss(),
        tmp_path,
        epochs=1,
        verbose=0,
        parallelize=False,
    )
    assert "equal a training sample" not in told(found.results)


def test_mirrored_images_are_copies_and_few_values_are_not() -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 255, (60, 1, 8, 8), dtype=np.uint8)
    folds = [Fold(0, 0, TRAIN, VALID)]
    assert copies(images, folds).note == ""
    images[40:50] = images[:10, :, :, ::-1]
    mirrored = copies(images, folds).note
    assert "equal a training sample or mirror one: 10 of 20 in fold 0." in mirrored
    assert copies(random.integers(0, 2, (60, 3)), folds).note == ""
    assert "one by one" in copies(None, folds).why_not
    iris = load_iris().data
    assert copies(iris, make_folds(150, iris, 5, stratify=False)).note == ""


# ---- evaluation ----


class Dropping(nn.Module):
    """Its dropout is on whatever the mode is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.linear(inputs), 0.5)


def normalised(**settings: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, **settings), nn.Linear(16, 3))


def test_the_best_candidate_is_refitted_on_what_it_was_validated_with(tmp_path: Path) -> None:
    settings = {"preprocess": StandardScaler(), "groups": pd.Series(np.arange(60) // 2, index=GAPS)}
    given = pd.DataFrame(FAR, index=GAPS), pd.Series(Y, index=GAPS)
    far = trained(tmp_path / "far", given, linear, refit=True, **settings)
    near = trained(tmp_path / "near", model=linear, refit=True, **settings)
    states = far.state_dict(fold="all"), near.state_dict(fold="all")
    for name, weight in states[0].items():
        torch.testing.assert_close(weight, states[1][name], atol=1e-4, rtol=0)
    assert far.refitted is not None
    assert "equal a training sample" not in told(far.refitted)


class Restless(Dataset[Any]):
    """Draws by itself, and has no transform that could be taken out."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return X[index] + torch.randn(8).numpy(), int(Y[index])


def test_validation_samples_that_are_random_are_told_of(tmp_path: Path) -> None:
    found = told(trained(tmp_path / "restless", Restless()))
    assert "the data set also varies validation samples at random" in found
    assert "validation samples were not searched for copies of training samples" in found
    plain = told(trained(tmp_path / "augmented", Augmented(shaken)))
    assert "random variants" not in plain
    assert "leaves out the random steps shaken" in plain


def test_such_a_model_is_told_of(tmp_path: Path) -> None:
    def odd() -> nn.Module:
        return normalised(track_running_stats=False)

    results = trained(tmp_path / "odd", model=odd)
    assert "model tiny: in evaluation, its outputs for a sample depend" in told(results)
    again = trained(tmp_path / "again", model=odd)
    assert weights(again) == weights(results)
    fused = trained(tmp_path / "fused", model=odd, fuse=3, n_jobs=1)
    assert fused.plan.groups
    for name, result in results.results.items():
        outputs = result.outputs, fused.results[name].outputs
        np.testing.assert_allclose(*outputs, atol=1e-4)  # type: ignore[call-overload]
    assert [item.scores for item in again.results.values()] == [
        item.scores for item in results.results.values()
    ]
    assert "outputs are random" in told(trained(tmp_path / "dropping", model=Dropping))
    assert "in evaluation" not in told(trained(tmp_path / "plain"))
