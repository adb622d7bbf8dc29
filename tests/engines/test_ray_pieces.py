"""Files in pieces: whole on the other side, in any order, over older ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asynckfold.engines.ray_pieces import PIECE_BYTES, PIECES, pieces_of, write_pieces
from asynckfold.engines.ray_room import send

MESSAGE = PIECES * PIECE_BYTES


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, MESSAGE, MESSAGE + 1])
def test_a_file_is_whole_whatever_the_order_of_its_parts(root: Path, size: int) -> None:
    root.mkdir()
    data = (b"0123456789abcdef!" * (size // 17 + 1))[:size]
    (root / "a").write_bytes(b"older and longer" * (size // 8 + 1))
    calls: list[Any] = []
    actor = SimpleNamespace(receive=SimpleNamespace(remote=lambda *given: calls.append(given)))
    sent = [*send(actor, [("a", data), ("new/b", data)])]
    assert len(sent) == len(calls) == 2 * max(1, -(-size // MESSAGE))
    for name, whole, start, *pieces in reversed(calls):
        assert all(len(piece) <= PIECE_BYTES for piece in pieces)
        write_pieces(root, name, whole, start, pieces)
    assert (root / "a").read_bytes() == (root / "new/b").read_bytes() == data


def test_the_last_piece_is_shorter_than_the_others() -> None:
    data = b"x" * (PIECE_BYTES + 7)
    assert [len(piece) for piece in pieces_of(data)][:3] == [PIECE_BYTES, 7, 0]
    assert len(pieces_of(data)) == PIECES
    assert {*pieces_of(data, len(data))} == {b""}
