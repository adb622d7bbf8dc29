"""What does leaving candidates out save, and what does it cost? Rules replayed on complete sweeps.

All candidates of a grid are trained on all folds once; each rule then sees their scores fold by
fold, over random orders of the folds (and of the candidates, where a rule takes these in turn).
*Saved* is the share of the seconds of training that the rule would not have spent. *Regret* is the
mean over all folds of the best candidate less that of the one that the rule chooses among those it
kept: the mean and the worst over the orders; *lost* is how often it is above 0. The rules are
written here after their papers and manuals, with the defaults of these:

- race: `race=True` of asynckfold; *each 5 %*: its test, not corrected for looks and pairs;
- anova: tidymodels' `tune_race_anova`, an additive model of candidates and folds, from 3 on;
- halving: as scikit-learn's, with folds as the resource and a factor of 3;
- median: Optuna's `MedianPruner` of the running mean, after five trials;
- wilcoxon: Optuna's `WilcoxonPruner`, p below 0.1, against the best trial so far;
- forgiving: Bergman, Purucker and Hutter (2024), stop below the worst fold of the incumbent.

With ``--data DIR`` also on 2,000 images of ``DIR/MNIST`` and the tables of ``DIR/tabular``, comma-
separated without a header, the class last.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from loops import Table, arguments, images
from scipy import stats
from sklearn.datasets import load_breast_cancer, load_digits
from torch import nn, optim

from asynckfold import AsyncKFold
from asynckfold.scheduling.racing import left_out

Floats = npt.NDArray[np.float64]
Rule = Callable[[Floats, list[tuple[int, int]]], npt.NDArray[np.int64]]
"""(scores by candidate and fold, sizes of folds) → number of folds that each candidate trains."""


def race(scores: Floats, sizes: list[tuple[int, int]], alpha: float = 0.05) -> Any:
    """Race as asynckfold does."""
    out = left_out(scores, sizes, alpha)
    return np.array([out.get(row, scores.shape[1]) for row in range(len(scores))])


def each(scores: Floats, sizes: list[tuple[int, int]]) -> Any:
    """Test each pair at each look at 5 %."""
    return race(scores, sizes, 0.05 * (scores.shape[1] - 2) * (len(scores) - 1))


def in_rounds(scores: Floats, keep: Callable[[Floats, int], Any]) -> Any:
    """Train fold by fold all candidates that `keep` (scores so far, their number) lets through."""
    used, alive = np.zeros(len(scores), int), np.arange(len(scores))
    for fold in range(scores.shape[1]):
        used[alive] += 1
        if fold + 1 < scores.shape[1] and len(alive) > 1:
            alive = alive[keep(scores[alive, : fold + 1], len(scores))]
    return used


def anova(scores: Floats, sizes: Any) -> Any:
    """Keep what an additive model does not find worse than the best."""

    def keep(seen: Floats, _: int) -> Any:
        count, folds = seen.shape
        means = seen.mean(axis=1)
        if folds < 3:
            return np.full(count, fill_value=True)
        rest = seen - means[:, None] - seen.mean(axis=0) + seen.mean()
        freedom = (count - 1) * (folds - 1)
        error = np.sqrt(2 / folds * (rest**2).sum() / freedom)
        return means.max() - means <= stats.t.ppf(0.95, freedom) * error

    return in_rounds(scores, keep)


def halving(scores: Floats, sizes: Any) -> Any:
    """Keep the best third after 1, 3, 9 folds."""

    def keep(seen: Floats, count: int) -> Any:
        rungs = [3**rung for rung in range(10)]
        if seen.shape[1] not in rungs:
            return np.full(len(seen), fill_value=True)
        left = max(1, -(-count // 3 ** (1 + rungs.index(seen.shape[1]))))
        return np.sort(np.argsort(-seen.mean(axis=1), kind="stable")[:left])

    return in_rounds(scores, keep)


def forgiving(scores: Floats, sizes: Any) -> Any:
    """Stop below the worst fold of the incumbent."""

    def stops(line: Floats, before: list[Floats]) -> bool:
        whole = [each for each in before if len(each) == scores.shape[1]]
        return bool(whole) and line.mean() < max(whole, key=np.mean).min()

    return in_turn(scores, stops)


def in_turn(scores: Floats, stops: Callable[[Floats, list[Floats]], bool]) -> Any:
    """Train one candidate after another, until `stops` (its scores, those before) ends it."""
    before: list[Floats] = []
    for line in scores:
        ends = (n for n in range(1, len(line)) if stops(line[:n], before))
        before.append(line[: next(ends, len(line))])
    return np.array([len(line) for line in before])


def median(scores: Floats, sizes: Any) -> Any:
    """Stop below the median of the trials before."""

    def stops(line: Floats, before: list[Floats]) -> bool:
        known = [each[: len(line)].mean() for each in before if len(each) == scores.shape[1]]
        best = (np.cumsum(line) / np.arange(1, len(line) + 1)).max()
        return bool(len(known) >= 5 and best < np.median(known))

    return in_turn(scores, stops)


def wilcoxon(scores: Floats, sizes: Any) -> Any:
    """Stop what the signed ranks find worse than the best trial."""

    def stops(line: Floats, before: list[Floats]) -> bool:
        if len(line) < 2 or not before:
            return False
        best = max(before, key=np.mean)[: len(line)]
        behind = line[: len(best)] - best
        if len(behind) < 2 or not behind.any() or behind.mean() >= 0:
            return False
        return bool(stats.wilcoxon(behind, alternative="less", zero_method="zsplit").pvalue < 0.1)

    return in_turn(scores, stops)


RULES: dict[str, Rule] = {
    **{"race": race, "each 5 %": each, "anova": anova, "halving": halving},
    **{"median": median, "wilcoxon": wilcoxon, "forgiving": forgiving},
}


def network(inputs: int, classes: int, width: int, drop: float) -> nn.Module:
    """Return a network with one hidden layer."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(drop), nn.Linear(width, classes)
    )


def sources(data: Path | None) -> Iterator[tuple[str, Floats, Any]]:
    """Yield data sets: name, inputs (n, features) and classes (n,)."""
    yield "digits", *load_digits(return_X_y=True)
    yield "breast cancer", *load_breast_cancer(return_X_y=True)
    if data is not None:
        for name in ("glass", "phoneme"):
            table = np.loadtxt(data / "tabular" / f"{name}.csv", delimiter=",")
            yield name, table[:, :-1], np.unique(table[:, -1], return_inverse=True)[1]
        pixels, targets = images("mnist", data, 2_000)
        yield "MNIST", pixels.reshape(len(pixels), -1), targets


def scored(
    raw: Floats, y: Any, folds: int, epochs: int, rates: list[float]
) -> tuple[Floats, Floats, Any]:
    """Return scores and seconds by candidate and fold, and the sizes of the folds."""
    scaled = ((raw - raw.mean(0)) / (raw.std(0) + 1e-9)).astype("float32")
    size = raw.shape[1], len(set(y))
    opt_fn: Any = lambda model, lr: optim.AdamW(model.parameters(), lr)  # noqa: E731
    with tempfile.TemporaryDirectory() as root:
        results = AsyncKFold(
            folds, (scaled, y), root, nn.CrossEntropyLoss(), 32, False, verbose=0, report=False
        )(
            {"net": lambda width, drop: network(*size, width, drop)}, ["cosine"],
            opt_fn, {"epochs": epochs},
            params={"lr": rates, "width": [8, 64], "drop": [0.0, 0.5]},
        )  # fmt: skip
    sizes = [(len(fold.train), len(fold.valid)) for fold in results.folds]
    scores = np.array([row.scores["accuracy"] for row in results.candidates])
    return scores, np.array([row.fit_seconds for row in results.candidates]), sizes


def replayed(rule: Rule, scores: Floats, seconds: Floats, sizes: Any, orders: int) -> list[str]:
    """Return the share of the seconds that are saved; mean and worst regret; how often lost."""
    random, saved, regrets = np.random.default_rng(0), [], []
    count, folds = scores.shape
    for _ in range(orders):
        rows, columns = random.permutation(count), random.permutation(folds)
        table, spent = scores[rows][:, columns], seconds[rows][:, columns]
        used = rule(table, [sizes[column] for column in columns])
        saved.append(1 - spent[np.arange(folds) < used[:, None]].sum() / spent.sum())
        most, means = used.max(), table.mean(axis=1)
        chosen = np.where(used == most, table[:, :most].mean(axis=1), -np.inf).argmax()
        regrets.append(means.max() - means[chosen])
    lost = np.mean([regret > 1e-9 for regret in regrets])
    return [f"{np.mean(saved):.0%}", *(f"{f(regrets):.4f}" for f in (np.mean, max)), f"{lost:.0%}"]


def main() -> None:
    """Print a table of rules for each data set and number of folds."""
    parsed = arguments(__doc__, 100, "--data")
    rates = [1e-3, 1e-1] if parsed.quick else [1e-4, 1e-3, 3e-3, 1e-2, 1e-1]
    orders = 5 if parsed.quick else parsed.turns
    table = Table(
        "Racing, replayed",
        "data | folds | jobs | seconds of training | rule | saved | regret | worst regret | lost",
    )
    for name, raw, y in sources(parsed.data):
        for folds in (3,) if parsed.quick else (5, 10):
            if np.bincount(y).min() < folds:
                continue  # a fold would lack a class
            data = scored(raw, y, folds, 1 if parsed.quick else 4, rates)
            for title, rule in RULES.items():
                row = replayed(rule, *data, orders)
                table.add(name, folds, data[0].size, float(data[1].sum()), title, *row)
    table.print(f"{orders} orders of candidates and folds; {4 * len(rates)} candidates")


if __name__ == "__main__":
    main()
