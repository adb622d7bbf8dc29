"""Laws of isolation: what one model does to its process, no other model's numbers show."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from asynckfold import AsyncKFold, InputError, RunStore, load_results
from asynckfold.engines import warm_pool
from asynckfold.training.isolation.guard import isolated
from tests.training.sweeps import events, sweep
from tests.training.tiny import Noisy, Plain, samples, sgd
from tests.truth.leaks import LEAKS, kept

NUMERICS = "settings of torch"
"""Name in the software that a run records."""


@pytest.fixture(autouse=True)
def _small(one_thread: None) -> None:
    """One thread."""


@pytest.fixture(autouse=True)
def _left_as_it_was(_small: None) -> Any:
    """A failing test must not take the next ones along."""
    with isolated(patches=True):
        with isolated(patches=True):
            yield
        kept.clear()
        gc.collect()
    sys.modules.pop("odd_library", None)


class Judge(Noisy):
    """Feels what others change: relu as a function, dropout, NumPy's numbers."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(inputs)) + 0.1


class Leaking(Plain):
    """Changes its process in the last evaluation of a job of eight batches."""

    def __init__(self, leak: str) -> None:
        super().__init__()
        self.leak, self.trained = leak, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.trained += self.training
        outputs = super().forward(inputs)
        if not self.training and self.trained == 8:
            LEAKS[self.leak]()
        return outputs


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return judged(tmp_path_factory.mktemp("alone"))


def judged(root: Path, **others: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """Train the judge beside others, in this process; its weights, and what the plan says of it."""
    results = sweep(root / "run", {**others, "judge": Judge})
    jobs = {name: item for name, item in results.results.items() if name.startswith("judge")}
    assert {item.status for item in jobs.values()} == {"done"}
    recipe = results.plan.recipe
    recorded = [recipe[name]["judge"] for name in ("architecture", "settings")]
    return {
        name: (item.weights, item.epochs[0].valid_loss) for name, item in jobs.items()
    }, recorded


@pytest.mark.filterwarnings("ignore:.*jobs failed")
@pytest.mark.nightly(but=["no_grad", "forward hook", "function"])
@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_does_not_reach_the_next_job(tmp_path: Path, leak: str, alone: Any) -> None:
    assert judged(tmp_path, leaking=lambda: Leaking(leak)) == alone


@pytest.mark.filterwarnings("ignore")
def test_ordinary_jobs_leave_nothing_and_what_cannot_be_restored_is_reported(
    tmp_path: Path,
) -> None:
    """Bound of false alarms: none of these ends a worker or takes a claim away."""

    class Ordinary(Noisy):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            # Contexts that are left again, modules and compilers that torch imports late.
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                super().forward(inputs)
            with torch.autograd.graph.save_on_cpu():
                outputs = super().forward(inputs)
            torch.vmap(torch.sin)(outputs)
            # The compiler of torch replaces some of torch's own functions.
            return compiled(outputs)

    compiled = torch.compile(torch.sin, backend="eager")

    def nadam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.NAdam(model.parameters(), 0.01)

    sweep(tmp_path / "run", {"ordinary": Ordinary}, opt_fn=nadam, fuse="auto", baseline="estimate")
    assert events(tmp_path / "run", "isolation") == []
    sweep(tmp_path / "import", {"importing": lambda: Leaking("import")})
    assert any("imports" in text for text in events(tmp_path / "import", "isolation"))


# With real processes


class EntersLate(Plain):
    """Enters the inference mode after its training, and keeps the context."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = super().forward(inputs)
        if not self.training and not torch.is_inference_mode_enabled():
            LEAKS["inference mode"]()
        return found


def run(root: Path, models: dict[str, Callable[[], Any]], **settings: Any) -> tuple[Any, Any]:
    """Return the weights by job, and what the run's folder says of the claim and the events."""
    AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 4, verbose=0, baseline=None, **settings)(
        models, ["constant"], sgd, {"epochs": 1}
    )
    with RunStore.read(root) as store:
        weights = {name: result.weights for name, result in store.results().items()}
        assert {result.status for result in store.results().values()} == {"done"}
    return weights, (load_results(root).bit_identity, events(root, "isolation"))


@pytest.mark.nightly
@pytest.mark.parametrize("leak", ["inference mode", "import"])
def test_a_worker_that_cannot_be_restored_is_replaced(tmp_path: Path, leak: str) -> None:
    late = EntersLate if leak == "inference mode" else lambda: Leaking("import")
    expected, _ = run(tmp_path / "alone", {"judge": Judge})
    weights, (claimed, notes) = run(
        tmp_path / "both", {"leaking": late, "judge": Judge}, n_jobs=1, fuse=False
    )
    assert {name: weights[name] for name in expected} == expected
    assert claimed.claimed
    assert any("its worker was replaced" in text for text in notes), notes


def test_in_the_callers_process_the_run_is_no_longer_reproducible(tmp_path: Path) -> None:
    weights, (claimed, notes) = run(
        tmp_path / "both", {"leaking": EntersLate, "judge": Judge}, parallelize=False
    )
    expected, (clean, none) = run(tmp_path / "alone", {"judge": Judge}, parallelize=False)
    assert {name: weights[name] for name in expected} == expected
    assert clean.claimed
    assert not none
    assert "inference mode" in str(claimed)
    assert any("no longer reproducible" in text for text in notes)
    assert not torch.is_inference_mode_enabled()


# Settings of the caller


def test_settings_of_the_caller_hold_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting of a script holds with and without workers, and is recorded."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    seen = []
    for parallelize in (True, False):
        root = tmp_path / str(parallelize)
        weights, _ = run(root, {"teller": Teller}, parallelize=parallelize)
        with RunStore.read(root) as store:
            seen.append((weights, store.software()[0][NUMERICS]))
    assert seen[0] == seen[1]
    assert seen[0][1] == "mkldnn.enabled=False"


class Teller(Plain):
    """Says in its weights what torch's setting is."""

    def __init__(self) -> None:
        super().__init__()
        off = not torch.backends.mkldnn.enabled
        self.register_buffer("off", torch.tensor(float(off)))
        if not off:
            raise RuntimeError("the caller's setting is not here")


def test_a_run_is_not_continued_with_other_settings_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, {"plain": Plain}, parallelize=False)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    with pytest.raises(InputError, match=r"settings of torch: none there, mkldnn.enabled=F"):
        run(tmp_path, {"plain": Plain, "judge": Judge}, parallelize=False)


@pytest.mark.nightly(but=["True"])
@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="this torch has no fp32_precision"
)
@pytest.mark.parametrize("parallelize", [True, False])
def test_tf32_by_the_new_name_works_and_is_recorded(
    tmp_path: Path, parallelize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it, torch refuses to tell the older settings."""
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    run(tmp_path, {"plain": Plain}, parallelize=parallelize)
    with RunStore.read(tmp_path) as store:
        assert "fp32_precision of generic all=tf32" in store.software()[0][NUMERICS]
    assert torch.backends.fp32_precision == "tf32"


def test_contexts_of_the_caller_do_not_change_its_jobs(tmp_path: Path) -> None:
    expected, _ = run(tmp_path / "plain", {"judge": Judge}, parallelize=False)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), hooks:
        found, _ = run(tmp_path / "within", {"judge": Judge}, parallelize=False)
        assert not torch.is_grad_enabled()
    assert found == expected


class Reads(Plain):
    """Has in its weights what the environment and the script's arguments say."""

    def __init__(self) -> None:
        super().__init__()
        said = [os.environ.get("ODD_VARIABLE", -1), sys.argv[1] if len(sys.argv) > 1 else -1]
        self.register_buffer("seen", torch.tensor([float(item) for item in said]))


def test_warm_workers_get_the_callers_environment_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were started before these changed, as in a notebook."""
    monkeypatch.setattr(sys, "argv", ["script.py"])
    run(tmp_path / "first", {"reads": Reads})
    monkeypatch.setenv("ODD_VARIABLE", "5")
    monkeypatch.setattr(sys, "argv", ["script.py", "7"])
    found, _ = run(tmp_path / "workers", {"reads": Reads})
    expected, _ = run(tmp_path / "here", {"reads": Reads}, parallelize=False)
    assert found == expected


def test_variables_that_libraries_read_when_loaded_need_a_new_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm_pool.give_back(warm_pool.take())
    first = warm_pool.take()
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    warm_pool.give_back(first)
    second = warm_pool.take()
    try:
        assert second is not first
        assert second.server.libraries["MKL_CBWR"] == "COMPATIBLE"
    finally:
        second.close()
