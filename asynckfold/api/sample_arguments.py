"""Arguments that say how samples are read and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from asynckfold.errors import Problem
from asynckfold.jobs.argument import argument, one_line
from asynckfold.jobs.criteria import is_factory
from asynckfold.jobs.trainer_params import TrainerParams


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

    def keyed(self, dataset: Any) -> Any:
        """Return a data set of dicts as one of pairs, if `target_key` names the target."""
        is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if self.target_key is None or isinstance(dataset, (tuple, dict)) or not is_map_style:
            return dataset
        from asynckfold.data.dataset import KeyedTargets

        # A copy of the settings has it already.
        known = isinstance(dataset, KeyedTargets)
        return dataset if known else KeyedTargets(dataset, self.target_key)

    def sample_problems(self, dataset: Any) -> Iterator[Problem]:
        """Yield what is wrong with these arguments."""
        if self.target_key is not None and isinstance(dataset, tuple):
            yield Problem(
                "target_key is for a data set whose items are dicts",
                f"target_key={self.target_key!r}, and a tuple",
                "Drop it.",
            )
        function: object = self.collate_fn
        if function is not None and not callable(function):
            yield Problem(
                "collate_fn must be a function of a list of samples",
                one_line(function),
                "Write for instance: def collate(samples): ...; return inputs, targets.",
            )

        if isinstance(self.sampler, str) and self.sampler != "balanced":
            yield Problem(
                "sampler must be 'balanced', an array of weights, or a function",
                repr(self.sampler),
                "Pass sampler='balanced'.",
            )
        elif isinstance(self.sampler, type) or hasattr(self.sampler, "__next__"):
            yield Problem(
                "sampler must be 'balanced', an array of weights, or a function of the targets",
                one_line(self.sampler),
                "Write for instance: lambda train_targets: 1.0 + 4.0 * (train_targets == 1).",
            )

    def sampling_problems(self, params: TrainerParams) -> Iterator[Problem]:
        """Yield what does not go with a `collate_fn` or a `sampler`."""
        given = {
            "collate_fn": self.collate_fn is not None,
            "sampler": self.sampler is not None,
            "a criterion for each fold": is_factory(getattr(self, "criterion", None)),
        }
        for name, is_given in given.items():
            if is_given and params.trainer != "plain":
                yield Problem(
                    f"{name} needs the plain trainer",
                    f"trainer={params.trainer!r}",
                    "Leave trainer and processes out.",
                )
        baseline = getattr(self, "baseline", None)
        if self.collate_fn is not None and baseline not in (None, "none"):
            yield Problem(
                "the serial baseline stacks samples of one shape, and calls no collate_fn",
                f"baseline={baseline!r}",
                "Leave baseline out.",
            )
