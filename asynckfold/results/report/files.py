"""The files beside the page: tables as CSV, Markdown (README) and LaTeX (paper), and the figures.

PNG files are drawn again only if their numbers have changed. A stamp file records what they show::

    digest of the numbers                 requested
    digest of the numbers, and names      drawn
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from asynckfold.errors import StorageError
from asynckfold.jobs.decoding import uncollected
from asynckfold.jobs.result import Epoch
from asynckfold.results.cv_results import CVResults
from asynckfold.results.report import page_tables
from asynckfold.results.report.sanitize import clean
from asynckfold.results.report.summary import Summary
from asynckfold.system import background
from asynckfold.system.files import read_plain, write_whole
from asynckfold.system.plain_text import one_line

if TYPE_CHECKING:
    import pandas as pd

_WORDS = 2
"""Columns that are aligned to the left: rank and candidate."""

_LATEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        **{"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"},
        # In the plain text font of TeX these print other signs.
        **{"<": "$<$", ">": "$>$", "|": "\\textbar{}", "±": "$\\pm$"},
    }
)

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~])")


# Beginnings of formulas in spreadsheets (OWASP, "CSV Injection").
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def table_files(results: CVResults, summary: Summary) -> dict[str, bytes]:
    """Return the tables by the names of their files."""
    import pandas as pd

    candidates, epochs = results.to_frame(), results.to_frame("epoch")
    candidates["rank"] = candidates["rank"].astype("Int64")
    candidates["fingerprint"] = results.fingerprint
    candidates["bit_identity"] = str(results.bit_identity)
    if epochs.empty:
        names = ["model", "scheduler", "repeat", "fold", "epoch"]
        epochs = pd.DataFrame(columns=[*names, *(item.name for item in fields(Epoch)[1:-1])])
    ranking = page_tables.ranking(summary)
    header = [Markup(title).striptags() for title, _ in ranking.columns]
    rows = [[str(cell) for cell in row] for row in ranking.rows]
    return {
        "results.csv": csv_table(candidates),
        "folds.csv": csv_table(results.to_frame("fold")),
        "epochs.csv": csv_table(epochs),
        "results.md": markdown(header, rows).encode(),
        "results.tex": latex(header, rows, str(summary.verdict)).encode(),
    }


def csv_table(frame: pd.DataFrame) -> bytes:
    """Return a data frame as UTF-8 CSV in which no cell is a formula.

    >>> import pandas as pd
    >>> csv_table(pd.DataFrame({"model": ["=1+1"], "score": [-0.5]}))
    b"model,score\\r\\n'=1+1,-0.5\\r\\n"
    """
    safe = frame.copy()
    for name, texts in frame.select_dtypes(exclude="number").items():
        safe[name] = texts.map(_cell)
    safe = safe.rename(columns=_cell)
    return str(safe.to_csv(index=False, lineterminator="\r\n")).encode()


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = clean(value)
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in GitHub's Markdown.

    >>> print(markdown(["rank", "candidate", "p"], [["1", "a|b/step", ""]]))
    | rank | candidate | p |
    | --- | --- | ---: |
    | 1 | a\\|b/step |  |
    <BLANKLINE>
    """
    aligned = ["---" if place < _WORDS else "---:" for place in range(len(header))]
    cells = [[_MARKDOWN.sub(r"\\\1", one_line(cell)) for cell in row] for row in (header, *rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (cells[0], aligned, *cells[1:]))


def latex(header: Sequence[str], rows: Sequence[Sequence[str]], verdict: str) -> str:
    """Return a ``tabular`` with the rules of ``booktabs``, the verdict as a comment above it."""
    head, *body = (" & ".join(map(_latex_cell, row)) + " \\\\\n" for row in (header, *rows))
    aligned = "l" * _WORDS + "r" * (len(header) - _WORDS)
    return (
        f"% \\usepackage{{booktabs}}\n% {one_line(verdict)}\n\\begin{{tabular}}{{{aligned}}}\n"
        f"\\toprule\n{head}\\midrule\n{''.join(body)}\\bottomrule\n\\end{{tabular}}\n"
    )


def _latex_cell(text: str) -> str:
    return re.sub(r"(?<!\S)-(?=\d)", "$-$", one_line(text).translate(_LATEX))


STAMP = ".figures"


@dataclass(frozen=True)
class _Order:
    """What to draw, and where."""

    folder: Path
    summary: Summary
    digest: str


def update(
    summary: Summary, parts: Mapping[str, str], folder: Path, *, beside: bool = False
) -> None:
    """Draw the figures of a folder if their numbers changed; `beside`: in a background process.

    `parts` are the numbers as JSON, by name.
    """
    # No figure shows the audit, or events, of which a call without pending jobs adds some. Of the
    # verdict, which has a pair for any two models, figures show the sentences.
    shown = {**parts, "audit": "", "events": "", "verdict": str(summary.verdict)}
    text = json.dumps([shown, version("asynckfold")])
    digest = hashlib.sha256(text.encode()).hexdigest()
    order = _Order(folder.absolute(), summary, digest)
    if not beside:
        background.wait()
    drawn, *names = _stamp(order)
    if drawn == digest and names and all((folder / name).is_file() for name in names):
        return
    write_whole(folder / STAMP, digest.encode())
    if beside:
        complaint = f"the figures of {folder} are not drawn; `asynckfold report` tries again"
        try:
            background.start(__name__, pickle.dumps(order), digest, complaint)
        except OSError:
            _draw(order)
    else:
        _draw(order)


def run(data: bytes) -> None:
    """Draw an order that another process has pickled, unless its folder is gone."""
    order: _Order = pickle.loads(data)
    try:
        _draw(order)
    except StorageError:
        if order.folder.exists():
            raise


@uncollected()
def _draw(order: _Order) -> None:
    from asynckfold.results.report.charts import draw

    files = draw(order.summary)
    # A newer request replaces this one.
    if _stamp(order)[0] != order.digest:
        return
    for name, content in files.items():
        write_whole(order.folder / name, content)
    write_whole(order.folder / STAMP, "\n".join([order.digest, *files]).encode())


def _stamp(order: _Order) -> list[str]:
    try:
        return read_plain(order.folder / STAMP).decode(errors="replace").split("\n")
    except (OSError, StorageError):
        return [""]
