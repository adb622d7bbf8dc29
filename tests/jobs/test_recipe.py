"""Names of live objects, and what cannot be sent to a worker."""

from __future__ import annotations

import functools
import pickle
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn, optim

from asynckfold import InputError
from asynckfold.jobs.recipe import pack, sending_problems
from tests.here import planned


class Net(nn.Linear):
    def __init__(self, width: int = 2) -> None:
        super().__init__(3, width)

    @classmethod
    def wide(cls) -> Net:
        return cls(8)


def make_net() -> nn.Module:
    return Net()


class Factory:
    def __call__(self) -> nn.Module:
        return Net()


# ---- names of models ----


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (Net, ["Net"]),
        ([Net], ["Net"]),
        ((Net, make_net), ["Net", "make_net"]),
        ([Net, lambda: Net(), lambda: Net(4)], ["Net", "lambda1", "lambda2"]),
        (functools.partial(Net, 4), ["Net"]),
        (functools.partial(functools.partial(make_net)), ["make_net"]),
        ([Net.wide], ["wide"]),
        ([Factory()], ["Factory"]),
        ({"small": Net, "large": functools.partial(Net, 9)}, ["small", "large"]),
        ({1: Net, 2.5: make_net}, ["1", "2.5"]),
        ({"Größe 3 ✓": Net}, ["Größe 3 ✓"]),
    ],
)
def test_models_are_named_as_the_user_calls_them(given: Any, names: list[str]) -> None:
    assert [model for model, _ in planned(given).candidates] == names


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([Net, Net], "model names must differ: received 'Net' twice."),
        ([Net, functools.partial(Net, 3)], "model names must differ: received 'Net' twice."),
        ([Net(), Net()], "model names must differ: received 'Net' twice."),
        ([], "there must be a model: received []."),
        ({}, "there must be a model: received {}."),
        (3, "a model must be a class or a function without arguments: received 3 of type int."),
        (["LeNet5"], "a model must be a class or a function without arguments: received 'LeNet5'"),
        ({"": Net}, "a model name must have 1 to"),
        ({" ": Net}, "a model name must have 1 to"),
        ({"a/b": Net}, "received 'a/b'"),
        ({"..": Net}, "received '..'"),
        ({"a\\b": Net}, "received 'a\\\\b'"),
        ({"a\n": Net}, "received 'a\\n'"),
        ({"x" * 201: Net}, "a model name must have 1 to 200 characters"),
    ],
)
def test_odd_models_are_refused(given: Any, text: str) -> None:
    with pytest.raises(InputError) as caught:
        planned(given)
    assert text in str(caught.value)
    assert len(caught.value.problems) == 1


# ---- names of LR schedules ----


def halve(optimizer: Any) -> Any:
    return optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("cosine", ["cosine"]),
        (["cosine", "reduce", "multistep"], ["cosine", "reduce", "multistep"]),
        (halve, ["halve"]),
        ([halve, "warm", lambda optimizer: None], ["halve", "warm", "lambda2"]),
        ({"fast": halve, "slow": "step"}, ["fast", "slow"]),
        (functools.partial(optim.lr_scheduler.StepLR, step_size=3), ["StepLR"]),
    ],
)
def test_schedules_are_named(given: Any, names: list[str]) -> None:
    assert [schedule for _, schedule in planned(Net, given).candidates] == names


@pytest.mark.parametrize("word", ["cosin", "Cosine", "cosinus", "one_cycle", "multi-step"])
def test_an_unknown_schedule_is_told_with_the_nearest_and_all_valid_names(word: str) -> None:
    with pytest.raises(InputError) as caught:
        planned(Net, [word])
    (problem,) = caught.value.problems
    assert problem.received == repr(word)
    assert "Did you mean '" in problem.remedy
    assert "constant, cosine, exponential, multistep, onecycle, reduce" in problem.remedy


# ---- sending ----

LOCK = threading.Lock()


class Held:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def call(self, *arguments: Any) -> Any:
        return self.inner

    __call__ = call


def closing_over(value: Any) -> Callable[[], Any]:
    return lambda: value


def local_class(value: Any) -> type:
    class Local:
        guard = value

        def __call__(self) -> Any:
            return self.guard

    return Local


PATHS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (Held, "part.inner"),
    "dict": (lambda lock: Held({"a": {"b": lock}}), "part.inner['a']['b']"),
    "closure": (closing_over, "part.value"),
    "partial argument": (lambda lock: functools.partial(print, lock), "part.args[0]"),
    "method": (lambda lock: Held(lock).call, "part.__self__.inner"),
    "class attribute": (local_class, "part.guard"),
    "instance of such a class": (lambda lock: local_class(lock)(), "part.__class__.guard"),
}


def unsent(part: Any) -> str:
    """Return why a part cannot be sent to workers."""
    with pytest.raises(InputError) as caught:
        planned({"part": part}, parallelize=True)
    (problem,) = caught.value.problems
    assert problem.rule == "model part must be sendable to a worker process"
    return problem.received.removeprefix("model ")


def test_what_cannot_be_sent_is_named_by_its_path() -> None:
    for make, path in PATHS.values():
        received = unsent(make(threading.Lock()))
        assert received.startswith(f"{path}: TypeError: cannot pickle '_thread.lock' object")
        assert planned({"part": make(3)}, parallelize=True)


def test_a_global_of_the_users_script_is_named() -> None:
    scope: dict[str, Any] = {"__name__": "__main__", "LOCK": threading.Lock()}
    exec(
        "class Model:\n"
        "    def forward(self):\n"
        "        return [(lambda: LOCK)() for _ in range(3)]\n"
        "def part():\n"
        "    return Model()\n",
        scope,
    )
    assert unsent(scope["part"]).startswith("part.Model.forward.LOCK: TypeError: cannot pickle")


def test_a_part_that_raises_anything_when_packed_is_refused() -> None:
    class Odd:
        def __getstate__(self) -> Any:
            raise LookupError("no state today")

    assert unsent(Held(Odd())) == "part.inner: LookupError: no state today"
    held = Held(None)
    held.inner = [held, threading.Lock()]
    assert unsent(held).startswith("part.inner")


def with_tf32() -> nn.Module:
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    return nn.Linear(1, 1)


def test_a_function_that_mentions_the_backends_of_torch_is_sendable() -> None:
    """They are modules of classes of their own, which cloudpickle takes for objects."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        assert sending_problems({"opt_fn": with_tf32}) == []
        again = pickle.loads(pack([with_tf32, torch.backends.cudnn]))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert isinstance(again[0](), nn.Linear)
    assert again[1] is torch.backends.cudnn


def test_a_traceback_of_what_was_sent_names_the_users_file_and_line() -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def model():\n    return 1 / 0\n", "/home/ann/net.py", "exec"), scope)
    model = pickle.loads(pack(scope["model"]))
    with pytest.raises(ZeroDivisionError) as found:
        model()
    last = found.traceback[-1].frame.code.raw
    assert (last.co_filename, found.traceback[-1].lineno + 1) == ("/home/ann/net.py", 2)


def test_what_a_process_of_multiprocessing_took_from_its_script_is_sent_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = ModuleType("__mp_main__")
    exec("class Own:\n    number = 7", vars(script))
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    packed = pack(vars(script)["Own"])
    cloudpickle.unregister_pickle_by_value(script)
    monkeypatch.delitem(sys.modules, "__mp_main__")
    assert pickle.loads(packed).number == 7
