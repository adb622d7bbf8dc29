"""What the processes of one job pay to exchange, and whether they are faster than one.

A step of one process takes `step` seconds. Of a trainer of several processes, each takes a batch of
its own, or with ``allreduce`` a part of one; then they exchange parameters or gradients::

    plain        ├── step ──┤
    hogwild      ├── step ──┼─ exchange ─┤      processes × batches
    allreduce    ├─ part ─┼─ exchange ─┤        one batch

An exchange takes a constant, seconds for each byte of the parameters, and a share of the step, in
which processes disturb each other. The numbers are of this machine if they were measured here
(`asynckfold plan` does so once for each trainer), else of the machine of ``reports/bench``. They
stay in the cache of `cost_cache.folder` when its other entries go.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asynckfold.errors import StorageError
from asynckfold.planning.cost_cache import key_of
from asynckfold.system.files import make_folder, write_whole


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
    is_measured : bool
        Whether it was measured on this machine.
    """

    seconds: float
    per_byte: float
    share: float = 0.0
    is_measured: bool = False

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
        >>> round(BUILT_IN["allreduce"].gain("allreduce", 2, 0.76e-3, 0.6e-3, 407_000), 1)
        0.6
        >>> round(BUILT_IN["hogwild"].gain("hogwild", 2, 4.8e-3, 3.6e-3, 247_000), 1)
        1.8
        """
        alone, batches = (part, 1) if trainer == "allreduce" else (step, processes)
        together = alone * (1 + self.share) + self.seconds + self.per_byte * size
        return batches * step / together


BUILT_IN: Mapping[str, Exchange] = {
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
    """Return what several processes bring, as a part of a sentence.

    >>> gain_text(0.62)
    'predicted 0.6 times as fast as one process: slower'
    """
    text = f"predicted {gain:.1f} times as fast as one process"
    return f"{text}: slower" if gain < 1 else text


def recall(trainer: str, machine: Mapping[str, Any], place: Path | None) -> Exchange:
    """Return what was measured on this machine, or else the built-in numbers."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        if place is not None:
            raw = json.loads(_path(trainer, machine, place).read_text())
            return Exchange(**{name: float(raw[name]) for name in _NUMBERS}, is_measured=True)
    return BUILT_IN[trainer]


_NUMBERS = ("seconds", "per_byte", "share")


def remember(
    trainer: str, machine: Mapping[str, Any], exchange: Exchange, place: Path | None
) -> None:
    """Store what was measured on this machine."""
    # A full or read-only home only costs another measurement.
    with contextlib.suppress(OSError, StorageError):
        if place is not None:
            make_folder(place)
            write_whole(_path(trainer, machine, place), json.dumps(asdict(exchange)).encode())


def _path(trainer: str, machine: Mapping[str, Any], place: Path) -> Path:
    return place / f"calibration-{trainer}-{key_of(machine)[:16]}.json"
