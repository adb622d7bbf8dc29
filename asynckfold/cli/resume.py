"""The verb ``resume``: continue a run by its folder, which may be a stranger's.

Of the command that is stored there, only what does no more than compute is taken: numbers, switches
and names of built-in things. What names a file, a host or code comes from the command line.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asynckfold.cli.flags import flags, imports_user_code
from asynckfold.cli.output import Output
from asynckfold.cli.parser import parse_stored
from asynckfold.cli.run import run
from asynckfold.cli.run_folder import open_run, with_root
from asynckfold.errors import Problem, refuse

_TAKEN = re.findall(
    r"\w+",
    """
    accumulate augment baseline batch_size clip_grad_norm compile connect_timeout devices
    engine epochs epochs_per_round error_score eval_batch_size folds fuse inner_val
    inner_valid job_timeout keep_going keep_outputs limit lr lr_step max_memory max_wait
    memory_format min_free_memory models momentum n_jobs n_pull n_push nice optimizer param
    partition_size pos_label precision print_frequency processes
    random_samples rank_by refit repeats report reserve_cores sampler
    save_checkpoint_frequency schedulers scoring seed shared_state stall_timeout
    staleness_aware steps_per_round stratify target_loss task threads_per_job time_budget
    trainer weight_decay yield_to_others
    """,
)
"""Flags whose values are taken from the folder of a run."""

_REPLACED = ("root", "resume", "allow_different_software")
"""Flags whose values come from this command."""


def resume(parsed: argparse.Namespace, out: Output) -> int:
    """Continue a run of built-in models and data."""
    root = Path(parsed.directory)
    with open_run(parsed.directory, parsed.problems) as store:
        about = store.about
    words, stored = parse_stored(about)
    refuse(_trust_problems(words, stored, root, about))
    assert stored is not None
    stored.root, stored.line, stored.resume = parsed.directory, words, "must"
    stored.json, stored.verbose, stored.quiet = parsed.json, parsed.verbose, parsed.quiet
    stored.allow_different_software = parsed.allow_different_software
    return run(stored, out)


def _trust_problems(
    words: list[str], stored: argparse.Namespace | None, root: Path, about: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield what the stored command names that a run's folder is not trusted with."""
    named = "" if stored is None else ", ".join(_untrusted(stored))
    if stored is not None and not named:
        return
    folder, line = str(about.get("folder", "")), words
    place, origin = Path(folder), "command" if "command" in about else "script"
    if stored is not None and (place / (stored.root or "")).resolve() != root.resolve():
        line = with_root(words, str(root.resolve()))  # the folder was moved
    cd = "" if place.resolve() == Path.cwd() else f"cd {shlex.quote(folder)} && "
    shown = f"command again, if it is yours; it continues the run: {cd}"
    yield Problem(
        "a run's folder is never trusted to name code, files or hosts, and resume continues runs "
        "of built-in models and data only",
        named
        or (f"a run of {shlex.join(['asynckfold', *words])}" if words else f"a run of a {origin}"),
        f"Run that same {shown}{shlex.join(['asynckfold', *line])}"
        if words
        else f"Run that same {origin} again: it continues the run.",
    )


def _untrusted(stored: argparse.Namespace) -> Iterator[str]:
    if imports_user_code(stored):
        yield stored.file or f"--models {stored.models}"
    for dest, item in flags().items():
        value = getattr(stored, dest, None)
        is_taken = dest in (*_TAKEN, *_REPLACED) or (dest, value) == ("data", "digits")
        if value is not None and not is_taken:
            yield f"--{item.flag}" if value is True else f"--{item.flag} {value}"
