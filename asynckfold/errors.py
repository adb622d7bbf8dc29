"""What can go wrong, drawn as a tree.

::

    AsyncKFoldError
     ├─ InputError            what the caller passed cannot work; nothing was started   exit 2
     │   ├─ PlanMismatchError the folder holds a run of another plan                    exit 2
     │   └─ AbsentError       results lack an attribute; `hasattr` returns False        exit 2
     ├─ SignatureError        an argument that AsyncKFold does not have, or lacks       exit 2
     ├─ RunHeldError          another process works on this folder                      exit 3
     ├─ StoreCorruptError     the run on disk is damaged                                exit 4
     ├─ StorageError          the disk refused; the run can be continued                exit 5
     ├─ NoRoomError           nothing could start for `max_wait`; can be continued      exit 5
     ├─ AllJobsFailedError    not one job succeeded                                     exit 1
     ├─ JobFailedError        a job failed and ``error_score="raise"``                  exit 1
     │   └─ RefitFailedError  the best candidate failed on all samples                  exit 1
     ├─ PeerLostError         a parameter server, or all its replicas, answer no more   exit 1
     ├─ UnpackError           a worker could not unpack the sweep's objects (recorded)
     └─ WorkerDiedError       a worker process ended without an answer (retried)

    KeyboardInterrupt
     └─ InterruptedRunError   Ctrl-C, after everything that can be saved was saved      exit 130
                              (SIGTERM and SIGHUP: 143)
                              a time budget over before there was a plan             exit 124
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, TypeVar


@dataclass(frozen=True)
class Problem:
    """One rule that the input breaks.

    Parameters
    ----------
    rule : str
        What must hold, naming the argument: ``"epochs must be at least 1"``.
    received : str
        The value that was passed.
    remedy : str
        What to do instead.
    """

    rule: str
    received: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.rule}: received {self.received}. {self.remedy}"


_Error = TypeVar("_Error", bound=BaseException)


class _ShortError(BaseException):
    """An error that is printed with frames of the user only; `__traceback__` keeps all.

    In IPython and notebooks, and in scripts, unless another has set `sys.excepthook`, or in
    Python's development mode.
    """

    def __new__(cls: type[_Error], *args: Any, **kwargs: Any) -> _Error:
        """Print errors of this kind by `_print`, and all others as before."""
        if sys.excepthook is sys.__excepthook__ and not sys.flags.dev_mode:
            sys.excepthook = _print
        made: _Error = super().__new__(cls, *args, **kwargs)  # type: ignore[misc]
        return made

    def _render_traceback_(self) -> list[str]:
        """Return the traceback; IPython calls this in place of its formatter."""
        return [line for shown in _shown(self) for line in _rendered(*shown)]


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that ends the process: Python's `sys.excepthook`."""
    if not isinstance(error, _ShortError):
        sys.__excepthook__(kind, error, trace)
        return
    for item, frames in _shown(error):
        traceback.print_exception(type(item), item, frames, chain=False)
    # Python itself ends after any KeyboardInterrupt as after Ctrl-C.
    if getattr(error, "exit_code", 1) == TERMINATED:
        raise SystemExit(TERMINATED)


def _shown(error: BaseException) -> list[tuple[BaseException, TracebackType | None]]:
    """Return an error with the frames of the user, after those of its causes that have any."""
    shown: list[tuple[BaseException, TracebackType | None]] = []
    cause: BaseException | None = error
    while cause is not None:
        frames = _users_frames(cause.__traceback__)
        if frames is not None or cause is error:
            shown.insert(0, (cause, frames))
        cause = cause.__cause__
    return shown


def _rendered(error: BaseException, trace: TracebackType | None) -> list[str]:
    """Format an error without its causes, as the user set up IPython."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    cause, is_alone = error.__cause__, error.__suppress_context__
    try:
        error.__cause__ = None
        lines = shell.InteractiveTB.structured_traceback(type(error), error, trace, tb_offset=0)
        return list(lines)
    finally:
        error.__cause__, error.__suppress_context__ = cause, is_alone


def _users_frames(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    following = _users_frames(trace.tb_next)
    if not _is_users(trace.tb_frame):
        return following
    return TracebackType(following, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _is_users(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    if package == "asynckfold" or package in sys.stdlib_module_names:
        return False
    return not any(name in frame.f_code.co_filename for name in ("site-packages", "dist-packages"))


class AsyncKFoldError(_ShortError, Exception):
    """Base of everything that asynckfold raises on purpose."""

    exit_code = 1


class SignatureError(AsyncKFoldError, TypeError):
    """An argument that does not exist, is missing, or is given twice."""

    exit_code = 2


class InputError(AsyncKFoldError, ValueError):
    """All problems of the arguments, raised before any job starts.

    >>> raise InputError.one("epochs must be at least 1", "0", "Pass epochs=1 or more.")
    Traceback (most recent call last):
    asynckfold.errors.InputError: epochs must be at least 1: received 0. Pass epochs=1 or more.
    """

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self._text())

    @classmethod
    def one(cls, rule: str, received: str, remedy: str) -> InputError:
        """Return the error of a single problem."""
        return cls([Problem(rule, received, remedy)])

    def _text(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        return "\n".join([f"{len(lines)} problems, nothing was started:", *lines])


class PlanMismatchError(InputError):
    """The run folder holds another plan."""


class AbsentError(InputError, AttributeError):
    """Results lack an attribute, such as ``best_estimator_`` without ``refit``."""


class RunHeldError(AsyncKFoldError):
    """Another process holds the run folder."""

    exit_code = 3


class StoreCorruptError(AsyncKFoldError):
    """The run on disk is damaged, or is not a run."""

    exit_code = 4


class StorageError(AsyncKFoldError, OSError):
    """The disk is full, read-only or broken; what was recorded stays, the run can be continued."""

    exit_code = 5


class NoRoomError(AsyncKFoldError):
    """Nothing could start for longer than ``max_wait``; the run can be continued."""

    exit_code = 5


class AllJobsFailedError(AsyncKFoldError):
    """No job of the sweep succeeded."""


class JobFailedError(AsyncKFoldError):
    """A job failed and the caller asked for ``error_score="raise"``."""


class RefitFailedError(JobFailedError):
    """The best candidate failed on all samples; the results of the folds stay."""


class WorkerDiedError(AsyncKFoldError):
    """A worker process ended without an answer: killed, crashed, or exited by user code.

    Parameters
    ----------
    pid : int
        The worker's process number; 0 where it is not known.
    cause : str
        ``"SIGKILL"``, ``"SIGSEGV"`` or ``"exit code 3"``.
    outcome : {"died", "hang", "oom", "gpu_oom", "device_lost"}
        What ended it, as the attempt records it: its own death, our kill of a worker that made no
        progress, the kernel's for want of memory, or a GPU that answers no more.
    peak_memory : int
        Largest resident set of its last task, bytes; 0 where unknown.
    """

    def __init__(self, pid: int, cause: str, outcome: str = "died", peak_memory: int = 0) -> None:
        self.pid = pid
        self.cause = cause
        self.outcome = outcome
        self.peak_memory = peak_memory
        super().__init__(f"{f'worker process {pid}' if pid else 'a worker process'} died: {cause}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.pid, self.cause, self.outcome, self.peak_memory)


class PeerLostError(AsyncKFoldError):
    """The other side of a parameter server does not answer, or answers no more."""


class UnpackError(AsyncKFoldError):
    """A worker could not unpack the models, data or functions that it was sent.

    Parameters
    ----------
    line : str
        What was raised there.
    trace : str
        Its traceback.
    """

    def __init__(self, line: str, trace: str) -> None:
        self.line = line
        self.trace = trace
        super().__init__(line)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.line, self.trace)


OUT_OF_TIME = 124
"""The exit code of a run whose time budget is over: that of the command ``timeout``."""


TERMINATED = 143
"""The exit code after SIGTERM or SIGHUP."""


class InterruptedRunError(_ShortError, KeyboardInterrupt):
    """Ctrl-C, SIGTERM, or SIGHUP of a closed terminal. What was finished is recorded.

    The same call continues.

    Parameters
    ----------
    text : str
        What was interrupted, and what stays.
    exit_code : {130, 143, 124}
        143 for SIGTERM and SIGHUP, 124 for a time budget.
    """

    def __init__(self, text: str = "", exit_code: int = 130) -> None:
        self.exit_code = exit_code
        super().__init__(text)


def refuse(problems: Iterable[Problem]) -> None:
    """Raise one `InputError` for all problems, if there are any."""
    every = list(problems)
    if every:
        raise InputError(every)


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return ``" Did you mean 'cosine'?"`` when a valid word is close, else ``""``.

    >>> nearest("cosin", ["cosine", "warm"]), nearest("CUDA", ["cuda"])
    (" Did you mean 'cosine'?", " Did you mean 'cuda'?")
    >>> nearest("acc", ["jaccard", "accuracy"]), nearest("zzz", ["cosine"])
    (" Did you mean 'accuracy'?", '')
    """
    import difflib

    word, by_lower = word.lower(), {item.lower(): item for item in valid}
    holding = [
        item
        for item in by_lower
        if len(word) > 2 and (item.startswith(word) or item.endswith(word))
    ]
    close = sorted(holding, key=len) or difflib.get_close_matches(word, by_lower, n=1)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""
