"""A Hugging Face model and its tokenized samples: padded once, and scored by its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asynckfold.errors import InputError
from asynckfold.jobs.argument import one_line

Array = npt.NDArray[Any]


class Logits(nn.Module):
    """A model of transformers that returns its logits alone.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With a head whose output has ``logits``, such as one for sequence classification.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch."""
        outputs = self.model(**inputs)
        logits = getattr(outputs, "logits", None)
        if not isinstance(logits, torch.Tensor):
            raise TypeError(
                f"the output of {type(self.model).__name__} must have logits: received "
                f"{type(outputs).__name__}. Use a model with a head, such as "
                "AutoModelForSequenceClassification"
            )
        return logits


def padded(
    samples: Iterable[Mapping[str, Any]],
    collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
    target_key: str = "labels",
) -> tuple[dict[str, Array], Array]:
    """Return all samples as arrays of one length, and their targets.

    Parameters
    ----------
    samples : iterable of Mapping
        Tokenized: a ``datasets.Dataset`` or a list of dicts, of numbers only.
    collator : callable
        ``DataCollatorWithPadding(tokenizer)``, which pads to the longest sample.
    target_key : str
        Column of the target.

    Returns
    -------
    inputs : dict of str to ndarray of shape (n_samples, length)
    targets : ndarray of shape (n_samples,)

    Raises
    ------
    InputError
        There is no such column, or samples cannot be padded.
    """
    items = [dict(item) for item in samples]
    if not items or not all(target_key in item for item in items):
        columns = ", ".join(map(str, items[0])) if items else "no samples"
        remedy = "Rename the column, or pass target_key."
        rule = f"each sample must have the target {target_key!r}"
        raise InputError.one(rule, columns, remedy)
    targets = np.array([item.pop(target_key) for item in items])
    try:
        batch = dict(collator(items))
        arrays = {name: np.asarray(value) for name, value in batch.items()}
    except Exception as error:
        raise InputError.one(
            "the collator must pad all samples",
            one_line(f"{type(error).__name__}: {error}"),
            "Remove columns that are no numbers, such as the text: dataset.remove_columns(...).",
        ) from error
    return arrays, targets
