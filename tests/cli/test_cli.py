"""The command: exit codes, what is printed where, and runs that are continued."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asynckfold import RunStore
from asynckfold.cli import completion, main, run_folder
from asynckfold.cli.parser import EXIT_CODES, make_parser, parse, verbs_of
from asynckfold.cli.run_folder import continue_with, own_folder
from tests.interrupted import interrupted
from tests.leftovers import descendants
from tests.started import Nursery, Started
from tests.synthetic import Synthetic, write_run

SMALL = "--data digits --limit 200 --folds 2 --epochs 2 --baseline none --no-report"

SWEEP = """
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent


@dataclass
class Size:
    hidden: int = 8


class Net(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, size.hidden), nn.ReLU(), nn.Linear(size.hidden, 2))

    def forward(self, inputs):
        if not self.training and (HERE / "FAIL").exists() and (inputs[:, 1] == 99).any():
            raise ValueError("99 is in the held-out fold")
        return self.layers(inputs)


X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
y = (X[:, 0] > 0).long()
X[0, 1] = 99
dataset = (X, y)
criterion = nn.CrossEntropyLoss()
models = {"net": lambda: Net(Size(16)), "linear": lambda: nn.Linear(4, 2)}
schedulers = ["cosine"]
opt_fn = lambda model: torch.optim.SGD(model.parameters(), 1e-2)
trainer_params = {"epochs": 5}
settings = {"n_splits": 3, "batch_size": 8, "baseline": None}
"""


pytestmark = pytest.mark.usefixtures("no_worker_stays")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.py"
    path.write_text(SWEEP)
    return path


def shell(*words: Any, **settings: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "asynckfold", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def warmly(warm: Nursery, root: Path, *words: Any) -> tuple[Started, Path, Path]:
    """Start the command where importing torch has ended; return where it prints, too."""
    out, err = root.with_name("printed"), root.with_name("errors")
    return warm.start(["-m", "asynckfold", *words], out, errors=err), out, err


def printed_json(capsys: pytest.CaptureFixture[str], *words: Any) -> Any:
    """Run a verb here with ``--json`` and return the one object that it prints."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def buffered(**more: str) -> dict[str, str]:
    """An environment in which what is printed waits in a buffer, as users have it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**kept, **more}


END = """
import atexit, os

class Left:
    def __del__(self, write=os.write):
        write(1, b"taken down\\n")

left = Left()
atexit.register(print, "goodbye")
"""


def asked_for_nothing(folder: Path) -> subprocess.Popen[str]:
    """Ask for a run that is not there, where something is to be said and done at the end."""
    (folder / "sitecustomize.py").write_text(END)
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    return shell("status", folder / "nowhere", env=buffered(PYTHONPATH=path))


def with_a_sweep_file(folder: Path) -> subprocess.Popen[str]:
    """Run a file that has nothing but something to be said and done at the end."""
    path = folder / "sweep.py"
    path.write_text(END)
    return shell("plan", path, "--root", folder / "run", env=buffered())


def test_without_code_of_the_users_it_ends_right_after_exit_handlers(tmp_path: Path) -> None:
    run = asked_for_nothing(tmp_path)
    out, err = run.communicate(timeout=100)
    assert (run.returncode, out) == (2, "goodbye\n"), err
    assert "which holds no run.db" in err


@pytest.mark.nightly(but=["asked_for_nothing"])
@pytest.mark.parametrize("start", [asked_for_nothing, with_a_sweep_file])
def test_what_exit_handlers_print_for_nobody_changes_no_exit_code(
    tmp_path: Path, start: Callable[[Path], subprocess.Popen[str]]
) -> None:
    with start(tmp_path) as run:
        assert run.stdout is not None
        run.stdout.close()
        assert run.wait(100) == 2


# A run from its start to its end


def test_a_run_and_every_verb_that_looks_at_it(
    root: Path, warm: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    before = descendants()
    words = ["run", *SMALL.split(), "--root", root, "--json", "--models", "mlp,lenet5"]
    started, printed, errors = warmly(warm, root, *words)
    code, err = started.wait(100), errors.read_text()
    assert code == 0, err
    result = json.loads(printed.read_text())
    assert (result["planned"], result["done"], result["failed"]) == (4, 4, 0)
    assert result["highest"]["model"] in ("mlp", "lenet5")
    assert result["report"] is None
    for word in ("Traceback", "leaked", "Warning"):
        assert word not in err
    assert not descendants() - before

    state = printed_json(capsys, "status", root)
    keys = {"planned", "done", "failed", "diverged", "cancelled", "pending", "running"}
    assert keys | {"fingerprint", "holder", "running_jobs"} <= set(state)
    assert state["bit_identity"] == result["bit_identity"] == {"claimed": True, "reasons": []}
    assert state["ended"] == "complete"
    assert state["continue_with"] is None
    assert state["fingerprint"] == result["fingerprint"]
    assert state["pending"] == state["running"] == 0
    page = Path(printed_json(capsys, "report", root)["report"])
    assert "lenet5" in page.read_text()
    assert main(["status", str(root)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 of 4 jobs finished\ncomplete\n")
    assert f"fingerprint {result['fingerprint']}, reproducible\n" in out


IMPORTED = """
import sys
from asynckfold.cli import main

try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "torchvision", "sklearn", "pandas", "matplotlib", "scipy"}
    heavy |= {"numpy", "psutil", "rich", "shtab"}
    rooms = {f"asynckfold.{name}" for name in ("api", "planning", "results", "scheduling", "sweep")}
    print(sorted((heavy | rooms) & set(sys.modules)))
"""


def test_status_version_and_help_import_no_heavy_module(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Synthetic(folds=2, samples=20, epochs=1))
    for words, said in (
        (["status", run], "jobs finished"),
        (["--version"], r"(?m)^\d+\.\d+\S*$"),
        (["help"], "print progress, scores so far"),
        (["help", "status"], "DIR"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", IMPORTED, *words], capture_output=True, text=True, timeout=30
        )
        assert re.search(said, done.stdout), done.stderr
        assert done.stdout.splitlines()[-1] == "[]", words


def test_plan_decides_as_run_does_and_writes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    close_workers: Callable[[], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = descendants()
    result = printed_json(capsys, "plan", *["--data", "digits", "--models", "mlp", "--folds", "4"])
    assert result["jobs"] == [f"mlp/constant/fold-{index}" for index in range(4)]
    assert sum(fold["valid"] for fold in result["folds"]) == 1797
    assert result["first"][0]["jobs"] == ["mlp/constant/fold-0"]
    assert set(result["first"][0]["cores"]) <= set(result["cores"])
    assert {span["job"] for span in result["spans"]} == set(result["jobs"])
    assert main(["plan", "--data", "digits"]) == 0
    out = capsys.readouterr().out
    assert "5 jobs on cpu" in out or "5 jobs on cuda" in out
    assert "jobs at a time now: " in out
    assert "predicted: " in out
    assert "[mlp/constant/fold-0=" in out
    assert out.endswith("nothing was trained or written\n")
    close_workers()
    assert not descendants() - before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fuse", ["no", "2"])
def test_plan_and_run_decide_the_same(
    fuse: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, in the folder that a run began, and out of that folder alone."""
    words = ["--data", "digits", "--models", "mlp", "--folds", "3", "--epochs", "1", "--root", root]
    words += ["--fuse", fuse]
    before = printed_json(capsys, "plan", *words)
    assert main(["run", "-q", "--baseline", "none", "--no-report", *map(str, words)]) == 0
    capsys.readouterr()
    with RunStore.read(root) as store:
        decided, attempts, groups = store.about["decision"], store.attempts(), store.plan.groups
    assert (before["threads"], before["why"]) == (decided["threads"], decided["why"])
    again, stored = printed_json(capsys, "plan", *words), printed_json(capsys, "plan", root)
    for result in (again, stored):
        assert result["prediction"] == decided["prediction"]
        assert max(span["end"] for span in result["spans"]) == decided["prediction"]["makespan"]
    for result in (before, again, stored):
        assert result["groups"] == [list(group) for group in groups]
    assert again["spans"] == stored["spans"]
    units = [[item.job_id] for item in attempts if not groups or item.job_id not in groups[0]]
    for unit in [*units, *groups]:
        expected = sum(stored["requests"][name]["seconds"] for name in unit)
        assert {item.expected for item in attempts if item.job_id in unit} == {expected}
    assert main(["plan", *map(str, words), "--batch-size", "8"]) == 2
    assert "a run with another plan" in capsys.readouterr().err
    assert main(["plan", str(root)]) == 0
    assert ("fusion:\n  mlp: fused: 2 of 3 jobs" in capsys.readouterr().out) == bool(groups)


# Sweep files


def test_flags_stand_above_the_file(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = printed_json(capsys, "plan", sweep)
    assert (len(result["jobs"]), result["epochs"], result["batch_size"]) == (6, 5, 8)
    flags = "--folds 2 --epochs 1 --batch-size 4 --schedulers step,warm --optimizer adam --lr 0.1"
    result = printed_json(capsys, "plan", sweep, *flags.split())
    assert result["candidates"] == ["net/step", "net/warm", "linear/step", "linear/warm"]
    assert (len(result["jobs"]), result["epochs"], result["batch_size"]) == (8, 1, 4)


def test_some_jobs_fail(sweep: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sweep.parent / "FAIL").touch()
    assert main(["run", str(sweep), "--root", str(root), "--no-report"]) == 1
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert [line[:3] for line in lines[1:3]] == [["1", "linear", "cosine"], ["-", "net", "cosine"]]
    assert "2/3" in out
    assert "\n5 of 6 jobs finished, 1 failed in " in out
    assert "1 × ValueError: 99 is in the held-out fold (net/cosine/fold-" in out
    assert "Incomplete, and not ranked: net/cosine (failed, 2 of 3 folds)." in out
    assert err.count("Traceback") == 1
    assert "in forward" in err
    # A run's folder never names code that is then run.
    assert main(["resume", str(root)]) == 2
    error = capsys.readouterr().err
    assert f"asynckfold run {sweep} --root {root} --no-report" in error
    assert "it continues the run" in error
    # Repaired, the same command runs the failed job only.
    (sweep.parent / "FAIL").unlink()
    assert main(["run", str(sweep), "--root", str(root), "--no-report"]) == 0
    with RunStore.read(root) as store:
        assert len(store.attempts()) == 7
    assert main(["run", str(sweep), "--root", str(root), "--batch-size", "4"]) == 2
    error = capsys.readouterr().err
    assert "holds a run with another plan" in error
    assert "batch_size: 8 there, 4 here" in error


def test_all_jobs_fail(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = (
        "class Broken(nn.Linear):\n    def forward(self, inputs): raise RuntimeError('broken')\n"
    )
    models = "models = {'broken': lambda: Broken(5, 2)}\n"
    (tmp_path / "bad.py").write_text(SWEEP + broken + models)
    assert main(["run", str(tmp_path / "bad.py"), "--root", str(root)]) == 1
    out, err = capsys.readouterr()
    assert "0 of 3 jobs finished, 3 failed" in out
    assert "3 × RuntimeError" in out
    assert "speedup" not in out
    assert "Traceback" in err
    assert (root / "report" / "index.html").is_file()


def test_a_model_that_cannot_take_the_samples(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "wide.py"
    sweep.write_text(SWEEP + "models['wide'] = lambda: nn.Linear(5, 2)\n")
    command = ["run", str(sweep), "--root", str(root), "--no-report"]
    assert main(command) == 2
    assert "model wide must take the samples" in capsys.readouterr().err
    assert main([*command, "--keep-going"]) == 1
    out, _ = capsys.readouterr()
    assert "3 × model wide must take the samples" in out


def test_a_model_of_a_module_in_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
"""
    (tmp_path / "own_models.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main([*f"run {SMALL} --root r --json --models".split(), "own_models:Net,mlp"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["done"] == 4
    # A module's name is code, which a run's folder may not name.
    assert main(["resume", "r"]) == 2
    assert "asynckfold run --data digits" in capsys.readouterr().err
    words = ["predict", "r", "mlp/constant", "--data", "digits", "--to", "predicted.csv"]
    assert main(words) == 2
    assert "Pass --models own_models:Net,mlp to predict, too." in capsys.readouterr().err
    assert main([*words, "--models", "own_models:Net,mlp"]) == 0
    assert len(Path("predicted.csv").read_text().splitlines()) == 1798


def test_status_shows_no_fingerprint_before_there_is_a_result(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(root, Synthetic(status=lambda job: "pending"))
    assert main(["status", str(root)]) == 0
    assert "fingerprint" not in capsys.readouterr().out


# Interrupted, continued, held


def test_resume_continues_a_built_in_run_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    line = "run --data digits --limit 60 --folds 2 --epochs 1 --no-report --engine serial"
    with interrupted(monkeypatch, "training.training_run.Training", "score", 2):
        assert main([*shlex.split(line), "--resume", "never"]) == 130
        raise KeyboardInterrupt
    folder = capsys.readouterr().err.splitlines()[0].removeprefix("run: ")
    assert re.fullmatch(r"runs/digits-\d{8}-\d{4}", folder)
    state = printed_json(capsys, "status", folder)
    assert state["continue_with"] == f"asynckfold {line} --root {folder}"
    monkeypatch.chdir(tmp_path)
    result = printed_json(capsys, "resume", f"there/{folder}")
    assert (result["done"], result["pending"]) == (2, 0)
    assert result["fingerprint"] != state["fingerprint"]
    with RunStore.read(tmp_path / "there" / folder) as store:
        tries = [attempt.job_id for attempt in store.attempts()]
    assert sorted(tries) == ["mlp/constant/fold-0", *["mlp/constant/fold-1"] * 2]


def test_runs_of_one_minute_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder, "time", SimpleNamespace(strftime=lambda _: "20261124-0046"))
    for words, folder in (
        ("--data digits", "runs/digits-20261124-0046"),
        ("--data digits -q -- ", "runs/digits-20261124-0046-2"),
        ("--data folder:photos/v1.2", "runs/v1.2-20261124-0046"),
        ("deep/sweep.py", "runs/sweep-20261124-0046"),
        ("", "runs/run-20261124-0046"),
    ):
        parsed = parse(["run", *words.split()])
        with own_folder(parsed) as said:
            assert parsed.root == said == folder
            continued = parse(shlex.split(continue_with(parsed.line))[3:])
            assert (continued.root, continued.problems) == (folder, [])
            if "digits" in words:
                Path(folder, "kept").touch()
        assert Path(folder).exists() == ("digits" in words)


def test_a_refused_run_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ("--data digts", "--data digits --epochs 0", "--data digits --resume must"):
        assert main(["run", *words.split()]) == 2
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert [*tmp_path.glob("runs/*")] == []
    Path("runs").rmdir()
    Path("runs").touch()
    capsys.readouterr()
    assert main(["run", "--data", "digits"]) == 5
    assert "could not write runs/" in capsys.readouterr().err


def test_a_reader_that_goes_away_stops_nothing(root: Path, warm: Nursery) -> None:
    out, err = (root.with_name(name) for name in ("printed", "errors"))
    for pipe in (out, err):
        os.mkfifo(pipe)
    # Opened for writing as well, so that nobody waits for the other end.
    with out.open("r+b", 0), err.open("r+b", 0) as errors:
        run, *_ = warmly(warm, root, "run", *SMALL.split(), "--root", root, "-v")
        errors.readline()
    assert run.wait(100) == 0
    with RunStore.read(root) as store:
        assert store.counts()["done"] == 2


# Help and doctor


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, parser in verbs_of(make_parser()).items():
        with pytest.raises(SystemExit) as caught:
            main([verb, "--help-all" if verb in ("run", "train", "plan") else "--help"])
        assert caught.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        assert EXIT_CODES in text
        parser.add_own_flags()
        for action in parser._actions:
            assert action.help, action
            assert all(option in text for option in action.option_strings)


WRONG_PARTS = (
    ("--partition-size many", "must be a whole number, or one by kind such as cpu=1000,gpu=8"),
    ("--epochs-per-round cpu=1,gpu", "or one by kind such as cpu=1000,gpu=8000: received 'cpu"),
    (
        "--partition-size tpu=3",
        "--partition-size by kind of process must give a number for 'cpu', or",
    ),
    (
        "--partition-size cpu=9,gpu=0 --epochs-per-round 0",
        "--epochs-per-round must be a whole number of at least 1: received 0",
    ),
    (
        "--partition-size cpu=40,gpu=80 --epochs-per-round cpu=1,gpu=3 --devices cpu",
        "received partition_size={'cpu': 40, 'gpu': 80}, epochs_per_round={'cpu': 1, 'gpu': 3}, "
        "and none: devices is 'cpu'. Leave the kind 'gpu' out, or pass --devices auto (`asynckfold "
        "doctor`",
    ),
    (
        "--partition-size cpu=10000,gpu=40 --batch-size 41 --devices cpu",
        "of the kind 'gpu' and batch_size=41. Pass --partition-size 41 or more, or --batch",
    ),
    ("--fuse off", "--fuse must be a whole number of at least 2, yes, no or 'auto': rec"),
)


def test_what_is_wrong_with_parts_is_said_in_flags(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in WRONG_PARTS:
        parts = f"run {SMALL} --trainer averaging --processes 2 --root {root} {words}"
        assert main(parts.split()) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "True" not in error
        assert not root.exists()


def test_doctor_says_what_would_run_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    result = printed_json(capsys, "doctor")
    assert result["now"]["jobs"] >= 1
    assert {"versions", "cpu", "memory", "gpus"} <= set(result)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^now +\d+ jobs? of one thread would run now on cores? \d", out)
    assert re.search(r"memory +\d+\.\d GiB of \d+\.\d GiB available", out)
    assert not re.search(r"\d{7}", out)  # no sizes in bytes


def test_help_names_everything_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    words = set(re.split(r"[\s,()]+", capsys.readouterr().out))
    offered = completion._words()
    for name in ("models", "schedulers", "optimizer"):
        assert {*(offered[name] or ())} <= words
    assert {"digits", "folder:PATH", "csv:PATH", "npz:PATH"} <= words
