"""A script or a command that continues in this process what another process began.

What another process costs is its start: torch is imported twice for it, by the sweep and by the
server of its workers. Where the point of a test is that a run can be continued, and not by whom,
the workers of this process do that, which are there already.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from torch import nn, optim

from asynckfold import AsyncKFold, Plan
from asynckfold.cli import main


def script(code: str, *arguments: object) -> str:
    """Run a script as ``python -c`` does; return what it printed."""
    with (
        mock.patch.object(sys, "argv", ["-c", *map(str, arguments)]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    return printed.getvalue().strip()


def command(*words: object) -> str:
    """Run a command to its good end; return what it printed."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()) as told,
    ):
        code = main([*map(str, words)])
    assert code == 0, told.getvalue()
    return printed.getvalue()


@dataclass(frozen=True)
class Inspected:
    """What ``asynckfold data`` says of a source."""

    features: tuple[str, ...]
    roles: dict[str, str]
    classes: tuple[str, ...]
    counts: dict[str, int]
    notes: tuple[str, ...]
    samples: int
    shape: tuple[int, ...]


class RefusedError(Exception):
    """A command that printed an error; `why` says which rule a column breaks."""

    why: dict[str, str]


def inspected(source: str, **options: Any) -> Inspected:
    """Return what ``asynckfold data`` says; raise `RefusedError` where it refuses the data."""
    words = ["data", source, "--json"]
    for name, value in options.items():
        listed = value if isinstance(value, str | int) else ",".join(value)
        words += [f"--{name}", str(listed)]
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        code = main(words)
    facts = json.loads(printed.getvalue() or "{}")
    if code:
        refused = RefusedError(errors.getvalue())
        refused.why = {column["name"]: column["why"] for column in facts.get("columns", ())}
        raise refused
    features: list[str] = []
    for column in facts["columns"]:
        if column["role"] == "feature":
            names = [f"{column['name']}={name}" for name in column["categories"]]
            features += names or [column["name"]]
    return Inspected(
        tuple(features),
        {column["name"]: column["role"] for column in facts["columns"]},
        tuple(facts["classes"]),
        facts["classes"],
        tuple(facts["notes"]),
        facts["samples"],
        tuple(facts["sample_shape"]),
    )


def planned(
    models: Any,
    schedulers: Any = "constant",
    opt_fn: Any = lambda model: optim.SGD(model.parameters(), 0.1),
    params: Any = None,
    n_iter: Any = None,
    **settings: Any,
) -> Plan:
    """Return the jobs of a sweep over 12 samples of two classes; starts and writes nothing."""
    data = np.zeros((12, 3), np.float32), np.arange(12) % 2
    options = {"parallelize": False, "verbose": 0, "baseline": None, **settings}
    kfold = AsyncKFold(2, data, "unused", nn.CrossEntropyLoss(), 4, **options)
    return kfold.plan(models, schedulers, opt_fn, {"epochs": 1}, params=params, n_iter=n_iter)[0]
