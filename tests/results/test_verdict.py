"""The verdict says which model and which LR schedule is better, and never more than folds show."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from asynckfold import Verdict
from tests.outcomes import NAN, Scores, folds_of, results_of

Floats = npt.NDArray[np.float64]

LENET = [0.981, 0.986, 0.983, 0.979, 0.988]
MLP = [0.957, 0.966, 0.958, 0.958, 0.964]
"""2.3 points below `LENET`, on each of 5 folds."""


def verdict_of(
    scores: Scores, metric: str = "accuracy", state: str = "failed", **given: Any
) -> Verdict:
    folds = folds_of(len(next(iter(scores.values()))), **given)
    return results_of(scores, metric, folds=folds, state=state).verdict


def plus(scores: Sequence[float], *more: float) -> list[float]:
    return [score + change for score, change in zip(scores, more * len(scores), strict=False)]


def test_a_notebook_shows_the_first_sentence_in_bold_and_escapes_names() -> None:
    found = verdict_of({"B<b>/step": MLP, "LeNet5/step": plus(MLP, 0.001, -0.001)})
    shown = found._repr_html_()
    first, *others = map(html.escape, found.sentences)
    assert shown.startswith(f"<p><b>{first}</b></p>{''.join(f'<p>{text}</p>' for text in others)}")
    assert "B&lt;b&gt;" in shown
    assert found.outlook
    assert html.escape(found.outlook) in shown


# Two factors


def test_a_model_wins_and_its_lr_schedules_are_undecided() -> None:
    found = verdict_of(
        {
            "MLP/constant": MLP,
            "MLP/cosine": plus(MLP, 0.001, -0.001),
            "LeNet5/constant": LENET,
            "LeNet5/cosine": plus(LENET, 0.002, -0.002, 0.001, -0.003, 0.0),
        }
    )
    assert str(found) == (
        "LeNet5 beats MLP by 2.3 points, on 5 of 5 folds (95 % interval 1.8 to 2.7). "
        "constant against cosine: undecided (p = 0.79)."
    )
    assert (found.best_models, found.best_lr_schedules) == (("LeNet5",), ("constant", "cosine"))
    assert found.best is None
    (models,), (lr_schedules,) = found.models, found.lr_schedules
    # The LR schedules are compared with the best model alone.
    assert lr_schedules.mean == pytest.approx(0.0004)
    assert models.mean == pytest.approx(np.mean(LENET) - 0.0002 - np.mean(MLP) - 0.0001)


def test_a_lr_schedule_can_win_where_models_do_not_differ() -> None:
    found = verdict_of(
        {
            "A/x": LENET,
            "A/y": plus(LENET, -0.023, -0.024),
            "B/x": plus(LENET, 0.001, -0.002),
            "B/y": plus(LENET, -0.024, -0.023),
        }
    )
    assert found.sentences[0].startswith("A against B: undecided (p = ")
    assert found.sentences[1].startswith("x beats y by 2.3 points, on 5 of 5 folds")
    assert (found.best_models, found.best_lr_schedules) == (("A", "B"), ("x",))
    assert found.best is None
    assert "best" not in str(found)


def test_another_candidate_has_the_highest_mean() -> None:
    found = verdict_of(
        {
            "A/x": LENET,
            "A/y": LENET,
            "B/x": plus(LENET, 0.005, 0.006),
            "B/y": plus(LENET, -0.1, -0.11),
        }
    )
    assert found.best_models == ("A",)
    assert found.best is None
    assert found.sentences[0] == "B/x has the highest mean, although B is beaten on average."
    assert found.sentences[1].startswith("A beats B by ")


# One factor, and none


def negative(scores: Sequence[float]) -> list[float]:
    return [-score for score in scores]


ACCURACY, WON = "accuracy", "by 2.3 points, on 5 of 5 folds (95 % interval 1.9 to 2.7)."
INCOMPLETE = "Incomplete, and not ranked: "


@pytest.mark.parametrize(
    ("scores", "metric", "said", "best"),
    [
        ({"A/x": LENET, "A/y": MLP}, ACCURACY, f"x beats y {WON}", "A/x"),
        ({"A/x": LENET, "B/x": MLP}, ACCURACY, f"A beats B {WON}", "A/x"),
        (
            {"A/x": LENET},
            ACCURACY,
            "A/x is the only candidate: accuracy 0.9834 over 5 folds.",
            None,
        ),
        (
            {"A/x": [0.9], "B/x": [0.8]},
            ACCURACY,
            "A is ahead of B by 10.0 points on the only fold; a test needs at least two folds.",
            None,
        ),
        ({"A/x": LENET, "B/x": LENET}, ACCURACY, "A and B have equal scores on all 5 folds.", None),
        (
            {"A/x": [0.9, 0.8], "B/x": [0.8, 0.75]},
            ACCURACY,
            "A against B: undecided (p = 0.25). Two folds make a weak test.",
            None,
        ),
        (
            {"A/x": [0.75, 0.5, 0.25], "B/x": [0.5, 0.25, 0.0]},
            ACCURACY,
            "A is ahead of B by 25.0 points on each of 3 folds; without a spread no test is "
            "possible.",
            None,
        ),
        (
            {"A/x": LENET, "B/x": [*MLP[:3], NAN, NAN]},
            ACCURACY,
            "A beats B by 2.3 points, on 3 of the 3 folds that both have (95 % interval 1.4 to "
            f"3.2). {INCOMPLETE}B/x (failed, 3 of 5 folds).",
            "A/x",
        ),
        (
            {"A/x": [0.9, NAN], "B/x": [NAN, 0.9]},
            ACCURACY,
            "A against B: not compared, as no fold has a score of both. No candidate has an "
            f"accuracy on every fold, so none is best. {INCOMPLETE}A/x (failed, 1 of 2 folds) and "
            "B/x (failed, 1 of 2 folds).",
            None,
        ),
        (
            {"A/x": negative(LENET), "B/x": negative(MLP)},
            "neg_root_mean_squared_error",
            "B beats A by 0.023 in root mean squared error, on 5 of 5 folds "
            "(95 % interval 0.019 to 0.027).",
            "B/x",
        ),
        (
            {"A/x": LENET, "B/x": [*plus(LENET, 0.002, -0.001, -0.003)[:3], NAN, NAN]},
            ACCURACY,
            "A against B: undecided (p = 0.76; on the 3 folds that both have). "
            f"{INCOMPLETE}B/x (failed, 3 of 5 folds).",
            None,
        ),
        (
            {
                "A/x": LENET,
                "A/y": plus(LENET, 0.010, 0.011),
                "B/x": MLP,
                "B/y": plus(MLP, 0.009, 0.012),
            },
            ACCURACY,
            "A beats B by 2.3 points, on 5 of 5 folds (95 % interval 1.8 to 2.8). "
            "y beats x by 1.0 points, on 5 of 5 folds (95 % interval 0.9 to 1.1).",
            "A/y",
        ),
        (
            {"A/x": [-0.1, -0.2, -0.3], "B/x": [-math.inf, -0.1, -0.2]},
            "neg_log_loss",
            "A against B: not compared, as a score is infinite.",
            None,
        ),
    ],
)
def test_the_verdict_in_words(scores: Scores, metric: str, said: str, best: str | None) -> None:
    found = verdict_of(scores, metric)
    assert str(found) == said
    assert found.best == best


def test_many_models() -> None:
    scores = {"best/x": LENET, "near/x": plus(LENET, -0.001, 0.001)}
    scores |= {f"m{number}/x": plus(MLP, -number / 10, -number / 10 - 0.001) for number in range(6)}
    found = verdict_of(scores)
    assert [sentence.partition(" by")[0] for sentence in found.sentences] == [
        "best against near: undecided (p = 0.8).",
        "best beats m0",
        "best beats m1",
        "best beats m2, m3, m4 and 1 more.",
    ]
    assert len(found.models) == 28
    assert found.best_models == ("best", "near")


# By hand


def corrected(first: Floats, second: Floats, ratio: float) -> tuple[float, float]:
    """Half of the 95 % interval, and p, of Nadeau and Bengio (2003), from scipy's paired t test."""
    count = len(first)
    plain = stats.ttest_rel(first, second)
    wider = math.sqrt((1 / count + ratio) / (1 / count))
    low, high = plain.confidence_interval(0.95)
    return wider * (high - low) / 2, 2 * stats.t.sf(abs(plain.statistic) / wider, count - 1)


def by_hand(means: Mapping[str, Floats], others: int) -> dict[tuple[str, str], tuple[float, float]]:
    """The same of all pairs, the higher mean first, p by Holm (1979) with further comparisons."""
    ordered = sorted(means, key=lambda name: -means[name].mean())
    raw = {
        pair: corrected(means[pair[0]], means[pair[1]], 0.25)
        for pair in itertools.combinations(ordered, 2)
    }
    found, least = {}, 0.0
    for done, pair in enumerate(sorted(raw, key=lambda pair: raw[pair][1])):
        half, p = raw[pair]
        least = max(least, min(1.0, (len(raw) + others - done) * p))
        found[pair] = half, least
    return found


@pytest.mark.parametrize(("seed", "repeats"), [(0, 1), (1, 3), (2, 1)])
def test_a_verdict_by_hand(seed: int, repeats: int) -> None:
    rng, levels = np.random.default_rng(seed), {"A": 0.0, "B": 0.1, "C": 2.0}
    scores = {
        f"{model}/{lr}": level + rng.normal(0, 0.2, 5 * repeats)
        for model, level in levels.items()
        for lr in "xy"
    }
    rows = {name: values.tolist() for name, values in scores.items()}
    found = verdict_of(rows, "profit", repeats=repeats)
    models = {model: (scores[f"{model}/x"] + scores[f"{model}/y"]) / 2 for model in levels}
    beaten, undecided = set(), 0
    expected = by_hand(models, 1)
    assert {(pair.first, pair.second) for pair in found.models} == {*expected}
    for pair in found.models:
        half, p = expected[pair.first, pair.second]
        assert pair.p == pytest.approx(p)
        assert (pair.ci_high - pair.mean, pair.mean - pair.ci_low) == pytest.approx((half, half))
        beaten |= {pair.second} if p < 0.05 else set()
        undecided += p >= 0.05
    assert {*found.best_models} == {*models} - beaten == {"C"}
    lr_schedules = {lr: scores[f"C/{lr}"] for lr in "xy"}
    (pair,) = found.lr_schedules
    half, p = by_hand(lr_schedules, undecided)[pair.first, pair.second]
    assert pair.p == pytest.approx(p)
    assert pair.ci_high - pair.mean == pytest.approx(half)


# Few folds, equal folds, repeats


def test_repeats() -> None:
    more = [-0.01, -0.012, -0.002, -0.018, -0.011]
    a, b = [0.9] * 50, plus([0.9] * 50, *more)
    found = verdict_of({"A/x": a, "B/x": b}, repeats=10)
    assert "on 50 of 50 folds (10 repeats; 95 % interval " in str(found)
    # The overlap of the training folds does not shrink with more repeats.
    half = (found.models[0].ci_high - found.models[0].ci_low) / 2
    assert half > 1.96 * math.sqrt(0.25) * float(np.std(more * 10, ddof=1))
    near = verdict_of({"A/x": a, "B/x": plus(a, *more, 0.01, 0.02)}, repeats=10)
    assert str(near) == "A against B: undecided (p = 0.61; 10 repeats)."


@pytest.mark.parametrize(("gap", "expected"), [(0.025, 2), (0.0195, 3), (0.01, None)])
def test_what_would_decide_by_hand(gap: float, expected: int | None) -> None:
    changes = [gap + change for change in (0.01, -0.01, 0.02, -0.02, 0.0)]
    spread = float(np.std(changes, ddof=1))
    enough = [
        repeats
        for repeats in range(2, 101)
        if 2 * stats.t.sf(gap / (spread * math.sqrt(1 / (5 * repeats) + 0.25)), 5 * repeats - 1)
        < 0.05
    ]
    assert min(enough, default=None) == expected
    scores = {"A/x": [0.8] * 5, "B/x": plus([0.8] * 5, *changes)}
    outlook = verdict_of(scores).outlook
    if expected is None:
        assert outlook.startswith("If the difference stays, more repeats do not decide B against A")
    else:
        more = f"about {5 * expected - 5} more folds decide B against A, {expected} repeats in all."
        assert outlook == f"If the difference stays, {more}"
    # Neither before all folds have ended, nor after a decision.
    assert not verdict_of({**scores, "B/x": [*scores["B/x"][:4], NAN]}, state="pending").outlook
    assert not verdict_of({"A/x": [0.8] * 5, "B/x": plus([0.8] * 5, 0.1, 0.11)}).outlook


# Folds without a score


def test_a_failed_fold_of_one_model_takes_none_from_the_lr_schedules_of_another() -> None:
    found = verdict_of(
        {
            "A/x": LENET,
            "A/y": plus(LENET, 0.010, 0.011),
            "B/x": [*LENET[:1], NAN, NAN, NAN, NAN],
            "B/y": [*LENET[:1], NAN, NAN, NAN, NAN],
        }
    )
    assert found.best_models == ("A", "B")
    assert found.sentences[0] == (
        "A is ahead of B by 0.50 points on the only fold that both have; a test needs at least two "
        "folds."
    )
    assert found.sentences[1].startswith("With A, y beats x by 1.0 points, on 5 of 5 folds")


def test_a_model_counts_where_it_has_all_lr_schedules() -> None:
    bad = [0.1] * 5
    found = verdict_of({"A/x": LENET, "A/y": bad, "B/x": MLP, "B/y": [*bad[:3], NAN, NAN]})
    assert [(pair.folds, pair.won) for pair in found.models] == [(3, 3)]
    # A mean of B over x alone would win by far.
    assert found.models[0].first == "A"


def test_a_lr_schedule_that_a_model_fails_with_does_not_count() -> None:
    found = verdict_of({"A/x": MLP, "A/y": [0.1] * 5, "B/x": LENET, "B/y": [NAN] * 5})
    assert found.models[0].first == "B"
    assert found.models[0].mean == pytest.approx(np.mean(LENET) - np.mean(MLP))
    assert found.sentences[-2:] == (
        "Models are compared with x alone, since not all have a score with the others.",
        "Incomplete, and not ranked: B/y (failed, 0 of 5 folds).",
    )


def test_a_budget_that_ended_early() -> None:
    part = {"A/x": [*LENET[:4], NAN], "B/x": [*MLP[:4], NAN], "C/x": [NAN] * 5}
    found = verdict_of(part, state="pending")
    assert found.sentences[0].startswith(
        "So far, A beats B by 2.3 points, on 4 of the 4 folds that both have"
    )
    assert found.sentences[1:] == (
        "No candidate has an accuracy on every fold, so none is best.",
        "Incomplete, and not ranked: A/x (pending, 4 of 5 folds), B/x (pending, 4 of 5 folds) "
        "and C/x (pending, 0 of 5 folds).",
    )
    assert found.best is None


@pytest.mark.parametrize("names", [["A/x"], ["A/x", "A/y", "B/x", "B/y"]])
def test_nothing_scored(names: list[str]) -> None:
    begun = verdict_of({name: [NAN] * 3 for name in names}, state="pending")
    assert str(begun) == "No fold has a score yet."
    failed = verdict_of({name: [NAN] * 3 for name in names})
    assert failed.sentences[0] == "No candidate has an accuracy on every fold, so none is best."
    assert failed.sentences[1].startswith("Incomplete, and not ranked: A/x (failed, 0 of 3 folds)")
    for found in (begun, failed):
        assert (found.best, found.models, found.lr_schedules) == (None, (), ())


# Units


def test_units() -> None:
    for metric, factor, said in (
        ("accuracy", 1, "by 2.3 points, on"),
        ("f1_macro", 1, "by 2.3 points in f1_macro, on"),
        ("accuracy", 0.01, "by 0.023 points, on"),
        # Percent, by its values.
        ("accuracy", 100, "by 2.3 in accuracy, on"),
        ("r2", 1, "by 0.023 in r2, on"),
        ("profit", 1e4, "by 228 in profit, on"),
    ):
        first, second = ([factor * score for score in scores] for scores in (LENET, MLP))
        assert said in str(verdict_of({"A/x": first, "B/x": second}, metric))


def test_names_cannot_forge_a_sentence() -> None:
    found = verdict_of({"A\n\x1b[31mB/x": LENET, "B/x": MLP})
    assert str(found).startswith("A\\nB beats B by 2.3 points")
    assert found.models[0].first == "A\n\x1b[31mB"


# Laws


@given(
    st.lists(
        st.lists(st.integers(0, 16) | st.none(), min_size=4, max_size=4), min_size=1, max_size=6
    ),
    st.randoms(use_true_random=False),
)
def test_the_order_of_candidates_does_not_matter(
    table: list[list[int | None]], random: object
) -> None:
    names = [f"{model}/{lr}" for model in "ABC" for lr in "xy"]
    scores = {
        name: [NAN if value is None else value / 16 for value in row]
        for name, row in zip(names, table, strict=False)
    }
    found = verdict_of(scores)
    assert found.sentences
    order = list(scores)
    random.shuffle(order)  # type: ignore[attr-defined]
    again = verdict_of({name: scores[name] for name in order})
    assert again.best == found.best
    assert {*again.best_models} == {*found.best_models}
    assert {*again.best_lr_schedules} == {*found.best_lr_schedules}
    if found.best:
        model, lr_schedule = found.best.split("/")
        assert (model,) == found.best_models
        assert (lr_schedule,) == found.best_lr_schedules
        assert not np.isnan(scores[found.best]).any()
