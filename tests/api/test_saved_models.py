"""Trained models as one file: what is read predicts the bits of what was saved, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.feature_selection import SelectKBest
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    KBinsDiscretizer,
    MinMaxScaler,
    PowerTransformer,
    StandardScaler,
)
from torch import nn
from torchvision import transforms

from asynckfold import CVResults, InputError, StoreCorruptError, load_model
from asynckfold.api.saved_models import restored_step, unpacked_fit
from tests.api.test_fold_models import Convolved, Numbers, Pictures, Seeded, trained
from tests.started import Nursery
from tests.toy import Tiny, samples

X, Y = samples()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> CVResults:
    """A run with a scaler, class names, and a refit."""
    names = np.array(["red", "green", "blue"])[Y]
    root = tmp_path_factory.mktemp("saved") / "run"
    scaler = make_pipeline(StandardScaler(), PCA(8))
    return trained(root, dataset=(X, names), preprocess=scaler, refit=True, report=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_a_fresh_process_predicts_the_same_bits(run: CVResults, path: Path, warm: Nursery) -> None:
    ensemble = run.ensemble()
    ensemble.save(path)
    script = """
import sys, numpy as np
from asynckfold import load_model
from tests.toy import Tiny, samples
loaded, X = load_model(sys.argv[1], Tiny), samples()[0]
np.savez(sys.argv[2], shares=loaded.predict_proba(X), labels=loaded.predict(X),
         outputs=loaded.outputs(X), classes=loaded.classes_, threads=len(loaded.modules))
"""
    out = path.with_name("out.npz")
    process = warm.start(["-c", script, path, out], path.with_name("printed"))
    assert process.wait(100) == 0, process.printed()
    with np.load(out) as arrays:
        assert arrays["shares"].tobytes() == ensemble.predict_proba(X).tobytes()
        assert arrays["outputs"].tobytes() == ensemble.outputs(X).tobytes()
        assert arrays["labels"].tolist() == ensemble.predict(X).tolist()
        assert arrays["classes"].tolist() == ["blue", "green", "red"]
    loaded = load_model(path, Tiny)
    assert (loaded.candidate, loaded.size) == (ensemble.candidate, 3)
    assert loaded.classes == ensemble.classes
    # What was read is saved as it was; the bytes of skops differ each time.
    again = path.with_name("again.safetensors")
    loaded.save(again)
    with safe_open(path, "np") as one, safe_open(again, "np") as other:
        assert one.metadata()["asynckfold"] == other.metadata()["asynckfold"]
    assert load_model(again, Tiny).outputs(X).tobytes() == ensemble.outputs(X).tobytes()


def test_the_header_tells_software_and_fingerprints_and_no_sample(
    run: CVResults, path: Path
) -> None:
    run.ensemble().save(path)
    with safe_open(path, "np") as file:
        header = json.loads(file.metadata()["asynckfold"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert header["jobs"] == [job.id for job in run.plan.jobs]
    assert (header["plan"], header["results"]) == (run.plan.fingerprint, run.fingerprint)
    assert header["software"]["torch"] == torch.__version__
    rows = {row.tobytes() for row in X}
    assert not any(
        line.tobytes() in rows for item in tensors.values() for line in np.atleast_1d(item)
    )


def test_a_single_model_and_the_refit_are_saved_alone(run: CVResults, path: Path) -> None:
    run.save_model(path, fold=2)
    loaded = load_model(path, Tiny)
    assert loaded.size == 1
    assert loaded.module is loaded.modules[0]
    assert not loaded.module.training
    state = run.state_dict(fold=2)
    assert all(torch.equal(state[name], item) for name, item in loaded.module.state_dict().items())
    held = run.folds[2].valid
    np.testing.assert_allclose(loaded.outputs(X)[held], run.oof["tiny/step"][held], atol=1e-5)
    run.save_model(path, "tiny/step", fold="all", overwrite=True)
    assert run.refitted is not None
    np.testing.assert_array_equal(
        load_model(path, Tiny()).outputs(X), run.refitted.ensemble().outputs(X)
    )
    with pytest.raises(InputError, match="module needs a single model: received 3 models"):
        _ = run.ensemble().module


def test_an_existing_file_is_kept_unless_asked(run: CVResults, path: Path, tmp_path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(InputError, match=r"path must be a new file: received .* overwrite=True"):
        run.ensemble().save(path)
    assert path.read_text() == "mine"
    run.ensemble().save(path, overwrite=True)
    assert load_model(path, Tiny).size == 3
    with pytest.raises(InputError, match=r"path must be a file: received .*, a folder"):
        run.ensemble().save(tmp_path, overwrite=True)
    with pytest.raises(InputError, match="must be in an existing folder"):
        run.ensemble().save(tmp_path / "missing" / "model")
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


class Wider(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0], self.layers[1] = nn.Linear(8, 20), nn.BatchNorm1d(20)
        self.layers[4] = nn.Linear(20, 3)
        self.more = nn.Linear(1, 1)


class Bent(Tiny):
    """Fits the weights, but is another function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.Tanh()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            Wider,
            r"of tiny/step: received .*Missing key\(s\) in state_dict: \"more.weight\", .*"
            r"size mismatch for layers.0.weight: .*Pass the model",
        ),
        (lambda: nn.Sequential(Tiny()), 'Missing key.* "0.layers.0.weight", '),
        (Bent, "one that fits its weights, but gives other outputs"),
        (dict, "factory must return a torch.nn.Module: received dict"),
    ],
)
def test_a_factory_of_another_model_is_refused(
    run: CVResults, path: Path, factory: Any, message: str
) -> None:
    run.ensemble().save(path)
    with pytest.raises(InputError, match=message):
        load_model(path, factory)


def test_what_no_file_holds_is_noticed(path: Path) -> None:
    trained(path.with_name("run"), Seeded).ensemble().save(path)
    with pytest.raises(InputError, match="must be buffers or parameters to be saved"):
        load_model(path, Seeded)


def test_lazy_layers_get_their_shapes_from_the_file(path: Path) -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 3))

    ensemble = trained(path.with_name("run"), lazy).ensemble()
    ensemble.save(path)
    np.testing.assert_array_equal(load_model(path, lazy).outputs(X), ensemble.outputs(X))


def test_a_damaged_file_is_told_from_a_newer_one(run: CVResults, path: Path) -> None:
    run.save_model(path)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    for at in (8 + data[8:].index(b"tiny"), 8 + size, len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(StoreCorruptError, match="is damaged: its checksum differs"):
            load_model(path, Tiny)
    for less in (data[:-1], data[:100], b"", b"PK\3\4" + data):
        path.write_bytes(less)
        with pytest.raises(StoreCorruptError, match="damaged"):
            load_model(path, Tiny)
    newer = data.replace(rb"\"format\": 3", rb"\"format\": 4", 1)
    assert newer != data
    path.write_bytes(newer)
    with pytest.raises(InputError, match=r"up to format 3: received .* of format 4\. Update"):
        load_model(path, Tiny)
    path.unlink()
    with pytest.raises(InputError, match=r"that can be read: received .*No such file"):
        load_model(path, Tiny)


# Transforms


def test_images_pass_the_eval_transform_of_torchvision(path: Path) -> None:
    augmented = transforms.Compose(
        [transforms.RandomCrop(8, 2), transforms.ToTensor(), transforms.Normalize(0.5, 0.5)]
    )
    dataset = Pictures(augmented)
    params = {"memory_format": "channels_last"}
    ensemble = trained(path.with_name("run"), Convolved, dataset, params=params).ensemble()
    ensemble.save(path)
    loaded = load_model(path, Convolved)
    assert loaded.outputs(dataset).tobytes() == ensemble.outputs(dataset).tobytes()
    assert loaded.outputs(Pictures(None)).tobytes() == ensemble.outputs(dataset).tobytes()
    with pytest.raises(InputError, match="Its first has the form 'image' and the shape"):
        loaded.outputs(torch.rand(3, 1, 8, 8))


@pytest.mark.parametrize(
    "stored",
    [
        {"function": "os.system"},
        {"function": "torch.os.system"},
        {"function": "torch.__import__"},
        {"function": "torch.load"},
        {"function": "torch.nn.functional.importlib"},
        {"class": "subprocess.Popen", "settings": {"args": "false"}},
        {"class": "torchvision.transforms.Lambda", "settings": {"lambd": "x"}},
    ],
)
def test_a_file_cannot_name_other_code(stored: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        restored_step(stored)


def test_what_has_no_name_is_refused_with_the_remedy(tmp_path: Path, path: Path) -> None:
    half = trained(tmp_path / "step", dataset=(torch.from_numpy(X), Y), eval_transform=lambda x: x)
    with pytest.raises(InputError, match=r"of torchvision or torch to be saved: received <lambda>"):
        half.ensemble().save(path)
    own = make_pipeline(StandardScaler(), FunctionTransformer(doubled))
    with pytest.raises(InputError, match=r"received Pipeline with tests\..*\.doubled\. Use"):
        trained(tmp_path / "fit", preprocess=own).ensemble().save(path)
    assert not path.exists()


def doubled(rows: Any) -> Any:
    return rows * 2


def test_bytes_that_name_another_function_are_refused() -> None:
    # Its list of types takes seconds to make, in every process of the tests.
    from skops.io import dumps

    data = torch.frombuffer(bytearray(dumps(FunctionTransformer(doubled))), dtype=torch.uint8)
    with pytest.raises(TypeError, match="doubled"):
        unpacked_fit(data)


@pytest.mark.parametrize(
    "preprocess",
    [
        MinMaxScaler(),
        PowerTransformer(),
        SimpleImputer(),
        KBinsDiscretizer(4, encode="ordinal", strategy="uniform"),
        SelectKBest(k=8),
        ColumnTransformer([("scaled", StandardScaler(), [0, 1])], remainder="passthrough"),
        FunctionTransformer(np.tanh),
    ],
    ids=lambda item: type(item).__name__,
)
def test_transformers_of_scikit_learn_are_saved(path: Path, preprocess: Any) -> None:
    ensemble = trained(path.with_name("run"), preprocess=preprocess).ensemble()
    ensemble.save(path)
    assert load_model(path, Tiny).outputs(X).tobytes() == ensemble.outputs(X).tobytes()


def test_an_output_transform_has_a_name_or_is_passed_again(tmp_path: Path, path: Path) -> None:
    def criterion(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs[:, 0].sigmoid() - targets) ** 2).mean()

    def own(outputs: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(outputs * 2)

    pair = X, (Y == 1).astype(np.int64)
    for number, transform in enumerate((torch.sigmoid, own)):
        results = trained(
            tmp_path / str(number), Numbers, pair, criterion, output_transform=transform
        )
        ensemble = results.ensemble()
        ensemble.save(path, overwrite=True)
        again = None if number == 0 else own
        loaded = load_model(path, Numbers, output_transform=again)
        np.testing.assert_array_equal(loaded.predict_proba(X), ensemble.predict_proba(X))
        wrong = own if number == 0 else None
        with pytest.raises(InputError, match="output_transform"):
            load_model(path, Numbers, output_transform=wrong)


# Tables


def test_columns_are_matched_by_name(tmp_path: Path, path: Path) -> None:
    import pandas as pd

    table = pd.DataFrame(X, columns=[f"c{at}" for at in range(8)])
    ensemble = trained(tmp_path / "run", dataset=(table, Y)).ensemble()
    ensemble.save(path)
    loaded = load_model(path, Tiny)
    np.testing.assert_array_equal(loaded.predict(table), ensemble.predict(table))
    reordered = table[table.columns[::-1]]
    np.testing.assert_array_equal(loaded.predict(reordered), ensemble.predict(table))
    with pytest.raises(InputError, match="where 'c7' is missing"):
        loaded.predict(table.drop(columns="c7"))


def test_numbers_are_predicted_by_what_was_read(tmp_path: Path, path: Path) -> None:
    pair = X.astype(np.float64), X[:, :1].astype(np.float64)
    ensemble = trained(tmp_path / "run", Numbers, pair, nn.MSELoss()).ensemble()
    ensemble.save(path)
    loaded = load_model(path, Numbers)
    assert loaded.classes_ is None
    np.testing.assert_array_equal(loaded.predict(pair[0]), ensemble.predict(pair[0]))
