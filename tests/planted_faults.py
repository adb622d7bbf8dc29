"""Twelve planted faults: each turns a test of `make test` red, or the suite does not guard it.

Run it as ``python -m tests.planted_faults``: it plants them one at a time in a copy of the package,
and exits with 1 if any goes unnoticed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parents[1]
COPIED = ("asynckfold", "tests", "pyproject.toml")
LONG = ("--timeout", "600", "-o", "faulthandler_timeout=590")


@dataclass(frozen=True)
class Fault:
    """A text of the package, which stands there once, the wrong one, and the test that notices.

    Where several files have a test of that name, ``file::test`` names one.
    """

    name: str
    right: str
    wrong: str
    test: str


FAULTS = (
    Fault(
        "a lost fsync",
        "            os.fsync(file.fileno())\n",
        "",
        "test_power_loss_at_any_moment",
    ),
    Fault(
        "a shared seed",
        "np.random.SeedSequence([random_state, *parts])",
        "np.random.SeedSequence([random_state, *parts[:1]])",
        "test_candidates_start_from_equal_weights_and_see_equal_batches",
    ),
    Fault(
        "a swapped fold",
        "Fold(repeat, index, *(_indices(np.asarray(side)) for side in sides))",
        "Fold(repeat, index, *(_indices(np.asarray(side)) for side in sides[1::-1]), *sides[2:])",
        "truth/test_results.py::test_out_of_fold_outputs_are_those_that_were_scored",
    ),
    Fault(
        "an off-by-one epoch on resume",
        'self.epoch, self.batch, self.lr = tree["epoch"], tree["batch"], tree["lr"]',
        'self.epoch, self.batch, self.lr = tree["epoch"] - 1, tree["batch"], tree["lr"]',
        "test_a_training_stopped_after_every_batch_ends_alike",
    ),
    Fault(
        "an unescaped name",
        "autoescape=True",
        "autoescape=False",
        "test_user_text_is_inert",
    ),
    Fault(
        "a wrong sign of a scorer",
        "greater_is_better=scorer._sign > 0",
        "greater_is_better=scorer._sign < 0",
        "test_a_fold_without_a_class_has_a_log_loss_but_no_roc_auc",
    ),
    Fault(
        "an uncorrected interval",
        "np.sqrt((1 / count + train_valid_ratio) * scores.var(ddof=1))",
        "np.sqrt(1 / count * scores.var(ddof=1))",
        "test_the_interval_is_corrected_as_by_nadeau_and_bengio",
    ),
    Fault(
        "a comparison less in Holm's method",
        "left = np.arange(len(order), 0, -1) + others",
        "left = np.maximum(1, np.arange(len(order), 0, -1) - 1 + others)",
        "test_holm",
    ),
    Fault(
        "a criterion that is no part of the code",
        '    parts["criterion"] = recipe.make_criterion or recipe.criterion\n',
        "",
        "test_one_bit_of_a_tensor_changes_the_digest",
    ),
    Fault(
        "a push that moves no parameter",
        "np.subtract(self.values, update, out=self.values)",
        "np.subtract(self.values, 0 * update, out=self.values)",
        "test_a_replica_sees_what_another_pushed",
    ),
    Fault(
        "rare classes drawn less often",
        "return 1 / counts.double()[codes]",
        "return counts.double()[codes]",
        "api/test_sampler.py::test_a_job_has_the_bits_of_a_plain_loop",
    ),
    Fault(
        "codes that are read as numbers",
        "odd = texts.str.fullmatch(_CODE)",
        'odd = texts.str.fullmatch("x^")',
        "test_cells_that_are_not_plain_are_refused",
    ),
)


def place_of(fault: Fault, package: Path) -> Path:
    """Return the file that the fault is planted in.

    Raises
    ------
    ValueError
        The text stands nowhere in the package any more, or more than once.
    """
    found = [path for path in package.rglob("*.py") for _ in range(_count(path, fault.right))]
    if len(found) != 1:
        raise ValueError(f"{fault.name}: {fault.right!r} stands {len(found)} times in the package")
    return found[0]


def _count(path: Path, text: str) -> int:
    return path.read_text("utf-8").count(text)


def noticing(fault: Fault, tests: Path) -> str:
    """Return the test that has to notice, as pytest names it."""
    file, _, name = fault.test.rpartition("::")
    definition = re.compile(rf"^def {name}\(", re.MULTILINE)
    files = [
        path
        for path in tests.rglob(file or "test_*.py")
        if definition.search(path.read_text("utf-8"))
    ]
    if len(files) != 1:
        raise ValueError(f"{fault.name}: {fault.test} stands in {len(files)} files of tests")
    return f"{files[0].relative_to(tests.parent)}::{name}"


@contextmanager
def copied() -> Iterator[Path]:
    """Yield a folder with a copy of the package and its tests."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        for name in COPIED:
            source, copy = HOME / name, Path(folder, name)
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy)
        yield Path(folder)


def is_noticed(fault: Fault) -> bool:
    """Whether the test passes as it is, and fails once the fault is in a copy of the package."""
    with copied() as folder:
        test = noticing(fault, folder / "tests")
        if not passes(folder, test):
            raise RuntimeError(f"{test} is red without a fault")
        path = place_of(fault, folder / "asynckfold")
        path.write_text(path.read_text("utf-8").replace(fault.right, fault.wrong), "utf-8")
        return not passes(folder, test)


def passes(copy: Path, test: str) -> bool:
    """Whether a test passes in a copy; skipped or left to the night, it gives no verdict."""
    done = subprocess.run(
        # A busy machine is no fault.
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *LONG, test],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1) or " skipped" in done.stdout:
        raise RuntimeError(f"{test} gives no verdict:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def main() -> int:
    """Plant all faults; print a table."""
    unnoticed = 0
    for fault in FAULTS:
        started = time.monotonic()
        noticed = is_noticed(fault)
        unnoticed += not noticed
        verdict, seconds = "red" if noticed else "GREEN(!)", time.monotonic() - started
        print(f"{verdict:8} {fault.name:32} {fault.test} ({seconds:.0f} s)", flush=True)
    print(f"{len(FAULTS)} faults planted, {unnoticed} not noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
