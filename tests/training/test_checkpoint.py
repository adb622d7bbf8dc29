"""Checkpoints: what is written comes back, and what is not whole is never used."""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from asynckfold import StorageError, StoreCorruptError
from asynckfold.training import checkpoint

DTYPES = (
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
)


def text_of(value: Any) -> Any:
    """Return what differs where a type or a bit does."""
    if isinstance(value, torch.Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return "tensor", value.dtype, value.shape, data
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.shape, value.tobytes()
    if isinstance(value, (list, tuple)):
        return type(value), [*map(text_of, value)]
    if isinstance(value, dict):
        return type(value), [(text_of(key), text_of(item)) for key, item in value.items()]
    return type(value), repr(value)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    tensors = [
        (torch.randn(shape) * 50).to(kind) for kind in DTYPES for shape in ((2, 3), (), (0,))
    ]
    arrays = [np.arange(6).reshape(2, 3).astype(kind) for kind in ("f4", "f8", "i8", "u1", "?")]
    numbers = [None, True, -3, 2**70, 0.1, -0.0, math.inf, -math.inf, math.nan, "é\0"]
    tree = {
        "tensors": tensors,
        "transposed": tensors[0].mT,
        "arrays": tuple(arrays),
        "plain": numbers,
        "ordered": OrderedDict([("b", 1), ("a", [])]),
        "counter": Counter(a=2),
        "keys": {1: "one", (2, "x"): {}, None: (), "": {False: [()]}},
    }
    digest, size = checkpoint.save(tmp_path / "checkpoint", tree)
    assert (tmp_path / "checkpoint").stat().st_size == size
    assert text_of(checkpoint.load(tmp_path / "checkpoint", digest)) == text_of(tree)


UNSUPPORTED: list[tuple[Any, str]] = [
    (object(), "object"),
    (nn.Linear(1, 1), "Linear"),
    (torch.zeros(2).to_sparse(), "tensor of torch.float32, torch.sparse_coo, on cpu"),
    (torch.zeros(2, device="meta"), "tensor of torch.float32, torch.strided, on meta"),
    (np.array(["text"]), "NumPy array of <U4"),
    (np.longdouble(1), "longdouble"),
]


def test_an_error_names_the_place_of_an_unsupported_value(tmp_path: Path) -> None:
    for value, kind in UNSUPPORTED:
        with pytest.raises(TypeError, match=rf"\['optimizer'\]\['state'\]\[0\]\[1\] is a .*{kind}"):
            checkpoint.save(tmp_path / "c", {"optimizer": {"state": [(1, value)]}})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="could not write"):
        checkpoint.save(tmp_path / "missing" / "c", {})


class _Odd(nn.Module):
    """Has what no file of plain weights can hold under its name, and two names for one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3)
        self.first = self.last
        self.waves = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_parameter("\u202e", nn.Parameter(torch.ones(1)))

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}


def test_the_last_checkpoint_leaves_plain_weights_to_a_file_of_their_own(tmp_path: Path) -> None:
    state = _Odd().state_dict()
    digest, _ = checkpoint.save(tmp_path / "last", {"epoch": 2, "model": state}, is_last=True)
    final = load_file(tmp_path / "final.safetensors")
    assert sorted(final) == ["first.bias", "first.weight", "last.bias", "last.weight"]
    assert all(torch.equal(value, state[name]) for name, value in final.items())
    tree = checkpoint.load(tmp_path / "last", digest)
    assert checkpoint.weights_digest(tree["model"]) == checkpoint.weights_digest(state)
    assert len(load_file(tmp_path / "last")) == 2, "no tensor is on the disk twice"
    checkpoint.save(tmp_path / "other", {"model": nn.Linear(2, 2).state_dict()}, is_last=True)
    with pytest.raises(StoreCorruptError, match=r"final.safetensors .* is not the file"):
        checkpoint.load(tmp_path / "last", digest)


# Damage


def _tree(tree: Any) -> bytes:
    text = json.dumps({"__metadata__": {"tree": json.dumps(tree)}}).encode()
    return len(text).to_bytes(8, "little") + text


FOREIGN = {
    "empty": b"",
    "huge header": (2**63 - 1).to_bytes(8, "little") + b"{}",
    "a number": _tree(3),
    "unknown kind": _tree({"pickle": [1]}),
    "no such tensor": _tree({"dict": [["a", {"tensor": "0"}]]}),
}


class Trap:
    """Touches a file when unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (Path.touch, (self.canary,))


def test_a_foreign_file_is_refused_and_nothing_is_unpickled(tmp_path: Path) -> None:
    canary, torchs = tmp_path / "canary", io.BytesIO()
    torch.save({"a": Trap(canary)}, torchs)
    pickled = {"pickle": pickle.dumps(Trap(canary)), "torch": torchs.getvalue()}
    for data in {**FOREIGN, **pickled}.values():
        (tmp_path / "c").write_bytes(data)
        with pytest.raises(StoreCorruptError, match="not an asynckfold checkpoint"):
            checkpoint.load(tmp_path / "c", hashlib.sha256(data).hexdigest())
    assert not canary.exists()
    pickle.loads(pickled["pickle"])
    assert canary.exists(), "the trap must work"


def test_the_digest_of_weights_sees_names_types_shapes_and_values() -> None:
    def linear(**changes: Any) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(2, 3, **changes)

    base = checkpoint.weights_digest(linear().state_dict())
    assert checkpoint.weights_digest(linear().state_dict()) == base
    other = linear()
    with torch.no_grad():
        other.weight[0, 0] += 1e-6  # type: ignore[index, operator]
    variants = [other, linear(bias=False), linear(dtype=torch.float64), nn.Sequential(linear())]
    digests = {checkpoint.weights_digest(variant.state_dict()) for variant in variants}
    assert len(digests | {base}) == 5
