"""What would be read from a source; problems are listed after everything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asynckfold.data.sources.arrays import array_table, image_shape, read_arrays
from asynckfold.data.sources.columns import FEATURE, NAMES, Column, JudgedColumn, matrix
from asynckfold.data.sources.images import check_image, find_images
from asynckfold.data.sources.source import (
    IMAGE,
    TABLE,
    Source,
    TableOptions,
    balanced_subset,
    limit_problems,
    part_note,
)
from asynckfold.data.sources.tables import Table, read_table
from asynckfold.errors import InputError, Problem, refuse


@dataclass(frozen=True)
class ColumnValues:
    """A column, and the range of its numbers or its names."""

    column: Column
    values: str = ""


@dataclass(frozen=True, eq=False)
class Inspection:
    """What a run would read."""

    name: str
    kind: str
    samples: int
    sample_shape: tuple[int, ...]  # (channels, height, width) of the first image, or (features,)
    class_names: tuple[str, ...]
    targets: npt.NDArray[np.int64]  # class index of each labelled sample
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()  # why a run would be refused
    columns: tuple[ColumnValues, ...] = ()  # of a table
    repeated: int = 0  # samples that equal an earlier one in all used parts

    @property
    def classes(self) -> dict[str, int]:
        """Number of samples of each class."""
        counts = np.bincount(self.targets, minlength=len(self.class_names)).tolist()
        return dict(zip(self.class_names, counts, strict=True))


def inspect_table(name: str, path: Path, choice: TableOptions) -> Inspection:
    """Inspect a text file."""
    return _of_table(name, read_table(path, choice, count_repeats=True))


def inspect_arrays(name: str, path: Path, choice: TableOptions) -> Inspection:
    """Inspect an ``.npz`` file."""
    arrays = read_arrays(path)
    refuse(arrays.problems)
    samples = arrays.samples
    if samples.ndim == 2:
        table = array_table(arrays, choice)
        rows = samples if table.problems else matrix(table.judged)
        return _of_table(name, replace(table, repeated=_repeats([row.tobytes() for row in rows])))
    classes, targets, problems, notes = arrays.classes()
    return Inspection(
        name,
        IMAGE,
        len(samples),
        image_shape(samples),
        classes,
        targets,
        tuple(notes),
        tuple(problems),
        repeated=_repeats([sample.tobytes() for sample in samples]),
    )


def _of_table(name: str, table: Table) -> Inspection:
    values = {item.column.name: _shown(item) for item in table.judged}
    return Inspection(
        name,
        TABLE,
        table.n_rows,
        (len(table.features),),
        table.classes,
        table.targets,
        table.notes,
        table.problems,
        tuple(ColumnValues(column, values.get(column.name, "")) for column in table.columns),
        table.repeated,
    )


def inspect_folder(name: str, path: Path) -> Inspection:
    """Inspect a folder of images; reads every image."""
    folder = find_images(path)
    problems, facts = list(folder.problems), {}
    for item in () if problems else folder.paths:
        try:
            facts[item] = check_image(str(item))
        except InputError as error:
            problems += error.problems
    sizes = Counter(image.size for image in facts.values())
    width, height = next(iter(sizes), (0, 0))
    several = [str(item.relative_to(path)) for item, image in facts.items() if image.frames > 1]
    notes = [
        f"{len(folder.paths)} images in {len(folder.classes)} classes, all read as RGB",
        *folder.notes,
        *_image_notes(sizes, Counter(image.mode for image in facts.values())),
    ]
    if several:
        notes.append(f"of {len(several)} files with several images the first is read: {several[0]}")
    return Inspection(
        name,
        IMAGE,
        len(folder.paths),
        (3, height, width),
        folder.classes,
        folder.targets,
        tuple(notes),
        tuple(problems),
        repeated=_repeats([image.digest for image in facts.values()]),
    )


def inspect_source(source: Source) -> Inspection:
    """Inspect a source whose images are in memory, such as torchvision's."""
    images = np.asarray(source.dataset.data)  # type: ignore[attr-defined]
    return Inspection(
        source.name,
        source.kind,
        len(images),
        source.sample_shape,
        source.classes,
        source.targets,
        source.notes,
        repeated=_repeats([image.tobytes() for image in images]),
    )


def limited_to(inspection: Inspection, limit: int, random_state: int) -> Inspection:
    """Restrict an inspection to a balanced subset."""
    total, targets = inspection.samples, inspection.targets
    problems = (*inspection.problems, *limit_problems(limit, len(inspection.class_names)))
    if limit >= total or problems:
        return replace(inspection, problems=problems)
    chosen = targets[balanced_subset(targets, limit, random_state)]
    notes = (*inspection.notes, part_note(limit, total, random_state))
    return replace(inspection, samples=limit, targets=chosen, notes=notes)


def _repeats(contents: Sequence[bytes]) -> int:
    return len(contents) - len(set(contents))


def _shown(item: JudgedColumn) -> str:
    """Return the range of numbers, or the names."""
    if item.column.dtype == NAMES:
        return ", ".join(item.column.categories)
    values = item.values
    if values is None or item.column.role != FEATURE or values.dtype.kind == "b":
        return ""
    low, high = values.min(), values.max()
    return f"{low:.6g}" if low == high else f"{low:.6g} … {high:.6g}"


def _image_notes(sizes: Counter[tuple[int, int]], modes: Counter[str]) -> Iterator[str]:
    if len(sizes) > 1:
        by_area = sorted(sizes, key=lambda size: size[0] * size[1])
        first, (width, height), (wide, high) = next(iter(sizes)), by_area[0], by_area[-1]
        yield (
            f"images differ in size, from {height}×{width} to {high}×{wide}: all are resized, to "
            f"the first one's {first[1]}×{first[0]} or what the models take, whatever their shape"
        )
    if clear := sum(modes[mode] for mode in ("RGBA", "LA", "PA")):
        yield f"{clear} images may be transparent: transparency is ignored"
    if len(modes) > 1:
        shown = ", ".join(f"{count} {mode}" for mode, count in modes.most_common())
        yield f"images differ in colour mode, which may reveal a class: {shown}"
