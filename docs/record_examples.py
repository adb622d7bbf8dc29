"""What the examples print, and a picture of each, and the outputs of the notebooks.

``python docs/record_examples.py grid table`` runs these and renews their files in docs/recorded and
docs/notebooks; without names it runs all. Flags, as in ``python docs/record_examples.py mnist
--quick``, go to the examples, and to the first line of what is kept. mkdocs runs none of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from asynckfold import AsyncKFoldError, load_results

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "docs" / "recorded"


def record(name: str, flags: Sequence[str]) -> None:
    """Run an example by itself in an empty folder; keep what it prints, and its scores drawn."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, ROOT / "examples" / f"{name}.py", *flags],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        line = f"$ python examples/{name}.py {' '.join(flags)}\n" if flags else ""
        write(name, line + ended.stdout, Path(folder))


def record_notebook(path: Path) -> None:
    """Run a notebook in an empty folder; keep its outputs in it."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=None, record_timing=False, resources=resources).execute()
    nbformat.write(notebook, path)


def write(name: str, printed: str, folder: Path) -> None:
    """Write the files of an example that ran in a folder."""
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{name}.txt").write_text(printed.rstrip().replace(f"{folder}/", "") + "\n")
    page = folder / printed.rstrip().splitlines()[-1]
    if page.name != "index.html":
        return
    try:
        figure = load_results(page.parents[1]).plot("scores")
    except AsyncKFoldError as error:
        print(f"{name}: no picture: {error}")
    else:
        figure.savefig(RECORDED / f"{name}.png", dpi=80)


if __name__ == "__main__":
    notebooks = {path.stem: path for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    examples = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    flags = [word for word in sys.argv[1:] if word.startswith("-")]
    names = [word for word in sys.argv[1:] if word not in flags]
    for name in names or [*examples, *notebooks]:
        if name in notebooks:
            record_notebook(notebooks[name])
        else:
            record(name, flags)
