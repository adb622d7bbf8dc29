"""A Ctrl-C at a chosen call, with a checkpoint after each epoch before it."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from asynckfold import InterruptedRunError


@contextmanager
def interrupted(
    monkeypatch: pytest.MonkeyPatch, owner: type | str, method: str, call: int
) -> Iterator[None]:
    """Interrupt what runs in the block, in this process, at a call of a method, from 1.

    `owner` is a class, or the address of one below ``asynckfold``.
    """
    monkeypatch.setattr("asynckfold.training.checkpoint.EPOCH_SECONDS", 0.0)
    monkeypatch.setattr("asynckfold.training.checkpoint.SHARE", float("inf"))
    # An interrupt that no handler of ours announced drops what was not yet committed.
    monkeypatch.setattr("asynckfold.sweep.loop.FLUSH_SECONDS", 0.0)
    if isinstance(owner, str):
        owner = pkgutil.resolve_name(f"asynckfold.{owner}")
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
