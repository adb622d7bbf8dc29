"""From a dataset to arrays that all workers share: read once, gathered by index, two views.

::

    dataset ─ prepare() ─ Prepared ─ handle() ─┬─ pickled ──────────────┐
              reads once  (parent)             └─ file descriptors ─────┤ DataHandle.open()
                                                                     Batches  (each worker)
                                                 .train(indices, seed, epoch)   .eval(indices)

The arrays have no name, neither in a file system nor in ``/dev/shm``: memory that is known by its
file descriptor only, so that nothing is left behind however the processes end. What cannot be held
(samples of several shapes, or too large for memory and disk) is read sample by sample in the
workers, and `Prepared.notes` says so.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from asynckfold.errors import InputError, Problem, refuse
from asynckfold.transforms import (
    Draw,
    Kind,
    Step,
    Trace,
    View,
    apply,
    copied,
    describe,
    divide,
    flatten,
    generators_kept,
    is_random,
    kind_of,
    same_sample,
    same_steps,
    seed_generators,
    seeded,
    step_name,
    to_array,
    trace,
    varies,
    without_random,
)

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

_PROBES = 8


# ---- labels ----


@dataclass(frozen=True, eq=False)
class Labels:
    """Targets as jobs use them.

    Parameters
    ----------
    targets : ndarray
        int64 class indices (n,), or float32 regression targets (n,) or (n, m).
    classes : tuple of str
        Class names by index; empty for regression.
    classification : bool
        Whether the targets are classes.
    notes : tuple of str
        What was done to them.
    """

    targets: Array
    classes: tuple[str, ...]
    classification: bool
    notes: tuple[str, ...] = ()


def resolve_labels(
    values: Any, wants_classes: bool | None = None, names: Sequence[str] = ()
) -> Labels:
    """Check labels and bring them into one form.

    Parameters
    ----------
    values : array, tensor or sequence of n labels
        Integers, booleans or strings are classes; numbers with a fraction part are regression
        targets.
    wants_classes : bool or None
        Whether the criterion needs class indices; None: told by the labels' type.
    names : sequence of str
        The dataset's class names, if it has any.

    Raises
    ------
    InputError
        All problems, each naming the first offending index and value.

    Examples
    --------
    >>> labels = resolve_labels(["dog", "cat", "dog"])
    >>> labels.targets.tolist(), labels.classes
    ([1, 0, 1], ('cat', 'dog'))
    """
    array = _label_array(values)
    if wants_classes is None:
        wants_classes = array.dtype.kind in "biuU"
    if not wants_classes:
        return _regression(array)
    notes = []
    if array.ndim == 2 and array.shape[1] == 1:
        notes.append(f"labels of shape {array.shape} were squeezed to ({len(array)},)")
        array = array[:, 0]
    refuse(_class_problems(array))
    return _classes(array, tuple(names), notes)


def _label_array(values: Any) -> Array:
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    if not isinstance(values, np.ndarray):
        items = [
            item.detach().cpu().numpy() if isinstance(item, Tensor) else item for item in values
        ]
        if len({np.shape(item) for item in items}) > 1:
            values = np.empty(len(items), object)
        else:
            values = np.array(items)
    array: Array = np.asarray(values)
    if array.dtype.kind == "O" and all(isinstance(item, str) for item in array.ravel()):
        array = array.astype(str)
    if array.dtype.kind not in "biufU":
        refuse(
            [
                Problem(
                    "labels must be numbers or strings, all of one shape",
                    f"an array of {array.dtype} of shape {array.shape}",
                    "Pass targets= with one class index or name per sample.",
                )
            ]
        )
    return array


def _regression(array: Array) -> Labels:
    if array.dtype.kind == "U" or array.ndim not in (1, 2):
        refuse(
            [
                Problem(
                    "regression targets must be numbers of shape (n,) or (n, m)",
                    f"{_first(array)}, shape {array.shape}",
                    "Use a class criterion such as CrossEntropyLoss, or pass targets=.",
                )
            ]
        )
    finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
    if not finite.all():
        at = int(np.flatnonzero(~finite)[0])
        refuse(
            [
                Problem(
                    "regression targets must be finite",
                    f"{array[at]} at index {at}, {int((~finite).sum())} in all",
                    "Remove these samples or fill in their targets.",
                )
            ]
        )
    return Labels(np.ascontiguousarray(array, dtype=np.float32), (), False)


def _first(array: Array) -> str:
    flat = array.ravel()
    return f"{array.dtype} such as {flat[0]!s}" if flat.size else f"{array.dtype}"


def _class_problems(array: Array) -> list[Problem]:
    if array.ndim == 2 and array.dtype.kind != "U":
        return [
            Problem(
                "class labels must be one index per sample",
                f"shape {array.shape}, which looks like one-hot or probabilities",
                "Pass targets.argmax(axis=1).",
            )
        ]
    if array.ndim != 1:
        return [
            Problem(
                "class labels must be one index per sample",
                f"shape {array.shape}",
                "Pass targets= of shape (n,).",
            )
        ]
    if array.dtype.kind == "f":
        return _float_problems(array)
    if array.dtype.kind == "i" and (array < 0).any():
        at = int(np.flatnonzero(array < 0)[0])
        hint = (
            "Samples to be ignored (-100) cannot be scored: leave them out with Subset."
            if array[at] == -100
            else "Count the classes from 0."
        )
        return [Problem("class labels must not be negative", f"{array[at]} at index {at}", hint)]
    return []


def _float_problems(array: Array) -> list[Problem]:
    problems = []
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        problems.append(
            Problem(
                "class labels must not be NaN or infinite",
                f"{array[bad[0]]} at index {bad[0]}, {bad.size} in all",
                "Remove these samples or label them.",
            )
        )
    kept = array[np.isfinite(array)]
    fractions = np.flatnonzero(array != np.floor(array)) if kept.size == array.size else bad[:0]
    at = int(fractions[0]) if fractions.size else 0
    remedy = (
        "For regression use a criterion such as MSELoss."
        if fractions.size
        else "Cast them: targets.long() for a tensor, targets.astype('int64') for an array, "
        "target_transform=int for a dataset."
    )
    received = f"{array.dtype}, such as {array[at]} at index {at}"
    return [*problems, Problem("labels for a class criterion must be integers", received, remedy)]


def _classes(array: Array, names: tuple[str, ...], notes: list[str]) -> Labels:
    found = np.unique(array)
    numeric = array.dtype.kind in "biu"
    if numeric and int(found[-1]) < len(names):
        return Labels(array.astype(np.int64), names, True, tuple(notes))
    labels = tuple(str(value) for value in found.tolist())
    if not numeric or not np.array_equal(found, np.arange(len(found))):
        shown = ", ".join(f"{name} = {index}" for index, name in enumerate(labels[:20]))
        more = f" and {len(labels) - 20} more" if len(labels) > 20 else ""
        notes = [*notes, f"labels were numbered by sorted order: {shown}{more}"]
    targets = np.searchsorted(found, array).astype(np.int64)
    if len(found) == 1:
        notes = [*notes, f"all labels are of one class, {labels[0]}"]
    return Labels(targets, labels, True, tuple(notes))


# ---- datasets, opened ----


class _Pairs:
    """An array of samples and an array of labels as a dataset; samples are copies."""

    def __init__(self, samples: Any, labels: Any) -> None:
        self.samples = samples
        self.labels = labels

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return copied(self.samples[index]), self.labels[index]


def _identity(sample: Any) -> Any:
    return sample


@dataclass(frozen=True, eq=False)
class Opened:
    """A dataset, opened: its samples before their transform, and the transform's steps.

    Parameters
    ----------
    base : Dataset
        Gives untransformed pairs; the user's own object where it has no ``transform``.
    steps : tuple of callable
        The dataset's transform; empty where it has none that can be taken out.
    rows : ndarray of int64 or None
        Which samples of `base` make up the dataset; None: all.
    samples : ndarray or None
        All base samples, as they are stored, if they can be had without reading one by one.
    labels : array-like or None
        All labels of `base`, likewise.
    names : tuple of str
        Class names.
    notes : tuple of str
        What was noticed.
    """

    base: Any
    steps: tuple[Step, ...] = ()
    rows: Indices | None = None
    samples: Array | None = None
    labels: Any = None
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.base) if self.rows is None else len(self.rows)

    def read(self, index: int) -> tuple[Any, Any]:
        """Return an untransformed pair.

        Raises
        ------
        InputError
            The dataset raised, or gave something else than a pair.
        """
        try:
            pair = self.base[index if self.rows is None else int(self.rows[index])]
        except Exception as error:
            raise InputError([_unreadable(index, error)]) from error
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError([_not_a_pair(index, pair)])
        return pair[0], pair[1]

    @property
    def probes(self) -> list[int]:
        """Some sample numbers, evenly spread."""
        last = len(self) - 1
        return sorted({round(last * step / (_PROBES - 1)) for step in range(_PROBES)})


def _unreadable(index: int, error: Exception) -> Problem:
    return Problem(
        f"dataset[{index}] must be readable",
        f"{type(error).__name__}: {error}",
        "Repair the dataset, or leave the sample out with torch.utils.data.Subset.",
    )


def _not_a_pair(index: int, found: Any) -> Problem:
    size = f" of length {len(found)}" if hasattr(found, "__len__") else ""
    return Problem(
        "each sample of the dataset must be a pair (x, y)",
        f"{type(found).__name__}{size} at index {index}",
        "Wrap the dataset so that it returns (x, y), or pass a tuple (X, y) of arrays.",
    )


def open_source(dataset: Any) -> Opened:
    """Take a dataset apart without changing it.

    Parameters
    ----------
    dataset : map-style torch Dataset, or tuple (X, y) of arrays
        `Subset` is followed to the dataset below it; a ``transform`` attribute is taken out of a
        shallow copy.

    Raises
    ------
    InputError
        It is not map-style, has fewer than two samples, or X and y differ in length.
    """
    if isinstance(dataset, tuple):
        return _sized(_open_arrays(dataset))
    rows: Indices | None = None
    while type(dataset) is Subset:
        below = np.asarray(dataset.indices, dtype=np.int64)
        rows = below if rows is None else below[rows]
        dataset = dataset.dataset
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return _sized(replace(_open_arrays(dataset.tensors), rows=rows))
    refuse(_style_problems(dataset))
    names = getattr(dataset, "classes", ())
    plain = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    source = _sized(Opened(dataset, rows=rows, names=tuple(names) if plain else ()))
    return _with_whole_arrays(_undressed(source))


def _style_problems(dataset: Any) -> list[Problem]:
    lacking = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if not lacking and not isinstance(dataset, IterableDataset):
        return []
    return [
        Problem(
            "dataset must be map-style: have a length and give samples by index",
            type(dataset).__name__ + (f" without {' and '.join(lacking)}" if lacking else ""),
            "Pass a torch.utils.data.Dataset with __len__ and __getitem__, or a tuple (X, y).",
        )
    ]


def _sized(source: Opened) -> Opened:
    if len(source) < 2:
        refuse(
            [
                Problem(
                    "dataset must have at least 2 samples",
                    f"dataset has {len(source)} sample{'s' * (len(source) != 1)}",
                    "Check the path, the split and any Subset.",
                )
            ]
        )
    return source


def _open_arrays(pair: tuple[Any, ...]) -> Opened:
    sizes = [len(part) if hasattr(part, "__len__") else None for part in pair]
    if len(pair) != 2 or None in sizes or sizes[0] != sizes[1]:
        refuse(
            [
                Problem(
                    "a tuple must be (X, y), two arrays of equal length",
                    f"{len(pair)} parts of lengths {sizes}",
                    "Pass one row of X and one label for each sample.",
                )
            ]
        )
    samples, labels = pair
    notes = []
    if not isinstance(samples, Tensor):
        samples = np.asarray(samples)
        if samples.dtype == np.float64:
            notes = ["X was converted from float64 to float32"]
            samples = samples.astype(np.float32)
    whole = to_array(samples) if kind_of(samples).storable else None
    return Opened(_Pairs(samples, labels), samples=whole, labels=labels, notes=tuple(notes))


def _undressed(source: Opened) -> Opened:
    """Return the source with its transform taken out, where that gives the same samples."""
    transform = getattr(source.base, "transform", None)
    if transform is None:
        return source
    steps = flatten(transform)
    for replacement in (None, _identity):
        base = _redressed(source.base, transform, replacement)
        if base is not None and _reads_alike(source, replace(source, base=base), steps):
            return replace(source, base=base, steps=steps)
    note = (
        "the dataset's transform could not be taken out of it; its samples are taken as they come"
    )
    return replace(source, notes=(*source.notes, note))


def _redressed(dataset: Any, transform: Any, replacement: Any) -> Any:
    """Return a shallow copy with another transform, or None where it cannot be set."""
    dressed = copy.copy(dataset)
    try:
        dressed.transform = replacement
    except AttributeError:
        return None
    joint = getattr(dataset, "transforms", None)
    if getattr(joint, "transform", None) is transform and hasattr(joint, "target_transform"):
        dressed.transforms = copy.copy(joint)
        dressed.transforms.transform = replacement
    return dressed


def _reads_alike(source: Opened, bare: Opened, steps: Sequence[Step]) -> bool:
    with generators_kept():
        for index in source.probes[:3]:
            try:
                seed_generators(0)
                sample, label = bare.read(index)
                ours = apply(steps, sample)
            except (TypeError, AttributeError, ValueError, RuntimeError, InputError):
                return False
            seed_generators(0)
            theirs, their_label = source.read(index)
            alike = same_sample(ours, theirs) or (
                # A transform with a generator of its own never gives the same sample twice.
                kind_of(ours) == kind_of(theirs) and is_random(partial(apply, steps), [sample])
            )
            if not alike or not _same_label(label, their_label):
                return False
    return True


def _same_label(one: Any, other: Any) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))


def _with_whole_arrays(source: Opened) -> Opened:
    """Add all samples and all labels, where the dataset has them as attributes."""
    base = source.base
    pairs = [(index, *source.read(index)) for index in source.probes]
    at = {
        index: index if source.rows is None else int(source.rows[index]) for index in source.probes
    }
    samples = _stored_images(getattr(base, "data", None), len(base))
    labels = _sequence(getattr(base, "targets", None), len(base))
    if samples is not None and not all(
        np.array_equal(to_array(x), samples[at[index]]) for index, x, _ in pairs
    ):
        samples = None
    if labels is not None and not all(_same_label(y, labels[at[index]]) for index, _, y in pairs):
        labels = None
    return replace(source, samples=samples, labels=labels)


def _sequence(values: Any, length: int) -> Any:
    usable = isinstance(values, (list, tuple, np.ndarray, Tensor))
    return values if usable and len(values) == length else None


def _stored_images(data: Any, length: int) -> Array | None:
    """Return pixels (n, C, H, W) of an array of images, of which the layout is guessed."""
    if isinstance(data, Tensor):
        data = to_array(data)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or len(data) != length:
        return None
    if data.ndim == 3:
        return data[:, None]
    if data.ndim == 4:
        return data.transpose(0, 3, 1, 2) if data.shape[-1] in (3, 4) else data
    return None


# ---- the two views ----


@dataclass(frozen=True, eq=False)
class Views:
    """The train view and the eval view of a source, with what was found about them."""

    train: View
    eval: View
    sample_shape: tuple[int, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]


def make_views(source: Opened, train_transform: Any, eval_transform: Any) -> Views:
    """Divide the pipelines of both views; see `prepare` for which transform goes where."""
    samples = [source.read(index)[0] for index in source.probes]
    own = source.steps
    given_eval = flatten(eval_transform)
    train_steps = flatten(train_transform) if train_transform is not None else own or given_eval
    train_trace = trace(train_steps, samples)
    notes = _repeat_notes(source, train_steps)
    problems = _sample_problems("training", train_trace)
    if eval_transform is not None:
        eval_steps, eval_trace = given_eval, trace(given_eval, samples)
        problems += _eval_random_problems(eval_steps, eval_trace)
    else:
        origin = own or train_steps
        origin_trace = train_trace if origin is train_steps else trace(origin, samples)
        eval_steps = without_random(origin, origin_trace)
        eval_trace, found, said = _derived(origin, origin_trace, eval_steps, samples, train_trace)
        problems += found
        notes += said
    if not problems:
        problems += _sample_problems("evaluation", eval_trace)
    shape = eval_trace.kinds[-1].shape if eval_trace.kinds[-1] else ()
    return Views(
        divide(train_steps, train_trace),
        divide(eval_steps, eval_trace),
        shape,
        tuple(notes),
        tuple(problems),
    )


def _repeat_notes(source: Opened, steps: Sequence[Step]) -> list[str]:
    for index in source.probes:
        results = []
        for _ in range(2):
            with seeded(0):
                results.append(apply(steps, copied(source.read(index)[0])))
        if not same_sample(*results):
            return [
                "the training view draws from a generator that is not the global one of random, "
                "NumPy or torch: it cannot be seeded, and results differ from run to run"
            ]
    return []


def _sample_problems(view: str, traced: Trace) -> list[Problem]:
    final = traced.kinds[-1]
    if final is None:
        return [
            Problem(
                f"all samples of the {view} view must have one shape and type",
                "samples that differ",
                "Add Resize and CenterCrop, or padding, to the transform.",
            )
        ]
    if final.form in ("tensor", "array", "number"):
        return []
    found = "a PIL image" if final.form == "image" else "an object that is no array"
    return [
        Problem(
            f"samples of the {view} view must be tensors, arrays or numbers",
            found,
            "End the transform with torchvision's ToTensor().",
        )
    ]


def _eval_random_problems(steps: Sequence[Step], traced: Trace) -> list[Problem]:
    drawn = [step_name(step) for step, flag in zip(steps, traced.random, strict=True) if flag]
    if not drawn:
        return []
    return [
        Problem(
            "eval_transform must give the same sample each time",
            f"random steps: {', '.join(drawn)}",
            "Leave them out of eval_transform; they belong into train_transform.",
        )
    ]


def _derived(
    origin: Sequence[Step],
    origin_trace: Trace,
    steps: Sequence[Step],
    samples: Sequence[Any],
    train_trace: Trace,
) -> tuple[Trace, list[Problem], list[str]]:
    """Follow the eval view that leaves the random steps out; say so, or ask for another."""
    if len(steps) == len(origin):
        return origin_trace, [], []
    names = [step_name(s) for s, flag in zip(origin, origin_trace.random, strict=True) if flag]
    left_out = ", ".join(names)
    try:
        traced = trace(steps, samples)
        received = _kind_text(traced.kinds[-1])
    except InputError as error:
        traced, received = origin_trace, str(error)
    expected = _kind_text(train_trace.kinds[-1])
    if received == expected:
        note = (
            f"the evaluation view leaves out the random steps {left_out}; "
            "pass eval_transform= to choose it yourself"
        )
        return traced, [], [note]
    problem = Problem(
        f"the evaluation view, which leaves out {left_out}, must give samples like the "
        f"training view's, {expected}",
        received,
        "Pass eval_transform=, such as Compose([Resize(...), CenterCrop(...), ToTensor()]).",
    )
    return traced, [problem], []


def _kind_text(kind: Kind | None) -> str:
    return "samples that differ in shape" if kind is None else f"{kind.form} {kind.shape}"


# ---- memory that processes share ----


@dataclass(frozen=True)
class ArraySpec:
    """Shape and type of a shared array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def map(self, fd: int) -> Tensor:
        """Map the array behind a descriptor; the descriptor may be closed afterwards.

        The mapping is private: a write changes this process's own copy of the page, so that no
        worker can damage what the others read.
        """
        memory = mmap.mmap(fd, max(1, self.nbytes), access=mmap.ACCESS_COPY)
        return torch.from_numpy(self.view(memory))

    def view(self, memory: mmap.mmap) -> Array:
        """Return mapped memory as an array."""
        count = int(np.prod(self.shape, dtype=np.int64))
        return np.frombuffer(memory, np.dtype(self.dtype), count).reshape(self.shape)


class SharedArray:
    """An array in memory without a name, or in a file without a name.

    Parameters
    ----------
    spec : ArraySpec
        Shape and type.
    folder : Path or None
        Where the file goes; None: memory (``memfd_create``; where there is none, a file in the
        system's folder for temporary files).
    """

    def __init__(self, spec: ArraySpec, folder: Path | None = None) -> None:
        self.spec = spec
        self.fd = _nameless(max(1, spec.nbytes), folder)

    def writable(self) -> Array:
        """Map the array for filling."""
        return self.spec.view(mmap.mmap(self.fd, max(1, self.spec.nbytes)))

    def close(self) -> None:
        """Close the descriptor; the memory goes when the last mapping does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def _nameless(size: int, folder: Path | None) -> int:
    if folder is None and hasattr(os, "memfd_create"):
        fd = os.memfd_create("asynckfold")
        os.ftruncate(fd, size)
        return fd
    with tempfile.TemporaryFile(dir=folder) as file:
        # Reserves the room, so that a full disk is an error here and no SIGBUS later.
        os.posix_fallocate(file.fileno(), 0, size)
        return os.dup(file.fileno())


# ---- batches ----


class _ViewBatches(Protocol):
    def gather(self, rows: Tensor, draw: Draw) -> Tensor: ...

    def to(self, device: torch.device) -> _ViewBatches: ...


@dataclass(frozen=True, eq=False)
class _Held:
    """A view of a stored array."""

    array: Tensor
    view: View

    def gather(self, rows: Tensor, draw: Draw) -> Tensor:
        return self.view(self.array.index_select(0, rows), draw)

    def to(self, device: torch.device) -> _Held:
        return _Held(self.array.to(device), self.view)


@dataclass(frozen=True, eq=False)
class _Read:
    """A view whose samples are read from the dataset, each under its own seed."""

    source: Opened
    steps: tuple[Step, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def gather(self, rows: Tensor, draw: Draw) -> Tensor:
        samples = []
        with generators_kept():
            pairs = zip(draw.indices.tolist(), draw.bits().tolist(), strict=True)
            for index, seed in pairs:
                seed_generators(seed)
                samples.append(apply(self.steps, self.source.read(index)[0]))
        batch: Tensor = default_collate(samples)
        return batch.to(self.device)

    def to(self, device: torch.device) -> _Read:
        return replace(self, device=device)


class Batches:
    """Whole batches of both views, by sample number.

    Parameters
    ----------
    targets : Tensor
        Of all samples.
    train_view, eval_view : object
        With ``gather(rows, draw)`` and ``to(device)``.
    """

    def __init__(self, targets: Tensor, train_view: _ViewBatches, eval_view: _ViewBatches) -> None:
        self.targets = targets
        self._train = train_view
        self._eval = eval_view

    @property
    def n_samples(self) -> int:
        """Number of samples."""
        return len(self.targets)

    def train(self, indices: Indices | Tensor, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the train view.

        Parameters
        ----------
        indices : ndarray or Tensor of int64, shape (B,)
            Sample numbers.
        seed, epoch : int
            What random steps draw from, together with the sample number.

        Returns
        -------
        (Tensor, Tensor)
            Shapes (B, ...) and (B,) or (B, m).
        """
        return self._gather(self._train, indices, seed, epoch)

    def eval(self, indices: Indices | Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the eval view, the same at each call."""
        return self._gather(self._eval, indices, 0, 0)

    def inputs(self, indices: Indices | Tensor) -> Array:
        """Return inputs of the eval view as a float array, for fitting a preprocessor."""
        inputs = self.eval(indices)[0].cpu()
        array: Array = (inputs if inputs.is_floating_point() else inputs.float()).numpy()
        return array

    def with_inputs(self, inputs: Tensor) -> Batches:
        """Return batches of other inputs, shape (n_samples, ...), the same in both views."""
        held = _Held(inputs, View((), None, (), ()))
        return Batches(self.targets, held, held)

    def to(self, device: torch.device | str) -> Batches:
        """Return the same batches from arrays that reside on a device."""
        place = torch.device(device)
        return Batches(self.targets.to(place), self._train.to(place), self._eval.to(place))

    def _gather(
        self, view: _ViewBatches, indices: Indices | Tensor, seed: int, epoch: int
    ) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(indices)
        draw = Draw(seed, epoch, rows.cpu().numpy())
        rows = rows.to(self.targets.device)
        return view.gather(rows, draw), self.targets.index_select(0, rows)


@dataclass(frozen=True, eq=False)
class DataHandle:
    """What travels to a worker.

    Parameters
    ----------
    specs : tuple of ArraySpec
        The shared arrays, targets first.
    train, eval : View
        Their batch steps.
    slots : (int, int)
        Which arrays the train view and the eval view are stored in.
    source : Opened or None
        The dataset, where its samples are not held.
    fds : tuple of int
        Descriptors of the arrays in this process, in the order of `specs`. They are not pickled:
        send them beside the handle (``socket.send_fds``) and give the received ones to `open`.
    """

    specs: tuple[ArraySpec, ...]
    train: View
    eval: View
    slots: tuple[int, int] = (0, 0)
    source: Opened | None = None
    fds: tuple[int, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "fds": ()}

    def open(self, fds: Sequence[int]) -> Batches:
        """Map the arrays; the descriptors stay the caller's and may be closed afterwards."""
        arrays = [spec.map(fd) for spec, fd in zip(self.specs, fds, strict=True)]
        if self.source is not None:
            train = _Read(self.source, self.train.pipeline)
            return Batches(arrays[0], train, _Read(self.source, self.eval.pipeline))
        train_slot, eval_slot = self.slots
        held = _Held(arrays[train_slot], self.train)
        return Batches(arrays[0], held, _Held(arrays[eval_slot], self.eval))


class OneByOne:
    """One view as an ordinary map-style data set: what a DataLoader gets in an ordinary script.

    Parameters
    ----------
    source : Opened
        Gives untransformed samples.
    steps : sequence of callable
        The user's transforms, in order.
    targets : ndarray
        As jobs use them.
    """

    def __init__(self, source: Opened, steps: Sequence[Step], targets: Array) -> None:
        self.source = replace(source, samples=None, labels=None)
        self.steps = tuple(steps)
        self.targets = torch.from_numpy(targets)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        sample, _ = self.source.read(index)
        for step in self.steps:
            sample = step(sample)
        return sample, self.targets[index]


# ---- preparing ----


@dataclass(frozen=True, eq=False)
class Prepared:
    """A dataset, ready for all jobs; it lives in the parent process.

    Parameters
    ----------
    targets : ndarray
        int64 class indices (n,), or float32 regression targets (n,) or (n, m).
    classes : tuple of str
        Class names by index; empty for regression.
    classification : bool
        Whether the targets are classes.
    n_samples : int
        Number of samples.
    fingerprint : str
        SHA-256 of stored samples, targets and what is done per batch.
    notes : tuple of str
        What the log must say.
    held : bool
        False: samples are read one by one in the workers.
    sample_shape : tuple of int
        Of one input of the eval view.
    """

    targets: Array
    classes: tuple[str, ...]
    classification: bool
    n_samples: int
    fingerprint: str
    notes: tuple[str, ...]
    held: bool
    sample_shape: tuple[int, ...]
    _handle: DataHandle
    _shared: tuple[SharedArray, ...]
    _ordinary: tuple[OneByOne, OneByOne]

    def ordinary(self) -> tuple[OneByOne, OneByOne]:
        """Return the train view and the eval view as data sets that read sample by sample."""
        return self._ordinary

    def handle(self) -> DataHandle:
        """Return what a worker needs, with this process's descriptors of the shared arrays."""
        return replace(self._handle, fds=tuple(array.fd for array in self._shared))

    def close(self) -> None:
        """Close the shared arrays; workers that mapped them keep them."""
        for array in self._shared:
            array.close()


def prepare(
    dataset: Any,
    *,
    train_transform: Any = None,
    eval_transform: Any = None,
    targets: Any = None,
    criterion_wants_classes: bool | None = None,
    memory_budget: int | None = None,
    folder: Path | None = None,
) -> Prepared:
    """Read a dataset once, check it, and divide its transform.

    Parameters
    ----------
    dataset : map-style torch Dataset of (x, y), or tuple (X, y) of arrays
        A ``transform`` attribute is divided into a train and an eval view; the object itself is
        never changed.
    train_transform, eval_transform : callable, optional
        In place of the dataset's own transform, or on top of its samples where it has none. From
        one transform alone the eval view is derived by leaving its random steps out.
    targets : array-like, optional
        Labels, in place of the dataset's.
    criterion_wants_classes : bool or None
        Whether the criterion needs class indices; None: told by the labels' type.
    memory_budget : int, optional
        Bytes that may be held in memory; beyond it the arrays go into a file in `folder`.
    folder : Path, optional
        Where that file, which has no name, is kept.

    Raises
    ------
    InputError
        All problems found in samples, transforms and labels.
    """
    source = open_source(dataset)
    views = make_views(source, train_transform, eval_transform)
    given = _given_labels(source, targets)
    refusal = None if given is None else _label_refusal(given, criterion_wants_classes, source)
    refuse([*views.problems, *(refusal.problems if refusal else ())])
    reading = _read_all(source, views, memory_budget, folder, given is None)
    labels = resolve_labels(
        given if given is not None else reading.labels, criterion_wants_classes, source.names
    )
    return _assemble(source, views, labels, reading)


def _given_labels(source: Opened, targets: Any) -> Any:
    if targets is None:
        if source.labels is None or source.rows is None:
            return source.labels
        return _label_array(source.labels)[source.rows]
    if not hasattr(targets, "__len__") or len(targets) != len(source):
        size = len(targets) if hasattr(targets, "__len__") else type(targets).__name__
        refuse(
            [
                Problem(
                    f"targets must hold one label for each of the {len(source)} samples",
                    str(size),
                    "Pass an array of that length, in the dataset's order.",
                )
            ]
        )
    return targets


def _label_refusal(values: Any, wants_classes: bool | None, source: Opened) -> InputError | None:
    try:
        resolve_labels(values, wants_classes, source.names)
    except InputError as error:
        return error
    return None


@dataclass(frozen=True, eq=False)
class _Reading:
    """What reading the dataset gave: arrays, or the reason why there are none."""

    arrays: tuple[SharedArray, ...] = ()
    slots: tuple[int, int] = (0, 0)
    labels: Any = None
    notes: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        return bool(self.arrays)


def _read_all(
    source: Opened, views: Views, memory_budget: int | None, folder: Path | None, need_labels: bool
) -> _Reading:
    reason = _why_not_held(source, views)
    arrays: list[SharedArray] = []
    notes: list[str] = []
    stored = _distinct_prefixes(views)
    if not reason:
        specs = [ArraySpec((len(source), *kind.shape), kind.dtype) for _, kind in stored]
        arrays, where = _allocate(specs, memory_budget, folder)
        reason = "" if arrays else where
        notes += [where] if arrays and where else []
    if not reason:
        labels, odd = _fill(source, stored, arrays, need_labels)
        if odd is None:
            notes += _feature_notes(arrays)
            return _Reading(tuple(arrays), (1, len(arrays)), labels, tuple(notes))
        _refuse_odd_sample(views, odd)
        reason = odd
    labels = [source.read(index)[1] for index in range(len(source))] if need_labels else None
    note = f"samples are read one by one in the workers, as a DataLoader does, since {reason}"
    return _Reading(labels=labels, notes=(note,))


def _why_not_held(source: Opened, views: Views) -> str:
    if any(varies(lambda at=index: source.read(at)[0]) for index in source.probes):  # type: ignore[misc]
        return (
            "the dataset is random by itself and has no transform to divide (its randomness is "
            "seeded by job, epoch and sample in training, and by sample in evaluation)"
        )
    if views.train.stored is None or views.eval.stored is None:
        return "they differ in shape or cannot be stored as an array before the random steps"
    return ""


def _distinct_prefixes(views: Views) -> list[tuple[tuple[Step, ...], Kind]]:
    pairs = [
        (view.prefix, view.stored) for view in (views.train, views.eval) if view.stored is not None
    ]
    if len(pairs) == 2 and pairs[0][1] == pairs[1][1] and same_steps(pairs[0][0], pairs[1][0]):
        return pairs[:1]
    return pairs


def _allocate(
    specs: Sequence[ArraySpec], memory_budget: int | None, folder: Path | None
) -> tuple[list[SharedArray], str]:
    """Return the arrays and where they are, or no arrays and why."""
    need = sum(spec.nbytes for spec in specs)
    if memory_budget is None or need <= memory_budget:
        return [SharedArray(spec) for spec in specs], ""
    text = f"{need} bytes are needed, {memory_budget} may be held in memory"
    if folder is None:
        return [], text
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if need <= free:
        try:
            arrays = [SharedArray(spec, folder) for spec in specs]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
        else:
            return arrays, f"{text}: the samples are kept in a file without a name in {folder}"
    return [], f"{text} and {free} are free in {folder}"


def _fill(
    source: Opened,
    stored: Sequence[tuple[tuple[Step, ...], Kind]],
    arrays: Sequence[SharedArray],
    need_labels: bool,
) -> tuple[Any, str | None]:
    """Fill the arrays; return labels, and what is odd about the first sample that does not fit."""
    outputs = [array.writable() for array in arrays]
    if not need_labels and source.samples is not None and not any(prefix for prefix, _ in stored):
        for output in outputs:
            output[...] = source.samples if source.rows is None else source.samples[source.rows]
        return None, None
    labels = []
    for index in range(len(source)):
        sample, label = source.read(index)
        labels.append(label)
        for (prefix, kind), output in zip(stored, outputs, strict=True):
            given = sample if len(stored) == 1 else copied(sample)
            array = _transformed(prefix, given, index)
            if array.shape != kind.shape or array.dtype != output.dtype:
                found = f"sample {index} is {array.dtype} {array.shape}"
                return None, f"{found} where others are {kind.dtype} {kind.shape}"
            output[index] = array
    return labels, None


def _transformed(prefix: Sequence[Step], sample: Any, index: int) -> Array:
    try:
        return to_array(apply(prefix, sample))
    except Exception as error:
        raise InputError([_unreadable(index, error)]) from error


def _refuse_odd_sample(views: Views, odd: str) -> None:
    """Refuse samples of several shapes where no later step could make them equal."""
    if not views.train.steps or not views.eval.steps:
        remedy = "Add Resize and CenterCrop, or padding, to the transform."
        refuse([Problem("all samples must have one shape and type", odd, remedy)])


def _feature_notes(arrays: Sequence[SharedArray]) -> list[str]:
    notes = []
    for shared in arrays:
        if np.dtype(shared.spec.dtype).kind != "f":
            continue
        flat = shared.writable().reshape(shared.spec.shape[0], -1)
        bad = sum(
            int((~np.isfinite(flat[start : start + 4096]).all(axis=1)).sum())
            for start in range(0, len(flat), 4096)
        )
        if bad:
            notes.append(f"{bad} of {len(flat)} samples hold NaN or infinite features")
    return list(dict.fromkeys(notes))


def _assemble(source: Opened, views: Views, labels: Labels, reading: _Reading) -> Prepared:
    target_array = SharedArray(ArraySpec(labels.targets.shape, str(labels.targets.dtype)))
    target_array.writable()[...] = labels.targets
    shared = (target_array, *reading.arrays)
    handle = DataHandle(
        tuple(array.spec for array in shared),
        _travelling(views.train, reading.held),
        _travelling(views.eval, reading.held),
        reading.slots,
        None if reading.held else replace(source, samples=None, labels=None),
    )
    notes = (*source.notes, *views.notes, *labels.notes, *reading.notes)
    prepared = Prepared(
        labels.targets,
        labels.classes,
        labels.classification,
        len(source),
        _fingerprint(handle, shared, labels, source),
        tuple(dict.fromkeys(notes)),
        reading.held,
        views.sample_shape,
        handle,
        shared,
        (
            OneByOne(source, views.train.pipeline, labels.targets),
            OneByOne(source, views.eval.pipeline, labels.targets),
        ),
    )
    return _audited(source, views, labels, prepared)


def _travelling(view: View, held: bool) -> View:
    """Return what a worker needs of a view: less to send, and no torchvision to import."""
    return replace(view, prefix=(), pipeline=()) if held else replace(view, prefix=(), steps=())


def _audited(source: Opened, views: Views, labels: Labels, prepared: Prepared) -> Prepared:
    """Read a few samples of the eval view in both ways; what differs is not held.

    The user's own steps are the reference, so that a change in torchvision can cost speed but
    never changes a number.
    """
    if not prepared.held:
        return prepared
    handle = prepared.handle()
    probes = np.array(source.probes, dtype=np.int64)
    ours = handle.open(handle.fds).eval(probes)[0]
    with seeded(0):
        theirs = default_collate([apply(views.eval.pipeline, source.read(i)[0]) for i in probes])
    if same_sample(ours, theirs):
        return prepared
    prepared.close()
    note = "samples are read one by one in the workers, since batches did not equal single samples"
    return _assemble(source, views, labels, _Reading(notes=(note,)))


def _fingerprint(
    handle: DataHandle, shared: Sequence[SharedArray], labels: Labels, source: Opened
) -> str:
    digest = hashlib.sha256(repr((handle.specs, labels.classes, handle.slots)).encode())
    for array in shared:
        with memoryview(mmap.mmap(array.fd, 0, access=mmap.ACCESS_READ)) as memory:
            digest.update(memory)
    for view in (handle.train, handle.eval):
        digest.update(describe((view.steps, view.pipeline), depth=6).encode())
    if handle.source is not None:
        for index in source.probes:
            with seeded(0):
                digest.update(repr(kind_of(sample := source.read(index)[0])).encode())
            if kind_of(sample).storable:
                digest.update(to_array(sample).tobytes())
    return digest.hexdigest()
