"""A grid of parameters: which values reach which part of a call, and the candidates they make.

::

    params={"lr": …, "width": …} ── by name ──┬─ model factories     net      → net/width=64
                                              └─ opt_fn, factories   cosine   → cosine/lr=0.01
                                                 of LR schedules

A model with its values bound is a model like any other, and so is an LR schedule: all that follows
pairs models and LR schedules.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asynckfold.errors import Problem, nearest
from asynckfold.jobs.argument import one_line, plain
from asynckfold.jobs.candidate_names import (
    Value,
    base_of,
    text_of,
    value_of,
    values_of,
    with_values,
)
from asynckfold.jobs.recipe import InitialState

RESERVED = ("model", "criterion", "optimizer", "scheduler")
"""Names of what `AsyncKFold` passes itself, and of columns."""

MOST_TEXT = 60
"""Characters of a value in the name of a candidate."""

DIGITS = 4
"""Significant digits of a drawn number: what the name of a candidate shows is what it got."""

DRAWS = 100
"""Draws for each candidate asked for, before no more are expected."""

Option = tuple[Value, Any]
"""A value under its name, and what the factory gets."""

Combine = Callable[[Sequence[str]], Iterator[dict[str, Option]]]


class Exact(list[Mapping[str, Value]]):
    """Values of the same parameters, each a candidate, in place of a dict of lists."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The factories of a call."""

    models: Mapping[str, Any]
    lr_schedules: Mapping[str, Any]
    opt_fn: Any


@dataclass(frozen=True, eq=False)
class Grid:
    """The parts of a call, with the values of a grid bound.

    `options` hold the values by parameter, drawn ones, too; `models` and `lr_schedules` are by name
    with values, `optimizers` the keywords of ``opt_fn`` by name of the LR schedule, and `pairs` the
    candidates: names of model and LR schedule. `combine` yields the combinations of values of some
    parameters. `renamed` are the names in a run of parts that have another one here.
    """

    given: Parts
    options: Mapping[str, Sequence[Option]] = field(default_factory=dict)
    models: Mapping[str, Any] = field(default_factory=dict)
    lr_schedules: Mapping[str, Any] = field(default_factory=dict)
    optimizers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pairs: tuple[tuple[str, str], ...] = ()
    combine: Combine | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)

    def continuing(self, known: Collection[str]) -> Grid:
        """Return the grid with the names of a run: its parts may lack values that are defaults."""
        if self.combine is None:
            return self
        return _bound(self.given, self.options, self.combine, known)

    def params_for(self, values: Mapping[str, Value]) -> dict[str, Any] | None:
        """Return the ``params`` of a call with these values alone; None without any."""
        params: dict[str, Any] = {}
        for name, value in values.items():
            known, given = next(item for item in self.options[name] if item[0] == value)
            params[name] = [known] if given is known else {known: given}
        return params or None


def make_grid(
    parts: Parts, params: Any, n_iter: Any, random_state: int
) -> tuple[Grid, list[Problem], list[str]]:
    """Return the candidates of a call, what is wrong with `params`, and notes.

    >>> parts = Parts({"net": lambda width=8: width}, {"cosine": "cosine"}, lambda model, lr: lr)
    >>> make_grid(parts, {"lr": [0.1, 0.2], "width": [16]}, None, 0)[0].pairs
    (('net/width=16', 'cosine/lr=0.1'), ('net/width=16', 'cosine/lr=0.2'))
    """
    whole = Grid(parts, {}, parts.models, parts.lr_schedules)
    if params is None and n_iter is None:
        return whole, [], []
    exact = params if isinstance(params, Exact) else []
    if exact:
        params = {name: list(dict.fromkeys(item[name] for item in exact)) for name in exact[0]}
    if not isinstance(params, Mapping) or not params:
        remedy = "Pass for instance params={'lr': [1e-3, 1e-2]}, or leave params out."
        rule = "params must be a dict of name → values"
        return whole, [Problem(rule, one_line(params), remedy)], []
    params = {name: params[name] for name in sorted(params, key=str)}
    problems = [*_name_problems(params, parts), *_n_iter_problems(params, n_iter)]
    drawn = {name: value for name, value in params.items() if _is_distribution(value)}
    listed: dict[str, list[Option]] = {}
    for name, given in params.items():
        if name not in drawn:
            wrong = list(_option_problems(name, given))
            problems += wrong
            named = given if isinstance(given, Mapping) else {}
            listed[name] = [] if wrong else [(v, named.get(v, v)) for v in _listed(given)]
    if problems:
        return whole, problems, []
    if exact:
        draws = [{name: (plain(value),) * 2 for name, value in item.items()} for item in exact]
        return _bound(parts, listed, functools.partial(_projected, draws)), [], []
    if not drawn:
        return _bound(parts, listed, functools.partial(_product, listed)), [], []
    return _sampled(parts, listed, drawn, n_iter, random_state)


def with_model(models: Mapping[str, Any], params: Any, name: str) -> dict[str, Any]:
    """Return models with one of a grid beside them, by its name; without it if it is of another.

    >>> with_model({"net": lambda width: width}, {"width": [16, 64]}, "net/width=64")[
    ...     "net/width=64"]()
    64
    """
    known, given = models.get(base_of(name)), dict[str, Any]()
    for parameter, value in values_of(name).items():
        if known is None or parameter not in (params or {}):
            return dict(models)
        options = params[parameter]
        given[parameter] = options.get(value) if isinstance(options, Mapping) else value
    return {**models, name: _with(known, given)} if given else dict(models)


def _sampled(
    parts: Parts,
    listed: Mapping[str, Sequence[Option]],
    drawn: Mapping[str, Any],
    n_iter: int,
    random_state: int,
) -> tuple[Grid, list[Problem], list[str]]:
    """Return the candidates of drawn values; every model gets the same draws."""
    draws = _drawn(listed, drawn, n_iter, random_state)
    options = {
        name: list({text_of(draw[name][0]): draw[name] for draw in draws}.values())
        for name in sorted([*listed, *drawn])
    }
    few = f"params: {len(draws)} different draws, n_iter={n_iter} asked for"
    notes = [few] if len(draws) < n_iter else []
    return _bound(parts, options, functools.partial(_projected, draws)), [], notes


def _drawn(
    listed: Mapping[str, Sequence[Option]], drawn: Mapping[str, Any], n_iter: int, random_state: int
) -> list[dict[str, Option]]:
    import numpy as np
    from sklearn.model_selection import ParameterSampler

    # A seed distinct from every job's.
    seeds = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([random_state, 2])))
    draws: dict[str, dict[str, Option]] = {}
    for sample in ParameterSampler({**listed, **drawn}, DRAWS * n_iter, random_state=seeds):
        draw = {
            name: (_rounded(value),) * 2 if name in drawn else value
            for name, value in sample.items()
        }
        draws.setdefault(repr([option[0] for option in draw.values()]), draw)
        if len(draws) == n_iter:
            break
    return list(draws.values())


def _rounded(value: Any) -> float | int:
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{one_line(value)} is no number")
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number if isinstance(number, int) else float(f"{number:.{DIGITS}g}")


def _product(
    options: Mapping[str, Sequence[Option]], names: Sequence[str]
) -> Iterator[dict[str, Option]]:
    for values in itertools.product(*(options[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _projected(
    draws: Sequence[Mapping[str, Option]], names: Sequence[str]
) -> Iterator[dict[str, Option]]:
    """Yield the draws of some parameters, each once."""
    projected = ({name: draw[name] for name in names} for draw in draws)
    yield from {repr([option[0] for option in one.values()]): one for one in projected}.values()


def _bound(
    parts: Parts,
    options: Mapping[str, Sequence[Option]],
    combine: Combine,
    known: Collection[str] = (),
) -> Grid:
    takers = _Takers(parts, list(options))
    models: dict[str, Any] = {}
    lr_schedules: dict[str, Any] = {}
    optimizers: dict[str, Mapping[str, Any]] = {}
    renamed: dict[str, str] = {}
    pairs = []

    def named(name: str, chosen: Mapping[str, Option], *factories: Any) -> str:
        values = {parameter: option[0] for parameter, option in chosen.items()}
        full = with_values(name, values)
        if not known or full in known:
            return full
        short = _without_defaults(name, values, _usual(chosen, factories), known)
        if short is not None:
            renamed[full] = short
        return short or full

    for (model, factory), (schedule, spec) in itertools.product(
        parts.models.items(), parts.lr_schedules.items()
    ):
        of_model, of_spec = takers.of_models[model], takers.of_lr_schedules[schedule]
        of_schedule = of_spec | takers.of_opt_fn
        for chosen in combine([name for name in options if name in of_model | of_schedule]):
            pair = (
                named(model, _only(chosen, of_model), factory),
                named(schedule, _only(chosen, of_schedule), spec, parts.opt_fn),
            )
            given = {name: option[1] for name, option in chosen.items()}
            of_part = [_only(given, {*values_of(name)}) for name in pair]
            models[pair[0]] = _with(factory, of_part[0])
            lr_schedules[pair[1]] = _with(spec, _only(of_part[1], of_spec))
            if keywords := _only(of_part[1], takers.of_opt_fn):
                optimizers[pair[1]] = keywords
            pairs.append(pair)
    unique = tuple(dict.fromkeys(pairs))
    return Grid(parts, options, models, lr_schedules, optimizers, unique, combine, renamed)


def _without_defaults(
    base: str, values: Mapping[str, Value], usual: Sequence[str], known: Collection[str]
) -> str | None:
    """Return the known name of a part that lacks some values, which are defaults."""
    for count in range(1, len(usual) + 1):
        for left in itertools.combinations(usual, count):
            name = with_values(base, _only(values, {*values} - {*left}))
            if name in known:
                return name
    return None


def _usual(chosen: Mapping[str, Option], factories: Sequence[Any]) -> list[str]:
    """Return the parameters whose value is the default of each factory that names them."""
    defaults: dict[str, list[Any]] = {name: [] for name in chosen}
    for item in itertools.chain.from_iterable(map(_parameters, factories)):
        if item.name in defaults:
            defaults[item.name].append(item.default)
    return [
        name
        for name, known in defaults.items()
        if known and all(_is_same(chosen[name][1], default) for default in known)
    ]


def _is_same(given: Any, default: Any) -> bool:
    """Whether a value is the default, in any factory: 1 and 1.0 are not the same."""
    if isinstance(given, (bool, int, float, str)):
        return type(given) is type(default) and bool(given == default)
    return given is default


def _only(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _with(factory: Any, keywords: Mapping[str, Any]) -> Any:
    return functools.partial(factory, **keywords) if keywords else factory


class _Takers:
    """Which part takes which parameter.

    A part with ``**kwargs`` takes what no part of another kind names.
    """

    def __init__(self, parts: Parts, names: Sequence[str]) -> None:
        of_models = {name: keywords_of(model, 0) for name, model in parts.models.items()}
        of_opt_fn = {"": keywords_of(parts.opt_fn, 1)}
        of_schedules = {name: keywords_of(spec, 1) for name, spec in parts.lr_schedules.items()}
        kinds = (of_models, of_opt_fn, of_schedules)
        named = [{name for keywords, _ in kind.values() for name in keywords} for kind in kinds]
        self.known = set().union(*named)

        def taken(kind: int) -> dict[str, set[str]]:
            others = set().union(*(named[other] for other in range(len(kinds)) if other != kind))
            return {
                part: {name for name in names if name in keywords or (more and name not in others)}
                for part, (keywords, more) in kinds[kind].items()
            }

        self.of_models, self.of_opt_fn, self.of_lr_schedules = taken(0), taken(1)[""], taken(2)
        every = (*self.of_models.values(), self.of_opt_fn, *self.of_lr_schedules.values())
        self.taken = set().union(*every)


def _parameters(function: Any) -> list[inspect.Parameter]:
    if isinstance(function, (str, InitialState)) or not callable(function):
        return []
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []  # of C code


def keywords_of(function: Any, passed: int) -> tuple[set[str], bool]:
    """Return the keywords of a factory but for what is `passed`, and whether it takes any."""
    parameters = _parameters(function)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {item.name for item in parameters[passed:] if item.kind in by_name}
    return named, any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters)


def _is_distribution(value: Any) -> bool:
    return callable(getattr(value, "rvs", None))


def _name_problems(params: Mapping[Any, Any], parts: Parts) -> Iterator[Problem]:
    takers = _Takers(parts, [name for name in params if isinstance(name, str)])
    passed = {
        item.name
        for function in (parts.opt_fn, *parts.lr_schedules.values())
        for item in _parameters(function)[:1]
    }
    for name in params:
        if name in RESERVED or name in passed:
            yield Problem(
                "names in params must differ from what AsyncKFold passes itself",
                repr(name),
                "Rename the parameter of the factory.",
            )
        elif name not in takers.taken:
            known = ", ".join(sorted(takers.known - passed - {*RESERVED})) or "none"
            yield Problem(
                "each name in params must be a parameter of a model, opt_fn or LR schedule",
                one_line(name),
                f"{nearest(str(name), takers.known).strip()} Known: {known}.".strip(),
            )


def _n_iter_problems(params: Mapping[Any, Any], n_iter: Any) -> Iterator[Problem]:
    drawn = [str(name) for name, value in params.items() if _is_distribution(value)]
    count = plain(n_iter)
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        rule = "n_iter must be a whole number of at least 1"
        yield Problem(rule, one_line(n_iter), "Pass n_iter=20, or leave it out.")
    elif bool(drawn) != (count is not None):
        yield Problem(
            "n_iter is the number of draws from distributions",
            f"n_iter={count}, and distributions of {', '.join(drawn) or 'nothing'}",
            "Pass both, such as n_iter=20 and scipy.stats.loguniform(1e-4, 1e-1), or neither.",
        )


def _listed(given: Any) -> list[Any]:
    return [plain(value) for value in (given.tolist() if hasattr(given, "tolist") else given)]


def _option_problems(name: Any, given: Any) -> Iterator[Problem]:
    """Yield what is wrong with the values of one parameter."""
    listed = isinstance(given, (Sequence, Mapping)) or hasattr(given, "tolist")
    is_listed = listed and not isinstance(given, (str, bytes)) and getattr(given, "ndim", 1) == 1
    values = _listed(given) if is_listed else []
    if not values:
        yield Problem(
            f"params[{name!r}] must be a list of values, a dict of name → value, or a "
            "distribution of scipy.stats",
            one_line(given),
            f"Pass [{one_line(given)}] for one value, or leave {name} out.",
        )
    for place, value in enumerate(values):
        if not _is_plain(value) or (isinstance(given, Mapping) and type(value) is not str):
            yield Problem(
                f"values in params[{name!r}] must be finite numbers, True, False, None, or texts "
                f"of at most {MOST_TEXT} characters that read as none of these",
                f"{one_line(value, 80)} of type {type(value).__name__}",
                "Pass a dict of name → value, such as {'relu': nn.ReLU}.",
            )
        elif any(value == other for other in values[:place]):
            rule = f"values in params[{name!r}] must differ"
            yield Problem(rule, f"{one_line(value)} twice", "Drop one of the two.")


def _is_plain(value: Any) -> bool:
    """Whether a value can be part of a name."""
    if not isinstance(value, (bool, int, float, str, type(None))):
        return False
    text = text_of(value)
    is_short = bool(text.strip()) and len(text) <= MOST_TEXT
    return is_short and value_of(text) == value and type(value_of(text)) is type(value)
