"""Checkpoints: what is written comes back, and what is not whole is never used."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from asynckfold import StorageError, StoreCorruptError
from asynckfold.training import checkpoint
from tests.size import NIGHTLY

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def same(one: Any, other: Any) -> bool:
    """Equal in type and in every bit; NaN equals NaN, -0.0 differs from 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and _bits(one) == _bits(other)
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (one != one and other != other)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    found = (torch.randn(shape, generator=generator) * 50).to(dtype)
    return found.mT if len(shape) > 1 and draw(st.booleans()) else found


arrays = st.builds(
    lambda shape, dtype, seed: np.asarray(np.random.default_rng(seed).normal(size=shape), dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["f4", "f8", "i8", "u4", "u1", "?"]),
    st.integers(0, 99),
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text()) | st.none()
trees = st.recursive(
    plain | tensors() | arrays,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.text(), trees, max_size=4))
def test_save_and_load_round_trip(tmp_path: Path, tree: dict[str, Any]) -> None:
    path = tmp_path / "checkpoint"
    digest, size = checkpoint.save(path, tree)
    assert path.stat().st_size == size
    assert same(checkpoint.load(path, digest), tree)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (1j, "complex"),
        (deque([1]), "deque"),
        (len, "builtin_function_or_method"),
        (Path("x"), "Path"),
        (nn.Linear(1, 1), "Linear"),
        (torch.zeros(2).to_sparse(), "tensor of torch.float32, torch.sparse_coo, on cpu"),
        (torch.zeros(2, device="meta"), "tensor of torch.float32, torch.strided, on meta"),
        (np.array(["text"]), "NumPy array of <U4"),
        (np.array([object()]), "NumPy array of object"),
        (np.array(["2020-01-01"], "M8[D]"), r"NumPy array of datetime64\[D\]"),
        (np.longdouble(1), "longdouble"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_an_error_names_the_place_of_an_unsupported_value(
    tmp_path: Path, value: Any, found: str
) -> None:
    with pytest.raises(TypeError, match=rf"\['optimizer'\]\['state'\]\[0\]\[1\] is a .*{found}"):
        checkpoint.save(tmp_path / "c", {"optimizer": {"state": [(1, value)]}})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_a_storage_error(tmp_path: Path) -> None:
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
    tree = {"epoch": 2, "model": state}
    digest, _ = checkpoint.save(tmp_path / "last", tree, is_last=True)
    final = load_file(tmp_path / "final.safetensors")
    names = ["first.bias", "first.weight", "last.bias", "last.weight"]
    assert sorted(final) == names
    assert all(torch.equal(final[name], state[name]) for name in names)
    found = checkpoint.load(tmp_path / "last", digest)
    assert checkpoint.weights_digest(found["model"]) == checkpoint.weights_digest(state)
    assert found["epoch"] == 2
    assert len(load_file(tmp_path / "last")) == 2, "no tensor is on the disk twice"


def test_a_final_file_of_other_weights_is_refused(tmp_path: Path) -> None:
    digest, _ = checkpoint.save(
        tmp_path / "a", {"model": nn.Linear(2, 2).state_dict()}, is_last=True
    )
    other, _ = checkpoint.save(
        tmp_path / "b", {"model": nn.Linear(2, 2).state_dict()}, is_last=True
    )
    with pytest.raises(StoreCorruptError, match=r"final.safetensors .* is not the file"):
        checkpoint.load(tmp_path / "a", digest)
    assert checkpoint.load(tmp_path / "b", other)


# ---- damage ----


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, str, bytes]:
    path = tmp_path / "c.safetensors"
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    tree = {"job": "m/s/fold-0", "epochs": [{"number": 1}], "model": model.state_dict()}
    digest, _ = checkpoint.save(path, tree)
    return path, digest, path.read_bytes()


def test_a_file_cut_at_any_length_is_damage(written: tuple[Path, str, bytes]) -> None:
    path, digest, data = written
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(StoreCorruptError, match=rf"\({length} bytes\)"):
            checkpoint.load(path, digest)


def test_any_flipped_bit_is_damage(written: tuple[Path, str, bytes]) -> None:
    path, digest, data = written
    for place in random.Random(0).sample(range(8 * len(data)), 300):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(StoreCorruptError, match="SHA-256 differs"):
            checkpoint.load(path, digest)


class Trap:
    """Touches a file when unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (Path.touch, (self.canary,))


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    return buffer.getvalue()


def _torch(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _header(header: Any, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def _tree(tree: Any) -> bytes:
    return _header({"__metadata__": {"tree": json.dumps(tree)}})


def _tensor(about: dict[str, Any], body: bytes = bytes(4), tree: Any = None) -> bytes:
    """A file whose only tensor is described so, and that is used by the tree."""
    tree = {"dict": [["a", {"tensor": "0"}]]} if tree is None else tree
    described = {"data_offsets": [0, len(body)], **about}
    return _header({"__metadata__": {"tree": json.dumps(tree)}, "0": described}, body)


FOREIGN = {
    "empty": b"",
    "zip": _zip(),
    "torch": _torch({"epoch": 1}),
    "huge header": (2**63 - 1).to_bytes(8, "little") + b"{}",
    "no tree": _header({"__metadata__": {}}),
    "a number": _tree(3),
    "two kinds": _tree({"list": [], "dict": []}),
    "unknown kind": _tree({"pickle": [1]}),
    "no such tensor": _tree({"dict": [["a", {"tensor": "0"}]]}),
    "unhashable key": _tree({"dict": [[{"list": []}, 1]]}),
    "deep": _header({"__metadata__": {"tree": '{"list":[' * 50_000 + "]}" * 50_000}}),
    "overlapping": _header(
        {
            "__metadata__": {"tree": json.dumps({"dict": []})},
            "0": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4]},
        },
        bytes(4),
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("known", [False, True], ids=["other digest", "own digest"])
def test_a_foreign_file_is_refused(tmp_path: Path, name: str, known: bool) -> None:
    data = FOREIGN[name]
    path = tmp_path / "c"
    path.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest() if known else "0" * 64
    with pytest.raises(StoreCorruptError, match="not an asynckfold checkpoint" if known else "SHA"):
        checkpoint.load(path, digest)


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_nothing_is_unpickled(tmp_path: Path, kind: str) -> None:
    canary = tmp_path / "canary"
    data = pickle.dumps(Trap(canary)) if kind == "pickle" else _torch({"a": Trap(canary)})
    path = tmp_path / "c"
    path.write_bytes(data)
    with pytest.raises(StoreCorruptError, match="not an asynckfold checkpoint"):
        checkpoint.load(path, hashlib.sha256(data).hexdigest())
    assert not canary.exists()
    pickle.loads(pickle.dumps(Trap(canary)))
    assert canary.exists(), "the trap must work"


def test_anything_but_a_plain_file_is_damage(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, *(tmp_path / name for name in ("missing", "fifo", "link"))):
        with pytest.raises(StoreCorruptError, match="cannot be read"):
            checkpoint.load(path, hashlib.sha256(b"").hexdigest())


BOMBS = {
    "4 GB of header": (1 << 32).to_bytes(8, "little") + b"{}",
    "a shape of 4 TB": _tensor({"dtype": "F32", "shape": [10**12]}),
    "an empty tensor of any size": _tensor(
        {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}, b""
    ),
    "negative offsets": _tensor({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}),
    "an unknown type": _tensor({"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}),
    "deep JSON": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "an endless number": _tree({"dict": [["a", {"list": []}]]}).replace(b"[]", b"[" + b"9" * 9000),
    "a complex number of three parts": _tensor(
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        bytes(12),
        {"dict": [["a", {"tensor": {"complex": "0"}}]]},
    ),
}

LOAD_ALL = """
import hashlib, resource, sys
from pathlib import Path
from asynckfold.errors import StoreCorruptError
from asynckfold.training import checkpoint
folder = Path(sys.argv[1])
good = folder / "good"
checkpoint.load(good, hashlib.sha256(good.read_bytes()).hexdigest())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sorted(folder.glob("bomb-*")):
    try:
        checkpoint.load(path, hashlib.sha256(path.read_bytes()).hexdigest())
    except StoreCorruptError as error:
        assert "is not an asynckfold checkpoint" in str(error), error
    else:
        print("loaded", path.name)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.nightly
def test_header_bombs_are_refused_before_allocation(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "good", {"a": torch.zeros(3)})
    for number, data in enumerate(BOMBS.values()):
        (tmp_path / f"bomb-{number:02}").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    *loaded, megabytes = done.stdout.splitlines()
    assert loaded == []
    assert int(megabytes) < 50


def test_ten_thousand_changed_headers_load_or_are_refused(
    written: tuple[Path, str, bytes], tmp_path: Path
) -> None:
    """Whoever can write the digest too gets no further than an error of ours."""
    path, _, data = written
    header = 8 + int.from_bytes(data[:8], "little")
    generator = random.Random(0)
    refused = 0
    for _ in range(10_000 if NIGHTLY else 2_000):
        changed = bytearray(data)
        for _ in range(generator.choice((1, 1, 2, 8))):
            changed[generator.randrange(header)] = generator.choice(b'0123456789[]{}",:-eF\\\0\xff')
        path.write_bytes(changed)
        try:
            checkpoint.load(path, hashlib.sha256(changed).hexdigest())
        except StoreCorruptError:
            refused += 1
    assert refused > 1_000


# ---- digests ----


def test_the_digest_of_weights_sees_names_types_shapes_and_values() -> None:
    def linear(**changes: Any) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(2, 3, **changes)

    base = checkpoint.weights_digest(linear().state_dict())
    assert checkpoint.weights_digest(linear().state_dict()) == base
    other = linear()
    with torch.no_grad():
        other.weight[0, 0] = math.nextafter(float(other.weight[0, 0]), 9) + 1e-6  # type: ignore[index, operator]
    variants = [other, linear(bias=False), linear(dtype=torch.float64), nn.Sequential(linear())]
    digests = {checkpoint.weights_digest(variant.state_dict()) for variant in variants}
    assert len(digests | {base}) == 5
