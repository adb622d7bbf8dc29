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

from asynckfold import AsyncKFold, InputError, RunStore
from asynckfold.api.execution import replaced_notes
from asynckfold.engines import warm_pool
from asynckfold.jobs.messages import Leftovers, Task
from asynckfold.jobs.placement import Command, Placement
from asynckfold.jobs.reproducibility import NUMERICS, reproducibility_of
from asynckfold.jobs.result import DONE
from asynckfold.training.isolation.guard import foreign, isolated
from asynckfold.training.worker.execute import execute
from tests.training.tiny import Noisy, Plain, Tiny, never, samples, sgd
from tests.truth.leaks import LEAKS, kept

IN_PROCESS = [name for name in LEAKS if name not in ("alarm", "files", "open files")]


class Judge(Noisy):
    """Feels what others change: relu as a function, dropout, NumPy's numbers."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(inputs)) + 0.1


class Leaking(Plain):
    """Changes its process when it is made, and cannot be sure to train afterwards."""

    def __init__(self, *leaks: str) -> None:
        super().__init__()
        for name in leaks:
            LEAKS[name]()


@pytest.fixture(autouse=True)
def _left_as_found() -> Any:
    """A failing test must not take the next ones along."""
    with isolated(patches=True):
        with isolated(patches=True):
            yield
        kept.clear()
        gc.collect()
    sys.modules.pop("odd_library", None)


def bits(tiny: Tiny, *names: str) -> list[tuple[Any, ...]]:
    """Train the first fold of these models, one after another in this process; the last one's."""
    jobs = [next(job for job in tiny.jobs if job.model == name) for name in names]
    result = tiny.execute(*jobs)[-1]
    assert result.status == DONE, result.error
    return [(result.weights, *(epoch.valid_loss for epoch in result.epochs))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bits(Tiny(tmp_path_factory.mktemp("alone"), {"judge": Judge}), "judge")


@pytest.mark.nightly(but=["no_grad", "forward hook", "function"])
@pytest.mark.parametrize("leak", IN_PROCESS)
def test_a_leak_does_not_reach_the_next_job(tmp_path: Path, leak: str, alone: Any) -> None:
    both = Tiny(tmp_path, {"leaking": lambda: Leaking(leak), "judge": Judge})
    assert bits(both, "leaking", "judge") == alone


def test_an_inference_mode_that_began_in_a_mode_leaves_torch_usable() -> None:
    with isolated(patches=True):
        LEAKS["dispatch mode"]()
        LEAKS["inference mode"]()
    with isolated(patches=True):
        kept.clear()
        gc.collect()
    assert float(torch.zeros(3).sum()) == 0


@pytest.mark.nightly(but=["forward hook"])
@pytest.mark.parametrize("leak", ["autocast", "forward hook", "function", "dispatch mode"])
def test_a_dry_run_does_not_reach_the_next_one(tmp_path: Path, leak: str) -> None:
    def facts(models: dict[str, Callable[[], Any]]) -> Any:
        return Tiny(tmp_path, models).execute(command=Command.DRY_RUN)[0]

    beside = facts({"leaking": lambda: Leaking(leak), "judge": Judge})
    by_itself = facts({"judge": Judge})
    for name in ("architecture", "settings"):
        assert beside.recipe[name]["judge"] == by_itself.recipe[name]["judge"]
    assert not [name for name in beside.failures if name.startswith("judge")]
    assert beside.flops["judge"] == by_itself.flops["judge"]
    assert beside.fusible["leaking"].startswith("it changes its process (")


def test_ordinary_jobs_leave_nothing(tmp_path: Path) -> None:
    """Bound of false alarms: none of these ends a worker or takes a claim away."""

    class Ordinary(Noisy):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            # Contexts that are left again, modules and compilers that torch imports late.
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                super().forward(inputs)
            with torch.autograd.graph.save_on_cpu():
                found = super().forward(inputs)
            torch.vmap(torch.sin)(found)
            # The compiler of torch replaces some of torch's own functions.
            return compiled(found)

    compiled = torch.compile(torch.sin, backend="eager")

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.NAdam(model.parameters(), 0.01)

    tiny = Tiny(tmp_path, {"ordinary": Ordinary}, opt_fn=adam)
    told: list[Any] = []
    for command in (Command.DRY_RUN, Command.TRAIN, Command.ESTIMATE):
        job = tiny.jobs[0]
        tasks = [Task(job)] if command is Command.TRAIN else []
        placement = Placement((job.id,), (0,), 1, command=command)
        execute(tiny.bundle, tiny.batches, placement, tasks, told.append, never)
    assert not [item for item in told if isinstance(item, Leftovers)]
    facts = tiny.execute(command=Command.DRY_RUN)[0]
    assert "changes its process" not in facts.fusible.get("ordinary", "")


def test_what_cannot_be_restored_is_reported(tmp_path: Path) -> None:
    told: list[Any] = []
    tiny = Tiny(tmp_path, {"importing": lambda: Leaking("import")})
    placement = Placement((tiny.jobs[0].id,), (0,), 1)
    tasks = [Task(tiny.jobs[0])]
    execute(tiny.bundle, tiny.batches, placement, tasks, told.append, never)
    assert [item for item in told if isinstance(item, Leftovers)] == [
        Leftovers(tiny.jobs[0].id, ("imports",))
    ]


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
    AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 10, verbose=0, baseline=None, **settings)(
        models, ["constant"], sgd, {"epochs": 1}
    )
    with RunStore.read(root) as store:
        weights = {name: result.weights for name, result in store.results().items()}
        assert {result.status for result in store.results().values()} == {DONE}
        return weights, (
            reproducibility_of(store.plan, store.software()),
            [event.text for event in store.events() if event.kind == "isolation"],
        )


@pytest.mark.nightly
@pytest.mark.parametrize("leak", ["inference mode", "import"])
def test_a_worker_that_cannot_be_restored_is_replaced(tmp_path: Path, leak: str) -> None:
    late = EntersLate if leak == "inference mode" else lambda: Leaking("import")
    expected, _ = run(tmp_path / "alone", {"judge": Judge})
    found, (claimed, events) = run(
        tmp_path / "both", {"leaking": late, "judge": Judge}, n_jobs=1, fuse=False
    )
    assert {name: found[name] for name in expected} == expected
    assert claimed.claimed
    assert any("its worker was replaced" in text for text in events), events


def test_in_the_callers_process_the_run_is_no_longer_reproducible(tmp_path: Path) -> None:
    found, (claimed, events) = run(
        tmp_path / "both", {"leaking": EntersLate, "judge": Judge}, parallelize=False
    )
    expected, (clean, none) = run(tmp_path / "alone", {"judge": Judge}, parallelize=False)
    assert {name: found[name] for name in expected} == expected
    assert clean.claimed
    assert not none
    assert "inference mode" in str(claimed)
    assert any("no longer reproducible" in text for text in events)
    assert not torch.is_inference_mode_enabled()


# Settings of the caller


def test_settings_of_the_caller_hold_in_every_process(tmp_path: Path) -> None:
    """A setting of a script holds with and without workers, and is recorded."""
    seen = []
    for parallelize in (True, False):
        with isolated():
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
            root = tmp_path / str(parallelize)
            found, _ = run(root, {"teller": Teller}, parallelize=parallelize)
            with RunStore.read(root) as store:
                seen.append((found, store.software()[0][NUMERICS]))
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


def test_a_run_is_not_continued_with_other_settings_of_torch(tmp_path: Path) -> None:
    run(tmp_path, {"plain": Plain}, parallelize=False)
    with isolated():
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        with pytest.raises(InputError, match=r"settings of torch: none there, mkldnn.enabled=F"):
            run(tmp_path, {"plain": Plain, "judge": Judge}, parallelize=False)


@pytest.mark.nightly(but=["True"])
@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="this torch has no fp32_precision"
)
@pytest.mark.parametrize("parallelize", [True, False])
def test_tf32_by_the_new_name_works_and_is_recorded(tmp_path: Path, parallelize: bool) -> None:
    """With it, torch refuses to tell the older settings."""
    with isolated():
        torch.backends.fp32_precision = "tf32"
        run(tmp_path, {"plain": Plain}, parallelize=parallelize)
        with RunStore.read(tmp_path) as store:
            assert "fp32_precision of generic all=tf32" in store.software()[0][NUMERICS]
        assert torch.backends.fp32_precision == "tf32"


def test_contexts_of_the_caller_do_not_change_its_jobs(tmp_path: Path) -> None:
    expected, _ = run(tmp_path / "plain", {"judge": Judge}, parallelize=False)
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x):
        found, _ = run(tmp_path / "within", {"judge": Judge}, parallelize=False)
        assert not torch.is_grad_enabled()
    assert found == expected


@pytest.mark.parametrize("parallelize", [True, False])
def test_a_sweep_within_autocast_is_refused(tmp_path: Path, parallelize: bool) -> None:
    """It would hold without workers, and not with them."""
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(InputError, match="precision='bf16'"),
    ):
        run(tmp_path / "run", {"plain": Plain}, parallelize=parallelize)
    assert not (tmp_path / "run").exists()


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


def odd_relu(inputs: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return torch.sigmoid(inputs)


def test_functions_that_workers_do_not_have_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    # Those of torch, torchvision and scikit-learn themselves are no news.
    assert foreign() == []
    assert list(replaced_notes()) == []
    monkeypatch.setattr(F, "relu", odd_relu)
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda self: None)
    (note,) = replaced_notes()
    assert f"torch.nn.functional.relu (by {__name__})" in note
    assert "Linear.reset_parameters" in note
