"""Process-wide settings of torch that change numbers.

The caller's settings hold for every job, also in workers: they travel with the bundle, and those
that differ from torch's defaults are recorded with the software.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.backends.opt_einsum  # which torch 2.7 does not import itself

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


def _flag(owner: Any, label: str, usual: Value, *, gpu: bool = False) -> list[Setting]:
    """An attribute of one of torch's backends, if this version has it."""
    name = label.rpartition(".")[2]
    try:
        if not hasattr(owner, name):
            return []
    except RuntimeError:
        # torch has it, and refuses to tell.
        pass

    read, write = partial(getattr, owner, name), partial(setattr, owner, name)
    return [Setting(label, read, write, usual, gpu)]


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


def _float32_precision() -> list[Setting]:
    """Older names first: setting them sets some of the newer ones."""
    found = [
        Setting(
            "float32_matmul_precision",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
            "highest",
        ),
        *_flag(torch.backends.cudnn, "cudnn.allow_tf32", True, gpu=True),
    ]
    if torch_internals.has_fp32_precision:
        found += [_cell(*cell) for cell in _CELLS]
    return found


def allow_tf32(allowed: bool = True) -> None:
    """Let GPUs round the inputs of matrix products and convolutions to TF32, or forbid it.

    By the older names, after which both kinds can be read; by the newer ones where the caller used
    these: torch refuses to read older names beside newer ones that say something else.
    """
    older = _older_tf32()
    # Some versions of torch warn of the older names.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if all(setting.value() != UNREADABLE for setting in older):
            for setting in older:
                setting.put(allowed)
            return
    for setting in _newer_tf32():
        setting.put("tf32" if allowed else "ieee")


def _older_tf32() -> list[Setting]:
    return [
        *_flag(torch.backends.cuda.matmul, "cuda.matmul.allow_tf32", False, gpu=True),
        *_flag(torch.backends.cudnn, "cudnn.allow_tf32", True, gpu=True),
    ]


def _newer_tf32() -> list[Setting]:
    return [_cell(*cell) for cell in _CELLS if cell[0] == "cuda" and cell[1] != "all"]


def _attention() -> list[Setting]:
    cuda = torch.backends.cuda
    names = ("flash", "mem_efficient", "math", "cudnn")
    return [
        Setting(
            f"{name}_sdp",
            getattr(cuda, f"{name}_sdp_enabled"),
            getattr(cuda, f"enable_{name}_sdp"),
            True,
        )
        for name in names
        if hasattr(cuda, f"{name}_sdp_enabled")
    ]


_backends = torch.backends
_matmul = _backends.cuda.matmul
_einsum = _backends.opt_einsum if _backends.opt_einsum.is_available() else None

SETTINGS: tuple[Setting, ...] = (
    *_float32_precision(),
    *_flag(_matmul, "cuda.matmul.allow_fp16_reduced_precision_reduction", True, gpu=True),
    *_flag(_matmul, "cuda.matmul.allow_bf16_reduced_precision_reduction", True, gpu=True),
    *_flag(_backends.cudnn, "cudnn.enabled", True, gpu=True),
    *_flag(_backends.cudnn, "cudnn.benchmark", False, gpu=True),
    *_flag(_backends.cudnn, "cudnn.deterministic", False, gpu=True),
    *_flag(_backends.mkldnn, "mkldnn.enabled", True),
    *_flag(_backends.mkldnn, "mkldnn.deterministic", False),
    *_flag(_einsum, "opt_einsum.enabled", True),
    *_flag(_einsum, "opt_einsum.strategy", "auto"),
    Setting(
        "mha.fastpath",
        _backends.mha.get_fastpath_enabled,
        _backends.mha.set_fastpath_enabled,
        True,
    ),
    *_attention(),
    *_flag(torch.utils.deterministic, "deterministic.fill_uninitialized_memory", True),
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
