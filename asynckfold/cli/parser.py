"""The words of the command line, with their help."""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Any

from asynckfold.cli.data_flags import (
    add_data_flags,
    add_inspection_flags,
    add_source_flags,
)
from asynckfold.cli.sweep_file import DEFAULTS, from_folder
from asynckfold.jobs.trainer_params import TRAINERS, WORDS

SUBJECTS = (
    "checkpoints",
    "crowd",
    "formats",
    "fusion",
    "nodes",
    "packing",
    "place",
    "speed",
    "trainers",
    "use",
)
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
    "Cross-validate models × LR schedules × folds. The data and models are named by flags, or "
    "defined in a Python file (dataset, criterion, models, schedulers, opt_fn; optionally "
    "trainer_params and settings); flags stand above the file. Killed or interrupted, the same "
    "command continues."
)

TRAIN_HELP = (
    "Takes what run takes, with one model and one LR schedule, and scores it on the samples that "
    "--held-out sets aside. With --trainer and --processes on several cores. The trained weights "
    "are the last checkpoint in the run's folder. Killed or interrupted, the same command goes on."
)

PLAN_HELP = (
    "Takes what run takes, and decides as run does: a dry run of each model, and for long sweeps a "
    "probe. Prints the threads of each model and why, seconds and memory of a job, the makespan "
    "and its lower bound, and the sweep over time. With the folder of a run in place of SWEEP.py, "
    "or as --root, what was decided there. Nothing is trained, and no run is begun."
)

DATA_HELP = (
    "Takes the flags that run takes for its data, and reads all of it: rows that are there twice, "
    "images that cannot be read. Where run would refuse it, everything that was found is printed, "
    "then the problems, and the exit code is 2."
)

PREDICT_HELP = (
    "Writes the mean of their probabilities, or of their numbers. Where the samples have labels, "
    "their score is printed, too: no estimate if the models were trained on them. The models and "
    "data of the run are built in, or named again here: a run's folder is never trusted to name "
    "code."
)

SIMULATE_HELP = (
    "The jobs differ in length (lognormal), threads, memory and GPU; their estimates are wrong, "
    "others come and go on the cores, attempts die and are tried again. The lower bound is the "
    "largest of core-seconds / cores, GPU-seconds / GPUs and the longest job; makespan / lower "
    "bound is the ratio. The same seed gives the same sweep."
)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs; the verb's name ends up in ``verb``."""
    parser = argparse.ArgumentParser(
        prog="asynckfold",
        description="Cross-validate many PyTorch models at once.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=metadata.version("asynckfold"))
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in (
        ("run", "cross-validate a sweep; the same command continues it"),
        ("train", "train one model alone; the same command continues it"),
        ("plan", "print what a run would do, and what it should take; trains nothing"),
    ):
        more = {"run": RUN_HELP, "train": TRAIN_HELP, "plan": PLAN_HELP}[name]
        verb = verbs.add_parser(
            name,
            help=text,
            description=f"{_sentence(text)} {more}",
            epilog=EXIT_CODES,
            usage=_usage(name),
        )
        add_data_flags(verb)
        _add_model_flags(verb)
        _add_training_flags(verb, alone=name == "train")
        _add_running_flags(verb, root_required=name != "plan")
        _add_output_flags(verb)
        _add_progress_flags(verb)
    text = "print what would be read from a source: columns, classes, what is left out"
    verb = verbs.add_parser(
        "data",
        help=text,
        description=f"{_sentence(text)} {DATA_HELP}",
        epilog=EXIT_CODES,
    )
    add_inspection_flags(verb)
    _add_output_flags(verb)
    for name, text in (
        ("resume", "continue a run of built-in models and data by its folder"),
        ("status", "say how far a run is, and what idle cores and GPUs wait for"),
        ("report", "build the HTML report, figures and tables of a run"),
    ):
        verb = verbs.add_parser(name, help=text, description=_sentence(text), epilog=EXIT_CODES)
        verb.add_argument("directory", metavar="DIR", help="the run's folder")
        _add_output_flags(verb)
        if name == "resume":
            _add_software_flag(verb)
            _add_progress_flags(verb)
    text = "write the weights that a job trained to a file of safetensors"
    verb = verbs.add_parser("export", help=text, description=_sentence(text), epilog=EXIT_CODES)
    _add_candidate(verb)
    verb.add_argument("--to", metavar="FILE", required=True, help="a new file")
    verb.add_argument(
        "--fold",
        type=_fold,
        default=0,
        metavar="K",
        help="which was held out, or all: none was, by run --refit (default 0)",
    )
    verb.add_argument(
        "--repeat", type=int, default=0, metavar="R", help="of repeated folds (default 0)"
    )
    _add_output_flags(verb)
    text = "predict other samples by the models of all folds of a candidate"
    verb = verbs.add_parser(
        "predict",
        help=text,
        description=f"{_sentence(text)} {PREDICT_HELP}",
        epilog=EXIT_CODES,
    )
    _add_prediction_flags(verb)
    _add_output_flags(verb)
    text = "say whether two runs are the same, bit for bit, and where they first differ"
    verb = verbs.add_parser("compare", help=text, description=_sentence(text), epilog=EXIT_CODES)
    verb.add_argument("directory", metavar="A", help="the folder of one run")
    verb.add_argument("other", metavar="B", help="the folder of the other")
    _add_output_flags(verb)
    text = "say what this machine offers, and what would be used and why"
    verb = verbs.add_parser("doctor", help=text, description=_sentence(text), epilog=EXIT_CODES)
    _add_jobs_flag(verb)
    _add_sharing_flags(verb)
    _add_output_flags(verb)
    text = "measure asynckfold on this machine, and print the table"
    verb = verbs.add_parser("bench", help=text, description=_sentence(text), epilog=EXIT_CODES)
    verb.add_argument(
        "subject",
        choices=SUBJECTS,
        help="checkpoints: their share of a run's time; crowd: a step of several threads beside "
        "processes that always compute; formats: a step of convolutional models in "
        "both memory formats; fusion: a step of several jobs as one "
        "against one after another; nodes: one model on nodes of several tasks, workers against "
        "time; packing: one sweep in four ways; place: the time of a "
        "decision, by the number of pending jobs; speed: a DataLoader loop, the best serial loop "
        "and asynckfold, unfused and as it comes, warm and cold; trainers: one model on all "
        "cores, by each of them; use: of the cores, and a job's overhead",
    )
    verb.add_argument("--quick", action="store_true", help="seconds instead of minutes; rough")
    verb.add_argument("--save", metavar="FILE.md", help="write the table as a page, too")
    verb.add_argument(
        "--data",
        metavar="DIR",
        help="nodes, speed and trainers only: where torchvision keeps MNIST and CIFAR-10 (or "
        "train/CLASS/*.jpg for the latter); generated samples of the same shapes, or digits, "
        "without it",
    )
    verb.add_argument(
        "--peers",
        action="store_true",
        help="speed only: also skorch with scikit-learn's grid search, and Ray, where installed",
    )
    _add_output_flags(verb)
    text = "place a large random sweep in virtual time, and print how near to perfect that comes"
    verb = verbs.add_parser(
        "simulate",
        help=text,
        description=f"{_sentence(text)} {SIMULATE_HELP}",
        epilog=EXIT_CODES,
    )
    _add_simulation_flags(verb)
    _add_output_flags(verb)
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
        f"all flags: asynckfold {verb} --help"
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _default(name: str) -> str:
    return f" (default {DEFAULTS[name]})"


def _add_candidate(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("directory", metavar="DIR", help="the run's folder")
    verb.add_argument(
        "candidate",
        metavar="CANDIDATE",
        nargs="?",
        help="model/LR schedule, such as lenet5/cosine (default: the best)",
    )


def _add_prediction_flags(verb: argparse.ArgumentParser) -> None:
    _add_candidate(verb)
    verb.add_argument(
        "--data",
        metavar="SOURCE",
        required=True,
        help="the samples: as for run, but labels may be missing (the column of a csv, y of an "
        "npz, the folders of classes)",
    )
    verb.add_argument(
        "--to",
        metavar="FILE",
        required=True,
        help="a new file: .csv (sample, prediction, probability, p_CLASS …) or .npz",
    )
    verb.add_argument(
        "--refit",
        action="store_true",
        help="by the model that run --refit trained on all samples, in place of those of the folds",
    )
    add_source_flags(verb, "that of the run, if it is there")
    verb.add_argument(
        "--sweep",
        dest="file",
        metavar="SWEEP.py",
        help="the file that defines the run's dataset and models, where one did",
    )
    verb.add_argument(
        "--models",
        metavar="A,B",
        help="the --models of the run, where it has pkg.mod:Name",
    )


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


def _add_model_flags(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("candidates")
    group.add_argument(
        "--models",
        metavar="A,B",
        help="mlp, dbn, lenet, lenet5, alexnet, mobilenet, vgg11, vgg13, vgg16, vgg19, or "
        "pkg.mod:Name" + _default("models"),
    )
    group.add_argument(
        "--schedulers",
        metavar="A,B",
        help="constant, cosine, exponential, multistep, onecycle, reduce, step, warm"
        + _default("schedulers"),
    )
    group.add_argument(
        "--optimizer",
        metavar="NAME",
        help="adam, adamw, sgd, rmsprop, adagrad, adadelta, nadam, radam, adamax"
        + _default("optimizer"),
    )
    group.add_argument("--lr", type=float, metavar="X", help="learning rate" + _default("lr"))
    group.add_argument(
        "--momentum", type=float, metavar="X", help="of sgd and rmsprop" + _default("momentum")
    )
    group.add_argument(
        "--weight-decay",
        type=float,
        metavar="X",
        help="L2 penalty of the weights" + _default("weight_decay"),
    )


def _add_training_flags(verb: argparse.ArgumentParser, alone: bool) -> None:
    group = verb.add_argument_group("training")
    if alone:
        verb.set_defaults(folds=None, repeats=None, no_stratify=False, baseline="none", refit=None)
        group.add_argument(
            "--held-out",
            type=float,
            metavar="X",
            default=HELD_OUT,
            help=f"share of the samples that is not trained on but scored (default {HELD_OUT})",
        )
    else:
        _add_fold_flags(group)
        group.add_argument(
            "--refit",
            action="store_true",
            default=None,
            help="then train the best candidate on all samples, below DIR/refit; export writes its "
            "weights with --fold all",
        )
    group.add_argument(
        "--epochs", type=int, metavar="N", help="passes over the data" + _default("epochs")
    )
    group.add_argument(
        "--batch-size", type=int, metavar="N", help="samples per step" + _default("batch_size")
    )
    group.add_argument(
        "--lr-step", choices=("epoch", "batch"), help="when LR schedules step" + _default("lr_step")
    )
    group.add_argument("--clip-grad-norm", type=float, metavar="X", help="largest gradient norm")
    group.add_argument(
        "--trainer",
        choices=TRAINERS,
        help="how one job is trained; by several processes that update one shared model without "
        "locks (hogwild), add up the gradients of their parts of each batch (allreduce), train "
        "clones that are averaged (averaging), or replicas that push to a parameter server and "
        "fetch from it (parameter_server)" + _default("trainer"),
    )
    group.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="processes of a job, a core each" + _default("processes"),
    )
    group.add_argument(
        "--shared-state",
        action="store_true",
        default=None,
        help="hogwild: let the processes of a job share what the optimizer keeps, too",
    )
    group.add_argument(
        "--steps-per-round",
        type=int,
        metavar="N",
        help="averaging: steps of each process between two averages (default 16)",
    )
    group.add_argument(
        "--partition-size",
        type=_by_kind,
        metavar="N",
        help="averaging: samples of a process's part of the training fold in an epoch; greater "
        "parts overlap (default: equal parts of all samples); with cpu=1000,gpu=8000 the last "
        "process of each job computes on a GPU",
    )
    group.add_argument(
        "--epochs-per-round",
        type=_by_kind,
        metavar="N",
        help="averaging: average after so many passes of each process over its part, which is an "
        "epoch, in place of --steps-per-round; by kind of process such as cpu=1,gpu=3, as "
        "--partition-size",
    )
    group.add_argument(
        "--accumulate",
        type=int,
        metavar="N",
        help="hogwild, parameter_server: batches of a process whose gradients are one step "
        "(default 1)",
    )
    group.add_argument(
        "--n-push",
        type=int,
        metavar="N",
        help="parameter_server: steps of a replica between two pushes (default 1)",
    )
    group.add_argument(
        "--n-pull",
        type=int,
        metavar="N",
        help="parameter_server: steps of a replica between two fetches (default 1)",
    )
    group.add_argument(
        "--staleness-aware",
        action="store_true",
        default=None,
        help="parameter_server: a push counts the less, the more pushes of others came between",
    )
    group.add_argument(
        "--precision",
        choices=WORDS["precision"],
        help="what models compute in; bf16: bfloat16 by autocast, with 2 to 3 digits, faster where "
        "the processor has instructions for it, and many times slower elsewhere"
        + _default("precision"),
    )
    group.add_argument(
        "--memory-format",
        choices=WORDS["memory_format"],
        help="how images lie in memory; auto: channels last where a rule over the convolutions "
        "says that it pays; changes bits, so part of the plan" + _default("memory_format"),
    )
    group.add_argument(
        "--compile",
        action="store_true",
        default=None,
        help="compile models by torch.compile, which takes seconds a job; refused before the start "
        "where a model cannot be compiled",
    )
    group.add_argument("--seed", type=int, metavar="N", help="root of all seeds" + _default("seed"))
    group.add_argument(
        "--scoring",
        metavar="A,B",
        help="scikit-learn scorers, such as accuracy,f1_macro; the first ranks (default accuracy)",
    )
    group.add_argument(
        "--pos-label",
        metavar="CLASS",
        help="the class that scores such as f1 take for positive (default: class 1)",
    )


def _add_fold_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument("--folds", type=int, metavar="K", help="number of folds" + _default("folds"))
    group.add_argument(
        "--repeats", type=int, metavar="N", help="divide so often anew" + _default("repeats")
    )
    group.add_argument(
        "--no-stratify",
        action="store_true",
        help="do not keep the class proportions in each fold",
    )


def _add_running_flags(verb: argparse.ArgumentParser, root_required: bool) -> None:
    group = verb.add_argument_group("running")
    group.add_argument(
        "--root",
        metavar="DIR",
        required=root_required,
        default=None if root_required else "runs/plan",
        help="folder of the run",
    )
    _add_jobs_flag(group)
    group.add_argument(
        "--threads-per-job",
        type=_jobs,
        metavar="N",
        help="threads inside a job; changes bits, so part of the plan; auto decides for each "
        "model, and gives its last jobs those that would be idle" + _default("threads_per_job"),
    )
    group.add_argument(
        "--fuse",
        type=_fuse,
        metavar="F",
        help="train jobs of one model as one: auto, yes, no, or how many; changes bits, so part of "
        "the plan" + _default("fuse"),
    )
    group.add_argument(
        "--plan-from",
        metavar="DIR",
        help="take the threads of each model and the groups of jobs from another run",
    )
    group.add_argument(
        "--devices",
        type=_devices,
        metavar="D",
        help="auto, cpu, cuda, or GPU numbers such as 0,1" + _default("devices"),
    )
    group.add_argument(
        "--stall-timeout",
        type=_seconds,
        metavar="S",
        help="seconds without a finished batch after which a worker is killed and its job tried "
        "again; auto, off" + _default("stall_timeout"),
    )
    _add_sharing_flags(group)
    group.add_argument(
        "--max-wait",
        type=_seconds,
        metavar="S",
        help="end, to be continued, when not even one job could start for so many seconds; off: "
        "never (default 3600)",
    )
    group.add_argument(
        "--time-budget",
        type=_seconds,
        metavar="S",
        help="end after so many seconds, with the results so far and exit code 124, to be "
        "continued; off: never (default off)",
    )
    group.add_argument(
        "--job-timeout",
        type=_seconds,
        metavar="S",
        help="a job that has trained for so many seconds saves itself and has failed; the same "
        "command with more, or off, continues it; off: never (default off)",
    )
    group.add_argument(
        "--nice",
        type=int,
        metavar="N",
        help="level of the workers, 0 to 19: the higher, the more others come first (default 0)",
    )
    group.add_argument(
        "--yield-to-others",
        action="store_true",
        default=None,
        help="running jobs move to idle cores or pause where others come to theirs",
    )
    group.add_argument(
        "--baseline",
        choices=("measure", "estimate", "none"),
        help="the serial loop to compare with" + _default("baseline"),
    )
    group.add_argument(
        "--resume",
        choices=("auto", "never", "must"),
        help="what to do with a folder that holds a run: continue it, train all anew and keep it "
        "beside as <root>.earlier-N, or insist on one" + _default("resume"),
    )
    group.add_argument(
        "--save-checkpoint-frequency", type=int, metavar="N", help="epochs between checkpoints"
    )
    _add_software_flag(group)
    group.add_argument("--no-report", action="store_true", help="do not build the HTML report")


def _add_jobs_flag(verb: argparse._ActionsContainer) -> None:
    verb.add_argument(
        "--n-jobs",
        type=_jobs,
        metavar="N",
        help="jobs at a time; -1 all cores, auto what is idle" + _default("n_jobs"),
    )


def _add_sharing_flags(verb: argparse._ActionsContainer) -> None:
    verb.add_argument(
        "--reserve-cores", type=int, metavar="N", help="leave N cores free (default 0)"
    )
    verb.add_argument(
        "--max-memory",
        metavar="M",
        help="what all running jobs may take: a share such as 0.5 or 50%%, or 8GiB (default: all)",
    )
    verb.add_argument(
        "--min-free-memory",
        metavar="M",
        help="start nothing while less memory is free: a share, or 2GiB (default 256MiB)",
    )


def _add_software_flag(verb: argparse._ActionsContainer) -> None:
    verb.add_argument(
        "--allow-different-software",
        action="store_true",
        default=None,
        help="continue a run that was begun with another torch, kind of processor or thread "
        "count; bit-identity is then no longer claimed",
    )


def _add_simulation_flags(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("sweep and machine")
    for name, value, text in (
        ("jobs", 10_000, "number of jobs"),
        ("cores", 64, "number of cores"),
        ("gpus", 4, "number of GPUs"),
        ("seed", 0, "of everything that is random"),
    ):
        group.add_argument(
            f"--{name}",
            type=int,
            metavar="N",
            default=value,
            help=f"{text} (default {value})",
        )


def _add_output_flags(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object")


def _add_progress_flags(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("progress")
    group.add_argument(
        "-v", "--verbose", action="count", default=0, help="a line per job; twice: per epoch"
    )
    group.add_argument("-q", "--quiet", action="store_true", help="no progress")


def _jobs(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be auto or a whole number, received {text!r}"
        ) from None


def _fuse(text: str) -> bool | int | str:
    words: dict[str, bool | str] = {"auto": "auto", "yes": True, "no": False}
    if text in words:
        return words[text]
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be auto, yes, no or a whole number, received {text!r}"
        ) from None


def _by_kind(text: str) -> int | dict[str, int]:
    try:
        if "=" not in text:
            return int(text)
        pairs = [word.split("=") for word in text.split(",")]
        found = {kind.strip(): int(number) for kind, number in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a whole number, or one by kind such as cpu=1000,gpu=8000, received {text!r}"
        ) from None
    if len(found) < len(pairs):
        raise argparse.ArgumentTypeError(
            f"must name each kind once, such as cpu=1000,gpu=8000, received {text!r}"
        )
    return found


def _seconds(text: str) -> float | str:
    try:
        return text if text in ("auto", "off") else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be auto, off or a number of seconds, received {text!r}"
        ) from None


def _fold(text: str) -> int | str:
    try:
        return text if text == "all" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be all or a number of a fold, received {text!r}"
        ) from None


def _devices(text: str) -> str | list[int]:
    if text in ("auto", "cpu", "cuda"):
        return text
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be auto, cpu, cuda, or GPU numbers such as 0,1, received {text!r}"
        ) from None
