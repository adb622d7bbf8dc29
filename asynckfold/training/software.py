"""The software and processor of this process: what bits depend on besides the plan."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from asynckfold.jobs.reproducibility import (
    ARITHMETIC,
    BUILD,
    CPU,
    CUDA,
    DENORMALS,
    ENVIRONMENT,
    GPU,
    KERNELS,
    NUMERICS,
    THREADS,
    TORCH,
    VARIABLES,
)
from asynckfold.training import torch_settings
from asynckfold.training.torch_settings import can_flush_denormals

REVISION = "2"
"""Revision of asynckfold's arithmetic: raise it with every change that gives other bits, as
another kernel, order of summation, or random draw."""

REVISION_ON_GPUS = "3"
"""The same where GPUs train."""

EXTENSIONS = {
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
}
"""Instruction sets by which torch, oneDNN, MKL and OpenBLAS choose kernels."""


def software(
    threads_per_job: int,
    gpus: Sequence[str] = (),
    cpuinfo: Path = Path("/proc/cpuinfo"),
    *,
    in_workers: bool = True,
) -> dict[str, str]:
    """Return versions and settings that bits depend on, by name.

    `gpus` are names of those in use: asking torch would open a context in this process. If not
    `in_workers`, this process trains, whose threads may have started earlier.
    """
    build = f"{torch.version.git_version}\n{torch.__config__.show()}"
    processor = dict(_processor(cpuinfo))
    by_name = {
        TORCH: torch.__version__,
        BUILD: hashlib.sha256(build.encode()).hexdigest()[:12],
        **{name: _version(name) for name in ("torchvision", "numpy", "scikit-learn")},
        "python": platform.python_version(),
        "CPU": processor.get("model name", platform.processor()),
        CPU: _cpu_class(processor),
        ENVIRONMENT: " ".join(f"{key}={os.environ[key]}" for key in VARIABLES if key in os.environ),
        THREADS: str(threads_per_job),
        KERNELS: "yes" if torch.get_deterministic_debug_mode() == 2 else "no",
        NUMERICS: torch_settings.unusual(torch_settings.current(), gpu=bool(gpus)),
        ARITHMETIC: REVISION_ON_GPUS if gpus else REVISION,
        DENORMALS: "taken for 0"
        if can_flush_denormals(1 if in_workers else threads_per_job)
        else "kept",
    }
    if gpus:
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        by_name[CUDA] = f"{torch.version.cuda}, cuDNN {cudnn}"
        by_name[GPU] = ", ".join(sorted(set(gpus)))
    return by_name


def _cpu_class(processor: dict[str, str]) -> str:
    """Maker, family, model and instruction sets: processors of one class run the same kernels."""
    keys = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    words = [processor[key] for key in keys if key in processor]
    known = f"{processor.get('flags', '')} {processor.get('Features', '')}".split()
    extensions = " ".join(sorted(EXTENSIONS.intersection(known)))
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {' '.join(words)} {capability} ({extensions})"


def _processor(cpuinfo: Path) -> Iterator[tuple[str, str]]:
    """Entries of the first processor."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()


@cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
