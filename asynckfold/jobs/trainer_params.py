"""How each job trains: what a user may ask for, checked, and what follows from it. Pure data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from operator import mul
from typing import Any, Literal, get_args

from asynckfold.errors import Problem, nearest, refuse
from asynckfold.jobs.argument import argument, arguments, plain, problems

Trainer = Literal["plain", "hogwild", "allreduce", "averaging", "parameter_server"]

TRAINERS = get_args(Trainer)
"""How one job may be trained; which jobs are fused is in the plan's groups."""

SEVERAL = TRAINERS[1:]
"""Those of several processes."""


def by_kind(text: str) -> int | dict[str, int]:
    """Read ``1000``, or ``cpu=1000,gpu=8000``.

    Raises
    ------
    ValueError
        It says what is accepted.
    """
    pairs = [word.partition("=") for word in text.split(",")]
    try:
        return int(text) if "=" not in text else {kind.strip(): int(n) for kind, _, n in pairs}
    except ValueError:
        rule = "must be a whole number, or one by kind such as cpu=1000,gpu=8000"
        raise ValueError(rule) from None


@dataclass(frozen=True, kw_only=True)
class JobTrainer:
    """How one job is trained: arguments of `AsyncKFold`, and keys of `trainer_params`.

    Parameters
    ----------
    trainer : {"plain", "hogwild", "allreduce", "averaging", "parameter_server"}
        How one job is trained. "plain" uses one process. The others use several, which pays where
        jobs are fewer than cores: "hogwild" updates one shared model without locks (Recht et al.
        2011), "allreduce" sums the gradients of the parts of each batch, "averaging" trains clones
        and averages them every `steps_per_round` steps, and "parameter_server" trains replicas that
        push to a parameter server and pull from it (Dean et al. 2012). Hogwild and
        parameter-server runs differ in the last digits from run to run.
    processes : int or dict
        Processes of a job, one core each. More than one needs a `trainer` other than "plain". With
        ``{"cpu": 6, "gpu": 2}`` averaging trains on the GPU by the last two of eight processes.
    shared_state : bool
        Share the optimizer's state (momentum, moments) among the processes of a job, too.
    precision : {"fp32", "tf32", "bf16", "fp16"}
        Data type in which models compute. "tf32" lets GPUs round the inputs of matrix products and
        convolutions to 3 digits; it has no effect on cores. "bf16" uses `torch.autocast` for
        training and evaluation: 2 to 3 digits, faster on GPUs and on processors with AMX, many
        times slower elsewhere. "fp16" does so in float16, with scaled losses, on GPUs only. The
        loss is computed in float32.
    """

    trainer: Trainer = argument("plain", group="training")
    processes: int = argument(
        1, group="training", least=1, reads=by_kind, metavar="N|cpu=N,gpu=N", has_own_check=True
    )
    shared_state: bool = argument(False, group="advanced", trainers=("hogwild",))
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = argument("fp32", group="training")


@dataclass(frozen=True)
class TrainerParams(JobTrainer):
    """How each job trains.

    Parameters
    ----------
    epochs : int
        Passes over the training fold.
    save_checkpoint_frequency : int
        Epochs between two checkpoints. The last epoch is always saved.
    print_frequency : int
        Batches between two lines in a job's log.
    lr_step : {"epoch", "batch"}
        When LR schedules step.
    inner_val : float
        Share of the training fold that is held out to steer ``ReduceLROnPlateau``, where there is
        no `inner_valid`. No other LR schedule uses it.
    clip_grad_norm : float or None
        Largest norm of the gradient. None does not clip.
    eval_batch_size : int
        Samples per batch during evaluation. Results change by rounding only.
    steps_per_round : int
        Steps of each process between two averages.
    accumulate : int
        Batches of a process whose mean gradient makes one step. At the end of an epoch, fewer may
        be left. LR schedules that step with batches step once for each.
    memory_format : {"auto", "channels_last", "contiguous"}
        Memory layout of images in unfused jobs. "auto" uses channels-last where the rule of
        `asynckfold.planning.memory_format` predicts a gain. The layout changes bits and is part of
        the plan.
    compile : bool
        Compile each model with `torch.compile`, which takes seconds per job. A model that cannot be
        compiled as a whole fails its jobs.
    n_push : int
        Steps of a replica between two pushes to the parameter server.
    n_pull : int
        Steps of a replica between two pulls from the parameter server.
    staleness_aware : bool
        Weight a push less, the more pushes of other replicas came between (Zhang et al. 2016).
    partition_size : int, dict or None
        Samples of the training fold that each process gets in an epoch. None divides the fold into
        equal parts. Larger parts overlap; smaller ones leave some samples to other epochs. With
        ``{"cpu": 1000, "gpu": 8000}`` the last process of each job computes on a GPU, or as many
        as `processes` says.
    epochs_per_round : int, dict or None
        Passes of each process over its part between two averages, in place of `steps_per_round`.
        One round is one epoch. Also by kind of process, as `partition_size`.
    target_loss : float or None
        Training loss at which a job ends: after the first epoch whose mean loss is not larger. LR
        schedules are still fitted to all `epochs`. None trains all of them.
    gpu_partition_size, gpu_epochs_per_round : int or None
        The value for the kind "gpu" of the two parameters above.
    gpu_processes : int or None
        That of `processes`, which counts both kinds.
    """

    epochs: int = argument(5, group="training", least=1, is_common=True)
    save_checkpoint_frequency: int = argument(1, group="output", least=1)
    print_frequency: int = argument(100, group="output", least=1)
    lr_step: Literal["epoch", "batch"] = argument("epoch", group="training")
    inner_val: float = argument(0.1, group="advanced", above=0, below=1)
    clip_grad_norm: float | None = argument(None, group="training", above=0)
    eval_batch_size: int = argument(256, group="advanced", least=1)
    steps_per_round: int = argument(16, group="advanced", least=1, trainers=("averaging",))
    accumulate: int = argument(
        1, group="advanced", least=1, trainers=("plain", "hogwild", "parameter_server")
    )
    compile: bool = argument(False, group="advanced")
    memory_format: Literal["auto", "channels_last", "contiguous"] = argument(
        "auto", group="advanced"
    )
    n_push: int = argument(1, group="advanced", least=1, trainers=("parameter_server",))
    n_pull: int = argument(1, group="advanced", least=1, trainers=("parameter_server",))
    staleness_aware: bool = argument(False, group="advanced", trainers=("parameter_server",))
    partition_size: int | None = argument(
        None,
        group="advanced",
        least=1,
        reads=by_kind,
        metavar="N|cpu=N,gpu=N",
        none="",
        trainers=("averaging",),
    )
    epochs_per_round: int | None = argument(
        None,
        group="advanced",
        least=1,
        reads=by_kind,
        metavar="N|cpu=N,gpu=N",
        none="",
        trainers=("averaging",),
    )
    target_loss: float | None = argument(None, group="advanced", none="", trainers=("averaging",))
    gpu_partition_size: int | None = None
    gpu_epochs_per_round: int | None = None
    gpu_processes: int | None = None

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
print_frequency, processes, save_checkpoint_frequency, shared_state, \
staleness_aware, steps_per_round, target_loss, trainer.
        """
        known = arguments(cls)
        values = {key: plain(value) for key, value in dict(words or {}).items()}
        if "max_epochs" in values and "epochs" not in values:
            values["epochs"] = values.pop("max_epochs")
        wrong = [
            Problem(
                "trainer_params must use known keys",
                repr(key),
                f"{nearest(str(key), known).strip()} Valid: {', '.join(sorted(known))}.".strip(),
            )
            for key in values
            if key not in known
        ]
        values = {key: value for key, value in values.items() if key in known}
        for name in ("processes", *_OF_GPU):
            given = values.get(name)
            if not isinstance(given, Mapping):
                continue
            wrong += _kind_problems(name, given)
            counts = [plain(given.get(kind)) for kind in KINDS]
            if name == "processes":
                named = [count for count in counts if count is not None]
                wrong += filter(None, (_process_problem(count, " of a kind") for count in named))
                refuse(wrong)
                counts = [sum(named), counts[1]]
            values[name], values[f"gpu_{name}"] = counts
        params = cls(**values)
        refuse([*wrong, *params.problems()])
        return params

    def problems(self) -> Iterator[Problem]:
        """Yield all that is wrong with the parameters."""
        yield from problems(self)
        if (problem := _process_problem(self.processes)) is not None:
            yield problem
        for name, of_gpu in _OF_GPU.items():
            problem = arguments(type(self))[name].problem(
                getattr(self, of_gpu), f"{name} of the kind 'gpu'"
            )
            if problem is not None:
                yield problem
        yield from self._trainer_problems()

    def _trainer_problems(self) -> Iterator[Problem]:
        """Yield what would have no effect on this trainer, or cannot be done by it."""
        is_plain = self.trainer == "plain"
        if self.trainer not in TRAINERS:
            return
        if is_plain and self.processes != 1:
            yield Problem(
                "the plain trainer has one process",
                f"processes={self.processes}",
                "Pass trainer='hogwild' for several.",
            )
        for name, item in arguments(type(self)).items():
            trainers = item.trainers or TRAINERS
            if self.trainer not in trainers and getattr(self, name) != item.default:
                yield Problem(
                    f"{name} applies to the trainer {' or '.join(map(repr, trainers))} only",
                    f"it with {self.trainer!r}",
                    f"Leave {name} out, or pass trainer={trainers[0]!r}.",
                )
        plain_only = {"compile": True, "memory_format": "channels_last", "precision": "fp16"}
        for name, value in plain_only.items():
            if getattr(self, name) == value and not is_plain:
                yield Problem(
                    f"{name}={value!r} is for the plain trainer",
                    f"trainer={self.trainer!r}",
                    "Leave one of them out.",
                )
        steps = self.steps_per_round
        if self.epochs_per_round is not None and steps != TrainerParams.steps_per_round:
            yield Problem(
                "a round is a number of steps or a number of passes",
                f"steps_per_round={steps}, epochs_per_round={self.epochs_per_round}",
                "Leave one of them out.",
            )
        is_counted = _process_problem(self.processes) is None
        if self.gpu_processes is not None and self.trainer != "averaging":
            yield Problem(
                "processes of the kind 'gpu' are for the trainer 'averaging'",
                f"trainer={self.trainer!r}, {self.by_kind}",
                "Pass trainer='averaging', or one number of processes.",
            )
        elif self.trainer == "averaging" and is_counted and not self.on_cores:
            count = "" if self.gpu_processes else f"processes={self.processes}, "
            yield Problem(
                "averaging needs a process on a core beside those on a GPU",
                f"{count}{self.by_kind}",
                "Pass processes=2 or more, or {'cpu': 1, 'gpu': 1}; the plain trainer trains whole "
                "jobs on GPUs.",
            )

    @property
    def precision_on_cores(self) -> str:
        """Data type on cores, as in the dry run and in predictions."""
        return self.precision if self.precision == "bf16" else "fp32"

    @property
    def has_partitions(self) -> bool:
        """Whether each process of averaging has a part of the samples for a whole epoch."""
        return self.partition_size is not None or self.epochs_per_round is not None

    @property
    def on_gpu(self) -> bool:
        """Whether the last processes of each job compute on a GPU."""
        return self.on_cores < self.processes

    @property
    def on_cores(self) -> int:
        """How many processes of a job compute on cores: the first ones.

        Examples
        --------
        >>> TrainerParams(processes=3).on_cores
        3
        >>> TrainerParams(processes=3, partition_size=30, gpu_partition_size=80).on_cores
        2
        >>> TrainerParams(processes=8, gpu_processes=2).on_cores
        6
        """
        if self.gpu_processes is not None:
            return self.processes - self.gpu_processes
        parts = (self.gpu_partition_size, self.gpu_epochs_per_round)
        return self.processes - any(part is not None for part in parts)

    @property
    def by_kind(self) -> str:
        """What was given by kind of process, as it was given."""
        by_name = {
            name: dict(zip(KINDS, (getattr(self, name), getattr(self, of_gpu)), strict=True))
            for name, of_gpu in _OF_GPU.items()
            if getattr(self, of_gpu) is not None
        }
        if self.gpu_processes is not None:
            counts = zip(KINDS, (self.on_cores, self.gpu_processes), strict=True)
            by_name = {"processes": {kind: count for kind, count in counts if count}, **by_name}
        return ", ".join(f"{name}={kinds}" for name, kinds in by_name.items())

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
        many = self.processes - self.on_cores
        return (cpu,) * self.on_cores + (cpu if gpu is None else gpu,) * many

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
        """What differs from the defaults, by name; without `epochs`."""
        values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        return {
            name: value
            for name, (value, default) in values.items()
            if name != "epochs" and value != default
        }


KINDS = ("cpu", "gpu")
"""What a process of a job computes on."""

_OF_GPU = {name: f"gpu_{name}" for name in ("partition_size", "epochs_per_round")}
"""Parameters that may be given by kind of process, and where that of the kind 'gpu' is kept."""


def _process_problem(count: object, of: str = "") -> Problem | None:
    return arguments(JobTrainer)["processes"].problem(count, f"processes{of}")


def _kind_problems(name: str, given: Mapping[Any, Any]) -> Iterator[Problem]:
    """Yield why what was given by kind of process does not say it of each."""
    accepted, kinds = [{"cpu"}, {*KINDS}], "'cpu', or for 'cpu' and 'gpu'"
    if name == "processes":
        accepted, kinds = [*accepted, {"gpu"}], "'cpu', 'gpu' or both"
    if {*given} not in accepted or any(value is None for value in given.values()):
        yield Problem(
            f"{name} by kind of process must give a number for {kinds}",
            f"{name}={dict(given)}",
            f"Pass for instance {name}={{'cpu': 1, 'gpu': 2}}, or one number for all processes.",
        )
