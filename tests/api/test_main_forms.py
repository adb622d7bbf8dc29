"""Every way to start a program, with lambdas and a model defined right there.

Each form is a real process. Each must end, give the right numbers (the same bits for all), and
leave neither a process nor shared memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import notebooks
from tests.leftovers import descendants, gone

BODY = """
import sys
import torch
from torch import nn
from asynckfold import AsyncKFold

X = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
y = (X[:, 0] > 0).long()
WIDTH = 16

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))

    def forward(self, inputs):
        return self.layers(inputs)

def cross_validate(root):
    kfold = AsyncKFold(3, (X, y), root, lambda out, y: nn.functional.cross_entropy(out, y), 8,
                       verbose=0, baseline=None, n_jobs=2, report=False)
    results = kfold([Net], [lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)],
                    lambda model: torch.optim.Adam(model.parameters(), 3e-2), {"epochs": 4})
    assert Net.__module__ in ("__main__", "__mp_main__"), Net.__module__
    print("ACCURACY", results.best_score_)
    print("FINGERPRINT", results.fingerprint)
"""

CALL = f"{BODY}\ncross_validate(ROOT)\n"

GUARDED = f"""{BODY}
if __name__ == "__main__":
    cross_validate(ROOT)
else:
    print("IMPORTED AGAIN")
"""

THREAD = f"""{BODY}
import threading
thread = threading.Thread(target=cross_validate, args=(ROOT,))
thread.start()
thread.join()
"""

LOOP = f"""{BODY}
import asyncio

async def main():
    ticks = 0
    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)
    ticking = asyncio.create_task(tick())
    await asyncio.to_thread(cross_validate, ROOT)
    ticking.cancel()
    assert ticks > 1
    cross_validate(ROOT)  # and in the loop's own thread, as a notebook does

asyncio.run(main())
"""

SPAWNED = f"""{BODY}
if __name__ == "__main__":
    import multiprocessing
    process = multiprocessing.get_context("spawn").Process(target=cross_validate, args=(ROOT,))
    process.start()
    process.join()
"""

EXIT = f"{CALL}sys.exit(7)\n"


def run(command: list[str], folder: Path, given: str | None = None) -> tuple[str, int]:
    """Run to the end; return what was printed and the exit code; nothing may be left."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ASYNCKFOLD_TEST_MARK": str(folder)},
    )
    # The kernel shows an environment a moment after the start of the program.
    assert any(process.pid in marked(folder) or time.sleep(0.01) for _ in range(500))
    out, err = process.communicate(given, timeout=100)
    assert gone(marked(folder)), "a process stays"
    assert "Traceback" not in err, err
    assert "leaked" not in err, err
    return out, process.returncode


def marked(folder: Path) -> set[int]:
    """Processes that were started with this mark, whoever their parent is by now."""
    mark = f"ASYNCKFOLD_TEST_MARK={folder}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


def script(text: str) -> Callable[[Path], tuple[list[str], str | None]]:
    def command(folder: Path) -> tuple[list[str], str | None]:
        (folder / "script.py").write_text(text.replace("ROOT", repr(str(folder / "run"))))
        return [sys.executable, "script.py"], None

    return command


def from_stdin(folder: Path) -> tuple[list[str], str | None]:
    return [sys.executable, "-"], CALL.replace("ROOT", repr(str(folder / "run")))


def from_argument(folder: Path) -> tuple[list[str], str | None]:
    return [sys.executable, "-c", CALL.replace("ROOT", repr(str(folder / "run")))], None


FORMS = {
    "script with a guard": script(GUARDED),
    "script without a guard": script(EXIT),
    "python -": from_stdin,
    "python -c": from_argument,
    "in a thread": script(THREAD),
    "in a process of multiprocessing": script(SPAWNED),
    "in an event loop": script(LOOP),
}


@pytest.fixture(scope="module")
def seen() -> dict[str, str]:
    return {}


@pytest.mark.nightly(but=["script without a guard"])
@pytest.mark.parametrize("form", FORMS)
def test_it_ends_gives_the_same_numbers_and_leaves_nothing(
    form: str, tmp_path: Path, seen: dict[str, str]
) -> None:
    command, given = FORMS[form](tmp_path)
    out, code = run(command, tmp_path, given)
    assert code == (7 if form == "script without a guard" else 0)  # its own exit code stays
    _check(out, form, seen)


def _check(out: str, form: str, seen: dict[str, str]) -> None:
    accuracies = [float(text) for text in re.findall(r"ACCURACY (\S+)", out)]
    prints = set(re.findall(r"FINGERPRINT (\w{64})", out))
    assert accuracies
    assert min(accuracies) > 0.8
    assert len(prints) == 1
    assert "IMPORTED AGAIN" not in out
    seen[form] = prints.pop()
    assert len(set(seen.values())) == 1, seen


def test_a_notebook_cell(
    tmp_path: Path, seen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path / "run")
    cells = [
        BODY.replace("verbose=0, ", "").replace(", report=False", ""),
        f"cross_validate({root!r})",
        f"from asynckfold import load_results\nload_results({root!r})",
        f"load_results({root!r}).plot('scores')",
        "def study():\n    AsyncKFold(1, (X, y), 'other', None, 0)\nstudy()",
    ]
    before = descendants()
    out, code = run(notebooks.command(tmp_path, monkeypatch), tmp_path, json.dumps(cells))
    assert code == 0
    _, call, results, figure, error = json.loads(out)
    assert all(map(notebooks.is_quiet, (call, results, figure)))
    _check(notebooks.text_of(call), "notebook", seen)
    assert re.search("3(/| of )3", notebooks.text_of(call))
    page = results[0]["data"]["text/html"]
    assert all(part in page for part in ("<table>", "Net", "data:image/svg+xml;base64,"))
    assert 'href="run/report/index.html"' in page
    assert "image/png" in figure[0]["data"]
    trace = re.sub("\x1b\\[[0-9;]*m", "", notebooks.text_of(error))
    assert "InputError: 3 problems, nothing was started" in trace
    assert "in study()" in trace
    assert "site-packages" not in trace
    assert "asynckfold/" not in trace
    assert not descendants() - before
