"""Take the README's picture: ``python docs/draw_first_screen.py``, in the root of a checkout.

The first screen of ``reports/mnist/index.html`` in headless Chromium, as
``reports/mnist/first-screen.png``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path("reports", "mnist", "index.html")
WIDTH, HEIGHT = 1280, 860


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("Neither chromium nor google-chrome is on the PATH.")
    with tempfile.TemporaryDirectory() as profile:
        words = "--headless --no-sandbox --disable-gpu --disable-background-networking"
        subprocess.run(
            [
                *(browser, *words.split(), "--disable-sync", "--no-first-run", "--hide-scrollbars"),
                *(f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}"),
                f"--screenshot={PAGE.with_name('first-screen.png').resolve()}",
                PAGE.resolve().as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )


if __name__ == "__main__":
    main()
