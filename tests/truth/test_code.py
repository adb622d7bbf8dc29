"""Edited code is noticed and named; what changes no number is not.

A small project of two modules is written to disk, imported, and planned; then again with an edit.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import random
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, Plan
from asynckfold.jobs.digests import changes
from asynckfold.jobs.digests.run import digested, imported_otherwise
from asynckfold.jobs.recipe import Recipe
from tests.toy import Tiny, adam, samples

NET = '''
"""A project."""
import functools
import math
import enum
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torchvision.transforms import v2
from sklearn.metrics import fbeta_score, make_scorer

import blocks
from blocks import Block, scaled

WIDTH = 4
CONFIG = {"lr": 0.1, "momentum": 0.9, "verbose": 1}
WEIGHT = torch.tensor([1.0, 2.0, 3.0])


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


@dataclass(frozen=True)
class Size:
    hidden: int = 8
    drop: float = 0.1


def activation(x):
    """The activation."""
    return torch.relu(x)


class Base(nn.Module):
    def prepare(self, x):
        return x.flatten(1)


class Net(Base):
    """A network."""

    factor = 2

    def __init__(self, width=WIDTH, size=Size(), mode=Mode.FAST):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.block = Block(width)
        self.last = blocks.head(width)
        self.mode = mode

    def forward(self, x):
        # The activation comes last.
        x = self.block(self.first(self.prepare(x)))
        if self.training:
            x = x * 1.0
        try:
            return activation(self.last(x)) * self.factor
        except ValueError as error:
            raise RuntimeError("bad") from error

    @property
    def size(self):
        return scaled(3)

    @staticmethod
    def unit():
        return 1.0

    def pretrain(self, inputs, generator, report):
        for epoch in range(3):
            report("stage", epoch, {"loss": 0.5})


class Focal(nn.Module):
    def __init__(self, gamma=2.0):
        super().__init__()
        self.gamma = gamma

    def forward(self, outputs, targets):
        loss = nn.functional.cross_entropy(outputs, targets, weight=WEIGHT, reduction="none")
        return (loss**self.gamma).mean()


def rates(lr):
    def optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=CONFIG["momentum"])

    return optimizer


def decay(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)


def my_f1(targets, outputs):
    return float(np.mean(outputs.argmax(1) == targets)) * 0.5


class Noise:
    def __init__(self, sigma):
        self.sigma = sigma
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x + self.sigma * torch.randn_like(x)


class Samples(torch.utils.data.Dataset):
    def __init__(self, noise=0.3, root="/data/first"):
        self.noise = noise
        self.root = root
        self.x = torch.zeros(20, 1, 4, 2)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + self.noise, index % 3


torch.manual_seed(0)
MODELS = {
    "net": Net,
    "wide": functools.partial(Net, width=6, mode=Mode.SLOW),
    "lambda": lambda: Net(5),
    "given": Net(3),
}
SCHEDULERS = {"decay": decay}
OPT_FN = rates(0.05)
SETTINGS = {
    "criterion": Focal(gamma=1.5),
    "scoring": {
        "my_f1": my_f1,
        "fbeta": make_scorer(fbeta_score, beta=2, average="macro"),
    },
    "train_transform": v2.Compose(
        [v2.RandomHorizontalFlip(0.5), v2.RandomCrop((4, 2), padding=4), Noise(0.1)]
    ),
    "eval_transform": v2.Normalize([0.5], [0.5]),
    "dataset": Samples(),
}
'''

BLOCKS = """
from torch import nn

SLOPE = 0.2


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return nn.functional.leaky_relu(self.linear(x), SLOPE)


def head(width):
    return nn.Linear(width, 3)


def scaled(x):
    return x * 2


def unused(x):
    return x * 5
"""

PROJECT = {"net.py": NET, "blocks.py": BLOCKS}


def plan_of(
    models: Any = Tiny, schedulers: Any = "step", opt_fn: Any = adam, **settings: Any
) -> Plan:
    """Return the plan of a call, with the record of its live objects."""
    settings = {"dataset": samples(20), "criterion": nn.CrossEntropyLoss(), **settings}
    kfold = AsyncKFold(2, root_dir="nowhere", batch_size=10, parallelize=False, **settings)
    return kfold.plan(models, schedulers, opt_fn, {"epochs": 1})[0]


def plan_of_project(module: Any) -> Plan:
    given = module if isinstance(module, Mapping) else vars(module)
    return plan_of(*(given[name] for name in NAMES[:3]), **given[NAMES[3]])


NAMES = ("MODELS", "SCHEDULERS", "OPT_FN", "SETTINGS")


def changed(before: Plan, after: Plan) -> str:
    """Return what changed in the live objects of a plan."""
    return "; ".join(before.changed_parts(after).values())


@contextlib.contextmanager
def imported(folder: Path, files: dict[str, str]) -> Iterator[types.ModuleType]:
    """Write the project to a folder, import it, and forget it afterwards."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield importlib.import_module("net")
    finally:
        sys.path.remove(str(folder))
        for name in files:
            sys.modules.pop(name.removesuffix(".py"), None)


def plan_in(folder: Path, files: dict[str, str]) -> Plan:
    with imported(folder, files) as module:
        return plan_of_project(module)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The record of the project."""
    return plan_in(tmp_path_factory.mktemp("first") / "project", PROJECT)


def edited(*edits: Sequence[str]) -> dict[str, str]:
    files = {**PROJECT}
    for old, new, *file in edits:
        (name,) = file or ["net.py"]
        assert old in files[name], old
        files[name] = files[name].replace(old, new)
    return files


# What must be noticed, and how it is named

HARMFUL = [
    ("model 'net': forward() changed", "* self.factor\n", "* self.factor + 1\n"),
    (
        "model 'net': forward() changed",
        "        if self.training:\n            x = x * 1.0\n        try:\n",
        "        try:\n            if self.training:\n                x = x * 1.0\n",
    ),
    ("factor was 2, is 3", "    factor = 2\n", "    factor = 3\n"),
    ("__init__() changed", "nn.Linear(8, width)", "nn.Linear(8, width, bias=False)"),
    ("the default of width was 4, is 5", "WIDTH = 4", "WIDTH = 5"),
    ("hidden was 8, is 9", "hidden: int = 8", "hidden: int = 9"),
    ("Base.prepare() changed", "x.flatten(1)", "x.flatten(1, -1)"),
    ("activation() changed", "torch.relu(x)", "torch.tanh(x)"),
    ("scaled() changed", "x * 2", "x * 3", "blocks.py"),
    ("the global SLOPE was 0.2, is 0.3", "SLOPE = 0.2", "SLOPE = 0.3", "blocks.py"),
    ("pretrain() changed", "for epoch in range(3)", "for epoch in range(4)"),
    ("the members of Mode changed", "SLOW = 2", "SLOW = 3"),
    ("model 'wide': width was 6, is 7", "width=6", "width=7"),
    ("model 'lambda': the lambda changed", "lambda: Net(5)", "lambda: Net(6)"),
    ("model 'given': the initial weights changed", "torch.manual_seed(0)", "torch.manual_seed(1)"),
    ("scheduler 'decay': decay() changed", "0.9**epoch", "0.8**epoch"),
    ("opt_fn: the closure variable lr was 0.05, is 0.06", "rates(0.05)", "rates(0.06)"),
    ("the global CONFIG['momentum'] was 0.9, is 0.8", '"momentum": 0.9', '"momentum": 0.8'),
    ("opt_fn: optimizer() changed", "optim.SGD", "optim.RMSprop"),
    ("criterion: gamma was 1.5, is 1.6", "gamma=1.5", "gamma=1.6"),
    ("criterion: the global WEIGHT changed", "[1.0, 2.0, 3.0]", "[1.0, 2.0, 4.0]"),
    ("scorer 'my_f1': my_f1() changed", "* 0.5", "* 0.6"),
    (
        "train_transform: step 2 (RandomCrop).padding was [4, 4, 4, 4], is [2, 2, 2, 2]",
        "padding=4",
        "padding=2",
    ),
    ("step 3 (Noise).sigma was 0.1, is 0.2", "Noise(0.1)", "Noise(0.2)"),
    ("train_transform: Noise.__call__() changed", "x + self.sigma", "x - self.sigma"),
    (
        "its steps was RandomHorizontalFlip, RandomCrop, Noise, is RandomCrop, Noise",
        "v2.RandomHorizontalFlip(0.5), ",
        "",
    ),
    ("dataset: __getitem__() changed", "+ self.noise", "- self.noise"),
]
"""What is said of an edit, and the edit."""


def test_edits_are_noticed_and_named(tmp_path: Path, before: Plan) -> None:
    """Of each part one edit at a time; those of several parts together."""
    batches: list[dict[str, tuple[str, ...]]] = [{} for _ in HARMFUL]
    for row in HARMFUL:
        part = row[0].partition(": ")[0] if ": " in row[0] else "model"
        next(batch for batch in batches if part not in batch)[part] = row
    missed = {}
    for number, batch in enumerate(filter(None, batches)):
        files = edited(*(edit for _, *edit in batch.values()))
        told = before.changed_parts(plan_in(tmp_path / f"{number}", files)).values()
        for text, *_ in batch.values():
            part, _, component = text.partition(": ") if ": " in text else ("", "", text)
            if not any(line.startswith(part) and component in line for line in told):
                missed[text] = list(told)
    assert missed == {}


# What must pass


def without_docstrings(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or len(body) < 2:
            continue
        head = body[0]
        if isinstance(head, ast.Expr) and isinstance(head.value, ast.Constant):
            del body[0]
    return ast.unparse(tree)


def with_methods_reversed(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == "Net":
            node.body = node.body[:2] + node.body[:1:-1]
    return ast.unparse(tree)


def commented(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(f"{line}  # here" if line.endswith((")", ":")) else line for line in lines)


SMALL = (
    ("SLOPE = 0.2", "# steep\nSLOPE = 2e-1", "blocks.py"),
    ("        if self.training:", "\n\n        if self.training:"),
    ('"""A network."""', '"""The network of chapter 3."""'),
    ('"""The activation."""', '"""ReLU."""'),
    ('reduction="none"', "reduction='none'"),
    (
        "return x + self.sigma * torch.randn_like(x)",
        "return (\n            x\n            + (self.sigma * torch.randn_like(x))\n        )",
    ),
    (
        "def head(width):\n    return nn.Linear(width, 3)\n\n\ndef scaled(x):\n    return x * 2\n",
        "def scaled(x):\n    return x * 2\n\n\ndef head(width):\n    return nn.Linear(width, 3)\n",
        "blocks.py",
    ),
    ("def forward(self, x):", "def forward(self, x: 'int') -> None:"),
    ("def rates(lr):", "def new(x):\n    return x\n\n\ndef rates(lr):\n    '''Doc.'''\n"),
    ("x * 5", "x * 6", "blocks.py"),
    ("import math\n", "import json\nimport textwrap as wrap\n"),
    ("WIDTH = 4", "WIDTH = 4\nOTHER = 7"),
    (
        '{"lr": 0.1, "momentum": 0.9, "verbose": 1}',
        '{"momentum": 0.9, "verbose": 3, "lr": 0.1}',
    ),
    ('beta=2, average="macro"', 'average="macro", beta=2'),
    ("width=6, mode=Mode.SLOW", "mode=Mode.SLOW, width=6"),
    ("loss = nn.", "value = nn."),
    ("(loss**", "(value**"),
    ('root="/data/first"', 'root="/mnt/disk/first"'),
    (
        "    def __call__(self, x):\n",
        "    def __repr__(self):\n        return 'x'\n\n    def __call__(self, x):\n",
    ),
)
"""Comments, layout, docstrings, names of local variables, order, and what nothing reads."""

HARMLESS: dict[str, dict[str, str]] = {
    "small edits": edited(*SMALL),
    "comments": {name: "\n" * 50 + commented(text) for name, text in PROJECT.items()},
    "another layout": {name: without_docstrings(text) for name, text in PROJECT.items()},
    "methods in another order": {**PROJECT, "net.py": with_methods_reversed(NET)},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_an_edit_that_changes_no_number_passes(tmp_path: Path, before: Plan, name: str) -> None:
    assert changed(before, plan_in(tmp_path / "project", HARMLESS[name])) == ""


def test_state_that_use_leaves_behind_is_no_setting(tmp_path: Path, before: Plan) -> None:
    """A step that counts its calls has been called by the first call of the same process."""
    with imported(tmp_path / "project", PROJECT) as module:
        step = module.SETTINGS["train_transform"].transforms[2]
        step(torch.zeros(3))
        assert step.calls > 0
        assert changed(before, plan_of_project(module)) == ""
        step.sigma = 0.7
        assert "sigma was 0.1, is 0.7" in changed(before, plan_of_project(module))


CHILD = """
import runpy, sys
import cloudpickle
from asynckfold import Plan
from tests.truth.test_code import changed, plan_of_project
packed, script, stored = sys.argv[1:]
with open(stored) as file:
    before = Plan.from_json(file.read())
sys.path.insert(0, script.rpartition("/")[0])
print(changed(before, plan_of_project(runpy.run_path(script, run_name="__main__"))))
del sys.path[0], sys.modules["blocks"]
with open(packed, "rb") as file:
    print(changed(before, plan_of_project(cloudpickle.load(file))))
"""


@pytest.mark.nightly
def test_another_process_finds_the_same(tmp_path: Path, before: Plan) -> None:
    """Run as a script, and sent by value; with another hash seed, from another folder."""
    folder, stored = tmp_path / "project", tmp_path / "stored"
    stored.write_text(before.to_json())
    with imported(folder, PROJECT) as module, contextlib.ExitStack() as stack:
        for part in (module, sys.modules["blocks"]):
            cloudpickle.register_pickle_by_value(part)
            stack.callback(cloudpickle.unregister_pickle_by_value, part)
        parts = {name: getattr(module, name) for name in NAMES}
        (tmp_path / "packed").write_bytes(cloudpickle.dumps(parts))
    child = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path / "packed", folder / "net.py", stored],
        cwd="/",
        env={**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout == "\n\n"


def of_value(value: Any) -> Plan:
    """Plan a sweep whose `opt_fn` closes over a value."""

    def opt_fn(model: Any) -> Any:
        return adam(model) if value is not opt_fn else None

    return plan_of(opt_fn=opt_fn)


def test_one_bit_of_a_tensor_changes_the_digest() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])
    other = weight.clone()
    other.view(torch.int32)[1] ^= 1
    one, same, edited = (
        plan_of(criterion=nn.CrossEntropyLoss(weight=value))
        for value in (weight, weight.clone(), other)
    )
    assert changed(one, same) == ""
    assert changed(one, edited) == "criterion: weight changed"


def test_what_cannot_be_known_is_said() -> None:
    def scorer(targets: Any, outputs: Any, guard: Any = threading.Lock()) -> float:  # noqa: B008
        with guard:
            return 0.0

    digest = digested({"scorer s": scorer})
    assert digest.skipped == ("scorer s: the default of guard (lock)",)
    assert digest.parts == digested({"scorer s": scorer}).parts


def test_a_container_that_the_code_fills_is_state() -> None:
    seen: list[int] = []
    memo: dict[int, int] = {}
    counts = {"calls": 0}

    def opt_fn(model: Any) -> Any:
        seen.append(1)
        memo[len(seen)] = 2
        counts["calls"] += 1
        return adam(model)

    before = plan_of(opt_fn=opt_fn)
    opt_fn(Tiny())
    assert changed(before, plan_of(opt_fn=opt_fn)) == ""


class Lazy(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Opens its file when the first sample is read, and knows its classes when asked."""

    def __init__(self) -> None:
        self.noise, self.file = 0.1, None

    @functools.cached_property
    def classes(self) -> list[str]:
        return ["a", "b", "c"]

    @property
    def opened(self) -> Any:
        self.file: Any = self.file or [1.0, 2.0]
        return self.file

    def __len__(self) -> int:
        return 4 * len(self.classes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((8,), self.opened[index % 2] + self.noise), index % 3


class Rude:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_what_is_opened_when_needed_is_state_and_rude_objects_stop_nothing() -> None:
    def opt_fn(model: Any, rude: Any = Rude(), lazy: Any = nn.LazyLinear(3)) -> Any:  # noqa: B008
        return adam(model)

    data = Lazy()
    before = plan_of(opt_fn=opt_fn, dataset=data)
    assert data[0][0][0] == 1.1
    assert changed(before, plan_of(opt_fn=opt_fn, dataset=data)) == ""
    data.noise = 0.25
    assert (
        changed(before, plan_of(opt_fn=opt_fn, dataset=data)) == "dataset: noise was 0.1, is 0.25"
    )


class Experiment:
    """As many write it: one object that makes everything."""

    bias = True

    def __init__(self, width: int = 3, folder: str = "runs/a") -> None:
        self.width = width
        self.folder = folder
        self.started = random.random()

    def model(self) -> nn.Module:
        return nn.Sequential(self.layer())

    def layer(self) -> nn.Module:
        return nn.Linear(8, self.width, bias=self.bias)

    def save(self) -> str:
        return self.folder


def test_of_an_object_with_many_methods_counts_what_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plan(made: Any) -> Plan:
        return plan_of({"A": made.model, "B": lambda: made.model()})

    before = plan(Experiment())
    assert changed(before, plan(Experiment(folder="runs/b"))) == ""
    told = before.changed_parts(plan(Experiment(4)))
    assert told["model A"] == "model 'A': self.width was 3, is 4"
    assert told["model B"] == "model 'B': the closure variable made.width was 3, is 4"

    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "bias", False)
        told = before.changed_parts(plan(Experiment()))
        assert told["model A"] == "model 'A': Experiment.bias was True, is False"
        patch.undo()
        patch.setattr(Experiment, "layer", lambda self: nn.Linear(8, self.width + 1))
        told = before.changed_parts(plan(Experiment()))
        assert told["model A"] == "model 'A': Experiment.layer() changed"
        patch.undo()
        patch.setattr(Experiment, "save", lambda self: "elsewhere")
        assert changed(before, plan(Experiment())) == ""


def test_generators_go_by_their_seed() -> None:
    one, other = np.random.default_rng(3), np.random.default_rng(4)
    before = of_value(one)
    one.normal(size=3)
    assert changed(before, of_value(one)) == ""
    assert changed(before, of_value(other))
    mine = torch.Generator().manual_seed(5)
    seeded = of_value(mine)
    torch.randn(3, generator=mine)
    assert changed(seeded, of_value(mine)) == ""
    assert changed(seeded, of_value(torch.Generator().manual_seed(6)))
    # Without a seed, each process has another: that is no edit.
    assert changed(of_value(np.random.default_rng()), of_value(np.random.default_rng())) == ""


def test_another_python_is_told_and_is_no_edit(before: Plan) -> None:
    code = before.recipe["code"]
    other = {
        part: {
            **{
                name: text.replace("code:", "code:0") if text.startswith("code:") else text
                for name, text in components.items()
            },
            changes.PYTHON: "cpython-3.99",
        }
        for part, components in code.items()
    }
    assert changes.difference(code, other) is None
    assert "cpython-3.99" in changes.incomparable(code, other)
    # What a continued run holds stays in the form in which it was begun.
    assert changes.kept(code, other) == code
    other["opt_fn"]["the closure variable lr"] = "=7"
    assert "lr was 0.05, is 7" in str(changes.difference(code, other))
    assert changes.incomparable(code, code) == ""


def test_cycles_end_and_a_library_goes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    deep: Any = 0
    for _ in range(200):
        deep = [deep]
    models = {"A": lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, 3)) if (loop, deep) else None}
    before = plan_of(models, criterion=nn.functional.cross_entropy)
    monkeypatch.setattr(nn.Flatten, "forward", lambda self, x: x)
    assert changed(before, plan_of(models, criterion=nn.functional.cross_entropy)) == ""


def test_candidates_may_be_added_and_those_that_depend_on_a_change_are_named() -> None:
    net, more = (lambda: nn.Linear(8, 3)), (lambda: nn.Linear(8, 3, bias=False))
    both = ["step", "cosine"]
    old, grown = plan_of({"net": net}, both), plan_of({"net": net, "more": more}, both)
    assert old.obstacle(grown) is None
    edited = plan_of({"net": net, "more": lambda: nn.Linear(8, 3, bias=True)}, both)
    assert "the lambda changed (2 of 4 candidates depend on it: more/step, more/cosine)" in str(
        grown.obstacle(edited)
    )


# What workers import by themselves


def test_another_python_imports_what_it_can() -> None:
    recipe = Recipe({"net": Tiny}, {}, adam, nn.CrossEntropyLoss())
    sent = {"model net": dict(digested({"model net": lambda: nn.Linear(8, 3)}).parts["model net"])}
    sent["model net"][changes.PYTHON] = "cpython-3.11-O"
    assert imported_otherwise(recipe, sent) == ""
