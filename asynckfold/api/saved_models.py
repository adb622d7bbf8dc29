"""Trained models as one file, read without running anything that is in it.

::

    model.safetensors
      header      JSON under ``asynckfold``: `Header`; SHA-256 of all else
      tensors     0.layers.0.weight …    weights, by model
                  preprocess.0           what `preprocess` fitted, by model: bytes of skops
                  target_transform.0     likewise of `target_transform`
                  check.0                outputs of each model for made-up inputs
                  weights                of the models of a blend

The made-up inputs hold nothing of the run's data. With them, a factory that builds another model of
the same shapes is noticed.

Transforms of torch and torchvision are JSON: a class by name, and its settings. Transformers of
scikit-learn are written and read by skops. Reading makes objects of classes of these libraries
only: nothing in a file can name other code. What cannot be written so is refused when it is saved.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib
import inspect
import json
import platform
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from asynckfold.api.arguments import of_arrays
from asynckfold.api.fold_models import InputForm, Member, PredictionModels, TrainedModels
from asynckfold.data.transforms.steps import Step, is_known, step_name
from asynckfold.errors import InputError, Problem, StoreCorruptError, refuse
from asynckfold.jobs.argument import one_line
from asynckfold.jobs.decoding import FAULTS, decoded, parsed
from asynckfold.jobs.digests.run import digest_of
from asynckfold.jobs.objective import Objective
from asynckfold.results.ensemble import FoldEnsemble, Outputs
from asynckfold.system.files import write_whole
from asynckfold.training import seeding
from asynckfold.training.checkpoint import is_plain_tensor, separate
from asynckfold.training.isolation.guard import isolated
from asynckfold.training.target_transform import FittedTargets

FORMAT = 3
"""Raised when older versions cannot read the file."""

_UNNAMED = "unnamed"
"""An `output_transform` without a name: the user passes it again."""

_NEAR = 1e-2
"""Largest difference of the outputs for made-up inputs, as a share of their size: other processors
and versions of torch round otherwise, to some thousandths in bfloat16."""

_DAMAGE = (*FAULTS, RuntimeError, SafetensorError, SyntaxError, zipfile.BadZipFile)
"""What reading a file raises that is not what it should be."""


_LAYERS = "torch.nn.functional"
_FUNCTIONS = ("torch", "torch.special", _LAYERS)
_CLASSES = ("torchvision.transforms", "torchvision.transforms.v2", "torch.nn")

TRUSTED = (
    "numpy.dtype",
    *(
        f"sklearn.feature_selection._{name}"
        for name in (
            *("univariate_selection.chi2", "univariate_selection.f_classif"),
            *("univariate_selection.f_regression", "univariate_selection.r_regression"),
            *("mutual_info.mutual_info_classif", "mutual_info.mutual_info_regression"),
        )
    ),
    "scipy.interpolate._bsplines.BSpline",
    "sklearn.compose._column_transformer._RemainderColsList",  # a list, up to scikit-learn 1.7
)
"""Types that files may hold besides those that skops itself trusts, which are classes of
scikit-learn, and functions of NumPy and SciPy on arrays."""


@dataclass(frozen=True)
class Header:
    """What the file tells besides numbers."""

    format: int
    candidate: str
    jobs: tuple[str, ...]  # whose models these are
    plan: str  # fingerprint of the run's plan
    results: str  # likewise of its results
    classes: tuple[str, ...]
    columns: int  # outputs that stand for a class
    objective: Objective
    input: InputForm
    eval_transform: tuple[Any, ...]
    output_transform: Any  # JSON of a function of torch; None, or "unnamed"
    precision: str
    channels_last: tuple[bool, ...]
    default_dtype: str
    software: Mapping[str, str]


# Writing


def save_models(
    ensemble: FoldEnsemble, prediction: PredictionModels, path: Path, *, overwrite: bool
) -> None:
    """Write an ensemble to a file that `load_model` reads; see `FoldEnsemble.save`."""
    refuse(_file_problems(prediction.form, path, overwrite=overwrite))
    tensors: dict[str, torch.Tensor] = {}
    steps = [stored_step(step) for step in prediction.steps]
    refuse(_gathered(prediction, steps, tensors))
    tensors |= {
        f"check.{number}": torch.from_numpy(outputs)
        for number, outputs in enumerate(_check_outputs(prediction))
    }
    transform, classes = prediction.output_transform, ensemble.classes_
    if ensemble._weights is not None:
        tensors["weights"] = torch.tensor(ensemble._weights, dtype=torch.float64)
    header = Header(
        FORMAT,
        ensemble.candidate,
        tuple(prediction.about["jobs"]),
        prediction.about["plan"],
        prediction.about["results"],
        ensemble.classes,
        0 if classes is None else len(classes),
        ensemble.objective,
        prediction.form,
        tuple(steps),
        None if transform is None else stored_step(transform) or _UNNAMED,
        prediction.members[0].precision,
        prediction.channels_last,
        str(prediction.default_dtype)[6:],
        {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            **{name: metadata.version(name) for name in ("asynckfold", "numpy", "scikit-learn")},
        },
    )
    write_whole(path, _packed(json.dumps(asdict(header)), separate(tensors)))


def expected_by(prediction: PredictionModels) -> dict[str, str]:
    """Describe what the first model takes; see `FoldEnsemble.expects`."""
    member, about = prediction.members[0], dict[str, str]()
    fit = member.fit
    if prediction.steps:
        about["eval_transform"] = "; ".join(
            step_name(step) if inspect.isfunction(step) else str(step) for step in prediction.steps
        )
    if fit is not None:
        about["preprocess"] = fit_text(getattr(fit, "fitted", fit))
    if member.target is not None:
        about["target_transform"] = fit_text(member.target.fitted)
    return about


def _file_problems(form: InputForm, path: Path, *, overwrite: bool) -> Iterator[Problem]:
    """Yield why models cannot be written there."""
    if form.several:
        remedy = "Save results.model().state_dict() by torch.save."
        yield Problem("models that are saved must take one tensor", form.several, remedy)
    if path.is_dir():
        yield Problem("path must be a file", f"{path}, a folder", "Add the name of a file.")
    elif path.exists() and not overwrite:
        remedy = "Pass overwrite=True, or another path."
        yield Problem("path must be a new file", str(path), remedy)
    elif not path.absolute().parent.is_dir():
        yield Problem("path must be in an existing folder", str(path), "Make the folder first.")


def _gathered(
    prediction: PredictionModels, steps: Sequence[Any], tensors: dict[str, torch.Tensor]
) -> Iterator[Problem]:
    """Gather all weights and fitted transformers; yield what a file cannot hold."""
    for number, member in enumerate(prediction.members):
        for name, value in member.model.state_dict().items():
            if is_plain_tensor(name, value):
                tensors[f"{number}.{name}"] = value
            elif number == 0:
                yield Problem(
                    "a model that is saved must have dense, real tensors only in its state_dict",
                    f"{name}, {getattr(value, 'dtype', type(value).__name__)}",
                    "Save results.model().state_dict() by torch.save.",
                )
    for step, stored in zip(prediction.steps, steps, strict=True):
        if stored is None:
            yield Problem(
                "the eval transform must be of torchvision or torch to be saved",
                step_name(step),
                "Make it part of the model; or leave it out of the run, and transform the data.",
            )
    try:
        for number, member in enumerate(prediction.members):
            if member.fit is not None:
                fit = getattr(member.fit, "fitted", member.fit)
                tensors[f"preprocess.{number}"] = packed_fit(fit)
            if member.target is not None:
                tensors[f"target_transform.{number}"] = packed_fit(member.target.fitted)
    except ValueError as error:
        rule = "preprocess and target_transform must hold no code of your own to be saved"
        yield Problem(rule, str(error), "Use transformers of scikit-learn.")


def _made_up(form: InputForm) -> torch.Tensor:
    """Return two samples of noise, or of zeros where they are whole numbers."""
    shape, dtype = (2, *form.shape), getattr(torch, form.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def _check_outputs(prediction: PredictionModels) -> list[Outputs]:
    """Return each model's outputs for made-up inputs; nothing if models cannot take them."""
    inputs, members = _made_up(prediction.form), prediction.members
    if prediction.form.kinds:
        # A table cannot be made up: these are for the models alone.
        members = [replace(member, fit=None) for member in members]
    try:
        return [member.outputs(inputs) for member in members]
    except Exception:  # noqa: BLE001 - the user's model may refuse what is no sample
        return []


def _packed(text: str, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the file: safetensors with the JSON and a checksum in its header."""
    # The same tensors are written in the same order.
    plain = save_tensors(dict(tensors), {"asynckfold": text})
    return save_tensors(dict(tensors), {"asynckfold": text, "sha256": _checksum(plain)})


def _checksum(data: bytes) -> str:
    """Return the SHA-256 of the JSON, the names of the tensors, and their numbers."""
    header, content = _parts(data)
    text = header.pop("__metadata__")["asynckfold"]
    digest = hashlib.sha256(json.dumps([text, header], sort_keys=True).encode())
    digest.update(content)
    return digest.hexdigest()


def _parts(data: bytes) -> tuple[dict[str, Any], memoryview]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :]


# Reading


def load_model(
    path: str | Path,
    factory: Callable[[], Any] | Mapping[str, Callable[[], Any]],
    *,
    output_transform: Callable[[Any], Any] | None = None,
) -> FoldEnsemble:
    """Read trained models that `FoldEnsemble.save` or `CVResults.save_model` wrote.

    Nothing in the file is executed: weights are read by safetensors, a fitted `preprocess` by
    skops with a fixed list of types, all else is JSON. The code of the model comes from you.

    Parameters
    ----------
    path : str or Path
        The file.
    factory : class, zero-argument callable, or module
        What was passed to the run as the model: each call returns a new module. A module is copied.
        Of a blend of several models, a dict of these by candidate.
    output_transform : callable, optional
        That of the run, if it was no function of torch by name, such as ``torch.sigmoid``.

    Returns
    -------
    FoldEnsemble
        With ``predict``, ``predict_proba``, ``outputs``, ``modules`` and ``classes_``. On the same
        machine, software and number of threads it predicts the same bits as before.

    Raises
    ------
    InputError
        There is no such file; it is of a newer version of asynckfold; the factory's model has other
        layers or shapes, or gives other outputs; `output_transform` is missing or has no use.
    StoreCorruptError
        The file is damaged, or not from asynckfold.

    Examples
    --------
    >>> import tempfile, torch
    >>> from asynckfold import AsyncKFold, load_model
    >>> X, y, root = torch.randn(60, 4), torch.arange(60) % 3, tempfile.mkdtemp()
    >>> kfold = AsyncKFold(2, (X, y), root, torch.nn.CrossEntropyLoss(), 8, verbose=0,
    ...                    parallelize=False, report=False)
    >>> results = kfold({"linear": lambda: torch.nn.Linear(4, 3)}, ["constant"],
    ...                 lambda model: torch.optim.SGD(model.parameters(), 0.1), {"epochs": 1})
    >>> path = f"{root}/linear.safetensors"
    >>> results.ensemble().save(path)
    >>> loaded = load_model(path, lambda: torch.nn.Linear(4, 3))
    >>> loaded
    FoldEnsemble(candidate='linear/constant', size=2)
    >>> bool((loaded.predict(X) == results.ensemble().predict(X)).all())
    True
    """
    header, tensors = _read(Path(path))
    made_of = f"{path}, of {header.candidate}"
    try:
        steps = tuple(map(restored_step, header.eval_transform))
        fits, targets = (
            [
                unpacked_fit(tensors[f"{name}.{at}"]) if f"{name}.{at}" in tensors else None
                for at in range(len(header.channels_last))
            ]
            for name in ("preprocess", "target_transform")
        )
    except _DAMAGE as error:
        raise StoreCorruptError(f"{made_of}, cannot be restored: {error}") from error
    transform = _output_transform(header, output_transform)
    models = [_rebuilt(header, number, factory, tensors, made_of) for number in range(len(fits))]
    precision, columns = header.precision, header.objective.columns
    members = tuple(
        Member(model, fit, precision, columns, target and FittedTargets(target))
        for model, fit, target in zip(models, fits, targets, strict=True)
    )
    prediction = PredictionModels(
        header.input,
        steps,
        members,
        header.channels_last,
        getattr(torch, header.default_dtype),
        transform,
        {"jobs": header.jobs, "plan": header.plan, "results": header.results},
    )
    refuse(_output_problems(prediction, tensors, made_of))
    objective, weights = header.objective, tensors.get("weights")
    return FoldEnsemble(
        header.candidate,
        header.classes,
        len(members),
        objective,
        TrainedModels(lambda: prediction),
        None if transform is None else of_arrays(transform),
        objective.all_labels(header.columns) if objective.is_classes else None,
        None if weights is None else tuple(weights.tolist()),
    )


def _read(path: Path) -> tuple[Header, dict[str, torch.Tensor]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        rule, remedy = "path must be a file that can be read", "Check the path."
        raise InputError.one(rule, f"{path}: {error.strerror}", remedy) from error
    other = f"{path} is no model that asynckfold saved, or is damaged"
    try:
        about = _parts(data)[0]["__metadata__"]
        raw = parsed(about["asynckfold"])
        # Before the checksum, which a newer version may compute otherwise.
        version = raw["format"]
        if type(version) is int and version > FORMAT:
            rule = f"this version of asynckfold reads models up to format {FORMAT}"
            remedy = "Update asynckfold."
            raise InputError.one(rule, f"{path} of format {version}", remedy)
        if _checksum(data) != about["sha256"]:
            raise StoreCorruptError(f"{path} is damaged: its checksum differs. Copy it again")
        return decoded(Header, raw, "model"), load_tensors(data)
    except (InputError, StoreCorruptError):
        raise
    except _DAMAGE as error:
        raise StoreCorruptError(f"{other}: {error}") from error


def _output_transform(header: Header, passed: Any) -> Any:
    stored = header.output_transform
    if (stored == _UNNAMED) is (passed is None):
        raise InputError.one(
            "output_transform must be passed again where the run's has no name in torch, and only "
            "there",
            "none" if passed is None else step_name(passed),
            "Pass output_transform= as the run got it, or leave it out if the file has it.",
        )
    return passed if stored in (_UNNAMED, None) else restored_step(stored)


def _rebuilt(
    header: Header, number: int, factory: Any, tensors: Mapping[str, torch.Tensor], made_of: str
) -> nn.Module:
    name = re.sub(r"(/repeat-\d+)?/fold-\d+$", "", header.jobs[number])
    if isinstance(factory, Mapping):
        if name not in factory:
            rule, received = f"factory must have the candidate {name}", ", ".join(factory)
            raise InputError.one(rule, received, f"Its models are those of {header.candidate}.")
        factory = factory[name]
    with seeding.preserved(), isolated():
        torch.set_default_dtype(getattr(torch, header.default_dtype))
        model = copy.deepcopy(factory) if isinstance(factory, nn.Module) else factory()
    if not isinstance(model, nn.Module):
        rule = "factory must return a torch.nn.Module"
        raise InputError.one(rule, type(model).__name__, "Pass the model as the run got it.")
    model = model.cpu()
    if header.channels_last[number]:
        model = model.to(memory_format=torch.channels_last)
    begin = f"{number}."
    weights = {name[len(begin) :]: tensors[name] for name in tensors if name.startswith(begin)}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        rule = f"factory must build the model whose weights are in {made_of}"
        remedy = "Pass the model as the run got it."
        raise InputError.one(rule, one_line(error, 500), remedy) from error
    return model.eval()


def _output_problems(
    prediction: PredictionModels, tensors: Mapping[str, torch.Tensor], made_of: str
) -> Iterator[Problem]:
    """Yield that a model gives other outputs for made-up inputs than before it was saved."""
    if "check.0" not in tensors:
        return
    with seeding.preserved():
        outputs = _check_outputs(prediction)
    expected = [tensors[f"check.{number}"].numpy() for number in range(len(prediction.members))]
    if outputs and all(map(_near, expected, outputs)):
        return
    yield Problem(
        f"factory must build the model that was saved in {made_of}",
        "one that fits its weights, but gives other outputs for the same inputs",
        "Pass the model as the run got it. Random numbers and arrays that a model draws or holds "
        "must be buffers or parameters to be saved.",
    )


def _near(expected: Outputs, outputs: Outputs) -> bool:
    size = float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
    return expected.shape == outputs.shape and np.allclose(
        expected, outputs, rtol=0, atol=_NEAR * size, equal_nan=True
    )


# Transforms


def stored_step(step: Step) -> dict[str, Any] | None:
    """Return a step as JSON; None if it is no function or class of torch or torchvision."""
    name = getattr(step, "__name__", "")
    for place in _FUNCTIONS:
        if name and _function(place, name) is step:
            return {"function": f"{place}.{name}"}
    try:
        stored = _stored_instance(step)
        return stored if stored and digest_of(restored_step(stored)) == digest_of(step) else None
    except (AttributeError, InputError, SyntaxError, TypeError, ValueError):
        return None


def _stored_instance(step: Step) -> dict[str, Any] | None:
    kind = type(step)
    for place in _CLASSES:
        if not kind.__module__.startswith(place):
            continue
        if getattr(importlib.import_module(place), kind.__name__, None) is kind:
            names = inspect.signature(kind).parameters
            settings = {name: _plain(getattr(step, name)) for name in names}
            return {"class": f"{place}.{kind.__name__}", "settings": settings}
    return None


def restored_step(stored: Any) -> Step:
    """Return the step of such JSON; raise ValueError if it names anything else."""
    if "function" in stored:
        place, _, name = str(stored["function"]).rpartition(".")
        if place not in _FUNCTIONS or (function := _function(place, name)) is None:
            raise ValueError(f"{stored['function']} is no function of torch")
        return function
    place, _, name = str(stored["class"]).rpartition(".")
    kind = getattr(importlib.import_module(place), name, None) if place in _CLASSES else None
    if not isinstance(kind, type):
        raise ValueError(f"{stored['class']} is no class of torch or torchvision")
    step: Step = kind(**{key: _value(item) for key, item in stored["settings"].items()})
    if place != "torch.nn" and not is_known(step):
        raise ValueError(f"{step_name(step)} is no transform of torchvision")
    return step


def _function(place: str, name: str) -> Step | None:
    """Return a function of tensors; None if there is none of this name."""
    function = getattr(importlib.import_module(place), name, None)
    # torch.load, torch.compile and their like are written in Python.
    is_plain = inspect.isbuiltin(function) or (place == _LAYERS and inspect.isfunction(function))
    return function if is_plain and not name.startswith("_") else None


def _plain(value: Any) -> Any:
    """Return a setting as JSON that `_value` reads back with its type; raise ValueError if none."""
    if isinstance(value, torch.dtype):
        return {"torch.dtype": str(value)[6:]}
    if isinstance(value, np.dtype):
        return {"dtype": value.str}
    if type(value).__name__ == "InterpolationMode":
        return {"interpolation": value.value}
    ast.literal_eval(repr(value))
    return repr(value)


def _value(stored: Any) -> Any:
    if isinstance(stored, str):
        return ast.literal_eval(stored)
    ((kind, value),) = stored.items()
    if kind == "torch.dtype":
        return getattr(torch, value)
    if kind == "dtype":
        return np.dtype(value)
    from torchvision.transforms import InterpolationMode

    return InterpolationMode(value)


# Fitted transformers


def packed_fit(fit: Any) -> torch.Tensor:
    """Return a fitted transformer as bytes, written by skops."""
    import skops.io

    try:
        data = skops.io.dumps(fit)
        others = set(skops.io.get_untrusted_types(data=data)) - {*TRUSTED}
    except Exception as error:
        # It calls objects of the user, which may raise anything.
        raise ValueError(f"{type(fit).__name__}, which raised {one_line(error)}") from error
    if others:
        raise ValueError(f"{type(fit).__name__} with {', '.join(sorted(others))}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpacked_fit(data: torch.Tensor) -> Any:
    """Return the transformer of such bytes; skops raises if they name another type."""
    import skops.io

    return skops.io.loads(data.numpy().tobytes(), trusted=[*TRUSTED])


def fit_text(fit: Any) -> str:
    """Describe a fitted transformer as JSON, with its numbers."""
    return json.dumps(_described(fit), default=str)


def _described(item: Any) -> Any:
    if isinstance(item, (np.ndarray, np.generic)):
        return item.tolist()
    if isinstance(item, (list, tuple)):
        return [_described(part) for part in item]
    if not hasattr(item, "get_params"):
        return item if item is None or isinstance(item, (bool, int, float, str)) else str(item)
    # What was fitted ends in an underscore.
    public = {name: value for name, value in vars(item).items() if not name.startswith("_")}
    return {"class": type(item).__name__} | {key: _described(part) for key, part in public.items()}
