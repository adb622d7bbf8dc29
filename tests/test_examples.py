from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from asynckfold import load_results
from tests.engines.ray_start import needs_ray
from tests.integrations.test_lightning import needs_lightning
from tests.integrations.test_optuna import needs_optuna
from tests.started import Nursery

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {
    "lightning_module": needs_lightning,
    "optuna_study": needs_optuna,
    "ray_cluster": needs_ray,
    "trackers": pytest.mark.skipif(not find_spec("tensorboard"), reason="needs tensorboard"),
}
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "parameter_server")


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script != "detection"])
def test_an_example_is_short(script: str) -> None:
    assert len((EXAMPLES / f"{script}.py").read_text().splitlines()) <= 60


@pytest.mark.nightly
@pytest.mark.parametrize(
    "script", [pytest.param(script, marks=NEEDS.get(script, ())) for script in SCRIPTS]
)
def test_an_example_runs_by_itself(script: str, root: Path, warm: Nursery) -> None:
    words = [EXAMPLES / f"{script}.py", "--quick", "--root-dir", root]
    run = warm.start(words, root.with_name("printed"))
    assert run.wait(110) == 0, run.printed()
    page = Path(run.printed().splitlines()[-1])
    assert page.name == "index.html"
    jobs = load_results(page.parents[1]).plan.jobs
    assert all(job.model.split("/")[0] in page.read_text() for job in jobs)


@pytest.mark.nightly
def test_the_parameter_server_and_its_replicas_run_by_themselves(
    tmp_path: Path, warm: Nursery
) -> None:
    run = warm.start([EXAMPLES / "parameter_server.py", "--quick"], tmp_path / "printed")
    assert run.wait(110) == 0, run.printed()
    summary, score = run.printed().splitlines()[-2:]
    assert summary.startswith("ServerSummary(replicas=2, lost=(), refused=(), pushes=")
    assert float(score.removeprefix("accuracy ")) > 0.8
