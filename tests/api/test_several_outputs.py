"""Models of several outputs, and targets of several parts: as a plain loop, fused, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from asynckfold import AsyncKFold, CVResults, InputError, load_model
from tests.interrupted import interrupted
from tests.plain import BATCH, EPOCHS, adam
from tests.several_outputs import (
    SCORING,
    Auxiliary,
    Heads,
    Items,
    Pair,
    arrays,
    both,
    both_of_pair,
    kind_accuracy,
    plain_loop,
)

X, Y = arrays()
FOLDS = 3


def swept(
    root: Path,
    dataset: Any = (X, Y),
    model: Any = Heads,
    criterion: Any = both,
    params: Any = None,
    **settings: Any,
) -> CVResults:
    usual: dict[str, Any] = {
        "engine": "serial", "fuse": False, "scoring": SCORING, "verbose": 0,
    }  # fmt: skip
    kfold = AsyncKFold(
        FOLDS, dataset, root, criterion, BATCH, report=False, threads_per_job=1,
        **(usual | settings),
    )  # fmt: skip
    return kfold([model], ["constant"], adam, {"epochs": EPOCHS, **(params or {})})


def weights(results: CVResults, fold: int = 0) -> dict[str, Tensor]:
    return results.state_dict(results.candidates[0].name, fold=fold)


def same(one: CVResults, other: CVResults) -> bool:
    return one.fingerprint == other.fingerprint and all(
        torch.equal(mine, weights(other, fold)[name])
        for fold in range(FOLDS)
        for name, mine in weights(one, fold).items()
    )


def test_it_equals_a_plain_loop_to_the_bit(plain: CVResults) -> None:
    results = plain
    state, outputs, losses = plain_loop(results)
    assert all(torch.equal(weights(results)[name], item) for name, item in state.items())
    (found,) = results.oof.values()
    rows = results.folds[0].valid
    for name, expected in outputs.items():
        np.testing.assert_array_equal(found[name][rows], expected.numpy())
    item = results.results[results.plan.jobs[0].id]
    assert [epoch.valid_loss for epoch in item.epochs] == losses
    targets = {name: part[rows] for name, part in Y.items()}
    given = {name: part.numpy() for name, part in outputs.items()}
    assert item.scores == {name: of(targets, given) for name, of in SCORING.items()}
    assert all(epoch.accuracy is None for epoch in item.epochs)


def as_float32(samples: list[Any]) -> Any:
    inputs, targets = torch.utils.data.default_collate(samples)
    return inputs, {"kind": targets["kind"].long(), "mass": targets["mass"].float()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> CVResults:
    """What others must equal."""
    return swept(tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize(
    "settings",
    [
        {"dataset": Items()},
        {"dataset": (torch.from_numpy(X), {"kind": Y["kind"].tolist(), "mass": Y["mass"]})},
        {"dataset": Items(), "random_samples": True},
        {"dataset": Subset(Items(), range(60)), "engine": "process", "n_jobs": 2},
        {"dataset": Items(), "collate_fn": as_float32},
    ],
    ids=["dataset", "tensor", "streamed", "processes", "collated"],
)
def test_the_way_the_data_come_changes_no_bit(
    root: Path, plain: CVResults, settings: dict[str, Any]
) -> None:
    other = swept(root, **settings)
    for fold in range(FOLDS):
        for name, mine in weights(plain, fold).items():
            assert torch.equal(mine, weights(other, fold)[name])
    for name, item in plain.results.items():
        assert item.scores == other.results[name].scores


def test_tuples_are_trees_too(root: Path) -> None:
    pair = (X, (Y["kind"], Y["mass"]))
    of_tuple = {"fit": lambda targets, outputs: -abs(outputs[1] - targets[1]).mean()}
    of_dict = {"fit": lambda targets, outputs: -abs(outputs["mass"] - targets["mass"]).mean()}
    one = swept(root / "one", scoring=of_dict)
    other = swept(root / "other", pair, Pair, both_of_pair, scoring=of_tuple)
    for name, item in weights(one).items():
        assert torch.equal(item, weights(other)[name])
    (found,) = other.oof.values()
    assert isinstance(found, tuple)
    assert (one.candidates[0].scores["fit"] == other.candidates[0].scores["fit"]).all()


def test_fused_jobs_are_close_to_plain_ones_and_repeat_to_the_bit(
    root: Path, plain: CVResults
) -> None:
    fused = swept(root / "fused", fuse=FOLDS)
    assert [len(group) for group in fused.plan.groups] == [FOLDS]
    for fold in range(FOLDS):
        torch.testing.assert_close(weights(plain, fold), weights(fused, fold), rtol=1e-3, atol=1e-5)
    assert same(fused, swept(root / "again", fuse=FOLDS, engine="process", n_jobs=2))


@pytest.mark.parametrize("fuse", [False, FOLDS])
def test_an_interrupted_run_continues_to_the_same_bits(
    root: Path, monkeypatch: pytest.MonkeyPatch, fuse: Any
) -> None:
    whole = swept(root / "whole", fuse=fuse)
    # At the end of the second epoch of a job, or of a replica.
    with interrupted(monkeypatch, "training.training_run.Training", "score", 4):
        swept(root / "cut", fuse=fuse)
    assert same(whole, swept(root / "cut", fuse=fuse))
    for log in (root / "cut").glob("Heads/constant/fold-*/log.txt"):
        assert log.read_text().count("epoch 1 train_loss") == 1


@pytest.mark.parametrize(
    "params",
    [
        {"trainer": "allreduce", "processes": 2},
        {"precision": "bf16"},
        pytest.param({"compile": True}, marks=pytest.mark.nightly),
    ],
    ids=["allreduce", "bf16", "compile"],
)
def test_other_ways_to_train(root: Path, params: dict[str, Any]) -> None:
    results = swept(root, params=params, engine="process")
    (found,) = results.oof.values()
    assert found["kind"].shape == (60, 3)
    assert np.isfinite(found["mass"]).all()
    assert results.candidates[0].complete


def test_an_output_transform_picks_what_is_scored(root: Path) -> None:
    def criterion(outputs: Any, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs["kind"], targets)

    def shares(outputs: Any) -> Any:
        return outputs["kind"].softmax(1)

    results = swept(
        root, (X, Y["kind"]), criterion=criterion, output_transform=shares,
        scoring=["accuracy", "neg_log_loss"],
    )  # fmt: skip
    (found,) = results.oof.values()
    scores = [item.scores["accuracy"] for item in results.results.values()]
    rights = [
        (found["kind"][fold.valid].argmax(1) == Y["kind"][fold.valid]).mean()
        for fold in results.folds
    ]
    assert scores == pytest.approx(rights)
    assert results.ensemble().predict_proba(X[:5]).shape == (5, 3)
    assert results.ensemble().predict(X[:5]).shape == (5,)
    path = root / "model.safetensors"
    results.ensemble().save(path)
    loaded = load_model(path, Heads, output_transform=shares)
    assert (loaded.predict_proba(X) == results.ensemble().predict_proba(X)).all()


def test_the_ensemble_gives_the_mean_of_each_output(plain: CVResults) -> None:
    results, root = plain, plain.root_dir
    name = results.candidates[0].name
    each = [results.model(name, fold) for fold in range(FOLDS)]
    with torch.no_grad():
        expected = [model.eval()(torch.from_numpy(X[:7])) for model in each]
    found = results.ensemble().outputs(X[:7])
    for part in ("kind", "mass"):
        mean = torch.stack([one[part] for one in expected]).mean(0)
        np.testing.assert_allclose(found[part], mean, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="predict needs to know which of several outputs"):
        results.ensemble().predict(X[:7])
    path = root / "oof" / "Heads-constant.npz"
    stored = np.load(path)
    assert sorted(stored) == ["outputs.kind", "outputs.mass"]
    np.testing.assert_array_equal(stored["outputs.mass"], results.oof[name]["mass"])


def test_a_model_may_give_more_outputs_while_it_trains(root: Path) -> None:
    def criterion(outputs: Any, targets: Tensor) -> Any:
        if isinstance(outputs, Tensor):
            return nn.functional.cross_entropy(outputs, targets)
        return sum(nn.functional.cross_entropy(one, targets) for one in outputs)

    results = swept(root, (X, Y["kind"]), Auxiliary, criterion, scoring="accuracy")
    assert results.oof["Auxiliary/constant"].shape == (60, 3)
    assert results.candidates[0].complete


def test_a_step_and_a_loop_of_ones_own_get_the_parts(root: Path, plain: CVResults) -> None:
    def training_step(model: nn.Module, batch: Any, state: Any) -> Any:
        return state.criterion(model(batch[0]), batch[1])

    def fit(context: Any) -> None:
        for _ in range(context.epoch_start, context.epochs):
            context.model.train()
            for inputs, targets in context.train_loader:
                context.optimizer.zero_grad()
                loss = context.criterion(context.model(inputs), targets)
                loss.backward()
                context.optimizer.step()
            context.report(train_loss=loss)
        for _, targets in context.valid_loader:
            assert targets["kind"].dtype == torch.int64

    for way in ({"training_step": training_step}, {"fit_fn": fit}):
        other = swept(root / next(iter(way)), **way)
        for name, item in weights(plain).items():
            assert torch.equal(item, weights(other)[name])


def test_a_sampler_and_a_criterion_factory_get_the_parts(root: Path) -> None:
    def weighted(targets: Any) -> Tensor:
        return 1 + targets["mass"].abs()

    def factory(train_targets: Any) -> Any:
        scale = train_targets["mass"].std()
        return lambda outputs, targets: both(outputs, targets) / scale

    assert swept(root / "sampler", sampler=weighted).candidates[0].complete
    assert swept(root / "factory", criterion=factory).candidates[0].complete


class Renamed(Heads):
    """Gives other outputs in evaluation of small batches."""

    def forward(self, samples: Tensor) -> Any:
        found = super().forward(samples)
        return found if len(samples) > 4 else {"kind": found["kind"]}


def test_a_model_whose_outputs_change_fails_and_says_how(root: Path) -> None:
    with pytest.raises(Exception, match=r"\['kind'\] is .* in place of \['kind'\] float32 \(3,\)"):
        swept(root, model=Renamed, params={"eval_batch_size": 8}, dataset=(X[:36], cut(Y, 36)))


def cut(parts: Any, count: int) -> Any:
    return {name: part[:count] for name, part in parts.items()}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scoring": None}, "targets of several parts need scores of your own"),
        ({"scoring": "r2"}, "targets of several parts need scores of your own"),
        ({"criterion": nn.MSELoss()}, "targets of several parts need a criterion of your own"),
        ({"task": "regression"}, "several parts .* are a task of your own"),
        ({"scoring": {"a": lambda targets, outputs: targets["age"]}}, "KeyError: 'age'"),
        ({"stratify": "quantile"}, "stratify by quantiles needs one number per sample"),
        (
            {"dataset": (X, {"kind": Y["kind"], "mass": Y["mass"][:9]})},
            r"\['kind'\] \(60,\), \['mass'\] \(9,\)",
        ),
        ({"dataset": (X, {"kind": ["a"] * 60})}, r"\['kind'\]\[0\] str"),
        (
            {"dataset": (X, Y["kind"]), "criterion": nn.CrossEntropyLoss(), "scoring": "accuracy"},
            "the criterion must take the outputs of model Heads and the targets",
        ),
        (
            {
                "dataset": (X, Y["kind"]),
                "criterion": lambda outputs, targets: outputs["mass"].mean(),
                "scoring": "accuracy",
            },
            "scores need to know which of several outputs they are of",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    root: Path, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        swept(root, **settings)
    assert not root.exists() or not list(root.glob("run.*"))


def test_samples_with_other_parts_are_refused_by_their_number(root: Path) -> None:
    class Odd(Items):
        def __getitem__(self, index: int) -> Any:
            sample, target = super().__getitem__(index)
            return sample, {"kind": target["kind"]} if index == 17 else target

    with pytest.raises(InputError, match=r"\['kind'\] of sample 17, \['kind'\], \['mass'\] of"):
        swept(root, Odd())


def test_outputs_that_are_no_rows_are_refused(root: Path) -> None:
    class States(Heads):
        def forward(self, samples: Tensor) -> Any:
            return {**super().forward(samples), "state": torch.zeros(2, 8)}

    with pytest.raises(InputError, match=r"different length: \['kind'\] 8.*\['state'\] 2"):
        swept(root, model=States)


class Segments(nn.Module):
    """Classes of pixels, and those of an auxiliary head, as torchvision's models return them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, pictures: Tensor) -> Any:
        found = self.out(self.body(pictures).relu())
        return {"out": found, "aux": found * 2}


def of_segments(outputs: Any, targets: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy
    return loss(outputs["out"], targets) + 0.4 * loss(outputs["aux"], targets)


@pytest.mark.parametrize("kept", [2.0, 0.0], ids=["kept", "by batch"])
def test_pixels_of_one_output_are_scored(root: Path, kept: float) -> None:
    draw = np.random.default_rng(0)
    pictures = draw.normal(size=(18, 2, 6, 6)).astype(np.float32)
    classes = (pictures[:, 0] > 0).astype(np.int64) + (pictures[:, 1] > 0.5)
    results = swept(
        root, (pictures, classes), Segments, of_segments, {"eval_batch_size": 4},
        scoring=["pixel_accuracy", "mean_iou"], keep_outputs_gib=kept,
        output_transform=lambda outputs: outputs["out"].softmax(1),
    )  # fmt: skip
    assert results.plan.by_batch == (kept == 0)
    for job, fold in zip(results.plan.jobs, results.folds, strict=True):
        model = results.model(results.candidates[0].name, fold.index).eval()
        with torch.no_grad():
            guess = model(torch.from_numpy(pictures[fold.valid]))["out"].argmax(1).numpy()
        truth = classes[fold.valid]
        shares = [
            ((guess == one) & (truth == one)).sum() / ((guess == one) | (truth == one)).sum()
            for one in range(3)
            if ((guess == one) | (truth == one)).any()
        ]
        scores = results.results[job.id].scores
        assert scores["pixel_accuracy"] == pytest.approx((guess == truth).mean())
        assert scores["mean_iou"] == pytest.approx(np.mean(shares))


def test_missing_numbers_are_told_and_left_to_the_criterion(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mass = Y["mass"].copy()
    mass[3:5] = np.nan

    def known(outputs: Any, targets: Any) -> Tensor:
        is_known = ~targets["mass"].isnan()
        return ((outputs["mass"] - targets["mass"])[is_known] ** 2).mean()

    with caplog.at_level("INFO", logger="asynckfold"):
        results = swept(root, (X, Y | {"mass": mass}), criterion=known, scoring=KIND, verbose=1)
    assert results.candidates[0].complete
    assert "targets of 2 samples hold NaN, which the criterion must leave out" in caplog.text


KIND = {"kind_accuracy": kind_accuracy}


def test_a_score_that_fails_for_these_labels_is_refused_before_training(root: Path) -> None:
    """Of two named classes, a criterion of one's own and a model of several outputs."""
    names = np.where(Y["kind"] == 0, "a", "b")
    with pytest.raises(InputError, match="scoring must fit the labels: received 'r2'"):
        swept(
            root, (X, names), Heads, lambda outputs, targets: outputs["kind"][:, :2].mean(),
            scoring=["accuracy", "r2"],
            output_transform=lambda outputs: outputs["kind"][:, :2].softmax(1),
        )  # fmt: skip
