"""Which candidates a grid makes, and what it refuses."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn, optim

from asynckfold import InputError, Plan
from tests.here import planned


def net(width: int = 8) -> nn.Module:
    return nn.Linear(3, width)


def plain() -> nn.Module:
    return nn.Linear(3, 2)


def opt_fn(model: Any, lr: float = 0.1) -> Any:
    return optim.SGD(model.parameters(), lr)


def falling(optimizer: Any, gamma: float = 0.9) -> Any:
    return optim.lr_scheduler.ExponentialLR(optimizer, gamma)


def grid_of(
    params: Any, n_iter: Any = None, seed: int = 0, opt_fn: Any = opt_fn, **models: Any
) -> Plan:
    given = models or {"net": net}
    return planned(given, "cosine", opt_fn, params, n_iter, random_state=seed)


def names(plan: Plan) -> list[str]:
    return list(plan.candidate_names)


def test_values_reach_the_parameters_of_their_name() -> None:
    plan = planned(
        {"net": net, "plain": plain},
        {"cosine": "cosine", "falling": falling},
        opt_fn,
        {"width": [16, 64], "lr": [1e-3], "gamma": [0.5, 0.7]},
    )
    assert names(plan) == [
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


def test_a_value_that_two_parts_take_is_the_same_in_both() -> None:
    plan = grid_of({"lr": [0.1, 0.2]}, wide=lambda lr: nn.Linear(3, 2))
    assert plan.candidates == (("wide/lr=0.1", "cosine/lr=0.1"), ("wide/lr=0.2", "cosine/lr=0.2"))
    assert names(plan) == ["wide/cosine/lr=0.1", "wide/cosine/lr=0.2"]


def test_kwargs_take_what_no_part_of_another_kind_names() -> None:
    plan = grid_of({"lr": [0.1], "depth": [2]}, open=lambda **kwargs: kwargs)
    assert plan.candidates == (("open/depth=2", "cosine/lr=0.1"),)
    # Of models, all that have the parameter or kwargs take it.
    assert names(grid_of({"width": [1]}, net=net, open=lambda **more: more)) == [
        "net/cosine/width=1",
        "open/cosine/width=1",
    ]


def test_a_dict_names_objects_and_partials_and_arrays_do_as_well() -> None:
    assert names(grid_of({"width": {"small": (4, 4), "large": (9, 9)}})) == [
        "net/cosine/width=small",
        "net/cosine/width=large",
    ]
    plan = grid_of({"width": np.array([2, 4])}, net=functools.partial(net, width=1))
    assert [job.params for job in plan.jobs[::2]] == [{"width": 2}, {"width": 4}]


def test_the_order_of_names_does_not_matter() -> None:
    one = grid_of({"lr": [1, 2], "width": [3, 4]})
    assert one.jobs == grid_of({"width": [3, 4], "lr": [1, 2]}).jobs


def test_draws_are_seeded_and_every_model_gets_the_same() -> None:
    params = {"lr": stats.loguniform(1e-4, 1e-1), "width": [8, 16, 32]}
    plan = grid_of(params, 6, net=net, plain=plain)
    assert names(plan) == names(grid_of(params, 6, net=net, plain=plain))
    assert names(plan) != names(grid_of(params, 6, 1, net=net, plain=plain))
    drawn = {
        name: [job.params["lr"] for job in plan.jobs[::2] if job.model.startswith(name)]
        for name in ("net", "plain")
    }
    assert drawn["net"] == drawn["plain"]
    assert len(set(drawn["net"])) == 6
    assert all(1e-4 <= float(str(rate)) <= 1e-1 for rate in drawn["net"])
    # There are no more.
    assert len(names(grid_of({"width": stats.randint(1, 4)}, 9))) == 3


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
        ({1: [1]}, None, "must be a parameter of a model, opt_fn or LR schedule: received 1"),
        ({"lr": []}, None, "params['lr'] must be a list of values"),
        ({"lr": 0.1}, None, "must be a list of values, a dict of name → value, or a distribution"),
        ({"lr": "0.1"}, None, "must be a list of values"),
        ({"lr": np.ones((2, 2))}, None, "must be a list of values"),
        ({"lr": [0.1, 0.1]}, None, "must differ: received 0.1 twice"),
        ({"lr": [1, 1.0]}, None, "must differ: received 1.0 twice"),
        ({"lr": [1, True]}, None, "must differ: received True twice"),
        ({"lr": ["a", "a"]}, None, "must differ: received 'a' twice"),
        ({"lr": [float("nan")]}, None, "must be finite numbers"),
        ({"lr": [10**30]}, None, "must be finite numbers"),
        ({"lr": [(1, 2)]}, None, "(1, 2) of type tuple. Pass a dict of name → value"),
        ({"lr": ["0.5"]}, None, "'0.5' of type str. Pass a dict of name → value"),
        ({"lr": ["x" * 99]}, None, "texts of at most 60 characters"),
        ({"lr": {1: 2}}, None, "1 of type int. Pass a dict"),
        ({"lr": stats.norm()}, None, "received n_iter=None, and distributions of lr"),
        ({"lr": [0.1]}, 3, "received n_iter=3, and distributions of nothing"),
        ({"lr": stats.norm()}, 0, "n_iter must be a whole number of at least 1"),
        ({"lr": stats.norm()}, True, "n_iter must be a whole number of at least 1"),
    ],
)  # fmt: skip
def test_what_a_grid_refuses(params: Any, n_iter: Any, told: str) -> None:
    def named(own: Any, lr: float = 0.1) -> Any:
        return optim.SGD(own.parameters(), lr)

    with pytest.raises(InputError) as caught:
        grid_of(params, n_iter, opt_fn=named)
    assert len(caught.value.problems) == 1
    assert told in str(caught.value)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(InputError) as caught:
        grid_of({"rl": [1], "lr": [], "width": stats.randint(1, 4)})
    assert len(caught.value.problems) == 3


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**15), 10**15),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(min_size=1, max_size=8),
)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES, min_size=1))
def test_values_are_read_back_from_names_or_refused(values: dict[str, Any]) -> None:
    try:
        plan = grid_of(
            {name: [value] for name, value in values.items()}, open=lambda **kwargs: kwargs
        )
    except InputError:
        return
    again = plan.jobs[0].params
    assert again == values
    assert {name: type(value) for name, value in again.items()} == {
        name: type(value) for name, value in values.items()
    }
    assert plan.jobs[0].candidate.count("/") == 2
