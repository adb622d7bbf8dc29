"""Whether several processes for one model pay is said before the start."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asynckfold import AsyncKFold
from asynckfold.planning.flop_model import EXCHANGES, Exchange, gain_text
from asynckfold.planning.forecast import Forecast
from tests.toy import adam, samples

TRAINERS = ("hogwild", "parameter_server")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def forecast(root: Path, **settings: object) -> Forecast:
    kfold = AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 8, verbose=0, **settings)
    return kfold.forecast({"net": net}, ["constant"], adam, {"epochs": 2})


@pytest.mark.parametrize("trainer", ["allreduce", "parameter_server"])
def test_a_small_net_is_said_to_be_slower_on_two_processes(trainer: str) -> None:
    gain = EXCHANGES[trainer].gain(trainer, 2, 0.3e-3, 0.28e-3, 800)
    assert "times as fast as one process: slower" in gain_text(gain)


def test_processes_that_exchange_nothing_are_said_to_be_faster(tmp_path: Path) -> None:
    said = forecast(tmp_path, trainer="hogwild", processes=2)
    assert "predicted 1." in said.choice.why["net"]
    assert "slower" not in said.choice.why["net"]


def test_a_slow_exchange_makes_the_prediction_longer(tmp_path: Path) -> None:
    forecasts = [forecast(tmp_path / name, trainer=name, processes=2) for name in TRAINERS]
    gains = [said.choice.costs["net"].processes_gain for said in forecasts]
    # Steps are timed, so that gains of two forecasts are only comparable for the same seconds.
    alike = [EXCHANGES[name].gain(name, 2, 3e-4, 2.8e-4, 800) for name in TRAINERS]
    assert alike[0] > 1 > alike[1] > 0
    for said, gain in zip(forecasts, gains, strict=True):
        cost = said.choice.costs["net"]
        shared = cost.shared_by(2)
        assert shared.step_seconds[2] == pytest.approx(cost.step_seconds[1] / gain)


@given(
    step=st.floats(1e-5, 1.0),
    size=st.integers(0, 1 << 30),
    more=st.integers(1, 1 << 30),
    processes=st.integers(2, 64),
    trainer=st.sampled_from(sorted(EXCHANGES)),
)
def test_laws_of_the_gain(step: float, size: int, more: int, processes: int, trainer: str) -> None:
    free = Exchange(0.0, 0.0, 0.0)
    assert free.gain(trainer, processes, step, step / processes, size) == pytest.approx(processes)
    here = EXCHANGES[trainer]
    gain = here.gain(trainer, processes, step, step / processes, size)
    assert 0 < gain < processes
    assert here.gain(trainer, processes, step, step / processes, size + more) < gain
