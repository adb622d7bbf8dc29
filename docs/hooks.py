"""What mkdocs fills in at build time, so that it cannot go stale.

::

    {{ flags }}               what `asynckfold VERB --help-all` prints, for each verb
    {{ example grid }}        examples/grid.py, with what docs/record_examples.py has recorded
    {{ notebook table }}      docs/notebooks/table.ipynb, with the outputs that are in it
    {{ signature AsyncKFold }} what `inspect.signature` says of a class
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import asynckfold

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill a page's placeholders."""
    shown = re.findall(r"{{ example (\w+) }}", markdown)
    if shown and (missing := {path.stem for path in EXAMPLES.glob("*.py")} - {*shown}):
        raise ValueError(f"docs/examples.md must show all examples: add {sorted(missing)}")
    for name, fill in {"example": example, "notebook": notebook, "signature": signature}.items():
        markdown = re.sub(
            rf"{{{{ {name} (\w+) }}}}", lambda match, fill=fill: fill(match[1]), markdown
        )
    return markdown.replace("{{ flags }}", flags()) if "{{ flags }}" in markdown else markdown


def example(name: str) -> str:
    """Return the section of an example: what it is, what it prints, its picture, the script."""
    script = (EXAMPLES / f"{name}.py").read_text()
    title = (ast.get_docstring(ast.parse(script)) or "").splitlines()[0]
    parts = [f"### {name}", title.removesuffix(" (or --quick)")]
    recorded = DOCS / "recorded" / name
    if recorded.with_suffix(".png").exists():
        parts.append(f"![Scores of examples/{name}.py](recorded/{name}.png)")
    if recorded.with_suffix(".txt").exists():
        parts.append(f"```text\n{recorded.with_suffix('.txt').read_text().rstrip()}\n```")
    code = textwrap.indent(f"```python\n{script}```", "    ")
    return "\n\n".join([*parts, f'??? example "examples/{name}.py"\n\n{code}', ""])


def notebook(name: str) -> str:
    """Return the cells of a notebook as Markdown, each with its stored outputs."""
    parts = []
    for cell in json.loads((DOCS / "notebooks" / f"{name}.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                url = f"data:image/png;base64,{''.join(data['image/png']).strip()}"
                parts.append(f'<img alt="What the cell above draws" src="{url}">')
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts)


def signature(name: str) -> str:
    """Return the signature of a class, an argument on each line."""
    parameters = inspect.signature(getattr(asynckfold, name)).parameters.values()
    lines, starred = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            lines.append("    *,")
            starred = True
        plain = parameter.replace(annotation=parameter.empty)
        lines.append(f"    {plain},")
    return "\n".join(["```python", f"{name}(", *lines, ")", "```"])


def flags() -> str:
    """Return a section for each verb of the command."""
    verbs = re.findall(r"^ {4}(\w+) {2,}", _printed("--help"), re.MULTILINE)
    return "\n\n".join(f"## {verb}\n\n```text\n{_help(verb)}\n```" for verb in verbs)


def _help(verb: str) -> str:
    # Verbs with few flags show them all at once.
    text = _printed(verb, "--help-all", okay=(0, 2)) or _printed(verb, "--help")
    # The exit codes have a page of their own.
    return text.partition("\nExit codes:")[0].strip()


def _printed(*words: str, okay: tuple[int, ...] = (0,)) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "asynckfold", *words],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    if ended.returncode not in okay:
        raise RuntimeError(f"asynckfold {' '.join(words)} failed:\n{ended.stderr}")
    return ended.stdout
