"""What is to be done: jobs, trainer parameters, and the plan that holds them. Pure data.

A plan is everything that a result depends on. Two runs of equal plans give equal bits on the same
machine and software; where, when and beside whom a job runs is not in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from operator import mul
from typing import Any

import numpy as np

from asynckfold.errors import Problem, nearest, refuse
from asynckfold.folds import Fold


@dataclass(frozen=True)
class Job:
    """One model × one LR schedule × one fold.

    Parameters
    ----------
    model, lr_schedule : str
        Names; the live objects are in the recipe.
    repeat, fold : int
        Which fold is held out.
    seed : int
        Seeds initial weights, shuffling, dropout and augmentation. The same for every candidate, so
        that candidates are compared on equal terms.
    repeated : bool
        Whether the sweep repeats its folds, so that the id has to say which repeat this is.
    """

    model: str
    lr_schedule: str
    repeat: int
    fold: int
    seed: int
    repeated: bool = False

    @property
    def candidate(self) -> str:
        """``"LeNet/cosine"``."""
        return f"{self.model}/{self.lr_schedule}"

    @property
    def id(self) -> str:
        """``"LeNet/cosine/fold-0"``, with ``repeat-1/`` before the fold where folds repeat."""
        repeat = f"repeat-{self.repeat}/" if self.repeated else ""
        return f"{self.candidate}/{repeat}fold-{self.fold}"


TRAINERS = ("plain", "hogwild", "allreduce", "averaging", "parameter_server")
"""How one job may be trained; that some are trained as one is in the plan's groups."""

SEVERAL = TRAINERS[1:]
"""Those of several processes."""


@dataclass(frozen=True)
class TrainerParams:
    """How each job trains.

    Parameters
    ----------
    epochs : int
        Passes over the training fold.
    save_checkpoint_frequency : int
        Epochs between checkpoints; the last epoch is always saved.
    print_frequency : int
        Batches between two lines in a job's log.
    lr_step : {"epoch", "batch"}
        When the LR schedule steps.
    inner_val : float
        Share of the *training* fold that is set aside to steer ``ReduceLROnPlateau``; no other
        LR schedule uses it.
    clip_grad_norm : float or None
        Largest gradient norm.
    eval_batch_size : int
        Samples per batch where nothing is trained; touches no result but through rounding.
    trainer : {"plain", "hogwild", "allreduce", "averaging", "parameter_server"}
        One process a job, or several: they update one shared model without locks, or add up the
        gradients of their parts of each batch, or train clones that are averaged each round, or
        replicas that push to a parameter server and fetch from it.
    processes : int
        Processes of a job, of one thread and on one core each.
    shared_state : bool
        Whether these share also what the optimizer keeps (momentum, moments), rather than each
        having its own; for hogwild.
    steps_per_round : int
        Steps of each process between two averages of the clones; for averaging.
    partition_size : int or None
        Samples of the part of the training fold that each process gets in an epoch; for averaging.
        Parts that are together greater than the fold overlap, of smaller ones some samples are left
        for another epoch. None divides the fold without rest or overlap.
    epochs_per_round : int or None
        Passes of each process over its part, by which a round, and an epoch, is through; for
        averaging, in place of `steps_per_round`.
    gpu_partition_size, gpu_epochs_per_round : int or None
        The same for the last process, which then computes on a GPU, and the others on cores. Given
        by kind of process: ``partition_size={"cpu": 1000, "gpu": 8000}``.
    accumulate : int
        Batches of a process whose mean gradient is one step; for hogwild and parameter_server.
    precision : {"fp32", "bf16"}
        What models compute in: float32, or bfloat16 by `torch.autocast`.
    memory_format : {"auto", "channels_last", "contiguous"}
        How images lie in memory in jobs that the plain trainer trains by themselves; "auto" takes
        channels last for models whose convolutions are faster so, by the rule of
        `asynckfold.formats`.
    compile : bool
        Whether `torch.compile` compiles each job's model, whole, in the plain trainer.
    n_push, n_pull : int
        Steps of a replica between two pushes of how far its parameters moved, and between two
        fetches of the server's; for parameter_server.
    staleness_aware : bool
        Whether a push counts the less, the more pushes of others came between (Zhang et al. 2016);
        for parameter_server.
    """

    epochs: int = 5
    save_checkpoint_frequency: int = 1
    print_frequency: int = 100
    lr_step: str = "epoch"
    inner_val: float = 0.1
    clip_grad_norm: float | None = None
    eval_batch_size: int = 256
    trainer: str = "plain"
    processes: int = 1
    shared_state: bool = False
    steps_per_round: int = 16
    accumulate: int = 1
    precision: str = "fp32"
    compile: bool = False
    memory_format: str = "auto"
    n_push: int = 1
    n_pull: int = 1
    staleness_aware: bool = False
    partition_size: int | None = None
    epochs_per_round: int | None = None
    gpu_partition_size: int | None = None
    gpu_epochs_per_round: int | None = None

    @classmethod
    def from_mapping(cls, words: Mapping[str, Any] | None) -> TrainerParams:
        """Check a user's dictionary and return the parameters.

        Raises
        ------
        InputError
            Naming each unknown key and each value out of range.

        Examples
        --------
        >>> TrainerParams.from_mapping({"epochs": 2}).epochs
        2
        >>> TrainerParams.from_mapping({"epoch": 2})
        Traceback (most recent call last):
        asynckfold.errors.InputError: trainer_params must use known keys: received 'epoch'. \
Did you mean 'epochs'? Valid: accumulate, clip_grad_norm, compile, epochs, epochs_per_round, \
eval_batch_size, inner_val, lr_step, memory_format, n_pull, n_push, partition_size, precision, \
print_frequency, processes, save_checkpoint_frequency, shared_state, staleness_aware, \
steps_per_round, trainer.
        """
        known = {item.name for item in fields(cls)} - {*_OF_GPU.values()}
        values = {key: _plain(value) for key, value in dict(words or {}).items()}
        if "max_epochs" in values and "epochs" not in values:
            values["epochs"] = values.pop("max_epochs")
        problems = [
            Problem(
                "trainer_params must use known keys",
                repr(key),
                f"{nearest(str(key), known).strip()} Valid: {', '.join(sorted(known))}.".strip(),
            )
            for key in values
            if key not in known
        ]
        values = {key: value for key, value in values.items() if key in known}
        for name, of_gpu in _OF_GPU.items():
            given = values.get(name)
            if isinstance(given, Mapping):
                problems += _kind_problems(name, given)
                values[name], values[of_gpu] = (_plain(given.get(kind)) for kind in KINDS)
        params = cls(**values)
        refuse([*problems, *params._problems()])
        return params

    def _problems(self) -> Iterator[Problem]:
        for name in _COUNTS:
            value = getattr(self, name)
            if not _is_count(value) and not (value is None and name in _OPTIONAL):
                yield Problem(
                    f"{_spelled(name)} must be a whole number of at least 1",
                    repr(value),
                    "Pass 1 or more for it."
                    if name in _OF_GPU.values()
                    else f"Pass {name}=1 or more.",
                )
        yield from self._trainer_problems()
        yield from self._word_problems()
        if self.lr_step not in ("epoch", "batch"):
            yield Problem(
                "lr_step must be 'epoch' or 'batch'", repr(self.lr_step), "The default is 'epoch'."
            )
        if not _is_number(self.inner_val) or not 0 < self.inner_val < 1:
            yield Problem(
                "inner_val must be a share between 0 and 1",
                repr(self.inner_val),
                "The default is 0.1.",
            )
        clip = self.clip_grad_norm
        if clip is not None and (not _is_number(clip) or not 0 < clip < float("inf")):
            yield Problem(
                "clip_grad_norm must be a positive number", repr(clip), "Pass None for no clipping."
            )

    def _trainer_problems(self) -> Iterator[Problem]:
        if self.trainer not in TRAINERS:
            guess = nearest(str(self.trainer), TRAINERS).strip() or "The default is 'plain'."
            yield Problem(f"trainer must be one of {_listed(TRAINERS)}", repr(self.trainer), guess)
        elif self.trainer == "plain" and (self.processes != 1 or self.shared_state):
            yield Problem(
                "the plain trainer has one process",
                f"processes={self.processes!r}, shared_state={self.shared_state!r}",
                "Pass trainer='hogwild' for several.",
            )
        else:
            yield from self._misplaced()
        for name, value in (("compile", True), ("memory_format", "channels_last")):
            if getattr(self, name) == value and self.trainer != "plain":
                yield Problem(
                    f"{name}={value!r} is for the plain trainer",
                    f"trainer={self.trainer!r}",
                    "Leave one of them out.",
                )
        for name in ("shared_state", "compile", "staleness_aware"):
            given: object = getattr(self, name)
            if not isinstance(given, bool):
                yield Problem(f"{name} must be True or False", repr(given), "Leave it out.")

    def _word_problems(self) -> Iterator[Problem]:
        for name, words in WORDS.items():
            value = getattr(self, name)
            if value not in words:
                guess = nearest(str(value), words).strip() or f"The default is {words[0]!r}."
                yield Problem(f"{name} must be one of {_listed(words)}", repr(value), guess)

    def _misplaced(self) -> Iterator[Problem]:
        """Yield what would have no effect on this trainer."""
        for name, trainers in _OF_TRAINER.items():
            if self.trainer not in trainers and getattr(self, name) != getattr(TrainerParams, name):
                yield Problem(
                    f"{name} applies to the trainer {' or '.join(map(repr, trainers))} only",
                    f"it with {self.trainer!r}",
                    f"Leave {name} out, or pass trainer={trainers[0]!r}.",
                )
        if (
            self.epochs_per_round is not None
            and self.steps_per_round != TrainerParams.steps_per_round
        ):
            yield Problem(
                "a round is so many steps, or so many passes",
                f"steps_per_round={self.steps_per_round!r}, "
                f"epochs_per_round={self.epochs_per_round!r}",
                "Leave one of them out.",
            )
        if self.on_gpu and self.trainer == "averaging" and self.processes == 1:
            yield Problem(
                "the last of several processes computes on the GPU, the others on cores",
                f"processes=1, {self.by_kind}",
                "Pass processes=2 or more; the plain trainer trains whole jobs on GPUs.",
            )

    @property
    def deals_parts(self) -> bool:
        """Whether each process of averaging has a part of the samples for a whole epoch."""
        return self.partition_size is not None or self.epochs_per_round is not None

    @property
    def on_gpu(self) -> bool:
        """Whether the last process of each job computes on a GPU."""
        return self.gpu_partition_size is not None or self.gpu_epochs_per_round is not None

    @property
    def by_kind(self) -> str:
        """What was given by kind of process, as it was given."""
        found = {
            name: dict(zip(KINDS, (getattr(self, name), getattr(self, of_gpu)), strict=True))
            for name, of_gpu in _OF_GPU.items()
            if getattr(self, of_gpu) is not None
        }
        return ", ".join(f"{name}={kinds}" for name, kinds in found.items())

    def part_sizes(self, count: int) -> tuple[int, ...]:
        """Return how many of `count` samples each process has in an epoch.

        Examples
        --------
        >>> TrainerParams(processes=3).part_sizes(100)
        (33, 33, 34)
        >>> TrainerParams(processes=3, partition_size=30, gpu_partition_size=80).part_sizes(100)
        (30, 30, 80)
        """
        asked = self.partition_size
        if asked is None:
            edges = [count * rank // self.processes for rank in range(self.processes + 1)]
            return tuple(high - low for low, high in pairwise(edges))
        sizes = self._by_rank(asked, self.gpu_partition_size)
        return tuple(min(size, count) for size in sizes)

    @property
    def passes(self) -> tuple[int, ...]:
        """How often each process passes over its part in an epoch."""
        return self._by_rank(self.epochs_per_round or 1, self.gpu_epochs_per_round)

    def _by_rank(self, cpu: int, gpu: int | None) -> tuple[int, ...]:
        return (cpu,) * (self.processes - 1) + (cpu if gpu is None else gpu,)

    def seen(self, count: int) -> int:
        """Return how many samples all processes train on in an epoch over `count` samples.

        Examples
        --------
        >>> TrainerParams().seen(100)
        100
        >>> dealt = TrainerParams(processes=2, partition_size=80, epochs_per_round=3)
        >>> dealt.seen(100)
        480
        """
        return sum(map(mul, self.part_sizes(count), self.passes))

    @property
    def options(self) -> dict[str, Any]:
        """What of `_LATER` is not the default, by name."""
        defaults = TrainerParams()
        found = {name: getattr(self, name) for name in _LATER}
        return {key: value for key, value in found.items() if value != getattr(defaults, key)}

    @property
    def named(self) -> dict[str, Any]:
        """By name, but for defaults in `_LATER`: runs without these keep their fingerprint."""
        first = {key: value for key, value in asdict(self).items() if key not in _LATER}
        return {**first, **self.options}


_LATER = (
    "steps_per_round",
    "accumulate",
    "precision",
    "compile",
    "memory_format",
    "n_push",
    "n_pull",
    "staleness_aware",
    "partition_size",
    "epochs_per_round",
    "gpu_partition_size",
    "gpu_epochs_per_round",
)
"""Parameters that the first plans did not have."""

KINDS = ("cpu", "gpu")
"""What a process of a job computes on."""

_OF_GPU = {
    "partition_size": "gpu_partition_size",
    "epochs_per_round": "gpu_epochs_per_round",
}
"""Parameters that may be given by kind of process, and where that of the kind 'gpu' is kept."""

WORDS = {
    "precision": ("fp32", "bf16"),
    "memory_format": ("auto", "channels_last", "contiguous"),
}
"""Parameters with a choice of words, the default first."""

_COUNTS = (
    "epochs",
    "save_checkpoint_frequency",
    "print_frequency",
    "eval_batch_size",
    "processes",
    "steps_per_round",
    "accumulate",
    "n_push",
    "n_pull",
    *_OF_GPU,
    *_OF_GPU.values(),
)

_OPTIONAL = (*_OF_GPU, *_OF_GPU.values())
"""Those that may be left open."""

_OF_TRAINER = {
    "shared_state": ("hogwild",),
    "steps_per_round": ("averaging",),
    "accumulate": ("hogwild", "parameter_server"),
    "n_push": ("parameter_server",),
    "n_pull": ("parameter_server",),
    "staleness_aware": ("parameter_server",),
    "partition_size": ("averaging",),
    "epochs_per_round": ("averaging",),
}
"""The only trainers that a field says something to."""


def _kind_problems(name: str, given: Mapping[Any, Any]) -> Iterator[Problem]:
    """Yield why what was given by kind of process does not say it of each."""
    if {*given} not in ({"cpu"}, {*KINDS}) or any(value is None for value in given.values()):
        yield Problem(
            f"{name} by kind of process has a number for 'cpu', or for 'cpu' and 'gpu'",
            f"{name}={dict(given)}",
            "Pass one for each of these kinds, or one number for all.",
        )


def _spelled(name: str) -> str:
    """The name of a parameter as it is given."""
    return next((f"{key} of the kind 'gpu'" for key, own in _OF_GPU.items() if own == name), name)


def _plain(value: Any) -> Any:
    """A NumPy number as Python's own, which JSON can hold."""
    return value.item() if isinstance(value, np.generic) else value


def _listed(words: Sequence[str]) -> str:
    return ", ".join(map(repr, words))


def _is_count(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Plan:
    """All jobs of a sweep and everything their results depend on.

    Parameters
    ----------
    jobs : tuple of Job
        Candidate by candidate, fold by fold.
    params : TrainerParams
        How each job trains.
    batch_size, threads_per_job, random_state : int
        Samples per step, threads inside a job, root seed.
    device : {"cpu", "cuda"}
        The kind of device every job runs on.
    scoring : tuple of str
        Names of the scores; the first ranks.
    dataset : str
        Fingerprint of samples, targets and transforms.
    folds : str
        Fingerprint of the folds.
    classes : tuple of str
        Class names by index; empty for regression.
    recipe : Mapping
        What is known about the live objects: architecture of each model, optimizer settings.
    threads : Mapping of str to int
        Threads by model, of those models only that have others than `threads_per_job`.
    groups : tuple of tuple of str
        Ids of jobs that are trained as one, two or more each; all other jobs are trained by
        themselves. How many are trained as one touches their bits.
    channels_last : tuple of str
        Models whose jobs keep images channels last in memory, where they are trained by themselves.
    last_threads : Mapping of str to int
        Threads by job, of those jobs only that have more than their model: the last ones, for which
        cores would be idle.
    """

    jobs: tuple[Job, ...]
    params: TrainerParams
    batch_size: int
    threads_per_job: int
    random_state: int
    device: str
    scoring: tuple[str, ...]
    dataset: str
    folds: str
    classes: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    threads: Mapping[str, int] = field(default_factory=dict)
    groups: tuple[tuple[str, ...], ...] = ()
    channels_last: tuple[str, ...] = ()
    last_threads: Mapping[str, int] = field(default_factory=dict)

    def group_of(self, job_id: str) -> tuple[str, ...]:
        """Return the ids of all jobs that are trained as one with a job, itself included."""
        return next((group for group in self.groups if job_id in group), (job_id,))

    def is_channels_last(self, job: Job) -> bool:
        """Whether a job keeps images channels last in memory."""
        return job.model in self.channels_last and len(self.group_of(job.id)) == 1

    def threads_of(self, model: str) -> int:
        """Return the threads inside each job of a model, but for the last ones."""
        return self.threads.get(model, self.threads_per_job)

    def most_threads_of(self, model: str) -> int:
        """Return the threads of the job of a model that has most."""
        last = (self.last_threads.get(job.id, 0) for job in self.jobs if job.model == model)
        return max(self.threads_of(model), *last, 0)

    def cores_of(self, model: str) -> int:
        """Return the cores that each job of a model takes: threads × processes."""
        return self.threads_of(model) * self.params.processes

    def with_threads(
        self, threads: Mapping[str, int], last_threads: Mapping[str, int] | None = None
    ) -> Plan:
        """Return this plan with the threads of each model, and of the last jobs.

        One form for equal threads.

        Examples
        --------
        >>> plan = Plan((), TrainerParams(), 32, 1, 0, "cpu", ("accuracy",), "d", "f")
        >>> found = plan.with_threads({"A": 1, "B": 2})
        >>> found.threads_per_job, found.threads, found.threads_of("A")
        (1, {'B': 2}, 1)
        """
        least = min(threads.values(), default=self.threads_per_job)
        more = {model: count for model, count in sorted(threads.items()) if count != least}
        last = dict(sorted((last_threads or {}).items()))
        return replace(self, threads_per_job=least, threads=more, last_threads=last)

    @property
    def threads_text(self) -> str:
        """``"1; VGG 2"``: the threads of a job, and of models and jobs that have others."""
        others = {**self.threads, **self.last_threads}
        more = [f"{name} {count}" for name, count in others.items()]
        return "; ".join([str(self.threads_per_job), *more])

    @property
    def candidates(self) -> tuple[tuple[str, str], ...]:
        """(model, LR schedule) pairs, in the caller's order."""
        return tuple(dict.fromkeys((job.model, job.lr_schedule) for job in self.jobs))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the whole plan; taken once, since each checkpoint carries it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the plan as canonical JSON."""
        found = {**asdict(self), "params": self.params.named}
        for name in ("channels_last", "last_threads"):
            if not found[name]:
                # Runs that were begun before there was a choice keep their fingerprint.
                del found[name]
        return json.dumps(found, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan that `to_json` wrote."""
        raw = json.loads(text)
        raw["jobs"] = tuple(Job(**job) for job in raw["jobs"])
        raw["params"] = TrainerParams(**raw["params"])
        raw["groups"] = tuple(tuple(group) for group in raw.get("groups", ()))
        for name in ("scoring", "classes", "channels_last"):
            raw[name] = tuple(raw.get(name, ()))
        return cls(**raw)

    def first_difference(self, other: Plan) -> str | None:
        """Name the first thing in which `other` differs, or None when the plans are equal.

        Examples
        --------
        >>> plan = Plan((), TrainerParams(), 32, 1, 0, "cpu", ("accuracy",), "d", "f")
        >>> from dataclasses import replace
        >>> plan.first_difference(replace(plan, batch_size=64))
        'batch_size: 32 there, 64 here'
        """
        mine, theirs = (json.loads(json.dumps(asdict(plan))) for plan in (self, other))
        order = ("batch_size", "params", "random_state", "jobs", "dataset", "folds", "scoring")
        names = [*order, *(name for name in mine if name not in order)]
        for name in names:
            found = _difference(name, mine[name], theirs[name])
            if found:
                return found
        return None

    def obstacle(self, other: Plan, free: Collection[str] = ()) -> str | None:
        """Name the first thing for which `other` is no continuation of this plan, or None.

        A continuation may hold further candidates; whatever the results of this plan's jobs depend
        on is the same.

        Parameters
        ----------
        other : Plan
            The same or a greater one.
        free : collection of str
            Fields that may differ.

        Examples
        --------
        >>> fold = Fold(0, 0, np.array([0]), np.array([1]))
        >>> one, two = (make_jobs(models, ["step"], [fold], 0) for models in (["A"], ["B", "A"]))
        >>> plan = Plan(one, TrainerParams(), 32, 1, 0, "cpu", ("accuracy",), "d", "f")
        >>> plan.obstacle(replace(plan, jobs=two))
        >>> replace(plan, jobs=two).obstacle(plan)
        'models: B, A there, A here'
        """
        if not set(self.jobs) <= set(other.jobs):
            return self.first_difference(other)
        mine = {job.id for job in self.jobs}
        common = replace(
            other,
            jobs=self.jobs,
            recipe={
                name: _common(name, self.recipe.get(name), other.recipe[name])
                for name in other.recipe
            },
            groups=tuple(group for group in other.groups if mine.intersection(group)),
            channels_last=tuple(
                model for model in other.channels_last if model in {job.model for job in self.jobs}
            ),
        ).with_threads(
            {job.model: other.threads_of(job.model) for job in self.jobs},
            {name: count for name, count in other.last_threads.items() if name in mine},
        )
        return self.first_difference(
            replace(common, **{name: getattr(self, name) for name in free})
        )


_BY_CANDIDATE = ("architecture", "settings")
"""Parts of the recipe with an entry a candidate."""


def _common(part: str, mine: Any, theirs: Any) -> Any:
    """What a greater plan's recipe says of the candidates that the smaller one has, too."""
    if part not in _BY_CANDIDATE or mine is None:
        return theirs
    return {name: value for name, value in theirs.items() if name in mine}


def _difference(path: str, there: Any, here: Any) -> str | None:
    if there == here:
        return None
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*there, *(key for key in here if key not in there)]:
            found = _difference(f"{path}.{key}", there.get(key), here.get(key))
            if found:
                return found
    if path == "jobs":
        return _jobs_difference(there, here)
    if path == "groups":
        return f"jobs trained as one: {_widths(there)} there, {_widths(here)} here"
    return f"{path}: {_short(there)} there, {_short(here)} here"


def _jobs_difference(there: list[dict[str, Any]], here: list[dict[str, Any]]) -> str:
    for name in ("model", "lr_schedule", "repeat", "fold"):
        old = list(dict.fromkeys(str(job[name]) for job in there))
        new = list(dict.fromkeys(str(job[name]) for job in here))
        if old != new:
            label = {"model": "models", "lr_schedule": "schedulers"}.get(name, f"{name}s")
            return f"{label}: {', '.join(old)} there, {', '.join(new)} here"
    return "jobs: other seeds or another order"


def _widths(groups: list[list[str]]) -> str:
    return " + ".join(str(len(group)) for group in groups) or "none"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def job_seed(random_state: int, repeat: int, fold: int) -> int:
    """Return the seed of a fold's jobs: a function of the root seed, the repeat and the fold only.

    Uses NumPy's ``SeedSequence`` (O'Neill 2015), whose streams do not overlap for near inputs.
    """
    return int(np.random.SeedSequence([random_state, repeat, fold]).generate_state(1)[0])


def make_jobs(
    models: Sequence[str], lr_schedules: Sequence[str], folds: Sequence[Fold], random_state: int
) -> tuple[Job, ...]:
    """Return folds × models × LR schedules, candidate by candidate.

    Examples
    --------
    >>> one = np.array([0]), np.array([1])
    >>> [job.id for job in make_jobs(["A"], ["step", "warm"], [Fold(0, 0, *one)], 0)]
    ['A/step/fold-0', 'A/warm/fold-0']
    """
    repeated = any(fold.repeat for fold in folds)
    return tuple(
        Job(
            model,
            lr_schedule,
            fold.repeat,
            fold.index,
            job_seed(random_state, fold.repeat, fold.index),
            repeated,
        )
        for model in models
        for lr_schedule in lr_schedules
        for fold in folds
    )


def folds_fingerprint(folds: Sequence[Fold]) -> str:
    """Return the SHA-256 of all index arrays, in order."""
    digest = hashlib.sha256()
    for fold in folds:
        digest.update(np.array([*fold.key, len(fold.train), len(fold.valid)], np.int64).tobytes())
        digest.update(fold.train.tobytes())
        digest.update(fold.valid.tobytes())
    return digest.hexdigest()
