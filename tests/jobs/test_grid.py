"""Which candidates a grid makes, and what it refuses."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from asynckfold.jobs.candidate_names import candidate_name, text_of, value_of, values_of
from asynckfold.jobs.grid import Grid, Parts, make_grid


def net(width: int = 8) -> str:
    return f"net of {width}"


def plain() -> str:
    return "plain"


def opt_fn(model: Any, lr: float = 0.1) -> tuple[Any, float]:
    return model, lr


def falling(optimizer: Any, gamma: float = 0.9) -> tuple[Any, float]:
    return optimizer, gamma


def grid_of(
    params: Any, n_iter: Any = None, seed: int = 0, opt_fn: Any = opt_fn, **models: Any
) -> tuple[Grid, list[str]]:
    parts = Parts(models or {"net": net}, {"cosine": "cosine"}, opt_fn)
    found, problems, _ = make_grid(parts, params, n_iter, seed)
    return found, list(map(str, problems))


def names(grid: Grid) -> list[str]:
    return [candidate_name(*pair) for pair in grid.pairs]


def test_values_reach_the_parameters_of_their_name() -> None:
    parts = Parts({"net": net, "plain": plain}, {"cosine": "cosine", "falling": falling}, opt_fn)
    params = {"width": [16, 64], "lr": [1e-3], "gamma": [0.5, 0.7]}
    grid, problems, notes = make_grid(parts, params, None, 0)
    assert not problems + notes
    assert names(grid) == [
        "net/cosine/lr=0.001,width=16",
        "net/cosine/lr=0.001,width=64",
        "net/falling/gamma=0.5,lr=0.001,width=16",
        "net/falling/gamma=0.5,lr=0.001,width=64",
        "net/falling/gamma=0.7,lr=0.001,width=16",
        "net/falling/gamma=0.7,lr=0.001,width=64",
        "plain/cosine/lr=0.001",
        "plain/falling/gamma=0.5,lr=0.001",
        "plain/falling/gamma=0.7,lr=0.001",
    ]
    assert grid.models["net/width=64"]() == "net of 64"
    assert grid.models["plain"] is plain
    assert grid.lr_schedules["falling/gamma=0.7,lr=0.001"]("own") == ("own", 0.7)
    assert grid.lr_schedules["cosine/lr=0.001"] == "cosine"
    assert grid.optimizers["cosine/lr=0.001"] == {"lr": 1e-3}


def test_a_value_that_two_parts_take_is_the_same_in_both() -> None:
    def wide(lr: float) -> float:
        return lr

    grid, _ = grid_of({"lr": [0.1, 0.2]}, wide=wide)
    assert grid.pairs == (("wide/lr=0.1", "cosine/lr=0.1"), ("wide/lr=0.2", "cosine/lr=0.2"))
    assert names(grid) == ["wide/cosine/lr=0.1", "wide/cosine/lr=0.2"]


def test_kwargs_take_what_no_part_of_another_kind_names() -> None:
    grid, _ = grid_of({"lr": [0.1], "depth": [2]}, open=lambda **kwargs: kwargs)
    assert grid.models["open/depth=2"]() == {"depth": 2}
    # Of models, all that have the parameter or kwargs take it.
    assert names(grid_of({"width": [1]}, net=net, open=lambda **more: more)[0]) == [
        "net/cosine/width=1",
        "open/cosine/width=1",
    ]


def test_a_dict_names_objects() -> None:
    grid, _ = grid_of({"width": {"small": (4, 4), "large": (9, 9)}})
    assert names(grid) == ["net/cosine/width=small", "net/cosine/width=large"]
    assert grid.models["net/width=large"]() == "net of (9, 9)"
    assert grid.params_for({"width": "large"}) == {"width": {"large": (9, 9)}}


def test_a_bound_partial_and_arrays_do_as_well() -> None:
    grid, _ = grid_of({"width": np.array([2, 4])}, net=functools.partial(net, width=1))
    assert [factory() for factory in grid.models.values()] == ["net of 2", "net of 4"]


def test_the_order_of_names_does_not_matter() -> None:
    one, _ = grid_of({"lr": [1, 2], "width": [3, 4]})
    two, _ = grid_of({"width": [3, 4], "lr": [1, 2]})
    assert one.pairs == two.pairs


def test_draws_are_seeded_and_every_model_gets_the_same() -> None:
    params = {"lr": stats.loguniform(1e-4, 1e-1), "width": [8, 16, 32]}
    grid, problems = grid_of(params, 6, net=net, plain=plain)
    assert not problems
    assert grid.pairs == grid_of(params, 6, net=net, plain=plain)[0].pairs
    assert grid.pairs != grid_of(params, 6, 1, net=net, plain=plain)[0].pairs
    drawn = {
        name: [values_of(*pair)["lr"] for pair in grid.pairs if pair[0].startswith(name)]
        for name in ("net", "plain")
    }
    assert drawn["net"] == drawn["plain"]
    assert len(set(drawn["net"])) == 6
    assert all(1e-4 <= float(str(rate)) <= 1e-1 for rate in drawn["net"])
    # What the name says is what the optimizer gets.
    for name, keywords in grid.optimizers.items():
        assert keywords == values_of(name)


def test_fewer_draws_than_asked_for_are_told() -> None:
    parts = Parts({"net": net}, {"cosine": "cosine"}, opt_fn)
    grid, problems, notes = make_grid(parts, {"width": stats.randint(1, 4)}, 9, 0)
    assert not problems
    assert len(grid.pairs) == 3
    assert notes == ["params: 3 different draws, n_iter=9 asked for"]


@pytest.mark.parametrize(
    ("params", "n_iter", "told"),
    [
        ([1], None, "params must be a dict of name → values: received [1]"),
        ({}, None, "params must be a dict"),
        (None, 3, "params must be a dict"),
        ({"widht": [1]}, None, "Did you mean 'width'? Known: lr, width."),
        ({"model": [1]}, None, "must differ from what AsyncKFold passes itself"),
        ({"optimizer": [1]}, None, "must differ from what AsyncKFold passes itself"),
        ({"own": [1]}, None, "must differ from what AsyncKFold passes itself: received 'own'"),
        ({1: [1]}, None, "must be names of parameters: received 1"),
        ({"lr": []}, None, "params['lr'] must have a value"),
        ({"lr": 0.1}, None, "must be a list of values, a dict of name → value, or a distribution"),
        ({"lr": "0.1"}, None, "must be a list of values"),
        ({"lr": np.ones((2, 2))}, None, "must be a list of values"),
        ({"lr": [0.1, 0.1]}, None, "must differ: received 0.1 twice"),
        ({"lr": [1, 1.0]}, None, "must differ: received 1.0 twice"),
        ({"lr": [1, True]}, None, "must differ: received True twice"),
        ({"lr": ["a", "a"]}, None, "must differ: received 'a' twice"),
        ({"lr": [float("nan")]}, None, "Pass a finite number"),
        ({"lr": [float("inf")]}, None, "Pass a finite number"),
        ({"lr": [10**30]}, None, "Pass a finite number"),
        ({"lr": [(1, 2)]}, None, "of type tuple. Pass a dict of name → value"),
        ({"lr": ["0.5"]}, None, "which reads as float. Pass a dict of name → value"),
        ({"lr": ["None"]}, None, "which reads as NoneType"),
        ({"lr": ["x" * 99]}, None, "of 99 characters. Pass a dict"),
        ({"lr": {1: 2}}, None, "names of values in params['lr'] must be strings"),
        ({"lr": stats.norm()}, None, "a distribution needs n_iter"),
        ({"lr": [0.1]}, 3, "n_iter draws from distributions"),
        ({"lr": stats.norm()}, 0, "n_iter must be a whole number of at least 1"),
        ({"lr": stats.norm()}, True, "n_iter must be a whole number of at least 1"),
        ({"lr": stats.norm(loc=np.nan)}, 2, "distributions must draw numbers"),
    ],
)  # fmt: skip
def test_what_a_grid_refuses(params: Any, n_iter: Any, told: str) -> None:
    def named(own: Any, lr: float = 0.1) -> Any:
        return own, lr

    _, problems = grid_of(params, n_iter, opt_fn=named)
    assert len(problems) == 1, problems
    assert told in problems[0]


def test_all_problems_come_at_once() -> None:
    _, problems = grid_of({"rl": [1], "lr": [], "width": stats.randint(1, 4)})
    assert len(problems) == 3


@given(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**15), 10**15),
        st.floats(allow_nan=False, allow_infinity=False),
    )
)
def test_numbers_are_read_back_from_a_name(value: Any) -> None:
    again = value_of(text_of(value))
    assert again == value
    assert type(again) is type(value)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.text(min_size=1, max_size=8)))
def test_strings_are_read_back_or_refused(values: dict[str, str]) -> None:
    lists = {name: [value] for name, value in values.items()}
    grid, problems = grid_of(lists or None, open=lambda **kwargs: kwargs)
    if problems or not values:
        assert bool(problems) is bool(values)
        return
    (pair,) = grid.pairs
    assert values_of(*pair) == values
    assert grid.models[pair[0]]() == values
    assert candidate_name(*pair).count("/") == 2
