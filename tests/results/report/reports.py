"""Reports of made-up runs: the page, its figures and its numbers, by the command alone."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from asynckfold.cli import main
from tests.synthetic import Synthetic, write_run


@dataclass(frozen=True)
class Report:
    """What ``asynckfold report`` writes."""

    root: Path

    @cached_property
    def page(self) -> str:
        return (self.root / "report" / "index.html").read_text("utf-8")

    @cached_property
    def numbers(self) -> Any:
        return json.loads((self.root / "report" / "results.json").read_text("utf-8"))

    def figure(self, name: str) -> ElementTree.Element:
        """Return a figure of the page; its SVG must be valid XML."""
        (drawn,) = re.findall(rf'<figure id="figure-{name}">(.*?)<figcaption>', self.page, re.S)
        return ElementTree.fromstring(f"<div>{drawn}</div>")

    def texts(self, name: str, tag: str) -> list[str]:
        """Return the texts of all elements of a tag in a figure, or of their titles."""
        items = self.figure(name).iter(tag)
        return [(item[0].text if len(item) else item.text) or "" for item in items]


def report_of(root: Path, run: Synthetic | None = None) -> Report:
    """Write a run and its report, without PNG files but for tests marked `figures`."""
    write_run(root, run)
    return report_again(root)


def report_again(root: Path) -> Report:
    """Write the report of a run."""
    assert main(["report", str(root)]) == 0
    return Report(root)
