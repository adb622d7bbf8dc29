"""Pooling, resizing and padding, which treat channels separately: CHANNELS in, CHANNELS out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from asynckfold.training.fusion.layouts import NotFusible, Value
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule


def _rule(function: Any, spatial: int | None) -> Rule:
    def channelwise(low: Lowering, input: Value, *args: Any, **kwargs: Any) -> Emitted:
        if spatial is not None and input.rank != spatial + 2:
            raise NotFusible(f"pooling of an input without a batch dimension ({input.rank}-D)")
        if kwargs.pop("return_indices", False):
            raise NotFusible("return_indices has no batched form")
        return low.on_channels(function, input, *args, **kwargs)

    return channelwise


def pad(
    low: Lowering,
    input: Value,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Emitted:
    """Pad the last dimensions; by mirrored or repeated values only what is no channel."""
    if len(pad) // 2 <= input.rank - 2:
        return low.on_channels(F.pad, input, pad, mode, value)
    if mode != "constant":
        raise NotFusible(f"padding of an input without a batch dimension ({input.rank}-D)")
    return low.on_stacked(F.pad, input, pad, mode, value)


def _pools() -> dict[Any, Rule]:
    found: dict[Any, Rule] = {}
    for spatial in (1, 2, 3):
        for kind in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool", "lp_pool"):
            function = getattr(F, f"{kind}{spatial}d")
            rule = _rule(function, spatial)
            found[function] = rule
            if (twin := getattr(torch, f"{kind}{spatial}d", None)) is not None:
                found[twin] = rule
    return found


FUNCTIONS: dict[Any, Rule] = {
    **_pools(),
    F.interpolate: _rule(F.interpolate, None),
    torch.pixel_shuffle: _rule(torch.pixel_shuffle, 2),
    torch.pixel_unshuffle: _rule(torch.pixel_unshuffle, 2),
    F.pad: pad,
}
