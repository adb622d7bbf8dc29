"""The arguments of `AsyncKFold`, declared once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import numpy as np

from asynckfold.errors import InputError, Problem
from asynckfold.jobs.argument import argument, plain, problems
from asynckfold.jobs.criteria import NUMBERS, Criterion, criterion_of, is_factory
from asynckfold.jobs.objective import RECONSTRUCTION, REGRESSION, Transform
from asynckfold.jobs.schema import with_leaves
from asynckfold.jobs.trainer_params import JobTrainer
from asynckfold.results.scoring import with_reported
from asynckfold.scheduling.racing import ALPHA
from asynckfold.system.units import gibibytes, in_bytes

if TYPE_CHECKING:
    from asynckfold.jobs.trainer_params import TrainerParams
    from asynckfold.system.machine import Machine

Task = Literal[
    "binary", "multiclass", "multilabel", "regression", "segmentation", "reconstruction", "custom"
]


def words_of(text: str) -> list[str]:
    """Return the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def number_or_file(text: str) -> int | str:
    """Read a whole number, or the path of a JSON file; a `ValueError` says what it must be."""
    try:
        return text if text.endswith(".json") else int(text)
    except ValueError:
        raise ValueError("must be a whole number, or a file such as splits.json") from None


def part_of_text(text: str) -> tuple[int, int]:
    """Read which part of how many, ``"3/8"``; a `ValueError` says what it must be."""
    try:
        number, count = map(int, text.split("/"))
    except ValueError:
        raise ValueError("must be a part, such as 3/8") from None
    return number, count


@dataclass(frozen=True, kw_only=True)
class MachineArguments:
    """The arguments of `AsyncKFold` about the machine.

    Parameters
    ----------
    n_jobs : int, "auto" or None
        Number of jobs at a time: -1 for all cores, as in joblib; "auto" for what is idle now. None
        takes the number of ``joblib.parallel_config(n_jobs=...)`` around the call, and is "auto"
        outside of one.
    threads_per_job : int or "auto"
        Threads of each job. They change bits and are part of the plan. "auto" decides for each
        model by a rule over its operations, the number of jobs and the allotted cores, whether
        these are idle or busy, and gives the last jobs the cores that would be idle. 1 gives the
        same bits on any number of cores.
    devices : {"auto", "cpu", "cuda"} or list
        Devices to use: "auto" for cores and visible GPUs, "cpu", "cuda" for GPUs alone, or a list.
        A list names GPUs by their numbers, and cores by "cpu": ``["cpu", 0]``. On both kinds, a
        rule decides which candidates run where; all folds of a candidate run on one kind, which is
        part of the plan. Jobs of several processes then run on cores.
    jobs_per_gpu : int or "auto"
        Number of jobs that share a GPU, fused ones aside. "auto" lets further jobs start there
        while those that run leave it idle, by what their first steps measure. It changes no bit.
    reserve_cores : int
        Number of cores to leave free. The threads of the models are decided without them.
    max_memory : float, str or None
        Limit on the estimated memory of all running jobs and their workers: a share up to 1, bytes,
        or a size such as "8GiB". What all workers share, some 300 MiB, and this process are not
        counted.
    min_free_memory : float or str
        Free memory below which no job starts: a share up to 1, bytes, or a size such as "2GiB".
        Running jobs are never killed.
    nice : int
        Niceness of the workers and of the processes that they start, 0 to 19.
    max_wait : float or None
        Seconds to wait while no job runs or can start. After that the call raises `NoRoomError`;
        the same call continues it. Busy cores never stop the last running job. None waits forever.
    yield_to_others : bool
        Let running jobs make room when other programs need their cores. A job moves to idle cores,
        or pauses between two batches while another job goes on. One job always runs.
    """

    n_jobs: int | Literal["auto"] | None = argument(
        "auto", group="machine", is_common=True, has_own_check=True, none=""
    )
    threads_per_job: int | Literal["auto"] = argument("auto", group="machine", least=1)
    devices: Literal["auto", "cpu", "cuda"] | Sequence[int | Literal["cpu"]] = argument(
        "auto", group="machine", unit="GPU numbers"
    )
    jobs_per_gpu: int | Literal["auto"] = argument("auto", group="machine", least=1)
    reserve_cores: int = argument(
        0, group="machine", least=0, remedy="Pass reserve_cores=1 to leave one core free."
    )
    max_memory: float | str | None = argument(None, group="machine", metavar="M")
    min_free_memory: float | str = argument("256MiB", group="machine", metavar="M")
    nice: int = argument(0, group="machine", least=0, most=19)
    max_wait: float | None = argument(
        3600.0, group="machine", above=0, unit="seconds", remedy="Pass max_wait=3600, or None."
    )
    yield_to_others: bool = argument(False, group="machine")

    def sharing(self) -> MachineArguments:
        """Return these arguments alone, for another machine."""
        return MachineArguments(
            **{item.name: getattr(self, item.name) for item in fields(MachineArguments)}
        )

    def machine(self) -> Machine:
        """Return the machine as far as this run may use it."""
        from asynckfold.system.machine import Machine, total_memory

        total = total_memory()
        most = self.max_memory
        return Machine(
            "cpu" if self._lists_cores_only else self.devices,
            reserve_cores=self.reserve_cores,
            max_memory=None if most is None else in_bytes(most, total),
            min_free_memory=in_bytes(self.min_free_memory, total),
            yields=self.yield_to_others,
        )

    def present_machine(self) -> Machine:
        """Return the machine; refuse GPUs that were asked for and are not there."""
        machine = self.machine()
        reading = machine.gpus()
        needed = self.devices not in ("auto", "cpu") and not self._lists_cores_only
        if needed and (not reading.gpus or (self.devices != "cuda" and reading.reason)):
            raise InputError.one(
                "devices must name GPUs that are there",
                f"{self.devices!r}: {reading.reason or 'it names none'}",
                "See `asynckfold doctor`, or pass devices='auto'.",
            )
        return machine

    @property
    def _lists_cores_only(self) -> bool:
        return {*self.devices} == {"cpu"}

    def kinds(self, machine: Machine, params: TrainerParams) -> tuple[str, ...]:
        """Return the kinds of device that the jobs may run on."""
        if not machine.gpus().gpus:
            return ("cpu",)
        listed = (self.devices,) if isinstance(self.devices, str) else self.devices
        if params.on_gpu or params.precision == "fp16" or not {"auto", "cpu"} & {*listed}:
            return ("cuda",)
        return ("cpu", "cuda") if params.processes == 1 else ("cpu",)

    @property
    def threads(self) -> int | None:
        """Threads of each job; None where they are decided for each model."""
        return self.threads_per_job if _is_whole(self.threads_per_job) else None

    def problems(self) -> Iterator[Problem]:
        """Yield all that is wrong with these arguments on this machine."""
        yield from problems(self)
        yield from self.machine_problems()

    def machine_problems(self, *, is_here: bool = True) -> Iterator[Problem]:
        """Yield what is wrong with these arguments on this machine, each of them being valid.

        Of threads where not all jobs run here, the nodes are asked when they are known.
        """
        from asynckfold.system.limits import allowed_cores
        from asynckfold.system.machine import resolve_n_jobs, total_memory

        allowed, cores, total = len(allowed_cores()), self.cores, total_memory()
        reserved, threads = self.reserve_cores, self.threads
        if _is_whole(reserved) and reserved >= allowed:
            yield Problem(
                "reserve_cores must leave at least one core to the run",
                f"{reserved} of the {allowed} that this process may use",
                f"Pass reserve_cores={allowed - 1} or less.",
            )
        try:
            resolve_n_jobs(self.n_jobs, cores)
        except InputError as error:
            yield from error.problems
        if is_here and threads is not None and threads > cores:
            less = f", less {reserved} reserved" if cores < allowed else ""
            yield Problem(
                "threads_per_job must not exceed the cores that this process may use",
                f"{threads} threads on {cores} {'core' if cores == 1 else 'cores'}{less}",
                f"Pass threads_per_job={cores} or less: more threads than cores were measured up "
                "to 80 times slower.",
            )
        for name in ("max_memory", "min_free_memory"):
            value = getattr(self, name)
            if value is None and name == "max_memory":
                continue
            try:
                size = in_bytes(value, total)
            except ValueError:
                rule = f"{name} must be a share of the memory up to 1, or bytes such as '2GiB'"
                yield Problem(rule, repr(value), f"Pass {name}=0.1, '10%' or '2GiB'.")
                continue
            if name == "min_free_memory" and 0 < total <= size:
                yield Problem(
                    "min_free_memory must be less than the memory that this process may use",
                    f"{value!r}, which is {gibibytes(size, 2)} of {gibibytes(total, 2)}",
                    "Pass min_free_memory=0.1 or less.",
                )

    @property
    def cores(self) -> int:
        """How many cores may be used."""
        from asynckfold.system.limits import allowed_cores

        cores, reserved = len(allowed_cores()), self.reserve_cores
        return cores - reserved if _is_whole(reserved) and 0 < reserved < cores else cores


@dataclass(frozen=True, eq=False)
class Settings(MachineArguments, JobTrainer):
    """The arguments of `AsyncKFold`.

    Parameters
    ----------
    kfolds : int, scikit-learn splitter, path, or list of (train, valid) index pairs
        Number of folds, or a JSON file of folds. Or a splitter, an OpenML task, or the folds
        themselves. ``cv`` and ``n_splits`` are aliases by keyword; pass None here to use them. A
        file lists ``{"train": [...], "valid": [...]}`` for each fold (or ``"val"``, as nnU-Net's
        ``splits_final.json``, or ``"test"``): positions of samples, or names where the data set has
        `names` or files. `CVResults.save_splits` writes one.
    dataset : Dataset, (X, y), X, or str
        Map-style torch data set of (inputs, target) pairs, or two arrays. Inputs, and X, may be a
        dict or a tuple of several: the model gets them by name or by position if it takes them so.
        Of one array alone the input is the target, see `task`. Or a table in a file, as on the
        command line: ``"csv:PATH"`` or ``"npz:PATH"``. Its last column is the target, numbers if
        criterion or `task` say so, and `preprocess` standardises its features by default; one that
        takes columns by name gets a DataFrame.
    root_dir : str or Path
        Folder of the run. The same call on the same folder continues the run. A call with other
        arguments, data or code is refused and names what changed. The command line names a new
        folder by data, date and time where none is given, such as ``runs/digits-20261124-0046``.
    criterion : callable or None
        Loss function, (outputs, targets) → scalar. Parameters of a module are trained where
        `opt_fn` optimises them. Or a function whose only required parameter has
        the name ``train_targets``: it returns the loss function of a training fold, for instance
        with weights of its classes. None where a `training_step` or a `fit_fn` trains: then the
        held-out fold has scores, and no loss but that of a `validation_step`.
    batch_size : int or "full"
        Samples per training step. "full" takes all samples of the training fold in one step.
    parallelize : bool
        False is ``engine="serial"``: one job after another in this process.
    cv, n_splits : optional
        Alias of `kfolds`, as in scikit-learn.
    n_repeats : int
        Number of times to divide the data, each with another shuffle. For a number of folds only.
    groups : array-like of shape (n_samples,), optional
        Group of each sample. Samples of one group are never on both sides of a fold.
    sample_weight : array-like of shape (n_samples,), optional
        Weight of each sample, at least 0, in training losses, held-out losses and scores: means are
        weighted, so that only ratios matter. Needs a criterion with ``reduction="mean"``, and
        scores that take weights. Such jobs are not fused.
    stratify : bool, array-like of shape (n_samples,) or (n_samples, n_labels), "quantile" or int
        Keep the proportions of classes or labels in each fold. Or those of an array; or of
        quantiles of targets that are numbers, 10 or as many as given.
    targets : array-like of shape (n_samples,), optional
        Labels, where reading them from the data set is slow or wrong.
    random_state : int
        Seed from which all others are derived.
    stall_timeout : float, "auto" or None
        Seconds without a finished batch after which a worker counts as hung. Its stacks are written
        to the job's log, it is killed, and the job is retried. A start, a first batch and a
        checkpoint may take ten times as long. "auto" waits 20 times the seconds of the batches so
        far, and at least 5 minutes. None waits for ever.
    scoring : str, callable, list or dict of these, optional
        Scores, of which the first ranks the candidates. Names of scikit-learn scorers, scorers, or
        functions (labels, outputs) → float; greater is better. Or metrics of torchmetrics, negated
        where less is better. Default: accuracy for classes, with ROC AUC where one output stands
        for two classes; accuracy of all labels and micro F1 for several labels per sample; R² for
        numbers; mean IoU, Dice and accuracy of pixels. Scorers receive the labels of the data,
        functions the raw outputs, in the order of ``results.classes_``.
    keep_going : bool
        Train the other candidates if one breaks a rule, such as a model that cannot take the
        samples. The jobs of that candidate then fail without being started, with the broken rule as
        their error. By default the call is refused before anything starts.
    error_score : float or "raise"
        Score of a job that failed. "raise" raises `JobFailedError` at the end.
    train_transform : callable, optional
        Per-sample transform of training samples. If the data set has one random ``transform``, the
        transform for evaluation is derived by leaving the random parts out.
    eval_transform : callable, optional
        Per-sample transform of samples that are scored.
    preprocess : scikit-learn transformer, optional
        Last step before the model, after the transforms. A clone is fitted on the samples that a
        job trains on, without augmentation and without what the job sets aside (`inner_valid`,
        `inner_val`), and applied to all. It receives each sample as one row of features; its output
        becomes float32. A DataFrame whose columns are not all numbers, or are chosen by name in a
        `ColumnTransformer`, it receives as it is.
    target_transform : "standardize" or scikit-learn transformer, optional
        Transforms targets that are numbers. A clone is fitted on the samples that a job trains on;
        criterion, steps and losses get transformed targets. Outputs pass the inverse: scores,
        `CVResults.oof` and predictions are in the units of the data set. "standardize" is
        ``StandardScaler()``.
    resume : {"auto", "never", "must"}
        What to do with a folder that holds a run. "auto" continues it. "never" trains from scratch
        and renames the folder to ``<root_dir>.earlier-1``, ``-2``, …; a folder that holds anything
        else is refused. "must" refuses a folder without a run.
    baseline : {"none", "estimate", "measure"}
        Serial loop to compare the run with. "measure" runs all of it, after the sweep; "estimate"
        times some batches of it; "none" (or None) leaves it out.
    report : bool
        Write the HTML report, its figures and tables at the end. They lie below ``report`` in the
        run's folder, also when jobs failed or the call was interrupted. The page is there when the
        call returns; figures are drawn once no further call has begun, at the latest when the
        process ends. A fault is a warning; the drawing is no part of the run's seconds.
    plan_from : str or Path, optional
        Folder of another run whose devices, threads, memory formats and fusion groups are taken
        over.
    verbose : int
        0 is silent, 1 bars on a terminal and a line every 30 seconds elsewhere, 2 also a line per
        job, 3 also a line per epoch. The logger ``asynckfold`` of the module `logging` gets all of
        it at every verbosity: epochs as DEBUG, failed jobs as WARNING, the rest as INFO.
    allow_different_software : bool
        Continue a run with another torch, kind of processor or number of threads. The results are
        then no longer reproducible bit by bit.
    engine : {"auto", "process", "serial", "joblib", "ray"}
        Where jobs are trained; the numbers are the same. "process" uses worker processes on idle
        cores and GPUs. "auto" does so, too, but trains a sweep of a few seconds in this process
        where that is predicted to end before workers could start, and says so: a model that
        crashes or hangs then does it here. "serial" trains one job after another in this process,
        which also reads the samples: use it to debug. "joblib" uses the processes of the backend
        that ``joblib.parallel_config`` names, on this machine; it neither detects hung jobs nor
        moves running ones. "ray" uses worker processes on all nodes of a Ray cluster, see
        `ray_address`.
    ray_address : str, optional
        Address of a running Ray cluster, HOST:PORT or "auto", of which this machine is a node.
        Default: the variable ``RAY_ADDRESS``; without it, a Ray of this machine starts and ends
        with the run.
    ray_runtime_env : Mapping, optional
        Environment that Ray sets up on each node for this run, such as ``{"pip": ["asynckfold"]}``.
    connect_timeout_s : float
        Seconds within which the cluster, and then each of its nodes, must answer.
    about : Mapping, optional
        Further facts to keep with the run and to show in its report.
    fuse : bool, int or "auto"
        Train jobs of one model as one stacked model. This is faster for small models. Each job
        keeps its samples, learning rates, checkpoints and results, but its last digits depend on
        the size of the group, which is part of the plan. "auto" decides by a rule over operations,
        jobs and allotted cores and GPUs; a number sets the size of the groups; True gives every
        core or GPU a group. A number and True refuse models that cannot be fused.
    time_budget_s : float or None
        Seconds after which the call ends, with the results so far. Running jobs save themselves at
        the next batch, within ten seconds. ``counts["pending"]`` jobs are left; the same call
        continues, with another budget.
    job_timeout_s : float or None
        Seconds that a job may train. It then saves itself at the next batch and counts as failed,
        with `error_score`; the other jobs go on. The same call with more seconds continues it with
        the same bits. Counts the time since the model was built, over all attempts and sessions,
        with evaluations and checkpoints but without pauses and waiting. Each job of a fusion group
        counts an equal share. A batch that never ends is left to `stall_timeout`.
    refit : bool, str or callable
        Train the best candidate on all samples at the end; or a candidate by name, as
        ``"LeNet5/cosine"``. ``"best"`` is True. ``"1se"`` takes the model of the fewest parameters
        within one standard error of the best (Breiman et al. 1984); of equal ones, the best. A
        function ``cv_results_`` → index selects it as in scikit-learn. Then that candidate is
        `CVResults.best_index_`, and there is no ``best_score_``. The result is a separate run below
        ``refit`` in the run's folder: `CVResults.refitted`, and ``results.state_dict(fold="all")``.
        That of another candidate than the best is ``results.on_all_samples(name)``.
    return_train_score : bool
        Score each job's final model on its training part, too, for ``cv_results_``:
        ``mean_train_accuracy`` and the like, as in scikit-learn. That is computed when
        ``cv_results_`` is first read, in this process, on cores.
    race : bool
        Leave out candidates that can no longer win. After each fold that all candidates have ended,
        those that the first one beats are not trained any more, and not ranked. See the how-to
        guide "Race candidates".
    race_alpha : float
        Bound on the chance that a race leaves the best candidate out, over all folds and pairs.
    nested : int, optional
        Inner folds of each fold, which divide its training part as folds divide all samples: by
        their mean scores a candidate is chosen, and scored on that fold, so that the score is not
        one that chose it. See `CVResults.nested` and the how-to guide "Nested cross-validation".
    random_samples : bool
        Declare that each read of a sample may give another pair (x, y). Draws from the global
        generators of torch, NumPy and random are noticed without it. Input and target then always
        come from one read, seeded by job, epoch and sample for training, and by sample for
        evaluation. Folds are made of the targets of evaluation.
    pos_label : int, bool or str, optional
        Positive class of scores such as ``"f1"`` and ``"average_precision"``. Default: 1, as in
        scikit-learn.
    output_transform : callable, optional
        Maps outputs, a tensor of shape (n, ...), to what is scored and predicted: class
        probabilities, or numbers. Needed with a custom loss function where the outputs are not
        clear, such as one output for two classes: ``torch.sigmoid``.
    task : str, optional
        Task of the models, where it cannot be inferred from criterion, targets and outputs.
        "segmentation" is a class for each pixel, or for each step of a sequence; "reconstruction"
        takes the input as the target; "custom" needs functions in `scoring`. A task that
        contradicts criterion or targets is refused.
    rank_by : str, optional
        Name of the score that ranks the candidates. Default: the first of `scoring`.
    keep_outputs_gib : float
        Outputs of held-out samples are kept if all of them take at most so many GiB. Else each
        fold is scored, and its outputs are dropped: then there is no `CVResults.oof`. Metrics of
        torchmetrics and scores of pixels then get a batch at a time, so that no more is held.
    training_step : callable, optional
        Computes the loss of a batch, (model, (inputs, targets), state) → loss, or a dict of
        ``loss`` and what else to record. Backward, clipping, autocast, optimizer and LR schedule
        stay ours. ``opt_fn`` may return a tuple of several optimizers: the step then calls
        ``state.backward(loss, optimizer)``. The held-out fold is scored as always.
    validation_step : callable, optional
        Measures a batch of the held-out fold after each epoch, (model, batch, state) → numbers. It
        returns a loss or a dict, or calls ``state.log``. Means over the fold are in the table of
        epochs, and a loss is its ``valid_loss``. A number with the name of a score is that score.
    fit_fn : callable, optional
        Trains a whole job. It gets a context with model, loaders of this fold,
        optimizer, LR schedule, and the functions ``report``, ``save`` and ``load``. A reported
        metric with the name of a score is that score; all others are computed on the held-out fold.
    callbacks : sequence of object, optional
        Objects whose methods are called after batches and epochs, such as `EarlyStopping` and
        `BestWeights`. The methods are ``on_fit_start``, ``on_batch_end``, ``on_epoch_end`` and
        ``on_fit_end``. Each job gets copies; what changes in one is kept by its ``state_dict`` and
        ``load_state_dict``. None sees the held-out fold.
    inner_valid : float, optional
        Share of each training fold held out for early stopping, other callbacks and plateau
        schedules. It is stratified and grouped like the folds, or the latest samples under
        ``TimeSeriesSplit``, and equal for all candidates. Nothing is fitted on it.
    part : tuple of int, optional
        Which part of how many, ``(3, 8)``: only its jobs are trained, in a separate folder, and
        no candidate is refitted, timed or reported. ``asynckfold slurm merge`` makes one run of all
        parts. The machines of the parts should have equally many cores, or one `threads_per_job`.
    target_key : str, optional
        Key of the target, where the items of the data set are dicts. Default: ``"labels"`` or
        ``"target"``.
    collate_fn : callable, optional
        Makes a batch of a list of items, as in torch's ``DataLoader``. It returns (inputs, target),
        or a dict of both where items are dicts. Samples may then have inputs of different length,
        which are stored once as offsets and values. Used in training, scoring, prediction and
        refit. Classes arrive as their index. Such jobs are not fused.
    sampler : array-like of shape (n_samples,), callable or "balanced", optional
        Draws the samples of each epoch from the training fold. Weights of all samples, drawn with
        replacement, as many as the fold has; ``"balanced"``, by which each class is as frequent; or
        a function (targets of the training fold) → their weights, or a torch ``Sampler`` of places
        in the fold, of any length that all epochs have. The generator is that of the job and its
        epoch. Scores are those of the held-out fold as it is.
    """

    kfolds: Any = argument(
        group="data",
        spelled="folds",
        metavar="N|FILE",
        reads=number_or_file,
        fallback=5,
        is_common=True,
    )
    dataset: Any = argument(group="data")
    root_dir: str | Path = argument(group="output", spelled="root", metavar="DIR", is_common=True)
    criterion: Callable[..., Any] | None = argument(group="candidates")
    batch_size: int | Literal["full"] = argument(
        group="training", least=1, fallback=32, is_common=True
    )
    parallelize: bool = argument(True, group="advanced", spelled="")
    _: KW_ONLY
    cv: Any = argument(None, group="data")
    n_splits: int | None = argument(None, group="data", spelled="", has_own_check=True)
    n_repeats: int = argument(1, group="data", spelled="repeats", least=1)
    groups: Any = argument(None, group="data")
    sample_weight: Any = argument(None, group="data")
    stratify: Any = argument(True, group="data", spelled="no-stratify")
    targets: Any = argument(None, group="data")
    random_state: int = argument(
        0, group="training", spelled="seed", least=0, most=2**32 - 1, is_common=True
    )
    stall_timeout: float | Literal["auto"] | None = argument(
        "auto",
        group="machine",
        unit="seconds",
        above=0,
        remedy="Pass stall_timeout='auto', or more seconds than the longest batch takes.",
    )
    scoring: Any = argument(None, group="training", metavar="A,B", reads=words_of, is_common=True)
    keep_going: bool = argument(False, group="candidates")
    error_score: float | Literal["raise"] = argument(float("nan"), group="advanced")
    train_transform: Callable[[Any], Any] | None = argument(None, group="data")
    eval_transform: Callable[[Any], Any] | None = argument(None, group="data")
    preprocess: Any = argument(None, group="data")
    target_transform: Any = argument(None, group="data", metavar="standardize", reads=str)
    resume: Literal["auto", "never", "must"] = argument("auto", group="output")
    baseline: Literal["none", "estimate", "measure"] | None = argument(
        "none", group="output", none=""
    )
    report: bool = argument(True, group="output", spelled="no-report")
    verbose: int = argument(1, group="output", spelled="", least=0)
    engine: Literal["auto", "process", "serial", "joblib", "ray"] = argument(
        "auto", group="machine"
    )
    ray_address: str | None = argument(None, group="machine", metavar="HOST:PORT", none="")
    ray_runtime_env: Mapping[str, Any] | None = argument(None, group="machine")
    connect_timeout_s: float = argument(
        60.0, group="machine", spelled="connect-timeout", unit="seconds", above=0
    )
    allow_different_software: bool = argument(False, group="advanced")
    plan_from: str | Path | None = argument(None, group="advanced", metavar="DIR")
    about: Mapping[str, Any] = argument(factory=dict, group="output")
    fuse: bool | int | Literal["auto"] = argument("auto", group="training", least=2)
    time_budget_s: float | None = argument(
        None,
        group="machine",
        spelled="time-budget",
        unit="seconds",
        above=0,
        remedy="Pass time_budget_s=3600, or None for no limit.",
    )
    job_timeout_s: float | None = argument(
        None,
        group="machine",
        spelled="job-timeout",
        unit="seconds",
        above=0,
        remedy="Pass job_timeout_s=3600, or None for no limit.",
    )
    refit: bool | str | Callable[[dict[str, Any]], int] = argument(
        False,
        group="training",
        remedy="Pass refit=True, and name the score that chooses first in scoring.",
    )
    return_train_score: bool = argument(False, group="output", spelled="")
    race: bool = argument(False, group="training")
    race_alpha: float = argument(ALPHA, group="training", above=0, below=1)
    nested: int | None = argument(None, group="training", least=2, none="")
    random_samples: bool = argument(False, group="data")
    pos_label: Any = argument(None, group="training", metavar="CLASS", reads=str)
    output_transform: Callable[[Any], Any] | None = argument(None, group="training")
    task: Task | None = argument(None, group="training", none="")
    rank_by: str | None = argument(None, group="training", metavar="SCORE", none="")
    keep_outputs_gib: float = argument(
        2.0, group="output", spelled="keep-outputs", unit="GiB", least=0
    )
    training_step: Callable[..., Any] | None = argument(None, group="training")
    validation_step: Callable[..., Any] | None = argument(None, group="training")
    fit_fn: Callable[[Any], Any] | None = argument(None, group="training")
    callbacks: Any = argument(None, group="training")
    inner_valid: float | None = argument(None, group="training", above=0, below=1)
    part: tuple[int, int] | None = argument(
        None, group="advanced", metavar="K/N", reads=part_of_text, none=""
    )
    target_key: str | None = argument(None, group="data", spelled="", none="")
    collate_fn: Callable[[list[Any]], Any] | None = argument(None, group="data")
    sampler: Any = argument(None, group="training", metavar="balanced", reads=str)

    def __post_init__(self) -> None:
        values: dict[str, Any] = {
            item.name: plain(getattr(self, item.name)) for item in fields(self)
        }
        values["about"] = dict(self.about or {})
        if self.fit_fn is not None or self.validation_step is not None:
            # Code of the user may report scores of other names.
            values["scoring"] = with_reported(self.scoring)
        if isinstance(self.dataset, str):
            values |= self._of_file(self.dataset)
        values["dataset"] = dataset = keyed(values["dataset"], self.target_key)
        if not self.parallelize:
            values["engine"] = "serial"
        if self.task == RECONSTRUCTION or (self.task is None and _lacks_targets(dataset)):
            from asynckfold.data.dataset import with_input_as_target

            values |= {"task": RECONSTRUCTION, "dataset": with_input_as_target(dataset)}
            values["scoring"] = values["scoring"] or "neg_mean_squared_error"
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _of_file(self, spec: str) -> dict[str, Any]:
        """Return the arguments that a table in a file stands for."""
        from asynckfold.data.sources import load_frame, load_source
        from asynckfold.data.table_codes import names_columns

        if spec.partition(":")[0] not in ("csv", "npz"):
            rule = "dataset must be a table in a file, a torch Dataset, or arrays"
            raise InputError.one(rule, repr(spec), "Pass for instance 'csv:table.csv'.")
        known = self.known_criterion
        regression = self.task == REGRESSION or (known is not None and known.targets == NUMBERS)
        if spec.startswith("csv:") and names_columns(self.preprocess):
            *data, notes = load_frame(spec, regression=regression)
            about = {"data": spec, **({"data notes": notes} if notes else {})}
            return {"dataset": tuple(data), "about": about | dict(self.about or {})}
        source = load_source(spec, regression=regression)
        about = {"data": source.text, **({"data notes": [*source.notes]} if source.notes else {})}
        values = {"dataset": source.dataset, "about": about | dict(self.about or {})}
        if self.targets is None:
            values["targets"] = source.targets
        if self.preprocess is None and source.standardize:
            from sklearn.preprocessing import StandardScaler

            values["preprocess"] = StandardScaler()
        return values

    @property
    def trains_itself(self) -> bool:
        """Whether code of the user computes the loss that trains."""
        return self.training_step is not None or self.fit_fn is not None

    @property
    def called_back(self) -> tuple[Any, ...]:
        """The callbacks; none where they are no list."""
        items = self.callbacks
        return tuple(items) if isinstance(items, Sequence) and not isinstance(items, str) else ()

    @property
    def root(self) -> Path:
        """Folder of the run."""
        return Path(self.root_dir)

    @property
    def known_criterion(self) -> Criterion | None:
        """What the criterion expects; None for one that the user wrote."""
        if self.criterion is None or not is_factory(self.criterion):
            return criterion_of(self.criterion)
        from asynckfold.training.losses import kind_made_by

        return kind_made_by(self.criterion)

    @property
    def transform(self) -> Transform | None:
        """The user's `output_transform`, of arrays."""
        return None if self.output_transform is None else of_arrays(self.output_transform)

    @property
    def error_value(self) -> float:
        """The score of a failed job."""
        return float("nan") if self.error_score == "raise" else float(self.error_score)

    @property
    def free(self) -> tuple[str, ...]:
        """Fields of a stored plan that may differ from those of this call."""
        return ("threads_per_job", "threads", "last_threads") * self.allow_different_software

    @property
    def trainer_params(self) -> dict[str, Any]:
        """The keys of `trainer_params` that are arguments of `AsyncKFold`, too."""
        return {item.name: getattr(self, item.name) for item in fields(JobTrainer)}

    def problems(self) -> Iterator[Problem]:
        """Yield all that is wrong with the arguments of `AsyncKFold`."""
        from asynckfold.api.argument_checks import settings_problems

        yield from settings_problems(self)


def keyed(dataset: Any, target_key: str | None) -> Any:
    """Return a data set of dicts as one of pairs, if `target_key` names the target."""
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if target_key is None or isinstance(dataset, (tuple, dict)) or not is_map_style:
        return dataset
    from asynckfold.data.dataset import KeyedTargets

    # A copy of the settings has it already.
    return dataset if isinstance(dataset, KeyedTargets) else KeyedTargets(dataset, target_key)


def of_arrays(transform: Callable[[Any], Any]) -> Transform:
    """Return a function of tensors as one of arrays."""
    return functools.partial(_applied, transform)


def _applied(transform: Callable[[Any], Any], outputs: Any) -> Any:
    import torch

    with torch.no_grad():
        made = transform(with_leaves(lambda item: torch.from_numpy(np.array(item)), outputs))
    if isinstance(made, torch.Tensor):
        return made.detach().cpu().numpy()
    return np.asarray(made)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _lacks_targets(dataset: Any) -> bool:
    """Whether a data set is one array or table, or tensors without targets."""
    tensors = getattr(dataset, "tensors", None)
    is_alone = isinstance(tensors, tuple) and len(tensors) == 1
    return is_alone or (hasattr(dataset, "__array__") and not isinstance(dataset, tuple))
