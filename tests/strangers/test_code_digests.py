"""Code and numbers behind decorators, in fitted objects and in large packages are in the record."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.preprocessing import StandardScaler
from torch import nn

from asynckfold import AsyncKFold, CVResults, PlanMismatchError, RunStore
from tests.toy import adam, samples

X, Y = samples(30)

pytestmark = pytest.mark.usefixtures("one_thread")


def run(root: Path, model: Any, **settings: Any) -> CVResults:
    settings = {"dataset": (X, Y), "parallelize": False, **settings}
    kfold = AsyncKFold(
        2, settings.pop("dataset"), root, nn.CrossEntropyLoss(), 16, verbose=0, baseline=None,
        report=False, **settings,
    )  # fmt: skip
    models = model if isinstance(model, dict) else {"net": model}
    return kfold(models, ["constant"], adam, {"epochs": 1})


def as_script(text: str, **values: Any) -> dict[str, Any]:
    scope = {"__name__": "__main__", "torch": torch, "nn": nn, "np": np, **values}
    exec(text, scope)
    return scope


DECORATED = """
import contextlib, functools

@torch.no_grad()
def under_no_grad(x): return x * 1.01

@torch.inference_mode()
def under_inference_mode(x): return x * 1.02

@torch.autocast("cpu", enabled=False)
def under_autocast(x): return x * 1.03

@functools.cache
def under_cache(): return 1.04

@functools.lru_cache(maxsize=8)
def under_lru_cache(): return 1.05

@functools.singledispatch
def under_dispatch(x): return x

@under_dispatch.register
def for_tensors(x: torch.Tensor): return x * 1.06

@contextlib.contextmanager
def as_context(): yield 1.07

@torch.compile(backend="eager")
def under_compile(x): return x * 1.08

@torch.vmap
def under_vmap(x): return x * 1.09

@np.vectorize
def under_vectorize(x): return x * 1.11

@functools.lru_cache
@torch.no_grad()
def under_two(): return 1.12

@as_context()
def under_context(x): return x * 1.13

def unwrapped(function): return lambda *given: function(*given)

@torch.no_grad()
@unwrapped
def under_own(x): return x * 1.14

@contextlib.contextmanager
def with_gain(gain): yield gain * 1.25

@with_gain(2.5)
def under_gain(x): return x

def summed(x): return (x * 1.15).sum()

class Base(nn.Module):
    @torch.no_grad()
    def inherited(self, x): return x * 1.16

class Net(Base):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.gradient = torch.func.grad(summed)
        self.fill(self.layer)

    @staticmethod
    @torch.no_grad()
    def fill(layer): layer.bias.fill_(0.17)

    @property
    @torch.no_grad()
    def shown(self): return 1.18

    @functools.cached_property
    def cached(self): return 1.19

    @functools.lru_cache
    def remembered(self): return 1.21

    def scaled(self, x, by): return x * by * 1.22

    twice = functools.partialmethod(scaled, by=2.0)

    @functools.singledispatchmethod
    def dispatched(self, x): return x * 1.23

    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        x = under_dispatch(under_autocast(x + under_no_grad(x).detach())) * under_cache()
        with as_context() as factor:
            x = under_context(x * factor) * under_two() * self.remembered() * 1.24
        if x is None:
            x = [under_inference_mode, under_lru_cache, under_compile, under_vmap]
            x = [under_vectorize, under_own, under_gain, self.inherited, self.shown, self.cached]
            x = [self.twice, self.dispatched, self.gradient]
        return self.layer(x)
"""

NAMED = {
    "1.01": "under_no_grad()", "1.02": "under_inference_mode()", "1.03": "under_autocast()",
    "1.04": "under_cache()", "1.05": "under_lru_cache()", "1.06": "for_tensors()",
    "1.07": "as_context()", "1.08": "under_compile()", "1.09": "under_vmap()",
    "1.11": "under_vectorize()", "1.12": "under_two()", "1.13": "under_context()",
    "1.14": "under_own()", "1.15": "summed()", "1.16": "Base.inherited()", "0.17": "fill()",
    "1.18": "shown()", "1.19": "cached()", "1.21": "remembered()", "1.22": "scaled()",
    "1.23": "dispatched()", "1.24": "forward()", "1.25": "with_gain()",
}  # fmt: skip


@pytest.fixture(scope="module")
def decorated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("decorated") / "run"
    run(root, as_script(DECORATED)["Net"])
    return root


def refused(root: Path, text: str) -> str:
    """Return how a run refuses to go on with other decorated code."""
    assert text != DECORATED
    with pytest.raises(PlanMismatchError) as caught:
        run(root, as_script(text)["Net"])
    return str(caught.value)


def test_an_edit_under_a_decorator_is_refused_by_name(decorated: Path) -> None:
    for number, name in NAMED.items():
        message = refused(decorated, DECORATED.replace(number, "0.5"))
        assert f"model 'net': {name} changed" in message


def test_another_decorator_or_argument_is_refused(decorated: Path) -> None:
    for old, new in (
        ("@torch.no_grad()\ndef under_no_grad", "@torch.enable_grad()\ndef under_no_grad"),
        (
            '@torch.autocast("cpu", enabled=False)\n    def forward',
            '@torch.autocast("cpu")\n    def forward',
        ),
        ("@torch.vmap\n", "@functools.partial(torch.vmap, in_dims=1)\n"),
        ("@torch.no_grad()\ndef under_no_grad", "def under_no_grad"),
        ("by=2.0", "by=3.0"),
        ("with_gain(2.5)", "with_gain(3.5)"),
    ):
        assert "model 'net'" in refused(decorated, DECORATED.replace(old, new))


def test_decorated_functions_that_were_called_continue(decorated: Path) -> None:
    """Caches, dispatch tables and the state of contexts are filled by the first call."""
    net = as_script(DECORATED)["Net"]
    first = run(decorated, net)
    net()(torch.zeros(2, 8))
    assert run(decorated, net).fingerprint == first.fingerprint
    commented = DECORATED.replace("def under", "# a comment\n\ndef under")
    assert run(decorated, as_script(commented)["Net"]).fingerprint == first.fingerprint


STEPS = """
@torch.no_grad()
def validation_step(model, batch, state):
    return {"margin": model(batch[0]).abs().mean() * 1.0}

class Note:
    @torch.no_grad()
    def __call__(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return x * 1.5
"""


def test_steps_and_transforms_under_a_decorator_count(tmp_path: Path) -> None:
    def call(text: str) -> str:
        scope = as_script(text)
        note = scope["Note"]()
        settings = {"validation_step": scope["validation_step"], "scoring": ["margin"]}
        views = {"train_transform": note, "eval_transform": note}
        return run(tmp_path / "run", lambda: nn.Linear(8, 3), **settings, **views).fingerprint

    assert call(STEPS) == call(STEPS)
    with pytest.raises(PlanMismatchError, match=r"validation_step: validation_step\(\) changed"):
        call(STEPS.replace("* 1.0", "* 7.0"))
    with pytest.raises(PlanMismatchError, match=r"train_transform: __call__\(\) changed"):
        call(STEPS.replace("* 1.5", "* 2.5"))


# Fitted objects


class Holding(nn.Linear):
    def __init__(self, fitted: Any) -> None:
        super().__init__(8, 3)
        self.fitted = fitted


FITTED: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "global": lambda it: as_script(
        "def made(): return nn.Linear(8, 3 if hasattr(S, 'transform') else 3)", S=it
    )["made"],
    "closure": lambda it: lambda: nn.Linear(8, 3 + 0 * len(repr(it))),
    "argument": lambda it: functools.partial(Holding, it),
    "attribute": Holding,
}


def test_a_fitted_object_counts_by_its_state(tmp_path: Path) -> None:
    def models(fitted: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        return {where: made(fitted) for where, made in FITTED.items()}

    fingerprint = run(tmp_path / "run", models(StandardScaler().fit(X))).fingerprint
    again = run(tmp_path / "run", models(StandardScaler().fit(X.copy())))
    assert again.fingerprint == fingerprint
    match = r"mean_ changed.*scale_ changed.*4 of 4 candidates depend on it"
    with pytest.raises(PlanMismatchError, match=match):
        run(tmp_path / "run", models(StandardScaler().fit(X * 30)))


def test_a_fitted_forest_counts_by_its_trees(tmp_path: Path) -> None:
    def made(targets: Any) -> Callable[[], Any]:
        forest = RandomForestClassifier(3, random_state=0).fit(X, targets)
        return lambda: nn.Linear(8, forest.n_classes_ + 0 * len(forest.predict(X)))

    fingerprint = run(tmp_path / "run", made(Y)).fingerprint
    assert run(tmp_path / "run", made(Y.copy())).fingerprint == fingerprint
    with pytest.raises(PlanMismatchError, match="estimators_ changed"):
        run(tmp_path / "run", made(np.roll(Y, 1)))


def test_what_was_fitted_before_does_not_count_in_preprocess(tmp_path: Path) -> None:
    def call(preprocess: Any) -> str:
        return run(
            tmp_path / "run", functools.partial(nn.Linear, 8, 3), preprocess=preprocess
        ).fingerprint

    assert call(StandardScaler()) == call(StandardScaler().fit(X))
    with pytest.raises(PlanMismatchError, match="with_mean was True, is False"):
        call(StandardScaler(with_mean=False))


# Modules and packages


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to import from; its modules are forgotten afterwards."""
    place = tmp_path / "code"
    place.mkdir()
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield place
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "") or "").startswith(str(place)):
            del sys.modules[name]


def imported(name: str) -> Any:
    importlib.invalidate_caches()
    for known in [known for known in sys.modules if known.partition(".")[0] == name]:
        del sys.modules[known]
    return importlib.import_module(name)


def test_a_module_named_like_one_of_the_standard_library_is_the_users(
    tmp_path: Path, folder: Path
) -> None:
    file = folder / "tabnanny.py"
    file.write_text("from torch import nn\ndef made(): return nn.Linear(8, 3, bias=True)\n")
    first = run(tmp_path / "run", imported("tabnanny").made).fingerprint
    assert run(tmp_path / "run", imported("tabnanny").made).fingerprint == first
    file.write_text(file.read_text().replace("True", "False"))
    with pytest.raises(PlanMismatchError, match=r"made\(\) changed"):
        run(tmp_path / "run", imported("tabnanny").made)


def test_modules_that_a_function_takes_from_a_package_count(tmp_path: Path, folder: Path) -> None:
    (folder / "nets").mkdir()
    (folder / "nets" / "__init__.py").touch()
    (folder / "nets" / "deep.py").write_text("BIAS = True\n")

    def made() -> nn.Module:
        from nets import deep  # type: ignore[import-not-found]

        return nn.Linear(8, 3, bias=deep.BIAS)

    first = run(tmp_path / "run", made).fingerprint
    assert run(tmp_path / "run", made).fingerprint == first
    (folder / "nets" / "deep.py").write_text("BIAS = False\n")
    with pytest.raises(PlanMismatchError, match=r"the module nets\.deep changed"):
        run(tmp_path / "run", made)


MODELS = 30


def _large(folder: Path, factor: float = 1.0) -> Any:
    """A library of 1,200 functions, which import each other's modules when they are called."""
    package = folder / "zoo"
    package.mkdir(exist_ok=True)
    functions = "".join(
        f"def f{n}(x):\n    from zoo import m{(n * 7) % MODELS}, registry\n    return x * {n}.5\n"
        for n in range(40)
    )
    for number in range(MODELS):
        (package / f"m{number}.py").write_text(f"from . import registry\n{functions}")
    (package / "registry.py").write_text(f"FACTOR = {factor}\n")
    names = ", ".join(f"m{number}" for number in range(MODELS))
    calls = ", ".join(f"m{a}.f{b}" for a in range(MODELS) for b in range(40))
    (package / "__init__.py").write_text(
        f"from torch import nn\nfrom . import registry, {names}\nKNOWN = [{calls}]\n"
        "def made():\n    return nn.Linear(8, 3 if KNOWN else int(registry.FACTOR))\n"
    )
    return imported("zoo")


def _components(root: Path) -> list[str]:
    with RunStore.read(root) as store:
        return list(store.plan.recipe["code"]["model net"])


def test_a_large_package_of_the_user_counts_as_a_whole(tmp_path: Path, folder: Path) -> None:
    zoo = _large(folder)
    first = run(tmp_path / "run", lambda: zoo.made()).fingerprint
    names = _components(tmp_path / "run")
    assert "the package zoo" in names
    assert len(names) < 20
    assert run(tmp_path / "run", lambda: zoo.made()).fingerprint == first
    zoo = _large(folder, 2.0)
    with pytest.raises(PlanMismatchError, match="model 'net': the package zoo changed"):
        run(tmp_path / "run", lambda: zoo.made())


def test_what_a_distribution_installed_is_a_library_wherever_it_lies(
    tmp_path: Path, folder: Path
) -> None:
    """As ``pip install --target`` leaves it, with a module of the user beside it."""
    zoo = _large(folder)
    (folder / "mine.py").write_text("def width(): return 3\n")
    record = folder / "zoo-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text(
        "".join(f"{file.relative_to(folder)},,\n" for file in folder.glob("zoo/*.py"))
    )
    mine = imported("mine")

    def made() -> Any:
        return zoo.made() if mine.width() else None

    run(tmp_path / "run", made)
    names = _components(tmp_path / "run")
    assert "width()" in names
    assert not [name for name in names if "zoo" in name]


def test_what_is_installed_as_editable_may_be_edited(tmp_path: Path, folder: Path) -> None:
    """As ``pip install -e`` leaves it: its files are elsewhere, and its version stays the same."""
    record = folder / "mynets-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    (record.parent / "direct_url.json").write_text('{"dir_info": {"editable": true}}')
    record.write_text("__editable__.mynets-1.0.pth,,\nmynets-1.0.dist-info/RECORD,,\n")
    (folder / "mynets.py").write_text("from torch import nn\ndef made(): return nn.Linear(8, 3)\n")
    run(tmp_path / "run", imported("mynets").made)
    (folder / "mynets.py").write_text(
        "from torch import nn\ndef made(): return nn.Linear(8, 3, bias=False)\n"
    )
    with pytest.raises(PlanMismatchError, match=r"made\(\) changed"):
        run(tmp_path / "run", imported("mynets").made)


# Cached functions travel to workers

CACHED = """
import functools
from torch.utils.data import Dataset

@functools.lru_cache(maxsize=None)
def load(index): return X[index]

@functools.cache
def weights(): return torch.full((3, 8), 0.5)

@functools.cache
def factor(n): return 2.0 if n == 0 else factor(n - 1)

class Samples(Dataset):
    def __len__(self): return len(X)
    def __getitem__(self, index): return load(int(index)), int(Y[index])

class Net(nn.Linear):
    @functools.lru_cache
    def remembered(self): return 1.0
    def forward(self, x): return super().forward(x) * self.remembered()

def made():
    net = Net(8, 3)
    net.weight.data.copy_(weights())
    return net

def scaled(x): return torch.as_tensor(x) * factor(3)
"""


def test_cached_and_decorated_functions_of_a_script_work_in_every_engine(tmp_path: Path) -> None:
    scope = as_script(CACHED, X=X, Y=Y)
    text = DECORATED.replace('@torch.compile(backend="eager")', "")
    assert text != DECORATED
    models = {"cached": scope["made"], "decorated": as_script(text)["Net"]}
    settings = {"dataset": scope["Samples"](), "train_transform": scope["scaled"], "n_jobs": 1}
    settings["eval_transform"] = scope["scaled"]
    scores = [
        run(tmp_path / engine, models, engine=engine, parallelize=True, **settings)
        .to_frame("fold")
        .accuracy.tolist()
        for engine in ("serial", "process")
    ]
    assert scores[0] == scores[1]
