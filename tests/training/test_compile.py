"""torch.compile on request: the model whole or an error, and bits that nothing else touches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, InputError, TrainerParams
from asynckfold.jobs.result import DONE
from tests.training.tiny import Plain, Tiny, checkpoints, samples, sgd

COMPILED = TrainerParams(epochs=2, compile=True)


@pytest.mark.nightly
def test_a_resumed_compiled_job_has_the_same_bits(tmp_path: Path) -> None:
    before = psutil.Process().children()
    whole = Tiny(tmp_path / "whole", params=COMPILED).train()
    tiny = Tiny(tmp_path / "stopped", params=COMPILED)
    left = iter(range(5))
    _, events = tiny.attempt(stop=lambda: next(left, None) is None)
    found, _ = tiny.attempt(None, 2, checkpoints(events))
    assert found is not None
    assert found.digest == whole.digest
    plain = Tiny(tmp_path / "plain").train()
    np.testing.assert_allclose(whole.outputs, plain.outputs, rtol=1e-4, atol=1e-5)
    # None of the processes stays with which torch would compile.
    assert psutil.Process().children() == before


class Compiling(Plain):
    """Compiles a part of itself, as a model may without `compile`."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        positive = torch.compile(torch.relu, backend="aot_eager")
        found: torch.Tensor = positive(super().forward(inputs))
        return found


@pytest.mark.nightly
@pytest.mark.parametrize("trainer", ["hogwild", "allreduce", "averaging", "parameter_server"])
def test_a_model_that_compiles_a_part_trains_on_several_processes(
    trainer: str, tmp_path: Path
) -> None:
    kfold = AsyncKFold(2, samples(), tmp_path, nn.CrossEntropyLoss(), 10, verbose=0)
    given = {"epochs": 1, "trainer": trainer, "processes": 2}
    results = kfold({"m": Compiling}, ["constant"], sgd, given)
    assert [item.status for item in results.results.values()] == [DONE, DONE]


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"compile": "yes"}, "compile must be True or False: received 'yes'"),
        ({"compile": True, "trainer": "hogwild"}, "compile=True is for the plain trainer"),
    ],
)
def test_compile_excludes_other_options(params: dict, told: str) -> None:
    with pytest.raises(InputError, match=told):
        TrainerParams.from_mapping(params)


ON_DEMAND = """
import inspect
import sys
import torch
from asynckfold.training.worker.lazy_dynamo import import_on_demand

def compiler_is_here():
    return "torch._dynamo.eval_frame" in sys.modules

import_on_demand()
model = torch.nn.Linear(2, 1)
for kind in (torch.optim.Adam, torch.optim.SGD):
    optimizer = kind(model.parameters(), 0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
import torchvision.transforms
inspect.getmodule(compile("1", "nowhere", "eval"))
assert not compiler_is_here()

{wanted}
assert compiler_is_here()
assert torch._dynamo is sys.modules["torch._dynamo"]
optimizer.zero_grad()
known = torch.optim.Optimizer.zero_grad.__wrapped__
assert known.__dynamo_disable is not known
import_on_demand()
assert torch._dynamo is sys.modules["torch._dynamo"]
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "wanted",
    [
        "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)).item() == 2",
        "import torch._dynamo.config",
        "assert torch.compiler.disable(lambda: 3)() == 3",
        "assert torchvision.ops.roi_align.__globals__['is_compile_supported']('cpu')",
        "from torch._dynamo.utils import counters",
    ],
    ids=["compile", "import", "disable", "torchvision", "utils"],
)
def test_the_compiler_is_imported_on_first_use(wanted: str) -> None:
    code = ON_DEMAND.replace("{wanted}", wanted)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
