"""A trained module as ONNX: what another program computes with it is what torch does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn

from asynckfold import InputError, load_model
from asynckfold.integrations.onnx import onnx_of
from tests.api.test_fold_models import Convolved, Pictures, trained
from tests.toy import Tiny, samples

X, Y = samples()
needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")),
    reason="needs the extra onnx",
)


def evaluated(path: Path, inputs: Any) -> Any:
    from onnx.reference import ReferenceEvaluator

    (outputs,) = ReferenceEvaluator(str(path)).run(["outputs"], {"inputs": inputs})
    return outputs


@needs_onnx
def test_a_module_computes_the_same_for_batches_of_any_size(tmp_path: Path) -> None:
    results = trained(tmp_path / "run", preprocess=StandardScaler())
    path = tmp_path / "model.onnx"
    results.export_onnx(path, fold=1)
    rows = StandardScaler().fit(X[results.folds[1].train]).transform(X).astype(np.float32)
    with torch.no_grad():
        expected = results.model(fold=1)(torch.from_numpy(rows)).numpy()
    for count in (1, 2, 60):
        np.testing.assert_allclose(evaluated(path, rows[:count]), expected[:count], atol=1e-5)
    with pytest.raises(InputError, match="path must be a new file"):
        results.export_onnx(path)
    with pytest.raises(InputError, match="ONNX needs a single model: received 3 models"):
        results.ensemble().export_onnx(path, overwrite=True)
    # Of a model that was read, too.
    results.save_model(tmp_path / "one.safetensors", fold=1)
    loaded, again = load_model(tmp_path / "one.safetensors", Tiny), tmp_path / "again.onnx"
    loaded.export_onnx(again)
    np.testing.assert_array_equal(evaluated(again, rows), evaluated(path, rows))


@needs_onnx
def test_images_and_what_torch_cannot_export(tmp_path: Path) -> None:
    dataset, path = Pictures(None), tmp_path / "model.onnx"
    results = trained(tmp_path / "run", Convolved, dataset)
    results.export_onnx(path)
    inputs = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        expected = results.model()(inputs).numpy()
    np.testing.assert_allclose(evaluated(path, inputs.numpy()), expected, atol=1e-5)

    class ByValue(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * 2 if inputs.sum().item() > 0 else inputs

    with pytest.raises(InputError, match=r"one that torch\.onnx can export: received "):
        onnx_of(ByValue(), torch.ones(2, 3))
