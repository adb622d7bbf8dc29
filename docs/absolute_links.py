"""Name the repository before a release: ``python docs/absolute_links.py URL REF``.

A page of a package index knows no repository. This makes the links and pictures of README.md
absolute, at the tag or commit REF of the repository URL, and enters the URL in pyproject.toml. The
workflow calls it in its checkout, so that a release of any copy leads to that copy.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def absolute(text: str, url: str, ref: str) -> str:
    """Return Markdown whose relative links and pictures lead to a repository."""
    text = re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({url}/blob/{ref}/\1)", text)
    return re.sub(r'\b(src|srcset)="(?!https?:)([^"]+)"', rf'\1="{url}/raw/{ref}/\2"', text)


def main(url: str, ref: str) -> None:
    readme, project = Path("README.md"), Path("pyproject.toml")
    readme.write_text(absolute(readme.read_text(), url, ref))
    urls = {
        "Repository": url,
        "Documentation": f"{url}/blob/{ref}/docs/tutorial.md",
        "Changelog": f"{url}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    entries = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    with project.open("a") as file:
        file.write(f"\n[project.urls]\n{entries}")


if __name__ == "__main__":
    main(*sys.argv[1:])
