"""The live objects of a sweep: named, checked and packed.

Models, LR schedules, the optimizer function and the criterion travel to the workers by value
(cloudpickle), so lambdas, notebook cells and definitions in ``__main__`` work. What cannot be sent
is reported by its attribute path before work starts.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import itertools
import operator
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from asynckfold.errors import InputError, Problem, nearest

LR_SCHEDULES = (
    "constant",
    "cosine",
    "exponential",
    "multistep",
    "onecycle",
    "reduce",
    "step",
    "warm",
)

STANDARDIZE = "standardize"
"""Targets to mean 0 and standard deviation 1, by scikit-learn's StandardScaler."""

_NO_NAME = re.compile(r"[/\\\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, eq=False)
class Recipe:
    """The live objects that every job is made of."""

    models: Mapping[str, Callable[[], Any]]  # name → factory without arguments
    # name → built-in name, or optimizer → LR schedule
    lr_schedules: Mapping[str, str | Callable[[Any], Any]]
    opt_fn: Callable[..., Any]  # model → optimizer; see `opt_fn_for`
    # (outputs, targets) → scalar loss; copied for each job
    criterion: Callable[..., Any]
    # unfitted scikit-learn transformer, cloned and fitted on what each job trains on
    preprocess: Any = None
    # the same for targets, with an inverse; or `STANDARDIZE`
    target_transform: Any = None
    # (model, batch, state) → loss, in place of criterion(model(inputs), targets)
    training_step: Callable[..., Any] | None = None
    # (model, batch, state) → measures of the held-out fold
    validation_step: Callable[..., Any] | None = None
    # trains a whole job, given its `user_loop.Context`
    fit_fn: Callable[[Any], Any] | None = None
    # what is called in the built-in loop; copied for each job
    callbacks: tuple[Any, ...] = ()
    # train_targets → criterion of a training fold, in place of one for all
    make_criterion: Callable[[Any], Any] | None = None
    # weights of all samples, "balanced", or train_targets → weights or a torch Sampler
    sampler: Any = None
    # LR-schedule name → keywords of opt_fn, with a grid
    optimizers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # (model, LR schedule) of each candidate; empty: every model with every LR schedule
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def candidates(self) -> tuple[tuple[str, str], ...]:
        """Names of model and LR schedule of each candidate."""
        return self.pairs or tuple(itertools.product(self.models, self.lr_schedules))


@dataclass(frozen=True)
class InitialState:
    """A model factory made of an instance: each job starts from a copy of its weights."""

    module: Any

    @classmethod
    def of(cls, module: Any) -> InitialState:
        """Return a factory of copies of a module as it is now.

        Raises
        ------
        InputError
            It cannot be copied.
        """
        try:
            # Lazy modules get their weights in the first forward.
            if any(hasattr(item, "materialize") for item in module.state_dict().values()):
                raise ValueError("its layers have no shape before a forward")
            return cls(copy.deepcopy(module))
        except Exception as error:
            raise InputError.one(
                "a model given as an instance must be copied with its weights",
                f"{type(module).__name__}: {type(error).__name__}: {error!s:.200}",
                "Pass the class, or a function that makes the model: each job then makes its own.",
            ) from error

    def __call__(self) -> Any:
        """Return a deep copy of the module."""
        return copy.deepcopy(self.module)


def named_models(models: Any) -> tuple[dict[str, Callable[[], Any]], list[Problem], list[str]]:
    """Give each model a name; return factories by name, problems, and notes.

    Takes a class, callable, module instance, sequence of these, or mapping of name to these.

    >>> named_models([dict, list])[0]
    {'dict': <class 'dict'>, 'list': <class 'list'>}
    >>> [str(problem) for problem in named_models([dict, dict])[1]]
    ["model names must differ: received 'dict' twice. Pass a dict of name → callable."]
    """
    pairs = list(_pairs(models))
    problems, notes = [*_name_problems([name for name, _ in pairs], "model")], []
    named: dict[str, Callable[[], Any]] = {}
    for name, model in pairs:
        if _is_module_instance(model):
            try:
                named[name] = InitialState.of(model)
            except InputError as error:
                problems += error.problems
            notes.append(
                f"model {name} was given as an instance: every job starts from a copy of its "
                "current weights; pass the class to initialise each fold separately"
            )
        elif callable(model):
            named[name] = model
        else:
            rule = "a model must be a class or a function without arguments"
            received = f"{model!r:.80} of type {type(model).__name__}"
            remedy = "Pass for instance models=[LeNet5] or {'wide': lambda: Net(256)}."
            problems.append(Problem(rule, received, remedy))
    if not pairs:
        problems.append(Problem("there must be a model", repr(models), "Pass models=[LeNet5]."))
    return named, problems, notes


def named_lr_schedules(
    schedulers: Any,
) -> tuple[dict[str, str | Callable[[Any], Any]], list[Problem]]:
    """Give each LR schedule a name; return them by name, and problems.

    Takes a name, callable, sequence of these, or mapping of name to these.

    >>> named_lr_schedules(["cosine", "warm"])[0]
    {'cosine': 'cosine', 'warm': 'warm'}
    >>> named_lr_schedules("cosin")[1][0].remedy[:22]
    "Did you mean 'cosine'?"
    """
    pairs = list(_pairs(schedulers))
    problems = [*_name_problems([name for name, _ in pairs], "LR schedule")]
    for _, schedule in pairs:
        if schedule not in LR_SCHEDULES if isinstance(schedule, str) else not callable(schedule):
            problems.append(
                Problem(
                    "an LR schedule must be a known name or a function optimizer → LR schedule",
                    f"{schedule!r:.80}",
                    f"{nearest(str(schedule), LR_SCHEDULES).strip()} Valid: "
                    f"{', '.join(LR_SCHEDULES)}.".strip(),
                )
            )
    if not pairs:
        rule, remedy = "there must be an LR schedule", "Pass schedulers=['cosine']."
        problems.append(Problem(rule, repr(schedulers), remedy))
    return dict(pairs), problems


def _pairs(given: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(given, Mapping):
        yield from ((str(name), value) for name, value in given.items())
        return
    many = isinstance(given, Sequence) and not isinstance(given, str)
    for position, value in enumerate(given if many else [given]):
        yield _name_of(value, position), value


def _name_of(value: Any, position: int) -> str:
    if isinstance(value, str):
        return value
    while isinstance(value, functools.partial):
        value = value.func
    name = getattr(value, "__name__", None) or type(value).__name__
    return f"lambda{position}" if name == "<lambda>" else str(name)


def _is_module_instance(value: Any) -> bool:
    return (
        not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "forward")
    )


def _name_problems(names: Sequence[str], what: str) -> Iterator[Problem]:
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            rule, remedy = f"{what} names must differ", "Pass a dict of name → callable."
            yield Problem(rule, f"{name!r} twice", remedy)
        is_odd = not name.strip() or len(name) > 200 or name in (".", "..")
        if is_odd or _NO_NAME.search(name):
            yield Problem(
                f"a {what} name must have 1 to 200 characters, stay in the run's folder, and hold "
                "no slashes and no control characters",
                f"{name!r:.80}",
                "Choose a plain name.",
            )


def pack(value: Any) -> bytes:
    """Pickle by value, including lambdas and definitions of ``__main__``."""
    with io.BytesIO() as file:
        dump(value, file)
        return file.getvalue()


def dump(value: Any, file: Any) -> None:
    """Write what `pack` returns into a file."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Pickles modules of a subclass by name, such as ``torch.backends``."""

        def reducer_override(self, obj: Any) -> Any:
            # issubclass of the type, since isinstance may run code of a proxy.
            if issubclass(type(obj), ModuleType) and type(obj) is not ModuleType:
                name = vars(obj).get("__name__")
                if sys.modules.get(name) is obj:
                    return importlib.import_module, (name,)
            if type(obj) is weakref.WeakKeyDictionary:  # of functools.singledispatch
                return weakref.WeakKeyDictionary, (dict(obj),)
            if type(obj) is contextlib._GeneratorContextManager:  # used as a decorator
                return type(obj), (obj.func, obj.args, obj.kwds)
            if type(obj) is functools.cached_property:  # up to Python 3.11, it holds a lock
                return _cached_property, (obj.func, obj.attrname)
            if isinstance(obj, functools._lru_cache_wrapper) and not _is_imported(obj):
                return _cached, (obj.__wrapped__, obj.cache_parameters())
            if type(obj) is CodeType:
                # Tracebacks are to name the user's file, which cloudpickle leaves out since 3.1.
                made, parts = self.dispatch_table[CodeType](obj)
                file = obj.co_filename
                named = (file if part == "<dynamic-code>" else part for part in parts)
                return made, tuple(named)
            return super().reducer_override(obj)

    # The script of a process that multiprocessing has spawned: no other process imports it by name.
    if (spawned := sys.modules.get("__mp_main__")) is not None:
        cloudpickle.register_pickle_by_value(spawned)
    Pickler(file).dump(value)


def _cached(function: Any, parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _cached_property(function: Any, name: str) -> Any:
    made = functools.cached_property(function)
    made.__set_name__(type(None), name)
    return made


def _is_imported(value: Any) -> bool:
    """Whether another process finds a value under its name in a module that it imports."""
    import cloudpickle

    name = value.__module__
    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    if any(f"{name}.".startswith(f"{package}.") for package in by_value):
        return False
    try:
        return operator.attrgetter(value.__qualname__)(sys.modules[name]) is value
    except (AttributeError, KeyError):
        return False


def sending_problems(parts: Mapping[str, Any]) -> list[Problem]:
    """Report by attribute path what cannot be sent to a worker.

    >>> import threading
    >>> class Loss:
    ...     def __init__(self):
    ...         self.guard = threading.Lock()
    >>> print(sending_problems({"criterion": Loss()})[0])  # doctest: +ELLIPSIS
    criterion must be sendable to a worker process: received criterion.guard: ...
    """
    problems = []
    remedy = (
        "Create it inside a function instead of holding it, or drop it when pickled (__getstate__)."
    )
    for name, value in parts.items():
        reason = _refusal(value)
        if reason is not None:
            path, reason = _deepest(value, name, reason, depth=6)
            rule = f"{name} must be sendable to a worker process"
            problems.append(Problem(rule, f"{path}: {reason}", remedy))
    return problems


def _refusal(value: Any) -> str | None:
    # Pickling runs the user's __reduce__ and __getstate__, which may raise anything; whatever
    # they raise is the answer to the question that is asked here.
    try:
        pack(value)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return None


def _deepest(value: Any, path: str, reason: str, depth: int) -> tuple[str, str]:
    for name, part in parts_of(value) if depth else ():
        inner = _refusal(part)
        if inner is not None:
            return _deepest(part, f"{path}{name}", inner, depth - 1)
    return path, reason


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is pickled with a value, and the path to it."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield from ((f".args[{index}]", part) for index, part in enumerate(value.args))
        yield from ((f".keywords[{key!r}]", part) for key, part in value.keywords.items())
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, type):
        yield from _class_parts(value)
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
        yield ".__class__", type(value)


def _function_parts(function: FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        # A cell is empty until its variable is assigned.
        with contextlib.suppress(ValueError):
            yield f".{name}", cell.cell_contents
    scope = function.__globals__
    names = dict.fromkeys(_global_names(function.__code__))
    yield from ((f".{name}", scope[name]) for name in names if name in scope)
    for index, part in enumerate(function.__defaults__ or ()):
        yield f".__defaults__[{index}]", part
    yield ".__kwdefaults__", function.__kwdefaults__
    yield from ((f".{name}", part) for name, part in vars(function).items())


def _global_names(code: CodeType) -> Iterator[str]:
    """Names that a function may look up, also in functions defined inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _class_parts(kind: type) -> Iterator[tuple[str, Any]]:
    for name, part in vars(kind).items():
        if isinstance(part, FunctionType) or not name.startswith("__"):
            yield f".{name}", part
    yield from ((".__bases__", base) for base in kind.__bases__)
