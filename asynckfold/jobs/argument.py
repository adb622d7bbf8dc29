"""What an argument is: name, type, default, bounds, help and group, declared once.

::

    class Settings:                                   a frozen dataclass
        \"\"\"...
        n_repeats : int                               ← name, help and reference
            Repeat the folds with different shuffles.
        \"\"\"
        n_repeats: int = argument(1, group="data", least=1)    ← type, default, bounds, group

    arguments(Settings)["n_repeats"]  →  validation, the flag --n-repeats and its help,
                                         the keys of a sweep file, the reference page
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, cached_property
from inspect import cleandoc, signature
from textwrap import indent
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from asynckfold.errors import Problem, nearest

GROUPS = ("data", "candidates", "training", "machine", "output", "advanced")
"""The groups of ``--help-all`` and of the reference page, in their order."""


@dataclass(frozen=True)
class Argument:
    """One argument. Name, types and texts are those of its field; `argument` sets the rest."""

    group: str  # one of `GROUPS`
    # bounds of a number: inclusive, inclusive, exclusive, exclusive
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    unit: str = ""  # of a number, or what a list holds: "seconds", "GPU numbers"
    # the flag without dashes; None derives it from the name, "" leaves it out
    spelled: str | None = None
    metavar: str = ""  # of the value in the help, where the type does not say enough
    # text of the flag → value, where the type does not say how to read it
    reads: Callable[[str], Any] | None = None
    none: str = "off"  # how the shell spells None; empty: None only means that nothing was given
    fallback: Any = None  # default of the flag where the argument itself has none
    is_common: bool = False  # the first screen of the help shows the flag
    trainers: tuple[str, ...] = ()  # the only ones that it applies to; empty for all
    remedy: str = ""  # for a wrong value, where more can be said than the default
    has_own_check: bool = False  # the rule is written out elsewhere
    default: Any = None  # `dataclasses.MISSING` where it must be given
    name: str = ""
    types: tuple[Any, ...] = ()  # the alternatives of the annotation
    typed: str = ""  # type in the docstring
    text: str = ""  # paragraph in the docstring

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words that it takes."""
        literals = (item for item in self.types if get_origin(item) is Literal)
        return tuple(word for item in literals for word in get_args(item))

    @property
    def is_checked(self) -> bool:
        """Whether its type and bounds say which values are right."""
        return self.is_plain and not self.has_own_check

    @cached_property
    def is_plain(self) -> bool:
        """Whether it takes numbers, words, yes and no only."""
        return all(
            item in (int, float, bool, NoneType) or get_origin(item) in (Literal, Sequence)
            for item in self.types
        )

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value: off, or on; Python code may also pass a text."""
        is_off = (self.spelled or "").startswith("no-")
        return is_off or self.types == (bool,) or (bool in self.types and str in self.types)

    @property
    def sentence(self) -> str:
        """The first sentence of its text, without the full stop."""
        return re.split(r"\.(?:\s+(?=[^a-z0-9])|$)", " ".join(self.text.split()), maxsplit=1)[0]

    @cached_property
    def flag(self) -> str:
        """The flag without dashes; empty where there is none."""
        if self.spelled is not None:
            return self.spelled
        readable = self.reads or self.is_plain or str in self.types
        return self.name.replace("_", "-") if readable else ""

    @property
    def shell_default(self) -> Any:
        """What the flag means when it is left out."""
        return self.fallback if self.default is MISSING else self.default

    @property
    def rule(self) -> str:
        """Which values are right: ``"a whole number of at least 1, or 'auto'"``."""
        several = f"a list of {' and '.join([self.unit, *map(repr, self.listed)])}"
        first = [self._number] if self._number else [several] * self.takes_lists
        words = [repr(word) for word in self.words]
        words = ["True", "False"] * (bool in self.types) + words
        words += ["None"] * (NoneType in self.types and bool(self.none))
        if len(self.words) > 1 or not (first or bool in self.types):
            return ", or ".join([f"one of {', '.join(words)}", *first])
        parts = [*first, *words]
        if len(parts) == 2 and first:
            return ", or ".join(parts)
        return " or ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))

    @property
    def _number(self) -> str:
        if int not in self.types and float not in self.types:
            return ""
        kind = "a number" if float in self.types else "a whole number"
        text = f"{kind} of {self.unit}" if self.unit else kind
        if self.least is not None and self.most is not None:
            return f"{text} from {self.least} to {self.most}"
        bounds = {" of at least": self.least, " above": self.above, " and below": self.below}
        return text + "".join(f"{word} {at}" for word, at in bounds.items() if at is not None)

    @property
    def takes_lists(self) -> bool:
        """Whether a list of numbers is right."""
        return any(get_origin(item) is Sequence for item in self.types)

    @cached_property
    def listed(self) -> tuple[str, ...]:
        """The words that a list may hold beside numbers."""
        lists = (item for item in self.types if get_origin(item) is Sequence)
        inner = (part for item in lists for kind in get_args(item) for part in _alternatives(kind))
        return tuple(word for part in inner for word in get_args(part))

    def problem(self, value: object, name: str = "") -> Problem | None:
        """Return what is wrong with a value, or None."""
        if self._accepts(value):
            return None
        rule = f"{name or self.name} must be {self.rule}"
        return Problem(rule, one_line(value), self._remedy(value))

    def _accepts(self, value: object) -> bool:
        if value is None or isinstance(value, bool):
            return type(value) in self.types
        if isinstance(value, str):
            return value in self.words
        if isinstance(value, Sequence):
            return self.takes_lists and all(
                type(item) is int or item in self.listed for item in value
            )
        is_number = isinstance(value, float) and float in self.types
        if not is_number and not (isinstance(value, int) and {int, float} & {*self.types}):
            return False
        bounds = (self.least, self.most, self.above, self.below)
        return bounds == (None,) * 4 or (
            (self.least is None or value >= self.least)  # type: ignore[operator]
            and (self.most is None or value <= self.most)  # type: ignore[operator]
            and (self.above is None or value > self.above)  # type: ignore[operator]
            and value < (math.inf if self.below is None else self.below)  # type: ignore[operator]
        )

    def _remedy(self, value: object) -> str:
        guess = nearest(value, self.words).strip() if isinstance(value, str) else ""
        if guess or self.remedy:
            return guess or self.remedy
        if self._number and self.least is not None:
            return f"Pass {self.name}={self.least} or more."
        default = "" if self.default is MISSING else f" for its default, {self.default!r}"
        return f"Leave {self.name} out{default}."

    def _items(self, text: str) -> list[int | str]:
        return [word if word in self.listed else int(word) for word in text.split(",")]

    def read(self, text: str) -> Any:
        """Return what the text of a flag means; the word for None stays a word.

        Raises
        ------
        ValueError
            It says what the flag takes.
        """
        if self.reads:
            return self.reads(text)
        words: dict[str, Any] = {word: word for word in self.words}
        if bool in self.types:
            words |= {"yes": True, "no": False}
        if NoneType in self.types and self.none:
            words |= {self.none: self.none}
        if text in words:
            return words[text]
        types = [get_origin(item) or item for item in self.types]
        readers: dict[Any, Any] = {int: int, float: float, Sequence: self._items, str: str}
        for reads in (reads for kind, reads in readers.items() if kind in types):
            with suppress(ValueError):
                return reads(text)
        raise ValueError(f"must be {self.rule}")


def argument(default: Any = MISSING, *, factory: Any = MISSING, **words: Any) -> Any:
    """Declare a field of a dataclass as an argument; `words` are fields of `Argument`."""
    metadata = {"argument": Argument(**words)}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def arguments(cls: type) -> Mapping[str, Argument]:
    """Return the arguments that a dataclass declares, by name."""
    return _arguments(cast("Any", cls))


@cache
def _arguments(cls: Any) -> Mapping[str, Argument]:
    # Python 3.10 takes the marker KW_ONLY for a type that it cannot evaluate.
    hints = get_type_hints(cls, localns={"KW_ONLY": object})
    texts = paragraphs(cls)
    declared = {item.name: item for item in fields(cls) if "argument" in item.metadata}
    declared_arguments = {}
    # In the order of the signature: keywords of base classes come after what has a place.
    for name in filter(declared.__contains__, signature(cls).parameters):
        typed, text = texts.get(name, ("", ""))
        declared_arguments[name] = replace(
            declared[name].metadata["argument"],
            name=name,
            types=_alternatives(hints[name]),
            default=declared[name].default,
            typed=typed,
            text=text,
        )
    return declared_arguments


def paragraphs(cls: type) -> dict[str, tuple[str, str]]:
    """Return type and text of each parameter in the docstrings of a class and its bases."""
    texts: dict[str, tuple[str, str]] = {}
    for base in reversed(cls.__mro__):
        _, _, section = cleandoc(base.__dict__.get("__doc__") or "").partition(HEADING)
        section = re.split(r"\n\n(?=\w+\n-+\n)", section)[0]
        pattern = r"^(\S[^\n]*?) : ([^\n]*)\n((?:    [^\n]*\n?|\n)*)"
        for names, typed, text in re.findall(pattern, section, re.MULTILINE):
            texts |= {name: (typed, cleandoc(text)) for name in names.split(", ")}
    return texts


def with_parameters(doc: str | None, cls: type) -> str:
    """Return a docstring with the parameters that a dataclass declares, before what it raises."""
    shown = (
        f"{name} : {item.typed}\n{indent(item.text, '    ')}"
        for name, item in arguments(cls).items()
    )
    before, raises, rest = cleandoc(doc or "").partition("Raises\n------\n")
    return "".join([before, HEADING, "\n".join(shown), "\n\n" * bool(raises), raises, rest])


HEADING = "Parameters\n----------\n"


def problems(value: Any) -> Iterator[Problem]:
    """Yield what is wrong with the arguments of a dataclass, each looked at by itself."""
    for name, item in arguments(type(value)).items():
        problem = item.problem(getattr(value, name)) if item.is_checked else None
        if problem is not None:
            yield problem


def plain(value: Any) -> Any:
    """A NumPy number as Python's own, which JSON can hold; everything else as it is."""
    # Without NumPy imported, no value is one of its numbers.
    generic = getattr(sys.modules.get("numpy"), "generic", ())
    return value.item() if isinstance(value, generic) else value


def one_line(value: Any, most: int = 200) -> str:
    """Return a value or an exception on one line, shortened."""
    text = " ".join((str(value) if isinstance(value, Exception) else repr(value)).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
