"""Run the snippets of a Markdown page as a reader would, from top to bottom in one folder.

::

    ```python                    runs; names stay for the page's later snippets
    ```python title="sweep.py"   is written to that file
    ```console                   `$` begins a command, run by bash; the lines below are its output,
                                 where … stands for anything; `# exit code 2` is expected
    <!-- not run: why -->        before a snippet: skip it
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

_END = "\x1e"


@dataclass(frozen=True)
class Snippet:
    """A fenced block: its language, file name, text, place, and why it is not run."""

    language: str
    title: str
    text: str
    page: Path
    line: int
    not_run: str

    def run(self, names: dict[str, Any], environ: Mapping[str, str]) -> None:
        """Run it in the current folder; raise where it does not do what the page says."""
        if self.title:
            Path(self.title).write_text(self.text)
        elif self.language == "python":
            exec(compile("\n" * self.line + self.text, self.page, "exec"), names)
        else:
            self._run_commands(environ)

    def _run_commands(self, environ: Mapping[str, str]) -> None:
        commands = list(self._commands())
        script = "".join(f"{text}\nprintf '{_END}%s{_END}' $?\n" for text, _, _ in commands)
        ended = subprocess.run(
            ["bash", "-c", script],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        printed = ended.stdout.split(_END)
        for (text, code, expected), output, found in zip(
            commands, printed[::2], printed[1::2], strict=False
        ):
            place = f"{self.page.name}, line {self.line + 1}: $ {text}\n{output}"
            assert int(found) == code, f"exit code {found}, not {code}; {place}"
            pattern = re.escape(expected.strip()).replace("…", ".*?")
            assert re.search(pattern, output, re.DOTALL), f"expected:\n{expected}\n{place}"
        assert len(printed) == 2 * len(commands) + 1, f"bash ended early: {ended.stdout}"

    def _commands(self) -> Iterator[tuple[str, int, str]]:
        """Yield each command, its exit code and its output."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, _, output = re.sub(r"\\\n", "", part).partition("\n")
            code = re.search(r"# exit code (\d+)", command)
            yield command, int(code[1]) if code else 0, output


def snippets(page: Path) -> Iterator[Snippet]:
    """Yield the Python and console blocks of a page, in order."""
    not_run = ""
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "html_block":
            comment = re.match(r"<!-- not run: (.+) -->", token.content)
            not_run = comment[1] if comment else ""
        elif token.type == "fence":
            language, *options = shlex.split(token.info) or [""]
            titles = [item.removeprefix("title=") for item in options if item.startswith("title=")]
            assert token.map is not None
            if language in ("python", "console"):
                yield Snippet(
                    language, "".join(titles), token.content, page, token.map[0] + 1, not_run
                )
            not_run = ""
