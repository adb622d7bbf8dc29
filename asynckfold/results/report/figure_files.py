"""The PNG files of a report, drawn again only if their numbers have changed.

A stamp file records what they show::

    digest of the numbers                 requested
    digest of the numbers, and names      drawn
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from asynckfold.errors import StorageError
from asynckfold.results.report.summary import Summary
from asynckfold.system import background
from asynckfold.system.files import alone, read_plain, write_whole

STAMP = ".figures"


@dataclass(frozen=True)
class _Order:
    """What to draw, and where; no link is followed below `root`."""

    root: Path
    folder: Path
    summary: Summary
    digest: str


def update(summary: Summary, root: Path, folder: Path, *, beside: bool = False) -> None:
    """Draw the figures of a folder if their numbers changed; `beside`: in a background process."""
    numbers = summary.to_dict()
    # No figure shows events, and a call without pending jobs adds some.
    del numbers["events"]
    text = json.dumps([numbers, version("asynckfold")])
    digest = hashlib.sha256(text.encode()).hexdigest()
    order = _Order(root.absolute(), folder.absolute(), summary, digest)
    if not beside:
        background.wait()
    shown, *names = _stamp(order)
    if shown == digest and names and all((folder / name).is_file() for name in names):
        return
    write_whole(folder / STAMP, digest.encode(), root)
    if beside:
        complaint = f"the figures of {folder} are not drawn; `asynckfold report` tries again"
        try:
            background.start(__name__, pickle.dumps(order), digest, complaint)
        except OSError:
            _draw(order)
    else:
        _draw(order)


def run(data: bytes) -> None:
    """Draw an order that another process has pickled, unless its folder is gone."""
    order: _Order = pickle.loads(data)
    try:
        _draw(order)
    except StorageError:
        if order.folder.exists():
            raise


def _draw(order: _Order) -> None:
    from asynckfold.results.report.charts import draw

    files = draw(order.summary)
    left = re.compile(rf"({'|'.join(map(re.escape, [STAMP, *files]))})\.\d+\.tmp")
    with alone(order.root, order.folder, left):
        # A newer request replaces this one.
        if _stamp(order)[0] != order.digest:
            return
        for name, content in files.items():
            write_whole(order.folder / name, content, order.root)
        text = "\n".join([order.digest, *files])
        write_whole(order.folder / STAMP, text.encode(), order.root)


def _stamp(order: _Order) -> list[str]:
    try:
        return read_plain(order.folder / STAMP, order.root).decode(errors="replace").split("\n")
    except (OSError, StorageError):
        return [""]
