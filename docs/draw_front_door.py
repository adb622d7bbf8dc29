"""Make the README's pictures: ``python docs/draw_front_door.py``, in the root of a checkout.

Runs the README's ten lines and takes the first screen of their page in headless Chromium, light and
dark, as ``docs/pictures/verdict-*.png``. Then records a run that is interrupted and continued, in a
terminal, as ``docs/pictures/terminal.svg``. With the word ``terminal`` or ``verdict``, one of both.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path("docs", "pictures").resolve()
README = Path("README.md").resolve()
WIDTH, HEIGHT = 1280, 372
COLUMNS = 96
COMMAND = "asynckfold run --data digits --models mlp --param lr=1e-2,1e-3,1e-4 --root runs/x"
JOBS_BEFORE_THE_INTERRUPT = 5


def draw_verdict(folder: Path) -> None:
    """Run the ten lines in a folder, and take the first screen of their page in both schemes."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("Neither chromium nor google-chrome is on the PATH.")
    (lines,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", lines], cwd=folder, check=True)
    (page,) = folder.glob("runs/*/report/index.html")
    words = "--headless --no-sandbox --disable-gpu --no-first-run --hide-scrollbars --disable-sync"
    for scheme, number in (("dark", 0), ("light", 1)):
        subprocess.run(
            [
                *(browser, *words.split(), f"--user-data-dir={folder / 'profile'}"),
                *(f"--window-size={WIDTH},{HEIGHT}", "--disable-background-networking"),
                f"--blink-settings=preferredColorScheme={number}",
                *(f"--screenshot={PICTURES / f'verdict-{scheme}.png'}", page.as_uri()),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )


def record_terminal(folder: Path) -> None:
    """Interrupt a run by Ctrl-C, continue it, and write both as an SVG."""

    def some_are_done(written: bytes) -> bool:
        counts = re.findall(rb"(\d+) of \d+ jobs finished", written)
        return bool(counts) and int(counts[-1]) >= JOBS_BEFORE_THE_INTERRUPT

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for until in (some_are_done, lambda written: False):
        console.print(f"[bold green]$[/] {COMMAND}", highlight=False, soft_wrap=True)
        for line in screen(run_in_terminal(COMMAND, folder, until)):
            console.print(Text.from_ansi(line), soft_wrap=True)
    drawing = console.export_svg(title="asynckfold")
    # A picture in a page loads nothing from elsewhere: without this, the font is the reader's.
    drawing = re.sub(r"\s*@font-face \{.*?\}", "", drawing, flags=re.DOTALL)
    (PICTURES / "terminal.svg").write_text(drawing)


def run_in_terminal(command: str, folder: Path, until: Callable[[bytes], bool]) -> str:
    """Return what a command writes to a terminal; press Ctrl-C once `until` is true of it."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
        os.execvpe("bash", ["bash", "-c", f"exec {command}"], environ)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    parts, pressed = [], False
    while True:
        try:
            parts.append(os.read(terminal, 65536))
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not pressed and until(parts[-1]):
            os.kill(process, signal.SIGINT)
            pressed = True
    os.waitpid(process, 0)
    return b"".join(parts).decode()


def screen(written: str) -> list[str]:
    """Return the lines that stay on a terminal, with their colours.

    Understands what rich writes: carriage returns, lines up, lines that are erased.
    """
    lines, row, start = [""], 0, False
    for part in re.split(r"(\r|\n|\x1b\[\d*A|\x1b\[\d?K|\x1b\[\?\d+[hl])", written):
        if part == "\n":
            row, start = row + 1, False
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            start = True
        elif part.endswith("A") and part.startswith("\x1b["):
            row = max(0, row - int(part[2:-1] or 1))
        elif re.fullmatch(r"\x1b\[\d?K", part):
            lines[row] = ""
        elif part and not re.fullmatch(r"\x1b\[\?\d+[hl]", part):
            lines[row], start = part if start else lines[row] + part, False
    return [line for line in lines if line.strip()]


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    draw = {"verdict": draw_verdict, "terminal": record_terminal}
    for name in sys.argv[1:] or draw:
        with tempfile.TemporaryDirectory() as temporary:
            draw[name](Path(temporary))
