"""TF32 by torch's two names: each state is carried to a worker, and restored after a job.

torch refuses to read older names (`allow_tf32`, `set_float32_matmul_precision`) beside newer ones
(`fp32_precision`) that say something else, and its hidden state cannot be reset: each case has a
process of its own, forked in a script.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="this torch has no fp32_precision"
)

_SCRIPT = """
import json, os, sys, warnings
import torch
from torch import backends

warnings.simplefilter("error")
from asynckfold.training.isolation import torch_settings
from asynckfold.training.isolation.guard import isolated

STATES = {
    "none": lambda: None,
    "all ieee": lambda: setattr(backends, "fp32_precision", "ieee"),
    "all tf32": lambda: setattr(backends, "fp32_precision", "tf32"),
    "matmul tf32": lambda: setattr(backends.cuda.matmul, "fp32_precision", "tf32"),
    "matmul ieee": lambda: setattr(backends.cuda.matmul, "fp32_precision", "ieee"),
    "matmul, older": lambda: setattr(backends.cuda.matmul, "allow_tf32", True),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "cudnn, older": lambda: setattr(backends.cudnn, "allow_tf32", False),
    "conv ieee": lambda: setattr(backends.cudnn.conv, "fp32_precision", "ieee"),
    "cudnn ieee": lambda: setattr(backends.cudnn, "fp32_precision", "ieee"),
    "mkldnn bf16": lambda: setattr(backends.mkldnn, "fp32_precision", "bf16"),
}
CUDA = [f"fp32_precision of cuda {name}" for name in ("matmul", "conv", "rnn")]


def child(work):
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            said = work()
        except BaseException as error:
            said = repr(error)
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        said = json.load(file)
    os.wait()
    return said


def current(state):
    STATES[state]()
    return torch_settings.current()


def apart(one, other):
    return {name: (one[name], other[name]) for name in one if one[name] != other[name]}


def carried(values):
    torch_settings.apply(values)
    return apart(values, torch_settings.current())


def restored(state, change):
    before = current(state)
    with isolated() as traces:
        STATES[change]()
    found = apart(before, torch_settings.current())
    return {name: pair for name, pair in found.items() if pair[0] != torch_settings.UNREADABLE} or (
        traces.left
    )


def allowed(state):
    with isolated() as traces:
        STATES[state]()
        torch_settings.allow_tf32()
        values = torch_settings.current()
    return [values[name] for name in CUDA] + traces.left


def tf32_beside_cores(values):
    # What cores compute stays as the caller has it.
    before = torch_settings.current()
    torch_settings.allow_tf32()
    return [name for name in apart(before, torch_settings.current()) if "mkldnn" in name]


for state in STATES:
    if found := child(lambda: carried(child(lambda: current(state)))):
        print("carried:", state, found)
    if (found := child(lambda: allowed(state))) != ["tf32"] * 3:
        print("TF32 where it was asked for:", state, found)
    for change in STATES if sys.argv[1] == "all" else ["all tf32", "high", "matmul, older"]:
        if found := child(lambda: restored(state, change)):
            print("restored:", state, change, found)
if found := child(lambda: tf32_beside_cores(None)):
    print("cores:", found)
print("done")
"""


@pytest.mark.nightly
@pytest.mark.parametrize("pairs", [pytest.param("all", marks=pytest.mark.nightly), "some"])
def test_both_names_of_tf32_are_carried_and_restored(pairs: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT, pairs], capture_output=True, text=True, check=False
    )
    assert found.stdout == "done\n", found.stdout + found.stderr
