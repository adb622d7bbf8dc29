"""The verbs of the command line, with their help."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NoReturn

from asynckfold.cli.config_file import CONFIG, with_config
from asynckfold.cli.flags import add_flags, flags, groups_of, help_of
from asynckfold.cli.report import FIGURES
from asynckfold.cli.run_folder import RUNS, stored_words
from asynckfold.cli.verb_parser import HelpAll, Verb
from asynckfold.errors import InputError, Problem, nearest
from asynckfold.system import terminal

SHELLS = ("bash", "zsh", "fish")
"""What `asynckfold completion` writes scripts for."""

RUNNING = ("run", "train", "plan")
"""Verbs that take the flags of a run."""

HELD_OUT = 0.2
"""Share of the samples on which a model that is trained alone is scored."""

EXIT_CODES = (
    "Exit codes: 0 all done, 1 some jobs failed, 2 bad input and nothing started, 3 the run is "
    "held by another process, 4 the run on disk is damaged, 5 an I/O fault or no room to start "
    "anything, resumable, 124 the time budget is over, 130 interrupted by Ctrl-C and 143 by "
    "SIGTERM or a closed terminal, resumable."
)

RUN_HELP = (
    "Flags name the data and the models, or a Python file defines them (dataset, criterion, "
    "models, schedulers, opt_fn; optionally trainer_params and settings). Flags override the file. "
    "With --root, the same command continues a run after a kill or Ctrl-C; without it, each "
    "command begins a run in a new folder."
)

TRAIN_HELP = (
    "Takes the flags of run, with one model and one LR schedule, and scores the model on the "
    "samples that --held-out sets aside. Use --trainer and --processes for several cores. "
    "final.safetensors in the job's folder holds the trained weights. With --root, the same "
    "command continues a run after a kill or Ctrl-C; without it, each command begins a run in a "
    "new folder."
)

PLAN_HELP = (
    "Takes the flags of run and decides as run does: a dry run of each model, and a probe for long "
    "sweeps. Prints the threads of each model and why, seconds and memory of a job, the makespan "
    "and its lower bound, and the timeline. Pass the folder of a run as DIR or --root to print "
    "what was decided there. Trains nothing and writes nothing."
)

DATA_HELP = (
    "Takes the data flags of run and reads all samples, to find duplicate rows and unreadable "
    "images. If run would refuse the data, it prints what it found, then the problems, and exits "
    "with 2."
)

PREDICT_HELP = (
    "Writes the mean of the models' probabilities, or of their numbers. Prints a score if the "
    "samples have labels; the score is no estimate if the models were trained on these samples. "
    "The models and data of the run must be built in, or be named again here (--data-root for data "
    "sets of torchvision): a run's folder is never trusted to name code."
)

COMPLETION_HELP = (
    "bash: asynckfold completion bash > ~/.local/share/bash-completion/completions/asynckfold; "
    "zsh: asynckfold completion zsh > a file _asynckfold in a folder of $fpath; "
    "fish: asynckfold completion fish > ~/.config/fish/completions/asynckfold.fish. "
    "The script runs no Python. Write it again after an update."
)

_DATA = ("data_root", "download", "target", "header")
_COLUMNS = ("drop", "keep", "category", "groups", "fold_column")
_SAME_MODELS = "the --models of the run, if they name code (pkg.mod:Name)"
_NOT_ALONE = dict.fromkeys(("folds", "repeats", "stratify", "refit", "fold_column"))
"""What one model that is trained alone does not have, and what stands for it."""


class _Command(argparse.ArgumentParser):
    """The parser of the whole command."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found.

        Raises
        ------
        InputError
            Always.
        """
        remedy = "`asynckfold --help` shows all verbs."
        raise InputError([Problem("the command must begin with a verb", message, remedy)])


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
    for name, (text, more, adds) in VERBS.items():
        verb = added.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. {more}".strip(),
            epilog=EXIT_CODES,
            usage=_usage(name) if name in RUNNING else None,
        )
        verb.adds = adds
    return parser


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, Verb]:
    """Return the parsers of all verbs by name."""
    groups = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    return {name: verb for verbs in groups for name, verb in verbs.items()}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line.

    Raises
    ------
    InputError
        There is no such verb, or an argument is missing. Other problems are in the attribute
        ``problems`` of what is returned, to be reported together with those that the verb finds.
    """
    named = [word for word in words if not word.startswith("-")]
    if named or not {"-h", "--help", "--version"} & {*words}:
        _check_verb(named[0] if named else "")
    parser = make_parser()
    problems: list[Problem] = []
    if named and named[0] in RUNNING:
        verb = verbs_of(parser)[named[0]]
        verb.add_own_flags()
        words, problems = with_config(words, verb)
    parsed = parser.parse_args(words)
    parsed.problems += problems
    # Kept with the run: the command that continues it.
    parsed.line = list(words)
    return parsed


def _check_verb(verb: str) -> None:
    if verb not in VERBS:
        rule = f"the command must begin with a verb: {', '.join(VERBS)}"
        remedy = f"{nearest(verb, VERBS).strip()} `asynckfold --help` explains them.".strip()
        raise InputError([Problem(rule, repr(verb) if verb else "none", remedy)])


def _usage(verb: str) -> str:
    """One line: with all flags, an error message would be lost below its usage."""
    what = "--data SOURCE | SWEEP.py" + (" | DIR" if verb == "plan" else "")
    some = (
        "[--models A] [--trainer T] [--processes N]"
        if verb == "train"
        else "[--models A,B] [--schedulers A,B] [--folds K]"
    )
    return (
        f"asynckfold {verb} ({what}) [--root DIR] {some} [--epochs N] …\n"
        f"all flags: asynckfold {verb} --help-all"
    )


def _sweep(verb: Verb, without: Collection[str] = ()) -> None:
    groups_of(verb)["data"].add_argument(
        "file", nargs="?", metavar="SWEEP.py", help="Python file that defines the sweep"
    )
    helps = {"root": f"{help_of(flags()['root'])} (default {RUNS}/DATA-DATE-TIME)"}
    add_flags(verb, verb.problems, without=without, helps=helps)
    verb.shows_all = False
    groups_of(verb)["output"].add_argument(
        CONFIG, metavar="FILE.yaml", help="set flags by a file; flags given beside it override it"
    )
    verb.add_argument(
        "--help-all", action=HelpAll, nargs=0, default=argparse.SUPPRESS, help="show all flags"
    )
    _add_progress_flags(verb)


def _run(verb: Verb, without: Collection[str] = ()) -> None:
    _sweep(verb, without)
    groups_of(verb)["output"].add_argument(
        "--print-config",
        action="store_true",
        help=f"print all flags as a file for {CONFIG}, and train nothing",
    )


def _train(verb: Verb) -> None:
    _run(verb, without=_NOT_ALONE)
    verb.set_defaults(**_NOT_ALONE)
    groups_of(verb)["data"].add_argument(
        "--held-out",
        type=verb.number("--held-out", float, HELD_OUT),
        metavar="X",
        default=HELD_OUT,
        help=f"share of the samples that is held out and scored (default {HELD_OUT})",
    )


def _plan(verb: Verb) -> None:
    _sweep(verb)
    verb.set_defaults(root=f"{RUNS}/plan")


def _data(verb: Verb) -> None:
    verb.add_argument("source", metavar="SOURCE", help=help_of(flags()["data"]))
    helps = {"seed": "seed of --limit (default 0)"}
    add_flags(verb, verb.problems, (*_DATA, *_COLUMNS, "limit", "seed"), helps=helps)


def _directory(verb: Verb) -> None:
    verb.add_argument("directory", metavar="DIR", help="the run's folder")


def _report(verb: Verb) -> None:
    _directory(verb)
    verb.add_argument(
        "--serve",
        action="store_true",
        help="serve the page to a browser on this machine; it grows while the run goes on",
    )
    verb.add_argument(
        "--figures",
        metavar="FORMAT",
        default=FIGURES[0],
        help=f"also write the figures as {' or '.join(FIGURES[1:])} (default {FIGURES[0]} only)",
    )


def _status(verb: Verb) -> None:
    _directory(verb)
    verb.add_argument(
        "--watch", action="store_true", help="show it on the whole screen until the run ends"
    )


def _resume(verb: Verb) -> None:
    _directory(verb)
    add_flags(verb, verb.problems, ("allow_different_software",))
    _add_progress_flags(verb)


def _candidate(verb: Verb) -> None:
    _directory(verb)
    verb.add_argument(
        "candidate",
        metavar="CANDIDATE",
        nargs="?",
        help="model/LR schedule, such as lenet5/cosine (default: the best)",
    )


def _export(verb: Verb) -> None:
    _candidate(verb)
    verb.add_argument("--to", metavar="FILE", required=True, help="a new file")
    verb.add_argument(
        "--fold",
        type=lambda text: text if text == "all" else verb.number("--fold", int, 0)(text),
        metavar="K",
        help="the fold that was held out, or all for the model of run --refit (default 0; with "
        "--model, the models of all folds)",
    )
    verb.add_argument(
        "--repeat",
        type=verb.number("--repeat", int, 0),
        default=0,
        metavar="R",
        help="repeat of the folds (default 0)",
    )
    verb.add_argument(
        "--model",
        action="store_true",
        help="write all that predicts, for asynckfold.load_model: weights of all folds, "
        "transforms, what preprocess fitted, class names",
    )
    of_run = ("data_root", "download", "models")
    add_flags(verb, verb.problems, of_run, helps={"models": _SAME_MODELS})
    _sweep_of_run(verb)


def _predict(verb: Verb) -> None:
    _candidate(verb)
    helps = {
        "data": "samples, as for run; labels may be missing (the column of a csv, y of an npz, the "
        "folders of classes)",
        "target": "csv: column of the labels by name or position (default: that of the run)",
        "models": _SAME_MODELS,
    }
    add_flags(verb, verb.problems, ("data", *_DATA, "models"), helps=helps, required=("data",))
    verb.add_argument(
        "--to",
        metavar="FILE",
        required=True,
        help="a new file: .csv (sample, prediction, probability, p_CLASS …) or .npz",
    )
    verb.add_argument(
        "--refit",
        action="store_true",
        help="use the model that run --refit trained on all samples, not those of the folds",
    )
    _sweep_of_run(verb)


def _sweep_of_run(verb: Verb) -> None:
    verb.add_argument(
        "--sweep",
        dest="file",
        metavar="SWEEP.py",
        help="the sweep file of the run, if it had one",
    )


def _compare(verb: Verb) -> None:
    verb.add_argument("directory", metavar="A", help="the folder of one run")
    verb.add_argument("other", metavar="B", help="the folder of the other")
    verb.add_argument(
        "--bits",
        action="store_true",
        help="compare bit for bit, and print where the runs first differ; exit code 1 if they do",
    )


def _doctor(verb: Verb) -> None:
    add_flags(verb, verb.problems, ("n_jobs", "reserve_cores", "max_memory", "min_free_memory"))


def _completion(verb: Verb) -> None:
    verb.add_argument("shell", metavar="SHELL", help=" or ".join(SHELLS))


def _add_progress_flags(verb: Verb) -> None:
    group = groups_of(verb)["output"]
    group.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="print a line per job, and how jobs are trained; twice: a line per epoch",
    )
    group.add_argument("-q", "--quiet", action="store_true", help="print no progress")


VERBS: Mapping[str, tuple[str, str, Callable[[Verb], None]]] = {
    "run": ("cross-validate a sweep, or continue it", RUN_HELP, _run),
    "train": ("train one model alone, or continue it", TRAIN_HELP, _train),
    "plan": ("print what a run would do and its expected seconds", PLAN_HELP, _plan),
    "data": ("print the columns, classes and omissions of a data source", DATA_HELP, _data),
    "resume": ("continue a run of built-in models on digits by its folder", "", _resume),
    "status": ("print progress, scores so far, and why cores and GPUs are idle", "", _status),
    "report": ("build the HTML report, figures and tables of a run", "", _report),
    "export": ("write the trained weights of a job, or its models, as a file", "", _export),
    "predict": (
        "predict other samples with the models of all folds of a candidate",
        PREDICT_HELP,
        _predict,
    ),
    "compare": ("compare the scores of two runs, fold by fold, or all their bits", "", _compare),
    "doctor": ("print what this machine offers, what would be used, and why", "", _doctor),
    "completion": (
        "print the script with which a shell completes the command",
        COMPLETION_HELP,
        _completion,
    ),
}
"""Verbs, in the order of ``--help``: what it does, more about it, what adds its flags."""


def parse_stored(about: Mapping[str, Any]) -> tuple[list[str], argparse.Namespace | None]:
    """Return the words of the command that started a run, and what they parse to.

    None for a script, and for words that no run stores: with a config file, which is not read here.
    """
    words, nowhere = stored_words(about), io.StringIO()
    if any(word.partition("=")[0] == CONFIG for word in words):
        return words, None
    try:
        with redirect_stdout(nowhere), redirect_stderr(nowhere):
            parsed = parse(words)
    except (InputError, SystemExit):
        return words, None
    if parsed.problems or parsed.verb not in ("run", "train"):
        return words, None
    return parsed.line, parsed
