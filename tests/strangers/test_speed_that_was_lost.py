"""A call returns with its page; figures are drawn beside it, once, and a CNN is fused again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, CVResults, load_results
from asynckfold.cli import main
from tests import leftovers
from tests.nursery import Nursery
from tests.toy import Tiny, adam, samples

SWEEP = """
import sys, torch
from asynckfold import AsyncKFold
from tests.toy import Tiny, adam, samples
def sweep(root, **settings):
    kfold = AsyncKFold(2, samples(30), root, torch.nn.CrossEntropyLoss(), 8, verbose=0,
                       parallelize=False, baseline=None, **settings)
    return kfold([Tiny], ["constant"], adam, {"epochs": 1})
"""


def call(root: Path, epochs: int = 1, **settings: Any) -> CVResults:
    words: dict[str, Any] = {"verbose": 0, "parallelize": False, "baseline": None, **settings}
    kfold = AsyncKFold(2, samples(30), root, nn.CrossEntropyLoss(), 8, **words)
    return kfold([Tiny], ["constant"], adam, {"epochs": epochs})


def figures(root: Path) -> dict[str, int]:
    """Return the time of the last change of each figure by its name."""
    return {path.name: path.stat().st_mtime_ns for path in (root / "report").glob("*.png")}


PAGES = """
import os, shutil
sweep(sys.argv[1])
print(os.path.isfile(sys.argv[1] + "/report/index.html"), "matplotlib" in sys.modules)
sweep(sys.argv[2])
shutil.rmtree(sys.argv[2])
sweep(sys.argv[3], report=False)
"""


def test_a_call_returns_with_its_page_and_its_process_ends_with_the_figures(
    root: Path, warm: Nursery
) -> None:
    """Also where another removes the folder, kills the caller, or breaks matplotlib.

    The fixture of all tests looks for processes and temporary files.
    """
    removed, silent, killed, broken = map(
        root.with_name, ("removed", "silent", "killed", "without")
    )
    folder = root.with_name("broken") / "matplotlib"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ValueError('no ink')")
    scripts = {
        root: PAGES,
        killed: "import os\nsweep(sys.argv[1])\nos.kill(os.getpid(), 9)",
        broken: f"sys.path.insert(0, {str(folder.parent)!r})\nsweep(sys.argv[1])",
    }
    processes = [
        warm.start(
            ["-c", SWEEP + script, place, removed, silent],
            place.with_suffix(".printed"),
            errors=place.with_suffix(".errors"),
        )
        for place, script in scripts.items()
    ]
    assert [process.wait(200) for process in processes] == [0, -9, 0]
    assert processes[0].printed() == "True False"
    assert root.with_suffix(".errors").read_text() == ""
    unable = broken.with_suffix(".errors").read_text()
    assert {"scores.png", "curves.png", "timeline.png"} <= figures(root).keys()
    assert not removed.exists()
    assert not (silent / "report").exists()
    leftovers.until(lambda: "timeline.png" in figures(killed))
    assert "the figures of" in unable
    assert "tries again: ValueError: no ink" in unable
    for place in (killed, broken):
        assert (place / "report" / "index.html").is_file()


@pytest.mark.nightly
@pytest.mark.reports
def test_the_report_waits_for_its_figures_and_draws_only_what_has_changed(root: Path) -> None:
    results = call(root)
    assert (root / "report" / "index.html").is_file()
    assert results.report() == root / "report" / "index.html"
    drawn = figures(root)
    assert "scores.png" in drawn
    # Nothing is left to do, and so there is nothing to draw.
    for _ in range(2):
        call(root).report()
        load_results(root).report()
        assert main(["report", str(root)]) == 0
    assert figures(root) == drawn
    (root / "report" / "scores.png").unlink()
    assert main(["report", str(root)]) == 0
    before = figures(root)
    assert before.keys() == drawn.keys()
    # More epochs are drawn anew.
    call(root, epochs=2, resume="never").report()
    after = figures(root)
    # Only a run of some seconds has a figure of its CPU use.
    again = before.keys() & after.keys()
    assert {"scores.png", "curves.png", "timeline.png"} <= again
    assert all(after[name] > before[name] for name in again)


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def slow(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3)


def test_a_lenet_with_batch_normalisation_is_fused(root: Path) -> None:
    """Pictures on a black ground, where rounding flips units: gradients differ by 3 %."""
    random, pictures = torch.Generator().manual_seed(1), torch.zeros(80, 1, 32, 32)
    ink = torch.rand(80, 16, 16, generator=random).round()
    pictures[:, 0, 8:24, 4:20] = ink * torch.rand(80, 1, 1, generator=random)
    words: dict[str, Any] = {"verbose": 0, "baseline": None, "fuse": True, "random_state": 1}
    data = pictures, torch.arange(80) % 10
    kfold = AsyncKFold(2, data, root, nn.CrossEntropyLoss(), 16, **words)
    results = kfold({"lenet": lenet}, ["constant", "cosine"], slow, {"epochs": 1})
    assert [len(group) for group in results.plan.groups] == [2, 2]
