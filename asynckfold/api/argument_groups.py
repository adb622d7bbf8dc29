"""Arguments of `AsyncKFold` in groups: samples, the task, and code of the user that trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asynckfold.jobs.argument import argument

Task = Literal[
    "binary",
    "multiclass",
    "multilabel",
    "regression",
    "segmentation",
    "reconstruction",
    "custom",
]


@dataclass(frozen=True, kw_only=True)
class SampleArguments:
    """Arguments that say how samples are read and drawn.

    Parameters
    ----------
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

    target_key: str | None = argument(None, group="data", spelled="", none="")
    collate_fn: Callable[[list[Any]], Any] | None = argument(None, group="data")
    sampler: Any = argument(None, group="training", metavar="balanced", reads=str)


@dataclass(frozen=True, kw_only=True)
class UserTraining:
    """The arguments of `AsyncKFold` by which the user's own code trains.

    Parameters
    ----------
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
        Trains a whole job by a loop of its own. It gets a context with model, loaders of this fold,
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
    """

    training_step: Callable[..., Any] | None = argument(None, group="training")
    validation_step: Callable[..., Any] | None = argument(None, group="training")
    fit_fn: Callable[[Any], Any] | None = argument(None, group="training")
    callbacks: Any = argument(None, group="training")
    inner_valid: float | None = argument(None, group="training", above=0, below=1)

    @property
    def trains_itself(self) -> bool:
        """Whether the user's own code computes the loss that trains."""
        return self.training_step is not None or self.fit_fn is not None

    @property
    def called_back(self) -> tuple[Any, ...]:
        """The callbacks; none where they are no list."""
        items = self.callbacks
        return tuple(items) if isinstance(items, Sequence) and not isinstance(items, str) else ()


@dataclass(frozen=True, eq=False, kw_only=True)
class TaskSettings:
    """The task, the score that ranks, and what is kept of the outputs.

    Parameters
    ----------
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
    """

    task: Task | None = argument(None, group="training", none="")
    rank_by: str | None = argument(None, group="training", metavar="SCORE", none="")
    keep_outputs_gib: float = argument(
        2.0, group="output", spelled="keep-outputs", unit="GiB", least=0
    )
