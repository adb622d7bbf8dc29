"""Arguments that say how samples are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from asynckfold.errors import Problem
from asynckfold.jobs.argument import argument, one_line
from asynckfold.jobs.trainer_params import TrainerParams


@dataclass(frozen=True, kw_only=True)
class SampleArguments:
    """Arguments that say how samples are read.

    Parameters
    ----------
    target_key : str, optional
        Key of the target, where the items of the data set are dicts. Default: ``"labels"`` or
        ``"target"``.
    collate_fn : callable, optional
        Makes a batch of a list of items, as in torch's ``DataLoader``: it returns (inputs, target),
        or a dict of both where items are dicts. Samples may then have inputs of different length,
        which are stored once as offsets and values. Used in training, scoring, prediction and
        refit. Classes arrive as their index. Such jobs are not fused.
    """

    target_key: str | None = argument(None, group="data", spelled="", none="")
    collate_fn: Callable[[list[Any]], Any] | None = argument(None, group="data")

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

    def collate_problems(self, params: TrainerParams) -> Iterator[Problem]:
        """Yield what does not go with a `collate_fn`."""
        if self.collate_fn is None:
            return
        if params.trainer != "plain":
            yield Problem(
                "collate_fn needs the plain trainer",
                f"trainer={params.trainer!r}",
                "Leave trainer and processes out.",
            )
        baseline = getattr(self, "baseline", None)
        if baseline not in (None, "none"):
            yield Problem(
                "the serial baseline stacks samples of one shape, and calls no collate_fn",
                f"baseline={baseline!r}",
                "Leave baseline out.",
            )
