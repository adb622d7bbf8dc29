"""One call at work: the folder that it holds, machine, signals, and what is open until its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from asynckfold.api.arguments import Settings
from asynckfold.api.call import Call
from asynckfold.api.display import Display
from asynckfold.errors import OUT_OF_TIME, InterruptedRunError, Problem, refuse
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.reproducibility import THREADS, differences
from asynckfold.jobs.result import DIVERGED, DONE
from asynckfold.planning.workload import Choice
from asynckfold.results.decision import decided_of
from asynckfold.store import RunStore
from asynckfold.store.aside import aside_problems
from asynckfold.store.layout import DATABASE
from asynckfold.sweep.loop import is_stray
from asynckfold.system import terminal
from asynckfold.system.gpus import GpuReading
from asynckfold.system.machine import Machine
from asynckfold.system.signals import Interruption, listening

if TYPE_CHECKING:
    from asynckfold.data.materialize import CheckedDataset


@dataclass(frozen=True, eq=False)
class Session:
    """One call at work.

    `stored` and `before` are plan and choices of the run that is continued; `store` is None where
    nothing is written. `stack` closes the pool and the data.
    """

    call: Call
    machine: Machine
    signals: Interruption
    display: Display
    stored: Plan | None = None
    before: Choice | None = None
    store: RunStore | None = None
    stack: ExitStack = field(default_factory=ExitStack)
    checked: list[CheckedDataset] = field(default_factory=list)

    @property
    def settings(self) -> Settings:
        """The arguments of `AsyncKFold`."""
        return self.call.settings

    @property
    def run(self) -> RunStore:
        """The folder that is held."""
        assert self.store is not None
        return self.store

    @contextmanager
    def until_out_of_time(self) -> Iterator[None]:
        """Show the progress and close what was opened; a time budget ends it without an error."""
        with self.display:
            try:
                with self.stack:
                    yield
            except InterruptedRunError as interrupt:
                if interrupt.exit_code != OUT_OF_TIME or not self.run.reader.has_plan:
                    raise
                self.display.note(str(interrupt))


@contextmanager
def hold_run(call: Call) -> Iterator[Session]:
    """Hold the folder of the run, to begin it or to continue it."""
    settings = call.settings
    with (
        listening() as signals,
        _held(settings.root, settings.resume) as store,
    ):
        signals.limit(settings.time_budget_s)
        display, machine = Display(settings.verbose), settings.present_machine()
        session = Session(call, machine, signals, display, store=store)
        if store.reader.has_plan and settings.resume != "never":
            session = replace(session, stored=store.reader.plan, before=decided_of(store.reader))
        yield session


@contextmanager
def look_into(call: Call) -> Iterator[Session]:
    """Look at the folder of the run, if there is one; nothing is written."""
    settings = call.settings
    with Display(settings.verbose) as display, listening() as signals:
        session = Session(call, settings.present_machine(), signals, display)
        if settings.resume != "never" and (settings.root / DATABASE).is_file():
            with RunStore.read(settings.root) as store:
                session = replace(session, stored=store.plan, before=decided_of(store))
        with session.stack:
            yield session


def software_of(session: Session, draft: Plan, backend: str) -> dict[str, str]:
    """Return the software that trains; refuse other software than the run was begun with."""
    if session.store is None:
        return {}
    from asynckfold.training.software import software

    settings, store = session.settings, session.store
    plan = session.stored or draft
    reading = session.machine.gpus() if plan.device == "cuda" else GpuReading()
    found = software(
        draft.threads_per_job,
        reading.names,
        backend=backend,
        in_workers=settings.engine != "serial",
    )
    if settings.threads is None:
        # The threads that were decided are the run's own; of a new run they are told later.
        del found[THREADS]
        begun = next(iter(store.reader.software() if session.stored is not None else ()), {})
        found |= {THREADS: begun[THREADS]} if THREADS in begun else {}
    if session.stored is not None and not settings.allow_different_software:
        ended = store.reader.finished()
        # Failed jobs are tried again.
        if any(ended.get(job.id) not in (DONE, DIVERGED) for job in draft.jobs):
            refuse(_software_problems(store, found))
    return found


@contextmanager
def _held(root: Path, resume: str) -> Iterator[RunStore]:
    """Hold the run; leave no trace of one that never got a plan."""
    terminal.open_standard()
    fresh = not root.exists()
    store = RunStore.hold(root)
    try:
        refuse(_resume_problems(store, resume))
        yield store
    except KeyboardInterrupt as interrupt:
        if is_stray(interrupt):
            store.file.roll_back()
        raise
    finally:
        empty = not store.reader.has_plan
        store.close()
        if empty:
            for name in ("run.db", "run.lock"):
                (root / name).unlink(missing_ok=True)
            if fresh and not any(root.iterdir()):
                root.rmdir()


def _resume_problems(store: RunStore, resume: str) -> Iterator[Problem]:
    if resume == "must" and not store.reader.has_plan:
        yield Problem(
            "resume='must' needs a folder that holds a run",
            str(store.root),
            "Check the path, or use resume='auto'.",
        )
    if resume == "never" and store.reader.has_plan:
        yield from aside_problems(store.root, store.reader.plan.jobs)


def _software_problems(store: RunStore, here: Mapping[str, str]) -> Iterator[Problem]:
    found = differences(next(iter(store.reader.software()), {}), here)
    if found:
        yield Problem(
            f"{store.root} must be continued with the software that it was begun with",
            "; ".join(found),
            "Use the same software again or another folder, or pass allow_different_software=True: "
            "then the run is no longer reproducible.",
        )


def interrupted(interrupt: KeyboardInterrupt, state: str) -> InterruptedRunError:
    """Return the error that tells by what the call was interrupted, and what stays."""
    code = interrupt.exit_code if isinstance(interrupt, InterruptedRunError) else 130
    return InterruptedRunError(f"{str(interrupt) or 'interrupted'}; {state}", code)
