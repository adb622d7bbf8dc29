"""What others may have put into a run's folder: refused or set aside, never followed, no hang."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from asynckfold import AsyncKFoldError, InputError, RunStore, load_results
from asynckfold.api.kfold import write_out_of_fold
from asynckfold.results.report.page import write_report
from asynckfold.system.files import write_whole
from asynckfold.training.job_log import JobLog
from tests.durability.work import FOLDS, PLAN, TARGETS, work

JOB = PLAN.jobs[0]


def begin(root: Path) -> None:
    with RunStore.hold(root) as store:
        store.begin(PLAN, FOLDS, TARGETS)


def look(root: Path) -> None:
    with RunStore.read(root) as store:
        store.splits()


def log(root: Path) -> None:
    with JobLog(root, JOB) as found:
        found.write("a line\n")


def report(root: Path) -> None:
    with RunStore.read(root) as store:
        write_report(store)


def out_of_fold(root: Path) -> None:
    with RunStore.read(root) as store:
        write_out_of_fold(load_results(store))


def link_to_a_file(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "canary")


def link_to_a_folder(place: Path, outside: Path) -> None:
    place.symlink_to(outside)


def dangling_link(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "nothing")


def fifo(place: Path, outside: Path) -> None:
    os.mkfifo(place)


PLANTS = [link_to_a_file, link_to_a_folder, dangling_link, fifo]
REFUSED: dict[str, list[Callable[[Path], None]]] = {
    "run.db": [begin],
    "run.db-journal": [look],
    "run.lock": [begin],
    "splits.npz": [look],
    "A/cosine/fold-0/log.txt": [log],
}
"""Place → who meets it there."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished") / "run"
    with Path(os.devnull).open("wb") as nowhere:
        work(root, nowhere.fileno())
    return root


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "canary").write_text("mine")
    return folder


@pytest.fixture(params=PLANTS)
def planted(
    request: pytest.FixtureRequest, finished: Path, root: Path, outside: Path
) -> Callable[[str], Path]:
    """Put a plant in the place of a name, in a copy of the run."""
    shutil.copytree(finished, root)

    def put(name: str) -> Path:
        place = root / name
        place.parent.mkdir(exist_ok=True)
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        request.param(place, outside)
        return place

    return put


Act = Callable[[Path], None]


def untouched(outside: Path) -> bool:
    return [(path.name, path.read_text()) for path in outside.iterdir()] == [("canary", "mine")]


@pytest.mark.damages("what was planted stays where it is")
@pytest.mark.parametrize(
    ("name", "act"), [(name, act) for name, acts in REFUSED.items() for act in acts]
)
def test_it_is_refused_by_its_name_in_one_line(
    planted: Callable[[str], Path], root: Path, outside: Path, name: str, act: Act
) -> None:
    place = planted(name)
    before = place.lstat()
    with pytest.raises(AsyncKFoldError) as caught:
        act(root)
    told = getattr(caught.value, "strerror", None) or str(caught.value)
    assert str(place) in told
    assert "\n" not in told
    assert "is not a regular file" in told
    assert untouched(outside)
    assert (place.lstat().st_ino, place.lstat().st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize(
    ("name", "act"), [("report/index.html", report), ("oof/A-cosine.npz", out_of_fold)]
)
def test_where_a_file_is_replaced_the_plant_goes(
    planted: Callable[[str], Path], root: Path, outside: Path, name: str, act: Act
) -> None:
    place = planted(name)
    act(root)
    assert stat.S_ISREG(place.lstat().st_mode)
    assert untouched(outside)


@pytest.mark.parametrize("plant", PLANTS)
def test_it_is_not_written_through(
    tmp_path: Path, outside: Path, plant: Callable[[Path, Path], None]
) -> None:
    plant(tmp_path / f"x.{os.getpid()}.tmp", outside)
    write_whole(tmp_path / "x", b"content")
    assert (tmp_path / "x").read_bytes() == b"content"
    assert untouched(outside)


def test_a_lock_that_is_no_file_says_that_nobody_holds_the_run(
    finished: Path, root: Path, outside: Path
) -> None:
    shutil.copytree(finished, root)
    (root / "run.lock").unlink(missing_ok=True)
    fifo(root / "run.lock", outside)
    with RunStore.read(root) as store:
        assert store.holder() is None


# Whose folder it is


@pytest.mark.parametrize(
    ("mode", "remedy"),
    [
        (0o775, "Use a folder that does not exist yet, or: chown"),
        (0o777, "nobody else may write to it"),
        (0o757, "nobody else may write to it"),
        (0o1777, ""),
        (0o1775, ""),
        (0o755, ""),
        (0o700, ""),
    ],
)
def test_a_folder_that_others_may_write_to_is_refused(root: Path, mode: int, remedy: str) -> None:
    root.mkdir()
    root.chmod(mode)
    if not remedy:
        begin(root)
        return
    with pytest.raises(InputError) as caught:
        RunStore.hold(root)
    assert remedy in str(caught.value)
    assert f"with mode {mode:04o}" in str(caught.value)
    assert f"chmod go-w {root}" in str(caught.value)
    assert list(root.iterdir()) == []
    root.chmod(mode & ~0o022)
    begin(root)


def test_a_folder_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 12345)
    with pytest.raises(InputError, match="must belong to the user who runs") as caught:
        RunStore.hold(root)
    assert f"chown -R {me + 12345} {root}" in str(caught.value)
    assert f"as user {me + 12345}" in str(caught.value)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(("mask", "file", "folder"), [(0, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_of_what_is_made_the_mask_decides_and_nobody_else_may_write(
    root: Path, mask: int, file: int, folder: int
) -> None:
    before = os.umask(mask)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            work(root / "deep" / "run", nowhere.fileno())
        out_of_fold(root / "deep" / "run")
        report(root / "deep" / "run")
        log(root / "deep" / "run")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.lstat().st_mode) for path in root.rglob("*") if path.is_file()}
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    assert modes == {file}
    assert {stat.S_IMODE(path.lstat().st_mode) for path in folders} == {folder}
