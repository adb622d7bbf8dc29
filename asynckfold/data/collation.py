"""The user's `collate_fn`: a list of samples → a batch of inputs and targets.

::

    (ids, 1), (ids, 0) …  ── collate_fn ──► (inputs, targets)      targets are checked, and dropped:
    {"ids": …, "label": 1} … ──────────────► {"ids": …, "label": …}   the trainer has them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asynckfold.data.dataset import TARGET_KEYS, KeyedTargets, SampleSource
from asynckfold.data.transforms.random_numbers import generators_kept
from asynckfold.data.transforms.samples import copied
from asynckfold.data.transforms.trees import leaves_by_path, mapped
from asynckfold.errors import InputError
from asynckfold.jobs.schema import Schema, UnfitTree, leaves_of, path_text


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
    """Makes the inputs of a batch by the user's function.

    Parameters
    ----------
    function : callable
        List of items → (inputs, targets), or a dict of both.
    form : ItemForm
        What an item is.
    schema : Schema or None
        Of targets of several parts.
    """

    function: Callable[[list[Any]], Any]
    form: ItemForm
    schema: Schema | None = None
    # whether inputs are a tuple with one for each sample; empty before the first batch
    _lists: list[bool] = field(default_factory=list, compare=False, repr=False)

    def __call__(self, samples: Sequence[Any], targets: Tensor) -> Any:
        """Return the inputs of samples with targets (B, ...).

        Raises
        ------
        InputError
            The function returns something else than inputs and the targets of these samples.
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
