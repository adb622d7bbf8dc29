"""The power goes at any moment of a real run: what was acknowledged is there, and it continues."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from asynckfold import RunStore, StoreCorruptError
from asynckfold.system.files import sha256
from tests.durability import power
from tests.durability.test_faults import SEED
from tests.durability.tracing import Nursery
from tests.durability.work import PLAN, work
from tests.size import NIGHTLY

pytestmark = pytest.mark.timeout(3600 if NIGHTLY else 120)


@pytest.fixture(scope="module")
def recorded(
    traced: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[power.Op]]:
    """The operations of a run from its first to its last, and where it was."""
    root = tmp_path_factory.mktemp("recorded") / "run"
    trace = root.with_name("trace")
    assert traced.run(root, trace=trace, strings=1 << 16) == 0
    return root, power.Recording(root).read(trace)


def test_the_model_rebuilds_what_the_run_left(recorded: tuple[Path, list[power.Op]]) -> None:
    """With everything kept, the model's disk is the real one, byte by byte."""
    root, ops = recorded
    state = power.everything(ops, root)
    real = {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }
    assert {name: data for name, data in state.items() if data is not None} == real


def test_power_loss_at_any_moment(
    recorded: tuple[Path, list[power.Op]],
    tmp_path: Path,
    golden: str,
    record_property: Callable[[str, object], None],
) -> None:
    root, ops = recorded
    place = tmp_path / "after"
    number = continued = refusals = 0
    with Path(os.devnull).open("wb") as nowhere:
        for number, (count, state) in enumerate(
            power.states(ops, root, SEED, 120 if NIGHTLY else 6), 1
        ):
            told = [op.data.decode().split() for op in ops[:count] if op.kind == "acknowledge"]
            power.materialise(state, place)
            refused = not found_again(place, told)
            refusals += refused
            # Where nothing can be read yet, the same command must be able to begin.
            if (refused and refusals % 20 == 1) or number % (20 if NIGHTLY else 100) == 0:
                continued += 1
                assert work(place, nowhere.fileno()) == golden, (count, ops[count - 1])
            shutil.rmtree(place, ignore_errors=True)
    text = f"{number} states of {len(ops)} operations, {continued} continued, seed {SEED}"
    record_property("states", text)
    print(f"\n{text}")
    assert number > 1000


def found_again(root: Path, told: list[list[str]]) -> bool:
    """Check what was acknowledged; return whether there is a run."""
    try:
        store = RunStore.read(root)
    except StoreCorruptError:
        assert told == []
        return False
    with store:
        if not store.has_plan:
            assert told == []
            return False
        results = {name: result.digest for name, result in store.results().items()}
        refs = {ref.file: ref.sha256 for job in PLAN.jobs for ref in store.checkpoints(job.id)}
    for file, digest in refs.items():
        assert sha256(root / file) == digest, "run.db names a checkpoint that is not whole"
    for kind, *words in told:
        if kind == "result":
            assert results[words[0]] == words[1]
    last = {Path(words[1]).parent: words for words in told if words[0] == "checkpoint"}
    assert all(refs[file] == digest for _, file, digest in last.values())
    return True
