"""The verbs of the command line: what each does, the words that it takes, and how these are read.

The parser of a verb collects all problems of a line, where argparse stops at the first.
"""

from __future__ import annotations

import argparse
import difflib
import io
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from asynckfold.cli.flags import flags, help_of, params_of_text, reading
from asynckfold.cli.report import FIGURES
from asynckfold.cli.run_folder import RUNS, stored_words
from asynckfold.errors import InputError, Problem
from asynckfold.jobs.argument import GROUPS
from asynckfold.system import terminal

SHELLS = ("bash", "zsh", "fish")
"""What `asynckfold completion` writes scripts for."""

HELD_OUT = 0.2
"""Share of the samples on which a model that is trained alone is scored."""

EXIT_CODES = (
    "Exit codes: 0 all done, 1 some jobs failed, 2 bad input and nothing started, 3 the run is "
    "held by another process, 4 the run on disk is damaged, 5 an I/O fault or no room to start "
    "anything, resumable, 124 the time budget is over, 130 interrupted by Ctrl-C and 143 by "
    "SIGTERM or a closed terminal, resumable."
)

Places = dict[str, dict[str, Any]]
"""Positions and flags, and their words for `argparse`."""


@dataclass(frozen=True)
class VerbWords:
    """What a verb does, and the words that it takes.

    `places` are its positions and undeclared flags, with their words for `argparse`; ``group`` is
    one of `GROUPS`, the help ``"data"`` stands for that of ``--data``. `flags` are the declared
    flags by name, None all of them, of which ``--help`` shows the common ones. In `helps`, which
    differ for this verb, ``{}`` stands for the declared help. Flags `without` stay None.
    """

    does: str
    more: str = ""
    places: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    flags: Collection[str] | None = ()
    helps: Mapping[str, str] = field(default_factory=dict)
    without: Collection[str] = ()
    required: Collection[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _word(metavar: str, text: str, **more: Any) -> dict[str, Any]:
    return {"metavar": metavar, "help": text, **more}


def _switch(text: str, **more: Any) -> dict[str, Any]:
    return {"action": "store_true", "help": text, **more}


def fold_number(text: str) -> int | str:
    """Read the number of a fold, or ``all``."""
    return text if text == "all" else int(text)


_DIRECTORY = {"directory": _word("DIR", "the run's folder")}
_CANDIDATE: Places = {
    **_DIRECTORY,
    "candidate": _word(
        "CANDIDATE", "model/LR schedule, such as lenet5/cosine (default: the best)", nargs="?"
    ),
    "--sweep": _word("SWEEP.py", "the sweep file of the run, if it had one", dest="file"),
}
_PROGRESS: Places = {
    "-v --verbose": {
        "action": "count",
        "default": 0,
        "help": "print a line per job, and how jobs are trained; twice: a line per epoch",
        "group": "output",
    },
    "-q --quiet": _switch("print no progress", group="output"),
}
_SWEEP: Places = {
    "file": _word("SWEEP.py", "Python file that defines the sweep", nargs="?", group="data"),
    **_PROGRESS,
}
_ROOT = {"root": f"{{}} (default {RUNS}/DATA-DATE-TIME)"}
_DATA = ("data_root", "download", "target", "header")
_COLUMNS = ("drop", "keep", "category", "groups", "fold_column")
_SAME_MODELS = "the --models of the run, if they name code (pkg.mod:Name)"

VERBS = {
    "run": VerbWords(
        "cross-validate a sweep, or continue it",
        "Flags name the data and the models, or a Python file defines them (dataset, criterion, "
        "models, schedulers, opt_fn; optionally trainer_params and settings) or holds the flags. "
        "Flags override the file. With --root, the same command continues a run after a kill or "
        "Ctrl-C; without it, each command begins a run in a new folder.",
        _SWEEP,
        flags=None,
        helps=_ROOT,
    ),
    "train": VerbWords(
        "train one model alone, or continue it",
        "Takes the flags of run, with one model and one LR schedule, and scores the model on the "
        "samples that --held-out sets aside. Use --trainer and --processes for several cores. "
        "final.safetensors in the job's folder holds the trained weights. With --root, the same "
        "command continues a run after a kill or Ctrl-C; without it, each command begins a run in "
        "a new folder.",
        {
            **_SWEEP,
            "--held-out": _word(
                "X",
                f"share of the samples that is held out and scored (default {HELD_OUT})",
                type=float,
                default=HELD_OUT,
                group="data",
            ),
        },
        flags=None,
        helps=_ROOT,
        without=("folds", "repeats", "stratify", "nested", "refit", "fold_column"),
    ),
    "plan": VerbWords(
        "print what a run would do and its expected seconds",
        "Takes the flags of run and decides as run does, after a dry run of each model. Prints the "
        "threads of each model and why, seconds and memory of a job, the makespan and its lower "
        "bound, and the timeline. Pass the folder of a run as DIR or --root to print what was "
        "decided there. Trains nothing and writes nothing.",
        _SWEEP,
        flags=None,
        helps=_ROOT,
        defaults={"root": f"{RUNS}/plan"},
    ),
    "data": VerbWords(
        "print the columns, classes and omissions of a data source",
        "Takes the data flags of run and reads all samples, to find duplicate rows and unreadable "
        "images. If run would refuse the data, it prints what it found, then the problems, and "
        "exits with 2.",
        {"source": _word("SOURCE", "data")},
        flags=(*_DATA, *_COLUMNS, "task", "limit", "seed"),
        helps={"seed": "seed of --limit (default 0)"},
    ),
    "resume": VerbWords(
        "continue a run of built-in models on digits by its folder",
        places={**_DIRECTORY, **_PROGRESS},
        flags=("allow_different_software",),
    ),
    "slurm": VerbWords(
        "train a run in parts by an array job of Slurm, and make one run of them",
        "Each task trains a part in a folder below --root, which all machines share. A last job "
        "merges the parts, whatever became of them; the same command continues those that are not "
        "complete. `asynckfold slurm merge DIR` merges what is there.",
        {
            "words": _word("RUN-ARGUMENTS", "those of run, after --; or: merge DIR", nargs="*"),
            "--tasks": _word("N", "tasks of the array job, each with a part", type=int),
            "--slurm": _word(
                "NAME=VALUE,...",
                "parameters of submitit, and of sbatch, such as cpus_per_task=8,time=60",
                type=params_of_text,
            ),
            "--cluster": _word("NAME", "that of submitit (default: slurm, or local)"),
        },
        flags=("root",),
    ),
    "status": VerbWords(
        "print progress, scores so far, and why cores and GPUs are idle",
        places={**_DIRECTORY, "--watch": _switch("show it on the whole screen until the run ends")},
    ),
    "report": VerbWords(
        "build the HTML report, figures and tables of a run",
        places={
            **_DIRECTORY,
            "--serve": _switch(
                "serve the page to a browser on this machine; it grows while the run goes on"
            ),
            "--figures": _word(
                "FORMAT",
                f"also write the figures as {' or '.join(FIGURES[1:])} (default {FIGURES[0]} only)",
                default=FIGURES[0],
                choices=FIGURES,
            ),
            "--fail-on": _word(
                "CODES",
                "also print the audit; exit code 1 if it has a finding of these codes, such as "
                "groups,one-fold, or could not check one; any stands for all findings",
            ),
        },
    ),
    "export": VerbWords(
        "write the trained weights of a job, or its models, as a file",
        places={
            **_CANDIDATE,
            "--to": _word("FILE", "a new file", required=True),
            "--fold": _word(
                "K",
                "the fold that was held out, or all for the model of run --refit (default 0; with "
                "--model, the models of all folds)",
                type=fold_number,
            ),
            "--repeat": _word("R", "repeat of the folds (default 0)", type=int, default=0),
            "--model": _switch(
                "write all that predicts, for asynckfold.load_model: weights of all folds, "
                "transforms, what preprocess fitted, class names"
            ),
        },
        flags=("data_root", "download", "models"),
        helps={"models": _SAME_MODELS},
    ),
    "predict": VerbWords(
        "predict other samples with the models of all folds of a candidate",
        "Writes the mean of the models' probabilities, or of their numbers. Prints a score if the "
        "samples have labels; the score is no estimate if the models were trained on these "
        "samples. The models and data of the run must be built in, or be named again here "
        "(--data-root for data sets of torchvision): a run's folder is never trusted to name code.",
        {
            **_CANDIDATE,
            "--to": _word(
                "FILE",
                "a new file: .csv (sample, prediction, probability, p_CLASS …) or .npz",
                required=True,
            ),
            "--refit": _switch(
                "use the model that run --refit trained on all samples, not those of the folds"
            ),
        },
        flags=("data", *_DATA, "models"),
        helps={
            "data": "samples, as for run; labels may be missing (the column of a csv, y of an npz, "
            "the folders of classes)",
            "target": "csv: column of the labels by name or position (default: that of the run)",
            "models": _SAME_MODELS,
        },
        required=("data",),
    ),
    "compare": VerbWords(
        "compare the scores of two runs, fold by fold, or all their bits",
        places={
            "directory": _word("A", "the folder of one run"),
            "other": _word("B", "the folder of the other"),
            "--bits": _switch(
                "compare bit for bit, and print where the runs first differ; exit code 1 if they do"
            ),
            "--html": _word(
                "FILE",
                "write a page with curves of both, differences by fold, and what differs in the "
                "plans (default comparison.html)",
                nargs="?",
                const="comparison.html",
            ),
        },
    ),
    "doctor": VerbWords(
        "print what this machine offers, what would be used, and why",
        flags=("n_jobs", "reserve_cores", "max_memory", "min_free_memory"),
    ),
    "completion": VerbWords(
        "print the script with which a shell completes the command",
        "bash: asynckfold completion bash > "
        "~/.local/share/bash-completion/completions/asynckfold; zsh: asynckfold completion zsh > a "
        "file _asynckfold in a folder of $fpath; fish: asynckfold completion fish > "
        "~/.config/fish/completions/asynckfold.fish. The script runs no Python. Write it again "
        "after an update.",
        {"shell": _word("SHELL", " or ".join(SHELLS), choices=SHELLS)},
    ),
}
"""Verbs, in the order of ``--help``."""


class Verb(argparse.ArgumentParser):
    """The parser of one verb.

    Its `words` are added when they are needed, the uncommon ones with help only if it `shows_all`.
    The `problems` of a line are collected, so that all can be reported together.
    """

    shows_all = False

    def __init__(self, **words: Any) -> None:
        super().__init__(**words, allow_abbrev=False)
        self.words: VerbWords | None = None
        self.problems: list[Problem] = []

    def add_own_flags(self) -> None:
        """Add the words of the verb, if that was not done yet."""
        words, self.words = self.words, None
        if words is None:
            return
        groups = {name: self.add_argument_group(name) for name in GROUPS}
        for name, given in words.places.items():
            options = dict(given)
            place: Any = groups.get(options.pop("group", ""), self)
            if options["help"] == "data":
                options["help"] = help_of(flags()["data"])
            if name.startswith("-"):
                options["help"] = self._shown(options["help"], words)
            place.add_argument(*name.split(), **options)
        for dest, item in flags().items() if words.flags != () else ():
            if dest in words.without or (words.flags is not None and dest not in words.flags):
                continue
            text = words.helps.get(dest, "{}").replace("{}", help_of(item)).replace("%", "%%")
            text = text if item.is_common else self._shown(text, words)
            options = {"required": True} if dest in words.required else {}
            options |= reading(item, self.problems)
            flag = f"--{item.flag}"
            groups[item.group].add_argument(flag, dest=dest, default=None, help=text, **options)
        if words.flags is None:
            self.add_argument("--help-all", action="help", help="show all flags")
        text = self._shown("print one JSON object", words)
        groups["output"].add_argument("--json", action="store_true", help=text)
        self.set_defaults(**dict.fromkeys(words.without), **words.defaults)

    def _shown(self, text: str, words: VerbWords) -> str:
        """Return the help of an uncommon flag, which ``--help`` leaves out where they are many."""
        return text if self.shows_all or words.flags is not None else argparse.SUPPRESS

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse a line; add ``problems`` to what is returned."""
        self.shows_all |= "--help-all" in (args or ())
        self.add_own_flags()
        self.problems.clear()
        parsed, rest = super().parse_known_args(args, namespace)
        unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]
        for name in unknown:
            self.problems.append(self._unknown(name))
        # The others may be values of these.
        for word in rest if not unknown else ():
            rule = "there must be no further argument"
            self.problems.append(Problem(rule, repr(word), "Leave it out."))
        parsed.problems = [*self.problems]
        return parsed, []

    def _unknown(self, name: str) -> Problem:
        """Return the problem of an unknown flag, with the one that is probably meant."""
        every = self._option_string_actions
        # An abbreviation is closer to what it begins than to what is spelled alike.
        begun = [flag for flag in every if flag.startswith(name)]
        close = " or ".join(begun[:3] or difflib.get_close_matches(name, every, n=1))
        word = "--help-all" if "--help-all" in every else "--help"
        remedy = f"`{self.prog} {word}` shows all flags."
        remedy = f"Did you mean {close}? {remedy}" if close else remedy
        return Problem(f"flags must be those of `{self.prog}`, spelled out", name, remedy)

    def error(self, message: str) -> NoReturn:
        """Raise the problems so far, and the error of argparse."""
        needed = message.removeprefix("the following arguments are required: ")
        rule = f"{needed} must be given" if needed != message else "the command must be readable"
        received = "none" if needed != message else message
        raise InputError([*self.problems, Problem(rule, received, f"See `{self.prog} --help`.")])


class _Command(argparse.ArgumentParser):
    """The parser of the whole command."""

    def error(self, message: str) -> NoReturn:
        """Raise the error of argparse."""
        rule = f"the command must begin with a verb: {', '.join(VERBS)}"
        received, _, _ = message.removeprefix("argument VERB: ").partition(" (choose")
        raise InputError([Problem(rule, received, "`asynckfold --help` explains them.")])


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata

        terminal.write(f"{metadata.version('asynckfold')}\n")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs; the verb's name ends up in ``verb``."""
    parser = _Command(
        allow_abbrev=False,
        prog="asynckfold",
        description="Cross-validate many PyTorch models at once.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    added = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Verb)
    for name, words in VERBS.items():
        verb = added.add_parser(
            name,
            help=words.does,
            description=f"{words.does[0].upper()}{words.does[1:]}. {words.more}".strip(),
            epilog=EXIT_CODES,
            usage=None
            if words.flags is not None
            else "%(prog)s (--data SOURCE | SWEEP.py) [--root DIR] [--epochs N] [flags]",
        )
        verb.words = words
    return parser


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, Verb]:
    """Return the parsers of all verbs by name."""
    groups = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    return {name: verb for verbs in groups for name, verb in verbs.items()}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; refuse one without a verb, or an argument that must be there.

    Other problems are in the attribute ``problems`` of what is returned, to be reported together
    with those that the verb finds.
    """
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    parsed = make_parser().parse_args(words)
    # Kept with the run: the command that continues it.
    parsed.line = list(words)
    return parsed


def parse_stored(about: Mapping[str, Any]) -> tuple[list[str], argparse.Namespace | None]:
    """Return the words of the command that started a run, and what they parse to.

    None for a script, and for words that no run stores.
    """
    words, nowhere = stored_words(about), io.StringIO()
    parsed = None
    with redirect_stdout(nowhere), redirect_stderr(nowhere), suppress(InputError, SystemExit):
        parsed = parse(words)
    if parsed is None or parsed.problems or parsed.verb not in ("run", "train"):
        return words, None
    return parsed.line, parsed
