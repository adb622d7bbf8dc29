"""The threads of each model in a run: as asked, as stored, as another run had them, or decided.

::

    asked a number ─────────────────────────────┐
    the run has a plan ─────────────────────────┤
    plan_from another run ──────────────────────┼──► Choice: threads, why, costs, prediction
    else: rule ◄── flops                        │             │
          └── long sweep: cache or probe ── decide            ▼
    GPUs: one job on each ◄── long sweep: cache or probe of one and of two at once
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import Any, Protocol

from asynckfold.errors import Problem, refuse
from asynckfold.jobs.cost import Cost, Timing, Work, gathered, work_of
from asynckfold.jobs.decoding import decoded, finite, within
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.placement import Request
from asynckfold.jobs.plan import Plan
from asynckfold.planning import cost_cache, fusion_groups
from asynckfold.planning.thread_search import (
    Decision,
    LastJobs,
    Model,
    Prediction,
    decide,
    jobs_per_gpu,
    predict,
    rule_cost,
    size_of,
)
from asynckfold.store import RunReader
from asynckfold.store.database import decoding

PROBE_SHARE = 0.05
"""The share of a sweep's expected seconds that probes may take at most; else there are none."""

SETTING_SECONDS = 0.5
"""About what one model takes to be probed with one number of threads: 0.25 s of steps (see
`training.probe`), and as much again for building, warming up and three evaluations."""

GPU_STEP_SECONDS = 0.001
"""What a step on a GPU is taken to last at least, to say whether a sweep is long enough for probes:
some hundred kernels, each of which takes microseconds to launch."""

GPU_START_SECONDS = 5.0
"""About what two processes need to start on a GPU. They serve the sweep afterwards."""

GPU_CONTEXT_BYTES = 1 << 29
"""What a process holds of a GPU beside its tensors: its context and the code of its kernels."""

BY_GPU = "the work is done by a GPU"
"""Why a job has one thread."""


class Probe(Protocol):
    """Times a model."""

    def __call__(
        self, model: str, threads: int, copies: int, together: int = 1
    ) -> Sequence[Timing]:
        """Return what each of `copies` side by side found, fewer where fewer fitted.

        Of so many jobs `together`, trained as one, a step has the seconds of one job's part. In a
        sweep on GPUs, side by side means on one GPU.
        """


@dataclass(frozen=True)
class Choice:
    """The threads of each model, and what follows from them.

    Parameters
    ----------
    threads : Mapping of str to int
        By model.
    why : Mapping of str to str
        A sentence by model.
    costs : Mapping of str to Cost
        By model: measured, or estimated by the rule and the step of the dry run.
    prediction : Prediction
        Seconds of the whole sweep.
    cores : int
        Allotted cores.
    overturned : bool
        Whether timings overturned the rule.
    failures : Mapping of str to str
        Traceback by model whose probe raised.
    per_gpu : Mapping of str to int
        By model, how many jobs share a GPU; empty without GPUs.
    last_threads : Mapping of str to int
        Threads by job, of those that have more than their model: the last ones.
    """

    threads: Mapping[str, int]
    why: Mapping[str, str]
    costs: Mapping[str, Cost]
    prediction: Prediction
    cores: int
    overturned: bool = False
    failures: Mapping[str, str] = field(default_factory=dict)
    per_gpu: Mapping[str, int] = field(default_factory=dict)
    last_threads: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Choice:
        """Read what `to_dict` returned, also after a way through JSON.

        Raises
        ------
        ValueError
            It is anything else.
        """
        found = decoded(cls, raw, "decision")
        finite({f"prediction.{name}": value for name, value in asdict(found.prediction).items()})
        within(found.cores, 1, 1 << 20, "cores")
        costs = {name: Cost.from_dict(cost.to_dict()) for name, cost in found.costs.items()}
        return replace(found, costs=costs)


@dataclass(frozen=True)
class Workload:
    """What a choice is made for.

    Parameters
    ----------
    plan : Plan
        Without its threads.
    folds : sequence of Fold
        Whom its jobs hold out.
    facts : Facts
        Of the dry run.
    cores : int
        Allotted cores: of affinity, quota and ``n_jobs``, whoever uses them now.
    machine : Mapping
        What else seconds depend on: processor, versions.
    gpus : int
        Allotted GPUs; where there are any, each job needs one.
    """

    plan: Plan
    folds: Sequence[Fold]
    facts: Facts
    cores: int
    machine: Mapping[str, Any]
    gpus: int = 0

    def models(self) -> list[Model]:
        """Return each model with its jobs' work and its cost by the rule."""
        ratio = self.plan.params.eval_batch_size / self.plan.batch_size
        works, facts = self.works(), self.facts
        return [
            Model(
                name,
                tuple(works[job.id] for job in self.plan.jobs if job.model == name),
                rule_cost(facts.flops.get(name, 0), self.cores, ratio, facts.products.get(name)),
                last_apart=not self.may_fuse(name),
            )
            for name in dict.fromkeys(job.model for job in self.plan.jobs)
        ]

    def works(self) -> dict[str, Work]:
        """Return the work of each job, by its id."""
        plan = self.plan
        by_fold = {fold.key: work_of(fold, plan.params, plan.batch_size) for fold in self.folds}
        return {job.id: by_fold[job.repeat, job.fold] for job in plan.jobs}

    def last_threads(self, last: LastJobs | None) -> dict[str, int]:
        """Return the threads of the last jobs, by their ids."""
        if last is None:
            return {}
        works = self.works()
        mine = [job.id for job in reversed(self.plan.jobs) if job.model == last.model]
        mine.sort(key=lambda name: size_of(works[name]))
        return dict.fromkeys(sorted(mine[: last.jobs]), last.threads)

    def may_fuse(self, name: str) -> bool:
        """Return whether jobs of a model can be trained as one, and are to be by the rule."""
        return self.facts.fusible.get(name) == ""

    def key(self, name: str) -> str:
        """Return under what the cost of a model is kept between runs."""
        recipe, plan = self.facts.recipe, self.plan
        return cost_cache.key_of(
            {
                "architecture": recipe.get("architecture", {}).get(name),
                "settings": recipe.get("settings", {}).get(name),
                "criterion": recipe.get("criterion"),
                "flops": self.facts.flops.get(name, 0),
                "batch": [plan.batch_size, plan.params.eval_batch_size],
                "device": plan.device,
                "cores": self.cores,
                "machine": self.machine,
                **({"fused": True} if self.may_fuse(name) else {}),
                **plan.params.options,
                **({"channels_last": True} if name in plan.channels_last else {}),
            }
        )


def chosen(
    workload: Workload,
    asked: int | None,
    before: Choice | None,
    other: Plan | None,
    probe: Probe | None,
    place: Path | None,
) -> Choice:
    """Choose the threads of each model, and how many jobs share a GPU.

    The latter touches no bit: no number that is asked for, and no other run, has a say in it.

    Parameters
    ----------
    workload : Workload
        The sweep.
    asked : int or None
        Threads that were asked for.
    before : Choice or None
        What the run chose in an earlier session, which stays.
    other : Plan or None
        Of the run whose decisions are taken.
    probe : callable or None
        Times a model; None where nothing can run beside.
    place : Path or None
        Where costs are kept between runs.

    Raises
    ------
    InputError
        The other run does not know a model, or has more threads than there are cores here.
    """
    found = _with_threads(workload, asked, before, other, probe, place)
    if workload.plan.device != "cuda":
        return found
    if before is not None:
        kept = before.per_gpu.keys() & found.threads.keys()
        per_gpu = {name: before.per_gpu[name] for name in sorted(kept)}
        costs = {**found.costs, **{name: before.costs[name] for name in sorted(kept)}}
        found = replace(found, per_gpu=per_gpu, costs=costs)
    return _on_gpus(workload, found, probe, place)


def _with_threads(
    workload: Workload,
    asked: int | None,
    before: Choice | None,
    other: Plan | None,
    probe: Probe | None,
    place: Path | None,
) -> Choice:
    models = workload.models()
    names = [model.name for model in models]
    if workload.plan.params.processes > 1:
        count = workload.plan.params.processes
        why = f"each job trains with {count} processes"
        return _fixed(workload, models, dict.fromkeys(names, 1), why)
    if asked is not None:
        return _fixed(workload, models, dict.fromkeys(names, asked), "as asked")
    if before is not None:
        return _grown(workload, models, before, probe, place)
    if other is not None:
        refuse(_problems(other, names, workload.cores))
        threads = {name: other.threads_of(name) for name in names}
        found = _fixed(workload, models, threads, "taken over from another run")
        mine = {job.id for job in workload.plan.jobs}
        kept = {name: count for name, count in other.last_threads.items() if name in mine}
        return replace(found, last_threads=kept)
    if workload.plan.device == "cuda":
        return _fixed(workload, models, dict.fromkeys(names, 1), BY_GPU)
    measured, failures = _measured(workload, models, probe, place)
    return _choice(workload, models, decide(models, workload.cores, measured), measured, failures)


def _grown(
    workload: Workload,
    models: Sequence[Model],
    before: Choice,
    probe: Probe | None,
    place: Path | None,
) -> Choice:
    """Keep what a run chose before, and decide for the models that were added to it."""
    added = [model for model in models if model.name not in before.threads]
    if not added:
        return before
    measured: dict[str, Cost] = {}
    failures: dict[str, str] = {}
    if workload.plan.device == "cuda":
        more = _asked(dict.fromkeys((model.name for model in added), 1), BY_GPU)
    else:
        measured, failures = _measured(workload, added, probe, place)
        more = decide(added, workload.cores, measured)
    decision = Decision(
        {**before.threads, **more.threads}, {**before.why, **more.why}, more.overturned, more.last
    )
    found = _choice(workload, models, decision, {**before.costs, **measured}, failures)
    return replace(found, last_threads={**before.last_threads, **found.last_threads})


def _on_gpus(workload: Workload, found: Choice, probe: Probe | None, place: Path | None) -> Choice:
    """Complete a choice by how many jobs of each model share a GPU."""
    models = [model for model in workload.models() if model.name not in found.per_gpu]
    if not models:
        return found
    measured, failures = _measured_on_gpu(workload, models, probe, place)
    per_gpu, why = dict(found.per_gpu), dict(found.why)
    for name in (model.name for model in models):
        text = "1 job on a GPU: " + ("its probe failed" if name in failures else "not probed")
        per_gpu[name], text = jobs_per_gpu(measured[name]) if name in measured else (1, text)
        why[name] += f"; {text}"
    costs = {**found.costs, **measured}
    return replace(
        found,
        why=why,
        costs=costs,
        per_gpu=per_gpu,
        failures={**found.failures, **failures},
        prediction=_predicted(workload, found.threads, costs, per_gpu),
    )


def _measured_on_gpu(
    workload: Workload, models: Sequence[Model], probe: Probe | None, place: Path | None
) -> tuple[dict[str, Cost], dict[str, str]]:
    """As `_measured`, one and two at once on a GPU."""
    found: dict[str, Cost] = {}
    failures: dict[str, str] = {}
    if workload.plan.params.processes > 1:
        # A probe has one process, on the GPU: of a job with most of them on cores it says nothing.
        return found, failures
    steps = sum(work.steps for model in models for work in model.jobs)
    most = GPU_START_SECONDS + 2 * len(models) * SETTING_SECONDS
    if most > PROBE_SHARE * steps * GPU_STEP_SECONDS / max(1, workload.gpus):
        return found, failures
    for model in models:
        key = workload.key(model.name)
        cost = cost_cache.recall(key, place)
        if cost is None and probe is not None and model.name in workload.facts.flops:
            alone = probe(model.name, 1, 1)
            if failure := _failure({1: alone}):
                failures[model.name] = failure
                continue
            if alone:
                least = workload.facts.memory.get(model.name, 0)
                made = gathered({1: alone}, workload.facts.flops[model.name])
                made = replace(made, memory=max(made.memory, least))
                pair = probe(model.name, 1, 2)
                timed = len(pair) == 2 and not _failure({2: pair})
                seconds = max(item.step_seconds for item in pair) if timed else 0.0
                cost = cost_cache.remember(key, replace(made, pair_seconds=seconds), place)
        if cost is not None:
            found[model.name] = cost
    return found, failures


def requests(
    choice: Choice, workload: Workload, groups: Sequence[Sequence[str]] = ()
) -> dict[str, Request]:
    """Return the request of each job, by its id.

    Jobs of a group share the seconds that its training steps should take, in proportion to those of
    each by itself, and evaluate as each by itself would.
    """
    together = {name: len(group) for group in groups for name in group}
    works, params, gpu = workload.works(), workload.plan.params, workload.plan.device == "cuda"
    found = {}
    for job in workload.plan.jobs:
        cost = choice.costs[job.model].shared_by(params.processes)
        threads = choice.last_threads.get(job.id, choice.threads[job.model])
        cores = threads * params.processes
        per_gpu = choice.per_gpu.get(job.model, 1)
        gain = fusion_groups.gain(cost.flops, together.get(job.id, 1), cost.fused_gain)
        found[job.id] = Request(
            job.id,
            cost.shared(per_gpu).fused(gain).seconds(works[job.id], cores),
            cores,
            cost.memory,
            gpu,
            gpu_memory=cost.gpu_memory + GPU_CONTEXT_BYTES if gpu and cost.gpu_memory else 0,
            jobs_per_gpu=per_gpu,
            trainer=params.trainer,
        )
    return found


def _problems(other: Plan, names: Sequence[str], cores: int) -> Iterator[Problem]:
    known = list(dict.fromkeys(job.model for job in other.jobs))
    for name in names:
        if name not in known:
            yield Problem(
                "plan_from must be a run of the same models",
                f"{name}, and a run of {', '.join(known)}",
                "Leave plan_from out to have the threads decided.",
            )
        elif other.most_threads_of(name) > cores:
            yield Problem(
                "the threads of plan_from must not exceed the cores that this run may use",
                f"{other.most_threads_of(name)} threads for {name} on {cores} cores",
                "Leave plan_from out to have the threads decided.",
            )


def _measured(
    workload: Workload, models: Sequence[Model], probe: Probe | None, place: Path | None
) -> tuple[dict[str, Cost], dict[str, str]]:
    """Costs by model from the cache or a probe, and the tracebacks of probes that raised.

    Whether a sweep is long enough is no matter of timings, so that the same sweep is always
    decided by the same numbers.
    """
    found: dict[str, Cost] = {}
    failures: dict[str, str] = {}
    counts = _probed_counts(workload.cores)
    settings = len(models) * len(counts) + sum(workload.may_fuse(item.name) for item in models)
    most = settings * SETTING_SECONDS
    alone = math.fsum(model.cost.seconds(work, 1) for model in models for work in model.jobs)
    if workload.cores == 1 or most > PROBE_SHARE * alone / workload.cores:
        return found, failures
    for model in models:
        key = workload.key(model.name)
        cost = cost_cache.recall(key, place)
        if cost is None and probe is not None and model.name in workload.facts.flops:
            timings = {
                count: probe(model.name, count, min(workload.cores // count, len(model.jobs)))
                for count in counts
            }
            failure = _failure(timings)
            if failure:
                failures[model.name] = failure
                continue
            made = gathered(timings, workload.facts.flops[model.name])
            least = workload.facts.memory.get(model.name, 0)
            made = replace(made, memory=max(made.memory, least))
            if workload.may_fuse(model.name):
                made = replace(made, fused_gain=_fused_gain(model, made, workload.cores, probe))
            cost = cost_cache.remember(key, made, place)
        if cost is not None:
            found[model.name] = cost
    return found, failures


def _fused_gain(model: Model, cost: Cost, cores: int, probe: Probe) -> float:
    """How many times faster steps of many jobs as one are, others like it beside; 0: not known."""
    together = min(fusion_groups.GAINING_JOBS, len(model.jobs))
    if together < 2:
        return 0.0
    timings = probe(model.name, 1, max(1, min(cores, len(model.jobs) // together)), together)
    # What the user's code raises in a group, it raises in its jobs.
    if not timings or _failure({1: timings}):
        return 0.0
    own = median_low([item.step_seconds for item in timings])
    return fusion_groups.gain_of_many(cost.step_seconds[1] / own, together)


def _probed_counts(cores: int) -> list[int]:
    """One thread, powers of two, all."""
    powers = [2**power for power in range(cores.bit_length()) if 2**power < cores]
    return [*powers, cores]


def _failure(timings: Mapping[int, Sequence[Timing]]) -> str:
    failures = [item.failure for found in timings.values() for item in found if item.failure]
    return failures[0] if failures else ""


def _fixed(
    workload: Workload, models: Sequence[Model], threads: dict[str, int], why: str
) -> Choice:
    return _choice(workload, models, _asked(threads, why), {}, {})


def _asked(threads: dict[str, int], why: str) -> Decision:
    """What nothing was compared for."""
    sentences = {
        name: f"{count} {'thread' if count == 1 else 'threads'}: {why}"
        for name, count in threads.items()
    }
    return Decision(threads, sentences)


def _choice(
    workload: Workload,
    models: Sequence[Model],
    decision: Decision,
    measured: Mapping[str, Cost],
    failures: Mapping[str, str],
) -> Choice:
    """Complete a decision by the costs that order the jobs."""
    costs = {
        model.name: measured[model.name]
        if model.name in measured
        else _estimated(model, workload.facts)
        for model in models
    }
    return Choice(
        decision.threads,
        decision.why,
        costs,
        _predicted(workload, decision.threads, costs),
        workload.cores,
        decision.overturned,
        failures,
        last_threads=workload.last_threads(decision.last),
    )


def _predicted(
    workload: Workload,
    threads: Mapping[str, int],
    costs: Mapping[str, Cost],
    per_gpu: Mapping[str, int] | None = None,
) -> Prediction:
    """What the sweep takes, each process of a job on a core of its own."""
    count = workload.plan.params.processes
    known = [
        Model(item.name, item.jobs, costs[item.name].shared_by(count)) for item in workload.models()
    ]
    cores = {name: number * count for name, number in threads.items()}
    return predict(known, cores, workload.cores, workload.gpus, per_gpu)


def _estimated(model: Model, facts: Facts) -> Cost:
    """The rule's cost, brought to the seconds and bytes that the dry run saw."""
    cost = model.cost.scaled(facts.step_seconds.get(model.name, 0.0))
    return replace(cost, memory=facts.memory.get(model.name, 0))


def decided_of(store: RunReader) -> Choice | None:
    """Return what was decided for a run.

    Raises
    ------
    StoreCorruptError
        That is damaged.
    """
    with decoding(store.root):
        return choice_of(store.about)


def choice_of(about: Mapping[str, Any]) -> Choice | None:
    """Return what was decided for a run, from what it knows about itself."""
    decided = about.get("decision")
    return Choice.from_dict(decided) if decided else None
