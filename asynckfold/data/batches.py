"""Whole batches by sample number, and what a worker gets to make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from asynckfold.data.opened import Opened
from asynckfold.data.shared import ArraySpec
from asynckfold.folds import Indices
from asynckfold.transforms import Array, Draw, Step, View, apply, generators_kept, seed_generators


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
