from __future__ import annotations

from pathlib import Path

import pytest

from tests.nursery import Nursery

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("script", "models"),
    [("mnist", ["LeNet5", "AlexNet"]), ("cifar10", ["MobileNet", "VGG"]), ("fit", ["MLP"])],
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
