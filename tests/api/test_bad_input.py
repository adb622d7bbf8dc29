"""Bad input, one table: what is passed, what the message says, and that nothing was started.

Each message names the rule, the value that was received, and the remedy. What the shell can say
stands in a second table, with the same rules in the words of its flags.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, InputError, RunHeldError, RunStore, StorageError
from asynckfold.cli import main
from asynckfold.cli.parser import make_parser, verbs_of
from asynckfold.engines import warm_pool
from asynckfold.engines.pool import WorkerPool
from tests.leftovers import descendants
from tests.toy import Tiny, adam, samples

X, Y = samples()
IGNORED = np.where(Y == 0, -100, Y)
CE = nn.CrossEntropyLoss()


class Guarded(nn.Module):
    """A loss that holds what no pickle can carry."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.guard = threading.Lock()  # type: ignore[assignment]

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)


def call(root: Path, **given: Any) -> None:
    """Call with the toy's arguments and what a row changes."""
    names = ("models", "schedulers", "opt_fn", "trainer_params")
    sweep = {
        "models": {"Tiny": Tiny},
        "schedulers": ["cosine"],
        "opt_fn": adam,
        "trainer_params": {"epochs": 1},
    }
    sweep.update({name: given.pop(name) for name in names if name in given})
    values = {"kfolds": 3, "dataset": (X, Y), "criterion": CE, "batch_size": 10, **given}
    first = [values.pop(name) for name in ("kfolds", "dataset")]
    rest = [values.pop(name) for name in ("criterion", "batch_size")]
    root = values.pop("root_dir", root)
    values = {"verbose": 0, "baseline": None, **values}
    AsyncKFold(*first, root, *rest, **values)(**sweep)


SCHEDULES = "constant, cosine, exponential, multistep, onecycle, reduce, step, warm"

# What is passed; the rule, the value received and the remedy, as fragments of the message.
CODE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no sample": (
        {"dataset": (X[:0], Y[:0])},
        ["dataset must have at least 2 samples", "0 samples", "Check the path"],
    ),
    "no dataset": ({"dataset": None}, ["dataset must be map-style", "NoneType", "(X, y)"]),
    "class smaller than folds": (
        {"kfolds": 5, "dataset": (X[:12], np.array([0] * 9 + [1] * 3))},
        ["at least 5 members", "class 1 has 3", "at most 3 folds", "stratify=False"],
    ),
    "class of one": (
        {"dataset": (X[:10], np.array(["cat"] * 9 + ["dog"]))},
        ["at least 3 members", "class dog has 1", "drop rare classes"],
    ),
    "float labels": (
        {"dataset": (X, Y.astype("float32"))},
        ["must be integers", "float32, such as 0.0 at index 0", "astype('int64')"],
    ),
    "ignored labels": (
        {"dataset": (X, IGNORED)},
        ["must not be those that the criterion ignores", "-100 at index 0, 20 in all", "Subset"],
    ),
    "NaN labels": (
        {"dataset": (X, np.where(Y == 1, np.nan, Y))},
        ["must not be NaN", "nan at index 1, 20 in all", "Remove these samples"],
    ),
    "1 fold": ({"kfolds": 1}, ["kfolds", "at least 2", "received 1", "Pass kfolds=5"]),
    "folds in words": ({"kfolds": "five"}, ["kfolds", "'five'", "Pass kfolds=5"]),
    "two names of the folds": (
        {"cv": 3},
        ["are names of one setting", "kfolds and cv", "None for kfolds"],
    ),
    "fold overlaps": (
        {"kfolds": [(np.arange(40), np.arange(30, 60))]},
        ["train and valid must not share", "10 in both", "Hold each sample out"],
    ),
    "group on both sides": (
        {"kfolds": [(np.arange(40), np.arange(40, 60))], "groups": [0] * 60},
        ["a group must not be on both sides", "1 groups in both", "GroupKFold"],
    ),
    "0 epochs": (
        {"trainer_params": {"epochs": 0}},
        ["epochs must be a whole number of at least 1", "received 0", "Pass epochs=1"],
    ),
    "model twice": (
        {"models": [Tiny, Tiny]},
        ["model names must differ", "'Tiny' twice", "dict of name → callable"],
    ),
    "name that escapes": (
        {"models": {"../x": Tiny}},
        ["stay in the run's folder", "'../x'", "plain name"],
    ),
    "unknown LR schedule": (
        {"schedulers": ["cosin"]},
        ["known name", "'cosin'", "Did you mean 'cosine'?", SCHEDULES],
    ),
    "an optimizer's class": (
        {"opt_fn": torch.optim.SGD},
        ["function model → optimizer", "the class SGD", "lambda model: SGD(model.parameters()"],
    ),
    "an optimizer": (
        {"opt_fn": adam(Tiny())},
        ["function model → optimizer", "received Adam ( Parameter Group 0", "lambda model"],
    ),
    "lock in the criterion": (
        {"criterion": Guarded()},
        ["criterion must be sendable", "criterion._modules['inner'].guard", "__getstate__"],
    ),
    "unknown trainer parameter": (
        {"trainer_params": {"epoch": 2}},
        ["known keys", "'epoch'", "Did you mean 'epochs'?", "Valid: accumulate, clip_grad_norm"],
    ),
    "trainer parameters in a list": (
        {"trainer_params": ["epochs"]},
        ["must be a dict", "['epochs']", "Pass for instance {'epochs': 2}"],
    ),
    "criterion's class": (
        {"criterion": nn.CrossEntropyLoss},
        ["an object, not a class", "CrossEntropyLoss", "Write CrossEntropyLoss()"],
    ),
    "no criterion": ({"criterion": None}, ["criterion must be callable", "None"]),
    "0 jobs": ({"n_jobs": 0}, ["n_jobs must be 'auto' or", "received 0", "n_jobs='auto'"]),
    "more threads than cores": (
        {"threads_per_job": 4096},
        ["must not exceed the cores", "4096 threads on", "or less"],
    ),
    "processes for the plain trainer": (
        {"processes": 2},
        ["the plain trainer has one process", "processes=2", "trainer='hogwild'"],
    ),
    "more processes than cores": (
        {"trainer": "hogwild", "processes": 4096},
        ["processes must not exceed the cores", "4096 processes on", "or less"],
    ),
    "threads for each process": (
        {"trainer": "hogwild", "processes": 2, "threads_per_job": 2},
        ["each of several processes of a job has one thread", "threads_per_job=2"],
    ),
    "several processes in this process": (
        {"trainer": "hogwild", "processes": 2, "parallelize": False},
        ["processes is for engine='process' or 'ray'", "processes=2 and parallelize=False"],
    ),
    "a partition smaller than a batch": (
        {"trainer": "averaging", "processes": 2, "batch_size": 30},
        ["samples of a process must make a batch", "40 samples for processes=2", "batch_size=20"],
    ),
    "no sample for a process": (
        {"trainer": "allreduce", "processes": 2, "batch_size": 1},
        ["each process must have a sample of each batch", "batch_size=1", "greater batch_size"],
    ),
    "a push without a server": (
        {"trainer": "hogwild", "processes": 2, "trainer_params": {"n_push": 2}},
        ["n_push applies to the trainer 'parameter_server' only", "it with 'hogwild'"],
    ),
    "a metric to refit by": (
        {"refit": "f1"},
        ["refit must be True, False, 'best', '1se',", "received 'f1'", "first in scoring"],
    ),
    "no time for a job": (
        {"job_timeout_s": 0},
        ["job_timeout_s must be a number of seconds above 0", "received 0", "job_timeout_s=3600"],
    ),
    "unknown device": (
        {"devices": "gpu"},
        ["devices must be one of 'auto', 'cpu', 'cuda'", "'gpu'", "Did you mean"],
    ),
    "no device": ({"devices": []}, ["devices must name GPUs that are there", "[]"]),
    "resume without a run": (
        {"resume": "must"},
        ["needs a folder that holds a run", "run", "resume='auto'"],
    ),
    "no folder": ({"root_dir": ""}, ["root_dir must be a folder of its own", "'.'"]),
}


@pytest.fixture
def _no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(WorkerPool, "idle_worker", refuse)


@pytest.mark.usefixtures("_no_worker")
@pytest.mark.parametrize("row", CODE)
def test_in_code_it_is_refused_and_nothing_is_started(row: str, root: Path) -> None:
    given, fragments = CODE[row]
    before = descendants()
    with pytest.raises(InputError) as caught:
        call(root, **given)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert all(item.rule and item.received and item.remedy for item in caught.value.problems)
    assert "\n" not in str(caught.value.problems[0])
    assert not root.exists()
    assert not descendants() - before


@pytest.mark.usefixtures("_no_worker")
def test_an_open_file_in_a_closure_is_named(root: Path, tmp_path: Path) -> None:
    with (tmp_path / "open.txt").open("w") as file:

        def opt_fn(model: nn.Module) -> Any:
            file.write("a model")
            return adam(model)

        with pytest.raises(InputError, match=r"opt_fn must be sendable.* opt_fn\.file: ") as caught:
            call(root, opt_fn=opt_fn)
    assert "Create it inside a function" in str(caught.value)
    assert not root.exists()


@pytest.mark.usefixtures("_no_worker")
def test_several_problems_are_told_at_once(root: Path) -> None:
    with pytest.raises(InputError) as caught:
        call(
            root,
            models=[Tiny, Tiny],
            schedulers=["cosin"],
            opt_fn=None,
            trainer_params={"epoch": 1},
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "4 problems, nothing was started:"
    starts = ["model names", "an LR schedule", "trainer_params", "opt_fn"]
    assert all(f"{n}. {text}" in lines[n] for n, text in enumerate(starts, 1))
    with pytest.raises(InputError, match="3 problems"):
        call(root, kfolds=1, batch_size=0, n_jobs=0)


@pytest.mark.usefixtures("_no_worker")
def test_a_run_that_is_there_stays_as_it_was(root: Path) -> None:
    root.mkdir()
    (root / "notes.txt").write_text("mine")
    for given in ({"dataset": (X, IGNORED)}, {"kfolds": 1}, {"resume": "must"}):
        with pytest.raises(InputError):
            call(root, **given)
        assert [item.name for item in root.iterdir()] == ["notes.txt"]


def test_what_only_a_dry_run_shows_is_told_at_once_and_leaves_no_process(root: Path) -> None:
    before = descendants()

    def opt_fn(model: nn.Module) -> Any:
        return None if isinstance(model, nn.Bilinear) else adam(model)

    with pytest.raises(InputError) as caught:
        call(
            root,
            models={
                "two": lambda: nn.Linear(8, 2),
                "flat": lambda: nn.Sequential(nn.Linear(8, 3), nn.Flatten(0)),
                "pair": lambda: nn.LSTM(8, 3),
                "text": lambda: "no module",
                "frozen": lambda: nn.Bilinear(8, 8, 3),
                "raises": lambda: nn.Linear(9, 3),
            },
            opt_fn=opt_fn,
        )
    text = str(caught.value)
    for part in (
        "6 problems, nothing was started",
        "model two must return (samples, classes) scores for the 3 classes: received shape (10, 2)."
        " Give its last layer 3 outputs.",
        "model flat must return one row for each sample: received shape (30,) for 10 samples.",
        "model pair must return a tensor, or a dict or tuple of them, a row for each sample: ",
        "model text must be a torch.nn.Module: received str.",
        "opt_fn must return a torch.optim.Optimizer: received None.",
        "model raises must take the samples, in batches of float32 (10, 8): received RuntimeError "
        "in its forward(), which gets float32 (10, 8): ",
    ):
        assert part in text
    with pytest.raises(InputError, match=r"must fit the labels: .*'f1', which says: Target is mul"):
        call(root, scoring=["accuracy", "f1"])
    assert not root.exists()
    assert not descendants() - before


# The folder


@pytest.mark.parametrize("below", ["", "/x"])
def test_a_file_is_no_folder(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"could not write .*Not a directory"):
        call(tmp_path / f"file{below}")


@pytest.mark.usefixtures("_no_worker", "_bad_files")
def test_a_held_folder_names_its_holder(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunStore.hold(root):
        with pytest.raises(RunHeldError, match=f"held by process {os.getpid()} on "):
            call(root)
        assert main(["run", "--data", "digits", "--limit", "100", "--root", str(root)]) == 3
        assert f"held by process {os.getpid()}" in capsys.readouterr().err


# From the shell

BAD_FILES = {
    "ok.csv": "a,b,label\n" + "".join(f"{n},{n % 7},{'xyz'[n % 3]}\n" for n in range(30)),
    "rare.csv": "a,b,label\n" + "".join(f"{n},{n % 7},{'xy'[n > 28]}\n" for n in range(30)),
    "one.csv": "a,b,label\n1,2,x\n",
    "boom.py": "x = 1\n1 / 0\n",
    "syntax.py": "def (\n",
    "leaves.py": "raise SystemExit('no')\n",
    "lacking.py": "models = []\n",
    "settings.py": """
dataset = criterion = models = schedulers = opt_fn = None
settings = {"kfold": 3}
""",
    "mymodels.py": "Name = 1\n",
}

# After `asynckfold run --root run`; fragments of the message.
SHELL: dict[str, tuple[str, list[str]]] = {
    "no data": ("", ["a run needs data", "--data digits"]),
    "unknown data": ("--data digts", ["known source", "'digts'", "Did you mean 'digits'?"]),
    "missing file": ("--data csv:okay.csv", ["okay.csv", "Did you mean 'ok.csv'?"]),
    "missing collection": (
        "--data mnist --data-root nowhere",
        ["files of mnist must be under nowhere", "--download"],
    ),
    "missing column": (
        "--data csv:ok.csv --target lable",
        ["--target must be a column", "'lable'", "Columns: a, b, label", "Did you mean 'label'?"],
    ),
    "rare class": ("--data csv:rare.csv", ["at least 5 members", "class y has 1", "--no-stratify"]),
    "0 jobs": ("--data digits --n-jobs 0", ["--n-jobs must be", "Pass --n-jobs auto for"]),
    "unknown model": (
        "--data digits --models mpl",
        ["--models must name models", "'mpl'", "Did you mean 'mlp'?", "Known: alexnet"],
    ),
    "model of torchvision": ("--data digits --models resnet18", ["torchvision.models:resnet18"]),
    "a model twice": ("--data digits --models mlp,lenet5,mlp", ["each model once", "'mlp' twice"]),
    "several rates": ("--data digits --lr 1e-3,1e-2", ["--lr must be a", "--param lr=1e-3,1e-2"]),
    "model not there": ("--data digits --models no.such:Name", ["importable", "no.such:Name"]),
    "model that is none": (
        "--data digits --models mymodels:Name",
        ["a model must be a class or a function", "received 1 of type int"],
    ),
    "option of another source": ("--data digits --target a", ["--target applies to csv: only"]),
    "file and data": ("settings.py --data digits", ["a sweep file or --data", "Drop one"]),
    "missing sweep file": ("bom.py", ["must exist", "bom.py", "Did you mean 'boom.py'?"]),
    "sweep file that is none": ("ok.csv", ["must be Python", "ok.csv", "--data"]),
    "sweep file that raises": (
        "boom.py",
        ["boom.py", "line 2", "ZeroDivisionError", "the sweep file must run", "Repair boom.py"],
    ),
    "sweep file that exits": ("leaves.py", ["the sweep file must run", "SystemExit: no"]),
    "sweep file that lacks names": (
        "lacking.py",
        ["4 problems", "lacking.py must define", "no dataset", "no opt_fn"],
    ),
    "unknown setting": (
        "settings.py",
        ["unexpected keyword argument 'kfold'", "Did you mean 'kfolds'?"],
    ),
    "flags of data beside a file": (
        "settings.py --models mlp --limit 3",
        ["2 problems", "--models applies to --data only", "--limit applies to --data only"],
    ),
    "all at once": (
        "--data digts --models mpl --schedulers cosin --folds 1 --epochs 0 --optimizer foo",
        ["6 problems, nothing was started", "digts", "mpl", "cosin", "--folds", "--epochs", "foo"],
    ),
}


@pytest.fixture
def _bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in BAD_FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    # It only imports torch in the background, and would do so once for every row.
    monkeypatch.setattr(warm_pool, "start_early", lambda preload, nice: None)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("_no_worker", "_bad_files")
@pytest.mark.parametrize("row", SHELL)
def test_from_the_shell_it_ends_with_2(
    row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, fragments = SHELL[row]
    before = descendants()
    code = main(["run", "--root", "run", *shlex.split(line)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    for fragment in fragments:
        assert fragment in err
    assert "asynckfold/cli" not in err  # the traceback of a sweep file is the user's own
    assert not (tmp_path / "run").exists()
    assert not descendants() - before


# A line that cannot be read; fragments of the message.
LINES: dict[str, list[str]] = {
    "run --data digits --root r --folds x": ["--folds must be a whole number, or a file"],
    "run --data digits --root r --folds no.json": ["or a file of them: received 'no.json'"],
    "run --data digits --root r --devices gpu": ["--devices must be", "auto", "cpu", "'gpu'"],
    "run --data digits --root r --stall-timeout 2m": ["a number of seconds", "'2m'"],
    "run --data digits --root r --lr": ["argument --lr: expected one argument"],
    "run --data digits --root r --refit=3": ["--refit: ignored explicit argument '3'"],
    "run --data digits --root r --epoch 3": ["Did you mean --epochs or --epochs-per-round?"],
    "run --data digits --root r a.py b.py": ["no further argument: received 'b.py'"],
    "run --lr x --epchs 3 --models mpl --epochs q --header maybe": [
        "4 problems, nothing was started",
        "--lr must be a number: received 'x'. Leave --lr out for its default, 0.001.",
        "received --epchs. Did you mean --epochs? `asynckfold run --help-all` shows all flags.",
        "--epochs must be a whole number of at least 1: received 'q'. Leave --epochs out for",
        "--header must be one of 'auto', 'yes', 'no': received 'maybe'",
    ],
    "status runs/mnits --jsno": ["2 problems", "Did you mean --json?", "which holds no run.db"],
    "status": ["DIR must be given", "See `asynckfold status --help`"],
    "export nowhere --to no/where --fold x": ["argument --fold: invalid fold_number value: 'x'"],
    "rum": ["must begin with a verb: run, train, plan", "received invalid choice: 'rum'"],
    "": ["must begin with a verb: run, train, plan", "arguments are required: VERB"],
}


@pytest.mark.usefixtures("_no_worker", "_bad_files")
@pytest.mark.parametrize("line", LINES)
def test_a_line_that_cannot_be_read_ends_with_2_and_all_problems(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(line)) == 2
    err = capsys.readouterr().err
    for fragment in LINES[line]:
        assert fragment in err
    assert len(err.splitlines()) <= 9
    assert "Traceback" not in err


@pytest.mark.parametrize("verb", verbs_of(make_parser()))
def test_no_verb_ignores_an_unknown_flag(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"compare": ["a", "b"], "data": ["digits"]}
    places["completion"] = ["bash"]
    places |= {name: ["a"] for name in ("status", "resume", "report")}
    places |= {name: ["a", "--to", "new.csv"] for name in ("export", "predict")}
    places["predict"] += ["--data", "digits"]
    places |= {name: ["--data", "digits", "--root", "r"] for name in ("run", "train", "plan")}
    words = [str(tmp_path / word) if word in "abr" else word for word in places.get(verb, [])]
    assert main([verb, *words, "--nonsense"]) == 2
    assert f"flags must be those of `asynckfold {verb}`, spelled out: received --nonsense" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("verb", ["status", "resume", "report"])
def test_a_folder_without_a_run_ends_with_2(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunStore.hold(tmp_path / "mnist"):
        assert main([verb, str(tmp_path / "mnits")]) == 2
    err = capsys.readouterr().err
    assert "DIR must be the folder of a run" in err
    assert "Did you mean 'mnist'?" in err
