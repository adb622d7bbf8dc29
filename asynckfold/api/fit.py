"""Train one model alone: a run of one job, with the same trainers and promises.

::

    fit(model, dataset, …) ── AsyncKFold with one fold ── the last checkpoint ── the model, trained

It has what a run has: a folder that continues it, checkpoints, workers, a report.
`DistributedTrainer` and `DistributedTester` keep the names and signatures of the project that this
one grew out of.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from asynckfold.api.arguments import Settings
from asynckfold.api.export import as_npy
from asynckfold.api.kfold import AsyncKFold, checked
from asynckfold.api.refit import SEEN, SEEN_AGAIN
from asynckfold.errors import OUT_OF_TIME, InputError, InterruptedRunError, Problem, refuse
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.recipe import InitialState
from asynckfold.jobs.result import Epoch, Result
from asynckfold.results.cv_results import CVResults
from asynckfold.results.report.predictions import class_accuracy
from asynckfold.system.files import make_folder, write_whole

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, eq=False)
class Fitted:
    """A trained model and the history of its training.

    Parameters
    ----------
    model : nn.Module
        The caller's module if one was given, else a new one.
    results : CVResults
        Results of the run, which has this one job.
    """

    model: nn.Module
    results: CVResults

    @property
    def result(self) -> Result:
        """The job's result: scores, times, where it ran."""
        return next(iter(self.results.results.values()))

    @property
    def classes_(self) -> npt.NDArray[Any] | None:
        """Labels of the classes, in the order of the model's outputs; see `CVResults.classes_`."""
        return self.results.classes_

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        """Losses, accuracy and seconds of each epoch."""
        return self.result.epochs

    @property
    def score(self) -> float:
        """The first score, on held-out samples if there are any."""
        return self.result.scores[self.results.plan.scoring[0]]


@checked("fit", Settings)
def fit(
    model: Any,
    dataset: Any,
    optimizer: Any,
    criterion: Callable[..., Any],
    root_dir: str | Path,
    batch_size: int | Literal["full"] = 32,
    *,
    scheduler: Any = "constant",
    valid: Any = None,
    epochs: int = 5,
    trainer_params: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Fitted:
    """Train one model alone; the same call on the same folder continues it.

    Parameters
    ----------
    model : nn.Module, class or zero-argument callable
        A module is trained in place, from its present weights. To continue, pass it with the
        weights that it had at first: call ``torch.manual_seed`` before making it, or pass its
        class.
    dataset : Dataset or (X, y)
        Training samples. Positions in `valid` hold some of them out.
    optimizer : callable or torch.optim.Optimizer
        Model → optimizer, or an optimizer of the module's parameters.
    criterion : callable
        (outputs, targets) → scalar loss. Its parameters are trained in place, too.
    root_dir : str or Path
        Folder of the run: checkpoints, log, results.
    batch_size : int or "full"
        Samples per step.
    scheduler : str, callable, LR schedule or None
        A name as in `AsyncKFold`, optimizer → LR schedule, or an LR schedule of the optimizer.
    valid : Dataset, (X, y), or array of int, optional
        Samples to score after each epoch: other samples, or the positions of samples of `dataset`,
        which are then held out. By default all samples train, and up to 1,000 of them are scored:
        that measures memorisation, not generalisation.
    epochs : int
        Passes over the samples.
    trainer_params : Mapping, optional
        The other fields of `TrainerParams`.
    **settings
        Keyword arguments of `AsyncKFold`: `trainer`, `processes`, `random_state`, `verbose`, ….

    Returns
    -------
    Fitted
        The trained model, the epochs, the run's results.

    Raises
    ------
    InputError
        Nothing was started.
    AllJobsFailedError
        The user's code raised, training diverged, or it took longer than `job_timeout_s`; the same
        call with more seconds continues it.
    InterruptedRunError
        Ctrl-C, or `time_budget_s` is over; the same call continues.

    Examples
    --------
    >>> import tempfile, torch
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> fitted = fit(torch.nn.Linear(64, 10), (X.astype("float32"), y),
    ...             lambda model: torch.optim.Adam(model.parameters(), 1e-2),
    ...             torch.nn.CrossEntropyLoss(), tempfile.mkdtemp(), valid=range(1500, 1797),
    ...             epochs=3, verbose=0, report=False)
    >>> len(fitted.epochs), fitted.score > 0.7
    (3, True)
    """
    from asynckfold.training.losses import trained_parameters

    is_module = hasattr(model, "state_dict") and not isinstance(model, type)
    opt_fn, schedule = _factories(model, criterion, optimizer, scheduler, is_module)
    named = {type(model).__name__: InitialState.of(model)} if is_module else [model]
    samples, train, held_out = _parts(dataset, valid)
    if valid is None:
        settings["about"] = {"scored": SEEN, **settings.get("about", {})}
    kfold = AsyncKFold([(train, held_out)], samples, root_dir, criterion, batch_size, **settings)
    params = {**(trainer_params or {}), "epochs": epochs}
    results = kfold(named, schedule, opt_fn, params)
    if results.counts["pending"]:
        raise InterruptedRunError("the time budget is over; the same call continues", OUT_OF_TIME)
    trained = model if is_module else model()
    best = results.candidates[0].name
    trained.load_state_dict(results.state_dict(best))
    if is_module and trained_parameters(criterion):
        cast("nn.Module", criterion).load_state_dict(results.state_dict(best, of="criterion"))
    return Fitted(trained, results)


class DistributedTrainer:
    """Train one model on several processes, on CPUs.

    One process uses the plain trainer with one thread; several use ``trainer="hogwild"``.

    Parameters
    ----------
    num_processes : int
        Processes, a core each.
    criterion : callable
        (outputs, targets) → scalar loss.
    root_dir : str or Path
        Folder of the run. A call with the same arguments continues it.
    batch_size : int
        Samples per step of each process.

    Examples
    --------
    >>> import tempfile, torch
    >>> model, inputs = torch.nn.Linear(4, 2), torch.randn(64, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    >>> trainer = DistributedTrainer(1, torch.nn.CrossEntropyLoss(), tempfile.mkdtemp(), 16)
    >>> fitted = trainer(model, (inputs, (inputs[:, 0] > 0).long()), optimizer, scheduler, epochs=2)
    >>> fitted.model is model, [round(epoch.lr, 3) for epoch in fitted.epochs]
    (True, [0.1, 0.01])
    """

    def __init__(
        self,
        num_processes: int,
        criterion: Callable[..., Any],
        root_dir: str | Path,
        batch_size: int,
    ) -> None:
        self.num_processes = num_processes
        self.criterion = criterion
        self.root_dir = Path(root_dir)
        self.batch_size = batch_size

    def __call__(
        self,
        model: Any,
        dataset: Any,
        optimizer: Any,
        scheduler: Any,
        epochs: int = 5,
        print_frequency: int = 100,
    ) -> Fitted:
        """Train; arguments and result are those of `fit`.

        `print_frequency` is the number of batches between two lines of the log in `root_dir`.
        """
        return fit(
            model,
            dataset,
            optimizer,
            self.criterion,
            self.root_dir,
            self.batch_size,
            scheduler=scheduler,
            epochs=epochs,
            trainer_params={"print_frequency": print_frequency},
            trainer="plain" if self.num_processes == 1 else "hogwild",
            processes=self.num_processes,
            threads_per_job=1,
            devices="cpu",
            verbose=0,
        )


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a model on test samples.

    Parameters
    ----------
    samples : int
        Number of samples.
    accuracy : float
        Share of samples whose largest output is that of their class.
    class_accuracy : tuple of float
        Accuracy of each class; NaN for a class without samples.
    """

    samples: int
    accuracy: float
    class_accuracy: tuple[float, ...]


class DistributedTester:
    """Test a model on the samples of a loader, on the model's device.

    Writes ``test.json`` and ``confusion_matrix.npy``, a row per true class, into a folder.

    Parameters
    ----------
    data_loader : iterable of (inputs, targets)
        Batches; targets are class indices of shape (B,).
    root_dir : str or Path
        Folder of the two files; may be the folder of a run.
    num_classes : int, optional
        Classes to count; by default the model's outputs.

    Examples
    --------
    >>> import tempfile, torch
    >>> inputs = torch.eye(3)
    >>> tester = DistributedTester([(inputs, torch.tensor([0, 1, 1]))], tempfile.mkdtemp())
    >>> tester(torch.nn.Identity())
    Accuracy(samples=3, accuracy=0.6666666666666666, class_accuracy=(1.0, 0.5, nan))
    """

    def __init__(
        self,
        data_loader: Iterable[Sequence[Any]],
        root_dir: str | Path,
        num_classes: int | None = None,
    ) -> None:
        self.data_loader = data_loader
        self.root_dir = Path(root_dir)
        self.num_classes = num_classes

    def __call__(self, model: nn.Module) -> Accuracy:
        """Return the accuracy, overall and of each class; the model keeps its mode.

        Raises
        ------
        InputError
            No samples, targets that are not class indices, or more outputs than classes.
        """
        import torch
        from sklearn.metrics import confusion_matrix

        device = next((item.device for item in model.parameters()), torch.device("cpu"))
        before, truth, guesses, size = model.training, [], [], self.num_classes or 0
        model.eval()
        try:
            with torch.no_grad():
                for inputs, targets in self.data_loader:
                    outputs = model(inputs.to(device)).cpu()
                    refuse(_target_problems(outputs, targets.cpu(), self.num_classes))
                    truth += targets.tolist()
                    guesses += outputs.argmax(1).tolist()
                    size = max(size, outputs.shape[1])
        finally:
            model.train(before)
        count = len(truth)
        if not count:
            raise InputError.one("data_loader must give samples", "none", "Check its data set.")
        confusion = confusion_matrix(truth, guesses, labels=range(size))
        accuracy = float(confusion.trace() / count)
        tested = Accuracy(count, accuracy, class_accuracy(confusion, len(confusion)))
        make_folder(self.root_dir)
        shares = [None if share != share else share for share in tested.class_accuracy]
        record = {**vars(tested), "class_accuracy": shares}
        write_whole(self.root_dir / "test.json", json.dumps(record).encode())
        write_whole(self.root_dir / "confusion_matrix.npy", as_npy(confusion))
        return tested


@dataclass(frozen=True, eq=False)
class _SameOptimizer:
    """Copies an optimizer, with its state, for a copy of its module."""

    optimizer: Any
    # Weights of the model, not a setting of the optimizer.
    _parameters: list[Any]

    def __call__(self, model: Any, criterion: Any) -> Any:
        copies = _parameters_of(model, criterion)
        return copy.deepcopy(
            self.optimizer, dict(zip(map(id, self._parameters), copies, strict=True))
        )


@dataclass(frozen=True, eq=False)
class _SameSchedule:
    """Copies an LR schedule for a copy of its optimizer."""

    schedule: Any

    def __call__(self, optimizer: Any) -> Any:
        from torch.optim.lr_scheduler import ConstantLR

        # Torch wraps the steps of an optimizer when a schedule is made, and misses that in a copy.
        # This schedule changes no rate.
        ConstantLR(optimizer, factor=1.0)
        return copy.deepcopy(self.schedule, {id(self.schedule.optimizer): optimizer})


def _parameters_of(*parts: Any) -> list[Any]:
    return [item for part in parts if hasattr(part, "parameters") for item in part.parameters()]


def _factories(
    model: Any, criterion: Any, optimizer: Any, scheduler: Any, is_module: bool
) -> tuple[Any, Any]:
    """Return the factories of optimizer and LR schedule."""
    if not hasattr(optimizer, "param_groups"):
        return optimizer, _schedule_of(scheduler, None)
    trained = {id(item): item for item in _parameters_of(model, criterion)} if is_module else {}
    held = {id(item) for group in optimizer.param_groups for item in group["params"]}
    if not held <= trained.keys():
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        raise InputError.one(
            "an optimizer must hold parameters of the module that is trained, and of the criterion",
            f"{type(optimizer).__name__} and {kind}",
            "Pass the module itself, or model → optimizer.",
        )
    schedule = _schedule_of(scheduler, optimizer)
    return _SameOptimizer(optimizer, list(trained.values())), schedule


def _schedule_of(scheduler: Any, optimizer: Any) -> Any:
    if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "optimizer")):
        return "constant" if scheduler is None else scheduler
    name = type(scheduler).__name__
    if scheduler.optimizer is not optimizer:
        raise InputError.one(
            "an LR schedule must belong to the optimizer that trains",
            f"{name} of another",
            "Pass both as objects, or optimizer → LR schedule.",
        )
    return {name: _SameSchedule(scheduler)}


def _parts(dataset: Any, valid: Any) -> tuple[Any, Indices, Indices]:
    """Return one data set, the training samples and the scored samples."""
    from torch.utils.data import Dataset

    from asynckfold.data.dataset import joined, open_source, repeated

    if valid is None:
        return repeated(dataset, SEEN_AGAIN)
    # Reading a sample of a data set may crash.
    is_pairs = isinstance(valid, (tuple, Dataset)) or (
        not hasattr(valid, "__array__")
        and (
            hasattr(valid, "__getitem__") and len(valid) > 0 and isinstance(valid[0], (tuple, list))
        )
    )
    if is_pairs:
        return joined(dataset, valid)
    numbers, count = np.asarray(valid), len(open_source(dataset))
    if numbers.dtype == bool:
        if numbers.shape != (count,):
            rule = f"valid, as a mask, must have an entry for each of the {count} samples"
            remedy = "Pass a mask of that length, or sample numbers."
            raise InputError.one(rule, f"shape {numbers.shape}", remedy)
        numbers = np.flatnonzero(numbers)
    return dataset, np.setdiff1d(np.arange(count), numbers), numbers


def _target_problems(outputs: Any, targets: Any, num_classes: int | None) -> Iterator[Problem]:
    shapes = f"targets of shape {tuple(targets.shape)}, outputs {tuple(outputs.shape)}"
    count = outputs.shape[1] if outputs.ndim == 2 else 0
    if count < 2 or targets.ndim != 1 or targets.is_floating_point():
        yield Problem("a tester needs class indices, and one output a class", shapes, "Pass both.")
    elif num_classes is not None and num_classes < count:
        rule = f"num_classes must be at least the model's {count} outputs"
        yield Problem(rule, repr(num_classes), "Leave num_classes out.")
    elif len(outside := targets[(targets < 0) | (targets >= count)]):
        rule = f"class indices must be those of the {count} outputs, from 0"
        yield Problem(rule, f"{int(outside[0])}", "Pass indices into classes_ of what was fitted.")
