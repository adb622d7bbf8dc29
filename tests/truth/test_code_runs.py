"""Whole runs: a call on a folder never answers for other code; `resume="never"`."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from sklearn.preprocessing import MinMaxScaler
from torch import nn

from asynckfold import (
    AsyncKFold,
    CVResults,
    InputError,
    PlanMismatchError,
    RunStore,
    export,
    fit,
)
from asynckfold.api.arguments import Settings
from asynckfold.cli import main
from asynckfold.cli.predict import code_problems
from asynckfold.engines.warm_pool import close_warm
from asynckfold.errors import UnpackError
from asynckfold.jobs.recipe import InitialState, Recipe
from tests.toy import Tiny, adam, samples

X, Y = samples()


def run(root: Path, **changed: Any) -> CVResults:
    models = changed.pop("models", {"net": Tiny})
    opt_fn = changed.pop("opt_fn", adam)
    criterion = changed.pop("criterion", nn.CrossEntropyLoss())
    kfold = AsyncKFold(
        3, changed.pop("dataset", (X, Y)), root, criterion, 10, parallelize=False, verbose=0,
        baseline=None, **changed,
    )  # fmt: skip
    return kfold(models, ["step"], opt_fn, {"epochs": 1})


def _edited(text: str = "", **values: Any) -> Any:
    """A function as a notebook cell defines it."""
    scope = {"__name__": "__main__", "torch": torch, "nn": nn, "np": np, **values}
    exec(textwrap.dedent(text), scope)
    return scope["it"]


OPT = """
def it(model):
    return torch.optim.SGD(model.parameters(), lr=RATE)
"""
MODEL = """
class it(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)
    def forward(self, x):
        return self.linear(x) * 1.0
"""
STEP = """
def it(x):
    return x * 1.0
"""
ROWS: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    "forward": (lambda one: {"models": {"net": _edited(MODEL.replace("1.0", one))}}, "forward()"),
    "weights": (
        lambda one: {"models": {"net": _filled(nn.Linear(8, 3), float(one))}},
        "the initial weights changed",
    ),
    "preprocess": (
        lambda one: {"preprocess": MinMaxScaler((0, float(one)))},
        "preprocess: feature_range was (0, 1.0), is (0, 2.0)",
    ),
}


def _filled(module: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.fill_(value)
    return module


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("row", ROWS)
def test_a_finished_run_never_answers_for_other_code(root: Path, row: str) -> None:
    make, text = ROWS[row]
    first = run(root, **make("1.0"))
    with pytest.raises(PlanMismatchError, match=r"resume='never'") as caught:
        run(root, **make("2.0"))
    assert text in str(caught.value)
    # The same again, as new objects, and with other settings of the machine.
    again = run(root, **make("1.0"), n_jobs=1, nice=0, max_wait=5.0)
    assert again.fingerprint == first.fingerprint


@pytest.mark.usefixtures("one_thread")
def test_fit_refuses_a_module_with_other_weights_and_keeps_the_first(root: Path) -> None:
    """A script that seeds nothing has other weights when it is started again."""

    def call(model: nn.Module) -> Any:
        criterion = nn.CrossEntropyLoss()
        return fit(model, (X, Y), adam, criterion, root, epochs=1, verbose=0, parallelize=False)

    first = call(nn.Linear(8, 3))
    with pytest.raises(PlanMismatchError, match=r"initial weights.*torch.manual_seed") as caught:
        call(nn.Linear(8, 3))
    (kept,) = (root / "initial").glob("*.safetensors")
    assert f"load_file({str(kept)!r})" in str(caught.value)
    model = nn.Linear(8, 3)
    model.load_state_dict(safetensors.torch.load_file(kept))
    assert call(model).results.fingerprint == first.results.fingerprint


# resume="never"


@pytest.mark.usefixtures("one_thread")
def test_never_trains_anew_and_keeps_the_earlier_run(root: Path) -> None:
    first = run(root, opt_fn=_edited(OPT, RATE=0.1))
    second = run(root, opt_fn=_edited(OPT, RATE=0.2), resume="never")
    assert second.fingerprint != first.fingerprint
    aside = root.with_name("run.earlier-1")
    with RunStore.read(aside) as store:
        assert store.fingerprint() == first.fingerprint
        assert len(store.results()) == 3
    with RunStore.read(root) as store:
        assert any(str(aside) in event.text for event in store.events())
    # Both are runs like any other.
    assert run(aside, opt_fn=_edited(OPT, RATE=0.1)).fingerprint == first.fingerprint
    assert run(root, opt_fn=_edited(OPT, RATE=0.2)).fingerprint == second.fingerprint
    run(root, opt_fn=_edited(OPT, RATE=0.2), resume="never")
    assert root.with_name("run.earlier-2").is_dir()


@pytest.mark.usefixtures("one_thread")
def test_never_renames_no_folder_with_files_of_others(root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "train.py").write_text("mine")
    (root / ".git").mkdir()
    # Nothing is renamed where there is no run yet.
    first = run(root, resume="never")
    for number in range(5):
        (root / f"{number}.csv").touch()
    with pytest.raises(
        InputError,
        match=r"must hold nothing else: received .*/run with .git, 0.csv, 1.csv, 2.csv, 3.csv and "
        r"2 more\. Use another folder",
    ):
        run(root, resume="never", opt_fn=_edited(OPT, RATE=0.2))
    assert [path.name for path in root.parent.iterdir()] == ["run"]
    assert (root / "train.py").read_text() == "mine"
    assert run(root, resume="must").fingerprint == first.fingerprint


@pytest.mark.usefixtures("one_thread")
def test_never_in_a_new_folder_or_with_something_refused_renames_nothing(root: Path) -> None:
    root.mkdir(mode=0o700)
    first = run(root, resume="never")
    assert first.counts["done"] == 3
    with pytest.raises(InputError):
        run(root, resume="never", models={"net": lambda: nn.Linear(8, 2)})
    assert [path.name for path in root.parent.iterdir()] == ["run"]
    assert run(root).fingerprint == first.fingerprint


@pytest.mark.usefixtures("one_thread")
def test_all_that_a_run_writes_goes_with_it(root: Path) -> None:
    first = run(root, models={"net": Tiny, "of its own": nn.Linear(8, 3)}, refit=True)
    first.report()
    export(root)
    (root / "splits.npz.17.tmp").touch()
    second = run(root, opt_fn=_edited(OPT, RATE=0.2), resume="never", refit=True)
    aside = root.with_name("run.earlier-1")
    assert {path.name for path in aside.iterdir()} >= {"refit", "initial", "oof", "report"}
    (aside / "splits.npz.17.tmp").unlink()
    assert second.refitted is not None
    with RunStore.read(second.refitted.root_dir) as store:
        assert "the global RATE" in store.plan.recipe["code"]["opt_fn"]


@pytest.mark.nightly(but=["before-connect", "after-set_aside"])
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("where", ["set_aside", "take_lock", "connect"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_leaves_the_earlier_run_whole(root: Path, where: str, when: str) -> None:
    first = run(root)
    child = os.fork()
    if child == 0:
        from asynckfold.store import run_file as module

        real = getattr(module, where)
        with RunStore.hold(root) as store:

            def killed(*given: Any) -> Any:
                if when == "after":
                    real(*given)
                os._exit(9)

            setattr(module, where, killed)
            store.file.start_over()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    places = [
        place
        for place in (root, root.with_name("run.earlier-1"))
        if (place / "splits.npz").exists()
    ]
    assert len(places) == 1
    assert run(places[0]).fingerprint == first.fingerprint
    # The other one is free for the same command, which trains anew.
    assert run(root, resume="never").fingerprint == first.fingerprint


# What workers import by themselves


MODULE = """
from torch import nn

FACTOR = 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x):
        return self.linear(x) * 1.0 * FACTOR
"""


@pytest.mark.usefixtures("one_thread")
def test_workers_train_the_code_that_the_caller_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm workers have imported a module that was edited and reloaded here since."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_here.py"
    file.write_text(MODULE)
    module = importlib.import_module("edited_here")

    def call(name: str, *, alone: bool = False) -> str:
        kfold = AsyncKFold(
            2, (X, Y), tmp_path / name, nn.CrossEntropyLoss(), 10, n_jobs=1, threads_per_job=1,
            verbose=0, baseline=None, parallelize=not alone,
        )  # fmt: skip
        return kfold([module.Net], ["step"], adam, {"epochs": 1}).fingerprint

    try:
        first = call("first")
        file.write_text(MODULE.replace("* 1.0", "* 10.0"))
        with pytest.raises(UnpackError, match=r"model 'Net': forward\(\) changed.*reload"):
            call("edited, and not reloaded")
        importlib.reload(module)
        second = call("reloaded")
        assert second == call("in this process", alone=True)
        assert second != first
        module.FACTOR = 3.0
        with pytest.raises(UnpackError, match=r"the global FACTOR was 3\.0, is 1\.0"):
            call("set from outside")
    finally:
        close_warm()
        sys.modules.pop("edited_here", None)


# From the shell


@pytest.mark.usefixtures("one_thread")
def test_predictions_are_not_made_by_edited_code(root: Path) -> None:
    net, other = (_edited(MODEL), _edited(MODEL.replace("1.0", "2.0")))
    step = _edited(STEP)
    run(root, models={"net": net, "given": nn.Linear(8, 3)}, eval_transform=step)
    with RunStore.read(root) as store:
        plan = store.plan

    def told(model: str, factory: Any, transform: Any) -> str:
        recipe = Recipe({model: factory}, {}, adam, nn.CrossEntropyLoss())
        settings = Settings(
            None, (X, Y), root, nn.CrossEntropyLoss(), 1, eval_transform=transform
        )  # fmt: skip
        return "; ".join(map(str, code_problems(plan, model, recipe, settings)))

    assert told("net", _edited(MODEL), _edited(STEP)) == ""
    assert "model 'net': forward() changed" in told("net", other, step)
    assert "eval_transform: it() changed" in told("net", net, _edited(STEP.replace("1.0", "2.0")))
    # The trained weights take the place of these.
    assert told("given", InitialState(nn.Linear(8, 3)), step) == ""


def test_never_from_the_shell(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--data", "digits", "--limit", "60", "--models", "mlp", "--epochs", "1"]
    words += ["--folds", "2", "--baseline", "none", "--no-report", "--engine", "serial", "-q"]
    words += ["--root", str(root)]
    assert main(words) == 0
    assert main([*words, "--lr", "0.1"]) == 2
    told = capsys.readouterr().err
    assert "opt_fn: lr was 0.001, is 0.1" in told
    assert "--resume never" in told
    assert main([*words, "--lr", "0.1", "--resume", "never"]) == 0
    assert root.with_name("run.earlier-1").is_dir()
    # By its folder a run is continued, whatever the command said that began it.
    assert main(["resume", str(root)]) == 0
    assert not root.with_name("run.earlier-2").exists()
