"""The page of a run and its accompanying files.

``index.html`` is self-contained: it embeds its figures, fetches nothing, and runs one script, whose
hash stands in its policy. Without script everything can still be read. All text passes jinja2's
autoescape.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import re
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

from asynckfold.jobs.decoding import uncollected
from asynckfold.results.cv_results import CVResults, read_results
from asynckfold.results.report import page_tables, sentences
from asynckfold.results.report.files import table_files
from asynckfold.results.report.files import update as update_figures
from asynckfold.results.report.inline import comparison, inline
from asynckfold.results.report.sanitize import clean
from asynckfold.results.report.summary import Summary, interim_of, pictures_of, summarize
from asynckfold.results.report.svg import COLOURS
from asynckfold.store import Interim, RunReader
from asynckfold.store.layout import FINAL, job_folder
from asynckfold.system.files import make_folder, write_whole

if TYPE_CHECKING:
    from asynckfold.results.compare import Comparison, ScoreComparison

_FOLDER = Path(__file__).parent

# Spaces at which a line must not break.
_TIED = re.compile(r"(?<=\d) (?=%|[MG]iB)|(?<=\bp) (?=[=<] )|(?<=[=±<]) (?=\d)|(?<=\bto) (?=-?\d)")


@dataclass(frozen=True)
class Beside:
    """The files beside a page: addresses by text, and the kinds of each figure's files."""

    files: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)  # of the first candidate, by fold
    kinds: Sequence[str] = ()


@uncollected()
def write_report(
    store: RunReader, folder: Path | None = None, figures: str = "png", *, beside: bool = False
) -> Path:
    """Write the page, its figures and tables, by default to ``report`` in the run's folder.

    Figures are written as PNG, with `beside` by a background process, and on request also as
    ``"svg"`` or ``"pdf"``.

    The run may be incomplete or still running. Returns the path of the page, written last; raises
    `StorageError` and `StoreCorruptError`.
    """
    results = read_results(store)
    summary = summarize(store, results)
    files = table_files(results, summary)
    tables = {name: name for name in (*files, "results.json")}
    if figures != "png":
        from asynckfold.results.report.charts import draw

        files |= draw(summary, figures)
    # Without `indent`, which would bypass the C encoder and take ten times as long.
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
    parts = {name: encoder.encode(value) for name, value in summary.to_dict().items()}
    pairs = (f"{encoder.encode(name)}: {text}" for name, text in parts.items())
    files["results.json"] = f"{{{', '.join(pairs)}}}".encode()
    folder = store.root / "report" if folder is None else Path(folder)
    make_folder(folder)
    links = Beside(tables, _weights(results, summary, folder), [*dict.fromkeys(["png", figures])])
    files["index.html"] = render(summary, pictures_of(store), interim_of(store), links).encode()
    for name, content in files.items():
        write_whole(folder / name, content)
    update_figures(summary, parts, folder, beside=beside)
    return folder / "index.html"


def _weights(results: CVResults, summary: Summary, folder: Path) -> dict[str, str]:
    """Return the addresses of the weights of the first candidate, by fold."""
    name = summary.best_row and summary.best_row.name
    jobs = [job for job in results.plan.jobs if job.candidate == name][: page_tables.FOLDS]
    paths = {"/".join(job.place): job_folder(results.root_dir, job) / FINAL for job in jobs}
    return {
        place: urllib.parse.quote(os.path.relpath(path, folder).replace(os.sep, "/"))
        for place, path in paths.items()
        if path.is_file()
    }


@uncollected()
def write_page(store: RunReader) -> None:
    """Write the page of a run that goes on; figures and tables beside it follow at its end."""
    summary = summarize(store, read_results(store))
    text = render(summary, pictures_of(store), interim_of(store))
    folder = store.root / "report"
    make_folder(folder)
    write_whole(folder / "index.html", text.replace("</head>", RENEWING, 1).encode())


# The page

REFRESH_SECONDS = 2
"""How often a browser asks again while jobs are left."""

RENEWING = (
    f'<meta name="renewal-seconds" content="{REFRESH_SECONDS}">'
    f'<noscript><meta http-equiv="refresh" content="{REFRESH_SECONDS}"></noscript></head>'
)
"""The end of the head of a page that may change."""


def render(
    summary: Summary,
    pictures: Mapping[int, str] = MappingProxyType({}),
    interim: Interim | None = None,
    beside: Beside | None = None,
) -> str:
    """Return the page as text.

    `pictures` are those of hard samples, see `pictures_of`; `interim` is there while a run goes on.
    Without `beside`, the page has no links to files.
    """
    summary = summary.labelled()
    return _page(
        "report.html.jinja",
        run=summary,
        facts=summary.facts,
        drawn=inline(summary),
        pictures=pictures,
        interim=interim,
        beside=beside or Beside(),
        now=time.strftime("%H:%M:%S"),
    )


@uncollected()
def write_comparison(
    stores: tuple[RunReader, RunReader],
    results: tuple[CVResults, CVResults],
    scores: ScoreComparison,
    bits: Comparison,
    path: str | Path,
) -> Path:
    """Write a page on two runs, by `compare_scores` and `compare_runs` of them; return its path.

    Curves are those of the candidates of both, the best of the second run first; without any,
    those of the best candidate of each.
    """
    first, second = (summarize(*pair) for pair in zip(stores, results, strict=True))
    runs, before = (first, second), {row.name for row in first.candidates}
    shown = [row.name for row in second.candidates if row.name in before]
    shown = shown or [run.candidates[0].name for run in runs if run.candidates]
    text = _page(
        "comparison.html.jinja",
        run=scores,
        runs=runs,
        bits=bits,
        headline=scores.sentences[0].removesuffix("."),
        drawn=comparison(runs, scores, shown[: len(COLOURS)]),
        beside=Beside(),
        shown=shown,
    )
    path = Path(path)
    make_folder(path.parent)
    write_whole(path, text.encode())
    return path


def _page(template: str, **values: object) -> str:
    script = (_FOLDER / "page.js").read_text("utf-8")
    digest = hashlib.sha256(script.encode()).digest()
    page = _environment().get_template(template)
    return page.render(
        say=sentences,
        tables=page_tables,
        script=Markup(script),
        script_hash=f"sha256-{base64.b64encode(digest).decode()}",
        **values,
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    environment.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    environment.filters["together"] = _together
    return environment


def _together(text: str) -> str:
    """Keep a number on one line with its sign and unit.

    >>> _together("0.94 ± 0.01 (p = 0.2; 95 % interval 1 to 2)").replace("\\u00a0", "~")
    '0.94 ±~0.01 (p~=~0.2; 95~% interval 1 to~2)'
    """
    return text if isinstance(text, Markup) else _TIED.sub("\u00a0", text)
