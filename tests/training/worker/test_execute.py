"""Executing placements: what goes wrong in the user's code becomes the result of its job."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold.jobs.messages import Task
from asynckfold.jobs.placement import Placement
from asynckfold.jobs.result import DONE
from asynckfold.training.worker import main
from tests.training.sweeps import ONE_FOLD, log_of, results_of, train
from tests.training.tiny import Plain, Tiny, never

pytestmark = pytest.mark.filterwarnings("ignore:.*jobs failed")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raising(error: Callable[[], BaseException]) -> Callable[[], nn.Module]:
    class Failing(Plain):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise error()

    return Failing


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError: bad value": lambda: ValueError("bad value"),
    "ValueError: first second third": lambda: ValueError("first\n  second\nthird"),
    "ValueError:": lambda: ValueError(),
    "SystemExit: 3": lambda: sys.exit(3),
    "SystemExit: 0": lambda: SystemExit(0),
    "KeyError: 'missing'": lambda: KeyError("missing"),
    "OSError: [Errno 28] No space left on device": lambda: OSError(28, "No space left on device"),
    "ValueError: \\ud800 \\x00 é": lambda: ValueError("\ud800 \0 é"),
    "Unspeakable: <exception str() failed>": Unspeakable,
}


def test_an_exception_of_user_code_is_the_result_of_its_job(tmp_path: Path) -> None:
    models = {f"m{number}": raising(error) for number, error in enumerate(ERRORS.values())}
    results = results_of(tmp_path, {**models, "good": Plain}, cv=ONE_FOLD)
    for number, line in enumerate(ERRORS):
        bad = results[name := f"m{number}/constant/fold-0"]
        assert (bad.status, bad.error) == ("failed", f"{line} (epoch 1, batch 1 of 4)")
        assert "in forward" in bad.traceback
        assert bad.traceback.startswith("Traceback (most recent call last):")
        assert bad.traceback in log_of(tmp_path, name)
        bad.traceback.encode()
    assert results["good/constant/fold-0"].status == "done"


def test_exceptions_are_results_wherever_they_are_raised(tmp_path: Path) -> None:
    def fail(*arguments: Any) -> Any:
        raise LookupError("mine")

    class Graph(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.clone()

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> Any:
            raise LookupError("mine")

    class Backward(Plain):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return Graph.apply(super().forward(inputs))  # type: ignore[no-any-return]

    trained = " (epoch 1, batch 1 of 4)"
    parts: dict[str, tuple[dict[str, Any], str]] = {
        "constructor": ({"models": {"m": fail}}, ""),
        "optimizer": ({"opt_fn": fail}, ""),
        "schedule": ({"schedules": {"s": fail}}, ""),
        "criterion": ({"criterion": fail}, trained),
        "backward": ({"models": {"m": Backward}}, trained),
    }
    for place, (words, where) in parts.items():
        result = train(tmp_path / place, **words)
        assert (result.status, result.error) == ("failed", f"LookupError: mine{where}")


class Later(Plain):
    """Raises in a batch of the second epoch of its training, or in the evaluation after it."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.trained = batch, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.trained += self.training
        late = self.trained == self.batch if self.training else self.trained == 8 < self.batch
        if late:
            raise ValueError("later")
        return super().forward(inputs)


def test_an_error_names_epoch_and_batch(tmp_path: Path) -> None:
    models = {"batch": lambda: Later(6), "end": lambda: Later(9)}
    results = results_of(tmp_path, models, cv=ONE_FOLD)
    places = {name: item.error for name, item in results.items()}
    assert places["batch/constant/fold-0"] == "ValueError: later (epoch 2, batch 2 of 4)"
    assert places["end/constant/fold-0"] == "ValueError: later (epoch 2, end of the epoch)"


# The worker's side of the pipe


class Pipe:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, item: Any) -> None:
        self.sent.append(item)


@pytest.fixture
def served(tiny: Tiny) -> main.WorkerState:
    found = main.WorkerState(Pipe(), never)  # type: ignore[arg-type]
    found.bundle, found.data = tiny.bundle, tiny.batches
    return found


def write_to_descriptors(patch: pytest.MonkeyPatch) -> None:
    """Print as a worker process does; the test runner prints elsewhere."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        patch.setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


class Printing(Plain):
    def __init__(self) -> None:
        super().__init__()
        print("printed by the model")
        print("complained by the model", file=sys.stderr)
        os.write(1, b"written by native code\n")


def placed(tiny: Tiny) -> tuple[Placement, list[Task]]:
    job = tiny.jobs[0]
    return Placement((job.id,), ()), [Task(job)]


def test_prints_go_to_the_log_of_the_job(
    tiny: Tiny,
    served: main.WorkerState,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_to_descriptors(monkeypatch)
    tiny.models["plain"] = Printing  # type: ignore[index]
    kind, results, peak, ends = served.run(*placed(tiny))
    assert (kind, results[0].status, ends) == ("answer", DONE, False)
    assert peak > 0
    for text in ("printed by the model", "complained by the model", "written by native code"):
        assert tiny.log().count(text) == 1
    print("after the job", flush=True)
    assert capfd.readouterr() == ("after the job\n", "")
