"""What is decided about a sweep before it starts: its workload, the choice, and job requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from asynckfold.jobs.cost import Cost, Timing, Work, gathered, work_of
from asynckfold.jobs.decoding import decoded, finite, within
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.messages import Facts, Fusibility
from asynckfold.jobs.placement import GPU_CONTEXT_BYTES, WORKER_BYTES, NodeSize, Request
from asynckfold.jobs.plan import Job, Plan
from asynckfold.planning import cost_cache, fusion_groups
from asynckfold.planning.calibration import Exchange
from asynckfold.planning.flop_model import gpu_rule_cost, rule_cost
from asynckfold.planning.thread_search import LastJobs, Model, Prediction, predict, size_of

PROBE_SHARE = 0.05
"""Largest share of a sweep's expected seconds for probes; a shorter sweep is not probed."""

SETTING_SECONDS = 0.5
"""Approximate duration of one probe of a model: 0.25 s of steps (see `training.probe`), and as much
for building, warming up and three evaluations."""


class Probe(Protocol):
    """Times a model."""

    def __call__(
        self, model: str, threads: int, copies: int, together: int = 1
    ) -> Sequence[Timing]:
        """Return the timings of `copies` side by side; fewer if fewer fit.

        With `together` jobs trained as a fusion group, the seconds of a step are those per job. In
        a sweep on GPUs the copies share one GPU.
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
        Of the whole sweep.
    cores : int
        Allotted cores, on all nodes together.
    overturned : bool
        Whether timings overturned the rule.
    failures : Mapping of str to str
        Traceback by model whose probe raised.
    per_gpu : Mapping of str to int
        Jobs that share a GPU, by model; empty without GPUs.
    last_threads : Mapping of str to int
        Threads by job, for the jobs that have others than their model: see `Plan.last_threads`.
    gpu_costs : Mapping of str to Cost
        By model that is trained on GPUs while others are trained on cores; then `costs` are those
        on cores, where it is trained there, too.
    devices : str
        Why candidates are on cores or on GPUs; empty where there was no choice.
    nodes : tuple of NodeSize
        The nodes of the cluster that it was made for; empty for one machine.
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
    gpu_costs: Mapping[str, Cost] = field(default_factory=dict)
    devices: str = ""
    nodes: tuple[NodeSize, ...] = ()

    def cost_of(self, job: Job, plan: Plan) -> Cost:
        """Return the cost of a job on its kind of device."""
        gpu = plan.device_of(job.candidate) == "cuda" and job.model in self.gpu_costs
        return (self.gpu_costs if gpu else self.costs)[job.model]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data for JSON; as before there were clusters, where there is none."""
        found = asdict(self)
        return found if self.nodes else {key: found[key] for key in found if key != "nodes"}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Choice:
        """Read what `to_dict` returned, also after a round trip through JSON.

        Raises
        ------
        ValueError
            It is damaged.
        """
        found = decoded(cls, raw, "decision")
        finite({f"prediction.{name}": value for name, value in asdict(found.prediction).items()})
        for count in (found.cores, *(node.cores for node in found.nodes)):
            within(count, 1, 1 << 20, "cores")
        for node in found.nodes:
            within(node.gpus, 0, 1 << 20, "gpus")
        costs, gpu_costs = (
            {name: Cost.from_dict(cost.to_dict()) for name, cost in named.items()}
            for named in (found.costs, found.gpu_costs)
        )
        return replace(found, costs=costs, gpu_costs=gpu_costs)


@dataclass(frozen=True)
class Workload:
    """The sweep for which a choice is made.

    Parameters
    ----------
    plan : Plan
        Without its threads.
    folds : sequence of Fold
        Its folds.
    facts : Facts
        Of the dry run.
    cores : int
        Allotted cores by affinity, quota and ``n_jobs``, used by other processes or not. On a
        cluster those of the smallest node: the most threads of a job.
    machine : Mapping
        What else seconds depend on: processor, versions.
    gpus : int
        Allotted GPUs, used by other processes or not.
    on_gpu : Mapping of str to Fusibility
        What the comparison of fused and separate jobs on a GPU found, by model that was compared.
    nodes : tuple of NodeSize
        The nodes of a cluster; empty for one machine.
    exchange : Exchange or None
        What the processes of a job pay to exchange; None for jobs of one process.
    """

    plan: Plan
    folds: Sequence[Fold]
    facts: Facts
    cores: int
    machine: Mapping[str, Any]
    gpus: int = 0
    on_gpu: Mapping[str, Fusibility] = field(default_factory=dict)
    nodes: tuple[NodeSize, ...] = ()
    exchange: Exchange | None = None

    @property
    def each(self) -> tuple[NodeSize, ...]:
        """The size of each node; of the machine, if there is only one."""
        return self.nodes or (NodeSize(self.cores, self.gpus),)

    @property
    def all_cores(self) -> int:
        """The allotted cores of all nodes."""
        return sum(node.cores for node in self.each)

    @property
    def all_gpus(self) -> int:
        """The allotted GPUs of all nodes."""
        return sum(node.gpus for node in self.each)

    def models(self) -> list[Model]:
        """Return each model with its jobs' work and its cost by the rule."""
        works = self.works()
        return [
            Model(
                name,
                tuple(works[job.id] for job in self.plan.jobs if job.model == name),
                self.rule_cost(name),
                last_apart=not self.may_fuse(name),
            )
            for name in dict.fromkeys(job.model for job in self.plan.jobs)
        ]

    def rule_cost(self, name: str) -> Cost:
        """Return the cost of a model by the rule."""
        ratio = self.plan.params.eval_batch_size / self.plan.batch_size
        flops, products = self.facts.flops.get(name, 0), self.facts.products.get(name)
        if self.is_on_gpus:
            return gpu_rule_cost(flops, ratio, products)
        return rule_cost(flops, self.cores, ratio, products)

    def processes_gain(self, name: str, cost: Cost) -> float:
        """Return how many times as fast as one process a job of several trains; 0 if not known."""
        params, flops = self.plan.params, self.facts.flops.get(name, 0)
        if self.exchange is None or not flops or params.on_gpu:
            return 0.0
        count, products = params.processes, self.facts.products.get(name)
        whole, part = (
            rule_cost(flops // divisor, 1, 1.0, products).step_seconds[1] for divisor in (1, count)
        )
        step, size = cost.step_seconds[1], self.facts.weights.get(name, 0)
        return self.exchange.gain(params.trainer, count, step, step * part / whole, size)

    @property
    def is_on_gpus(self) -> bool:
        """Whether all processes of a job compute on GPUs."""
        params = self.plan.params
        return self.plan.device == "cuda" and (params.processes == 1 or not params.on_cores)

    def on(self, device: str) -> Workload:
        """Return the part of the sweep on one kind of device."""
        found = replace(self, plan=self.plan.on(device))
        if device == "cuda":
            return found
        nodes = tuple(replace(node, gpus=0) for node in self.nodes)
        return replace(found, gpus=0, nodes=nodes)

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
        """Return whether jobs of a model can be fused, and on cores are by the rule."""
        if self.plan.device == "cuda":
            return name in self.on_gpu and not self.on_gpu[name].refusal
        return self.facts.fusible.get(name) == ""

    def key(self, name: str) -> str:
        """Return the key of a model in the cost cache."""
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
                # On a GPU, the gain has an entry of its own.
                **({"fused": True} if plan.device == "cpu" and self.may_fuse(name) else {}),
                **plan.params.options,
                **({"channels_last": True} if name in plan.channels_last else {}),
            }
        )

    def gathered(self, model: str, timings: Mapping[int, Sequence[Timing]]) -> Cost:
        """Return the cost of a model from its timings by threads."""
        cost = gathered(timings, self.facts.flops[model])
        return replace(cost, memory=max(cost.memory, self.facts.memory.get(model, 0)))

    def measured(
        self,
        models: Sequence[Model],
        probe: Probe | None,
        place: Path | None,
        measure: Callable[[Model, Probe], Cost | str | None],
    ) -> tuple[dict[str, Cost], dict[str, str]]:
        """Return the costs of models, from the cache or measured, and tracebacks of failed probes.

        `measure` returns a cost, a traceback, or None if nothing could be timed.
        """
        found: dict[str, Cost] = {}
        failures: dict[str, str] = {}
        for model in models:
            key = self.key(model.name)
            cost = cost_cache.recall(key, place)
            if cost is None and probe is not None and model.name in self.facts.flops:
                made = measure(model, probe)
                if isinstance(made, str):
                    failures[model.name] = made
                elif made is not None:
                    cost = cost_cache.remember(key, made, place)
            if cost is not None:
                found[model.name] = cost
        return found, failures

    def predicted(
        self,
        threads: Mapping[str, int],
        costs: Mapping[str, Cost],
        per_gpu: Mapping[str, int] | None = None,
    ) -> Prediction:
        """Predict the sweep, with each process of a job on cores of its own."""
        count = self.plan.params.processes
        known = [
            Model(item.name, item.jobs, costs[item.name].shared_by(count)) for item in self.models()
        ]
        cores = {name: number * count for name, number in threads.items()}
        return predict(known, cores, self.cores, self.gpus, per_gpu, self.nodes)


def failure_in(timings: Sequence[Timing]) -> str:
    """Return the first traceback of a probe; empty if there is none."""
    return next((item.failure for item in timings if item.failure), "")


def requests(
    choice: Choice, workload: Workload, groups: Sequence[Sequence[str]] = ()
) -> dict[str, Request]:
    """Return the request of each job, by its id.

    The jobs of a group share the seconds of its training steps in proportion to their own; they
    evaluate separately.
    """
    together = {name: len(group) for group in groups for name in group}
    works, plan, params = workload.works(), workload.plan, workload.plan.params
    found = {}
    for job in plan.jobs:
        gpu = plan.device_of(job.candidate) == "cuda"
        cost = choice.cost_of(job, plan).shared_by(params.processes)
        threads = choice.last_threads.get(job.id, choice.threads[job.model])
        cores = threads * params.processes
        width = together.get(job.id, 1)
        per_gpu = choice.per_gpu.get(job.model, 1) if gpu and width == 1 else 1
        # The table of gains is of cores: on a GPU, a gain that was not measured counts as none.
        known = not gpu or cost.fused_gain
        gain = fusion_groups.gain(cost.flops, width, cost.fused_gain) if known else 1.0
        found[job.id] = Request(
            job.id,
            cost.shared(per_gpu).fused(gain).seconds(works[job.id], cores),
            cores,
            cost.memory + WORKER_BYTES * params.processes,
            gpu,
            gpu_memory=cost.gpu_memory + GPU_CONTEXT_BYTES if gpu else 0,
            jobs_per_gpu=per_gpu,
            trainer=params.trainer,
        )
    return found
