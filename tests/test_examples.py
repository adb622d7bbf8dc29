from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.ray_start import needs_ray
from tests.integrations.test_lightning import needs_lightning
from tests.integrations.test_optuna import needs_optuna
from tests.started import Nursery

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "models"),
    [
        ("mnist", ["LeNet5", "AlexNet"]),
        ("cifar10", ["MobileNet", "VGG"]),
        ("dbn", ["DBN", "plain"]),
        ("fit", ["MLP"]),
        ("fold_models", ["MLP"]),
        ("gan", ["GAN"]),
        ("early_stopping", ["narrow", "wide"]),
        ("own_loop", ["MLP"]),
        ("grid", ["Net/cosine/lr=0.01,width=64", "linear/cosine/lr=0.01"]),
        ("tabular", ["MLP"]),
        ("scikit_learn", ["narrow", "linear"]),
        ("segmentation", ["narrow", "wide"]),
        ("detection", ["narrow", "wide"]),
        ("autoencoder", ["code of 2", "code of 8"]),
        ("two_inputs", ["TwoInputs"]),
        ("multi_label", ["narrow", "wide"]),
        ("text", ["GRU", "Transformer"]),
        pytest.param(
            "lightning_module",
            ["LitDigits/configure_optimizers/width=32"],
            marks=needs_lightning,
        ),
        pytest.param(
            "optuna_study",
            ["net/cosine/lr=0.01,width=64", "net/cosine/lr=0.03,width=8"],
            marks=needs_optuna,
        ),
        pytest.param("ray_cluster", ["narrow", "wide"], marks=needs_ray),
    ],
)
def test_an_example_runs_by_itself(
    script: str, models: list[str], root: Path, warm: Nursery
) -> None:
    words = [EXAMPLES / f"{script}.py", "--quick", "--root-dir", root]
    run = warm.start(words, root.with_name("printed"))
    assert run.wait(110) == 0, run.printed()
    page = Path(run.printed().splitlines()[-1])
    assert page.name == "index.html"
    assert all(model in page.read_text() for model in models)


@pytest.mark.nightly
def test_the_parameter_server_and_its_replicas_run_by_themselves(
    tmp_path: Path, warm: Nursery
) -> None:
    run = warm.start([EXAMPLES / "parameter_server.py", "--quick"], tmp_path / "printed")
    assert run.wait(110) == 0, run.printed()
    summary, score = run.printed().splitlines()[-2:]
    assert summary.startswith("ServerSummary(replicas=2, lost=(), refused=(), pushes=")
    assert float(score.removeprefix("accuracy ")) > 0.8
