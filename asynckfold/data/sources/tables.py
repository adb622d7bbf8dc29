"""Tables: a text file with commas, semicolons or tabs becomes rows of numbers and classes.

::

    text_files: head, cells ──► target column ──► class names, class indices
                       └──────► columns: the rule that says what each other column is

Nothing is scaled or imputed here: both would leak from the held-out fold.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.data.sources.columns import (
    FEATURE,
    LEFT_OUT,
    NAMES,
    TARGET,
    Column,
    ColumnChoice,
    JudgedColumn,
    column_notes,
    encode_as,
    feature_problems,
    flag_word,
    judge,
    matrix,
    row_dtype,
)
from asynckfold.data.sources.source import TABLE, Samples, Source, TableOptions
from asynckfold.data.sources.text_files import (
    Head,
    class_indices,
    class_note,
    label_problems,
    read_cells,
    read_head,
    second_meanings,
    spelling_problems,
)
from asynckfold.errors import InputError, Problem, nearest, refuse

# Not y, which stands beside x as often.
_TARGET_NAMES = frozenset({"class", "label", "labels", "target"})
# A logarithm.
_SOME_ROWS, _BY_CHANCE = 1000, -6
_SHOWN_COLUMNS, _SHOWN_CLASSES, _SHOWN_LETTERS = 20, 8, 20


@dataclass(frozen=True, eq=False)
class Table:
    """Labelled rows as they were read: what can be used, and every problem."""

    columns: tuple[Column, ...]  # all, in order
    judged: tuple[JudgedColumn, ...]  # all but the target
    classes: tuple[str, ...]
    targets: npt.NDArray[np.int64]  # class indices of the rows that have a label
    n_rows: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    repeated: int = 0  # rows that equal an earlier one, where they were counted
    groups: npt.NDArray[np.int64] | None = None  # number of each row's group
    fold_of: npt.NDArray[np.int64] | None = None  # number of the fold that holds each row out

    @property
    def features(self) -> tuple[str, ...]:
        """Names of all features, in order."""
        return tuple(name for item in self.judged for name in item.column.features)


def read_table(path: Path, choice: TableOptions, *, count_repeats: bool = False) -> Table:
    """Read a labelled text file; problems of its cells are collected, not raised.

    Raises `InputError` where it has no rows and columns, or a named column is missing.
    """
    head = read_head(path, choice.header)
    refuse([*position_problems(head, choice), *_default_target_problems(head, choice.target)])
    position = head.n_columns - 1 if choice.target is None else position_of(head, choice.target)
    chosen = column_choice(head, choice, position)
    as_text = {position, *chosen.category, *chosen.groups, *chosen.fold_column}
    cells = _cells(path, head, sorted(as_text))
    label = head.label(position)
    labels = cells[position]
    problems = []
    if len(missing_rows := np.flatnonzero(labels.isna())):
        problems.append(
            Problem(
                f"target {label} must have no missing labels",
                f"{len(missing_rows)} missing, first in row {missing_rows[0] + 1}",
                "Drop these rows first, or spell the name out if NA is one. Rows count from 1, "
                "without the header.",
            )
        )
    texts = [str(text).strip() for text in labels.dropna()]
    classes, targets = class_indices(texts)
    if not problems:
        problems += spelling_problems(label, texts)
        problems += label_problems(label, classes, len(targets))
    judged = _judged(path, head, cells, chosen, position)
    problems += feature_problems(str(path), judged)
    first = "the first row is the header" if head.has_header else "no header"
    notes = [
        f"{first}; the class is {label}: {_shown(classes)}",
        *class_note(label, classes),
    ]
    is_usable = not problems
    groups, fold_of = divided_by(head, cells, chosen, targets, problems, notes)
    notes += column_notes(judged, targets if is_usable else None)
    target = Column(head.name(position), TARGET, NAMES, "", (), len(missing_rows), len(classes))
    columns = [item.column for item in judged]
    columns.insert(position, target)
    used = [at for at, column in enumerate(columns) if column.role != LEFT_OUT]
    return Table(
        tuple(columns),
        tuple(judged),
        classes,
        targets,
        len(cells),
        tuple(problems),
        tuple(notes),
        int(cells[used].duplicated().sum()) if count_repeats else 0,
        groups,
        fold_of,
    )


def _shown(classes: Sequence[str]) -> str:
    more = f" … {len(classes)} in all" if len(classes) > _SHOWN_CLASSES else ""
    return ", ".join(name[:_SHOWN_LETTERS] for name in classes[:_SHOWN_CLASSES]) + more


def csv_source(name: str, path: Path, choice: TableOptions) -> Source:
    """Return the rows of a text file as samples and one of its columns as classes.

    The last column holds the classes unless `choice` names another. If another column is called
    ``class``, ``label`` or ``target``, the target must be named. `text_files` decides on delimiter
    and header, `columns` what each column becomes.
    """
    return table_source(name, read_table(path, choice))


def table_source(name: str, table: Table) -> Source:
    """Return a table as a source, or raise `InputError` with all its problems."""
    from asynckfold.data.sources.datasets import TableRows

    refuse(table.problems)
    rows = matrix(table.judged)
    return Source(
        name,
        TableRows(rows, table.targets, table.classes),
        table.classes,
        (rows.shape[1],),
        TABLE,
        standardize=True,
        features=table.features,
        notes=table.notes,
        columns=table.columns,
        groups=table.groups,
        fold_of=table.fold_of,
    )


def csv_samples(
    path: Path, like: Source | None, *, target: str | None = None, header: str = "auto"
) -> Samples:
    """Return the rows of a text file as samples, encoded like those of another file.

    Columns are matched by name, or by order where one file has no header. Columns that `like` does
    not have are left out, with a note. Labels may be missing. Where `like` is no text file, columns
    are judged anew. ``header="auto"`` also takes the first row as header where it holds the names
    of `like`.
    """
    known = like.columns if like else ()
    wanted = [column.name for column in known if column.role == FEATURE]
    head = read_head(path, header, wanted, least=1)
    refuse(position_problems(head, TableOptions(target)))
    position = None if target is None else position_of(head, target)
    notes: list[str] = []
    if like and known:
        head, position, by_order = _as_columns(path, head, like, position)
        notes += [by_order] if by_order else []
        if lacking := [name for name in wanted if name not in head.columns]:
            raise InputError.one(
                f"{path} must have all columns of {like.name} but its target",
                f"{', '.join(head.columns)}, without {', '.join(lacking)}",
                "Add them, or correct their names.",
            )
    texts = {column.name for column in known if column.role == FEATURE and column.dtype == NAMES}
    text_columns = [at for at, name in enumerate(head.columns) if name in texts or at == position]
    cells = _cells(path, head, text_columns)
    if known:
        judged = [
            encode_as(column, cells[head.columns.index(column.name)])
            for column in known
            if column.role == FEATURE
        ]
        used = {column.name for column in known if column.role in (FEATURE, TARGET)}
        notes += [
            f"{head.label(at)} is left out: the models were not trained on it"
            for at, name in enumerate(head.columns)
            if at != position and name not in used
        ]
    else:
        judged = _judged(path, head, cells, ColumnChoice(), position)
        notes += column_notes(judged)
    refuse(feature_problems(str(path), judged))
    labels = None if position is None or cells[position].isna().any() else cells[position]
    from asynckfold.data.sources.datasets import TableRows

    # Where a run was defined by code, what its models take is unknown but for what most take.
    rows = matrix(judged).astype(row_dtype(known) if known else np.float32)
    dataset = TableRows(rows, np.zeros(len(rows), np.int64), ())
    named = None if labels is None else tuple(labels.astype(str).str.strip())
    return Samples(dataset, named, notes=tuple(notes))


def _cells(path: Path, head: Head, texts: Sequence[int]) -> Any:
    cells = read_cells(path, head, texts)
    if len(cells) == 0:
        remedy = "If that is a row, pass --header no."
        raise InputError.one(f"{path} must hold rows", "a header only", remedy)
    return cells


def _judged(
    path: Path, head: Head, cells: Any, chosen: ColumnChoice, target: int | None
) -> list[JudgedColumn]:
    examples = second_meanings(path, head, cells)
    return [
        judge(
            head.name(at),
            at,
            cells[at],
            chosen,
            unnamed=head.has_header and not head.names[at],
            example=examples.get(at, ""),
        )
        for at in range(head.n_columns)
        if at != target
    ]


# Columns that the caller names


def position_of(head: Head, word: str) -> int:
    """Return the position of a column that is named, or given by position."""
    if word in head.names:
        return head.names.index(word)
    return int(word) % head.n_columns


def column_choice(head: Head, choice: TableOptions, target: int | None) -> ColumnChoice:
    """Return the caller's choice by position; refuse flags that contradict each other."""
    chosen = ColumnChoice(
        *(frozenset(position_of(head, word) for word in words) for _, words in choice.columns)
    )
    refuse(_choice_problems(head, chosen, target))
    return chosen


def _choice_problems(head: Head, chosen: ColumnChoice, target: int | None) -> Iterator[Problem]:
    for flag, positions in (
        ("--drop", chosen.drop),
        ("--keep", chosen.keep),
        ("--groups", chosen.groups),
        ("--fold-column", chosen.fold_column),
    ):
        if target is not None and target in positions:
            rule = f"{flag} applies to features only"
            yield Problem(rule, f"the target, {head.label(target)}", "Pass --target for another.")
    if target is not None and target in chosen.category:
        rule = "--category applies to features only"
        yield Problem(rule, f"the target, {head.label(target)}", "Its values are classes anyway.")
    unused = chosen.drop | chosen.groups | chosen.fold_column
    for at in sorted(unused & (chosen.keep | chosen.category)):
        rule = "a column is either a feature or none"
        yield Problem(rule, head.label(at), "Leave one of the flags out.")


def position_problems(head: Head, choice: TableOptions) -> Iterator[Problem]:
    """Yield the columns that are asked for and missing."""
    last = head.n_columns - 1
    given = [("--target", choice.target)] if choice.target is not None else []
    given += [(flag, word) for flag, words in choice.columns for word in words]
    for flag, word in given:
        is_position = re.fullmatch(r"-?\d+", word) and -head.n_columns <= int(word) <= last
        if word in head.names or is_position:
            continue
        if head.has_header:
            more = ", …" if last >= _SHOWN_COLUMNS else ""
            shown = ", ".join(head.columns[:_SHOWN_COLUMNS])
            remedy = f"Columns: {shown}{more}.{nearest(word, head.names)}"
        else:
            remedy = f"The file has no header: pass a position from 0 to {last}, or --header yes."
        yield Problem(f"{flag} must be a column of the file", repr(word), remedy)


def _default_target_problems(head: Head, target: str | None) -> Iterator[Problem]:
    if target is not None or not head.names or head.names[-1].lower() in _TARGET_NAMES:
        return
    others = [name for name in head.names[:-1] if name.lower() in _TARGET_NAMES]
    if others:
        yield Problem(
            "the target must be named where a column other than the last has a target's name",
            f"{', '.join(map(repr, others))}, and {head.label(head.n_columns - 1)} as the last",
            f"Pass --target {others[0]}, or --target {head.names[-1] or -1}.",
        )


def column_words(text: str | None) -> tuple[str, ...]:
    """Split a flag's text into columns: names or positions between commas, quoted at need.

    >>> column_words('id, "a, b",-1'), column_words(None)
    (('id', 'a, b', '-1'), ())
    """
    words = next(csv.reader([text], skipinitialspace=True), []) if text else []
    return tuple(word.strip() for word in words if word.strip())


# Rows that belong together


def divided_by(
    head: Head,
    cells: Any,
    choice: ColumnChoice,
    targets: npt.NDArray[np.int64],
    problems: list[Problem],
    notes: list[str],
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64] | None]:
    """Return the group of each row, and the fold that holds it out, as columns say.

    Adds problems and notes; if there is neither, on columns that may be groups.
    """
    numbers: dict[str, npt.NDArray[np.int64]] = {}
    is_asked = bool(choice.groups or choice.fold_column)
    for flag, positions, text in (
        ("--groups", choice.groups, "no value of {} is divided between folds: {} groups"),
        ("--fold-column", choice.fold_column, "each value of {} is a fold: {} folds"),
    ):
        for at in positions:
            if missing := int(cells[at].isna().sum()):
                rule, received = f"{flag} must have no missing values", f"{missing} cells missing"
                problems.append(Problem(rule, f"{head.label(at)}, {received}", "Fill them first."))
                continue
            names, numbers[flag] = class_indices([str(text).strip() for text in cells[at]])
            notes.append(text.format(head.label(at), len(names)))
    if not problems and not is_asked:
        notes += _likely_groups(head, cells, targets)
    return numbers.get("--groups"), numbers.get("--fold-column")


def _likely_groups(head: Head, cells: Any, targets: npt.NDArray[np.int64]) -> Iterator[str]:
    """Yield the columns each of whose values has one class, by far too often for chance."""
    import pandas as pd

    shares = np.bincount(targets) / len(targets)
    for at in cells.columns:
        column = cells[at]
        if column.isna().any() or (column.dtype.kind == "f" and (column % 1 != 0).any()):
            continue
        # Most columns are no groups, as a few rows tell.
        for rows in (slice(_SOME_ROWS), slice(None)):
            codes, values = pd.factorize(column[rows])
            pairs = pd.unique(codes * len(shares) + targets[rows])
            if len(pairs) > len(values):
                break
        else:
            # Each further row of a value has its class by chance in at most that share of cases.
            chance = (len(codes) - len(values)) * np.log10(shares.max())
            if len(values) > len(shares) and chance < _BY_CHANCE:
                yield (
                    f"each of the {len(values)} values of {head.label(at)} has one class: if a "
                    "value is a group of rows that belong together, such as those of a patient, "
                    f"pass --groups {flag_word(head.name(at))}, else training and "
                    "held-out parts share groups, and scores are too good"
                )


# Another file with the same columns


def _as_columns(
    path: Path, head: Head, like: Source, position: int | None
) -> tuple[Head, int | None, str]:
    """Return the head with the other file's names, the target's position, and a note."""
    known = [column.name for column in like.columns]
    target = next((column.name for column in like.columns if column.role == TARGET), None)
    named = known != [f"column {at}" for at in range(len(known))]
    if named and head.names:
        at = head.columns.index(target) if target is not None and target in head.columns else None
        return head, at if position is None else position, ""
    if position is None and target is not None and head.n_columns == len(known):
        position = known.index(target)
    here = [at for at in range(head.n_columns) if at != position]
    there = [name for name in known if name != target]
    if len(here) != len(there):
        rule = f"{path} must have the {len(there)} columns of {like.name}, or their names"
        refuse([Problem(rule, str(len(here)), f"They are: {', '.join(there)}.")])
    names = dict(zip(here, there, strict=True))
    given = tuple(names.get(at, target or "") for at in range(head.n_columns))
    # Where neither has names, there is no other way.
    one_named = named or bool(head.names)
    without = path if named else like.name
    note = f"columns are taken by their order, since {without} has no header" if one_named else ""
    return replace(head, names=given), position, note
