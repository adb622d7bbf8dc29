"""Counts what a step asks of the host: copies from and to a device, and waits for it.

The device "meta" stands in for a GPU: it has shapes and no values. What would wait for the device
gets ones, and is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

WAITING = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default)
"""Operations whose result, or its shape, is needed on the host."""


@dataclass
class Counts:
    """Copies to the device and back, those for which the host waits, and its other waits."""

    sent: int = 0
    sent_waiting: int = 0
    fetched: int = 0
    fetched_waiting: int = 0
    waits: int = 0
    names: list[str] = field(default_factory=list)

    @property
    def synchronisations(self) -> int:
        """How often the host waits for the device."""
        return self.sent_waiting + self.fetched_waiting + self.waits


class Counting(TorchDispatchMode):
    """Counts in `counts` from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def take(self) -> Counts:
        """Return the counts so far, and begin anew."""
        found, self.counts = self.counts, Counts()
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices = [
            item.device.type for item in tree_leaves((args, kwargs)) if hasattr(item, "device")
        ]
        if func in (aten._to_copy.default, aten.copy_.default):
            return self._copy(func, args, kwargs)
        if func in WAITING and "meta" in devices:
            self.counts.waits += 1
            self.counts.names.append(str(func))
            return 1.0
        return func(*args, **kwargs)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        is_new = func is aten._to_copy.default
        source = args[0] if is_new else args[1]
        target = torch.device(kwargs.get("device") or source.device) if is_new else args[0].device
        waits = not (kwargs.get("non_blocking") or (not is_new and len(args) > 2 and args[2]))
        if (source.device.type, target.type) == ("cpu", "meta"):
            self.counts.sent += 1
            self.counts.sent_waiting += waits
            self.counts.names.append(str(func))
        elif (source.device.type, target.type) == ("meta", "cpu"):
            self.counts.fetched += 1
            self.counts.fetched_waiting += waits
            self.counts.names.append(str(func))
            return (
                torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
                if is_new
                else args[0].fill_(1)
            )
        return func(*args, **kwargs)
