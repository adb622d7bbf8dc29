"""Open a run to read it, or say what is wrong with the folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path

from asynckfold.errors import Problem, nearest, refuse
from asynckfold.store.layout import DATABASE, path_problems
from asynckfold.store.reader import RunReader
from asynckfold.store.run_store import RunStore
from asynckfold.system.files import reading_error


def open_run(
    directory: str | Path, name: str = "run", problems: Iterable[Problem] = ()
) -> RunReader:
    """Open the run in a folder; `name` is what the caller calls the folder.

    `problems` that the caller found before are reported with those of the folder.

    Raises
    ------
    InputError
        The folder holds no run, or a sweep in it was ended before it had a plan.
    StoreCorruptError
        ``run.db`` was not written by asynckfold, or is damaged.
    StorageError
        It cannot be read.
    """
    given: object = directory
    if not isinstance(given, (str, PathLike)):
        rule, remedy = f"{name} must be the folder of a run", "Pass its path, such as 'runs/x'."
        refuse([*problems, Problem(rule, repr(given)[:80], remedy)])
    root = Path(directory)
    refuse([*problems, *_folder_problems(root, name)])
    return RunStore.read(root)


def _folder_problems(root: Path, name: str) -> Iterator[Problem]:
    too_long = list(path_problems(root))
    if too_long:
        yield from too_long
        return
    try:
        is_run = (root / DATABASE).is_file()
    except OSError as error:
        raise reading_error(error, root) from error
    if not is_run:
        received = f"{root}, which {'is a file' if root.is_file() else f'holds no {DATABASE}'}"
        inside, beside = (_runs(folder) for folder in (root, root.parent))
        remedy = f"Check the path.{nearest(root.name, beside)}"
        if inside:
            more = ", …" * (len(inside) > 5)
            remedy = f"Pass one of the runs in it: {', '.join(inside[:5])}{more}."
        yield Problem(f"{name} must be the folder of a run", received, remedy)


def _runs(folder: Path) -> list[str]:
    return sorted(item.parent.name for item in folder.glob(f"*/{DATABASE}"))
