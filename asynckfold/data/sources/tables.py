"""Tables: a text file with commas, semicolons or tabs becomes rows of numbers and classes.

::

    text_files: head, cells ──► target column ──► class names, class indices
                       └──────► columns: the rule that says what each other column is

Nothing is scaled or imputed here: both would leak from the held-out fold.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.data.sources.columns import (
    CATEGORY,
    DROP,
    FEATURE,
    FOLDS,
    GROUPS,
    KEEP,
    NAMES,
    TARGET,
    Chosen,
    Column,
    column_notes,
    encode_as,
    feature_problems,
    flag_word,
    judge,
    label,
    matrix,
    row_dtype,
)
from asynckfold.data.sources.source import TABLE, Inspection, Samples, Source, TableOptions
from asynckfold.data.sources.text_files import (
    LEADING_ZERO,
    ClassesOf,
    Head,
    class_indices,
    classes_of,
    numbers_of,
    read_cells,
    read_head,
    second_meanings,
)
from asynckfold.errors import InputError, Problem, nearest, refuse

# Not y, which stands beside x as often.
_TARGET_NAMES = frozenset({"class", "label", "labels", "target"})
# A logarithm.
_BY_CHANCE = -6
_SHOWN_COLUMNS, _SHOWN_CLASSES, _SHOWN_LETTERS = 20, 8, 20


def read_table(name: str, path: Path, choice: TableOptions) -> Inspection:
    """Read a labelled text file; problems of its cells are collected, not raised.

    The last column holds the classes unless `choice` names another. If another column is called
    ``class``, ``label`` or ``target``, the target must be named. `text_files` decides on delimiter
    and header, `columns` what each column becomes. Raises `InputError` where it has no rows and
    columns, or a named column is missing.
    """
    head = read_head(path, choice.header)
    refuse([*position_problems(head, choice), *_default_target_problems(head, choice.target)])
    target = len(head.names) - 1 if choice.target is None else _position_of(head, choice.target)
    chosen = chosen_columns(head, choice, target)
    as_text = {target, *chosen[CATEGORY], *chosen[GROUPS], *chosen[FOLDS]}
    cells = _rows(path, head, sorted(as_text))
    what = label(head.name(target))
    names, targets, problems, notes = _target_of(what, cells[target], choice)
    shown = ", ".join(name[:_SHOWN_LETTERS] for name in names[:_SHOWN_CLASSES])
    more = f" … {len(names)} in all" if len(names) > _SHOWN_CLASSES else ""
    first = "the first row is the header" if head.has_header else "no header"
    about = f"the class is {what}: {shown}{more}"
    if choice.regression and len(targets):
        about = f"the target is {what}: {targets.min():g} … {targets.max():g}"
    notes.insert(0, f"{first}; {about}")
    table = judged_table(
        name,
        str(path),
        head,
        cells.drop(columns=target),
        chosen,
        (names, targets, problems, notes),
        second_meanings(path, head, cells),
    )
    columns, missing = list(table.columns), int(cells[target].isna().sum())
    different, kind = len(np.unique(targets)), "float64" if choice.regression else NAMES
    column = Column(head.name(target), TARGET, kind, missing=missing, different=different)
    columns.insert(target, column)
    return replace(table, columns=tuple(columns))


def _target_of(what: str, labels: Any, choice: TableOptions) -> ClassesOf:
    """Return names, targets, problems and notes of the column of labels."""
    resolve = numbers_of if choice.regression else classes_of
    names, targets, problems, notes = resolve(what, labels.dropna().str.strip().tolist())
    if len(missing := np.flatnonzero(labels.isna())):
        rule, first = f"target {what} must have no missing labels", missing[0] + 1
        remedy = "Drop these rows, or spell the name out if NA is one. Row 1 is the first sample."
        problems = [Problem(rule, f"{len(missing)} missing, first in row {first}", remedy)]
    return names, targets, problems, notes


def read_frame(path: Path, choice: TableOptions) -> tuple[Any, npt.NDArray[Any], list[str]]:
    """Return features as a DataFrame, as pandas reads them; the last column, (n,); and notes.

    Raises `InputError` without a header or all targets, or where a code would lose its zeros.
    """
    head = read_head(path, choice.header)
    refuse(_default_target_problems(head, choice.target))
    if not head.has_header:
        rule = "a preprocess that takes columns by name needs a file whose first row names them"
        raise InputError.one(rule, f"{path}, without a header", "Write one, or take positions.")
    last, remedy = len(head.names) - 1, "Read codes by pandas with dtype=str, and pass (X, y)."
    cells = read_cells(path, head, [last])
    names, targets, problems, notes = _target_of(label(head.name(last)), cells[last], choice)
    rule, every = "numbers with leading zeros may be codes", second_meanings(path, head, cells)
    problems += [
        Problem(rule, f"{number!r} in {head.name(at)!r}", remedy)
        for at, number in every.items()
        if LEADING_ZERO.match(number)
    ]
    refuse(problems)
    frame = cells.drop(columns=last).set_axis(head.columns[:-1], axis=1)
    return frame, targets if choice.regression else np.array(names)[targets], notes


def judged_table(
    name: str,
    what: str,
    head: Head,
    cells: Any,
    chosen: Chosen,
    classes: ClassesOf,
    examples: Mapping[int, str],
) -> Inspection:
    """Return a table of which the classes are known; `what` holds its features."""
    names, targets, problems, notes = classes
    columns = _judged(head, cells, chosen, examples)
    problems += feature_problems(what, columns)
    is_usable = not problems
    numbers = _divisions(head, cells, chosen, problems, notes)
    is_usable &= bool(names)
    if is_usable and not (chosen[GROUPS] or chosen[FOLDS]):
        notes += _likely_groups(head, cells, targets)
    notes += column_notes(columns, targets if is_usable else None)
    return Inspection(
        name,
        TABLE,
        len(cells),
        (sum(len(column.features) for column in columns),),
        names,
        targets,
        tuple(notes),
        tuple(problems),
        tuple(columns),
        groups=numbers.get(GROUPS),
        fold_of=numbers.get(FOLDS),
    )


def _judged(head: Head, cells: Any, chosen: Chosen, examples: Mapping[int, str]) -> list[Column]:
    return [
        judge(
            head.name(at),
            at,
            cells[at],
            chosen,
            unnamed=head.has_header and not head.names[at],
            example=examples.get(at, ""),
        )
        for at in cells.columns
    ]


def table_source(table: Inspection) -> Source:
    """Return a table as a source, or raise `InputError` with all its problems."""
    from asynckfold.data.sources.datasets import TableRows

    refuse(table.problems)
    rows = matrix(table.columns)
    return Source(
        table.name,
        TableRows(rows, table.targets, table.class_names),
        table.class_names,
        (rows.shape[1],),
        TABLE,
        notes=table.notes,
        columns=tuple(replace(column, numbers=None) for column in table.columns),
        groups=table.groups,
        fold_of=table.fold_of,
    )


def csv_samples(
    path: Path, like: Source | None, *, target: str | None = None, header: str = "auto"
) -> Samples:
    """Return the rows of a text file as samples, encoded like those of another file.

    Columns are matched by name, or by order where one file has no header. Columns that `like` does
    not have are left out, with a note. Labels may be missing. Where `like` is no text file, columns
    are judged anew.
    """
    from asynckfold.data.sources.datasets import TableRows

    known = like.columns if like else ()
    features = [column for column in known if column.role == FEATURE]
    head = read_head(path, header)
    choice = TableOptions(target)
    refuse(position_problems(head, choice))
    position = None if target is None else _position_of(head, target)
    notes: list[str] = []
    if like and known:
        head, position = _as_columns(path, head, like, position, notes)
        if lacking := [column.name for column in features if column.name not in head.columns]:
            raise InputError.one(
                f"{path} must have all columns of {like.name} but its target",
                f"{', '.join(head.columns)}, without {', '.join(lacking)}",
                "Add them, or correct their names.",
            )
    texts = {column.name for column in features if column.dtype == NAMES}
    as_text = [at for at, name in enumerate(head.columns) if name in texts or at == position]
    cells = _rows(path, head, as_text)
    if known:
        columns = [encode_as(column, cells[head.columns.index(column.name)]) for column in features]
        used = {column.name for column in known if column.role in (FEATURE, TARGET)}
        notes += [
            f"{label(name)} is left out: the models were not trained on it"
            for at, name in enumerate(head.columns)
            if at != position and name not in used
        ]
    else:
        others = cells.drop(columns=[] if position is None else position)
        examples = second_meanings(path, head, cells)
        columns = _judged(head, others, chosen_columns(head, choice, position), examples)
        notes += column_notes(columns)
    refuse(feature_problems(str(path), columns))
    # Where a run was defined by code, what its models take is unknown but for what most take.
    rows = matrix(columns).astype(row_dtype(known) if known else np.float32)
    dataset = TableRows(rows, np.zeros(len(rows), np.int64), ())
    named = None if position is None or cells[position].isna().any() else cells[position]
    labels = None if named is None else tuple(named.astype(str).str.strip())
    return Samples(dataset, labels, notes=tuple(notes))


def _rows(path: Path, head: Head, texts: Sequence[int]) -> Any:
    cells = read_cells(path, head, texts)
    if len(cells) == 0:
        remedy = "If that is a row, pass --header no."
        raise InputError.one(f"{path} must hold rows", "a header only", remedy)
    return cells


# Columns that the caller names


def _position_of(head: Head, word: str) -> int:
    """Return the position of a column that is named, or given by position."""
    return head.names.index(word) if word in head.names else int(word) % len(head.names)


def chosen_columns(head: Head, choice: TableOptions, target: int | None) -> Chosen:
    """Return the columns of each flag by position; refuse flags that contradict each other."""
    chosen = {
        flag: frozenset(_position_of(head, word) for word in words)
        for flag, words in choice.columns
    }
    rule, remedy = "{} applies to features only", "Pass --target for another."
    problems = [
        Problem(rule.format(flag), f"the target, {label(head.name(target))}", remedy)
        for flag, positions in chosen.items()
        if target is not None and target in positions
    ]
    used = chosen[KEEP] | chosen[CATEGORY]
    unused = chosen[DROP] | chosen[GROUPS] | chosen[FOLDS]
    rule, remedy = "a column is either a feature or none", "Leave one of the flags out."
    problems += [Problem(rule, label(head.name(at)), remedy) for at in sorted(used & unused)]
    refuse(problems)
    return chosen


def position_problems(head: Head, choice: TableOptions) -> Iterator[Problem]:
    """Yield the columns that are asked for and missing."""
    count = len(head.names)
    words = [("--target", choice.target)] if choice.target is not None else []
    words += [(flag, word) for flag, named in choice.columns for word in named]
    for flag, word in words:
        is_position = re.fullmatch(r"-?\d+", word) and -count <= int(word) < count
        if (word and word in head.names) or is_position:
            continue
        if head.has_header:
            more = ", …" if count > _SHOWN_COLUMNS else ""
            shown = ", ".join(head.columns[:_SHOWN_COLUMNS])
            remedy = f"Columns: {shown}{more}.{nearest(word, head.names)}"
        else:
            remedy = f"The file has no header: pass a position from 0 to {count - 1}, or "
            remedy += "--header yes."
        yield Problem(f"{flag} must be a column of the file", repr(word), remedy)


def _default_target_problems(head: Head, target: str | None) -> Iterator[Problem]:
    others = [name for name in head.names[:-1] if name.lower() in _TARGET_NAMES]
    if target is None and others and head.names[-1].lower() not in _TARGET_NAMES:
        yield Problem(
            "the target must be named where a column other than the last has a target's name",
            f"{', '.join(map(repr, others))}, and {label(head.columns[-1])} as the last",
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


def _divisions(
    head: Head, cells: Any, chosen: Chosen, problems: list[Problem], notes: list[str]
) -> dict[str, npt.NDArray[np.int64]]:
    """Return the group of each row, and the fold that holds it out; add problems and notes."""
    numbers: dict[str, npt.NDArray[np.int64]] = {}
    for flag, text in (
        (GROUPS, "no value of {} is divided between folds: {} groups"),
        (FOLDS, "each value of {} is a fold: {} folds"),
    ):
        for at in chosen[flag]:
            what = label(head.name(at))
            if missing := int(cells[at].isna().sum()):
                rule, received = f"{flag} must have no missing values", f"{missing} cells missing"
                problems.append(Problem(rule, f"{what}, {received}", "Fill them first."))
            else:
                names, numbers[flag] = class_indices(cells[at].astype(str).str.strip().tolist())
                notes.append(text.format(what, len(names)))
    return numbers


def _likely_groups(head: Head, cells: Any, targets: npt.NDArray[np.int64]) -> Iterator[str]:
    """Yield the columns each of whose values has one class, by far too often for chance."""
    import pandas as pd

    shares = np.bincount(targets) / len(targets)
    for at in cells.columns:
        column = cells[at]
        if column.isna().any() or (column.dtype.kind == "f" and (column % 1 != 0).any()):
            continue
        codes, values = pd.factorize(column)
        # Each further row of a value has its class by chance in at most that share of cases.
        chance = (len(codes) - len(values)) * np.log10(shares.max())
        is_pure = len(pd.unique(codes * len(shares) + targets)) == len(values)
        if is_pure and len(values) > len(shares) and chance < _BY_CHANCE:
            yield (
                f"each of the {len(values)} values of {label(head.name(at))} has one class: if a "
                "value is a group of rows that belong together, such as those of a patient, "
                f"pass --groups {flag_word(head.name(at))}, else training and "
                "held-out parts share groups, and scores are too good"
            )


# Another file with the same columns


def _as_columns(
    path: Path, head: Head, like: Source, position: int | None, notes: list[str]
) -> tuple[Head, int | None]:
    """Return the head with the other file's names, and the target's position; add a note."""
    known = [column.name for column in like.columns]
    target = next((column.name for column in like.columns if column.role == TARGET), None)
    named = known != [f"column {at}" for at in range(len(known))]
    if named and head.has_header:
        if position is None and target in head.columns:
            position = head.columns.index(target)
        return head, position
    if position is None and target is not None and len(head.names) == len(known):
        position = known.index(target)
    here = [at for at in range(len(head.names)) if at != position]
    there = [name for name in known if name != target]
    if len(here) != len(there):
        rule = f"{path} must have the {len(there)} columns of {like.name}, or their names"
        raise InputError.one(rule, str(len(here)), f"They are: {', '.join(there)}.")
    names = dict(zip(here, there, strict=True))
    if named or head.has_header:
        # Where neither has names, there is no other way.
        without = path if named else like.name
        notes.append(f"columns are taken by their order, since {without} has no header")
    given = tuple(names.get(at, target or "") for at in range(len(head.names)))
    return replace(head, names=given), position
