"""What user code changes in its process is put back, so that no job depends on the one before it.

What would be dear to restore stays as it is: imported modules, monkey patches, signal handlers.
The random generators need no care, since every job seeds them.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asynckfold.training.denormals import flushed


@dataclass(frozen=True)
class _Setting:
    """Something of the process that can be read and set."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _attribute(owner: Any, name: str) -> _Setting:
    return _Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _set_default_device(device: torch.device) -> None:
    # None takes the mode off that would slow down every call of torch.
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _set_path(entries: list[str]) -> None:
    sys.path[:] = entries


_SETTINGS = (
    _Setting(torch.get_default_dtype, torch.set_default_dtype),
    _Setting(torch.get_default_device, _set_default_device),
    _Setting(torch.get_num_threads, torch.set_num_threads),
    _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _Setting(flushed, torch.set_flush_denormal),
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    _attribute(torch.backends.mkldnn, "enabled"),
    _Setting(np.geterr, lambda found: np.seterr(**found)),
    _Setting(lambda: dict(os.environ), _set_environment),
    _Setting(lambda: list(sys.path), _set_path),
    _attribute(sys, "stdout"),
    _attribute(sys, "stderr"),
)
"""Settings of the process; one that a job left alone is not written."""


@contextmanager
def isolated() -> Iterator[None]:
    """Put settings, working folder and warning filters back as they were."""
    before = [setting.read() for setting in _SETTINGS]
    # By descriptor: the folder may be renamed or removed meanwhile.
    folder = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.fchdir(folder)
        os.close(folder)
        for setting, value in zip(_SETTINGS, before, strict=True):
            if setting.read() != value:
                setting.write(value)
