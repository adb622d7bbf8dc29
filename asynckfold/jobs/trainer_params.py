"""How each job trains: what a user may ask for, checked, and what follows from it. Pure data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from operator import mul
from typing import Any

import numpy as np

from asynckfold.errors import Problem, nearest, refuse

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
        `asynckfold.planning.memory_format`.
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
