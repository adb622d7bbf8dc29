"""The flags that name samples, and what is said of them."""

from __future__ import annotations

import argparse

from asynckfold.cli.sweep_file import DEFAULTS

_SOURCE = (
    "digits, mnist, fashion-mnist, kmnist, cifar10, folder:PATH (one folder per class), csv:PATH, "
    "or npz:PATH (X, y)"
)


def add_data_flags(verb: argparse.ArgumentParser) -> None:
    """Add what names a sweep file, or samples and what becomes of them."""
    group = verb.add_argument_group("data")
    group.add_argument(
        "file", nargs="?", metavar="SWEEP.py", help="Python file that defines the sweep"
    )
    group.add_argument(
        "--data",
        metavar="SOURCE",
        help=_SOURCE,
    )
    add_source_flags(group, "the last")
    _add_column_flags(group)
    _add_limit(group)
    group.add_argument(
        "--augment", action="store_true", help="random crops and flips on the training view"
    )


def add_source_flags(group: argparse._ActionsContainer, target: str) -> None:
    """Add what a source of data needs to be found and read; `target`: the default column."""
    group.add_argument(
        "--data-root",
        metavar="DIR",
        help="folder of torchvision's collections" + f" (default {DEFAULTS['data_root']})",
    )
    group.add_argument(
        "--download", action="store_true", help="let torchvision fetch what is missing"
    )
    group.add_argument(
        "--target",
        metavar="COLUMN",
        help=f"csv: column of the labels by name or position; {target}",
    )
    group.add_argument(
        "--header", choices=("auto", "yes", "no"), help="csv: whether the first row names columns"
    )


def _add_column_flags(group: argparse._ActionsContainer) -> None:
    for flag, text in (
        ("--drop", "leave these out"),
        ("--keep", "use these though they seem to number or to identify the rows"),
        ("--category", "these hold names, one feature each, even where they are numbers"),
    ):
        group.add_argument(
            flag, metavar="COLUMNS", help=f"csv and npz: {text}; names or positions between commas"
        )


def _add_limit(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--limit", type=int, metavar="N", help="use N samples only, classes balanced"
    )


def add_inspection_flags(verb: argparse.ArgumentParser) -> None:
    """Add what the verb ``data`` takes."""
    verb.add_argument("source", metavar="SOURCE", help=_SOURCE)
    add_source_flags(verb, "the last")
    _add_column_flags(verb)
    _add_limit(verb)
    verb.add_argument(
        "--seed", type=int, metavar="N", help=f"of --limit (default {DEFAULTS['seed']})"
    )
