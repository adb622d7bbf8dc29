"""The arguments of `AsyncKFold` by which the user's own code trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asynckfold.errors import Problem, nearest
from asynckfold.jobs.argument import argument, one_line
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.results.score_fit import reported_names, with_reported

_SHAPES = {
    "training_step": (
        "(model, batch, state) → loss",
        "def training_step(model, batch, state): inputs, targets = batch; "
        "return state.criterion(model(inputs), targets)",
    ),
    "validation_step": (
        "(model, batch, state) → loss, or a dict of numbers",
        "def validation_step(model, batch, state): inputs, targets = batch; "
        "return {'margin': model(inputs).amax(1).mean()}",
    ),
    "fit_fn": (
        "of one context",
        "def fit_fn(context): ..., with a loop over context.train_loader",
    ),
}
"""What each function takes, and how it is written."""

_OURS = {"precision": ("bf16", "fp16"), "lr_step": ("batch",)}
"""Parameters of the built-in loop, and the values that a loop of one's own would not see."""


@dataclass(frozen=True, kw_only=True)
class OwnTraining:
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
        Share of each training fold to set aside for callbacks and LR schedules that react to a
        loss. It is stratified and grouped as the folds, the last part where folds are in the order
        of time (``TimeSeriesSplit``), and the same for all candidates. Nothing is fitted on it.
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
        """The callbacks; none if what was given is no list."""
        given = self.callbacks
        return tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()

    def scoring_of_own(self, scoring: Any) -> Any:
        """Return `scoring`, of which the user's own code may report what has another name."""
        none = self.fit_fn is None and self.validation_step is None
        return scoring if none else with_reported(scoring)

    def unmeasured_problems(
        self, scoring: Any, measured: Mapping[str, Sequence[str]], kind: str
    ) -> Iterator[Problem]:
        """Yield the scores that have nearly the name of what a validation step measured.

        A name that is like none of them may be measured later, as in the last epoch only.
        """
        if self.validation_step is None:
            return
        for model, names in measured.items():
            for score in reported_names(scoring, kind):
                if score not in names and (meant := nearest(score, names)):
                    yield Problem(
                        "scoring must name what validation_step measures, or a known score",
                        f"{score!r}; of model {model} it measures {', '.join(map(repr, names))}",
                        f"Correct the name.{meant}",
                    )

    def own_training_problems(self, params: TrainerParams) -> Iterator[Problem]:
        """Yield why the user's own code cannot train the jobs."""
        given = [name for name in _SHAPES if getattr(self, name) is not None]
        for name in given:
            yield from self._problems_of(name, params)
        if "fit_fn" in given and len(given) > 1:
            yield Problem(
                "a fit_fn trains and validates a job alone",
                " and ".join(given),
                "Drop one of them.",
            )
        if "fit_fn" in given:
            yield from _unseen_problems(params)
        elif self.training_step is not None and params.accumulate > 1:
            yield Problem(
                "the built-in step accumulates gradients, not a training_step",
                f"accumulate={params.accumulate}",
                "Leave it out, and let opt_fn return a list of one optimizer: training_step then "
                "decides when to step.",
            )
        yield from self._callback_problems(params)

    def _callback_problems(self, params: TrainerParams) -> Iterator[Problem]:
        for name in ("callbacks", "inner_valid"):
            if getattr(self, name) is None:
                continue
            if params.trainer != "plain" or self.fit_fn is not None:
                own = "a fit_fn" if self.fit_fn is not None else f"trainer={params.trainer!r}"
                rule = f"{name} must go with the plain trainer and the built-in loop"
                yield Problem(rule, own, f"Leave {name} out, or the other.")
        if self.inner_valid is not None and getattr(self, "criterion", self) is None:
            rule, remedy = "inner_valid needs a criterion", "Pass one, or leave inner_valid out."
            yield Problem(rule, "criterion=None", remedy)
        if self.callbacks is None:
            return
        if isinstance(self.callbacks, str) or not isinstance(self.callbacks, Sequence):
            rule, remedy = "callbacks must be a list", "Pass for instance [EarlyStopping()]."
            yield Problem(rule, one_line(self.callbacks), remedy)
            return
        from asynckfold.training.callbacks import callback_problems

        yield from callback_problems(self.callbacks, has_inner=self.inner_valid is not None)
        baseline = getattr(self, "baseline", None)
        if baseline not in (None, "none"):
            rule = "the serial baseline trains without callbacks"
            yield Problem(rule, f"baseline={baseline!r}", "Leave baseline out.")

    def _problems_of(self, name: str, params: TrainerParams) -> Iterator[Problem]:
        shape, example = _SHAPES[name]
        if not callable(getattr(self, name)):
            yield Problem(
                f"{name} must be a function {shape}",
                one_line(getattr(self, name)),
                f"Write for instance: {example}.",
            )
        if params.trainer != "plain":
            yield Problem(
                f"{name} needs the plain trainer",
                f"trainer={params.trainer!r}",
                "Leave trainer and processes out.",
            )
        baseline = getattr(self, "baseline", None)
        if baseline not in (None, "none"):
            yield Problem(
                f"the serial baseline trains by the criterion, not by a {name}",
                f"baseline={baseline!r}",
                "Leave baseline out.",
            )


def _unseen_problems(params: TrainerParams) -> Iterator[Problem]:
    """Yield parameters of the built-in loop that would have no effect."""
    unseen = [
        f"{name}={getattr(params, name)!r}"
        for name, values in _OURS.items()
        if getattr(params, name) in values
    ]
    if params.clip_grad_norm is not None:
        unseen.append(f"clip_grad_norm={params.clip_grad_norm!r}")
    if params.accumulate > 1:
        unseen.append(f"accumulate={params.accumulate}")
    if unseen:
        yield Problem(
            "a fit_fn sets precision, accumulates and clips gradients, and steps the LR schedule",
            ", ".join(unseen),
            "Leave that out, and write it in fit_fn.",
        )
