"""Copies between the host and a GPU for which the host does not wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def pinned(tensor: Tensor) -> Tensor:
    """Return a copy in memory that a GPU reads by itself; the tensor where there is no GPU."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device; what is computed there waits for it."""
    if device.type == "cpu":
        return tensor
    return pinned(tensor).to(device, non_blocking=True)


def fetched(tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """Return a tensor of a device on the host, and whether its values have arrived."""
    if tensor.device.type == "cpu":
        return tensor, lambda: True
    here = pinned(torch.empty(tensor.shape, dtype=tensor.dtype))
    here.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return here, event.query


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors, which are on one device, one after another."""
    return torch.cat([item.detach().reshape(-1).view(torch.uint8) for item in tensors])


def fetched_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the host, which waits once for all those that are on a device."""
    there = [item for item in tensors if not item.is_cpu]
    if not there:
        return list(tensors)
    parts = torch.split(packed(there).cpu(), [item.nbytes for item in there])
    # Copied once more: the bytes of a part may lie where its numbers must not begin.
    here = iter(
        part.clone().view(item.dtype).view(item.shape)
        for part, item in zip(parts, there, strict=True)
    )
    return [item if item.is_cpu else next(here) for item in tensors]


class Prefetcher:
    """Moves batches of an array of the host to a GPU while it computes on the batch before.

    ::

        host          gather n+1 into buffer 0   gather n+2 into buffer 1 …
        side stream             └─ copy n+1                └─ copy n+2
        main stream   compute n                  compute n+1 …
    """

    def __init__(self, array: Tensor, device: torch.device) -> None:
        self._array, self._device = array, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [array.new_empty(0)] * 2
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._started: tuple[tuple[int, int], Tensor] | None = None

    def start(self, place: tuple[int, int], rows: Tensor) -> None:
        """Begin to move the samples `rows` (B,) of the host, which are the batch at `place`."""
        self._turn = turn = 1 - self._turn
        if (copied := self._copied[turn]) is not None:
            # The copy before the last: the host may have run ahead.
            copied.synchronize()
        if len(self._buffers[turn]) < len(rows):
            shape = (len(rows), *self._array.shape[1:])
            self._buffers[turn] = pinned(self._array.new_empty(shape))
        buffer = self._buffers[turn][: len(rows)]
        torch.index_select(self._array, 0, rows, out=buffer)
        with torch.cuda.stream(self._stream):
            moved = buffer.to(self._device, non_blocking=True)
            self._copied[turn] = event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._started = place, moved

    def take(self, place: tuple[int, int], rows: Tensor) -> Tensor:
        """Return the batch at `place`, which was started before or is now."""
        if self._started is None or self._started[0] != place:
            self.start(place, rows)
        assert self._started is not None
        _, moved = self._started
        self._started, event = None, self._copied[self._turn]
        stream = torch.cuda.current_stream(self._device)
        if event is not None:
            stream.wait_event(event)
        # Its memory, of the side stream, must not be used again before this stream is done with it.
        moved.record_stream(stream)
        return moved
