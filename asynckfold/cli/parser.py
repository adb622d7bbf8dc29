"""The verbs of the command line, with their help."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from asynckfold.cli.flags import add_flags, flags, from_folder, groups_of, help_of
from asynckfold.system import terminal

SUBJECTS = {
    "checkpoints": "their share of a run's time",
    "crowd": "a step of several threads beside processes that always compute",
    "formats": "a step of convolutional models in both memory formats",
    "fusion": "a step of several fused jobs against one after another",
    "nodes": "one model on nodes of several tasks, workers against time",
    "packing": "one sweep in four ways",
    "place": "the time of a decision, by the number of pending jobs",
    "speed": "a DataLoader loop, the best serial loop and asynckfold, unfused and by default, warm "
    "and cold",
    "trainers": "one model on all cores, by each trainer",
    "use": "CPU use, and a job's overhead",
}
"""What `asynckfold bench` measures."""

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
    "After a kill or Ctrl-C the same command continues."
)

TRAIN_HELP = (
    "Takes the flags of run, with one model and one LR schedule, and scores the model on the "
    "samples that --held-out sets aside. Use --trainer and --processes for several cores. The last "
    "checkpoint in the run's folder holds the trained weights. After a kill or Ctrl-C the same "
    "command continues."
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
    "The models and data of the run must be built in, or be named again here: a run's folder is "
    "never trusted to name code."
)

SIMULATE_HELP = (
    "The jobs differ in length (lognormal), threads, memory and GPU. Their estimates are wrong, "
    "other processes come and go on the cores, attempts die and are retried. The lower bound is "
    "the largest of core-seconds / cores, GPU-seconds / GPUs and the longest job; the ratio is "
    "makespan / lower bound. The same seed gives the same sweep."
)

_DATA = ("data_root", "download", "target", "header")
_COLUMNS = ("drop", "keep", "category")
_NOT_ALONE = {"folds": None, "repeats": None, "stratify": None, "refit": None}
"""What one model that is trained alone does not have, and what stands for it."""


class Verb(argparse.ArgumentParser):
    """The parser of a verb. ``--help`` shows the common flags if there is ``--help-all``."""

    shows_all = True

    def format_help(self) -> str:
        """Return the help."""
        if self.shows_all:
            return super().format_help()
        common = {dest for dest, item in flags().items() if item.is_common}
        hidden = {
            action: action.help
            for action in self._actions
            if action.option_strings and action.dest not in (*common, "help", "help_all")
        }
        for action in hidden:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in hidden.items():
                action.help = text


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata

        terminal.write(f"{metadata.version('asynckfold')}\n")
        parser.exit()


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: Any) -> None:
        parser.shows_all = True
        parser.print_help()
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs; the verb's name ends up in ``verb``."""
    parser = argparse.ArgumentParser(
        prog="asynckfold",
        description="Cross-validate many PyTorch models at once.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Verb)
    for name, (text, more, adds) in VERBS.items():
        verb = verbs.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. {more}".strip(),
            epilog=EXIT_CODES,
            usage=_usage(name) if adds in (_run, _train, _plan) else None,
        )
        adds(verb)
        groups_of(verb)["output"].add_argument(
            "--json", action="store_true", help="print one JSON object"
        )
    return parser


def _usage(verb: str) -> str:
    """One line: with all flags, an error message would be lost below its usage."""
    root = "[--root DIR]" if verb == "plan" else "--root DIR"
    what = "--data SOURCE | SWEEP.py" + (" | DIR" if verb == "plan" else "")
    some = (
        "[--models A] [--trainer T] [--processes N]"
        if verb == "train"
        else "[--models A,B] [--schedulers A,B] [--folds K]"
    )
    return (
        f"asynckfold {verb} ({what}) {root} {some} [--epochs N] …\n"
        f"all flags: asynckfold {verb} --help-all"
    )


def _run(verb: Verb, required: Collection[str] = ("root",), without: Collection[str] = ()) -> None:
    groups_of(verb)["data"].add_argument(
        "file", nargs="?", metavar="SWEEP.py", help="Python file that defines the sweep"
    )
    add_flags(verb, without=without, required=required)
    verb.shows_all = False
    verb.add_argument(
        "--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help="show all flags"
    )
    _add_progress_flags(verb)


def _train(verb: Verb) -> None:
    _run(verb, without=_NOT_ALONE)
    verb.set_defaults(**_NOT_ALONE, baseline="none")
    groups_of(verb)["data"].add_argument(
        "--held-out",
        type=float,
        metavar="X",
        default=HELD_OUT,
        help=f"share of the samples that is held out and scored (default {HELD_OUT})",
    )


def _plan(verb: Verb) -> None:
    _run(verb, required=())
    verb.set_defaults(root="runs/plan")


def _data(verb: Verb) -> None:
    verb.add_argument("source", metavar="SOURCE", help=help_of(flags()["data"]))
    helps = {"seed": "seed of --limit (default 0)"}
    add_flags(verb, (*_DATA, *_COLUMNS, "limit", "seed"), helps=helps)


def _directory(verb: Verb) -> None:
    verb.add_argument("directory", metavar="DIR", help="the run's folder")


def _resume(verb: Verb) -> None:
    _directory(verb)
    add_flags(verb, ("allow_different_software",))
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
        type=_fold,
        default=0,
        metavar="K",
        help="the fold that was held out, or all for the model of run --refit (default 0)",
    )
    verb.add_argument(
        "--repeat", type=int, default=0, metavar="R", help="repeat of the folds (default 0)"
    )


def _predict(verb: Verb) -> None:
    _candidate(verb)
    helps = {
        "data": "samples, as for run; labels may be missing (the column of a csv, y of an npz, the "
        "folders of classes)",
        "target": "csv: column of the labels by name or position (default: that of the run)",
        "models": "the --models of the run, if they name code (pkg.mod:Name)",
    }
    add_flags(verb, ("data", *_DATA, "models"), helps=helps, required=("data",))
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
    verb.add_argument(
        "--sweep",
        dest="file",
        metavar="SWEEP.py",
        help="the sweep file of the run, if it had one",
    )


def _compare(verb: Verb) -> None:
    verb.add_argument("directory", metavar="A", help="the folder of one run")
    verb.add_argument("other", metavar="B", help="the folder of the other")


def _doctor(verb: Verb) -> None:
    add_flags(verb, ("n_jobs", "reserve_cores", "max_memory", "min_free_memory"))


def _bench(verb: Verb) -> None:
    verb.add_argument(
        "subject",
        choices=SUBJECTS,
        help="; ".join(f"{name}: {text}" for name, text in SUBJECTS.items()),
    )
    verb.add_argument("--quick", action="store_true", help="seconds instead of minutes; rough")
    verb.add_argument("--save", metavar="FILE.md", help="also write the table as a page")
    verb.add_argument(
        "--data",
        metavar="DIR",
        help="nodes, speed and trainers only: folder where torchvision keeps MNIST and CIFAR-10 "
        "(or train/CLASS/*.jpg for the latter). Default: generated samples of the same shapes, or "
        "digits",
    )
    verb.add_argument(
        "--peers",
        action="store_true",
        help="speed only: also skorch with scikit-learn's grid search, and Ray, where installed",
    )


def _simulate(verb: Verb) -> None:
    for name, value, text in (
        ("jobs", 10_000, "number of jobs"),
        ("cores", 64, "number of cores"),
        ("gpus", 4, "number of GPUs"),
        ("seed", 0, "seed of the sweep"),
    ):
        verb.add_argument(
            f"--{name}", type=int, metavar="N", default=value, help=f"{text} (default {value})"
        )


def _add_progress_flags(verb: Verb) -> None:
    group = groups_of(verb)["output"]
    group.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="print a line per job; twice: per epoch",
    )
    group.add_argument("-q", "--quiet", action="store_true", help="print no progress")


VERBS: Mapping[str, tuple[str, str, Callable[[Verb], None]]] = {
    "run": ("cross-validate a sweep; the same command continues it", RUN_HELP, _run),
    "train": ("train one model alone; the same command continues it", TRAIN_HELP, _train),
    "plan": ("print what a run would do and its expected seconds", PLAN_HELP, _plan),
    "data": ("print the columns, classes and omissions of a data source", DATA_HELP, _data),
    "resume": ("continue a run of built-in models and data by its folder", "", _resume),
    "status": ("print the progress of a run, and why cores and GPUs are idle", "", _directory),
    "report": ("build the HTML report, figures and tables of a run", "", _directory),
    "export": ("write the trained weights of a job as a safetensors file", "", _export),
    "predict": (
        "predict other samples with the models of all folds of a candidate",
        PREDICT_HELP,
        _predict,
    ),
    "compare": ("compare two runs bit for bit, and print where they first differ", "", _compare),
    "doctor": ("print what this machine offers, what would be used, and why", "", _doctor),
    "bench": ("measure asynckfold on this machine, and print the table", "", _bench),
    "simulate": (
        "place a large random sweep in virtual time, and print the distance from the optimum",
        SIMULATE_HELP,
        _simulate,
    ),
}
"""Verbs, in the order of ``--help``: what it does, more about it, what adds its flags."""


def stored_command(about: Mapping[str, Any]) -> tuple[list[str], argparse.Namespace | None]:
    """Return the words that a run was started by, and what they ask for; None for a script.

    Paths of data are found from the folder where they were first given.
    """
    stored, folder = about.get("cli"), about.get("folder")
    words = [str(word) for word in stored] if isinstance(stored, list) else []
    parsed = _parsed(words) if words else None
    if parsed is None or parsed.verb not in ("run", "train"):
        return words, None
    return words, from_folder(parsed, Path(folder)) if isinstance(folder, str) else parsed


def _parsed(words: Sequence[str]) -> argparse.Namespace | None:
    """Return what words of a run's folder ask for; None where that is nothing, such as help."""
    nowhere = io.StringIO()
    try:
        with redirect_stdout(nowhere), redirect_stderr(nowhere):
            return make_parser().parse_args(words)
    except SystemExit:
        return None


def _fold(text: str) -> int | str:
    try:
        return text if text == "all" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be all or a number of a fold, received {text!r}"
        ) from None
