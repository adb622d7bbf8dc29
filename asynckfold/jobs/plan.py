"""What is to be done: jobs, and the plan that holds them. Pure data.

A plan is everything that a result depends on: equal plans give equal bits on the same machine and
software. Where, when and beside what a job runs is not in it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from asynckfold.jobs.candidate_names import Value, candidate_name, values_of
from asynckfold.jobs.decoding import decoded, encoded, parsed
from asynckfold.jobs.digests import changes
from asynckfold.jobs.objective import Objective, ordinary
from asynckfold.jobs.trainer_params import TrainerParams

if TYPE_CHECKING:
    from asynckfold.jobs.folds import Fold


@dataclass(frozen=True)
class Job:
    """One model × one LR schedule × one fold.

    Parameters
    ----------
    model, lr_schedule : str
        Names; the live objects are in the recipe. With a grid they hold its values, see
        `candidate_names`.
    repeat, fold : int
        Which fold is held out.
    seed : int
        Seeds initial weights, shuffling, dropout and augmentation. The same for every candidate, so
        that candidates are compared on equal terms.
    repeated : bool
        Whether the sweep repeats its folds, so that the id has to say which repeat this is.
    inner : int or None
        Which inner fold of that fold, in nested cross-validation; None: the fold itself.
    """

    model: str
    lr_schedule: str
    repeat: int
    fold: int
    seed: int
    repeated: bool = False
    inner: int | None = None

    @property
    def key(self) -> tuple[int, ...]:
        """The `Fold.key` of its fold."""
        inner = () if self.inner is None else (self.inner,)
        return (self.repeat, self.fold, *inner)

    @property
    def candidate(self) -> str:
        """``"LeNet/cosine"``; with a grid ``"LeNet/cosine/lr=0.01,width=64"``."""
        return candidate_name(self.model, self.lr_schedule)

    @property
    def params(self) -> dict[str, Value]:
        """The values of a grid."""
        return {**values_of(self.model, self.lr_schedule)}

    @property
    def id(self) -> str:
        """``"LeNet/cosine/fold-0"``, with ``repeat-1/`` before the fold where folds repeat."""
        return "/".join([self.candidate, *self.place])

    @property
    def place(self) -> list[str]:
        """What its id and its folder say of its fold: ``["repeat-1", "fold-0"]``."""
        inner = "" if self.inner is None else f"-inner-{self.inner}"
        return [f"repeat-{self.repeat}"] * self.repeated + [f"fold-{self.fold}{inner}"]


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
        The kind of device that jobs run on: "cuda" if any candidate runs on a GPU.
    scoring : tuple of str
        Names of the scores; the first ranks.
    dataset : str
        Fingerprint of samples, targets and transforms.
    folds : str
        Fingerprint of the folds.
    classes : tuple of str
        Class names by index; empty for regression, and for several labels of a sample.
    recipe : Mapping
        What is known about the live objects: architecture of each model, optimizer settings, and
        under ``code`` what they are by value, see `asynckfold.jobs.digests`; and whether samples
        have weights.
    threads : Mapping of str to int
        Threads by model, of those models only that have others than `threads_per_job`.
    groups : tuple of tuple of str
        Ids of jobs that are trained as one, two or more each; all other jobs are trained by
        themselves. How many are trained as one touches their bits.
    channels_last : tuple of str
        Models whose jobs keep images channels last in memory, where they are trained by themselves.
    last_threads : Mapping of str to int
        Threads by job, of those jobs only that have others than their model: the last ones, for
        which cores would be idle, and jobs on a GPU whose model is also trained on cores.
    objective : Objective or None
        What targets and outputs mean; None: classes by logits, or numbers, with labels as they are.
    devices : Mapping of str to str
        Kind of device by candidate, of those candidates only that have another than `device`.
    by_batch : bool
        Whether held-out outputs are scored batch by batch, and losses of an evaluation are means of
        those of batches, since the outputs of all samples would be too large.
    reacting : tuple of str
        Candidates whose LR schedule reacts to a loss, so that each job sets samples of its training
        fold aside for it, unless `inner_valid` does for all.
    race : float or None
        Bound on the chance that racing leaves the best candidate out; None: all jobs are trained.
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
    objective: Objective | None = None
    devices: Mapping[str, str] = field(default_factory=dict)
    by_batch: bool = False
    reacting: tuple[str, ...] = ()
    race: float | None = None

    def device_of(self, candidate: str) -> str:
        """Return the kind of device of a candidate's jobs."""
        return self.devices.get(candidate, self.device)

    def with_devices(self, kinds: Mapping[str, str]) -> Plan:
        """Return this plan with the kind of device of each candidate.

        One form for equal kinds.

        Examples
        --------
        >>> plan = Plan((), TrainerParams(), 32, 1, 0, "cpu", ("accuracy",), "d", "f")
        >>> plan = plan.with_devices({"A/step": "cuda", "B/step": "cpu"})
        >>> plan.device, plan.devices, plan.device_of("A/step")
        ('cuda', {'B/step': 'cpu'}, 'cuda')
        """
        if not kinds:
            return self
        device = "cuda" if "cuda" in kinds.values() else "cpu"
        others = {name: kind for name, kind in sorted(kinds.items()) if kind != device}
        return replace(self, device=device, devices=others)

    @property
    def device_text(self) -> str:
        """``"cpu"``, ``"cuda"``, or ``"cpu and cuda"``."""
        return "cpu and cuda" if self.devices else self.device

    def on(self, device: str) -> Plan:
        """Return this plan with only the jobs on one kind of device."""
        jobs = (job for job in self.jobs if self.device_of(job.candidate) == device)
        return replace(self, jobs=tuple(jobs), device=device, devices={})

    def objective_of(self, model: str) -> Objective:
        """Return the objective of a model."""
        return (self.objective or ordinary(bool(self.classes))).of(model)

    def with_objective(self, objective: Objective | None) -> Plan:
        """Return this plan with an objective; the ordinary one is stored as None."""
        is_ordinary = objective == ordinary(bool(self.classes))
        return replace(self, objective=None if is_ordinary else objective)

    def fold_of(self, job: Job, folds: Sequence[Fold]) -> Fold:
        """Return the fold that a job holds out, with what the job sets aside."""
        from asynckfold.jobs.folds import watched_part

        fold = next(fold for fold in folds if fold.key == job.key)
        if fold.inner_valid.size or job.candidate not in self.reacting:
            return fold
        part = watched_part(fold, folds, self.params.inner_val, job.seed)
        return replace(fold, inner_valid=part)

    def group_of(self, job_id: str) -> tuple[str, ...]:
        """Return the ids of a job's fusion group, or just its own."""
        return next((group for group in self.groups if job_id in group), (job_id,))

    def jobs_outside(self, part: tuple[int, int] | None) -> frozenset[str]:
        """Return the ids of the jobs of other parts: k of n, each of whole fusion groups."""
        if part is None:
            return frozenset()
        number, count = part
        units = dict.fromkeys(self.group_of(job.id) for job in self.jobs)
        others = (unit for at, unit in enumerate(units) if at % count != number - 1)
        return frozenset(itertools.chain.from_iterable(others))

    def is_channels_last(self, job: Job) -> bool:
        """Whether a job keeps images channels last in memory."""
        by_rule = self.params.memory_format == "auto"
        if by_rule and self.devices and self.device_of(job.candidate) == "cuda":
            return False  # the rule was measured on CPUs only
        return job.model in self.channels_last and len(self.group_of(job.id)) == 1

    def threads_of(self, model: str) -> int:
        """Return the threads of a model's jobs, except those in `last_threads`."""
        return self.threads.get(model, self.threads_per_job)

    def most_threads_of(self, model: str) -> int:
        """Return the largest thread count of a model's jobs."""
        last = (self.last_threads.get(job.id, 0) for job in self.jobs if job.model == model)
        return max(self.threads_of(model), *last, 0)

    def with_threads(
        self, threads: Mapping[str, int], last_threads: Mapping[str, int] | None = None
    ) -> Plan:
        """Return this plan with the threads of each model, and of the last jobs.

        One form for equal threads.

        Examples
        --------
        >>> plan = Plan((), TrainerParams(), 32, 1, 0, "cpu", ("accuracy",), "d", "f")
        >>> plan = plan.with_threads({"A": 1, "B": 2})
        >>> plan.threads_per_job, plan.threads, plan.threads_of("A")
        (1, {'B': 2}, 1)
        """
        least = min(threads.values(), default=self.threads_per_job)
        more = {model: count for model, count in sorted(threads.items()) if count != least}
        last = dict(sorted((last_threads or {}).items()))
        return replace(self, threads_per_job=least, threads=more, last_threads=last)

    @property
    def threads_text(self) -> str:
        """``"1; VGG 2"``: the threads of a job, and the exceptions."""
        others = {**self.threads, **self.last_threads}
        more = [f"{name} {count}" for name, count in others.items()]
        return "; ".join([str(self.threads_per_job), *more])

    @property
    def candidates(self) -> tuple[tuple[str, str], ...]:
        """(model, LR schedule) pairs, in the caller's order."""
        return tuple(dict.fromkeys((job.model, job.lr_schedule) for job in self.jobs))

    @property
    def fold_keys(self) -> tuple[tuple[int, ...], ...]:
        """The keys of the folds, in their order."""
        return tuple(dict.fromkeys(job.key for job in self.jobs))

    @property
    def nested(self) -> int:
        """Number of inner folds of each fold; 0 without nested cross-validation."""
        return max((1 + job.inner for job in self.jobs if job.inner is not None), default=0)

    @property
    def outer(self) -> Plan:
        """This plan without the jobs of inner folds."""
        if not self.nested:
            return self
        return replace(self, jobs=tuple(job for job in self.jobs if job.inner is None))

    @property
    def candidate_names(self) -> tuple[str, ...]:
        """Names of the candidates, in the caller's order."""
        return tuple(candidate_name(*pair) for pair in self.candidates)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the whole plan; taken once, since each checkpoint carries it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the plan as canonical JSON: 1 is 1.0 where a number may be a fraction."""
        values = vars(decoded(Plan, parsed(encoded(self)), "plan"))
        if self.race is None:  # as in plans that were written before there was racing
            values = {name: value for name, value in values.items() if name != "race"}
        if not self.nested:  # likewise
            jobs = map(vars, values["jobs"])
            values["jobs"] = [{k: job[k] for k in job if k != "inner"} for job in jobs]
        return encoded(values, is_sorted=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan that `to_json` wrote.

        Raises
        ------
        ValueError
            It is no such text: names what is wrong.
        """
        return _read(text)

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
        code = mine["recipe"].pop("code", {}), theirs["recipe"].pop("code", {})
        order = ("batch_size", "params", "random_state", "jobs")
        later = ("dataset", "folds", "scoring")
        rest = [*later, *(name for name in mine if name not in (*order, *later))]
        return (
            _first(order, mine, theirs)
            or changes.difference(*code, self.candidates)
            or _first(rest, mine, theirs)
        )

    def changed_parts(self, other: Plan) -> dict[str, str]:
        """Return what changed in the live objects of `other`, by part."""
        mine = self.recipe.get("code", {})
        return changes.changes(mine, changes.common(mine, other.recipe.get("code", {})))

    def obstacle(
        self, other: Plan, free: Collection[str] = (), folds: Sequence[Fold] = ()
    ) -> str | None:
        """Name the first thing for which `other` is no continuation of this plan, or None.

        A continuation may hold further candidates, unless they race; whatever else the results of
        the jobs of both depend on is the same. With `folds` it may also hold further repeats and
        scores and more epochs, or fewer candidates.

        Parameters
        ----------
        other : Plan
            The plan of a later call.
        free : collection of str
            Fields that may differ.
        folds : sequence of Fold, optional
            The folds of `other`.

        Examples
        --------
        >>> import numpy as np
        >>> from asynckfold.jobs.folds import Fold
        >>> fold = Fold(0, 0, np.array([0]), np.array([1]))
        >>> pairs = [("B", "step"), ("A", "step")]
        >>> one, two = jobs_of(pairs[1:], [fold], 0), jobs_of(pairs, [fold], 0)
        >>> plan = Plan(one, TrainerParams(), 32, 1, 0, "cpu", ("accuracy",), "d", "f")
        >>> plan.obstacle(replace(plan, jobs=two))
        >>> replace(plan, jobs=two).obstacle(plan)
        'models: B, A there, A here'
        >>> replace(plan, jobs=two).obstacle(plan, folds=[fold])
        """
        if self.nested != other.nested:
            return f"nested: {self.nested or None} there, {other.nested or None} here"
        mine, theirs = set(self.jobs), set(other.jobs)
        is_other = self.race is not None and len(self.jobs) != len(other.jobs)
        keys, grows = self.fold_keys, bool(folds) and self.race is None
        is_view = grows and theirs < mine and {*keys} == {*other.fold_keys}
        if is_other or not (mine <= theirs or is_view):
            return self.first_difference(other)
        there, here = (len({job.fold for job in plan.jobs}) for plan in (self, other))
        if there != here:
            return f"folds: {there} there, {here} here"
        if grows and not is_view:
            if len(keys) < len(other.fold_keys):
                kept = folds_fingerprint([fold for fold in folds if fold.key in keys])
                other = replace(other, folds=kept)
            if other.params.epochs > self.params.epochs:
                other = self._as_long(other)
            if {*other.scoring} >= {*self.scoring}:
                other = self._as_scored(other)
        before = self.view(other) if is_view else self
        common = other if is_view else other.part(self)
        # Their order is that of the candidates in a call.
        sets = ("groups", "channels_last", "reacting")
        equal = [name for name in sets if {*getattr(before, name)} == {*getattr(common, name)}]
        common = replace(common, **{name: getattr(before, name) for name in [*free, *equal]})
        return before.first_difference(common)

    def _as_long(self, longer: Plan) -> Plan:
        """Return a plan of more epochs with those of this one, to which LR schedules are fitted."""
        settings = dict(longer.recipe.get("settings", {}))
        known = self.recipe.get("settings", {})
        settings |= {name: known[name] for name in self.candidate_names if name in known}
        recipe = {**longer.recipe, **({"settings": settings} if settings else {})}
        return replace(
            longer, params=replace(longer.params, epochs=self.params.epochs), recipe=recipe
        )

    def _as_scored(self, other: Plan) -> Plan:
        """Return a plan of more scores, or in another order, with those of this one."""
        mine, theirs = (plan.recipe.get("code", {}) for plan in (self, other))
        added = {*changes.scores(theirs, but=self.scoring)} - {*mine}
        code = {name: text for name, text in theirs.items() if name not in added}
        recipe = {**other.recipe, **({"code": code} if code else {})}
        return replace(other, scoring=self.scoring, recipe=recipe)

    def part(self, smaller: Plan) -> Plan:
        """Return what this plan says of the jobs of a smaller one."""
        mine = {job.id for job in smaller.jobs}
        models = {job.model for job in smaller.jobs}
        candidates = {job.candidate for job in smaller.jobs}
        plan = replace(
            self,
            jobs=smaller.jobs,
            recipe={
                name: _common(name, smaller.recipe.get(name, {}), value)
                for name, value in self.recipe.items()
            },
            groups=tuple(group for group in self.groups if mine.intersection(group)),
            channels_last=tuple(model for model in self.channels_last if model in models),
            reacting=tuple(name for name in self.reacting if name in candidates),
        ).with_threads(
            {model: self.threads_of(model) for model in models},
            {name: count for name, count in self.last_threads.items() if name in mine},
        )
        plan = plan.with_devices({name: self.device_of(name) for name in candidates})
        if plan.objective is not None:
            plan = plan.with_objective(plan.objective.of_models(models))
        return plan

    def view(self, smaller: Plan) -> Plan:
        """Return the part of this plan that a call of fewer candidates trains and shows.

        Jobs whose groups reach beyond it have no group in it.
        """
        names = {job.id for job in smaller.jobs}
        groups = tuple(group for group in self.groups if names.issuperset(group))
        return replace(self.part(smaller), groups=groups)


@lru_cache(maxsize=4)
def _read(text: str) -> Plan:
    """Read a plan; cached, since a reader of a run asks several times."""
    return decoded(Plan, parsed(text), "plan")


_BY_CANDIDATE = ("architecture", "settings")
"""Parts of the recipe with an entry a candidate."""


def _common(part: str, mine: Any, theirs: Any) -> Any:
    """Restrict a larger plan's recipe to the candidates of the smaller one."""
    if part == "code":
        return changes.common(mine, theirs)
    if part not in _BY_CANDIDATE:
        return theirs
    return {name: value for name, value in theirs.items() if name in mine}


def _first(names: Sequence[str], there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    for name in names:
        old, new = _flat(name, there[name]), _flat(name, here[name])
        for path in dict.fromkeys([*old, *new]):
            if old.get(path) != new.get(path):
                return _difference(path, old.get(path), new.get(path))
    return None


def _flat(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    inner = (_flat(f"{path}.{key}", item) for key, item in value.items())
    return {name: item for part in inner for name, item in part.items()}


def _difference(path: str, there: Any, here: Any) -> str:
    if path == "jobs":
        names = {"model": "models", "lr_schedule": "schedulers", "repeat": "repeats"}
        for name, label in {**names, "fold": "folds"}.items():
            old, new = (
                ", ".join(dict.fromkeys(str(job[name]) for job in jobs)) for jobs in (there, here)
            )
            if old != new:
                return f"{label}: {_short(old)} there, {_short(new)} here"
        return "jobs: other seeds or another order"
    if path == "groups":
        widths = (" + ".join(str(len(group)) for group in item) for item in (there, here))
        return "jobs trained as one: {} there, {} here".format(*(text or "none" for text in widths))
    return f"{path}: {_short(there)} there, {_short(here)} here"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def job_seed(random_state: int, *key: int) -> int:
    """Return the seed of a fold's jobs: a function of root seed and `Fold.key` only.

    NumPy's ``SeedSequence`` (O'Neill 2015), whose streams do not overlap for similar inputs.
    """
    import numpy as np

    # Zeros at the end do not change a sequence, so an inner fold counts from 1.
    parts = [*key[:2], *(1 + inner for inner in key[2:])]
    return int(np.random.SeedSequence([random_state, *parts]).generate_state(1)[0])


def jobs_of(
    pairs: Sequence[tuple[str, str]],
    folds: Sequence[Fold],
    random_state: int,
    stored: Iterable[Job] = (),
) -> tuple[Job, ...]:
    """Return folds × candidates, which are pairs of model and LR schedule.

    Repeats that `stored` jobs have keep their form of the id: a run may begin with one.

    >>> import numpy as np
    >>> from asynckfold.jobs.folds import Fold
    >>> fold = Fold(0, 0, np.array([0]), np.array([1]))
    >>> [job.id for job in jobs_of([("A", "step"), ("A", "warm")], [fold], 0)]
    ['A/step/fold-0', 'A/warm/fold-0']
    """
    repeated = any(fold.repeat for fold in folds)
    known = {job.repeat: job.repeated for job in stored}
    return tuple(
        Job(
            model,
            lr_schedule,
            fold.repeat,
            fold.index,
            job_seed(random_state, *fold.key),
            known.get(fold.repeat, repeated),
            fold.inner,
        )
        for model, lr_schedule in pairs
        for fold in folds
    )


def folds_fingerprint(folds: Sequence[Fold]) -> str:
    """Return the SHA-256 of all index arrays, in order."""
    import numpy as np

    digest = hashlib.sha256()
    for fold in folds:
        digest.update(np.array([*fold.key, len(fold.train), len(fold.valid)], np.int64).tobytes())
        digest.update(fold.train.tobytes())
        digest.update(fold.valid.tobytes())
        digest.update(fold.inner_valid.tobytes())
    return digest.hexdigest()
