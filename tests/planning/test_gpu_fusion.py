"""Fusion on a GPU is decided by a comparison and a timing there, stays, and counts its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.cost import Timing
from asynckfold.jobs.messages import Fusibility
from asynckfold.jobs.placement import GPU_CONTEXT_BYTES, Gpu, Load, Placement, Request, units
from asynckfold.jobs.plan import Plan, make_jobs
from asynckfold.planning import gpu_fusion, gpu_sharing
from asynckfold.planning.fusion_groups import Fuse, Grouping
from asynckfold.planning.gpu_sharing import memory_share
from asynckfold.planning.group_choice import group
from asynckfold.planning.thread_choice import chosen
from asynckfold.planning.workload import Choice, Workload, requests
from asynckfold.scheduling.place import place
from asynckfold.sweep.fusibility import FusibilityOnGpu
from asynckfold.sweep.pending import PendingJobs
from asynckfold.system.signals import Interruption
from tests.planning import test_device_choice as mixed
from tests.planning.test_gpu_sharing import GIB, FakeEngine, prober
from tests.planning.test_thread_choice import workload as on_cores

ALIKE = Fusibility("", "as separate ones")


def workload(epochs: int = 1000, on_gpu: Fusibility | None = ALIKE) -> Workload:
    """Twelve jobs on one GPU."""
    found = {} if on_gpu is None else {"M": on_gpu}
    return replace(on_cores(epochs, device="cuda"), gpus=1, on_gpu=found)


@dataclass
class Timed:
    """A GPU on which a step takes so long alone, for each of two, and for a job of a group."""

    alone: float = 0.010
    pair: float = 0.020
    fused: float | None = 0.002
    asked: list[tuple[int, int]] = field(default_factory=list)

    def __call__(
        self, model: str, threads: int, copies: int, together: int = 1
    ) -> Sequence[Timing]:
        self.asked.append((copies, together))
        if together > 1:
            out_of_memory = Timing(failure="OutOfMemoryError")
            return [out_of_memory if self.fused is None else Timing(self.fused)]
        # More than two are no faster together.
        step = self.alone if copies == 1 else copies * self.pair / 2
        return [Timing(step, 0.001, 70, GIB)] * copies


def choose(work: Workload, probe: Timed | None, place: Path | None = None, **words: Any) -> Choice:
    return chosen(work, None, words.get("before"), None, probe, place)


def grouped(
    work: Workload, choice: Choice, fuse: Fuse = "auto", before: Plan | None = None
) -> Grouping:
    return group(work, choice, before, fuse, None, 80 * GIB)


# The decision


def test_steps_that_are_faster_fused_are_fused(tmp_path: Path) -> None:
    work, probe = workload(), Timed()
    choice = choose(work, probe, tmp_path)
    assert probe.asked == [(1, 1), (2, 1), (1, 5)]
    assert choice.costs["M"].fused_gain == pytest.approx(5.0)
    found = grouped(work, choice)
    assert [len(group) for group in found.groups] == [6, 6]
    assert found.why["M"] == (
        "fused: 6 + 6 of 12 jobs; as separate ones; measured here: fused steps are 5.00 times "
        "faster than separate ones"
    )
    # Remembered, with the step alone or with both: the same sweep gets the same groups.
    slower = Timed(fused=1.0)
    assert choose(work, slower, tmp_path) == choice
    assert not slower.asked
    without = choose(workload(on_gpu=None), slower, tmp_path)
    assert (without.costs["M"].fused_gain, slower.asked) == (0.0, [])


@pytest.mark.parametrize(
    ("probe", "told"),
    [
        (Timed(fused=0.009), "measured here: fused steps are 1.11 times faster than separate ones"),
        (Timed(fused=0.020), "measured here: fused steps take 2.00 times as long"),
        # Two that share the GPU are as fast as the group.
        (Timed(pair=0.008, fused=0.004), "take as long as separate ones, of which 2 share a GPU"),
        (Timed(fused=None), gpu_fusion.NOT_TIMED),
        (None, gpu_fusion.NOT_TIMED),
    ],
)
def test_auto_forms_no_groups_without_a_clear_gain(probe: Timed | None, told: str) -> None:
    work = workload()
    choice = choose(work, probe)
    found = grouped(work, choice)
    assert found.groups == ()
    assert told in found.why["M"]
    # What is asked for is done.
    assert [len(group) for group in grouped(work, choice, True).groups] == [6, 6]
    assert [len(group) for group in grouped(work, choice, 4).groups] == [4, 4, 4]


def test_a_model_that_failed_the_comparison_is_never_fused_nor_timed() -> None:
    work, probe = workload(on_gpu=Fusibility("the fused losses differ")), Timed()
    choice = choose(work, probe)
    assert (1, 5) not in probe.asked
    for fuse in ("auto", True, 4):
        found = grouped(work, choice, fuse)
        assert (found.groups, found.why) == ((), {"M": "not fused: the fused losses differ"})
    # What was found on cores is not about a GPU.
    facts = replace(work.facts, fusible={"M": ""}, fused={"M": "alike"})
    assert not grouped(replace(work, facts=facts), choice, True).groups
    assert not grouped(replace(work, facts=facts, on_gpu={}), choice, True).groups


def test_a_short_sweep_is_not_timed() -> None:
    work, probe = workload(1), Timed()
    choice = choose(work, probe)
    assert probe.asked == []
    assert grouped(work, choice).why == {"M": f"not fused: {gpu_fusion.NOT_TIMED}"}
    assert gpu_sharing.why_not_timed_fused(work, "M", None, probe) == gpu_fusion.NOT_TIMED
    assert gpu_sharing.why_not_timed_fused(workload(), "M", None, probe) == ""
    assert gpu_sharing.why_not_timed_fused(workload(), "M", None, None) == gpu_fusion.NOT_TIMED


def test_a_continued_run_keeps_what_was_decided_and_new_jobs_follow_it() -> None:
    work = workload()
    first = choose(work, Timed())
    plan = replace(work.plan, groups=grouped(work, first).groups)
    assert Plan.from_json(plan.to_json()) == plan
    # Nothing is compared or timed again; another setting changes nothing.
    again = choose(replace(work, on_gpu={}), None, before=first)
    assert again.costs == first.costs
    kept = grouped(replace(work, on_gpu={}), again, False, plan)
    assert kept.groups == plan.groups
    assert kept.why == {"M": "fused: 6 + 6 of 12 jobs, as before"}
    # One that was begun without groups has none, whatever is asked.
    begun = replace(plan, groups=())
    assert grouped(work, first, True, begun).why == {"M": "not fused, as before"}
    # A further LR schedule is decided by the gain that was measured then.
    jobs = make_jobs(["M"], ["cosine", "step"], work.folds, 0)
    more = replace(work, plan=replace(work.plan, jobs=jobs))
    unasked = Timed(fused=1.0)
    then = choose(more, unasked, before=first)
    assert not unasked.asked
    grown = grouped(more, then, "auto", plan).groups
    assert grown[:2] == plan.groups
    assert [len(group) for group in grown] == [6, 6, 6, 6]
    assert plan.obstacle(replace(more.plan, groups=grown)) is None
    assert gpu_sharing.why_not_timed_fused(more, "M", first, None) == ""
    untimed = choose(workload(on_gpu=None), Timed())
    assert gpu_sharing.why_not_timed_fused(more, "M", untimed, unasked) == gpu_fusion.NOT_TIMED


def test_on_both_kinds_each_is_grouped_by_its_own_rule() -> None:
    """Those on cores as without a GPU."""
    work = mixed.both(1, 2, tiny=mixed.SMALL, vgg=mixed.HUGE)
    facts = replace(work.facts, fusible={"tiny": "", "vgg": "too large"})
    work = mixed.planned(replace(work, facts=facts))
    assert work.plan.devices
    choice = mixed.chosen(work, None, None, None, mixed.Probes())
    only = group(work, choice, None, True, None)
    assert {name.split("/")[0] for item in only.groups for name in item} == {"tiny"}
    both = group(replace(work, on_gpu={"vgg": ALIKE}), choice, None, True, None)
    assert both.groups[: len(only.groups)] == only.groups
    assert both.why["tiny"] == only.why["tiny"]
    assert both.why["vgg"] == "fused: 6 + 6 of 12 jobs; as separate ones"
    assert both.widths["vgg"] == 6


def test_a_model_on_both_kinds_says_what_it_is_on_each() -> None:
    cores = Grouping((("a", "b"),), {"M": "fused: 2 of 2 jobs", "A": "x"}, {"M": 2})
    found = cores.beside(Grouping((), {"M": "not fused: y", "B": "z"}))
    assert found.why == {
        "M": "on cores fused: 2 of 2 jobs; on GPUs not fused: y",
        "A": "x",
        "B": "z",
    }
    assert (found.groups, found.widths) == (cores.groups, {"M": 2})


# The memory, and the seconds


def test_a_group_needs_the_gpu_memory_of_all_its_jobs_and_has_the_gpu_to_itself() -> None:
    work = workload()
    choice = choose(work, Timed(pair=0.008))
    assert choice.per_gpu == {"M": 2}
    found = grouped(work, choice, 5)
    asked = units(requests(choice, work, found.groups), found.groups)
    group_of_four = asked[found.groups[0][0]]
    assert group_of_four.gpu_memory == 4 * GIB + GPU_CONTEXT_BYTES
    assert group_of_four.jobs_per_gpu == 1
    assert memory_share(80 * GIB, group_of_four.jobs_per_gpu) == 1.0
    cores = tuple(range(4))
    for free, count in ((6, 1), (4, 0)):
        gpus = (Gpu(0, free * GIB, 80 * GIB, use=0.1, busy=False),)
        load = Load(cores, cores, 1 << 50, gpus)
        assert len(place(list(asked.values()), [], load)) == count


def test_a_group_that_does_not_fit_on_the_gpu_is_split() -> None:
    work = workload()
    choice = choose(work, Timed())
    split = group(work, choice, None, True, None, 5 * GIB)
    assert [len(item) for item in split.groups] == [4, 4, 4]
    assert "no more than 4 at once fit into the memory" in split.why["M"]
    none = group(work, choice, None, True, None, GIB)
    assert none.why == {"M": "not fused: no two of its jobs fit into the memory at once"}


def test_a_gain_counts_only_where_it_was_measured() -> None:
    work = workload()
    for probe, gain in ((Timed(), 5.0), (None, 1.0)):
        choice = choose(work, probe)
        groups = grouped(work, choice, True).groups
        asked, alone = requests(choice, work, groups), requests(choice, work)
        name, cost = groups[0][0], choice.costs["M"]
        works = work.works()[name]
        steps = works.steps * cost.step_seconds[1]
        assert alone[name].seconds - asked[name].seconds == pytest.approx(steps * (1 - 1 / gain))


def test_probes_of_groups_count_all_jobs_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def probes(together: int) -> int:
        engine = FakeEngine(gpus=(Gpu(0, 9 * GIB, 80 * GIB),), cores=tuple(range(9)), come=8)
        found = prober(engine)
        found.gpu_memory["A"] = GIB
        count = len(found("A", 1, 8, together))
        assert found.gpu_memory["A"] == (GIB if together > 1 else 0)
        return count

    assert [probes(together) for together in (1, 2, 4)] == [6, 3, 2]


def pending(finished: Sequence[str] = ()) -> PendingJobs:
    plan = workload().plan
    ids = [job.id for job in plan.jobs]
    asked = {name: Request(name, 1.0, gpu=True, gpu_memory=GPU_CONTEXT_BYTES) for name in ids}
    plan = replace(plan, groups=(tuple(ids[:4]), tuple(ids[4:8])))
    return PendingJobs(plan, finished, asked, lambda: 0.0)


@pytest.mark.parametrize("of_group", [True, False])
def test_the_peak_of_a_group_is_that_of_all_its_jobs(of_group: bool) -> None:
    ids = [job.id for job in workload().plan.jobs]
    found = pending(ids[5:6])
    found.learn_gpu_memory(ids[0 if of_group else 8], 4 * GIB)
    each = GIB if of_group else 4 * GIB
    assert found._request(ids[9]).gpu_memory == each + GPU_CONTEXT_BYTES
    # A finished job stays in its group.
    assert found._request(ids[4]).jobs == (ids[4], *ids[6:8])
    assert found._request(ids[4]).gpu_memory == 4 * each + GPU_CONTEXT_BYTES


# Whether jobs compute the same


@dataclass
class Checking(FakeEngine):
    """Answers a check, or dies, in turn."""

    answers: list[Any] = field(default_factory=list)

    def submit(self, placement: Placement, tasks: Sequence[Any]) -> Any:
        from concurrent.futures import Future

        from asynckfold.engines.engine import Answer

        self.placed.append(placement)
        future: Future[Answer] = Future()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(Answer([answer], 1))
        return future


def checked(engine: Checking) -> Fusibility:
    return FusibilityOnGpu(engine, workload().plan, Interruption())("M")


def test_a_model_is_compared_on_the_emptiest_gpu() -> None:
    engine = Checking(answers=[ALIKE])
    assert checked(engine) == ALIKE
    (placement,) = engine.placed
    assert (placement.trainer, placement.gpu, placement.jobs, placement.cores) == (
        "fusibility",
        1,
        ("M/cosine/fold-0",),
        (0,),
    )


def test_a_comparison_that_somebody_killed_is_made_again() -> None:
    killed = WorkerDiedError(1, "SIGKILL")
    assert checked(Checking(answers=[killed, killed, ALIKE])) == ALIKE
    always = checked(Checking(answers=[killed] * 3))
    assert always.refusal.startswith("its check on a GPU failed: ")
    assert checked(Checking(gpus=())).refusal == "no GPU is there now"
