"""Arguments that say how samples are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from asynckfold.errors import Problem
from asynckfold.jobs.argument import argument


@dataclass(frozen=True, kw_only=True)
class SampleArguments:
    """Arguments that say how samples are read.

    Parameters
    ----------
    target_key : str, optional
        Key of the target, where the items of the data set are dicts. Default: ``"labels"`` or
        ``"target"``.
    """

    target_key: str | None = argument(None, group="data", spelled="", none="")

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
