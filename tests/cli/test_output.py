"""What is printed: clean text, and no stream that ends a run or changes its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from asynckfold import RunStore
from asynckfold.cli.output import Output
from asynckfold.system.plain_text import plain
from tests.synthetic import Synthetic, write_run

HERE = Path(__file__).parent.parent.parent
SMALL = Synthetic(models=("A",), lr_schedules=("x",), folds=2, samples=20, epochs=1)

# Text


HOSTILE = [
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x1b]8;;http://x\x1b\\link",
    "\x9b31m",
    "\x1bc",
    "\x1b",
    "\x07\x08\x0d",
    "user\u202egnp.exe",
    "\u2066\u2069",
    "\ud800",
    "\x00",
    "\ufeff",
]
HONEST = ["é", "漢字", "😀", "👩‍👩‍👧", "עברית", "العربية", "हिन्दी", "a\tb", "±…×–", "Ångström ñ"]


def is_clean(text: str) -> bool:
    return not any(
        (ord(sign) < 32 and sign not in "\n\t") or 0x7F <= ord(sign) < 0xA0 or sign in BIDI
        for sign in text
    )


BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def test_no_control_character_is_left_and_honest_text_of_every_script_stays() -> None:
    for text in HOSTILE:
        assert is_clean(plain(f"a{text}b"))
        assert plain(f"a{text}b").startswith("a")
        assert plain(f"a{text}b").endswith("b")
    for text in HONEST:
        assert plain(text) == text


def test_a_name_with_a_line_feed_forges_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    Output(Namespace(json=False)).say("A\n5 planned = 5 done")
    assert capsys.readouterr().out == "A\\n5 planned = 5 done\n"


def test_json_has_no_words_that_json_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    Output(Namespace(json=True)).data({"a": float("nan"), "b": [float("inf")], "c": "\x1b[31m"})
    assert capsys.readouterr().out == '{"a": null, "b": [null], "c": "\\u001b[31m"}\n'


# The command


def shell(words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which ``A`` is the command."""
    command = f'A() {{ {sys.executable} -m asynckfold "$@"; }}; {words}'
    env = {**os.environ, "PYTHONPATH": str(HERE), **environment}
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=env, timeout=100
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("streams") / "run", SMALL)


@pytest.mark.nightly
def test_short_verbs_end_quietly_whatever_becomes_of_their_output(run: Path) -> None:
    done = shell(
        f"A status {run} | head -1; echo ${{PIPESTATUS[0]}}; A status {run} >&-; echo $?;"
        f"A status {run} 2>&-; echo $?; A status {run} >/dev/full; echo $?;"
        f"A compare {run} {run} | true; echo ${{PIPESTATUS[0]}}; A --help >/dev/full; echo $?"
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.isdigit()] == ["0", "0", "0", "5", "0", "0"]
    # A full disk is reported, since a file of half the words looks whole.
    said = "asynckfold: standard output is not complete: No space left on device\n"
    assert done.stderr == said


TINY = (
    "A run --data digits --models mlp --schedulers cosine --optimizer adam --lr 1e-3 --folds 2 "
    "--epochs 1 --batch-size 256 --n-jobs 1 --no-report --baseline none --root"
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("redirected", "name"), [(">/dev/full 2>/dev/full", "full"), ("<&- >&- 2>&-", "closed")]
)
def test_a_run_goes_on_to_its_end_without_an_ear(
    tmp_path: Path, redirected: str, name: str
) -> None:
    done = shell(f"{TINY} {tmp_path / name} {redirected}", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    with RunStore.read(tmp_path / name) as store:
        assert store.counts()["done"] == 2


INTERRUPTS = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("at", ["asynckfold.cli", "sqlite3", "asynckfold.cli.status"])
def test_ctrl_c_during_the_first_imports_is_one_line(tmp_path: Path, run: Path, at: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS)
    path = os.pathsep.join([str(tmp_path), str(HERE)])
    done = shell(f"A status {run}", AT=at, PYTHONPATH=path)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "interrupted before anything was started\n"
