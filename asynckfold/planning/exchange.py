"""How fast a job of several processes trains, compared with one process. Pure.

A step of one process takes `step` seconds. Each of several processes takes a separate batch, or
with ``allreduce`` a part of one; then they exchange parameters or gradients::

    plain        ├── step ──┤
    hogwild      ├── step ──┼─ exchange ─┤      processes × batches
    allreduce    ├─ part ─┼─ exchange ─┤        one batch

An exchange takes a constant, seconds for each byte of the parameters, and a share of the step, in
which processes disturb each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """Seconds of one exchange between the processes of a job.

    Parameters
    ----------
    seconds : float
        Of an exchange of nothing.
    per_byte : float
        Of each byte of the parameters.
    share : float
        Of the step, by which processes slow each other down.
    """

    seconds: float
    per_byte: float
    share: float

    def gain(self, trainer: str, processes: int, step: float, part: float, size: int) -> float:
        """Return how many times as fast as one process a job trains.

        Parameters
        ----------
        trainer : str
            Its trainer.
        processes : int
            Of the job.
        step, part : float
            Seconds of a step of one process on a batch, and on a part of one.
        size : int
            Bytes of the parameters.

        Examples
        --------
        >>> round(EXCHANGES["allreduce"].gain("allreduce", 2, 0.76e-3, 0.6e-3, 407_000), 1)
        0.6
        >>> round(EXCHANGES["hogwild"].gain("hogwild", 2, 4.8e-3, 3.6e-3, 247_000), 1)
        1.8
        """
        alone, batches = (part, 1) if trainer == "allreduce" else (step, processes)
        together = alone * (1 + self.share) + self.seconds + self.per_byte * size
        return batches * step / together


EXCHANGES: Mapping[str, Exchange] = {
    "allreduce": Exchange(5e-4, 5e-10, 0.05),
    "averaging": Exchange(0.0, 1e-10, 0.2),
    "hogwild": Exchange(0.0, 1e-10, 0.1),
    "parameter_server": Exchange(1e-3, 2.3e-9, 0.2),
}
"""Fitted by hand to reports/bench/trainers.md, two processes on two cores of a Xeon. Gains for an
MLP of 407 kB, LeNet5 and an MLP of 2.6 MB, as they follow from these numbers and as measured:

================  ================  ================
trainer           from here         measured
================  ================  ================
allreduce         0.57, 1.21, 0.65  0.61, 1.30, 0.68
averaging         1.60, 1.66, 1.52  1.71, 1.62, 1.62
hogwild           1.73, 1.81, 1.65  1.75, 1.99, 1.72
parameter_server  0.53, 1.31, 0.48  0.75, 1.35, 0.49
================  ================  ================
"""


def gain_text(gain: float) -> str:
    """Return the gain of several processes as a part of a sentence.

    >>> gain_text(0.62)
    'predicted 0.6 times as fast as one process: slower'
    """
    text = f"predicted {gain:.1f} times as fast as one process"
    return f"{text}: slower" if gain < 1 else text
