"""The user's `output_transform`: of tensors, and as a function of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from asynckfold.jobs.objective import Transform
from asynckfold.jobs.schema import with_leaves


def of_arrays(transform: Callable[[Any], Any]) -> Transform:
    """Return a function of tensors as one of arrays."""
    import torch

    def apply(outputs: Any) -> Any:
        with torch.no_grad():
            found = transform(with_leaves(lambda item: torch.from_numpy(np.array(item)), outputs))
        if isinstance(found, torch.Tensor):
            return found.detach().cpu().numpy()
        return np.asarray(found)

    return apply
