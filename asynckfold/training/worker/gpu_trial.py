"""Try GPUs: open each, run one kernel, read its free memory. Runs in a process of its own.

GPUs with a UUID are tried in a fork each, so that one that hangs or crashes hides no other, and so
that a slice (MIG), of which a process can open one only, is tried like a whole GPU.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
from collections.abc import Sequence
from typing import Any

from asynckfold.system import terminal

EACH_SECONDS = 90.0
"""Limit for opening one GPU; they open side by side."""


def main(uuids: Sequence[str]) -> None:
    """Print what was answers as JSON: by UUID, or of all GPUs by index where none is given."""
    import torch

    if uuids:
        answers = _in_forks(uuids)
    else:
        # To count GPUs without NVML may initialise CUDA, after which no fork can use it.
        answers = {str(index): _answer(index) for index in range(torch.cuda.device_count())}
    terminal.write(f"{json.dumps(answers)}\n")


def _in_forks(uuids: Sequence[str]) -> dict[str, dict[str, Any]]:
    context = multiprocessing.get_context("fork")
    trials = []
    for uuid in uuids:
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_send, args=(there, uuid))
        child.start()
        there.close()
        trials.append((uuid, here, child))
    answers: dict[str, dict[str, Any]] = {}
    for uuid, here, child in trials:
        answers[uuid] = {"failure": f"no answer within {EACH_SECONDS:g} s"}
        if here.poll(EACH_SECONDS):
            answers[uuid] = {"failure": "its process died"}
            with contextlib.suppress(EOFError):
                answers[uuid] = here.recv()
        child.kill()
        child.join()
    return answers


def _send(pipe: Any, uuid: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    pipe.send(_answer(0, uuid))


def _answer(index: int, uuid: str = "") -> dict[str, Any]:
    try:
        return _tried(index, uuid)
    except Exception as error:  # noqa: BLE001
        # Whatever torch or the driver raises is the finding.
        text = " ".join(str(error).split()) or repr(error)
        return {"failure": f"{type(error).__name__}: {text[:300]}"}


def _tried(index: int, uuid: str) -> dict[str, Any]:
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    ones = torch.ones(256, device=torch.device("cuda", index))
    if float(ones.add(1).sum()) != 512.0:
        raise RuntimeError("a sum of 512 came out wrong")
    free, total = torch.cuda.mem_get_info(index)
    seen = torch.cuda.get_device_properties(index)
    device_uuid = getattr(seen, "uuid", "") if torch.version.cuda else ""
    uuid = uuid or (f"GPU-{device_uuid}" if device_uuid else "")
    return {"free": free, "total": total, "name": seen.name, "uuid": uuid}
