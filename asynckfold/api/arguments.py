"""The settings of a call, and what is wrong with them: told before anything starts."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asynckfold.api.resources import Sharing
from asynckfold.errors import InputError, Problem, nearest, refuse
from asynckfold.jobs.criteria import Criterion, criterion_of, why_not_of_pairs
from asynckfold.jobs.folds import Fold, make_folds
from asynckfold.jobs.objective import Transform
from asynckfold.jobs.recipe import (
    Recipe,
    named_lr_schedules,
    named_models,
    sending_problems,
)
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.planning import fusion_groups
from asynckfold.planning.fusion_groups import Fuse
from asynckfold.store.layout import path_problems
from asynckfold.store.lock import shared_problems
from asynckfold.system.limits import allowed_cores
from asynckfold.system.machine import resolve_n_jobs

if TYPE_CHECKING:
    from asynckfold.data.labels import Labels
    from asynckfold.data.prepare import Prepared

BASELINES = ("measure", "estimate", None)
RESUMES = ("auto", "never", "must")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, eq=False)
class Settings:
    """The arguments of `AsyncKFold`, which documents them."""

    kfolds: Any
    dataset: Any
    root_dir: Path
    criterion: Callable[..., Any]
    batch_size: int
    parallelize: bool = True
    n_repeats: int = 1
    groups: Any = None
    stratify: bool = True
    targets: Any = None
    random_state: int = 0
    n_jobs: int | str = "auto"
    threads_per_job: int | str = "auto"
    devices: Any = "auto"
    stall_timeout: float | str | None = "auto"
    scoring: Any = None
    error_score: float | str = float("nan")
    train_transform: Callable[[Any], Any] | None = None
    eval_transform: Callable[[Any], Any] | None = None
    preprocess: Any = None
    resume: str = "auto"
    baseline: str | None = "estimate"
    verbose: int = 1
    allow_different_software: bool = False
    plan_from: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    sharing: Sharing = field(default_factory=Sharing)
    fuse: Fuse = "auto"
    trainer: str = "plain"
    processes: int = 1
    shared_state: bool = False
    precision: str = "fp32"
    time_budget_s: float | None = None
    job_timeout_s: float | None = None
    refit: bool = False
    random_samples: bool = False
    pos_label: Any = None
    output_transform: Callable[[Any], Any] | None = None

    @property
    def asked(self) -> Criterion | None:
        """What the criterion asks for; None where it is the user's own."""
        return criterion_of(self.criterion)

    @property
    def transform(self) -> Transform | None:
        """The user's `output_transform`, of arrays."""
        return None if self.output_transform is None else of_arrays(self.output_transform)

    @property
    def threads(self) -> int | None:
        """How many threads a job has; None where that is decided for each model."""
        return self.threads_per_job if isinstance(self.threads_per_job, int) else None

    @property
    def error_value(self) -> float:
        """What stands for the score of a failed job."""
        return float("nan") if self.error_score == "raise" else float(self.error_score)

    def problems(self) -> Iterator[Problem]:
        """Yield all that is wrong with the settings by themselves."""
        for name in ("batch_size", "threads_per_job", "n_repeats"):
            value, word = getattr(self, name), "auto" if name == "threads_per_job" else None
            if value != word and (not _is_whole(value) or value < 1):
                also = f", or {word!r}" if word else ""
                yield Problem(
                    f"{name} must be a whole number of at least 1{also}",
                    repr(value),
                    f"Pass {name}=1 or more.",
                )
        seed = self.random_state
        if not _is_whole(seed) or not 0 <= seed < 2**32:
            yield Problem(
                "random_state must be a whole number from 0 to 2**32 - 1",
                repr(seed),
                "Pass random_state=0.",
            )
        if not _is_whole(self.verbose):
            yield Problem(
                "verbose must be a number from 0 to 3", repr(self.verbose), "Pass verbose=1."
            )
        yield from self._word_problems()
        yield from _criterion_problems(self.criterion)
        yield from _preprocess_problems(self.preprocess)
        yield from _root_problems(self.root_dir, self.refit is True)
        yield from self._core_problems()
        yield from self.sharing.problems(self.parallelize)
        yield from _stall_problems(self.stall_timeout)
        yield from _limit_problems("time_budget_s", self.time_budget_s)
        yield from _random_problems(self.random_samples)
        yield from _limit_problems("job_timeout_s", self.job_timeout_s)
        yield from _refit_problems(self.refit)
        transform: object = self.output_transform
        if transform is not None and not callable(transform):
            yield Problem(
                "output_transform must be a function of outputs",
                one_line(transform),
                "Pass for instance torch.sigmoid.",
            )
        yield from self._plan_from_problems()
        yield from (Problem(*problem) for problem in fusion_groups.problems(self.fuse))

    def _word_problems(self) -> Iterator[Problem]:
        choices = {"baseline": BASELINES, "resume": RESUMES}
        if isinstance(self.devices, str):
            choices["devices"] = DEVICES
        for name, valid in choices.items():
            value = getattr(self, name)
            if value not in valid:
                shown = ", ".join(map(repr, valid))
                guess = nearest(str(value), filter(None, valid)).strip()
                yield Problem(
                    f"{name} must be one of {shown}",
                    repr(value),
                    guess or f"Leave {name} out for its default.",
                )
        numbers = self.devices
        if not isinstance(numbers, str) and not (
            isinstance(numbers, Sequence) and all(map(_is_whole, numbers))
        ):
            yield Problem(
                "devices must be 'auto', 'cpu', 'cuda', or a list of GPU numbers",
                repr(numbers)[:80],
                "Pass devices='auto'.",
            )
        if self.error_score != "raise" and not isinstance(self.error_score, (int, float)):
            yield Problem(
                "error_score must be a number or 'raise'",
                repr(self.error_score),
                "Leave error_score out for nan.",
            )

    def _core_problems(self) -> Iterator[Problem]:
        cores, left = self._cores()
        try:
            resolve_n_jobs(self.n_jobs, cores)
        except InputError as error:
            yield from error.problems
        threads = self.threads_per_job
        if isinstance(threads, int) and threads > cores:
            yield Problem(
                "threads_per_job must not exceed the cores that this process may use",
                f"{threads} threads on {cores} {'core' if cores == 1 else 'cores'}{left}",
                f"Pass threads_per_job={cores} or less: more threads than cores were measured up "
                "to 80 times slower.",
            )

    def _cores(self) -> tuple[int, str]:
        """The cores that may be used, and what was left to others, for a message."""
        cores, reserved = len(allowed_cores()), self.sharing.reserve_cores
        if _is_whole(reserved) and 0 < reserved < cores:
            return cores - reserved, f", less {reserved} reserved"
        return cores, ""

    def _plan_from_problems(self) -> Iterator[Problem]:
        if self.plan_from is None:
            return
        if not (self.plan_from / "run.db").is_file():
            yield Problem(
                "plan_from must be the folder of a run",
                f"{str(self.plan_from)!r}, where there is no run.db",
                "Leave plan_from out to have the threads decided.",
            )
        if self.threads_per_job != "auto":
            yield Problem(
                "plan_from and threads_per_job both say how many threads a job has",
                f"{str(self.plan_from)!r} and {self.threads_per_job!r}",
                "Drop one of them.",
            )

    def recipe(
        self, models: Any, schedulers: Any, opt_fn: Any, trainer_params: Any
    ) -> tuple[Recipe, TrainerParams, list[str]]:
        """Check the arguments of a call; return the live objects, the parameters, and notes.

        Raises
        ------
        InputError
            All problems, those of labels and folds among them.
        """
        named, problems, notes = named_models(models)
        lr_schedules, more = named_lr_schedules(schedulers)
        problems += more
        params = TrainerParams()
        if trainer_params is not None and not isinstance(trainer_params, Mapping):
            problems.append(
                Problem(
                    "trainer_params must be a dict",
                    repr(trainer_params)[:80],
                    "Pass for instance {'epochs': 2}.",
                )
            )
        else:
            try:
                params = TrainerParams.from_mapping(
                    {**self.trainer_words, **(trainer_params or {})}
                )
            except InputError as error:
                problems += error.problems
        problems += self._process_problems(params)
        problems += _opt_fn_problems(opt_fn)
        parts = {
            **{f"model {name}": model for name, model in named.items()},
            **{f"scheduler {name}": schedule for name, schedule in lr_schedules.items()},
            "opt_fn": opt_fn,
            "criterion": self.criterion,
            "preprocess": self.preprocess,
            "train_transform": self.train_transform,
            "eval_transform": self.eval_transform,
        }
        if self.parallelize:
            problems += sending_problems(parts)
        if problems:
            refuse([*problems, *self._data_problems()])
        return Recipe(named, lr_schedules, opt_fn, self.criterion, self.preprocess), params, notes

    @property
    def trainer_words(self) -> dict[str, Any]:
        """What the settings say of how each job trains."""
        return {
            "trainer": self.trainer,
            "processes": self.processes,
            "shared_state": self.shared_state,
            "precision": self.precision,
        }

    def _process_problems(self, params: TrainerParams) -> Iterator[Problem]:
        """Yield why a job cannot train on so many processes here."""
        count = params.processes
        if count == 1:
            return
        cores = self._cores()[0]
        if count > cores:
            yield Problem(
                "processes must not exceed the cores that this process may use",
                f"{count} processes on {cores} {'core' if cores == 1 else 'cores'}",
                f"Pass processes={cores} or less.",
            )
        if self.threads_per_job not in ("auto", 1):
            yield Problem(
                "each of several processes of a job has one thread",
                f"threads_per_job={self.threads_per_job!r}",
                "Leave threads_per_job out.",
            )
        if not self.parallelize:
            yield Problem(
                "several processes of a job are forked by a worker, and need worker processes",
                "parallelize=False",
                "Leave parallelize out, or pass processes=1.",
            )

    def _data_problems(self) -> Sequence[Problem]:
        """What is wrong with labels and folds, as far as a look at a few samples tells."""
        from asynckfold.data.arrays import by_position
        from asynckfold.data.dataset import open_source
        from asynckfold.data.labels import resolve_labels

        try:
            source = open_source(self.dataset)
            given = source.labels
            if self.targets is not None:
                given = by_position(self.targets, "targets")
            if given is None or (self.targets is None and source.rows is not None):
                return ()
            labels = resolve_labels(given, None, source.names, self.asked)
            self.divided(len(source), labels)
        except InputError as error:
            return error.problems
        return ()

    def divided(self, n_samples: int, labels: Labels | Prepared) -> tuple[Fold, ...]:
        """Return the folds."""
        strata = labels.strata
        return make_folds(
            n_samples,
            labels.targets if strata is None else strata,
            self.kfolds,
            classification=strata is not None,
            stratify=self.stratify,
            n_repeats=self.n_repeats,
            groups=self.groups,
            random_state=self.random_state,
            classes=labels.classes,
        )


def alias_problems(given: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with ``kfolds`` and its other names."""
    used = [name for name, value in given.items() if value is not None]
    if len(used) > 1:
        yield Problem(
            "kfolds, cv and n_splits are names of one setting",
            " and ".join(used),
            "Pass one of them, and None for kfolds when it is not that one.",
        )
    for name in used:
        value = given[name]
        small = isinstance(value, (int, np.integer)) and value < 2
        if isinstance(value, (bool, float, str)) or small:
            yield Problem(
                f"{name} must be a whole number of at least 2, a splitter, or index pairs",
                repr(value),
                f"Pass {name}=5.",
            )


def plain(value: Any) -> Any:
    """NumPy's whole numbers as Python's; everything else as it is."""
    return operator.index(value) if isinstance(value, np.integer) else value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stall_problems(value: Any) -> Iterator[Problem]:
    if value is None or (isinstance(value, str) and value == "auto"):
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf):
        yield Problem(
            "stall_timeout must be a number of seconds above 0, 'auto' or None",
            one_line(value),
            "Pass stall_timeout='auto', or more seconds than the longest batch takes.",
        )


def _limit_problems(name: str, value: Any) -> Iterator[Problem]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and 0 < value < math.inf):
        yield Problem(
            f"{name} must be a number of seconds above 0, or None",
            one_line(value),
            f"Pass {name}=3600, or None for no limit.",
        )


def _refit_problems(value: object) -> Iterator[Problem]:
    if not isinstance(value, bool):
        yield Problem(
            "refit must be True or False",
            one_line(value),
            "Pass refit=True, and name the score that chooses first in scoring.",
        )


def _random_problems(value: object) -> Iterator[Problem]:
    if not isinstance(value, bool):
        yield Problem(
            "random_samples must be True or False",
            one_line(value),
            "Pass random_samples=True where each read of a sample may give another pair (x, y).",
        )


def _criterion_problems(criterion: Any) -> Iterator[Problem]:
    if not callable(criterion):
        yield Problem(
            "criterion must be callable",
            one_line(criterion),
            "Pass for instance torch.nn.CrossEntropyLoss().",
        )
    elif isinstance(criterion, type):
        yield Problem(
            "criterion must be an object, not a class",
            criterion.__name__,
            f"Write {criterion.__name__}().",
        )
    elif found := why_not_of_pairs(criterion):
        rule = "criterion must be a function of outputs, and of labels or numbers"
        yield Problem(rule, *found)


def _preprocess_problems(preprocess: Any) -> Iterator[Problem]:
    lacking = [
        name
        for name in ("fit", "transform", "get_params")
        if not callable(getattr(preprocess, name, None))
    ]
    if preprocess is not None and (lacking or isinstance(preprocess, type)):
        yield Problem(
            "preprocess must be a scikit-learn transformer",
            one_line(preprocess) + (f", without {' and '.join(lacking)}" if lacking else ""),
            "Pass for instance StandardScaler(); make one of a function by FunctionTransformer, "
            "and of several steps by make_pipeline.",
        )


def _opt_fn_problems(opt_fn: Any) -> Iterator[Problem]:
    ready = isinstance(opt_fn, type) and opt_fn.__module__.startswith("torch.optim")
    if ready or not callable(opt_fn):
        name = opt_fn.__name__ if ready else "Adam"
        yield Problem(
            "opt_fn must be a function model → optimizer",
            f"the class {name}" if ready else one_line(opt_fn),
            f"Write for instance: lambda model: {name}(model.parameters(), lr=1e-3)",
        )


def _root_problems(root: Path, refit: bool) -> Iterator[Problem]:
    """Refuse a folder that cannot become a run; what goes wrong later is the disk's fault."""
    if str(root) in ("", ".") or "\0" in str(root):
        yield Problem("root_dir must be a folder of its own", repr(str(root)), "Pass 'runs/first'.")
        return
    too_long = list(path_problems(root, refit))
    if too_long:
        yield from too_long
        return
    found = next(part for part in (root.absolute(), *root.absolute().parents) if _is_there(part))
    if not found.is_dir():
        yield Problem("root_dir must be a folder", _at(root, found, "a file"), "Choose another.")
    elif not os.access(found, os.W_OK | os.X_OK):
        yield Problem(
            "root_dir must be a folder that may be written",
            _at(root, found, "read-only"),
            "Choose another folder, or change who may write there.",
        )
    else:
        yield from shared_problems(root)


def _at(root: Path, found: Path, what: str) -> str:
    return (
        f"{root}, which is {what}"
        if found == root.absolute()
        else f"{root}, where {found} is {what}"
    )


def _is_there(path: Path) -> bool:
    return os.path.lexists(path)


def one_line(value: Any, most: int = 200) -> str:
    """Return a value or an exception on one line, shortened."""
    text = " ".join((str(value) if isinstance(value, Exception) else repr(value)).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def of_arrays(transform: Callable[[Any], Any]) -> Transform:
    """Return a function of tensors as one of arrays."""
    import torch

    def apply(outputs: Any) -> Any:
        with torch.no_grad():
            found = transform(torch.from_numpy(np.array(outputs)))
        if isinstance(found, torch.Tensor):
            return found.detach().cpu().numpy()
        return np.asarray(found)

    return apply
