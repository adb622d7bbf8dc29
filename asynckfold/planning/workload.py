"""What is decided about a sweep before it starts: its workload, the choice, and job requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from asynckfold.jobs.cost import Cost, Work, work_of
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.placement import FULL_SHARE, GPU_CONTEXT_BYTES, WORKER_BYTES, NodeSize, Request
from asynckfold.jobs.plan import Job, Plan
from asynckfold.planning import fusion_rule, gpu_rule
from asynckfold.planning.flop_model import EXCHANGES, rule_cost
from asynckfold.planning.thread_rule import LastJobs, Model, size_of


@dataclass(frozen=True)
class TimeEstimate:
    """Expected seconds of the whole sweep, their lower bound, and those of the longest job."""

    makespan: float = 0.0
    lower_bound: float = 0.0
    longest: float = 0.0


@dataclass(frozen=True)
class Choice:
    """The threads of each model, and what follows from them."""

    threads: Mapping[str, int]  # by model
    why: Mapping[str, str]  # a sentence by model
    costs: Mapping[str, Cost]  # by model: by the rule, scaled to the step of the dry run
    cores: int  # allotted, on all nodes together
    prediction: TimeEstimate = field(default_factory=TimeEstimate)  # of the whole sweep
    per_gpu: Mapping[str, int] = field(default_factory=dict)  # expected to share a GPU, by model
    # by job, for those that have others than their model: see `Plan.last_threads`
    last_threads: Mapping[str, int] = field(default_factory=dict)
    # of models that are trained on GPUs while others are on cores, to which `costs` apply then
    gpu_costs: Mapping[str, Cost] = field(default_factory=dict)
    devices: str = ""  # why candidates are on cores or on GPUs; empty: there was no choice
    nodes: tuple[NodeSize, ...] = ()  # of the cluster; empty for one machine

    def cost_of(self, job: Job, plan: Plan) -> Cost:
        """Return the cost of a job on its kind of device."""
        gpu = plan.device_of(job.candidate) == "cuda" and job.model in self.gpu_costs
        return (self.gpu_costs if gpu else self.costs)[job.model]


@dataclass(frozen=True)
class Workload:
    """The sweep for which a choice is made."""

    plan: Plan  # without its threads
    folds: Sequence[Fold]
    facts: Facts  # of the dry run
    # allotted by affinity, quota and ``n_jobs``, used by others or not: the most threads of a job;
    # on a cluster those of the smallest node
    cores: int
    gpus: int = 0  # allotted, used by other processes or not
    gpu_memory: int = 0  # bytes of the smallest of them; 0 if unknown
    nodes: tuple[NodeSize, ...] = ()  # of a cluster; empty for one machine
    jobs_per_gpu: int | None = None  # as requested; None: by the rule, then as measured

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
            return gpu_rule.gpu_cost(flops, ratio, products, self.facts.memory.get(name, 0))
        return rule_cost(flops, self.cores, ratio, products)

    def estimated_cost(self, name: str) -> Cost:
        """Return the rule's cost, scaled to the step of the dry run on a core, with its memory."""
        cost = self.rule_cost(name)
        if not self.is_on_gpus:
            cost = cost.scaled(self.facts.step_seconds.get(name, 0.0))
        gain = self.processes_gain(name, cost)
        return replace(cost, memory=self.facts.memory.get(name, 0), processes_gain=gain)

    def processes_gain(self, name: str, cost: Cost) -> float:
        """Return how many times as fast as one process a job of several trains; 0 if unknown."""
        params, flops = self.plan.params, self.facts.flops.get(name, 0)
        exchange = EXCHANGES.get(params.trainer)
        if exchange is None or params.processes == 1 or not flops or params.on_gpu:
            return 0.0
        count, products = params.processes, self.facts.products.get(name)
        whole, part = (
            rule_cost(flops // divisor, 1, 1.0, products).step_seconds[1] for divisor in (1, count)
        )
        step, size = cost.step_seconds[1], self.facts.weights.get(name, 0)
        return exchange.gain(params.trainer, count, step, step * part / whole, size)

    @property
    def is_on_gpus(self) -> bool:
        """Whether all processes of a job compute on GPUs."""
        params = self.plan.params
        return self.plan.device == "cuda" and (params.processes == 1 or not params.on_cores)

    def on(self, device: str) -> Workload:
        """Return the part of the sweep on one kind of device."""
        part = replace(self, plan=self.plan.on(device))
        if device == "cuda":
            return part
        nodes = tuple(replace(node, gpus=0) for node in self.nodes)
        return replace(part, gpus=0, nodes=nodes)

    def works(self) -> dict[str, Work]:
        """Return the work of each job, by its id."""
        plan = self.plan
        by_fold = {fold.key: work_of(fold, plan.params, plan.batch_size) for fold in self.folds}
        return {job.id: by_fold[job.key] for job in plan.jobs}

    def last_threads(self, last: LastJobs | None) -> dict[str, int]:
        """Return the threads of the last jobs, by their ids."""
        if last is None:
            return {}
        works = self.works()
        mine = [job.id for job in reversed(self.plan.jobs) if job.model == last.model]
        mine.sort(key=lambda name: size_of(works[name]))
        return dict.fromkeys(sorted(mine[: last.jobs]), last.threads)

    def may_fuse(self, name: str) -> bool:
        """Return whether jobs of a model can be fused, and by the rule for cores are."""
        return self.facts.fusible.get(name) == ""


def requests(
    choice: Choice, workload: Workload, groups: Sequence[Sequence[str]] = ()
) -> dict[str, Request]:
    """Return the request of each job, by its id.

    The jobs of a group share the seconds of its training steps in proportion; they
    evaluate separately.
    """
    together = {name: len(group) for group in groups for name in group}
    works, plan, params = workload.works(), workload.plan, workload.plan.params
    made, fold_keys = {}, plan.fold_keys
    for job in plan.jobs:
        gpu = plan.device_of(job.candidate) == "cuda"
        cost = choice.cost_of(job, plan).shared_by(params.processes)
        threads = choice.last_threads.get(job.id, choice.threads[job.model])
        cores = threads * params.processes
        width = together.get(job.id, 1)
        may_share = gpu and width == params.processes == 1 and workload.jobs_per_gpu != 1
        per_gpu = choice.per_gpu.get(job.model, 1) if may_share else 1
        # Beside others, a job gets no more memory than it reserves. Some is for drivers.
        part = workload.gpu_memory * 9 // (10 * (workload.jobs_per_gpu or gpu_rule.MOST_SHARING))
        gain = gpu_rule.fused_gain(cost, width) if gpu else fusion_rule.gain(cost.flops, width)
        if gpu:
            cost = gpu_rule.shared(cost, per_gpu)
        made[job.id] = Request(
            job.id,
            cost.fused(gain).seconds(works[job.id], cores),
            cores,
            cost.memory + WORKER_BYTES * params.processes,
            gpu,
            gpu_memory=max(cost.gpu_memory + GPU_CONTEXT_BYTES, part * may_share) if gpu else 0,
            gpu_share=FULL_SHARE / per_gpu,
            measures_gpu=may_share and workload.jobs_per_gpu is None,
            trainer=params.trainer,
            # Of candidates that race, a fold of all comes before the next one.
            stage=0 if plan.race is None else fold_keys.index(job.key),
        )
    return made
