"""Metrics that accumulate batch by batch: objects of torchmetrics, or of the same shape.

A fold gets a copy of its own, reset: no state is shared. It is given probabilities where the scale
of outputs is known, numbers for a regression, and class indices as targets; and trees of outputs
and of targets as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import Problem
from asynckfold.jobs.columns import with_leaves
from asynckfold.jobs.criteria import MARGINS, TRANSFORMED, UNKNOWN
from asynckfold.jobs.objective import (
    BINARY,
    REGRESSION,
    Objective,
    Transform,
    predicted,
    probabilities,
)

CHUNK = 256
"""Samples that a metric gets at a time."""


def accumulates(item: Any) -> bool:
    """Whether an object is a metric with a state, as those of torchmetrics."""
    names = ("update", "compute", "reset", "higher_is_better")
    return not isinstance(item, type) and all(hasattr(item, name) for name in names)


def name_of(item: Any, name: str = "") -> str:
    """Return the name of its score: greater is better, so that an error is negated."""
    name = name or type(item).__name__
    is_error = item.higher_is_better is False and not name.startswith("neg_")
    return f"neg_{name}" if is_error else name


class Accumulating:
    """A copy of a metric, reset, which gets outputs batch by batch; `name` is that of its score."""

    def __init__(
        self, item: Any, objective: Objective, transform: Transform | None, name: str = ""
    ) -> None:
        self._name = name
        self._metric, self._objective, self._transform = copy.deepcopy(item), objective, transform
        self._metric.reset()

    def update(self, targets: npt.NDArray[Any], outputs: npt.NDArray[np.float32]) -> None:
        """Add the targets (b, ...) and outputs (b, ...) of some samples."""
        import torch

        given = _given(self._objective, self._transform, targets, outputs)
        tensors = with_leaves(lambda part: torch.from_numpy(np.ascontiguousarray(part)), given)
        with torch.no_grad():
            self._metric.update(*tensors)

    def value(self) -> float:
        """Return the value over all samples, negated if less is better."""
        import torch

        value = self._metric.compute()
        if isinstance(value, Mapping):
            value = self._named(value)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"{type(self._metric).__name__} must compute one number, not {shape}")
        return -float(value) if self._metric.higher_is_better is False else float(value)

    def _named(self, values: Mapping[str, Any]) -> Any:
        """Return the value of the score's name, of a metric that computes several."""
        name = self._name if self._name in values else self._name.removeprefix("neg_")
        if name not in values:
            raise ValueError(
                f"{type(self._metric).__name__} computes several numbers: name one of them, "
                f"scoring={{{next(iter(values))!r}: metric}}; there are {', '.join(values)}"
            )
        return values[name]


def score_of(
    name: str,
    item: Any,
    objective: Objective,
    transform: Transform | None,
    targets: npt.NDArray[Any],
    outputs: npt.NDArray[np.float32],
) -> float:
    """Return the value over all samples, negated if less is better."""
    metric = Accumulating(item, objective, transform, name)
    for low in range(0, len(targets), CHUNK):
        rows = slice(low, low + CHUNK)
        metric.update(targets[rows], outputs[rows])
    return metric.value()


def _given(
    objective: Objective,
    transform: Transform | None,
    targets: npt.NDArray[Any],
    outputs: npt.NDArray[np.float32],
) -> tuple[Any, Any]:
    if objective.targets is not None:
        return objective.given(outputs), objective.asked(targets)
    if objective.outputs and objective.scale != TRANSFORMED:
        return objective.given(outputs), targets
    if objective.kind == REGRESSION:
        found = predicted(objective, outputs, transform).astype(np.float32)
        return found, targets.reshape(found.shape) if found.size == targets.size else targets
    if objective.scale in (MARGINS, UNKNOWN):
        return outputs, objective.codes(targets)
    shares = probabilities(objective, outputs, transform).astype(np.float32)
    return shares[:, 1] if objective.kind == BINARY else shares, objective.codes(targets)


def metric_problems(name: str, item: Any) -> Iterator[Problem]:
    """Yield that a metric does not say whether more or less of it is better."""
    if item.higher_is_better is None:
        yield Problem(
            "a metric must say by higher_is_better whether more of it is better",
            f"{name}, whose higher_is_better is None",
            "Pass a function (targets, outputs) → float, or set higher_is_better on a subclass.",
        )
