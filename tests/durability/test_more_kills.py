"""Kills where more than the sweep writes: a worker's checkpoints, the report, one after another."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from asynckfold import RunStore
from asynckfold.jobs.messages import CheckpointRef
from asynckfold.results.report.page import write_report
from asynckfold.system.files import sha256
from tests.durability.test_faults import (
    DOCUMENTED,
    SEED,
    check_acknowledged,
    check_continuation,
    chosen,
    told,
)
from tests.durability.tracing import Nursery, nursery, refused
from tests.durability.training import train
from tests.durability.work import FOLDS, PLAN, TARGETS, work
from tests.size import NIGHTLY

pytestmark = pytest.mark.timeout(3600 if NIGHTLY else 300)

Record = Callable[[str, object], None]


def named(module: str) -> Iterator[Nursery]:
    reason = refused()
    if reason:
        pytest.skip(reason)
    with nursery(module) as made:
        yield made


# A worker


@pytest.fixture(scope="module")
def training() -> Iterator[Nursery]:
    yield from named("training")


@pytest.mark.nightly
@pytest.mark.crashes("a worker alone clears nothing up: its sweep does")
def test_a_worker_killed_at_any_call_leaves_checkpoints_whole(
    training: Nursery, tmp_path: Path, record_property: Record
) -> None:
    golden = train(tmp_path / "golden", [], lambda ref: None)
    (final,) = (tmp_path / "golden").rglob("final.safetensors")
    whole_weights = load_file(final).keys()
    assert train(tmp_path / "again", [], lambda ref: None) == golden
    every = [point for point in training.points(tmp_path / "undisturbed") if point.ours]
    points = chosen(every, 6)
    for number, point in enumerate(points):
        root = tmp_path / str(number)
        code = training.run(root, f"{point.call}:signal=KILL:when={point.number}")
        assert code == -signal.SIGKILL, point
        path = Path(f"{root}.acknowledged")
        refs = [CheckpointRef(*json.loads(line)) for line in path.read_text().splitlines()]
        for ref in refs:
            assert sha256(root / ref.file) == ref.sha256, point
        whole = {sha256(file) for file in root.rglob("checkpoint-*.safetensors")}
        # One may be there that was not reported any more.
        assert len(whole) - len(refs) in (0, 1), point
        for file in root.rglob("final.safetensors"):
            assert load_file(file).keys() == whole_weights, point
        assert train(root, refs[::-1], lambda ref: None) == golden, point
    told(record_property, len(points), len(every))


# What follows a sweep


@pytest.fixture(scope="module")
def finishing() -> Iterator[Nursery]:
    yield from named("finishing")


FINISHED = re.compile(
    rf"{DOCUMENTED.pattern}|oof/A-cosine\.npz|report/[\w-]+\.(html|png|csv|json|md|tex)"
)


def left_over(root: Path) -> list[str]:
    names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    return [name for name in names if not FINISHED.fullmatch(name)]


@pytest.mark.nightly
def test_a_kill_while_writing_outputs_and_report(
    finishing: Nursery, tmp_path: Path, golden: str, record_property: Record
) -> None:
    with Path(os.devnull).open("wb") as nowhere:
        work(tmp_path / "undisturbed", nowhere.fileno())
    every = finishing.points(tmp_path / "undisturbed")
    assert left_over(tmp_path / "undisturbed") == []
    pages = {path.name for path in (tmp_path / "undisturbed" / "report").iterdir()}
    late = [point for point in every if point.call != "mkdirat" and point.number > 4]
    points = chosen(late, 6)
    with Path(os.devnull).open("wb") as nowhere:
        for number in range(len(points)):
            work(tmp_path / str(number), nowhere.fileno())
    for number, point in enumerate(points):
        root = tmp_path / str(number)
        code = finishing.run(root, f"{point.call}:signal=KILL:when={point.number}")
        assert code == -signal.SIGKILL, point
        with RunStore.read(root) as store:
            assert store.fingerprint() == golden, point
            if number % 6 == 0:
                assert write_report(store).read_bytes().endswith(b"</html>"), point
        if number % 6:
            with RunStore.hold(root) as store:
                store.begin(PLAN, FOLDS, TARGETS)
            assert finishing.run(root) == 0
        assert {path.name for path in (root / "report").iterdir()} == pages, point
        # A report alone only reads: the journal of a killed writer waits for the next one.
        left = {name for name in left_over(root) if not name.startswith("oof/")}
        assert left <= (set() if number % 6 else {"run.db-journal"}), point
        with RunStore.hold(root) as store:
            store.begin(PLAN, FOLDS, TARGETS)
        assert left_over(root) == [], point
    told(record_property, len(points), len(every))


# Again and again


@pytest.mark.nightly
def test_killed_in_five_recoveries_in_a_row(
    traced: Nursery, tmp_path: Path, golden: str, record_property: Record
) -> None:
    every = traced.points(tmp_path / "undisturbed")
    generator = random.Random(SEED)
    chains, kills = 40 if NIGHTLY else 4, 0
    for number in range(chains):
        root = tmp_path / str(number)
        hits = []
        for _ in range(5):
            # Mostly early calls: those of the recovery, which is what comes first.
            point = every[min(generator.randrange(len(every)), generator.randrange(len(every)))]
            hits.append(str(point))
            code = traced.run(root, f"{point.call}:signal=KILL:when={point.number}")
            assert code in (0, -signal.SIGKILL), hits
            kills += code != 0
            check_acknowledged(root)
        check_continuation(root, golden, hits)
    text = f"{kills} kills in {chains} chains of five, seed {SEED}"
    record_property("kills", text)
    print(f"\n{text}")
    assert kills > 2 * chains
