"""Checkpoint files, and when a running job writes one.

Tensors are written by safetensors, everything else as JSON in the header. No pickle: nothing in a
run's folder can run code. The store has the SHA-256 of each file, so that damage is detected before
parsing.

The last checkpoint of a job leaves its weights to ``final.safetensors`` beside it, which anybody
can load, and holds the SHA-256 of that file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from asynckfold.errors import StoreCorruptError
from asynckfold.jobs.messages import CheckpointRef, Task
from asynckfold.jobs.recipe import InitialState, Recipe
from asynckfold.store.layout import FINAL, initial_weights
from asynckfold.system.files import make_folder, read_plain, write_whole
from asynckfold.training.bundle import Bundle

_DTYPES = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
}
"""Supported by safetensors; complex numbers are written as pairs of real ones."""

_DAMAGE = (
    *(SafetensorError, ValueError, KeyError, TypeError),
    *(AttributeError, OverflowError, RuntimeError),
)
"""What parsing foreign data raises; torch raises RuntimeError for sizes."""


def save(path: Path, tree: Mapping[str, Any], *, is_last: bool = False) -> tuple[str, int]:
    """Write `tree` durably to a new file; return the SHA-256 and the size of the file.

    `tree` are nested dicts, lists and tuples of tensors, arrays, numbers, text, None. NumPy numbers
    are read back as Python numbers, named tuples as tuples, other mappings as dicts; for anything
    else, a `TypeError` names its place. `is_last` writes the tensors of ``tree["model"]`` to
    ``final.safetensors`` first, under their names.
    """
    state = tree["model"] if is_last else {}
    weights = {name: value for name, value in state.items() if is_plain_tensor(name, value)}
    if is_last:
        tree = {**tree, "model": {name: state[name] for name in state if name not in weights}}
    tensors: dict[str, torch.Tensor] = {}
    about = {"tree": json.dumps(_freeze(tree, "", tensors))}
    if is_last:
        final = save_tensors(separate(weights), {"format": "pt"})
        write_whole(path.with_name(FINAL), final)
        # `weights_digest` depends on the order, which safetensors changes.
        names, digest = list(state), hashlib.sha256(final).hexdigest()
        about["final"] = json.dumps({"sha256": digest, "names": names})
    data = save_tensors(separate(tensors), about)
    write_whole(path, data)
    return hashlib.sha256(data).hexdigest(), len(data)


def is_plain_tensor(name: str, value: Any) -> bool:
    """Whether safetensors can hold a tensor under its name."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.dtype in _DTYPES
        and not value.is_meta
        and name.isprintable()
        and name != "__metadata__"
    )


def check_storable(tree: Mapping[str, Any]) -> None:
    """Raise the `TypeError` of `save` if it could not write `tree`; write nothing."""
    json.dumps(_freeze(tree, "", {}))


def save_initial_weights(root: Path, recipe: Recipe) -> None:
    """Write the initial weights of each model given as an instance, unless they exist.

    Such a model has other weights in each process, unless it is seeded: continuing or repeating the
    run needs the first ones.
    """
    for name, model in recipe.models.items():
        path = initial_weights(root, name)
        if isinstance(model, InitialState) and not path.is_file():
            state = model.module.state_dict().items()
            tensors = {key: value for key, value in state if isinstance(value, torch.Tensor)}
            make_folder(path.parent)
            write_whole(path, save_tensors(separate(tensors)))


def separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors to the CPU: safetensors refuses shared memory, as of tied weights."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def load(path: Path, sha256: str) -> dict[str, Any]:
    """Read what `save` wrote, if the files have the recorded digests."""
    data = _verified(path, sha256)
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = header["__metadata__"]
        tree = _thaw(json.loads(about["tree"]), load_tensors(data))
        if "final" in about:
            tree["model"] = _with_final(tree["model"], json.loads(about["final"]), path)
    except _DAMAGE as error:
        raise StoreCorruptError(f"{path} is not an asynckfold checkpoint: {error}") from error
    if not isinstance(tree, dict):
        raise StoreCorruptError(f"{path} is not an asynckfold checkpoint")
    return tree


def _with_final(rest: dict[str, Any], final: Any, path: Path) -> dict[str, Any]:
    """Return the ``state_dict`` of which `rest` is in the checkpoint at `path`."""
    state = rest | load_tensors(_verified(path.with_name(FINAL), final["sha256"]))
    return OrderedDict((name, state[name]) for name in final["names"])


def _verified(path: Path, sha256: str) -> bytes:
    """Return the content of a file that has the recorded digest."""
    try:
        data = read_plain(path)
    except OSError as error:
        raise StoreCorruptError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise StoreCorruptError(
            f"checkpoint {path} ({len(data)} bytes) is not the file that was recorded: "
            "its SHA-256 differs"
        )
    return data


def _freeze(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return `value` as JSON, with numbers in place of tensors, which are added to `tensors`."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        number = value.item()
        if isinstance(number, np.generic):
            raise _refusal(place, type(value).__name__)
        return _freeze(number, place, tensors)
    if isinstance(value, torch.Tensor):
        return {"tensor": _keep(value.detach(), place, tensors)}
    if isinstance(value, np.ndarray):
        try:
            tensor = torch.from_numpy(value.copy())
        except (TypeError, ValueError) as error:
            raise _refusal(place, f"NumPy array of {value.dtype}") from error
        return {"array": _keep(tensor, place, tensors)}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_freeze(item, f"{place}[{i}]", tensors) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        kind = {Counter: "counter", OrderedDict: "ordered"}.get(type(value), "dict")
        return {
            kind: [
                [_freeze(key, place, tensors), _freeze(item, f"{place}[{key!r}]", tensors)]
                for key, item in value.items()
            ]
        }
    raise _refusal(place, type(value).__name__)


def _refusal(place: str, kind: str) -> TypeError:
    return TypeError(
        f"a checkpoint holds dense tensors, numbers, text, lists and dicts only: {place} is a "
        f"{kind}"
    )


def _keep(tensor: torch.Tensor, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    if tensor.is_complex() and tensor.layout is torch.strided:
        return {"complex": _keep(torch.view_as_real(tensor.resolve_conj()), place, tensors)}
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in _DTYPES:
        kind = f"tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise _refusal(place, kind)
    name = str(len(tensors))
    tensors[name] = tensor
    return name


def _thaw(frozen: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(frozen, dict):
        return frozen
    ((kind, content),) = frozen.items()
    if kind == "float":
        return float(content)
    if kind in ("tensor", "array"):
        if isinstance(content, dict):
            tensor = torch.view_as_complex(tensors[content["complex"]])
        else:
            tensor = tensors[content]
        return tensor if kind == "tensor" else tensor.numpy()
    if kind in ("list", "tuple"):
        return _SEQUENCES[kind](_thaw(item, tensors) for item in content)
    pairs = {_thaw(key, tensors): _thaw(item, tensors) for key, item in content}
    return _MAPPINGS[kind](pairs)


_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple}
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


def trained_weights(
    root: Path, refs: Sequence[CheckpointRef], digest: str, part: str = "model"
) -> dict[str, Any]:
    """Return the ``state_dict`` of a finished job from its checkpoints, newest first.

    `digest` is the `weights_digest` of the job's result: an older checkpoint does not match it.
    `part` is "model" or "criterion", which has none if it is a function.
    """
    problems = [] if refs else [f"no checkpoint in {root} is recorded"]
    for ref in refs:
        try:
            tree = load(root / ref.file, ref.sha256)
            if weights_digest(tree["model"]) == digest:
                return tree[part] or {}
            problems.append(f"{root / ref.file} was written before the end of the job")
        except StoreCorruptError as error:
            problems.append(str(error))
    raise StoreCorruptError(
        f"the trained weights are gone: {problems[0]}. The result stays; the same call on a new "
        "folder trains them again"
    )


def weights_digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a ``state_dict``: names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            digest.update(f"{name}={tensor!r}".encode())
            continue
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name}:{plain.dtype}:{tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


EPOCH_SECONDS = 1.0
"""Least time between two checkpoints at epoch ends: repeating less work is cheaper."""

MIDDLE_SECONDS = 30.0
"""Time without a checkpoint after which one is written in the middle of an epoch."""

SHARE = 0.01
"""Largest share of a job's time spent on checkpoints: a large model on a slow disk is saved less
often, after 99 seconds of training for each second of saving."""


class Saver:
    """Writes a job's checkpoints, and limits the time that they take."""

    def __init__(
        self, save: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._save = save
        self._clock = clock
        self._cost = 0.0
        self._saved = clock()

    def due(self, least: float) -> bool:
        """Whether `least` seconds have passed, and enough to keep within `SHARE`."""
        return self._clock() - self._saved >= max(least, self._cost / SHARE)

    def save(self) -> None:
        """Write a checkpoint."""
        started = self._clock()
        self._save()
        self._saved = self._clock()
        self._cost = self._saved - started


def load_for(task: Task, bundle: Bundle, ref: CheckpointRef) -> dict[str, Any]:
    """Read a checkpoint; raise `StoreCorruptError` if it is damaged or of another job or plan."""
    tree = load(bundle.root / ref.file, ref.sha256)
    plans = bundle.plan.fingerprint, *bundle.earlier
    if tree["job"] != task.job.id or tree["plan"] not in plans:
        raise StoreCorruptError(f"{ref.file} is a checkpoint of {tree['job']}, or in another plan")
    return tree


def restorable(bundle: Bundle, task: Task) -> bool:
    """Whether the job has an intact checkpoint."""
    for ref in task.checkpoints:
        with contextlib.suppress(StoreCorruptError):
            load_for(task, bundle, ref)
            return True
    return False
