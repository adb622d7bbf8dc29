"""The fused trainer: close to the plain one, the same bits however it is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asynckfold import Result, TrainerParams
from asynckfold.data.batches import Batches
from asynckfold.jobs.messages import (
    CheckpointRef,
    EpochEnd,
    JobEnd,
    NewCheckpoint,
    Note,
    RunEvent,
    Task,
)
from asynckfold.jobs.result import DIVERGED, DONE, FAILED
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training.bundle import Bundle
from asynckfold.training.fusion import group as fused
from tests.size import examples
from tests.training.tiny import CLASSES, CPU, FEATURES, Mlp, Plain, Tiny, always, never, samples


class Grouped(Tiny):
    """A sweep whose jobs are all trained as one."""

    @cached_property
    def bundle(self) -> Bundle:
        found: Bundle = Tiny.bundle.func(self)  # type: ignore[attr-defined]
        ids = tuple(job.id for job in found.plan.jobs)
        return replace(found, plan=replace(found.plan, groups=(ids,)))

    def group(
        self,
        refs: dict[str, Sequence[CheckpointRef]] | None = None,
        stop: Callable[[], bool] = never,
        without: Sequence[str] = (),
        attempt: int = 1,
        heartbeat: Heartbeat | None = None,
    ) -> tuple[dict[str, Result | None], list[RunEvent]]:
        """One attempt at the group, and what it told."""
        events: list[RunEvent] = []
        tasks = [
            Task(job, attempt, tuple((refs or {}).get(job.id, ())))
            for job in self.jobs
            if job.id not in without
        ]
        found = fused.train(
            self.bundle,
            tasks,
            self.batches,
            CPU,
            events.append,
            stop,
            heartbeat or Heartbeat(),
            raised,
        )
        return {task.job.id: item for task, item in zip(tasks, found, strict=True)}, events


def raised(task: Task, error: BaseException) -> Result:
    raise error


def digests(results: dict[str, Result | None]) -> dict[str, str]:
    assert all(result is not None for result in results.values())
    return {name: result.digest for name, result in results.items() if result is not None}


def refs_of(events: Sequence[RunEvent]) -> dict[str, list[CheckpointRef]]:
    """The checkpoints that were written, by job, the two newest of each first."""
    found: dict[str, list[CheckpointRef]] = {}
    for item in events:
        if isinstance(item, NewCheckpoint):
            found.setdefault(item.ref.job_id, []).insert(0, item.ref)
    return {name: refs[:2] for name, refs in found.items()}


MODELS: dict[str, Callable[[], nn.Module]] = {"linear": Plain, "mlp": Mlp}


def grouped(root: Path, model: str = "mlp", **changes: Any) -> Grouped:
    schedules = {"constant": "constant", "cosine": "cosine"}
    # 61 samples in 3 folds of batches of 10: folds of 20, 20 and 21, so 41 or 40 to train on.
    defaults: dict[str, Any] = {"lr_schedules": schedules, "data": samples(61)}
    return Grouped(root, {model: MODELS[model]}, **{**defaults, **changes})


@pytest.fixture(params=[(), ("cpu",)], ids=["alone", "together"])
def evaluated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out folds one by one, as on cores, and in one pass, as on a GPU."""
    monkeypatch.setattr(fused, "TOGETHER", request.param)


def test_held_out_folds_in_one_pass_have_the_scores_of_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = TrainerParams(epochs=3, eval_batch_size=8)
    alone, _ = grouped(tmp_path / "alone", params=params).group()
    monkeypatch.setattr(fused, "TOGETHER", ("cpu",))
    monkeypatch.setattr(fused.Training, "outputs_on", None)
    together, _ = grouped(tmp_path / "together", params=params).group()
    one, other = (
        [[item.outputs, *map(attrgetter("valid_loss", "accuracy"), item.epochs)] for item in found]
        for found in (filter(None, results.values()) for results in (alone, together))
    )
    torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly(but=["alone-mlp", "together-mlp"])
@pytest.mark.usefixtures("evaluated")
@pytest.mark.parametrize("model", MODELS)
def test_a_group_stopped_after_every_step_gives_the_same_bits(tmp_path: Path, model: str) -> None:
    whole, _ = grouped(tmp_path / "whole", model).group()
    again, _ = grouped(tmp_path / "again", model).group()
    assert digests(whole) == digests(again)
    tiny = grouped(tmp_path / "stopped", model)
    refs: dict[str, list[CheckpointRef]] = {}
    for attempt in range(1, 100):
        results, events = tiny.group(refs, always, attempt=attempt)
        if None not in results.values():
            break
        assert set(results.values()) == {None}
        refs = refs_of(events)
    assert digests(results) == digests(whole)
    assert attempt >= 8


@pytest.mark.nightly(but=["linear"])
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=examples(8), deadline=None)
@given(st.data())
def test_jobs_that_have_their_result_change_no_bit_of_the_others(
    tmp_path_factory: pytest.TempPathFactory, model: str, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("passengers")
    tiny = grouped(root, model)
    whole, events = tiny.group()
    names = list(whole)
    without = data.draw(st.sets(st.sampled_from(names), max_size=len(names) - 1))
    refs: dict[str, Sequence[CheckpointRef]] = {}
    if data.draw(st.booleans()):
        steps = data.draw(st.integers(0, 8))
        left = iter(range(steps))
        _, events = tiny.group(stop=lambda: next(left, None) is None, attempt=2)
        refs = dict(refs_of(events))
    some, _ = tiny.group(refs, without=sorted(without), attempt=3)
    assert digests(some) == {name: digests(whole)[name] for name in names if name not in without}


def test_a_kill_between_two_checkpoints_goes_on_from_the_common_position(tmp_path: Path) -> None:
    tiny = grouped(tmp_path)
    whole, _ = tiny.group()
    left = iter(range(3))
    _, first = tiny.group(stop=lambda: next(left, None) is None, attempt=2)
    older = refs_of(first)
    _, second = tiny.group(older, always, attempt=3)
    newer = refs_of(second)
    names = list(whole)
    # The kill came after some of them had saved themselves.
    refs = {
        name: [*(newer[name] if place < 2 else []), *older[name]]
        for place, name in enumerate(names)
    }
    positions = {(ref.epoch, ref.batch) for found in refs.values() for ref in found}
    assert len(positions) == 2
    results, _ = tiny.group(refs, attempt=4)
    assert digests(results) == digests(whole)


def test_a_damaged_checkpoint_is_told_and_the_group_starts_anew(tmp_path: Path) -> None:
    tiny = grouped(tmp_path)
    whole, _ = tiny.group()
    left = iter(range(3))
    _, events = tiny.group(stop=lambda: next(left, None) is None, attempt=2)
    refs = refs_of(events)
    name = tiny.jobs[1].id
    (tiny.root / refs[name][0].file).write_bytes(b"nothing")
    results, events = tiny.group(refs, attempt=3)
    assert [item.job_id for item in events if isinstance(item, Note)] == [name]
    assert digests(results) == digests(whole)


def bursting(optimizer: torch.optim.Optimizer) -> Any:
    """A learning rate that becomes infinite in the second epoch."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: float("inf") if epoch else 1)


@pytest.mark.usefixtures("evaluated")
def test_a_job_that_diverges_ends_early_and_leaves_the_others_alone(tmp_path: Path) -> None:
    params = TrainerParams(epochs=4)
    calm = {"one": "constant", "two": "constant"}
    healthy, _ = grouped(tmp_path / "a", lr_schedules=calm, params=params).group()
    tiny = grouped(tmp_path / "b", lr_schedules={"one": "constant", "two": bursting}, params=params)
    results, events = tiny.group()
    early = [item.result.job_id for item in events if isinstance(item, JobEnd)]
    assert early == [job.id for job in tiny.jobs if job.lr_schedule == "two"]
    last_of_healthy = [item.epoch.number for item in events if isinstance(item, EpochEnd)][-1]
    assert last_of_healthy == 4
    for name, result in results.items():
        other = healthy[name]
        assert result is not None
        assert other is not None
        if name in early:
            assert result.status == DIVERGED
            assert [item.number for item in result.epochs] == [1]
            assert "the loss became" in result.error
        else:
            assert result.digest == other.digest
    resumed, _ = tiny.group(refs_of(events), without=early, attempt=2)
    assert digests(resumed) == {name: digests(results)[name] for name in resumed}


@pytest.mark.usefixtures("evaluated")
def test_a_schedule_that_reacts_has_a_rate_of_its_own_in_each_job(tmp_path: Path) -> None:
    params = TrainerParams(epochs=6)
    schedules = {"constant": "constant", "reduce": "reduce"}
    tiny = grouped(tmp_path / "fused", lr_schedules=schedules, params=params)
    plain = grouped(tmp_path / "plain", lr_schedules=schedules, params=params)
    results, _ = tiny.group()
    for job in tiny.jobs:
        mine = results[job.id]
        assert mine is not None
        assert [item.lr for item in mine.epochs] == [item.lr for item in plain.train(job).epochs]
    left = iter(range(9))
    _, events = tiny.group(stop=lambda: next(left, None) is None, attempt=2)
    again, _ = tiny.group(refs_of(events), attempt=3)
    assert digests(again) == digests(results)


def failing(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule that raises at its third step."""

    def factor(step: int) -> float:
        if step == 2:
            raise ValueError("no such rate")
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def quarrelsome(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Raises where the one fold with 21 samples is evaluated."""
    if not torch.is_grad_enabled() and len(outputs) == 21:
        raise ValueError("too many")
    return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("lr_step", "place"), [("epoch", "epoch 2, end of the epoch"), ("batch", "epoch 1, batch 2 of")]
)
def test_a_schedule_that_raises_ends_its_own_jobs_only(
    tmp_path: Path, lr_step: str, place: str
) -> None:
    params = TrainerParams(epochs=3, lr_step=lr_step)
    calm = {"one": "constant", "two": "constant"}
    healthy, _ = grouped(tmp_path / "a", lr_schedules=calm, params=params).group()
    tiny = grouped(tmp_path / "b", lr_schedules={"one": "constant", "two": failing}, params=params)
    results = tiny.execute(*tiny.jobs, trainer="fused")
    for job, result in zip(tiny.jobs, results, strict=True):
        if job.lr_schedule == "two":
            assert result.status == FAILED
            assert result.error.startswith(f"ValueError: no such rate ({place}")
            assert "in factor" in result.traceback
            assert "no such rate" in tiny.log(job)
        else:
            assert result.digest == healthy[job.id].digest


@pytest.mark.usefixtures("evaluated")
def test_an_evaluation_that_raises_ends_its_own_job_only(tmp_path: Path) -> None:
    tiny = grouped(tmp_path, "linear", criterion=quarrelsome)
    results = tiny.execute(*tiny.jobs, trainer="fused")
    statuses = {job.id: item.status for job, item in zip(tiny.jobs, results, strict=True)}
    sizes = {job.id: len(tiny.bundle.fold_of(job).valid) for job in tiny.jobs}
    assert statuses == {name: FAILED if size == 21 else DONE for name, size in sizes.items()}
    whole, _ = grouped(tmp_path / "whole", "linear").group()
    done = {item.job_id: item.digest for item in results if item.status == DONE}
    assert done == {name: digest for name, digest in digests(whole).items() if name in done}


def test_want_of_memory_is_no_matter_of_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*asked: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Batches, "train_together", no_memory)
    tiny = grouped(tmp_path)
    found = tiny.execute(*tiny.jobs, trainer="fused")
    assert {item.outcome for item in found} == {"oom"}


def test_a_group_that_cannot_be_fused_fails_each_job(tmp_path: Path) -> None:
    model = Grouped(tmp_path / "lstm", {"lstm": lambda: nn.LSTM(FEATURES, CLASSES)})
    failed = model.execute(*model.jobs, trainer="fused")
    assert [item.job_id for item in failed] == [job.id for job in model.jobs]
    assert [item.status for item in failed] == [FAILED] * 3
    assert "cannot be traced" in failed[0].error
