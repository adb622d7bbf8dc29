"""Process-wide settings of torch that change numbers.

The caller's settings hold for every job, also in workers: they travel with the bundle, and those
that differ from torch's defaults are recorded with the software. Denormals are flushed to zero in
every job, whatever the caller does: they are many times slower on some processors, and Adam makes
them, since its moments decay by a factor per step wherever the gradient is zero. With them, 10
epochs of an MLP 784-128-10 on MNIST took 1.5 times as long, and 30 epochs 1.65 times (Adam, 4,800
samples, 1 core of an Intel Xeon; no difference on an AMD EPYC).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.backends.opt_einsum

from asynckfold.training import torch_internals

Value = str | bool | int | float | None

UNREADABLE = "torch refuses to tell"
"""Value of a setting that raises when read, as older names do beside ``fp32_precision``.

It is neither set nor compared: the settings of ``fp32_precision`` then say what torch computes.
"""


@dataclass(frozen=True)
class Setting:
    """A setting of the process; `usual` is torch's default."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    usual: Value = None
    gpu: bool = False

    def value(self) -> Any:
        """Return the current value, or `UNREADABLE`."""
        try:
            return self.read()
        except Exception:  # noqa: BLE001 - of torch, and must not end the worker
            return UNREADABLE

    def differs(self, value: Any) -> bool:
        """Return whether the value is another than it was."""
        return bool(value != UNREADABLE and self.value() != value)

    def put(self, value: Any) -> None:
        """Set it, if it differs and was readable."""
        if self.differs(value):
            self.write(value)


def _flag(owner: Any, label: str, usual: Value, *, gpu: bool = False) -> Setting:
    """An attribute of one of torch's backends."""
    name = label.rpartition(".")[2]
    return Setting(label, partial(getattr, owner, name), partial(setattr, owner, name), usual, gpu)


_CELLS = (
    ("generic", "all", "none"),
    ("cuda", "all", "none"),
    ("cuda", "matmul", "none"),
    ("cuda", "conv", "tf32"),
    ("cuda", "rnn", "tf32"),
    ("mkldnn", "all", "none"),
    ("mkldnn", "matmul", "none"),
    ("mkldnn", "conv", "none"),
    ("mkldnn", "rnn", "none"),
)
"""Backend, operation and default of each ``fp32_precision``; general ones first, since special ones
follow them by default."""


def _cell(backend: str, operation: str, usual: str) -> Setting:
    return Setting(
        f"fp32_precision of {backend} {operation}",
        partial(torch_internals.fp32_precision, backend, operation),
        partial(torch_internals.set_fp32_precision, backend, operation),
        usual,
        backend == "cuda",
    )


def allow_tf32(allowed: bool = True) -> None:
    """Let GPUs round the inputs of matrix products and convolutions to TF32, or forbid it.

    By the older names, after which both kinds can be read; by the newer ones where the caller used
    these: torch refuses to read older names beside newer ones that say something else.
    """
    # Some versions of torch warn of the older names.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if all(setting.value() != UNREADABLE for setting in _OLDER_TF32):
            for setting in _OLDER_TF32:
                setting.put(allowed)
            return
    for setting in _NEWER_TF32:
        setting.put("tf32" if allowed else "ieee")


_backends = torch.backends
_matmul, _cudnn = _backends.cuda.matmul, _backends.cudnn

_OLDER_TF32 = [
    _flag(_matmul, "cuda.matmul.allow_tf32", False, gpu=True),
    _flag(_cudnn, "cudnn.allow_tf32", True, gpu=True),
]
_NEWER_TF32 = [_cell(*cell) for cell in _CELLS if cell[0] == "cuda" and cell[1] != "all"]

SETTINGS: tuple[Setting, ...] = (
    # Older names first: setting them sets some of the newer ones.
    Setting(
        "float32_matmul_precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "highest",
    ),
    _OLDER_TF32[1],
    *(_cell(*cell) for cell in _CELLS if torch_internals.has_fp32_precision),
    _flag(_matmul, "cuda.matmul.allow_fp16_reduced_precision_reduction", True, gpu=True),
    _flag(_matmul, "cuda.matmul.allow_bf16_reduced_precision_reduction", True, gpu=True),
    _flag(_cudnn, "cudnn.enabled", True, gpu=True),
    _flag(_cudnn, "cudnn.benchmark", False, gpu=True),
    _flag(_cudnn, "cudnn.deterministic", False, gpu=True),
    _flag(_backends.mkldnn, "mkldnn.enabled", True),
    _flag(_backends.mkldnn, "mkldnn.deterministic", False),
    *(
        _flag(_backends.opt_einsum, f"opt_einsum.{name}", usual)
        for name, usual in (("enabled", True), ("strategy", "auto"))
        if _backends.opt_einsum.is_available()
    ),
    Setting(
        "mha.fastpath", _backends.mha.get_fastpath_enabled, _backends.mha.set_fastpath_enabled, True
    ),
    *(
        Setting(
            f"{name}_sdp",
            getattr(_backends.cuda, f"{name}_sdp_enabled"),
            getattr(_backends.cuda, f"enable_{name}_sdp"),
            True,
        )
        for name in ("flash", "mem_efficient", "math", "cudnn")
    ),
    _flag(torch.utils.deterministic, "deterministic.fill_uninitialized_memory", True),
)
"""In the order in which to set them."""


def current() -> dict[str, Any]:
    """Return the settings of this process, by name."""
    return {setting.name: setting.value() for setting in SETTINGS}


def apply(values: Mapping[str, Any]) -> None:
    """Apply settings that `current` returned, perhaps in another process."""
    for setting in SETTINGS:
        setting.put(values.get(setting.name, UNREADABLE))


def unusual(values: Mapping[str, Any], *, gpu: bool) -> str:
    """Name the settings that differ from torch's defaults, with those of GPUs or without.

    Examples
    --------
    >>> unusual({**current(), "mkldnn.enabled": False}, gpu=False)
    'mkldnn.enabled=False'
    """
    return ", ".join(
        f"{setting.name}={values[setting.name]}"
        for setting in SETTINGS
        if setting.usual is not None
        and (gpu or not setting.gpu)
        # "none" means "ieee".
        and values[setting.name] not in (setting.usual, UNREADABLE)
        and not (values[setting.name] == "ieee" and setting.usual == "none")
    )


# Denormals

SHARE = 1 << 16
"""Elements per thread: torch divides no fewer among threads."""


def flush_denormals() -> None:
    """Flush denormals in this thread and those that it starts: in a worker, in all threads."""
    torch.set_flush_denormal(True)


def denormals_are_flushed(elements: int = 1) -> bool:
    """Whether all threads that share a computation on `elements` flush denormals."""
    tiny = torch.full((elements,), 1, dtype=torch.int32).view(torch.float32)
    # By their bits: a thread that flushes denormals compares them as 0.
    return not (tiny * 1.0).view(torch.int32).any()


def can_flush_denormals(threads: int = 1) -> bool:
    """Whether `flush_denormals` would reach this thread and `threads` of torch's pool.

    Threads of the pool that were started earlier keep their mode. This thread's mode is restored.
    """
    before, count = denormals_are_flushed(), torch.get_num_threads()
    try:
        flush_denormals()
        torch.set_num_threads(threads)
        return denormals_are_flushed(threads * SHARE)
    finally:
        torch.set_num_threads(count)
        torch.set_flush_denormal(before)
