"""The page of a run, and the files beside it.

``index.html`` is one file: figures and numbers are inside it, nothing is fetched and no script is
run. All text goes through jinja2's autoescape; the numbers stand in an ``application/json`` block
in which no character can end the block.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from asynckfold.jobs.result import Epoch
from asynckfold.results.cv_results import CVResults
from asynckfold.results.read import read_results
from asynckfold.results.report import sentences
from asynckfold.results.report.charts import Chart, draw
from asynckfold.results.report.sanitize import clean
from asynckfold.results.report.summary import Summary, summarize
from asynckfold.store import RunStore
from asynckfold.system.files import (
    alone,
    make_folder,
    make_folders,
    storage_error,
    write_whole,
)

SECTIONS = (
    "Ranking",
    "Folds",
    "Curves",
    "Classes",
    "Machine",
    "Jobs",
    "Speedup",
    "Failures",
    "Log",
    "Setup",
)
EMBEDDED_BYTES = 1 << 20
BULKY = (
    "curves",
    "confusion",
    "bars",
    "use",
    "events",
    "races",
    "averaged",
    "class_accuracy",
)
"""Parts of the numbers that the page leaves out where they do not fit, in this order."""
CLASS_LIMIT, JOB_LIMIT, GROUP_LIMIT, ROW_LIMIT = 40, 20, 30, 200
CSV_FILES = {"results.csv": "candidate", "folds.csv": "fold", "epochs.csv": "epoch"}

# What a spreadsheet takes for a formula when a cell starts with it (OWASP, "CSV Injection").
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Picture:
    """A figure as the page holds it."""

    base64: str
    alt: str
    width: int
    height: int


def write_report(store: RunStore, folder: Path | None = None) -> Path:
    """Write the page, its figures and tables; return the path of the page.

    Parameters
    ----------
    store : RunStore
        The run; it may be incomplete, and it may be running.
    folder : Path, optional
        Where to; ``report`` in the run's folder by default.

    Returns
    -------
    Path
        ``folder / "index.html"``, written last: when it is there, so is the rest.

    Raises
    ------
    StorageError
        The folder cannot be written.
    StoreCorruptError
        The run has no plan, or its files are damaged.
    """
    results = read_results(store)
    summary = summarize(store, results)
    charts = draw(summary)
    files = {name: csv_table(_records(results, level)) for name, level in CSV_FILES.items()}
    files |= {f"{chart.name}.png": chart.png for chart in charts}
    # Without `indent` the C encoder writes it, in a tenth of the time.
    numbers = json.dumps(summary.to_dict(), ensure_ascii=False, allow_nan=False)
    files["results.json"] = numbers.encode()
    files["index.html"] = render(summary, charts).encode()
    if folder is None:
        root, folder = store.root, store.root / "report"
        make_folders(root, folder)
    else:
        root = folder = Path(folder)
        _make_folder(folder)
    left = re.compile(rf"({'|'.join(map(re.escape, files))})\.\d+\.tmp")
    with alone(root, folder, left):
        for name, content in files.items():
            write_whole(folder / name, content, root)
    return folder / "index.html"


def _make_folder(folder: Path) -> None:
    try:
        make_folder(folder)
    except OSError as error:
        raise storage_error(error, folder) from error


# The page


def render(summary: Summary, charts: Sequence[Chart]) -> str:
    """Return the page as text."""
    numbers, left_out = embedded_numbers(summary)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    return environment.get_template("page.html.jinja").render(
        run=summary,
        facts=summary.facts,
        found=sentences,
        charts={chart.name: _picture(chart) for chart in charts},
        sections=SECTIONS,
        numbers=numbers,
        left_out=left_out,
        incomplete=any(not row.complete for row in summary.candidates),
        class_rows=[row for row in summary.candidates if row.class_accuracy is not None],
        retried=sentences.retried(summary),
        plan_rows=_plan_rows(summary),
        class_limit=CLASS_LIMIT,
        job_limit=JOB_LIMIT,
        group_limit=GROUP_LIMIT,
        row_limit=ROW_LIMIT,
    )


def _picture(chart: Chart) -> Picture:
    data = base64.b64encode(chart.png).decode("ascii")
    return Picture(data, chart.alt, chart.width, chart.height)


def _plan_rows(summary: Summary) -> list[tuple[str, Any]]:
    facts = summary.facts
    rows: list[tuple[str, Any]] = [
        ("models", ", ".join(facts.models)),
        ("LR schedules", ", ".join(facts.lr_schedules)),
        ("folds", f"{facts.folds}" + (f" × {facts.repeats}" if facts.repeats > 1 else "")),
        ("samples", facts.samples),
        ("targets", facts.targets),
        ("classes", len(facts.classes) or "none"),
        ("outputs", facts.outputs),
        ("batch size", facts.batch_size),
        ("random state (seed)", facts.random_state),
        ("threads per job", facts.threads_per_job),
        ("device", facts.device),
        ("scoring", ", ".join(summary.metrics)),
    ]
    rows += [(name, clean(value)) for name, value in facts.params.items()]
    return [
        *rows,
        ("fingerprint of the plan", facts.plan_fingerprint),
        ("fingerprint of the data", facts.dataset),
        ("fingerprint of the folds", facts.folds_fingerprint),
    ]


# The numbers inside the page


def embedded_numbers(summary: Summary, limit: int = EMBEDDED_BYTES) -> tuple[Markup, list[str]]:
    """Return the summary as JSON that is inert in HTML, and what was left out for its size.

    Parameters
    ----------
    summary : Summary
        What to embed.
    limit : int
        Bytes; the bulkiest parts are left out, one after the other, until the rest fits.
    """
    numbers = summary.to_dict()
    left_out: list[str] = []
    for part in BULKY:
        text = inert_json(numbers)
        if len(text) <= limit:
            return Markup(text), left_out
        left_out.append(part)
        _leave_out(numbers, part)
    return Markup(inert_json(numbers)), left_out


def _leave_out(numbers: dict[str, Any], part: str) -> None:
    numbers.pop(part, None)
    for row in numbers["candidates"]:
        row.pop(part, None)


def inert_json(value: Any) -> str:
    """Return JSON that cannot end the block it stands in, nor start markup.

    Examples
    --------
    >>> inert_json({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


# The tables


_EPOCH_COLUMNS = ["model", "scheduler", "repeat", "fold", "epoch"]
_EPOCH_COLUMNS += [item.name for item in fields(Epoch)][1:]


def _records(results: CVResults, level: str) -> tuple[list[str], list[list[Any]]]:
    """Return header and rows; a run in which no epoch was recorded still has a header."""
    frame = results.to_frame(level)
    header = [str(name) for name in frame.columns] or _EPOCH_COLUMNS
    rows = frame.astype(object).to_numpy().tolist()
    if header[0] == "rank":
        run = [results.fingerprint, str(results.bit_identity)]
        rows = [["" if _is_missing(row[0]) else int(row[0]), *row[1:], *run] for row in rows]
        header += ["fingerprint", "bit_identity"]
    return header, rows


def csv_table(table: tuple[Sequence[str], Iterable[Sequence[Any]]]) -> bytes:
    """Return a header and rows as UTF-8 CSV in which no cell is a formula.

    Examples
    --------
    >>> csv_table((["model", "score"], [["=1+1", -0.5]]))
    b"model,score\\r\\n'=1+1,-0.5\\r\\n"
    """
    header, rows = table
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow([_cell(name) for name in header])
    writer.writerows([_cell(value) for value in row] for row in rows)
    return buffer.getvalue().encode()


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        text = clean(value, 4096)
        return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text
    return "" if _is_missing(value) else value


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
