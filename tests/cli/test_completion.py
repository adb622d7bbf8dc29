"""The scripts that complete the command in a shell."""

from __future__ import annotations

import os
import pty
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from asynckfold.cli import main
from asynckfold.cli.parser import SHELLS, make_parser, verbs_of
from asynckfold.models import ARCHITECTURES
from tests.leftovers import until

PRESS_TAB = """
source ./script
completer=$(complete -p asynckfold | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=(asynckfold "$@") COMP_CWORD=$#
$completer asynckfold "${COMP_WORDS[$#]}" "${COMP_WORDS[$# - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""

IN_ZSH = r"""
PS1=""
fpath=($PWD $fpath)
autoload -U compinit
compinit -u -D
compadd() {
  if [[ ${@[1,(i)(-|--)]} == *\ -[OAD]* ]]; then builtin compadd "$@"; return; fi
  local -a found
  builtin compadd -O found "$@"
  print -rl -- $found >> offered
  builtin compadd "$@"
}
press_tab() { zle complete-word; print -r > ended }
zle -N press_tab
bindkey "^X" press_tab
"""
"""Writes what zsh offers to a file, in place of the terminal, when Ctrl-X is pressed."""

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


def in_fish(words: list[str], folder: Path) -> set[str]:
    line = shlex.join(["asynckfold", *words[:-1]]) + f" {words[-1]}"
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source script; complete -C {shlex.quote(line)}"],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stderr == ""
    return {line.partition("\t")[0].rstrip("/") for line in done.stdout.splitlines()}


def in_zsh(words: list[str], folder: Path) -> set[str]:
    (folder / "_asynckfold").write_text((folder / "script").read_text())
    (folder / ".zshrc").write_text(IN_ZSH)
    for name in ("ended", "offered"):
        (folder / name).unlink(missing_ok=True)
    line = shlex.join(["asynckfold", *words[:-1]]) + f" {words[-1]}"
    master, slave = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-d", "-i"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "ZDOTDIR": str(folder), "TERM": "xterm"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    try:
        os.write(master, f"{line}\x18".encode())
        until((folder / "ended").exists, 30)
    finally:
        shell.kill()
        shell.wait()
        os.close(master)
    return {*(folder / "offered").read_text().split()}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_offers_what_may_follow(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    (tmp_path / "folder").mkdir()
    for name in ("folder.txt", "sweep.py"):
        (tmp_path / name).touch()
    (tmp_path / "script").write_text(capsys.readouterr().out)
    offers = {"bash": in_bash, "fish": in_fish, "zsh": in_zsh}[shell]
    for words, offered in CASES:
        assert offers(words, tmp_path) == offered, words


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
    assert "SHELL must be one of bash, zsh, fish: received 'fisch'. Did you mean 'fish'?" in (
        capsys.readouterr().err
    )
