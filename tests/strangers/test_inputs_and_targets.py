"""Inputs, targets and losses as people pass them: they work, or are refused before the start."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.metrics import r2_score
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from asynckfold import AsyncKFold, CVResults, InputError
from asynckfold.cli import main
from tests.toy import adam, samples

X, Y = samples()
ODDS = (Y > 0).astype(np.float32)


def train(
    root: Path,
    data: Any,
    criterion: Any,
    model: Callable[[], nn.Module] = lambda: nn.Linear(8, 3),
    *,
    opt_fn: Any = adam,
    schedule: str = "constant",
    params: Any = None,
    batch_size: Any = 16,
    **arguments: Any,
) -> CVResults:
    """Train a model of 3 outputs on 3 folds, in this process."""
    quiet = {"engine": "serial", "report": False, "verbose": 0}
    folds = None if "cv" in arguments else 3
    kfold = AsyncKFold(folds, data, root, criterion, batch_size, **{**quiet, **arguments})
    return kfold({"m": model}, [schedule], opt_fn, params or {"epochs": 2})


def refused(root: Path, *positional: Any, **arguments: Any) -> str:
    """Return the message of a call that must be refused before anything is written."""
    with pytest.raises(InputError) as caught:
        train(root, *positional, **arguments)
    assert not list(root.glob("run.db"))
    return str(caught.value)


# Numbers that are missing


@pytest.mark.parametrize("index", [0, 59])
def test_one_row_of_nan_is_refused_with_its_index(tmp_path: Path, index: int) -> None:
    holed = X.copy()
    holed[index, 2] = np.nan
    message = refused(tmp_path / "run", (holed, Y), nn.CrossEntropyLoss())
    assert f"NaN or infinity in the inputs of sample {index}." in message
    assert "preprocess=sklearn.impute.SimpleImputer()" in message
    filled = train(tmp_path / "f", (holed, Y), nn.CrossEntropyLoss(), preprocess=SimpleImputer())
    assert filled.counts["done"] == 3


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], int(Y[index])


def test_so_is_one_of_a_data_set_or_of_several_inputs(tmp_path: Path) -> None:
    holed = X.copy()
    holed[41, 2] = -np.inf
    told = "infinity in the inputs of sample 41."
    assert told in refused(tmp_path / "items", Items(holed), nn.CrossEntropyLoss())
    both = {"input": holed}
    assert told in refused(tmp_path / "named", (both, Y), nn.CrossEntropyLoss())


def test_a_model_that_fills_nan_in_gets_them(tmp_path: Path) -> None:
    class Filling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input.nan_to_num())

    holed = X.copy()
    holed[37, 2] = np.nan
    made = train(tmp_path, (holed, Y), nn.CrossEntropyLoss(), lambda: Filling(8, 3))
    assert made.counts["done"] == 3


# Shapes that a loss does not take


@pytest.mark.parametrize(
    "criterion",
    [
        nn.BCEWithLogitsLoss(),
        functional.binary_cross_entropy_with_logits,
        lambda outputs, targets: functional.binary_cross_entropy_with_logits(outputs, targets),
    ],
)
def test_a_loss_that_takes_no_outputs_of_this_shape_is_refused_before_the_start(
    tmp_path: Path, criterion: Any
) -> None:
    data, one = (X, ODDS), lambda: nn.Linear(8, 1)
    said = {} if isinstance(criterion, nn.Module) else {"scoring": {"zero": lambda *_: 0.0}}
    message = refused(tmp_path / "wide", data, criterion, one, **said)
    assert "outputs float32 (16, 1) and targets float32 (16,): " in message
    remedy = "Squeeze the outputs in forward or return outputs[:, None], as the targets are"
    assert remedy in message
    flat = lambda: nn.Sequential(one(), nn.Flatten(0))  # noqa: E731
    message = refused(tmp_path / "flat", (X, ODDS[:, None]), criterion, flat, **said)
    assert remedy in message
    # The remedies.
    assert train(tmp_path / "1", data, criterion, flat, **said).counts["done"] == 3
    assert train(tmp_path / "2", (X, ODDS[:, None]), criterion, one, **said).counts["done"] == 3


def test_what_torch_raises_in_a_loss_of_ones_own_is_refused(
    tmp_path: Path,
) -> None:
    def unfit(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs[:, :2] * targets[:, None] @ torch.ones(3)).mean()

    message = refused(tmp_path, (X, Y), unfit)
    assert "outputs float32 (16, 3) and targets int64 (16,): size mismatch" in message
    assert "(test_inputs_and_targets.py, line " in message


# Targets that only the criterion understands


def masked(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets.nan_to_num()) ** 2)[~targets.isnan()].mean()


def closeness(targets: Any, outputs: Any) -> float:
    return -float(np.nanmean((targets - outputs) ** 2))


def test_a_loss_that_leaves_out_nan_gets_such_targets(tmp_path: Path) -> None:
    targets = X[:, :3].copy()
    targets[7] = np.nan
    said = {"scoring": {"close": closeness}}
    for task in (None, "custom"):
        made = train(tmp_path / f"{task}", (X, targets), masked, task=task, **said)
        assert made.counts["done"] == 3
        right = [closeness(targets[f.valid], made.oof["m/constant"][f.valid]) for f in made.folds]
        assert made.to_frame("fold")["close"].tolist() == pytest.approx(right)
    # Where loss or score takes no NaN, the sample is named.
    assert "at index 7, 1 in all, scored by r2" in refused(tmp_path / "r2", (X, targets), masked)
    plain = refused(tmp_path / "loss", (X, targets), lambda o, t: (o - t).abs().mean(), **said)
    assert "NaN or infinity in the target of sample 7." in plain
    plain = refused(tmp_path / "mse", (X, targets), nn.MSELoss(), task="custom", **said)
    assert "NaN or infinity in the target of sample 7." in plain
    assert "at index 7, 1 in all" in refused(tmp_path / "known", (X, targets), nn.MSELoss())


def shares() -> Any:
    found = np.exp(X[:, :3])
    return found / found.sum(1, keepdims=True)


def test_cross_entropy_takes_rows_of_probabilities(tmp_path: Path) -> None:
    data = X, shares()
    made = train(tmp_path, data, nn.CrossEntropyLoss(), batch_size="full")
    outputs = torch.tensor(made.oof["m/constant"])
    last = made.to_frame("epoch").groupby("fold").valid_loss.last()
    for fold in made.folds:
        loss = functional.cross_entropy(outputs[fold.valid], torch.tensor(data[1][fold.valid]))
        assert last[fold.index] == pytest.approx(float(loss), rel=1e-5)
    # Probabilities are compared with probabilities.
    assert np.allclose(made.ensemble().predict(X).sum(1), 1)
    right = [r2_score(data[1][f.valid], outputs[f.valid].softmax(1).numpy()) for f in made.folds]
    assert made.to_frame("fold").r2.tolist() == pytest.approx(right, rel=1e-5)
    assert "Choose another, such as 'r2'." in refused(
        tmp_path / "accuracy", data, nn.CrossEntropyLoss(), scoring="accuracy"
    )


def test_rows_that_are_no_probabilities_are_refused_unless_the_task_is_custom(
    tmp_path: Path,
) -> None:
    onehot = np.eye(3, dtype=np.float32)[Y]
    for at, targets in enumerate((2 * shares(), onehot, -shares())):
        message = refused(tmp_path / f"{at}", (X, targets), nn.CrossEntropyLoss())
        assert "Pass targets.argmax(axis=1); or task='custom'" in message
    said = {"scoring": {"hits": lambda t, o: float((t.argmax(1) == o.argmax(1)).mean())}}
    made = train(tmp_path / "hot", (X, onehot), nn.CrossEntropyLoss(), task="custom", **said)
    whole = train(tmp_path / "whole", (X, Y), nn.CrossEntropyLoss(), scoring="accuracy")
    assert made.counts["done"] == whole.counts["done"] == 3


def test_whole_numbers_reach_a_criterion_of_a_custom_task_as_they_are(tmp_path: Path) -> None:
    targets = np.stack([Y, 5 * Y - 100], 1)

    def first(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert int(targets[:, 1].min()) < 0
        return functional.cross_entropy(outputs, targets[:, 0])

    def score(found: Any, outputs: Any) -> float:
        return float(found.dtype == np.int64 and found[:, 1].min() == -100)

    said = {"task": "custom", "scoring": {"same": score}}
    made = train(tmp_path, (X, targets), first, **said)
    assert made.to_frame("fold")["same"].tolist() == [1.0] * 3


def test_the_remedy_of_a_score_names_scores_that_can_be_computed(tmp_path: Path) -> None:
    rare = Y.copy()
    rare[rare == 2] = 0
    rare[-2:] = 2
    folds = [(np.arange(20, 60), np.arange(20)), (np.arange(40), np.arange(40, 60))]
    said = {"cv": folds, "scoring": "roc_auc_ovr"}
    message = refused(tmp_path, (X, rare), nn.CrossEntropyLoss(), **said)
    remedy = message.partition("Choose another, such as ")[2]
    names = [part.strip("' .") for part in remedy.split(",")]
    assert names
    said["scoring"] = names
    made = train(tmp_path / "others", (X, rare), nn.CrossEntropyLoss(), **said)
    assert made.counts["done"] == 2


# Targets of 0 and 1


def dice(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    shares = outputs.sigmoid()
    return 1 - (2 * (shares * targets).sum() + 1) / (shares.sum() + targets.sum() + 1)


@pytest.mark.parametrize(
    ("shape", "task", "score"),
    [((2, 2, 2), "segmentation", "dice"), ((8,), "multilabel", "accuracy")],
)
def test_zeros_and_ones_of_a_loss_of_ones_own_are_asked_about_before_the_start(
    tmp_path: Path, shape: tuple[int, ...], task: str, score: str
) -> None:
    masks = (X > 0).astype(np.float32).reshape(60, *shape)

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.Unflatten(1, shape))

    data = X.reshape(60, *shape), masks
    message = refused(tmp_path, data, dice, model)
    assert f"Pass task='{task}' and output_transform=torch.sigmoid" in message
    said = {"output_transform": torch.sigmoid}
    assert f"Pass task='{task}'" in refused(tmp_path, data, dice, model, **said)
    # The remedies, and a score that says it.
    made = train(tmp_path / "classes", data, dice, model, task=task, **said)
    assert made.plan.scoring[0] == score
    assert train(tmp_path / "numbers", data, dice, model, task="regression").plan.scoring == ("r2",)
    assert train(tmp_path / "r2", data, dice, model, scoring="r2").counts["done"] == 3


# Samplers of another length than the fold


class Drawing(torch.utils.data.Sampler[int]):
    """Places of a fold with replacement, in groups of one class."""

    def __init__(self, targets: torch.Tensor, count: int) -> None:
        self.targets, self.count = targets, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        for at in range(self.count):
            places = (self.targets == at // 4 % 3).nonzero().flatten()
            yield int(places[torch.randint(len(places), ())])


@pytest.mark.parametrize("count", [21, 100])
def test_a_sampler_may_draw_fewer_or_more_samples_than_the_fold_has(
    tmp_path: Path, count: int
) -> None:
    """Two batches of 21 draws, seven of 100: as a loop of one's own sees them."""
    seen: list[int] = []

    class Seeing(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if self.training:
                seen.append(len(input))
            return super().forward(input)

    def sampler(targets: torch.Tensor) -> Any:
        return Drawing(targets, count)

    def run(model: type[nn.Linear], **said: Any) -> CVResults:
        params = {"epochs": 3, "lr_step": "batch"}
        root = tmp_path / model.__name__
        return train(
            root, (X, Y), nn.CrossEntropyLoss(), lambda: model(8, 3), sampler=sampler,
            schedule="cosine", params=params, **said,
        )  # fmt: skip

    alone = run(Seeing, fuse=False)
    sizes = [16] * (count // 16) + [count % 16]
    assert seen[-3 * len(sizes) :] == 3 * sizes
    # The schedule counts these batches.
    last = alone.to_frame("epoch").lr.iloc[-1]
    assert last == pytest.approx(1e-2 * (1 + np.cos(np.pi * 2 / 3)) / 2)
    fused = run(nn.Linear, fuse=True)
    assert max(fused.to_frame("fold").fused) > 1
    assert np.allclose(alone.oof["m/cosine"], fused.oof["m/cosine"], atol=1e-5)


def test_each_epoch_must_draw_as_many(tmp_path: Path) -> None:
    def sampler(targets: torch.Tensor) -> Any:
        return Drawing(targets, int(torch.randint(10, 40, ())))

    message = refused(tmp_path, (X, Y), nn.CrossEntropyLoss(), sampler=sampler)
    assert "a sampler must draw as many samples in each epoch" in message

    def outside(targets: torch.Tensor) -> Any:
        return torch.utils.data.SequentialSampler(range(len(targets) + 1))

    message = refused(tmp_path, (X, Y), nn.CrossEntropyLoss(), sampler=outside)
    assert "41 draws of 0 to 40 for 40 samples" in message


# A third tensor


class WithMask(nn.Linear):
    def forward(self, input: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return super().forward(input)


def test_a_third_tensor_is_refused_unless_forward_needs_each_of_the_first(tmp_path: Path) -> None:
    whole = torch.from_numpy(X), torch.from_numpy(Y), torch.arange(60) % 3
    triple = TensorDataset(*whole)
    for model in (WithMask, nn.Linear):
        made = functools.partial(model, 8, 3)
        message = refused(tmp_path / model.__name__, triple, nn.CrossEntropyLoss(), made)
        assert "must be a pair (x, y)" in message
        assert "received 3 tensors, and forward(" in message
    # The remedies, and a signature that says it.
    pair, said = TensorDataset(*whole[:2]), ((X, X), Y)
    single, bilinear = (
        functools.partial(WithMask, 8, 3),
        functools.partial(nn.Bilinear, 8, 8, 3),
    )
    both = TensorDataset(whole[0], whole[0], whole[1])
    loss = nn.CrossEntropyLoss()
    for at, (data, made) in enumerate([(pair, single), (said, bilinear), (both, bilinear)]):
        assert train(tmp_path / f"{at}", data, loss, made).counts["done"] == 3


# Arrays that torch does not take


@pytest.mark.parametrize(
    "form",
    [
        lambda array: array[::-1].copy()[::-1],
        lambda array: array.astype(array.dtype.newbyteorder(">")),
        lambda array: array.astype("g"),
    ],
    ids=["backwards", "big-endian", "long"],
)
def test_arrays_of_any_memory_layout_are_trained_on_and_predicted(
    tmp_path: Path, form: Callable[[Any], Any]
) -> None:
    plain = train(tmp_path / "plain", (X, Y), nn.CrossEntropyLoss())
    odd = train(tmp_path / "odd", (form(X), Y[::-1][::-1]), nn.CrossEntropyLoss())
    assert np.array_equal(plain.oof["m/constant"], odd.oof["m/constant"])
    predicted = plain.ensemble().predict(X)
    assert np.array_equal(plain.ensemble().predict(form(X)), predicted)


def test_so_are_samples_of_a_data_set_and_of_a_transform(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", (X[:, ::-1].copy(), Y), nn.CrossEntropyLoss())
    flipped = train(tmp_path / "items", Items(X[:, ::-1]), nn.CrossEntropyLoss())
    views = {"train_transform": np.flip, "eval_transform": np.flip}
    turned = train(tmp_path / "views", (X, Y), nn.CrossEntropyLoss(), **views)
    for other in (flipped, turned):
        assert np.array_equal(plain.oof["m/constant"], other.oof["m/constant"])


def test_results_without_a_refit_have_no_best_estimator(tmp_path: Path) -> None:
    results = train(tmp_path / "plain", (X, Y), nn.CrossEntropyLoss())
    assert not hasattr(results, "best_estimator_")
    with pytest.raises(InputError, match="refit=True"):
        _ = results.best_estimator_
    assert hasattr(results, "best_score_")
    refitted = train(tmp_path / "refit", (X, Y), nn.CrossEntropyLoss(), refit=True)
    assert isinstance(refitted.best_estimator_, nn.Linear)


# Inputs by name, labels of each token, generators of libraries


class OfX(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x.flatten(1))


def test_a_dict_that_forward_takes_as_one_argument_by_mistake_is_refused(tmp_path: Path) -> None:
    made, loss = functools.partial(OfX, 8, 3), nn.CrossEntropyLoss()
    message = refused(tmp_path / "image", ({"image": X}, Y), loss, made)
    assert "'dict' object has no attribute 'flatten'" in message
    assert "Name the inputs as forward does" in message
    assert train(tmp_path / "x", ({"x": X}, Y), loss, made).counts["done"] == 3


class Tagger(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).transpose(1, 2)


def test_labels_of_each_token_are_to_be_padded(tmp_path: Path) -> None:
    tokens = [torch.arange(2 + at % 5) for at in range(60)]

    def collate(items: list[Any]) -> Any:
        ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in items], batch_first=True)
        return functional.pad(ids, (0, 6 - ids.shape[1])), torch.stack([tags for _, tags in items])

    made, loss = functools.partial(Tagger, 6, 3), nn.CrossEntropyLoss()
    ragged = [(ids, ids % 3) for ids in tokens]
    message = refused(tmp_path / "ragged", ragged, loss, made, collate_fn=collate)
    assert "received shapes (2,) and (3,) and others. Pad the labels to one length" in message
    padded = [(ids, functional.pad(tags, (0, 6 - len(tags)), value=-100)) for ids, tags in ragged]
    said = {"collate_fn": collate, "task": "segmentation"}
    assert train(tmp_path / "padded", padded, loss, made, **said).counts["done"] == 3


class Flip:
    """Turns image and mask, by a generator of its own, as MONAI's ``RandFlipd``."""

    def __init__(self) -> None:
        self.R = np.random.RandomState()

    def set_random_state(self, seed: int) -> None:
        self.R = np.random.RandomState(seed)

    def __call__(self, parts: dict[str, Any]) -> dict[str, Any]:
        # Hardly ever the same twice.
        order = self.R.permutation(8)
        return {name: part[order] for name, part in parts.items()}


class Flipped(Items):
    def __init__(self, seeds: bool) -> None:
        super().__init__(X)
        self.flip, self.seeds = Flip(), seeds

    def __getitem__(self, index: int) -> Any:
        if self.seeds:
            self.flip.set_random_state(seed=int(torch.randint(2**31, ())))
        row = self.inputs[index]
        return self.flip({"x": row, "label": (row > 0).astype(np.int64)})


class EachOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x[..., None]).transpose(1, 2)
        return found


def test_what_cannot_be_seeded_is_refused_with_the_remedy(tmp_path: Path) -> None:
    said = {"target_key": "label", "task": "segmentation"}
    loss = nn.CrossEntropyLoss()
    message = refused(tmp_path / "own", Flipped(False), loss, EachOfTwo, **said)
    assert "transform.set_random_state(seed=int(torch.randint(2**31, ())))" in message
    seeded = [train(tmp_path / f"{n}", Flipped(True), loss, EachOfTwo, **said) for n in range(2)]
    assert not seeded[0].bit_identity.reasons
    assert np.array_equal(*(results.oof["m/constant"] for results in seeded))


# Remedies and tables


def test_a_switch_is_named_without_a_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "rare.csv"
    rows = [f"{at},{at % 7},{'x' if at else 'y'}" for at in range(30)]
    table.write_text("\n".join(["a,b,label", *rows]))
    arguments = ["--data", f"csv:{table}", "--root", str(tmp_path / "run"), "--epochs", "1"]
    assert main(["run", *arguments]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "or pass --no-stratify." in said


def test_a_printed_table_shows_means_and_deviations_in_80_columns(tmp_path: Path) -> None:
    results = train(tmp_path, (X, Y), nn.CrossEntropyLoss())
    frame = results.to_frame()
    assert {"speedup", "serial_seconds", "baseline"}.isdisjoint(frame.columns)
    assert "serial_accuracy" not in results.to_frame("fold")
    with pd.option_context("display.width", 80, "display.max_columns", 0):
        header = str(frame).splitlines()[0]
    assert {"model", "mean_accuracy", "std_accuracy"} <= {*header.split()}
