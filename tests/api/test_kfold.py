"""`AsyncKFold` from the caller's side: what goes in, what comes out, and how jobs fail."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import model_selection as sk
from torch import nn

from asynckfold import (
    AllJobsFailedError,
    AsyncKFold,
    CVResults,
    Fold,
    InputError,
    JobFailedError,
    JobsFailedWarning,
    Plan,
    PlanMismatchError,
    RunStore,
)
from tests.leftovers import descendants, described, gone
from tests.toy import Echo, Moody, Tiny, adam, samples

X, Y = samples()
CE = nn.CrossEntropyLoss()
EPOCHS = {"epochs": 2}


def kfold(root: Path, folds: Any = 3, **settings: Any) -> AsyncKFold:
    dataset = settings.pop("dataset", (X, Y))
    criterion = settings.pop("criterion", CE)
    settings = {"verbose": 0, "baseline": None, **settings}
    return AsyncKFold(folds, dataset, root, criterion, 10, **settings)


def serial(root: Path, folds: Any = 3, **settings: Any) -> CVResults:
    """A quick run in this process."""
    return kfold(root, folds, parallelize=False, **settings)([Tiny], ["step"], adam, EPOCHS)


def planned(root: Path, folds: Any = 3, **settings: Any) -> tuple[Plan, tuple[Fold, ...]]:
    return kfold(root, folds, parallelize=False, **settings).plan([Tiny], ["step"], adam, EPOCHS)


# The door


def test_the_signature_is_the_one_that_was_promised() -> None:
    names = list(inspect.signature(AsyncKFold).parameters.values())
    assert [item.name for item in names[:6]] == [
        "kfolds", "dataset", "root_dir", "criterion", "batch_size", "parallelize",
    ]  # fmt: skip
    assert names[5].default is True
    assert all(item.kind is item.KEYWORD_ONLY for item in names[6:])
    assert {
        "cv", "n_splits", "n_repeats", "groups", "random_state", "n_jobs", "scoring", "error_score",
        "verbose", "threads_per_job", "devices", "resume", "train_transform", "eval_transform",
        "baseline",
    } <= {item.name for item in names}  # fmt: skip
    called = list(inspect.signature(AsyncKFold.__call__).parameters)[1:]
    assert called == ["models", "schedulers", "opt_fn", "trainer_params", "params", "n_iter"]


def test_everything_by_position(root: Path) -> None:
    params = {"epochs": 1, "save_checkpoint_frequency": 20, "print_frequency": 15}
    results = AsyncKFold(2, (X, Y), str(root), CE, 10, False, verbose=0)(
        [Tiny], ["cosine"], adam, params
    )
    assert results.counts["done"] == 2
    assert results.plan.params.print_frequency == 15


def test_the_learning_rate_is_constant_where_no_schedule_is_given(root: Path) -> None:
    plans = [kfold(root).plan([Tiny], *given)[0] for given in ((None, adam), ("constant", adam))]
    assert plans[0].fingerprint == plans[1].fingerprint
    with pytest.raises(InputError, match=r"there must be an LR schedule: received \[\]"):
        kfold(root).plan([Tiny], [], adam)


def test_aliases_of_kfolds_and_numbers_of_numpy(root: Path) -> None:
    prints = {
        planned(root, 3)[0].fingerprint,
        planned(root, None, cv=3)[0].fingerprint,
        planned(root, None, n_splits=np.int64(3), random_state=np.int64(0))[0].fingerprint,
    }
    assert len(prints) == 1


def test_plan_starts_and_writes_nothing(root: Path) -> None:
    before = descendants()
    plan, folds = kfold(root).plan([Tiny], ["step", "warm"], adam, EPOCHS)
    assert [job.id for job in plan.jobs][:4] == [
        "Tiny/step/fold-0", "Tiny/step/fold-1", "Tiny/step/fold-2", "Tiny/warm/fold-0",
    ]  # fmt: skip
    assert sorted(np.concatenate([fold.valid for fold in folds])) == list(range(60))
    assert not root.exists()
    assert not descendants() - before


# The same numbers


def test_any_number_of_workers_gives_the_bits_of_the_serial_engine(tmp_path: Path) -> None:
    models = {"Tiny": Tiny, "linear": lambda: nn.Linear(8, 3)}
    found = {}
    for name, settings in {
        "serial": {"parallelize": False},
        "one": {"n_jobs": 1},
        "two": {"n_jobs": 2},
    }.items():
        results = kfold(tmp_path / name, **settings)(models, ["cosine", "reduce"], adam, EPOCHS)
        assert results.counts["done"] == 12
        found[name] = {job: item.digest for job, item in results.results.items()}
    assert found["serial"] == found["one"] == found["two"]
    assert len(set(found["serial"].values())) == 12


def test_the_callers_random_state_stays(root: Path) -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index] # noqa: NPY002
    serial(root)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()  # type: ignore[index] # noqa: NPY002


# Folds


GROUPS = np.repeat(np.arange(12), 5)


@pytest.mark.parametrize(
    ("splitter", "groups"),
    [
        (sk.KFold(4), None),
        (sk.StratifiedKFold(3, shuffle=True, random_state=1), None),
        (sk.GroupKFold(3), GROUPS),
        (sk.ShuffleSplit(2, test_size=0.3, random_state=0), None),
        (sk.TimeSeriesSplit(3), None),
        (sk.RepeatedStratifiedKFold(n_splits=2, n_repeats=2, random_state=0), None),
        (sk.PredefinedSplit(np.arange(60) % 2), None),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "split") else "",
)
def test_any_splitter(root: Path, splitter: Any, groups: Any) -> None:
    plan, folds = planned(root, splitter, groups=groups)
    expected = list(splitter.split(X, Y, groups))
    for fold, (train, valid) in zip(folds, expected, strict=True):
        assert np.array_equal(fold.train, train)
        assert np.array_equal(fold.valid, valid)
    assert len(plan.jobs) == len(expected)


def test_a_list_of_pairs(root: Path) -> None:
    pairs = [(np.arange(20, 60), np.arange(20)), (list(range(30)), [40, 41])]
    results = serial(root, pairs)
    assert results.folds[1].valid.tolist() == [40, 41]
    rows = np.isnan(results.oof["Tiny/step"]).any(axis=1)
    assert np.flatnonzero(~rows).tolist() == [*range(20), 40, 41]


def test_groups_and_repeats(root: Path) -> None:
    plan, folds = planned(root, 3, groups=GROUPS, n_repeats=2)
    assert len(plan.jobs) == 6
    assert "Tiny/step/repeat-1/fold-2" in {job.id for job in plan.jobs}
    for fold in folds:
        assert not set(GROUPS[fold.train]) & set(GROUPS[fold.valid])
    valid = [tuple(fold.valid) for fold in folds]
    assert len(set(valid)) == 6


def test_stratified_unless_told_otherwise(tmp_path: Path) -> None:
    labels = np.array([0] * 48 + [1] * 12)
    shares = {}
    for stratify in (True, False):
        plan, folds = planned(tmp_path, 4, dataset=(X, labels), stratify=stratify)
        shares[stratify] = {int(labels[fold.valid].sum()) for fold in folds}
        assert len(plan.jobs) == 4
    assert shares[True] == {3}
    assert shares[False] != {3}


# Scores


def test_a_users_score_that_raises_fails_the_job(root: Path) -> None:
    def moody(targets: Any, outputs: Any) -> float:
        raise LookupError("not today")

    with pytest.raises(AllJobsFailedError, match="scoring raised LookupError: not today"):
        serial(root, scoring=moody)


def test_out_of_fold_rows_are_those_of_the_dataset(root: Path) -> None:
    results = kfold(root)(
        [Echo], ["step"], lambda model: torch.optim.SGD(model.parameters(), 0.0), EPOCHS
    )
    assert np.array_equal(results.oof["Echo/step"], X)
    with np.load(root / "oof" / "Echo-step.npz") as file:
        assert np.array_equal(file["outputs"], X)


# Failures


def test_a_model_that_raises_in_one_fold(root: Path) -> None:
    with pytest.warns(JobsFailedWarning, match="1 of 6 jobs failed") as caught:
        results = kfold(root)({"Moody": Moody, "Tiny": Tiny}, ["step"], adam, EPOCHS)
    assert caught[0].filename == __file__
    text = str(caught[0].message)
    assert "1 × ArithmeticError: seven (Moody/step/fold-" in text
    assert results.counts == {
        "planned": 6, "done": 5, "failed": 1, "diverged": 0, "cancelled": 0, "pending": 0,
    }  # fmt: skip
    moody, tiny = results.candidates
    assert (moody.complete, moody.status, tiny.complete) == (False, "failed", True)
    assert results.best_params_["model"] == "Tiny"
    frame = results.to_frame().set_index("model")
    assert frame.loc["Tiny", "rank"] == 1
    assert np.isnan(frame.loc["Moody", "rank"])
    (failed,) = [item for item in results.results.values() if item.status == "failed"]
    assert "in forward" in failed.traceback
    assert "ArithmeticError: seven" in (root / failed.job_id / "log.txt").read_text()


@pytest.mark.parametrize(("error_score", "mean"), [(float("nan"), np.nan), (0.0, None)])
def test_error_score_stands_for_a_failed_fold(
    root: Path, error_score: float, mean: float | None
) -> None:
    with pytest.warns(JobsFailedWarning):
        results = kfold(root, parallelize=False, error_score=error_score)(
            [Moody], ["step"], adam, EPOCHS
        )
    scores = [results.cv_results_[f"split{fold}_test_accuracy"][0] for fold in range(3)]
    known = [score for score in scores if score > 0]
    assert len(known) == 2
    expected = sum(known) / 3 if mean is None else mean
    np.testing.assert_allclose(results.cv_results_["mean_test_accuracy"][0], expected)
    assert not results.candidates[0].complete


def test_error_score_raise(root: Path) -> None:
    with pytest.raises(JobFailedError, match=r"(?s)1 of 3 jobs failed.*in forward"):
        kfold(root, parallelize=False, error_score="raise")([Moody], ["step"], adam, EPOCHS)


def test_a_model_that_cannot_take_the_samples_is_refused_or_left_out(root: Path) -> None:
    models = {"wide": lambda: nn.Linear(9, 3), "Tiny": Tiny}
    refusal = r"wide must take the samples, in batches of float32 \(10, 8\): received RuntimeError"
    with pytest.raises(InputError, match=refusal):
        kfold(root)(models, ["step"], adam, EPOCHS)
    assert not root.exists()
    with pytest.raises(InputError, match=refusal):
        kfold(root, keep_going=True, parallelize=False)(
            {"wide": models["wide"]}, ["step"], adam, EPOCHS
        )
    # The run continues without the argument.
    for attempt, keep_going in ((1, True), (2, False)):
        with pytest.warns(JobsFailedWarning, match=f"3 of 6 jobs failed:\n  3 × model {refusal}"):
            results = kfold(root, keep_going=keep_going, parallelize=False)(
                models, ["step"], adam, EPOCHS
            )
        assert (results.counts["done"], results.counts["failed"]) == (3, 3)
        failed = [item for item in results.results.values() if item.status == "failed"]
        assert {(item.attempt, item.cores, item.epochs) for item in failed} == {(attempt, (), ())}
        assert results.best_params_["model"] == "Tiny"
        assert not list(root.glob("wide/step/*/log.txt")), "none was started"
    assert "must take the samples" in results.report().read_text()


class Kills(Tiny):
    """Its process is killed in the fold that is scored on sample 7."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training and (inputs == torch.from_numpy(X[7])).all(dim=1).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs)


def test_a_job_that_kills_its_process_is_tried_three_times(root: Path) -> None:
    with pytest.warns(JobsFailedWarning, match="1 of 6 jobs failed"):
        results = kfold(root, n_jobs=2)({"Kills": Kills, "Tiny": Tiny}, ["step"], adam, EPOCHS)
    assert results.counts["done"] == 5
    (failed,) = [item for item in results.results.values() if item.status == "failed"]
    assert "SIGKILL" in failed.error
    assert "3 attempts" in failed.error
    with RunStore.read(root) as store:
        tries = [item for item in store.attempts() if item.job_id == failed.job_id]
        others = [item for item in store.attempts() if item.job_id != failed.job_id]
    assert [item.attempt for item in tries] == [1, 2, 3]
    assert all(item.attempt == 1 for item in others)


def test_a_loss_that_becomes_nan_diverges(root: Path) -> None:
    models = {"Tiny": Tiny, "nan": lambda: nn.Sequential(nn.Linear(8, 3), Nan())}
    with pytest.warns(JobsFailedWarning, match="3 × the loss became nan at epoch 1, batch 1"):
        results = kfold(root, parallelize=False)(models, ["step"], adam, EPOCHS)
    assert results.counts["diverged"] == 3
    assert results.counts["done"] == 3
    assert results.best_params_["model"] == "Tiny"


class Nan(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * float("nan")


# The same folder again


def test_a_finished_run_trains_nothing_again(root: Path) -> None:
    first = serial(root)
    with RunStore.read(root) as store:
        tries = store.attempts()
    again = serial(root)
    assert again.fingerprint == first.fingerprint
    assert again.seconds == first.seconds
    with RunStore.read(root) as store:
        assert store.attempts() == tries
    parallel = kfold(root, n_jobs=2, resume="must")([Tiny], ["step"], adam, EPOCHS)
    assert parallel.fingerprint == first.fingerprint
    with RunStore.read(root) as store:
        assert store.attempts() == tries
    anew = serial(root, resume="never")
    assert anew.fingerprint == first.fingerprint
    with RunStore.read(root) as store:
        assert len({attempt.attempt for attempt in store.attempts()}) == 1
    with RunStore.read(root.with_name(f"{root.name}.earlier-1")) as store:
        assert store.attempts() == tries


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"folds": 4}, "folds: 3 there, 4 here"),
        ({"random_state": 5}, "random_state: 0 there, 5 here"),
        ({"dataset": (X + 1, Y)}, "dataset"),
        ({"models": {"Other": Tiny}}, "models: Tiny there, Other here"),
        ({"models": {"Tiny": lambda: nn.Linear(8, 3)}}, "model 'Tiny': it was Tiny, is the lambda"),
        ({"params": {"epochs": 1}}, "params.epochs: 2 there, 1 here"),
        (
            {"opt_fn": lambda model: torch.optim.SGD(model.parameters(), 0.5)},
            "opt_fn: it was adam(), is the lambda",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_another_plan_is_refused_naming_the_first_difference(
    finished: Path, change: dict[str, Any], difference: str
) -> None:
    fingerprint = _fingerprint(finished)
    models = change.pop("models", [Tiny])
    opt_fn, params = change.pop("opt_fn", adam), change.pop("params", EPOCHS)
    with pytest.raises(PlanMismatchError) as caught:
        kfold(finished, parallelize=False, **change)(models, ["step"], opt_fn, params)
    assert "holds a run with another plan" in str(caught.value)
    assert f"received {difference}" in str(caught.value)
    assert "se another folder" in str(caught.value)
    assert "resume='never'" in str(caught.value)
    assert _fingerprint(finished) == fingerprint


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is complete."""
    return serial(tmp_path_factory.mktemp("finished") / "run", report=False).root_dir


def _fingerprint(root: Path) -> str:
    with RunStore.read(root) as store:
        return store.fingerprint()


# What is said


def test_an_instance_is_copied_and_that_is_said(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Tiny()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    results = kfold(root, parallelize=False, verbose=1)([model], ["step"], adam, EPOCHS)
    assert "model Tiny was given as an instance" in capsys.readouterr().err
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert results.counts["done"] == 3
    with RunStore.read(root) as store:
        assert any("given as an instance" in event.text for event in store.events())


@pytest.mark.parametrize("parallelize", [True, False])
def test_silent_means_silent(
    root: Path, capfd: pytest.CaptureFixture[str], parallelize: bool
) -> None:
    class Loud(Tiny):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            print("loud")
            return super().forward(inputs)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = kfold(root, parallelize=parallelize, baseline="estimate")(
            [Loud if parallelize else Tiny], ["step"], adam, {"epochs": 1}
        )
    assert capfd.readouterr() == ("", "")
    assert results.baseline is not None
    if parallelize:
        assert "loud" in (root / "Loud/step/fold-0/log.txt").read_text()


@pytest.mark.parametrize("kind", ["measure", "estimate"])
def test_the_serial_baseline_says_what_it_is(root: Path, kind: str) -> None:
    results = kfold(root, baseline=kind)([Tiny], ["step"], adam, {"epochs": 1})
    assert results.baseline is not None
    assert results.baseline.kind == {"measure": "measured", "estimate": "estimated"}[kind]
    found = results.timing
    ratio = results.baseline.seconds / results.seconds
    # Of a busy machine there is neither.
    assert found.ratio in (pytest.approx(ratio) if kind == "measure" else None, None)
    assert found.estimate in (pytest.approx(ratio) if kind == "estimate" else None, None)
    assert bool(found.why_not) == bool(results.baseline.disturbance)
    assert results.speedup == found.ratio


# Workers


def test_workers_stay_warm_for_the_next_call_of_this_process(
    tmp_path: Path, close_workers: Callable[[], None]
) -> None:
    close_workers()
    others = descendants()  # what other tests started, such as multiprocessing's resource tracker
    kfold(tmp_path / "a", n_jobs=1)([Tiny], ["step"], adam, {"epochs": 1})
    first = descendants() - others
    kfold(tmp_path / "b", n_jobs=1)([Tiny], ["step"], adam, {"epochs": 1})
    assert descendants() - others == first
    assert len(first) >= 2  # the server and a worker
    close_workers()
    assert gone(first), described(first)


def test_the_callers_default_dtype_reaches_the_workers(root: Path) -> None:
    fingerprints = []
    for name, parallelize in (("serial", False), ("packed", True)):
        torch.set_default_dtype(torch.float64)
        try:
            inputs, targets = samples()
            data = torch.from_numpy(inputs).double(), targets
            call = kfold(root / name, dataset=data, parallelize=parallelize)
            fingerprints.append(call([Tiny], ["step"], adam, {"epochs": 1}).fingerprint)
        finally:
            torch.set_default_dtype(torch.float32)
    assert fingerprints[0] == fingerprints[1]


class Guarded(torch.utils.data.Dataset[Any]):
    """Holds a lock, as data sets that read archives do."""

    def __init__(self, noisy: bool = False) -> None:
        self.inputs, self.targets = samples()
        self.lock = threading.Lock()
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            noise = np.random.rand() if self.noisy else 0.0  # noqa: NPY002
            return self.inputs[index] + np.float32(noise), int(self.targets[index])


def test_a_dataset_that_cannot_be_sent_costs_the_baseline_only(root: Path) -> None:
    call = AsyncKFold(3, Guarded(), root, nn.CrossEntropyLoss(), 10, verbose=0, baseline="estimate")
    results = call([Tiny], ["step"], adam, EPOCHS)
    assert results.counts["done"] == 3
    assert results.speedup is None
    with RunStore.read(root) as store:
        (event,) = [item for item in store.events() if item.kind == "baseline"]
    assert "lock" in event.text


def test_a_dataset_that_can_neither_be_held_nor_sent_is_refused(root: Path) -> None:
    call = AsyncKFold(3, Guarded(noisy=True), root, nn.CrossEntropyLoss(), 10, verbose=0)
    with pytest.raises(InputError, match=r"dataset must be sendable.*lock"):
        call([Tiny], ["step"], adam, EPOCHS)
    assert not root.exists()
