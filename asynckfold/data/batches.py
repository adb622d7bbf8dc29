"""Whole batches by sample number, and what a worker needs to make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from asynckfold.data.arrays import exact
from asynckfold.data.dataset import TARGET_KEYS, KeyedTargets, SampleSource
from asynckfold.data.device_copies import Prefetcher, sent
from asynckfold.data.labels import Encoding
from asynckfold.data.shared_arrays import ArraySpec
from asynckfold.data.table_codes import TableCodes
from asynckfold.data.transforms.random_numbers import (
    Draw,
    JoinedDraw,
    generators_kept,
    seed_generators,
    varies,
)
from asynckfold.data.transforms.steps import PerSample, Step, apply, same_steps
from asynckfold.data.transforms.trees import (
    Array,
    Records,
    copied,
    leaves_by_path,
    mapped,
    on_device,
    records_in,
)
from asynckfold.data.views import View
from asynckfold.errors import InputError
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.schema import Schema, UnfitTree, leaves_of, path_text


class WeightedTargets(NamedTuple):
    """Targets (B, ...) of a batch, and the weights (B,) of its samples, in float64."""

    targets: Tensor
    weights: Tensor


_CPU = torch.device("cpu")
_NO_SAMPLES = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class _ViewBatches:
    """Batches of a view, which are made on the host and moved to the device."""

    device: torch.device = _CPU

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """What may be kept on the device."""
        return ()

    def gather(self, rows: Tensor, draw: Draw) -> tuple[Tensor, Tensor | None]:
        """Return inputs, and targets if these come with each read."""
        raise TypeError("samples of different length need a collate_fn")

    def samples(self, draw: Draw) -> tuple[list[Any], Tensor | None]:
        """Return samples, and targets if these come with each read."""
        raise NotImplementedError

    def to(self, device: torch.device, moved: Mapping[int, Tensor]) -> _ViewBatches:
        """Return the same batches on a device, with the arrays that were moved there."""
        return replace(self, device=device)


@dataclass(frozen=True, eq=False)
class _ArrayView(_ViewBatches):
    """A view of a stored array, which is on the device or stays where it is."""

    array: Tensor
    view: View

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        return (self.array,)

    @property
    def is_moved_by_batch(self) -> bool:
        return self.device.type == "cuda" and self.array.device != self.device

    def gather(self, rows: Tensor, draw: Draw) -> tuple[Tensor, None]:
        if self.array.device == self.device:
            return self.view(self.array.index_select(0, rows), draw), None
        # Moved before its steps, so that a batch has the same bits wherever the array is.
        batch = self.array.index_select(0, torch.from_numpy(draw.indices))
        return self.view(batch.to(self.device), draw), None

    def to(self, device: torch.device, moved: Mapping[int, Tensor]) -> _ArrayView:
        return replace(self, array=moved.get(id(self.array), self.array), device=device)


@dataclass(frozen=True, eq=False)
class _Read(_ViewBatches):
    """A view whose samples are read from the dataset, each under a seed of its sample."""

    source: SampleSource
    steps: tuple[Step, ...]
    encoding: Encoding | None = None

    def gather(self, rows: Tensor, draw: Draw) -> tuple[Tensor, Tensor | None]:
        samples, targets = self.samples(draw)
        batch: Tensor = default_collate(samples)
        return batch.to(self.device), None if targets is None else targets.to(self.device)

    def samples(self, draw: Draw) -> tuple[list[Any], Tensor | None]:
        samples, labels = [], []
        with generators_kept():
            pairs = zip(draw.indices.tolist(), draw.bits().tolist(), strict=True)
            for index, seed in pairs:
                seed_generators(seed)
                sample, label = self.source.read(index)
                samples.append(apply(self.steps, copied(sample) if self.steps else sample))
                labels.append(label)
        if self.encoding is None:
            return samples, None
        targets = map(self.encoding, labels, draw.indices.tolist())
        return samples, torch.from_numpy(np.stack(list(targets)))


@dataclass(frozen=True, eq=False)
class _RaggedView(_ViewBatches):
    """A view of stored samples of different length, which stay on the host."""

    offsets: Tensor
    values: Tensor
    records: Records

    def samples(self, draw: Draw) -> tuple[list[Any], None]:
        places = torch.from_numpy(draw.indices)
        edges = zip(self.offsets[places].tolist(), self.offsets[places + 1].tolist(), strict=True)
        return [self.records.restore(self.values[low:high]) for low, high in edges], None


@dataclass(frozen=True, eq=False)
class _MappedView(_ViewBatches):
    """A view whose batches pass through a function of arrays, on the CPU."""

    view: _ViewBatches
    change: Callable[[Array], Tensor]

    def gather(self, rows: Tensor, draw: Draw) -> tuple[Tensor, Tensor | None]:
        batch, targets = self.view.gather(torch.from_numpy(draw.indices), draw)
        # Each of several batches alone, since products of matrices round by their shape.
        count = len(draw.seeds) if isinstance(draw, JoinedDraw) else 1
        changed = [self.change(part) for part in np.split(exact(batch), count)]
        return torch.cat(changed).to(self.device), targets


def _same_view(one: _ViewBatches, other: _ViewBatches) -> bool:
    if isinstance(one, _ArrayView) and isinstance(other, _ArrayView):
        return one.array is other.array and one.view.steps == other.view.steps
    if not (isinstance(one, _Read) and isinstance(other, _Read)):
        return False
    source = one.source
    if one.encoding is not None:
        # Random by itself, though perhaps not at each read.
        return False
    return same_steps(one.steps, other.steps) and not any(
        varies(partial(source.read, index)) for index in source.probes
    )


class Batches:
    """Whole batches of both views, by sample number.

    With `records`, inputs are a tree of tensors (B, ...). With a `collation`, they are what the
    user's function makes of a list of samples. With a `schema`, targets are rows of trees.
    """

    def __init__(
        self,
        targets: Tensor,
        train_view: _ViewBatches,
        eval_view: _ViewBatches,
        records: Records | None = None,
        collation: Collation | None = None,
        schema: Schema | None = None,
    ) -> None:
        self.targets = targets
        self.schema = schema
        self.records = records
        self.collation = collation
        self._train = train_view
        self._eval = eval_view
        self.last_is_target = False
        self.codes: TableCodes | None = None
        """What the rows stand for, where `preprocess` gets a table of pandas."""
        self.inverse: Callable[[Array], Array] | None = None
        """Brings outputs into the units of the data set, where targets were transformed."""
        self.targets_in_units = targets
        """Targets as the data set has them, on the host."""
        self.sample_weight: Tensor | None = None
        """Weights (n_samples,) in losses, in float64."""
        self.not_finite: tuple[int, ...] = ()
        """Samples that hold NaN or infinity: the first of the inputs, and of the targets."""
        self.moved: dict[torch.device, Batches] = {}
        """These batches on the device of the last job, if they are kept there for the next."""

    @property
    def n_samples(self) -> int:
        """Number of samples."""
        return len(self.targets)

    @property
    def in_memory(self) -> bool:
        """Whether training batches are rows of a stored array, changed by the view's steps."""
        return isinstance(self._train, _ArrayView) and self.collation is None

    def train(self, indices: Indices | Tensor, seed: int, epoch: int) -> tuple[Any, Tensor]:
        """Return inputs (B, ...) and targets (B,) or (B, m) of the train view.

        Random steps draw from `seed`, `epoch` and the sample number.
        """
        return self._gather(self._train, indices, seed, epoch)

    def train_together(
        self, indices: Tensor, seeds: Sequence[int], epoch: int
    ) -> tuple[Any, Tensor]:
        """Return the batches of `train` for all rows of `indices` (R, B), stacked; same bits.

        `seeds` has one seed per row; shapes are (R, B, ...) and (R, B) or (R, B, m).
        """
        numbers = indices.cpu().numpy().reshape(-1)
        return self._gather_joined(indices, JoinedDraw(0, epoch, numbers, seeds=seeds))

    def _gather_joined(self, rows: Tensor, draw: Draw) -> tuple[Any, Tensor]:
        inputs, targets = self.gathered(self._train, rows.reshape(-1), draw)
        size = rows.shape
        joined = mapped(lambda item: item.reshape(*size, *item.shape[1:]), inputs)
        return joined, targets.reshape(*size, *targets.shape[1:])

    def train_on_device(self, rows: Tensor, *draws: Tensor) -> tuple[Any, Tensor]:
        """Return what `train` returns for parts (..., B) of `OrderedBatches.on_device`; same bits.

        The host waits for nothing, and a CUDA graph may hold it.
        """
        assert isinstance(self._train, _ArrayView)
        pairs = zip(self._train.view.drawing, draws, strict=True)
        sent = {place: bits.reshape(-1) for place, bits in pairs}
        inputs, targets = self._gather_joined(rows, Draw(0, 0, _NO_SAMPLES, sent=sent))
        return inputs, self.weighted(targets, rows)

    def eval(self, indices: Indices | Tensor) -> tuple[Any, Tensor]:
        """Return inputs and targets of the eval view, the same at each call."""
        return self._gather(self._eval, indices, 0, 0)

    def ordered(
        self, indices: Indices | Tensor, seed: int = 0, epoch: int = 0, *, training: bool
    ) -> OrderedBatches:
        """Return batches of samples in one order, as of an epoch, which lies on the device."""
        made = OrderedBatches(self, self._train if training else self._eval, indices, seed, epoch)
        made.is_weighted = training and self.sample_weight is not None
        return made

    def targets_of(self, indices: Indices | Tensor) -> Tensor:
        """Return the targets that `eval` returns, without reading inputs."""
        rows, device = torch.as_tensor(indices), self.targets.device
        return self.targets.index_select(0, rows if rows.device == device else sent(rows, device))

    def weighted(self, targets: Tensor, indices: Indices | Tensor) -> Any:
        """Return targets of samples, as `WeightedTargets` where samples have weights."""
        if self.sample_weight is None:
            return targets
        rows, device = torch.as_tensor(indices), self.sample_weight.device
        rows = rows if rows.device == device else sent(rows, device)
        return WeightedTargets(targets, self.sample_weight.index_select(0, rows))

    def asked_of(self, targets: Tensor) -> Any:
        """Return the targets (B, ...) of a batch as the data set gives them."""
        return targets if self.schema is None else self.schema.split(targets)

    def inputs(self, indices: Indices | Tensor) -> Array:
        """Return inputs of the eval view for scikit-learn, see `exact`."""
        return exact(self.eval(indices)[0])

    @property
    def stored(self) -> Array | Iterator[bytes] | None:
        """All samples as the eval view stores them, as bytes if they may differ in shape.

        None where they are read one by one.
        """
        view = self._eval
        if isinstance(view, _RaggedView):
            edges = pairwise(view.offsets.tolist())
            return (view.values[low:high].numpy().tobytes() for low, high in edges)
        return next((array.numpy() for array in view.arrays), None)

    @property
    def one_view(self) -> bool:
        """Whether both views always give the same samples."""
        return self._train is self._eval or _same_view(self._train, self._eval)

    def with_inputs(
        self, inputs: Tensor, change: Callable[[Array], Tensor] | None = None
    ) -> Batches:
        """Return batches of other inputs (n_samples, ...) in the eval view.

        `change` maps inputs of the train view (B, ...) to what it gives instead; without it, the
        train view is the eval view.
        """
        held = _ArrayView(inputs, View((), None, (), ()))
        train = held if change is None else _MappedView(self._train, change)
        made = Batches(self.targets, train, held, schema=self.schema)
        made.sample_weight = self.sample_weight
        return made

    def with_targets(self, targets: Tensor, inverse: Callable[[Array], Array]) -> Batches:
        """Return the same inputs with transformed targets, and what brings outputs back."""
        made = copy(self)
        made.targets, made.inverse, made.moved = targets, inverse, {}
        return made

    def bytes_on(self, device: torch.device) -> int:
        """Return the bytes that the arrays of both views and the targets take on a device."""
        arrays = (self.targets, *self._train.arrays, *self._eval.arrays)
        distinct = {id(array): array for array in arrays if array.device == device}
        return sum(array.nbytes for array in distinct.values())

    def to(self, device: torch.device | str, room: int | None = None) -> Batches:
        """Return the same batches on a device.

        Arrays that need more than `room` bytes there stay where they are (None: no limit), and each
        batch is moved.
        """
        place = torch.device(device)
        views = train, evaluation = self._train, self._eval
        # Both views of an array that both are stored in: it is moved once.
        arrays = {id(array): array for view in views for array in view.arrays}
        size = sum(array.nbytes for array in arrays.values() if array.device != place)
        fits = room is None or size <= room
        moved = {key: array.to(place) for key, array in arrays.items()} if fits else {}
        views = train.to(place, moved), evaluation.to(place, moved)
        there = Batches(self.targets.to(place), *views, self.records, self.collation, self.schema)
        there.inverse, there.targets_in_units = self.inverse, self.targets_in_units
        if self.sample_weight is not None:
            there.sample_weight = self.sample_weight.to(place)
        return there

    def _gather(
        self, view: _ViewBatches, indices: Indices | Tensor, seed: int, epoch: int
    ) -> tuple[Any, Tensor]:
        rows = torch.as_tensor(indices)
        return self.gathered(view, rows, Draw(seed, epoch, rows.cpu().numpy()))

    def gathered(self, view: _ViewBatches, rows: Tensor, draw: Draw) -> tuple[Any, Tensor]:
        """Return inputs and targets of a view for the samples `rows` of a draw."""
        if self.collation is not None:
            return self._collated(view, rows, draw)
        rows = rows.to(self.targets.device)
        batch, targets = view.gather(rows, draw)
        if targets is None:
            return self.unpacked(batch), self.targets.index_select(0, rows)
        return self.unpacked(batch), targets.to(batch.device)

    def _collated(self, view: _ViewBatches, rows: Tensor, draw: Draw) -> tuple[Any, Tensor]:
        assert self.collation is not None
        device = self.targets.device
        samples, targets = view.samples(draw)
        if isinstance(view, _Read):
            # The function may change what it gets, which may be a part of the dataset.
            samples = list(map(copied, samples))
        if targets is None:
            targets = self.targets.index_select(0, rows.to(device)).cpu()
        return on_device(self.collation(samples, targets), device), targets.to(device)

    def samples_of(self, indices: Indices) -> list[Any]:
        """Return samples of the eval view of collated batches, one by one."""
        return self._eval.samples(Draw(0, 0, indices))[0]

    def unpacked(self, batch: Tensor) -> Any:
        """Return the inputs of a batch, which may be records."""
        return batch if self.records is None else self.records.unpack(batch)


class OrderedBatches:
    """Batches of samples in one order: sample numbers and draws are sent to the device once."""

    def __init__(
        self, batches: Batches, view: _ViewBatches, indices: Indices | Tensor, seed: int, epoch: int
    ) -> None:
        self._batches, self._view = batches, view
        self._here = torch.as_tensor(indices)
        device = batches.targets.device
        self._there = sent(self._here, device)
        self._draw = Draw(seed, epoch, self._here.numpy())
        self._bits: dict[int, Tensor] = {}
        self.is_weighted = False
        self._prefetcher: Prefetcher | None = None
        if isinstance(view, _ArrayView) and device.type != "cpu":
            for place in view.view.drawing:
                bits = self._draw.at(place).bits().view(np.int64)
                self._bits[place] = sent(torch.from_numpy(bits), device)
            if view.is_moved_by_batch:
                self._prefetcher = Prefetcher(view.array, device)

    @property
    def on_device(self) -> list[Tensor] | None:
        """Sample numbers and draws (n,) on the device; None where the host makes the batches."""
        view = self._view
        if not isinstance(view, _ArrayView) or self._batches.collation is not None:
            return None
        is_there = view.array.device == view.device and len(self._bits) == len(view.view.drawing)
        if not is_there or any(isinstance(step, PerSample) for step in view.view.steps):
            return None
        return [self._there, *self._bits.values()]

    def batch(
        self, low: int, high: int, following: tuple[int, int] | None = None
    ) -> tuple[Any, Tensor]:
        """Return inputs and targets of the samples from `low` to `high` in the order.

        A batch that stays on the host until it is needed is moved while the device computes on the
        one before, if that named it as `following`.
        """
        inputs, targets = self._made(low, high, following)
        if self.is_weighted:
            targets = self._batches.weighted(targets, self._there[low:high])
        return inputs, targets

    def _made(self, low: int, high: int, following: tuple[int, int] | None) -> tuple[Any, Tensor]:
        bits = {place: item[low:high] for place, item in self._bits.items()}
        rows, draw = self._there[low:high], self._draw
        # Without `replace`, which takes longer than to gather a small batch.
        draw = Draw(draw.seed, draw.epoch, draw.indices[low:high], draw.place, bits)
        if self._prefetcher is None or not isinstance(self._view, _ArrayView):
            return self._batches.gathered(self._view, rows, draw)
        moved = self._prefetcher.take((low, high), self._here[low:high])
        if following is not None:
            self._prefetcher.start(following, self._here[slice(*following)])
        inputs = self._batches.unpacked(self._view.view(moved, draw))
        return inputs, self._batches.targets.index_select(0, rows)


def one_by_one(
    source: SampleSource, steps: Sequence[Step], targets: Array, collation: Collation | None = None
) -> Batches:
    """Return batches of one view whose samples are read when they are asked for.

    Bit-identical with a stored view, which was compared with it.
    """
    view = _Read(source, tuple(steps))
    batches = Batches(torch.from_numpy(targets), view, view, records_in(steps), collation)
    if collation is not None or steps or source.samples is None:
        return batches
    rows = slice(None) if source.rows is None else source.rows
    samples = np.require(source.samples[rows], requirements="W")
    return batches.with_inputs(torch.from_numpy(samples))


@dataclass(frozen=True, eq=False)
class DataHandle:
    """What travels to a worker. Descriptors are not pickled.

    Send `fds` beside the handle (``socket.send_fds``) and pass the received ones to `open`.
    """

    specs: tuple[ArraySpec, ...]  # the shared arrays, targets first
    train: View
    eval: View
    slots: tuple[int, int] = (0, 0)  # arrays of the train view and the eval view
    source: SampleSource | None = None  # the dataset, where samples are not held
    encoding: Encoding | None = None  # of a random dataset's targets, which come with each sample
    fds: tuple[int, ...] = ()  # in the order of `specs`
    records: Records | None = None  # of samples of several tensors, or stored for `collation`
    collation: Collation | None = None  # the user's, in place of stacking
    schema: Schema | None = None  # of targets of several parts
    not_finite: tuple[int, ...] = ()  # see `Batches.not_finite`
    last_is_target: bool = False  # taken to be so, of more than two tensors
    codes: TableCodes | None = None  # see `Batches.codes`
    has_weights: bool = False  # the last array is `Batches.sample_weight`

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "fds": ()}

    def mapped(self) -> list[Array]:
        """Map the shared arrays for reading, in the process that has them open."""
        return [spec.map_readable(fd) for spec, fd in zip(self.specs, self.fds, strict=True)]

    def open(self, fds: Sequence[int]) -> Batches:
        """Map the arrays; the descriptors stay the caller's and may be closed afterwards."""
        targets, *arrays = [spec.map(fd) for spec, fd in zip(self.specs, fds, strict=True)]
        both, records = (self.train, self.eval), self.records
        views: list[_ViewBatches]
        if self.source is not None:
            views = [_Read(self.source, view.pipeline, self.encoding) for view in both]
        elif records is not None and records.ragged:
            views, records = [_RaggedView(arrays[0], arrays[1], records)] * 2, None
        else:
            pairs = zip(self.slots, both, strict=True)
            views = [_ArrayView(arrays[slot - 1], view) for slot, view in pairs]
        batches = Batches(targets, views[0], views[1], records, self.collation, self.schema)
        batches.not_finite, batches.last_is_target = self.not_finite, self.last_is_target
        batches.codes = self.codes
        batches.sample_weight = arrays[-1] if self.has_weights else None
        return batches


# The user's `collate_fn`: a list of samples → a batch of inputs and targets


@dataclass(frozen=True)
class ItemForm:
    """How a data set gives a sample and its target."""

    key: str | None = None  # of an item that is a dict
    as_tensors: bool = False

    def item(self, sample: Any, target: Any) -> Any:
        """Return a sample and its target as an item of the data set."""
        if isinstance(target, Tensor) and not self.as_tensors:
            target = target.numpy() if target.ndim else target.item()
        return (sample, target) if self.key is None else {**sample, self.key: target}


def item_form(source: SampleSource) -> ItemForm:
    """Return how the items of a source are built; reads one."""
    base, key = source.base, None
    if isinstance(base, KeyedTargets):
        key = base.key
    elif isinstance(item := base[source.row(0)], dict):
        key = next((name for name in TARGET_KEYS if name in item), None)
    return ItemForm(key, isinstance(source.read(0)[1], Tensor))


@dataclass(frozen=True)
class Collation:
    """Makes the inputs of a batch by the user's function: items → (inputs, targets), or a dict."""

    function: Callable[[list[Any]], Any]
    form: ItemForm  # what an item is
    schema: Schema | None = None  # of targets of several parts
    # whether inputs are a tuple with one for each sample; empty before the first batch
    _lists: list[bool] = field(default_factory=list, compare=False, repr=False)

    def __call__(self, samples: Sequence[Any], targets: Tensor) -> Any:
        """Return the inputs of samples with targets (B, ...).

        Raises `InputError` where the function gives something else than inputs and these targets.
        """
        each: Any = targets
        if self.schema is not None:
            each = [_of_one(self.schema, row) for row in targets]
        items = [self.form.item(*pair) for pair in zip(samples, each, strict=True)]
        # The function may change what it gets.
        spare = None if self._lists else copied([*items, items[0]])
        inputs, returned = self._divided(self.function(items))
        _check_targets(returned, targets, self.schema)
        if spare is not None:
            self._lists.append(self._grows(inputs, spare))
        # A list is one argument of the model, a tuple several.
        return list(inputs) if self._lists[0] else inputs

    def _grows(self, inputs: Any, more: list[Any]) -> bool:
        """Whether a tuple has an item for each sample, as that of ``tuple(zip(*items))``.

        It may also have as many inputs as the batch has samples: `more` are one sample more.
        """
        if type(inputs) is not tuple or len(inputs) + 1 != len(more):
            return False
        with generators_kept():
            return len(self._divided(self.function(more))[0]) == len(more)

    def _divided(self, batch: Any) -> tuple[Any, Any]:
        """Return inputs and targets of a batch."""
        if self.form.key is None:
            if isinstance(batch, (tuple, list)) and len(batch) == 2:
                return batch[0], batch[1]
            rule = "collate_fn must return (inputs, targets) for items that are pairs"
            remedy = "Return several inputs as one tuple: ((ids, lengths), targets)."
            raise InputError.one(rule, type(batch).__name__, remedy)
        names = list(batch) if isinstance(batch, Mapping) else []
        key = next((name for name in (self.form.key, *TARGET_KEYS) if name in names), None)
        if key is None or len(names) == 1:
            rule = f"collate_fn must return a dict of the inputs and of {self.form.key!r} for "
            remedy = "Return for instance {'ids': ids, " + repr(self.form.key) + ": targets}."
            received = f"{type(batch).__name__} {names or ''}"
            raise InputError.one(f"{rule}items that are dicts", received, remedy)
        return {name: batch[name] for name in names if name != key}, batch[key]


def _check_targets(returned: Any, targets: Tensor, schema: Schema | None) -> None:
    """Refuse targets of other samples, of fewer or more, or in another order."""
    leaves: dict[Any, Any] = {(): returned}
    wanted: dict[Any, Any] = {(): targets}
    if schema is not None:
        wanted = dict(leaves_of(schema.split(targets)))
        try:
            leaves = dict(leaves_of(returned))
        except UnfitTree:
            leaves = {}
    if leaves.keys() != wanted.keys() or not all(map(_are_same, leaves.values(), wanted.values())):
        raise InputError.one(
            "collate_fn must return one target for each sample, the targets of its samples, in "
            "their order",
            "other targets, or others in between",
            "Return for instance torch.tensor([target for _, target in samples]), of targets of "
            "several parts what default_collate gives, or a list of them where shapes differ. Sort "
            "by length in the model, and mix samples in a training_step.",
        )


def _are_same(values: Any, target: Tensor) -> bool:
    try:
        tensor = torch.as_tensor(values if isinstance(values, Tensor) else np.asarray(values))
    except (TypeError, ValueError):
        return False
    if tensor.numel() != target.numel() or tensor.shape[:1] != target.shape[:1]:
        return False
    return torch.equal(tensor.detach().cpu().reshape(target.shape).to(target.dtype), target)


def _of_one(schema: Schema, row: Tensor) -> Any:
    """Return the target of one sample."""
    trees = schema.split(row[None])
    return trees[0] if schema.ragged else mapped(lambda part: part[0], trees)


def structure(inputs: Any) -> str:
    """Return types and dimensions of what a batch holds, without its sizes.

    >>> structure({"ids": torch.zeros(2, 7), "lengths": [7, 3]})
    "['ids'] float32 of 2 dimensions, ['lengths'] a list"
    """
    if isinstance(inputs, list) and not _is_numbers(inputs):
        return f"a list of {' and '.join(dict.fromkeys(map(structure, inputs)))}"
    leaves, _ = leaves_by_path(inputs, stops=_is_numbers)
    return ", ".join(f"{path_text(path)} {_kind(leaf)}".strip() for path, leaf in leaves.items())


def _is_numbers(item: Any) -> bool:
    return isinstance(item, list) and all(isinstance(part, (int, float)) for part in item)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype)[6:]} of {leaf.ndim} dimension{'s' * (leaf.ndim != 1)}"
    return f"a {type(leaf).__name__}"
