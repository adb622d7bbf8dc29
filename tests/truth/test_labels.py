"""Labels mean at every door what they mean in the user's data: no renumbering in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import torch
from sklearn import metrics
from torch import nn

from asynckfold import (
    AsyncKFold,
    CVResults,
    DistributedTester,
    InputError,
    PlanMismatchError,
    RunStore,
    fit,
    load_results,
)
from asynckfold.cli import main
from asynckfold.data.labels import resolve_labels
from tests.toy import samples

Array = npt.NDArray[Any]
X, CODES = samples(60)


def linear(outputs: int, *more: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, outputs), *more)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 5e-2)


def crossed(
    root: Path,
    labels: Any,
    models: Any,
    criterion: Any = None,
    epochs: int = 3,
    inputs: Any = X,
    **settings: Any,
) -> CVResults:
    criterion = nn.CrossEntropyLoss() if criterion is None else criterion
    models = models if isinstance(models, dict) else {"net": models}
    words = {"parallelize": False, "baseline": None, "verbose": 0, "fuse": False, **settings}
    kfold = AsyncKFold(3, (inputs, labels), root, criterion, 10, **words)
    return kfold(models, ["constant"], adam, {"epochs": epochs})


def notes(root: Path, kind: str = "note") -> list[str]:
    with RunStore.read(root) as store:
        return [event.text for event in store.events() if event.kind == kind]


def scores_of(results: CVResults, name: str) -> list[float]:
    return [results.results[job.id].scores[name] for job in results.plan.jobs]


def by_fold(results: CVResults, of: Callable[[Array, Array], float], labels: Array) -> list[float]:
    """Compute a score from what was recorded: outputs of each fold, and the labels given."""
    folds = {fold.key: fold.valid for fold in results.folds}
    return [
        of(labels[folds[job.repeat, job.fold]], results.results[job.id].outputs)  # type: ignore[arg-type]
        for job in results.plan.jobs
    ]


class Pretrained(nn.Module):
    """Knows the classes already: output 3 is class 3."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4, bias=False)
        weight = torch.zeros(4, 8)
        for code, label in enumerate((0, 1, 3)):
            weight[label, code] = 4.0
        self.layer.weight = nn.Parameter(weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(inputs)
        return found


def still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.0)


# Whole numbers are class indices as they are


def test_labels_with_a_gap_keep_their_outputs_weights_and_names(root: Path) -> None:
    labels = np.array([0, 1, 3])[CODES]
    seen: list[Array] = []

    def share_of_3(targets: Array, outputs: Array) -> float:
        seen.append(np.unique(targets))
        return float((targets == 3).mean())

    words = {"scoring": ["accuracy", "f1_macro", share_of_3], "parallelize": False}
    kfold = AsyncKFold(
        3,
        (X, labels),
        root,
        # Class 2, which no sample has, would be what class 3 is if they were numbered anew.
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 0.0, 1.0]), ignore_index=2),
        10,
        baseline=None,
        verbose=0,
        **words,
    )
    results = kfold({"net": Pretrained}, ["constant"], still, {"epochs": 1})
    assert np.mean(scores_of(results, "accuracy")) > 0.6
    direct = by_fold(results, lambda y, o: float(np.mean(o.argmax(1) == y)), labels)
    assert scores_of(results, "accuracy") == direct
    macro = by_fold(results, lambda y, o: metrics.f1_score(y, o.argmax(1), average="macro"), labels)
    assert scores_of(results, "f1_macro") == pytest.approx(macro)
    assert all(values.tolist() == [0, 1, 3] for values in seen)
    assert np.mean(scores_of(results, "share_of_3")) == pytest.approx(1 / 3)
    assert results.classes_ is not None
    assert results.classes_.tolist() == [0, 1, 2, 3]
    (outputs,) = results.oof.values()
    assert np.mean(outputs.argmax(axis=1) == labels) == np.mean(direct)
    assert np.mean(results.ensemble().predict(X) == labels) == pytest.approx(np.mean(direct))
    assert results.plan.objective is None
    assert results.plan.classes == ("0", "1", "2", "3")
    assert not any("numbered" in note for note in notes(root))


def test_the_model_that_is_handed_back_says_the_labels(root: Path) -> None:
    labels = np.array([1, 4, 6])[CODES]
    found = fit(
        linear(7)(), (X, labels), adam, nn.CrossEntropyLoss(), root, 10, epochs=8, verbose=0,
        parallelize=False, valid=range(40, 60),
    )  # fmt: skip
    with torch.no_grad():
        said = found.model.eval()(torch.from_numpy(X[40:])).argmax(1).numpy()
    assert np.mean(said == labels[40:]) == found.score > 0.6
    assert found.classes_ is not None
    assert found.classes_.tolist() == list(range(7))
    tester = DistributedTester([(torch.from_numpy(X[40:]), torch.from_numpy(labels[40:]))], root)
    assert tester(found.model).accuracy == found.score


def test_a_tester_refuses_labels_that_are_no_outputs(root: Path) -> None:
    for label in (3, -1):
        tester = DistributedTester([(torch.eye(3), torch.tensor([0, 1, label]))], root)
        with pytest.raises(InputError, match=f"of the 3 outputs, from 0: received {label}"):
            tester(nn.Identity())
    one = DistributedTester([(torch.ones(2, 1), torch.tensor([0, 0]))], root)
    with pytest.raises(InputError, match="one output a class"):
        one(nn.Identity())


# Strings, negative numbers and labels beyond the outputs are numbered, and say so


@pytest.mark.nightly(but=["values2-ant = 0, cat = 1, dog = 2"])
@pytest.mark.parametrize(
    ("values", "note"),
    [
        ([1, 2, 3], "1 = 0, 2 = 1, 3 = 2"),
        ([-1, 0, 1], "-1 = 0, 0 = 1, 1 = 2"),
        (["dog", "ant", "cat"], "ant = 0, cat = 1, dog = 2"),
        ([7, 1 << 40, 9], "7 = 0, 9 = 1, 1099511627776 = 2"),
    ],
)
def test_numbered_labels_are_undone_at_every_door(root: Path, values: Any, note: str) -> None:
    labels = np.array(values)[CODES]
    known = sorted(values)

    def hits(targets: Array, outputs: Array) -> float:
        assert set(targets.tolist()) <= set(values)
        return float(np.mean(np.array(known)[outputs.argmax(1)] == targets))

    results = crossed(root, labels, linear(3), scoring=["accuracy", "f1_macro", hits], epochs=6)
    told = notes(root)
    assert f"labels were numbered by sorted order: {note}" in told
    assert scores_of(results, "hits") == scores_of(results, "accuracy")
    assert np.mean(scores_of(results, "accuracy")) > 0.6
    assert results.classes_ is not None
    assert results.classes_.tolist() == known
    assert results.plan.classes == tuple(map(str, known))
    said = results.ensemble().predict(X)
    assert said.dtype.kind == labels.dtype.kind
    assert np.mean(said == labels) > 0.6
    (outputs,) = results.oof.values()
    direct = np.mean(results.classes_[outputs.argmax(axis=1)] == labels)
    assert direct == pytest.approx(np.mean(scores_of(results, "accuracy")))
    again = crossed(root, labels, linear(3), scoring=["accuracy", "f1_macro", hits], epochs=6)
    assert again.fingerprint == results.fingerprint
    assert again.plan == results.plan


def test_an_own_score_that_takes_labels_for_outputs_is_refused(root: Path) -> None:
    labels = np.array([1, 2, 3])[CODES]

    def naive(targets: Array, outputs: Array) -> float:
        return float(np.mean(outputs.argmax(1) == targets))

    with pytest.raises(InputError, match="class indices: received 0 for perfect outputs, 1 if"):
        crossed(root, labels, linear(3), scoring=naive)
    # The same labels are class indices where there are outputs for them.
    results = crossed(root, labels, linear(4), scoring=["accuracy", naive])
    assert scores_of(results, "naive") == scores_of(results, "accuracy")


def test_all_models_must_agree_on_what_a_label_means(root: Path) -> None:
    labels = np.array([1, 2, 3])[CODES]
    with pytest.raises(InputError, match="small has 3, large has 4"):
        crossed(root, labels, {"small": linear(3), "large": linear(4)})
    assert not root.exists()


def test_too_few_outputs_are_refused(root: Path) -> None:
    with pytest.raises(InputError, match="scores for the 3 classes: received shape"):
        crossed(root, CODES, linear(2))
    with pytest.raises(InputError, match="scores for the 3 classes: received shape"):
        crossed(root, CODES + 7, linear(2))


def test_names_of_classes_may_be_more_or_fewer_than_outputs(root: Path) -> None:
    labels = resolve_labels(CODES, ("a", "b", "c", "d"), task="multiclass")
    assert (labels.classes, labels.highest) == (("a", "b", "c", "d"), 2)
    assert resolve_labels(CODES, ("a", "b"), task="multiclass").classes == ("0", "1", "2")
    numbered = resolve_labels(CODES[CODES > 0], ("a", "b", "c"), task="multiclass").numbered()
    assert numbered.classes == ("b", "c")
    assert numbered.objective.labels == (1, 2)


@pytest.mark.parametrize(
    ("labels", "criterion", "outputs", "text"),
    [
        (
            CODES,
            nn.CrossEntropyLoss(weight=torch.ones(2)),
            3,
            "either for all 3 classes or no classes",
        ),
        (np.array([0, 1, 255])[CODES], nn.CrossEntropyLoss(ignore_index=255), 3, "Subset"),
        (np.array([0, 1, -100])[CODES], nn.CrossEntropyLoss(), 3, "ignored \\(-100\\)"),
        (CODES + 1, nn.CrossEntropyLoss(ignore_index=0), 3, "numbered labels must not be"),
        (CODES.astype(float), nn.CrossEntropyLoss(), 3, "targets.astype\\('int64'\\)"),
        (CODES, nn.BCEWithLogitsLoss(), 1, "needs labels of two classes, .* received 3 values"),
        (X[:, 0], nn.GaussianNLLLoss(), 2, "received GaussianNLLLoss. Write a function"),
    ],
)
def test_criteria_and_labels_that_do_not_fit(
    root: Path, labels: Any, criterion: Any, outputs: int, text: str
) -> None:
    with pytest.raises(InputError, match=text):
        crossed(root, labels, linear(outputs), criterion)


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(weight=torch.ones(3), label_smoothing=0.1),
        nn.CrossEntropyLoss(ignore_index=7),
        nn.MultiMarginLoss(),
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets),
    ],
)
def test_ordinary_criteria_say_nothing(root: Path, criterion: Any) -> None:
    results = crossed(root, CODES, linear(3), criterion, epochs=1)
    assert notes(root) == []
    direct = by_fold(results, lambda y, o: float(np.mean(o.argmax(1) == y)), CODES)
    assert scores_of(results, "accuracy") == direct


# One output for two classes

BITS = (X[:, 0] > 0.5).astype(np.float32)


@pytest.mark.nightly(but=["strings"])
@pytest.mark.parametrize("kind", ["column", "row", "int", "bool", "strings", "numbers"])
def test_one_output_of_log_odds_is_a_classifier(root: Path, kind: str) -> None:
    labels: Any = {
        "column": BITS[:, None],
        "row": BITS,
        "int": BITS.astype(int),
        "bool": BITS > 0,
        "strings": np.array(["no", "yes"])[BITS.astype(int)],
        "numbers": BITS.astype(int) + 1,
    }[kind]
    model = linear(1) if kind == "column" else linear(1, nn.Flatten(0))
    results = crossed(root, labels, model, nn.BCEWithLogitsLoss(), epochs=6, baseline="measure")
    assert results.plan.scoring == ("accuracy", "roc_auc")
    hits = by_fold(results, lambda y, o: float(np.mean((o.ravel() > 0) == y)), BITS)
    areas = by_fold(results, lambda y, o: metrics.roc_auc_score(y, o.ravel()), BITS)
    assert scores_of(results, "accuracy") == pytest.approx(hits)
    assert scores_of(results, "roc_auc") == pytest.approx(areas)
    assert np.mean(hits) > 0.6
    assert [item.epochs[-1].accuracy for item in results.results.values()] == pytest.approx(hits)
    assert results.baseline is not None
    assert [results.baseline.by_job[name] for name in results.results] == pytest.approx(
        hits, abs=0.06
    )
    # Folds keep the proportions of classes.
    shares = by_fold(results, lambda y, o: float(y.sum()), BITS)
    assert max(shares) - min(shares) <= 1
    flat = np.ravel(labels)
    said = results.ensemble().predict(X)
    assert said.shape == (60,)
    assert np.mean(said == flat) > 0.6


def test_probabilities_and_a_sigmoid_before_log_odds_are_cut_at_a_half(root: Path) -> None:
    model = linear(1, nn.Sigmoid(), nn.Flatten(0))
    for criterion in (nn.BCEWithLogitsLoss(), nn.BCELoss()):
        folder = root / type(criterion).__name__
        results = crossed(folder, BITS, model, criterion, epochs=6)
        hits = by_fold(results, lambda y, o: float(np.mean((o > 0.5) == y)), BITS)
        assert scores_of(results, "accuracy") == pytest.approx(hits)
        known = [item.epochs[-1].accuracy for item in results.results.values()]
        assert known == pytest.approx(hits)
    said = "net ends in a sigmoid or the like, and BCEWithLogitsLoss"
    assert said in notes(root / "BCEWithLogitsLoss")[0]
    assert notes(root / "BCELoss") == []


def test_signs_are_codes_of_two_classes(root: Path) -> None:
    labels = np.where(BITS > 0, "up", "down")
    results = crossed(root, labels, linear(1, nn.Flatten(0)), nn.SoftMarginLoss(), epochs=6)
    hits = by_fold(results, lambda y, o: float(np.mean((o > 0) == y)), BITS)
    assert scores_of(results, "accuracy") == pytest.approx(hits)
    assert np.mean(results.ensemble().predict(X) == labels) > 0.6
    assert "labels were numbered by sorted order: down = -1, up = 1" in notes(root)


# Criteria of the user's own


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs.squeeze(1), targets.float())


def test_an_own_criterion_of_one_output_is_asked_what_it_means(root: Path) -> None:
    labels = BITS.astype(int)
    with pytest.raises(InputError, match="Pass output_transform= with a function"):
        crossed(root, labels, linear(1), own_loss)
    results = crossed(root, labels, linear(1), own_loss, output_transform=torch.sigmoid, epochs=6)
    hits = by_fold(results, lambda y, o: float(np.mean((o[:, 0] > 0) == y)), labels)
    assert scores_of(results, "accuracy") == pytest.approx(hits)
    assert results.ensemble().predict_proba(X).shape == (60, 2)
    with pytest.raises(PlanMismatchError, match="objective"):
        crossed(
            root, labels, linear(1), own_loss, output_transform=lambda o: o.sigmoid() ** 2, epochs=6
        )
    free = crossed(root.with_name("free"), labels, linear(1), own_loss,
                   scoring=lambda y, o: float(np.mean((o[:, 0] > 0) == y)))  # fmt: skip
    assert np.mean(scores_of(free, "<lambda>")) > 0.5


def test_0_and_1_of_an_own_criterion_may_be_numbers_or_classes(root: Path) -> None:
    with pytest.raises(InputError, match=r"task='binary' and output_.* task='regression'"):
        crossed(root, BITS, linear(1), own_loss)
    numbers = crossed(root / "r2", BITS, linear(1), own_loss, scoring="r2")
    assert numbers.plan.scoring == ("r2",)
    classes = crossed(root / "auc", BITS, linear(1), own_loss, output_transform=torch.sigmoid)
    hits = by_fold(classes, lambda y, o: float(np.mean((o[:, 0] > 0) == y)), BITS)
    assert scores_of(classes, "accuracy") == pytest.approx(hits)


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (lambda outputs: outputs * 7, "must give probabilities, from 0 to 1"),
        (lambda outputs: outputs.sum(), "shape"),
        (lambda outputs: outputs.missing(), "AttributeError"),
        ("sigmoid", "output_transform must be a function of outputs"),
    ],
)
def test_odd_transforms_are_refused(root: Path, transform: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        crossed(root, BITS.astype(int), linear(1), own_loss, output_transform=transform)


# Several labels of a sample

ROWS = np.stack([X[:, 0] > 0.5, X[:, 1] > 0.5], axis=1)


@pytest.mark.parametrize("criterion", [nn.MultiLabelSoftMarginLoss(), nn.SoftMarginLoss()])
def test_rows_of_labels_are_scored_as_such(root: Path, criterion: Any) -> None:
    labels = np.where(ROWS, 1, -1) if isinstance(criterion, nn.SoftMarginLoss) else ROWS
    scoring = ["accuracy", "f1_micro", "roc_auc", "average_precision"]
    results = crossed(root, labels.astype(np.float32), linear(2), criterion, 6, scoring=scoring)
    whole = by_fold(results, lambda y, o: float(np.mean(((o > 0) == y).all(1))), ROWS)
    micro = by_fold(results, lambda y, o: metrics.f1_score(y, o > 0, average="micro"), ROWS)
    area = by_fold(results, lambda y, o: metrics.roc_auc_score(y, o), ROWS)
    assert scores_of(results, "accuracy") == pytest.approx(whole)
    assert scores_of(results, "f1_micro") == pytest.approx(micro)
    assert scores_of(results, "roc_auc") == pytest.approx(area)
    assert [item.epochs[-1].accuracy for item in results.results.values()] == pytest.approx(whole)
    assert results.ensemble().predict(X).shape == (60, 2)
    assert results.classes_ is None


# The scale of outputs


def test_a_softmax_before_cross_entropy_is_said_and_not_taken_twice(root: Path) -> None:
    models = {"plain": linear(3), "twice": linear(3, nn.Softmax(dim=1))}
    results = crossed(root, CODES, models, scoring=["neg_log_loss", "accuracy"], epochs=6)
    told = notes(root)
    assert len(told) == 1
    assert told[0].startswith("model twice ends in a softmax")

    def loss(labels: Array, outputs: Array) -> float:
        shares = outputs.astype(float)
        if (shares.min() < 0) or np.abs(shares.sum(1) - 1).max() > 1e-3:
            shares = torch.from_numpy(shares).softmax(1).numpy()
        return float(np.log(shares[np.arange(len(labels)), labels]).mean())

    assert scores_of(results, "neg_log_loss") == pytest.approx(by_fold(results, loss, CODES))
    shares = results.ensemble("twice/constant").predict_proba(X)
    outputs = results.ensemble("twice/constant").outputs(X)
    np.testing.assert_allclose(shares, outputs, atol=1e-5)
    # A run that is continued with another candidate is the same for those that it has.
    more = {**models, "third": linear(3, nn.Softmax(dim=1))}
    again = crossed(root, CODES, more, scoring=["neg_log_loss", "accuracy"], epochs=6)
    assert scores_of(again, "neg_log_loss")[:6] == scores_of(results, "neg_log_loss")


def test_rates_of_PoissonNLLLoss_are_scored_as_rates(root: Path) -> None:
    counts = np.random.default_rng(0).poisson(np.exp(X[:, :1])).astype(np.float32)
    results = crossed(root, counts, linear(1), nn.PoissonNLLLoss(), epochs=10)
    wanted = by_fold(results, lambda y, o: metrics.r2_score(y, np.exp(o)), counts)
    assert scores_of(results, "r2") == pytest.approx(wanted, rel=1e-4)
    found = results.ensemble()
    with torch.no_grad():
        each = [np.exp(results.model(fold=fold)(torch.from_numpy(X)).numpy()) for fold in range(3)]
    np.testing.assert_allclose(found.predict(X), np.mean(each, axis=0)[:, 0], rtol=1e-4)


def test_soft_labels_are_numbers_on_the_scale_of_probabilities(root: Path) -> None:
    shares = (0.1 + 0.8 * BITS)[:, None].astype(np.float32)
    results = crossed(root / "bce", shares, linear(1), nn.BCEWithLogitsLoss(), epochs=6)
    wanted = by_fold(results, lambda y, o: metrics.r2_score(y, 1 / (1 + np.exp(-o))), shares)
    assert scores_of(results, "r2") == pytest.approx(wanted, rel=1e-4)
    rows = np.hstack([shares, 1 - shares])
    results = crossed(
        root / "kl", rows, linear(2, nn.LogSoftmax(dim=1)), nn.KLDivLoss(reduction="batchmean")
    )
    wanted = by_fold(results, lambda y, o: metrics.r2_score(y, np.exp(o)), rows)
    assert scores_of(results, "r2") == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("criterion", "labels"),
    [
        (nn.HingeEmbeddingLoss(), np.where(BITS > 0, 1, -1)),
        (nn.MultiLabelMarginLoss(), CODES[:, None]),
        (nn.TripletMarginLoss(), CODES),
    ],
)
def test_criteria_that_do_not_tell_what_outputs_mean_are_asked(
    root: Path, criterion: Any, labels: Any
) -> None:
    with pytest.raises(InputError, match=r"Use|output_transform|Write a function"):
        crossed(root, labels, linear(1, nn.Flatten(0)), criterion)


@pytest.mark.parametrize("bits", [False, True])
def test_jobs_trained_as_one_mean_the_same(root: Path, bits: bool) -> None:
    labels = BITS[:, None] if bits else np.array([0, 1, 3])[CODES]
    criterion = nn.BCEWithLogitsLoss() if bits else nn.CrossEntropyLoss()
    results = crossed(root, labels, linear(1 if bits else 4), criterion, fuse=3)
    assert len(results.plan.groups) == 1
    right = (lambda y, o: float(np.mean((o > 0) == y))) if bits else (
        lambda y, o: float(np.mean(o.argmax(1) == y))
    )  # fmt: skip
    hits = by_fold(results, right, labels)
    assert scores_of(results, "accuracy") == pytest.approx(hits)
    assert [results.results[job.id].epochs[-1].accuracy for job in results.plan.jobs] == (
        pytest.approx(hits)
    )


def test_margins_have_no_probabilities(root: Path) -> None:
    with pytest.raises(InputError, match="attributes: predict_proba"):
        crossed(root, CODES, linear(3), nn.MultiMarginLoss(), scoring="neg_log_loss")
    results = crossed(root, CODES, linear(3), nn.MultiMarginLoss())
    assert set(results.ensemble().predict(X).tolist()) <= {0, 1, 2}
    with pytest.raises(InputError, match="whose probabilities are known"):
        results.ensemble().predict_proba(X)


# Folds and scores that do not fit


def test_an_undefined_score_is_named_and_is_no_number(root: Path) -> None:
    folds = [(np.arange(30, 60), np.flatnonzero(BITS[:30] > 0)), (np.arange(30), np.arange(30, 60))]
    results = AsyncKFold(
        folds, (X, BITS), root, nn.BCEWithLogitsLoss(), 10, parallelize=False, baseline=None,
        verbose=0,
    )({"net": linear(1, nn.Flatten(0))}, ["constant"], adam, {"epochs": 1})  # fmt: skip
    areas = scores_of(results, "roc_auc")
    assert np.isnan(areas[0])
    assert 0 <= areas[1] <= 1
    (text,) = notes(root, "score")
    assert text.startswith("roc_auc is undefined: Only one class is present in y_true")


@pytest.mark.parametrize(
    ("labels", "criterion", "scoring"),
    [
        (X[:, :1], nn.MSELoss(), "accuracy"),
        (X[:, :1], nn.MSELoss(), "roc_auc"),
        (BITS[:, None], nn.MSELoss(), "accuracy"),
        (ROWS.astype(np.float32), nn.BCEWithLogitsLoss(), "matthews_corrcoef"),
    ],
)
def test_scores_that_do_not_fit_the_targets_are_refused_before_the_start(
    root: Path, labels: Any, criterion: Any, scoring: str
) -> None:
    with pytest.raises(InputError, match="scoring must fit the labels"):
        crossed(root, labels, linear(labels.shape[1]), criterion, scoring=scoring)


def test_a_continued_run_means_the_same(root: Path) -> None:
    labels = BITS.astype(int) + 1
    results = crossed(root, labels, linear(2), scoring="f1", pos_label=2)
    wanted = by_fold(
        results, lambda y, o: metrics.f1_score(y, o.argmax(1) + 1, pos_label=2), labels
    )
    assert scores_of(results, "f1") == pytest.approx(wanted)
    with pytest.raises(PlanMismatchError, match="pos_label: 2 there, null here"):
        crossed(root, labels, linear(2), scoring="f1")
    usual = crossed(root.with_name("usual"), labels, linear(2), scoring="f1")
    wanted = by_fold(usual, lambda y, o: metrics.f1_score(y, o.argmax(1) + 1), labels)
    assert scores_of(usual, "f1") == pytest.approx(wanted)


def test_a_refitted_model_means_the_same(root: Path) -> None:
    labels = np.array(["dog", "ant", "cat"])[CODES]
    results = crossed(root, labels, linear(3), refit=True, epochs=6)
    alone = results.refitted
    assert alone is not None
    assert alone.classes_ is not None
    assert alone.classes_.tolist() == ["ant", "cat", "dog"]
    said = results.best_estimator_(torch.from_numpy(X)).argmax(1).numpy()
    assert np.mean(alone.classes_[said] == labels) > 0.6


def test_probabilities_of_an_own_criterion_are_said_to_be_assumed(root: Path) -> None:
    def own(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)

    results = crossed(root, CODES, linear(3), own, scoring=["neg_log_loss", "accuracy"])
    (note,) = notes(root)
    assert "taken to be the softmax of outputs of net" in note

    def loss(labels: Array, outputs: Array) -> float:
        shares = torch.from_numpy(outputs.astype(float)).softmax(1).numpy()
        return float(np.log(shares[np.arange(len(labels)), labels]).mean())

    assert scores_of(results, "neg_log_loss") == pytest.approx(by_fold(results, loss, CODES))


# The command line


@pytest.mark.nightly
def test_the_command_takes_the_positive_class_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(labels: Any, name: str, *more: str) -> int:
        path, root = tmp_path / f"{name}.csv", tmp_path / name
        pd.DataFrame(X).add_prefix("x").assign(label=labels).to_csv(path, index=False)
        words = f"run --data csv:{path} --root {root} --models mlp --epochs 2 --folds 3 --quiet"
        return main([*words.split(), "--engine", "serial", "--scoring", "f1,accuracy", *more])

    labels = BITS.astype(int) + 1
    assert command(labels, "two", "--pos-label", "2") == 0
    with RunStore.read(tmp_path / "two") as store:
        results = load_results(store)
    wanted = by_fold(
        results, lambda y, o: metrics.f1_score(y, o.argmax(1) + 1, pos_label=2), labels
    )
    assert scores_of(results, "f1") == pytest.approx(wanted)
    assert command(np.array(["no", "yes"])[BITS.astype(int)], "words") == 2
    assert "Pass --pos-label yes" in capsys.readouterr().err
