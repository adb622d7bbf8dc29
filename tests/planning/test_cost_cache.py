"""Costs kept between runs: numbers only, whole or not at all, and never a reason to fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asynckfold.jobs.cost import Cost
from asynckfold.planning import cost_cache

COST = Cost({1: 0.2, 2: 0.1}, {1: 0.02, 2: 0.01}, 5, 6, 7)
KEY = cost_cache.key_of({"model": "M"})


def test_what_was_remembered_is_recalled(tmp_path: Path) -> None:
    place = tmp_path / "not" / "there"
    assert cost_cache.recall(KEY, place) is None
    assert cost_cache.remember(KEY, COST, place) == COST
    assert cost_cache.recall(KEY, place) == COST
    assert [path.name for path in place.iterdir()] == [f"{KEY}.json"]


def test_the_first_who_wrote_wins(tmp_path: Path) -> None:
    cost_cache.remember(KEY, COST, tmp_path)
    assert cost_cache.remember(KEY, Cost({1: 9.0}, {1: 9.0}), tmp_path) == COST


def test_other_facts_have_another_place(tmp_path: Path) -> None:
    cost_cache.remember(KEY, COST, tmp_path)
    assert cost_cache.recall(cost_cache.key_of({"model": "N"}), tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"null",
        b"[]",
        b'{"key": "other", "cost": {}}',
        json.dumps({"key": KEY, "cost": None}).encode(),
        json.dumps({"key": KEY, "cost": {"step_seconds": {"1": "NaN"}}}).encode(),
        json.dumps({"key": "other", "cost": COST.to_dict()}).encode(),
        json.dumps({"key": KEY, "cost": COST.to_dict()}).encode()[:-9],
        json.dumps({"key": KEY, "cost": COST.to_dict()}).encode() + b" " * cost_cache.MOST_BYTES,
        b"[" * 50_000,
    ],
)
def test_damage_is_measured_again_and_mended(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{KEY}.json").write_bytes(content)
    assert cost_cache.recall(KEY, tmp_path) is None
    assert cost_cache.remember(KEY, COST, tmp_path) == COST
    assert cost_cache.recall(KEY, tmp_path) == COST


def test_a_home_that_cannot_be_written_costs_a_probe_only(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (None, file / "below", Path("/proc/no-such-folder")):
        assert cost_cache.remember(KEY, COST, place) == COST
        assert cost_cache.recall(KEY, place) is None


def test_a_folder_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f"{KEY}.json").mkdir()
    assert cost_cache.remember(KEY, COST, tmp_path) == COST
    assert cost_cache.recall(KEY, tmp_path) is None
    assert len(list(tmp_path.iterdir())) == 1


def test_the_place_follows_the_xdg_specification() -> None:
    assert cost_cache.folder({"XDG_CACHE_HOME": "/a", "HOME": "/b"}) == Path("/a/asynckfold")
    assert cost_cache.folder({"XDG_CACHE_HOME": "", "HOME": "/b"}) == Path("/b/.cache/asynckfold")
    assert cost_cache.folder({"XDG_CACHE_HOME": "a", "HOME": "/b"}) == Path("/b/.cache/asynckfold")
    assert cost_cache.folder({}) is None
    assert cost_cache.folder({"HOME": "b"}) is None
