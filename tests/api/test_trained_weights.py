"""The weights that jobs trained: given back as the result has them, or an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asynckfold import InputError, RunStore, StoreCorruptError, load_results
from tests.api.test_fold_models import same, trained
from tests.toy import Tiny, samples

X, _ = samples()
TWO = ("step", "cosine")


@pytest.mark.parametrize(
    "settings",
    [{}, {"parallelize": True, "fuse": False}, {"parallelize": True, "fuse": 3}, {"n_repeats": 2}],
)
def test_a_job_gives_its_model_back(root: Path, settings: dict[str, Any]) -> None:
    trained(root, schedulers=TWO, **settings)
    with RunStore.read(root) as store:
        results = load_results(store)
    assert {len(results.plan.group_of(job.id)) for job in results.plan.jobs} == {
        settings.get("fuse") or 1
    }
    folds = {fold.key: fold for fold in results.folds}
    for job in results.plan.jobs:
        state = results.state_dict(job.candidate, job.fold, job.repeat)
        final = load_file(root / job.id / "final.safetensors")
        assert same({name: final[name] for name in state}, state)
        model = Tiny().eval()
        model.load_state_dict(state)
        with torch.no_grad():
            outputs = model(torch.from_numpy(X[folds[job.repeat, job.fold].valid]))
        told = results.results[job.id].outputs
        assert told is not None
        np.testing.assert_allclose(outputs.numpy(), told, rtol=1e-4, atol=1e-5)


def test_a_job_that_is_not_there_is_named(root: Path) -> None:
    results = trained(root, schedulers=TWO)
    best = results.candidates[results.best_index_].name
    assert same(results.state_dict(), results.state_dict(best, 0))
    for asked, told in (
        (("tiny/stepp",), "one of tiny/step, tiny/cosine: received 'tiny/stepp'"),
        (("tiny/stepp",), "Did you mean 'tiny/step'?"),
        (("tiny/step", 3), "folds 0 to 2 and repeats 0 to 0: received fold=3, repeat=0"),
        (("tiny/step", 0, 1), "received fold=0, repeat=1"),
    ):
        with pytest.raises(InputError, match=re.escape(told)):
            results.state_dict(*asked)


@pytest.mark.damages("a checkpoint is damaged, then gone")
def test_weights_that_are_damaged_or_gone_are_told_and_never_older_ones_given(root: Path) -> None:
    results = trained(root, schedulers=TWO)
    job = results.plan.jobs[0]
    with RunStore.read(root) as store:
        newest, *_ = store.checkpoints(job.id)
    path = root / newest.file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    gone = r"the trained weights are gone: .*\. The result stays"
    with pytest.raises(StoreCorruptError, match=gone):
        results.state_dict(job.candidate, job.fold)
    path.unlink()
    with pytest.raises(StoreCorruptError, match=gone):
        results.state_dict(job.candidate, job.fold)
    final = root / results.plan.jobs[1].id / "final.safetensors"
    final.write_bytes(final.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreCorruptError, match=gone):
        results.state_dict(job.candidate, job.fold + 1)
    assert results.state_dict(job.candidate, job.fold + 2)
