"""How much of the machine a run may use, checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypeGuard

from asynckfold.errors import InputError, Problem
from asynckfold.jobs.argument import argument, problems
from asynckfold.system.units import gibibytes, in_bytes

if TYPE_CHECKING:
    from asynckfold.jobs.trainer_params import TrainerParams
    from asynckfold.system.machine import Machine

NICEST = 19


@dataclass(frozen=True, kw_only=True)
class MachineArguments:
    """The arguments of `AsyncKFold` about the machine.

    Parameters
    ----------
    n_jobs : int, "auto" or None
        Number of jobs at a time: -1 for all cores, as in joblib; "auto" for what is idle now. None
        takes the number of ``joblib.parallel_config(n_jobs=...)`` around the call, and is "auto"
        outside of one.
    threads_per_job : int or "auto"
        Threads of each job. They change bits and are part of the plan. "auto" decides for each
        model by a rule over its operations, the number of jobs and the allotted cores, whether
        these are idle or busy, and gives the last jobs the cores that would be idle. 1 gives the
        same bits on any number of cores.
    devices : {"auto", "cpu", "cuda"} or list
        Devices to use: "auto" for cores and visible GPUs, "cpu", "cuda" for GPUs alone, or a list.
        A list names GPUs by their numbers, and cores by "cpu": ``["cpu", 0]``. On both kinds, a
        rule decides which candidates run where; all folds of a candidate run on one kind, which is
        part of the plan. Jobs of several processes then run on cores.
    reserve_cores : int
        Number of cores to leave free. The threads of the models are decided without them.
    max_memory : float, str or None
        Limit on the estimated memory of all running jobs and their workers: a share up to 1, bytes,
        or a size such as "8GiB". What all workers share, some 300 MiB, and this process are not
        counted.
    min_free_memory : float or str
        Free memory below which no job starts: a share up to 1, bytes, or a size such as "2GiB".
        Running jobs are never killed.
    nice : int
        Niceness of the workers and of the processes that they start, 0 to 19.
    max_wait : float or None
        Seconds to wait until the first job can start. After that the call raises `NoRoomError`;
        the same call continues it. Busy cores never stop the last running job. None waits forever.
    yield_to_others : bool
        Let running jobs make room when other programs need their cores. A job moves to idle cores,
        or pauses between two batches while another job goes on. One job always runs.
    """

    n_jobs: int | Literal["auto"] | None = argument(
        "auto", group="machine", is_common=True, has_own_check=True, none=""
    )
    threads_per_job: int | Literal["auto"] = argument("auto", group="machine", least=1)
    devices: Literal["auto", "cpu", "cuda"] | Sequence[int | Literal["cpu"]] = argument(
        "auto", group="machine", unit="GPU numbers"
    )
    reserve_cores: int = argument(
        0, group="machine", least=0, remedy="Pass reserve_cores=1 to leave one core free."
    )
    max_memory: float | str | None = argument(None, group="machine", metavar="M")
    min_free_memory: float | str = argument("256MiB", group="machine", metavar="M")
    nice: int = argument(0, group="machine", least=0, most=NICEST)
    max_wait: float | None = argument(
        3600.0, group="machine", above=0, unit="seconds", remedy="Pass max_wait=3600, or None."
    )
    yield_to_others: bool = argument(False, group="machine")

    def sharing(self) -> MachineArguments:
        """Return these arguments alone, for another machine."""
        return MachineArguments(
            **{item.name: getattr(self, item.name) for item in fields(MachineArguments)}
        )

    def machine(self) -> Machine:
        """Return the machine as far as this run may use it."""
        from asynckfold.system.machine import Machine, total_memory

        total = total_memory()
        most = self.max_memory
        return Machine(
            "cpu" if self._lists_cores_only else self.devices,
            reserve_cores=self.reserve_cores,
            max_memory=None if most is None else in_bytes(most, total),
            min_free_memory=in_bytes(self.min_free_memory, total),
            yields=self.yield_to_others,
        )

    def present_machine(self) -> Machine:
        """Return the machine; refuse GPUs that were asked for and are not there."""
        machine = self.machine()
        reading = machine.gpus()
        needed = self.devices not in ("auto", "cpu") and not self._lists_cores_only
        if needed and (not reading.gpus or (self.devices != "cuda" and reading.reason)):
            raise InputError.one(
                "devices must name GPUs that are there",
                f"{self.devices!r}: {reading.reason or 'it names none'}",
                "See `asynckfold doctor`, or pass devices='auto'.",
            )
        return machine

    @property
    def _lists_cores_only(self) -> bool:
        return {*self.devices} == {"cpu"}

    @property
    def names_gpus_only(self) -> bool:
        """Whether `devices` names GPUs and no cores."""
        if isinstance(self.devices, str):
            return self.devices == "cuda"
        return "cpu" not in self.devices

    def kinds(self, machine: Machine, params: TrainerParams) -> tuple[str, ...]:
        """Return the kinds of device that the jobs may run on."""
        if not machine.gpus().gpus:
            return ("cpu",)
        if params.on_gpu or params.precision == "fp16" or self.names_gpus_only:
            return ("cuda",)
        return ("cpu", "cuda") if params.processes == 1 else ("cpu",)

    @property
    def trains_here(self) -> bool:
        """Whether all jobs run on this machine, so that its cores are the most for one."""
        return True

    @property
    def threads(self) -> int | None:
        """Threads of each job; None where they are decided for each model."""
        return self.threads_per_job if isinstance(self.threads_per_job, int) else None

    def problems(self) -> Iterator[Problem]:
        """Yield all that is wrong with these arguments on this machine."""
        yield from problems(self)
        yield from self.machine_problems()

    def machine_problems(self) -> Iterator[Problem]:
        """Yield what is wrong with these arguments on this machine, each of them being valid."""
        from asynckfold.system.limits import allowed_cores
        from asynckfold.system.machine import resolve_n_jobs

        cores, reserved = len(allowed_cores()), self.reserve_cores
        if _is_whole(reserved) and reserved >= cores:
            yield Problem(
                "reserve_cores must leave at least one core to the run",
                f"{reserved} of the {cores} that this process may use",
                f"Pass reserve_cores={cores - 1} or less.",
            )
        cores, left = self.cores()
        try:
            resolve_n_jobs(self.n_jobs, cores)
        except InputError as error:
            yield from error.problems
        threads = self.threads_per_job
        if _is_whole(threads) and threads > cores and self.trains_here:
            yield Problem(
                "threads_per_job must not exceed the cores that this process may use",
                f"{threads} threads on {cores} {'core' if cores == 1 else 'cores'}{left}",
                f"Pass threads_per_job={cores} or less: more threads than cores were measured up "
                "to 80 times slower.",
            )
        yield from self._memory_problems()

    def cores(self) -> tuple[int, str]:
        """Return how many cores may be used, and what was reserved, for a message."""
        from asynckfold.system.limits import allowed_cores

        cores, reserved = len(allowed_cores()), self.reserve_cores
        if _is_whole(reserved) and 0 < reserved < cores:
            return cores - reserved, f", less {reserved} reserved"
        return cores, ""

    def _memory_problems(self) -> Iterator[Problem]:
        from asynckfold.system.machine import total_memory

        total = total_memory()
        for name, value in (
            ("max_memory", self.max_memory),
            ("min_free_memory", self.min_free_memory),
        ):
            if value is None and name == "max_memory":
                continue
            try:
                size = in_bytes(value, total)
            except ValueError:
                yield Problem(
                    f"{name} must be a share of the memory up to 1, or bytes such as '2GiB'",
                    repr(value),
                    f"Pass {name}=0.1, '10%' or '2GiB'.",
                )
                continue
            if name == "max_memory" and not size:
                yield Problem(
                    "max_memory must leave some memory to the run",
                    f"{value!r} of {gibibytes(total, 2)}",
                    "Pass max_memory='8GiB', or leave it out.",
                )
            if name == "min_free_memory" and 0 < total <= size:
                yield Problem(
                    "min_free_memory must be less than the memory that this process may use",
                    f"{value!r}, which is {gibibytes(size, 2)} of {gibibytes(total, 2)}",
                    "Pass min_free_memory=0.1 or less.",
                )


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
