"""Bytes in pieces that Ray sends in its messages, past its shared memory. Ray is not imported."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from asynckfold.system.files import make_folders

PIECE_BYTES, PIECES = 90 << 10, 100
"""Ray sends values of up to 100 KiB so, 10 MB of them in one message."""


def pieces_of(data: bytes, start: int = 0) -> tuple[bytes, ...]:
    """Cut off what fits into one message; the last pieces may be empty."""
    ends = range(start, start + PIECES * PIECE_BYTES, PIECE_BYTES)
    return tuple(data[begin : begin + PIECE_BYTES] for begin in ends)


def write_pieces(root: Path, name: str, size: int, start: int, pieces: Iterable[bytes]) -> None:
    """Write a part of a file of this size; its parts may come in any order."""
    path = root / name
    make_folders(root, path.parent)
    path.touch()
    with path.open("r+b") as file:
        # An older one may be longer.
        file.truncate(size)
        file.seek(start)
        file.writelines(pieces)
