"""What scores outputs batch by batch where a run does not hold those of a whole fold.

``results`` makes it, ``training`` feeds it: neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Accumulator(Protocol):
    """Scores of one held-out fold, accumulated batch by batch."""

    def update(self, targets: npt.NDArray[Any], outputs: npt.NDArray[np.float32]) -> None:
        """Add the targets (b, ...) and outputs (b, ...) of a batch."""

    def scores(self) -> dict[str, float]:
        """Return the scores over all batches; greater is better."""


MakeAccumulator = Callable[[], Accumulator]
"""() → one without any batch, for one job."""
