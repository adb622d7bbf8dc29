"""A sweep file that holds flags: it makes the plan that these flags make."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from asynckfold.cli import main
from asynckfold.cli.flags import flags, text_of
from asynckfold.cli.parser import parse
from asynckfold.cli.sweep_file import make_kfold, sweep_parts

SMALL = {"data": "digits", "limit": 60, "folds": 2, "epochs": 1, "baseline": "none"}

OBJECTS = """
from torch import nn, optim, zeros

dataset = zeros(20, 3), (zeros(20) > 0).long()
criterion = nn.CrossEntropyLoss()
models = {"a": lambda: nn.Linear(3, 2)}
schedulers = ["constant"]
opt_fn = lambda model: optim.SGD(model.parameters())
trainer_params = {"epochs": 7}
"""


def words_of(values: dict[str, Any]) -> list[str]:
    """The words of a command line that say the same."""
    words = []
    for name, value in values.items():
        item = flags()[name]
        words.append(f"--{item.flag}")
        words += [] if item.is_switch else [str(text_of(item, value))]
    return words


def fingerprint(words: list[str], root: Path) -> str:
    parsed = parse([*words, "--root", str(root)])
    sweep = sweep_parts(parsed)
    return make_kfold(parsed, sweep).forecast(*sweep, **sweep.grid).plan.fingerprint


@pytest.mark.parametrize(
    "values",
    [
        {"models": ["lenet5", "mlp"], "schedulers": "step", "optimizer": "sgd", "lr": 0.05},
        {"trainer": "averaging", "processes": 2, "batch-size": 8, "refit": True, "seed": 7},
        {"param": {"lr": [0.1, 0.2]}, "inner_val": 0.2, "fuse": False, "max_wait": None},
    ],
)
def test_the_plan_is_that_of_the_flags(values: dict[str, Any], tmp_path: Path) -> None:
    path, root = tmp_path / "sweep.py", tmp_path / "run"
    path.write_text(f"flags = {SMALL | values}\n")
    named = {name.replace("-", "_"): value for name, value in (SMALL | values).items()}
    assert fingerprint(["run", str(path)], root) == fingerprint(["run", *words_of(named)], root)


def parts(path: Path, *words: str) -> tuple[Namespace, Any]:
    parsed = parse(["run", str(path), "--root", str(path.parent / "run"), *words])
    return parsed, sweep_parts(parsed)


def test_flags_of_the_command_line_override_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.py"
    path.write_text(f"flags = {SMALL}\ntrainer_params = {{'patience': 3}}\n")
    parsed, sweep = parts(path, "--epochs", "5", "--limit", "90")
    assert (parsed.epochs, parsed.folds, len(sweep.dataset)) == (5, 2, 90)
    assert (sweep.trainer_params["epochs"], sweep.trainer_params["patience"]) == (5, 3)


def test_a_file_may_hold_objects_and_flags(tmp_path: Path) -> None:
    path = tmp_path / "sweep.py"
    path.write_text(f"{OBJECTS}flags = {{'epochs': 3, 'folds': 4}}\n")
    parsed, sweep = parts(path)
    assert (parsed.folds, sweep.trainer_params["epochs"], len(sweep.models)) == (4, 3, 1)
    _, sweep = parts(path, "--epochs", "2")
    assert sweep.trainer_params["epochs"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flags = {'data': 'digits', 'epoch': 3}", "received 'epoch'. Did you mean 'epochs'?"),
        ("flags = {'root': 'runs/a'}", "must be those of `asynckfold run`, but root: received"),
        ("flags = {'epochs': 'many'}", "--epochs must be a whole number of at least 1: received"),
        ("flags = {'epochs': 3}", "sweep.py must define dataset, criterion, models"),
        (f"{OBJECTS}flags = {{'limit': 3}}", "--limit applies to --data only"),
    ],
)
def test_wrong_flags_are_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.py"
    path.write_text(text)
    assert main(["run", str(path), "--root", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
