"""Checks of the arguments of a server and its replicas, and of their connection."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asynckfold.errors import Problem


def count_problems(**counts: object) -> Iterator[Problem]:
    """Refuse anything but integers of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Problem(
                f"{name} must be a whole number of at least 1", repr(value), f"Pass {name}=1."
            )


def lr_problems(groups: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    """Refuse invalid learning rates."""
    for group in groups:
        lr = group["lr"]
        if not isinstance(lr, (int, float)) or not 0 <= lr < math.inf:
            yield Problem("lr must be a number of at least 0", repr(lr), "Pass for instance 0.1.")


def timeout_problems(timeout_s: float) -> Iterator[Problem]:
    """Refuse invalid timeouts."""
    if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
        yield Problem("timeout_s must be a number above 0", repr(timeout_s), "Pass seconds.")


def shard_problems(shard: object, total: int) -> Iterator[Problem]:
    """Refuse anything but a part of `total` numbers."""
    if not is_part(shard, total):
        yield Problem(
            "shard must be (index, count), index from 0 to count - 1, and each part must have "
            f"one of the model's {total} numbers",
            repr(shard),
            "Pass (0, 2) for the first of two servers.",
        )


def is_part(shard: object, total: int) -> bool:
    """Whether it is (index, count) of at most `total` parts."""
    return (
        isinstance(shard, (tuple, list))
        and len(shard) == 2
        and all(type(number) is int for number in shard)
        and 0 <= shard[0] < shard[1] <= total
    )


def model_problems(model: object) -> Iterator[Problem]:
    """Refuse what is no model."""
    if not isinstance(model, nn.Module):
        rule = "model must be a torch.nn.Module"
        yield Problem(rule, f"{model!r:.80}", "Pass the model that is trained.")


def membership_problems(trained: Sequence[torch.Tensor], model: nn.Module) -> Iterator[Problem]:
    """Refuse parameters of other models."""
    if unfit := list(model_problems(model)):
        yield from unfit
        return
    known = set(map(id, model.parameters()))
    foreign = sum(id(item) not in known for item in trained)
    if foreign:
        yield Problem(
            "params must be parameters of the model",
            f"{foreign} that are not",
            "Pass model.parameters().",
        )


def folder_problems(checkpoint: str | Path | None) -> Iterator[Problem]:
    """Refuse a checkpoint without a folder."""
    if checkpoint is not None and not Path(checkpoint).absolute().parent.is_dir():
        yield Problem(
            "the folder of checkpoint must exist", str(checkpoint), "Make it, or pass another."
        )


def difference_problems(header: dict[str, Any]) -> Iterator[Problem]:
    """Refuse a replica with another model than the server."""
    if header.get("kind") == "refused":
        yield Problem(
            "a replica must have the model of its server",
            f"{header.get('difference')!s:.200}",
            "Build both from the same code with the same arguments.",
        )


def parts_problems(shards: Sequence[Any], count: int) -> Iterator[Problem]:
    """Refuse servers that do not hold `count` different parts."""
    fit = all(is_part(shard, count) and shard[1] == count for shard in shards)
    if not fit or len({shard[0] for shard in shards}) < len(shards):
        yield Problem(
            f"{count} addresses must be those of servers with shard=(0, {count}) to "
            f"({count - 1}, {count})",
            f"shards {', '.join(map(str, shards))}",
            "Pass the addresses of all servers of the model.",
        )
