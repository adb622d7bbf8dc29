"""A Ctrl-C at a chosen call, with a checkpoint after each epoch before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from asynckfold import InterruptedRunError
from asynckfold.training import checkpoint


@contextmanager
def interrupted(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int
) -> Iterator[None]:
    """Interrupt what runs in the block, in this process, at a call of a method, from 1."""
    monkeypatch.setattr(checkpoint, "EPOCH_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "SHARE", float("inf"))
    whole, calls = getattr(owner, method), []

    def cut(self: Any, *args: Any, **settings: Any) -> Any:
        calls.append(self)
        if len(calls) == call:
            raise KeyboardInterrupt
        return whole(self, *args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, cut)
        with pytest.raises((InterruptedRunError, KeyboardInterrupt)):
            yield
    assert len(calls) == call
