"""The models of a run's folds: made again as its jobs made them, alone and together."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.special import expit, softmax
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset
from torchvision import transforms

from asynckfold import (
    AsyncKFold,
    CVResults,
    FoldEnsemble,
    InputError,
    JobsFailedWarning,
    fit,
    load_results,
)
from asynckfold.models import DBN, Pretraining
from tests.toy import Failing, Tiny, adam, samples

X, Y = samples()


def trained(
    root: Path,
    model: Any = Tiny,
    dataset: Any = (X, Y),
    criterion: Any = None,
    params: dict[str, Any] | None = None,
    schedulers: Sequence[str] = ("step",),
    **settings: Any,
) -> CVResults:
    settings = {"verbose": 0, "baseline": None, "parallelize": False, **settings}
    criterion = criterion or nn.CrossEntropyLoss()
    kfold = AsyncKFold(3, dataset, root, criterion, 10, **settings)
    return kfold({"tiny": model}, [*schedulers], adam, {"epochs": 2, **(params or {})})


def same(one: Any, other: Any) -> bool:
    """Whether two states have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def said_by_each(ensemble: FoldEnsemble, inputs: Any) -> npt.NDArray[np.float32]:
    """What each model says: shape (models, samples, ...)."""
    return np.concatenate(list(ensemble._outputs(inputs)), axis=1)


def assert_as_recorded(results: CVResults, dataset: Any) -> None:
    """Model by model, what is said of held-out samples is what the run recorded of them."""
    name = results.candidates[0].name
    jobs = [job for job in results.plan.jobs if job.candidate == name]
    said = said_by_each(results.ensemble(name), dataset)
    assert said.shape[0] == len(jobs)
    close = {"bf16": 2e-2}.get(results.plan.params.precision, 1e-5)
    folds = {fold.key: fold for fold in results.folds}
    for one, job in zip(said, jobs, strict=True):
        told = results.results[job.id].outputs
        assert told is not None
        found = one[folds[job.repeat, job.fold].valid]
        np.testing.assert_allclose(found, told, rtol=close, atol=close * np.abs(told).max())


@pytest.mark.nightly(but=["plain", "fused+preprocess", "repeats"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n_repeats": 2},
        {"precision": "bf16"},
        {"preprocess": make_pipeline(StandardScaler(), PCA(8)), "parallelize": True, "fuse": 3},
        {"eval_transform": lambda x: x / 2, "train_transform": lambda x: x / 2 + torch.randn(8)},
    ],
    ids=["plain", "repeats", "bf16", "fused+preprocess", "transforms"],
)
def test_each_model_gives_the_recorded_outputs_of_held_out_samples(
    root: Path, settings: dict[str, Any]
) -> None:
    if "fuse" in settings:
        settings = {**settings, "n_jobs": 1}
    data = torch.from_numpy(X) if "eval_transform" in settings else X
    results = trained(root, dataset=(data, Y), **settings)
    assert bool(results.plan.groups) == ("fuse" in settings)
    assert_as_recorded(results, data)
    for job in results.plan.jobs:
        model = results.model(job.candidate, job.fold, job.repeat)
        assert not model.training
        assert same(model.state_dict(), results.state_dict(job.candidate, job.fold, job.repeat))


class Pictures(Dataset[Any]):
    """Grey images of 8×8 with a transform, as torchvision's collections have them."""

    def __init__(self, transform: Any, count: int = 60) -> None:
        numbers = np.random.default_rng(0).integers(0, 256, (count, 8, 8), np.uint8)
        self.data, self.targets, self.transform = numbers, np.arange(count) % 3, transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        image = Image.fromarray(self.data[index])
        return self.transform(image) if self.transform else image, int(self.targets[index])


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Flatten()
        )
        self.last = nn.Linear(128, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.layers(inputs))
        return found


def test_the_random_steps_of_a_transform_are_left_out(root: Path) -> None:
    augmented = transforms.Compose(
        [transforms.RandomCrop(8, 2), transforms.ToTensor(), transforms.Normalize(0.5, 0.5)]
    )
    dataset = Pictures(augmented)
    results = trained(root, Convolved, dataset, params={"memory_format": "channels_last"})
    assert results.plan.channels_last == ("tiny",)
    assert_as_recorded(results, dataset)
    # Whatever transform a data set has: that of the run stands for it.
    said = results.ensemble().outputs(dataset)
    for other in (Pictures(None), Pictures(transforms.ToTensor()), Subset(dataset, range(60))):
        np.testing.assert_array_equal(results.ensemble().outputs(other), said)
    with pytest.raises(InputError, match="before its transforms: received TypeError on samples 0"):
        results.ensemble().outputs(torch.rand(3, 1, 8, 8))


def test_models_with_a_stage_lazy_ones_and_instances_are_made_as_jobs_make_them(
    tmp_path: Path,
) -> None:
    shares = ((X - X.min()) / (X.max() - X.min()), Y)
    own = Tiny()
    before = copy.deepcopy(own.state_dict())
    for name, model, dataset in (
        ("dbn", lambda: DBN(8, (6,), 3, pretraining=Pretraining(epochs=1)), shares),
        ("instance", own, (X, Y)),
        (
            "lazy",
            lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 3)),
            (X, Y),
        ),
    ):
        assert_as_recorded(trained(tmp_path / name, model, dataset), dataset[0])
    assert same(own.state_dict(), before)


class Seeded(nn.Linear):
    """Has something random that is in no state_dict: only its seed gives it back."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.mask = torch.rand(8) + random.random() + np.random.rand()  # noqa: NPY002

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs * self.mask.to(inputs.dtype))


def test_models_are_seeded_as_in_jobs_and_the_callers_generators_left_alone(root: Path) -> None:
    results = trained(root, Seeded, preprocess=StandardScaler())
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index] # noqa: NPY002
    threads, folder = torch.get_num_threads(), Path.cwd()
    assert_as_recorded(results, X)
    results.model()
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index] # noqa: NPY002
    assert (threads, folder) == (torch.get_num_threads(), Path.cwd())
    assert states == after


class Bare(Dataset[Any]):
    """Samples without targets."""

    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index]


def test_samples_come_in_many_forms_and_answers_are_means(root: Path) -> None:
    ensemble = trained(root, preprocess=StandardScaler(), params={"eval_batch_size": 7}).ensemble()
    assert repr(ensemble) == "FoldEnsemble(candidate='tiny/step', size=3)"
    each = said_by_each(ensemble, X)
    assert each.shape == (3, 60, 3)
    np.testing.assert_allclose(ensemble.outputs(X), each.mean(axis=0), rtol=1e-5)
    shares = softmax(each.astype(np.float64), axis=2).mean(axis=0)
    np.testing.assert_allclose(ensemble.predict_proba(X), shares)
    np.testing.assert_array_equal(ensemble.predict(X), shares.argmax(axis=1))
    assert ensemble.classes == ("0", "1", "2")
    tensor, targets = torch.from_numpy(X), torch.from_numpy(Y)
    for inputs in (
        tensor,
        X.astype(np.float64),
        (X, Y),
        TensorDataset(tensor, targets),
        TensorDataset(tensor),
        Bare(tensor),
        Bare(list(X)),
        Subset(TensorDataset(tensor, targets), range(60)),
    ):
        np.testing.assert_array_equal(ensemble.predict_proba(inputs), shares)
    np.testing.assert_allclose(ensemble.predict_proba(X[:1]), shares[:1])
    np.testing.assert_allclose(ensemble.predict_proba(Bare(tensor[5:6])), shares[5:6])


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        (
            X[:, :4],
            "must become float32 (8,) by the run's transforms, as its samples did: received ",
        ),
        (X[0], "received float64 ()" if X.dtype == np.float64 else "received float32 ()"),
        (X.astype(np.int64), "received int64 (8,). Pass samples as the run's data set has them"),
        (X[:0], "inputs must hold a sample: received none"),
        (np.float32(3), "must be map-style"),
        (None, "must be map-style: have a length and give samples by index: received NoneType"),
        ((X, Y, Y), "inputs must be map-style"),
        (iter(X), "inputs must be map-style"),
        (np.where(np.arange(60)[:, None] == 7, np.nan, X), "received NaN for sample 7"),
        (Bare([*X[:3], "a"]), "run's data set has them, before its transforms"),
        (["a", "b"], "before its transforms: received"),
    ],
)
def test_samples_that_are_not_like_the_runs_are_refused(
    trained_once: CVResults, inputs: Any, told: str
) -> None:
    with pytest.raises(InputError, match=re.escape(told)):
        trained_once.ensemble().predict(inputs)


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> CVResults:
    return trained(tmp_path_factory.mktemp("once") / "run", report=False)


# What is refused


def test_what_was_read_from_disk_has_no_models(trained_once: CVResults) -> None:
    results = load_results(trained_once.root_dir)
    for ask in (results.model, results.ensemble):
        with pytest.raises(InputError, match="models come from results of a call"):
            ask()


def test_an_ensemble_needs_all_folds_and_a_model_its_own(root: Path) -> None:
    with pytest.warns(JobsFailedWarning):
        results = trained(root, Failing, n_repeats=2)
    done = [job for job in results.plan.jobs if results.results[job.id].status == "done"]
    assert len(done) == 2
    with pytest.raises(InputError) as refused:
        results.ensemble("tiny/step")
    assert str(refused.value).count("is failed: RuntimeError: that sample") == 4
    failed = next(job for job in results.plan.jobs if job not in done)
    with pytest.raises(InputError, match=f"{failed.id}, which is failed: RuntimeError: that samp"):
        results.state_dict(failed.candidate, failed.fold, failed.repeat)
    assert isinstance(results.model("tiny/step", done[0].fold, done[0].repeat), Failing)
    with pytest.raises(ValueError, match="none is best"):
        results.ensemble()
    with pytest.raises(InputError, match="candidate must be one of tiny/step"):
        results.ensemble("tiny/warm")


def test_what_has_changed_since_the_run_is_told_with_the_fold(tmp_path: Path) -> None:
    data = X.copy()
    scale = [1.0]

    def scaled(sample: Any) -> Any:
        return sample * scale[0]

    results = trained(tmp_path / "transform", dataset=(data, Y), eval_transform=scaled)
    ensemble = results.ensemble()
    scale[0] = 1.5
    changed = (
        r"recorded for held-out samples: received tiny/step/fold-0, which differs by up to .* of"
    )
    with pytest.raises(InputError, match=changed):
        ensemble.outputs(X)
    scale[0] = 1.0
    data[results.folds[2].valid] += 1
    with pytest.raises(InputError, match=r"received tiny/step/fold-2, which differs by up to"):
        results.ensemble().outputs(X)
    data[results.folds[2].valid] -= 1

    results = trained(tmp_path / "preprocess", preprocess=FunctionTransformer(scaled))
    scale[0] = 2.0
    with pytest.raises(InputError, match=re.sub("0", r"\\d", changed)):
        results.ensemble().outputs(X)

    last: list[nn.Module] = [nn.Identity()]
    results = trained(tmp_path / "shape", lambda: nn.Sequential(nn.Linear(8, 3), *last))
    last[0] = nn.Unflatten(1, (3, 1))
    with pytest.raises(InputError, match="tiny/step/fold-0, which differs in shape"):
        results.ensemble().outputs(X)

    wide = [16]
    results = trained(
        tmp_path / "model", lambda: nn.Sequential(nn.Linear(8, wide[0]), nn.Linear(wide[0], 3))
    )
    wide[0] = 9
    with pytest.raises(InputError, match="must be the one that was trained: received tiny: Error"):
        results.ensemble().outputs(X)


class Few(Dataset[Any]):
    def __init__(self) -> None:
        self.count = 60

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(X[index]), int(Y[index])


def test_a_data_set_of_another_length_is_told(root: Path) -> None:
    dataset = Few()
    results = trained(root, dataset=dataset)
    dataset.count = 50
    with pytest.raises(InputError, match="must have the run's 60 samples: received 50"):
        results.ensemble().outputs(X)


class OfItsBatch(nn.Module):
    """What it says of a sample depends on the others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs)
        return found


def test_where_the_batch_matters_the_runs_own_is_compared(root: Path) -> None:
    assert trained(root, OfItsBatch).ensemble().predict(X).shape == (60,)


# Numbers


class Numbers(nn.Module):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(8, outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(inputs)
        return found


def test_numbers_are_predicted_as_the_mean(root: Path) -> None:
    targets = X[:, :1] * 2
    ensemble = trained(root, Numbers, (X, targets), nn.MSELoss()).ensemble()
    assert ensemble.classes == ()
    found = ensemble.outputs(X)
    assert (found.shape, found.dtype) == ((60, 1), np.float32)
    np.testing.assert_array_equal(ensemble.predict(X), found[:, 0])
    with pytest.raises(InputError, match="needs targets that are classes"):
        ensemble.predict_proba(X)


def test_one_output_of_log_odds_gives_probabilities_of_two_classes(tmp_path: Path) -> None:
    targets = (X[:, :1] > 0).astype(np.float32)
    ensemble = trained(
        tmp_path / "one", Numbers, (X, targets), nn.BCEWithLogitsLoss(), scoring="r2"
    ).ensemble()
    odds = expit(said_by_each(ensemble, X).astype(np.float64)).mean(axis=0)
    found = ensemble.predict_proba(X)
    np.testing.assert_allclose(found, np.hstack([1 - odds, odds]))
    np.testing.assert_array_equal(ensemble.predict(X), (odds[:, 0] > 0.5).astype(np.int64))
    several = (X[:, :2] > 0).astype(np.float32)
    ensemble = trained(
        tmp_path / "two", lambda: Numbers(2), (X, several), nn.BCEWithLogitsLoss()
    ).ensemble()
    shares = expit(said_by_each(ensemble, X).astype(np.float64)).mean(axis=0)
    np.testing.assert_allclose(ensemble.predict_proba(X), shares)
    np.testing.assert_array_equal(ensemble.predict(X), shares > 0.5)


def test_a_model_that_was_trained_alone_is_an_ensemble_of_one(root: Path) -> None:
    found = fit(Tiny, (X, Y), adam, nn.CrossEntropyLoss(), root, epochs=1, verbose=0)
    said = found.results.ensemble().outputs(X)
    with torch.no_grad():
        told = found.model.eval()(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(said, told, rtol=1e-5, atol=1e-6)
