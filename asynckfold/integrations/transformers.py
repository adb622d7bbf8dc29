"""A Hugging Face model and its tokenized samples: padded once, and scored by its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

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
    """
    items = [dict(item) for item in samples]
    targets = np.array([item.pop(target_key) for item in items])
    arrays = {name: np.asarray(value) for name, value in collator(items).items()}
    return arrays, targets
