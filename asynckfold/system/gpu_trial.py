"""Whether torch can use the GPUs that NVML sees: tried in a child process, before the plan.

This process must not open a GPU: its context would hold memory there, and workers could not fork.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from asynckfold.jobs.placement import Gpu

TRIAL_SECONDS = 120.0
"""Limit for importing torch, opening each GPU and one kernel, all at once."""

_SOUND: set[tuple[str, ...]] = set()
"""GPUs that were found usable in this process, not tried again by a later call."""


def failures(uuids: Sequence[str]) -> dict[str, str]:
    """Return, by UUID, why torch cannot use a GPU; usable ones are missing."""
    key = (os.environ.get("CUDA_VISIBLE_DEVICES", "*"), *uuids)
    if not uuids or key in _SOUND:
        return {}
    found, reason = _ask([*uuids])
    failed = {
        uuid: found.get(uuid, {}).get("failure", reason or "its trial ended without an answer")
        for uuid in uuids
        if "free" not in found.get(uuid, {})
    }
    if not failed:
        _SOUND.add(key)
    return failed


def seen_by_torch() -> tuple[list[tuple[Gpu, str]], str]:
    """Return the GPUs and their names as torch sees them, without NVML, and why there are none.

    Their free memory is that of this moment.
    """
    found, reason = _ask([])
    gpus = [
        (Gpu(int(index), item["free"], item["total"], uuid=item["uuid"]), str(item["name"]))
        for index, item in found.items()
        if "free" in item
    ]
    reasons = [f"GPU {index}: {item['failure']}" for index, item in found.items() if not _ok(item)]
    return gpus, "; ".join(reasons) or reason or ("" if gpus else "torch sees no GPU")


def _ok(item: Mapping[str, Any]) -> bool:
    return "free" in item


def _ask(uuids: list[str]) -> tuple[dict[str, dict[str, Any]], str]:
    """Run the trial; return what it found of each GPU, or why it found nothing."""
    code = (
        f"import sys; sys.path[:] = {json.dumps(sys.path)}; "
        f"from asynckfold.training.worker.gpu_trial import main; main({json.dumps(uuids)})"
    )
    variables = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ, "OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRIAL_SECONDS,
            check=False,
            env=variables,
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {TRIAL_SECONDS:g} s"
    except OSError as error:
        return {}, f"its trial could not be started: {error}"
    try:
        found: dict[str, dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = child.stderr.strip().splitlines()[-1:] or ["no error message"]
        return {}, f"its trial ended with exit code {child.returncode}: {last[0]}"
    return found, ""
