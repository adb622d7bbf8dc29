"""Try GPUs: open each, run one kernel, read its free memory. Runs in a process of its own.

Each GPU is tried in a fork, so that one that hangs or crashes hides no other, and so that a slice
(MIG), of which a process can open one only, is tried like a whole GPU.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from typing import Any

EACH_SECONDS = 90.0
"""Limit for opening one GPU; they open side by side."""


def main(uuids: Sequence[str]) -> None:
    """Print what was found as JSON: by UUID, or by index where none is given."""
    import torch

    context = multiprocessing.get_context("fork")
    count = len(uuids) or torch.cuda.device_count()
    names = list(uuids) or [str(index) for index in range(count)]
    trials = []
    for index, name in enumerate(names):
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_answer, args=(there, 0 if uuids else index, uuids and name))
        child.start()
        there.close()
        trials.append((name, here, child))
    found: dict[str, Any] = {}
    for name, here, child in trials:
        found[name] = {"failure": f"no answer within {EACH_SECONDS:g} s"}
        with contextlib.suppress(EOFError):
            if here.poll(EACH_SECONDS):
                found[name] = {"failure": "its process died"}
                found[name] = here.recv()
        child.kill()
        child.join()
    sys.stdout.write(json.dumps(found) + "\n")


def _answer(pipe: Any, index: int, uuid: str) -> None:
    try:
        pipe.send(_tried(index, uuid))
    except Exception as error:  # noqa: BLE001
        # Whatever torch or the driver raises is the finding.
        text = " ".join(str(error).split()) or repr(error)
        pipe.send({"failure": f"{type(error).__name__}: {text[:300]}"})


def _tried(index: int, uuid: str) -> dict[str, Any]:
    import torch

    if uuid:
        os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    torch.cuda.init()  # type: ignore[no-untyped-call]
    ones = torch.ones(256, device=torch.device("cuda", index))
    if float(ones.add(1).sum()) != 512.0:
        raise RuntimeError("a sum of 512 came out wrong")
    free, total = torch.cuda.mem_get_info(index)
    seen = torch.cuda.get_device_properties(index)
    own = "" if torch.version.cuda is None else f"GPU-{getattr(seen, 'uuid', '')}"
    return {"free": free, "total": total, "name": seen.name, "uuid": uuid or own.strip("-")}
