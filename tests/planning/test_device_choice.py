"""The kind of device of each candidate: by the rule, measured, kept, and its threads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from asynckfold.jobs.cost import Timing
from asynckfold.jobs.plan import Plan, make_jobs
from asynckfold.planning.device_choice import KINDS, Probes, chosen, decide
from asynckfold.planning.forecast import forecast
from asynckfold.planning.group_choice import group
from asynckfold.planning.workload import Choice, Workload, requests
from tests.planning.test_thread_choice import FOLDS, SMALL, workload

HUGE = 30_000_000_000


def both(epochs: int = 1, cores: int = 4, gpus: int = 1, **flops: int) -> Workload:
    return replace(workload(epochs, cores, **flops), gpus=gpus)


def planned(work: Workload, before: Plan | None = None, probes: Probes | None = None) -> Workload:
    found = decide(work, KINDS, before, probes or Probes())
    return replace(work, plan=work.plan.with_devices(found.kinds))


def test_large_models_have_the_gpu_and_small_ones_fill_the_cores() -> None:
    work = both(tiny=SMALL, vgg=HUGE)
    found = decide(work, KINDS, None, Probes())
    assert found.kinds == {"tiny/cosine": "cpu", "vgg/cosine": "cuda"}
    assert found.why.startswith(
        "candidates: 1 on cores, 1 on GPUs, by the rule, which was not measured on GPUs: "
    )
    assert "with all on cores" in found.why


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_was_asked_for_is_everybodys_and_the_plan_is_as_before(kind: str) -> None:
    work = both(tiny=SMALL, vgg=HUGE)
    found = decide(work, (kind,), None, Probes())
    assert (set(found.kinds.values()), found.why) == ({kind}, "")
    plan = work.plan.with_devices(found.kinds)
    assert plan == replace(work.plan, device=kind)
    assert "devices" not in json.loads(plan.to_json())


def test_the_kinds_are_part_of_the_plan_and_survive_it() -> None:
    work = planned(both(tiny=SMALL, vgg=HUGE))
    plan = work.plan
    assert (plan.device, plan.devices) == ("cuda", {"tiny/cosine": "cpu"})
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.fingerprint != replace(plan, devices={}).fingerprint
    with pytest.raises(ValueError, match="device"):
        Plan.from_json(plan.to_json().replace('"tiny/cosine":"cpu"', '"tiny/cosine":"tpu"'))


def test_a_run_keeps_its_kinds_and_new_candidates_follow_them() -> None:
    before = planned(both(tiny=SMALL, vgg=HUGE)).plan
    more = both(tiny=HUGE, vgg=SMALL, new=HUGE)  # what would be decided otherwise now
    kinds = decide(more, KINDS, before, Probes()).kinds
    assert (kinds["tiny/cosine"], kinds["vgg/cosine"]) == ("cpu", "cuda")
    extended = more.plan.with_devices(kinds)
    assert before.obstacle(extended) is None
    other = more.plan.with_devices({**kinds, "tiny/cosine": "cuda"})
    assert "device" in str(before.obstacle(other))
    # Begun on cores only, also by the code before: it goes on there.
    begun = both(tiny=SMALL).plan
    assert set(decide(more, KINDS, begun, Probes()).kinds.values()) == {"cpu"}
    # Begun on GPUs only, as the code before did wherever there was one.
    on_gpus = replace(begun, device="cuda")
    kinds = decide(more, KINDS, on_gpus, Probes()).kinds
    assert set(kinds.values()) == {"cuda"}
    assert on_gpus.obstacle(more.plan.with_devices(kinds)) is None


def test_a_model_on_both_kinds_has_one_thread_on_the_gpu() -> None:
    work = replace(
        (base := both(cores=4, vgg=HUGE)),
        plan=replace(base.plan, jobs=make_jobs(["vgg"], ["cosine", "step"], FOLDS[:2], 0)),
    )
    plan = work.plan.with_devices({"vgg/cosine": "cpu", "vgg/step": "cuda"})
    work = replace(work, plan=plan)
    found = chosen(work, None, None, None, Probes())
    assert found.threads["vgg"] > 1
    stepped = [job.id for job in plan.jobs if job.lr_schedule == "step"]
    assert {found.last_threads[name] for name in stepped} == {1}
    assert found.why["vgg"].startswith("on cores ")
    assert "; on GPUs 1 thread: the work is done by a GPU" in found.why["vgg"]
    asked = requests(found, work)
    assert {name: item.gpu for name, item in asked.items()} == {
        job.id: job.lr_schedule == "step" for job in plan.jobs
    }
    assert Choice.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    # Continued, with a candidate more: nothing that was decided changes.
    more = replace(plan, jobs=make_jobs(["vgg"], ["cosine", "step", "warm"], FOLDS[:2], 0))
    kinds = decide(replace(work, plan=more), KINDS, plan, Probes()).kinds
    again = replace(work, plan=more.with_devices(kinds))
    then = chosen(again, None, found, None, Probes(), plan)
    stored = plan.with_threads(found.threads, found.last_threads)
    assert stored.obstacle(again.plan.with_threads(then.threads, then.last_threads)) is None


def test_the_forecast_runs_both_at_once_and_only_jobs_on_cores_are_fused() -> None:
    work = both(1, 2, tiny=SMALL, vgg=HUGE)
    facts = replace(work.facts, fusible={"tiny": "", "vgg": ""})
    work = planned(replace(work, facts=facts))
    choice = chosen(work, None, None, None, Probes())
    groups = group(work, choice, None, True, None)
    assert {name.split("/")[0] for item in groups.groups for name in item} == {"tiny"}
    assert groups.why["vgg"] == "not fused: it could not be checked"
    found = forecast(work, choice, groups)
    on = {span.job.split("/")[0]: span.gpu for span in found.simulation.spans}
    assert on == {"tiny": None, "vgg": 0}


@dataclass
class Timed:
    """Seconds of a step with one thread, by model; more threads divide it."""

    seconds: dict[str, float]

    def __call__(
        self, model: str, threads: int, copies: int, together: int = 1
    ) -> Sequence[Timing]:
        step = self.seconds[model] / threads
        return [Timing(step, step / 3)] * copies


def probes(place: Path | None = None, **gpu: float) -> Probes:
    cores = Timed({"tiny": 0.0003, "vgg": 0.25})
    return Probes({"cpu": cores, "cuda": Timed(gpu)}, place)


def test_timings_overturn_the_rule_by_a_large_margin_only(tmp_path: Path) -> None:
    work: Any = both(3000, 4, tiny=SMALL, vgg=HUGE)
    near = decide(work, KINDS, None, probes(tiny=0.0005, vgg=0.004))
    assert near.kinds == {"tiny/cosine": "cpu", "vgg/cosine": "cuda"}
    # An old GPU, slower than the cores.
    far = decide(work, KINDS, None, probes(tmp_path, tiny=0.01, vgg=0.9))
    assert far.kinds == {"tiny/cosine": "cpu", "vgg/cosine": "cpu"}
    assert "measured here" in far.why
    # Remembered: the same sweep is decided by the same numbers.
    assert decide(work, KINDS, None, probes(tmp_path, tiny=9e-6, vgg=9e-6)) == far


def test_one_kind_alone_is_chosen_for_as_before() -> None:
    from asynckfold.planning import thread_choice

    work = both(tiny=SMALL, vgg=HUGE)
    before = thread_choice.chosen(work, None, None, None, None, None)
    assert chosen(work, None, None, None, Probes()) == before
