"""Open a run to read it, or say what is wrong with the folder."""

from __future__ import annotations

from pathlib import Path

from asynckfold.errors import Problem, nearest, refuse
from asynckfold.store.layout import DATABASE, path_problems
from asynckfold.store.reader import RunReader
from asynckfold.store.run_store import RunStore
from asynckfold.system.files import reading_error


def open_run(directory: str | Path, name: str = "run") -> RunReader:
    """Open the run in a folder; `name` is what the caller calls the folder.

    Raises
    ------
    InputError
        The folder holds no run, or a sweep in it was ended before it had a plan.
    StoreCorruptError
        ``run.db`` was not written by asynckfold, or is damaged.
    StorageError
        It cannot be read.
    """
    root = Path(directory)
    refuse(path_problems(root))
    try:
        is_run = (root / DATABASE).is_file()
    except OSError as error:
        raise reading_error(error, root) from error
    if not is_run:
        runs = [item.parent.name for item in root.parent.glob(f"*/{DATABASE}")]
        received = f"{root}, which {'holds no ' + DATABASE if root.is_dir() else 'is no folder'}"
        remedy = f"Check the path.{nearest(root.name, runs)}"
        refuse([Problem(f"{name} must be the folder of a run", received, remedy)])
    return RunStore.read(root)
