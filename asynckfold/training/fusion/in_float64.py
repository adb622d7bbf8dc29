"""Let a model that names float32 compute in float64, in which fused and plain are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def naming(dtype: torch.dtype) -> Iterator[None]:
    """Let code that says float32, or names no format, mean float64 if that is `dtype`.

    Forwards make numbers of integers by ``.float()``, and begin with ``torch.zeros``.

    Examples
    --------
    >>> with naming(torch.float64):
    ...     numbers = torch.arange(2).float() + torch.zeros(2)
    >>> numbers.dtype
    torch.float64
    """
    if dtype is not torch.float64:
        yield
        return
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(usual)


class _Float64(TorchFunctionMode):
    """Exchanges float32 for float64 in every call of torch."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        named = {name: _wide(item) for name, item in (kwargs or {}).items()}
        return func(*map(_wide, args), **named)


def _wide(item: Any) -> Any:
    return torch.float64 if item is torch.float32 else item
