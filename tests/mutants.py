"""Tests of the tests: take out one safeguard at a time; the test that names it must turn red.

Run it as ``python -m tests.mutants``; it exits with 1 if any mutation is not noticed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parents[1]
COPIED = ("asynckfold", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    """A safeguard, the text that it is, what stands there without it, and the test of it."""

    name: str
    file: str
    old: str
    new: str
    test: str


POWER = "tests/durability/test_power_loss.py::test_power_loss_at_any_moment"
DAMAGE = "tests/durability/test_damage.py"
PLANTED = "tests/faults/test_planted_files.py::test_it_is_refused_by_its_name_in_one_line"
PLACED = "tests/scheduling/test_place.py"
PROCESSES = "tests/durability/test_processes.py"
KILLED = "tests/durability/test_faults.py::test_killed_at_any_call_nothing_acknowledged_is_lost"

MUTATIONS = (
    Mutation(
        "no fsync of the file",
        "system/files.py",
        "            os.fsync(file.fileno())\n",
        "",
        POWER,
    ),
    Mutation(
        "no fsync of the folder",
        "system/files.py",
        "        os.fsync(folder)\n",
        "",
        POWER,
    ),
    Mutation(
        "no fsync of the folders above",
        "store/recovery.py",
        "            sync_folder(outer)\n",
        "            pass\n",
        POWER,
    ),
    Mutation(
        "no fsync of the run folder's name",
        "system/files.py",
        "        sync_folder(made.parent)\n",
        "        pass\n",
        POWER,
    ),
    Mutation(
        "no fsync in SQLite",
        "store/database.py",
        "PRAGMA synchronous=EXTRA",
        "PRAGMA synchronous=OFF",
        POWER,
    ),
    Mutation(
        "written under the final name",
        "system/files.py",
        'temporary = f"{name}.{os.getpid()}.tmp"',
        "temporary = name",
        KILLED,
    ),
    Mutation(
        "temporary file in another folder",
        "system/files.py",
        'temporary = f"{name}.{os.getpid()}.tmp"',
        'temporary = f"../{name}.{os.getpid()}.tmp"',
        KILLED,
    ),
    Mutation(
        "a temporary file is never removed",
        "store/run.py",
        "        self._settle()\n",
        "        pass\n",
        f"{DAMAGE}::test_what_a_crash_left_is_removed_and_nothing_else",
    ),
    Mutation(
        "no digest check of a checkpoint at recovery",
        "system/files.py",
        "elif digest is not None and _digest(name, folder) != digest:",
        "elif False:",
        f"{DAMAGE}::test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used",
    ),
    Mutation(
        "no digest check of a checkpoint by the worker",
        "training/checkpoint.py",
        "if hashlib.sha256(data).hexdigest() != sha256:",
        "if False:",
        "tests/training/test_checkpoint.py::test_any_flipped_bit_is_damage",
    ),
    Mutation(
        "no comparison of a fold's model with what the run recorded",
        "training/fold_models.py",
        "            refuse(self._difference(member, job, fold))\n",
        "",
        "tests/api/test_fold_models.py::test_what_has_changed_since_the_run_is_told_with_the_fold",
    ),
    Mutation(
        "no digest check of a result",
        "store/reading.py",
        "if result.digest != digest:",
        "if False:",
        f"{DAMAGE}::test_a_result_that_is_changed_while_the_run_is_held_is_told",
    ),
    Mutation(
        "no seals",
        "store/checking.py",
        "    if changed:\n",
        "    if False:\n",
        f"{DAMAGE}::test_a_flipped_bit_is_seen_or_harmless",
    ),
    Mutation(
        "no fence against late writers",
        "store/run.py",
        "if present or newest != (result.attempt, None):",
        "if present:",
        f"{DAMAGE}::test_a_writer_of_an_earlier_session_is_refused",
    ),
    Mutation(
        "no fence against ended attempts",
        "store/run.py",
        "newest != (result.attempt, None)",
        "newest[0] != result.attempt",
        f"{DAMAGE}::test_an_attempt_that_ended_without_a_result_gives_none_later",
    ),
    Mutation(
        "links are followed to a file",
        "system/files.py",
        "_FILE_FLAGS = os.O_NOFOLLOW | ",
        "_FILE_FLAGS = ",
        PLANTED,
    ),
    Mutation(
        "links are followed to a folder",
        "system/files.py",
        "_FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd",
        "_FOLDER_FLAGS, dir_fd",
        PLANTED,
    ),
    Mutation(
        "no look at the folder before a commit",
        "store/run.py",
        "        if not there:\n",
        "        if False:\n",
        f"{PROCESSES}::test_a_folder_that_goes_away_is_noticed_at_the_next_commit",
    ),
    Mutation(
        "a child may close what is its parent's",
        "store/run.py",
        "os.register_at_fork(after_in_child=_abandon_all)\n",
        "",
        f"{PROCESSES}::test_a_child_of_the_holder_cannot_touch_the_run",
    ),
    Mutation(
        "a half copied result is not missed",
        "store/checking.py",
        "    row = db.execute(_LACKING).fetchone()\n",
        "    row = None\n",
        f"{DAMAGE}::test_a_result_that_is_gone_is_told",
    ),
    Mutation(
        "RNG state not restored",
        "training/course.py",
        "            seeding.restore(self.random)\n",
        "",
        "tests/faults/test_kill.py::test_ctrl_c_saves_running_jobs_in_the_middle_of_an_epoch",
    ),
    Mutation(
        "no kill of a worker's process group",
        "training/server.py",
        "        os.killpg(pid, signal.SIGKILL)\n",
        "        pass\n",
        "tests/engines/test_pool.py::test_close_takes_along_what_workers_started",
    ),
    Mutation(
        "cores of running jobs are reserved again",
        "scheduling/reservations.py",
        "[core for core in load.idle if core not in self._cores]",
        "[*load.idle]",
        f"{PLACED}::test_no_core_is_reserved_twice",
    ),
    Mutation(
        "memory of running jobs is not kept",
        "scheduling/reservations.py",
        "            load.free_memory - self.memory,\n",
        "            load.free_memory,\n",
        f"{PLACED}::test_memory_is_kept_where_something_runs_beside",
    ),
    Mutation(
        "nothing starts on a busy machine",
        "scheduling/place.py",
        "    return found if found or running else _force(_backlog(pending), load)\n",
        "    return found\n",
        f"{PLACED}::test_something_starts_where_nothing_runs",
    ),
    Mutation(
        "jobs start beside one that must be alone",
        "scheduling/reservations.py",
        "if self.alone or len(load.idle) <= self.threads:",
        "if len(load.idle) <= self.threads:",
        f"{PLACED}::test_what_must_be_alone_never_shares_the_machine",
    ),
    Mutation(
        "threads lent to libgomp are kept",
        "training/spinning.py",
        "            self._take_back()\n            self._take_back = None\n",
        "            self._take_back = None\n",
        "tests/training/worker/test_spinning.py::test_the_end_of_a_job_takes_back_what_was_lent",
    ),
    Mutation(
        "libgomp gets too few threads to spin little",
        "training/spinning.py",
        "count + 1, 0",
        "1, 0",
        "tests/training/worker/test_spinning.py::test_with_more_threads_than_cores_libgomp_spins_little",
    ),
    Mutation(
        "Ctrl-C strikes the import of a compiled module",
        "system/signals.py",
        "        if _must_wait(frame):\n",
        "        if False:\n",
        "tests/faults/test_signals.py::test_an_interruption_waits_for_the_import_of_a_compiled_module",
    ),
)


@contextmanager
def copied() -> Iterator[Path]:
    """Yield a folder with a copy of the package and its tests."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        for name in COPIED:
            source, copy = HOME / name, Path(folder, name)
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy)
        yield Path(folder)


def turns_red(mutation: Mutation) -> bool:
    """Whether the test fails once the mutation is in a copy of the package."""
    with copied() as folder:
        mutate(folder / "asynckfold" / mutation.file, mutation)
        return not passes(folder, mutation.test)


def red_anyway(tests: Collection[str]) -> list[str]:
    """Return the tests that fail without any mutation: their red would mean nothing."""
    with copied() as folder:
        return [test for test in tests if not passes(folder, test)]


def mutate(path: Path, mutation: Mutation) -> None:
    """Put the mutation into a file, everywhere its text stands."""
    text = path.read_text()
    if mutation.old not in text:
        raise ValueError(f"{mutation.name}: its text is not in {mutation.file} any more")
    path.write_text(text.replace(mutation.old, mutation.new))


def passes(copy: Path, test: str) -> bool:
    """Whether a test passes in a copy; an empty selection is no verdict."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1) or " skipped" in done.stdout:
        raise RuntimeError(f"{test} gives no verdict:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def main(words: list[str]) -> int:
    """Try the mutations whose names contain one of the words, all by default; print a table."""
    chosen = [item for item in MUTATIONS if not words or any(word in item.name for word in words)]
    broken = red_anyway({mutation.test for mutation in chosen})
    if broken:
        print("red without a mutation:", *broken)
        return 1
    unnoticed = 0
    for mutation in chosen:
        started = time.monotonic()
        red = turns_red(mutation)
        unnoticed += not red
        verdict, seconds = "red" if red else "GREEN(!)", time.monotonic() - started
        print(f"{verdict:8} {mutation.name:46} {mutation.test} ({seconds:.0f} s)", flush=True)
    print(f"{len(chosen)} mutations, {unnoticed} not noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
