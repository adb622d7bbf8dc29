"""Charts in text: a timeline of the cores, and numbers as bars."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from asynckfold.scheduling.simulate import Span
from asynckfold.system.units import duration

BARS = "▁▂▃▄▅▆▇█"
IDLE = "·"


def gantt(
    spans: Sequence[Span],
    cores: Iterable[int],
    width: int = 100,
    most_rows: int = 32,
    nodes: Mapping[str, int] | None = None,
) -> list[str]:
    """Draw a row for each core and GPU, time from left to right.

    Parameters
    ----------
    spans : sequence of Span
        The jobs; one on several cores is drawn in each of their rows.
    cores : iterable of int
        Cores that get a row, also idle ones.
    width : int
        Maximum number of columns, at least 40.
    most_rows : int
        Maximum number of rows; the others are counted.
    nodes : Mapping of str to int, optional
        The cores of each node of a cluster, by its name; `cores` are then none.

    Returns
    -------
    list of str
        Lines; the last one has the times of both ends. Brackets hold the name of a job, shortened
        to fit; ``·`` is idle.

    Examples
    --------
    >>> spans = [Span("mlp", 0, 4, (0,)), Span("vgg", 0, 8, (1,)), Span("mlp", 4, 6, (0,))]
    >>> print("\\n".join(gantt(spans, range(2), width=40)))
    core 0  [mlp===========][mlp===]········
    core 1  [vgg===========================]
            0.0 s                      8.0 s
    """
    rows: defaultdict[str, list[Span]] = defaultdict(list)
    rows.update({_lane("core", core, ""): [] for core in cores})
    for node, count in (nodes or {}).items():
        rows.update({_lane("core", core, node): [] for core in range(count)})
    for span in sorted(spans, key=lambda span: (span.gpu is not None, span.gpu or 0, span.start)):
        held = [_lane("core", core, span.node) for core in span.cores]
        if span.gpu is not None:
            held.append(_lane("GPU", span.gpu, span.node))
        for name in held:
            rows[name].append(span)
    end = max((span.end for span in spans), default=0.0)
    label = max((len(name) for name in rows), default=0) + 2
    columns = max(40, width) - label
    drawn = list(rows.items())[:most_rows]
    lines = [f"{name:{label}}{_row(held, end, columns)}" for name, held in drawn]
    if len(rows) > most_rows:
        lines.append(f"{'':{label}}and {len(rows) - most_rows} more")
    return [*lines, f"{'':{label}}{duration(0)}{duration(end):>{columns - len(duration(0))}}"]


def _lane(kind: str, number: int, node: str) -> str:
    return f"{node}, {kind} {number}" if node else f"{kind} {number}"


def _row(spans: Sequence[Span], end: float, columns: int) -> str:
    cells = [IDLE] * columns
    for span in sorted(spans, key=lambda span: span.start) if end else ():
        first, last = round(span.start / end * columns), round(span.end / end * columns)
        if first == last:
            # Shorter than half a column: seen, unless a longer one is there.
            first = min(first, columns - 1)
            last = first + (cells[first] == IDLE)
        cells[first:last] = _bar(span, last - first)
    return "".join(cells)


def _bar(span: Span, size: int) -> str:
    if size < 2:
        return "|" * size
    return f"[{_short(span.job, size - 2):=<{size - 2}}]"


def _short(name: str, size: int) -> str:
    """Return a name shortened to `size` characters; its end tells folds apart.

    >>> _short("LeNet5/cosine/fold-3", 10), _short("LeNet5", 3)
    ('LeNet5/…-3', 'LeN')
    """
    if len(name) <= size or size < 5:
        return name[:size]
    return f"{name[: size - 3]}…{name[-2:]}"
