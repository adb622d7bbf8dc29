"""The scripts that complete the command in a shell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from asynckfold.cli import main
from asynckfold.cli.parser import SHELLS, make_parser, verbs_of
from asynckfold.models import ARCHITECTURES

PRESS_TAB = """
source ./script
completer=$(complete -p asynckfold | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=(asynckfold "$@") COMP_CWORD=$#
$completer asynckfold "${COMP_WORDS[$#]}" "${COMP_WORDS[$# - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""

CASES: tuple[tuple[list[str], set[str]], ...] = (
    ([""], {*verbs_of(make_parser())}),
    (["run", "--epo"], {"--epochs", "--epochs-per-round"}),
    (["run", "--models", ""], {*ARCHITECTURES}),
    (["run", "--header", "y"], {"yes"}),
    (["run", "--data", "f"], {"fashion-mnist", "folder:"}),
    (["status", "fold"], {"folder"}),
    (["run", "sweep.p"], {"sweep.py"}),
    (["completion", ""], {*SHELLS}),
    (["report", "folder", "--figures", "s"], {"svg"}),
)
"""Words of a line, the last one begun, and what is offered for it."""


def in_bash(words: list[str], folder: Path) -> set[str]:
    command = ["bash", "-c", PRESS_TAB, "bash", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30)
    assert done.stderr == ""
    return {*done.stdout.split()}


def test_bash_offers_what_may_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "folder").mkdir()
    for name in ("folder.txt", "sweep.py"):
        (tmp_path / name).touch()
    (tmp_path / "script").write_text(capsys.readouterr().out)
    for words, offered in CASES:
        assert in_bash(words, tmp_path) == offered, words


@pytest.mark.parametrize("shell", SHELLS)
def test_every_flag_of_every_verb_is_in_the_script(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name, verb in verbs_of(make_parser()).items():
        verb.add_own_flags()
        flags = (flag for action in verb._actions for flag in action.option_strings)
        for word in (*name.split(), *(flag.lstrip("-") for flag in flags)):
            assert word in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=30)


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fisch"]) == 2
    assert "argument SHELL: invalid choice: 'fisch'" in capsys.readouterr().err
