"""A file of flags: what ``--print-config`` writes, ``--config`` reads back."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asynckfold.cli import main
from asynckfold.cli.config_file import config_of, to_yaml
from asynckfold.cli.flags import flags
from asynckfold.cli.parser import make_parser, parse, verbs_of
from asynckfold.cli.sweep_file import make_kfold, sweep_parts
from asynckfold.jobs.argument import Argument

SMALL = ["--data", "digits", "--limit", "60", "--folds", "2", "--epochs", "1", "--baseline", "none"]


def printed(parsed: Namespace) -> str:
    verb = verbs_of(make_parser())[parsed.verb]
    verb.add_own_flags()
    return to_yaml(config_of(parsed, verb), verb)


def of_plan(words: Sequence[str], root: Path) -> str:
    parsed = parse([*words, "--root", str(root)])
    sweep = sweep_parts(parsed)
    kfold = make_kfold(parsed, sweep)
    return kfold.forecast(*sweep, **sweep.grid).plan.fingerprint


def words_for(item: Argument) -> st.SearchStrategy[list[str]]:
    """Words that give a flag some value that it can read."""
    flag = f"--{item.flag}"
    if item.is_switch:
        return st.just([flag])
    offered: list[st.SearchStrategy[str]] = [st.sampled_from([*item.words] or ["A b-c,Ü: #1"])]
    if item.takes_lists:
        offered.append(st.sampled_from(["0,1", "2"]))
    least = int(item.least or 2)
    if int in item.types or float in item.types:
        offered = [st.integers(least, least + 3).map(str)]
    if item.none and type(None) in item.types and str not in item.types and not item.reads:
        offered.append(st.just(item.none))
    if bool in item.types:
        offered.append(st.sampled_from(["yes", "no"]))
    if float in item.types and item.least is None:
        offered.append(st.sampled_from(["0.25", "1e-05"]))
    if "cpu=N" in item.metavar:
        offered = [st.sampled_from(["7", "cpu=3,gpu=5"])]
    elif "NAME=" in item.metavar:
        offered = [st.sampled_from(["lr=0.1,x,None,True", "width=16"])]
    elif item.reads and not item.metavar:
        offered = [st.just("3")]
    return st.one_of(offered).map(lambda word: [flag, word])


LINES = st.lists(st.one_of([words_for(item) for item in flags().values()]), max_size=12).map(
    lambda parts: [word for part in parts for word in part]
)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(words=LINES)
def test_what_is_written_is_read_back(words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    parsed = parse(["run", *words])
    text = printed(parsed)
    path.write_text(text)
    again = parse(["run", "--config", str(path)])
    assert again.problems == [] == parsed.problems
    assert printed(again) == text
    # The stored line continues the run without the file.
    assert printed(parse(again.line)) == text
    assert "--config" not in again.line


@pytest.mark.parametrize(
    "words",
    [
        ["--models", "lenet5,mlp", "--schedulers", "step", "--optimizer", "sgd", "--lr", "0.05"],
        ["--trainer", "averaging", "--processes", "2", "--batch-size", "8", "--refit"],
        ["--seed", "7", "--scoring", "f1_macro", "--inner-val", "0.2", "--fuse", "no"],
    ],
)
def test_the_plan_is_the_same(words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(printed(parse(["run", *SMALL, *words])))
    assert of_plan(["run", "--config", str(path)], tmp_path / "r") == of_plan(
        ["run", *SMALL, *words], tmp_path / "r"
    )


def test_flags_override_it(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "epochs: 3\nmax-wait: off\nheader: no\nmodels: [mlp, lenet5]\ndevices: [0, 1]\n"
    )
    parsed = parse(["run", "--epochs", "5", f"--config={path}"])
    assert (parsed.epochs, parsed.max_wait, parsed.header) == (5, "off", "no")
    assert (parsed.models, parsed.devices) == ("mlp,lenet5", [0, 1])
    assert parse(["plan", "--config", str(path)]).epochs == 3
    assert parse(["run", "--", "--config"]).config is None


SWEEP = """
from torch import nn, optim, zeros

dataset = zeros(20, 3), (zeros(20) > 0).long()
criterion = nn.CrossEntropyLoss()
models = {"a": lambda: nn.Linear(3, 2)}
schedulers = ["constant"]
opt_fn = lambda model: optim.SGD(model.parameters())
trainer_params = {"epochs": 7}
"""


def test_what_a_sweep_file_sets_stays_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, path = tmp_path / "sweep.py", tmp_path / "sweep.yaml"
    sweep.write_text(SWEEP)
    default = str(flags()["epochs"].default)
    for words in ([], ["--epochs", default, "--folds", "4"]):
        assert main(["run", str(sweep), *words, "--print-config"]) == 0
        path.write_text(capsys.readouterr().out)
        given = {"epochs": int(default), "folds": 4} if words else {}
        assert yaml.safe_load(path.read_text()) == {"file": str(sweep), **given}
        parts = sweep_parts(parse(["run", "--config", str(path)]))
        assert parts.trainer_params == {"epochs": int(default) if words else 7}


def test_a_run_that_would_be_refused_prints_no_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--data", "digits", "--models", "mpl", "--print-config"]) == 2
    assert main(["train", "--data", "digits", "--models", "mlp", "--print-config", "--json"]) == 0
    out = capsys.readouterr().out
    found: dict[str, Any] = json.loads(out)
    assert (found["models"], found["held_out"], found["root"]) == ("mlp", 0.2, None)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("epoch: 3", "must be flags of `asynckfold run`: received 'epoch'. Did you mean 'epochs'?"),
        ("json: true", "received 'json'"),
        ("refit: 4", "must be true or false: received 4"),
        ("epochs: many", "--epochs must be a whole number of at least 1: received 'many'"),
        ("n_jobs: 3\nlr: 1\nn-jobs: 4", "twice. Drop one of the two."),
        ("- 3", "must name a YAML file of keys and values"),
        ("a: [", "must name a YAML file of keys and values"),
        ("!!python/object/apply:os.getcwd []", "must name a YAML file of keys and values"),
        (None, "the config must exist"),
    ],
)
def test_a_wrong_config_is_refused(
    text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["run", "--data", "digits", "--config", str(path)]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_config_in_the_place_of_a_sweep_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.yaml"
    path.touch()
    assert main(["run", str(path), "--root", str(tmp_path / "r")]) == 2
    assert f"Pass a file of flags by --config {path}." in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
