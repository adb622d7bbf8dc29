"""What a function computes, as text that no harmless edit changes; and what it reads and changes.

::

    def f(x):                            LOAD_FAST 0
        # a comment                      LOAD_CONST int:2
        return x * 2        ────────►    BINARY_OP 5
                                         RETURN_VALUE

The loaded code is read, not its source: a file may have changed since its import, and lambdas of a
console have none. Line numbers, file names, docstrings, names of local variables and the
interpreter's specialisations are left out. A few conditions compile to other jumps when they are
spread over several lines, and count as changed.

Bytecode differs between versions of Python; `PYTHON` names the version.
"""

from __future__ import annotations

import bisect
import dis
import functools
import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

PYTHON = "{}-{}.{}".format(sys.implementation.name, *sys.version_info[:2]) + (
    "-O" if sys.flags.optimize else ""
)
"""Python version of these digests; ``-O`` removes asserts."""

_IDLE = {"NOP", "CACHE", "RESUME", "EXTENDED_ARG", "PRECALL"}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_BY_NAME = {*dis.hasname, *dis.hasfree, *dis.hascompare}
_LOCAL = re.compile(r"(?:LOAD|STORE|DELETE)_FAST(?:_(?!LOAD|STORE)[A-Z]+)*")
_LABELS = {"__doc__", "__qualname__", "__firstlineno__", "__static_attributes__", "__module__"}
"""What the body of a class notes of its place."""

_PLACE = {"__name__", "__file__", "__package__", "__spec__", "__builtins__"}
"""Global names that say where code stands."""

_KINDS = 0x04 | 0x08 | 0x20 | 0x80 | 0x200
"""Flags of a function: ``*args``, ``**kwargs``, generator, coroutine, asynchronous generator."""

_CHANGING = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop"),
    *("popitem", "popleft", "remove", "setdefault", "update"),
}
"""Methods by which code changes a container."""

_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_VARIABLE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")


@dataclass(frozen=True)
class Use:
    """What a function reads and changes, including functions defined inside it.

    Reads pair a name with the attributes or items taken in a row: ``(".models", ".width")``,
    ``("['lr']",)``.
    """

    reads: tuple[tuple[str, tuple[str, ...]], ...]  # globals and closure variables, sorted
    imports: tuple[str, ...]  # modules, and what is taken from them, sorted
    changes: frozenset[str]  # globals and closure variables that it assigns or mutates
    attributes: frozenset[str]  # those that it assigns or mutates, of whatever object
    names: frozenset[str]  # all names of globals and attributes
    passes: bool  # it hands its first argument on, so others may read more of it

    def chains(self, name: str) -> list[tuple[str, ...]]:
        """Return what is read of a variable, each time."""
        return [chain for variable, chain in self.reads if variable == name]


@functools.lru_cache(maxsize=4096)
def digest(code: CodeType) -> str:
    """Return the shortened SHA-256 of the form of a code object.

    >>> one, same, other = (digest(f.__code__) for f in (
    ...     lambda x: x + 1, lambda x: (x + 1), lambda x: x + 2))
    >>> one == same, one == other
    (True, False)
    >>> lines = [compile(text, "", "exec") for text in ("a = 1 # one", "\\n\\na = (1)")]
    >>> digest(lines[0]) == digest(lines[1])
    True
    """
    return hashlib.sha256(form(code).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def is_rewritten(code: CodeType) -> bool:
    """Whether pytest has rewritten asserts in a function."""
    inner = (value for value in code.co_consts if isinstance(value, CodeType))
    return "@pytest_ar" in code.co_names or any(map(is_rewritten, inner))


def form(code: CodeType) -> str:
    """Return the form of a code object as text."""
    count = code.co_argcount + code.co_kwonlyargcount
    head = (
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags & _KINDS,
        code.co_varnames[:count],
    )
    steps = [step for step in _steps(code) if step.opname not in _IDLE]
    places = functools.partial(bisect.bisect_left, [step.offset for step in steps])
    lines = [(step.opname, _argument(code, step, places, at)) for at, step in enumerate(steps)]
    # A class body stores its docstring and location in two instructions each.
    labels = [at for at, step in enumerate(steps) if step.opname == "STORE_NAME"]
    dropped = {at - less for at in labels if steps[at].argval in _LABELS for less in (0, 1)}
    tries = [
        ("try", *map(places, (entry.start, entry.end, entry.target)), entry.depth)
        for entry in getattr(dis.Bytecode(code), "exception_entries", ())
    ]
    kept = [line for at, line in enumerate(lines) if at not in dropped]
    return "\n".join(map(repr, (head, *kept, *tries)))


def _argument(code: CodeType, step: dis.Instruction, places: Any, at: int) -> object:
    """Return an argument: jumps by distance, constants with their type, locals by number."""
    if step.opcode in _JUMPS:
        return places(step.argval) - at
    if step.opcode in dis.hasconst or step.opname == "KW_NAMES":
        return constant(code.co_consts[step.arg or 0])
    if step.opcode in dis.haslocal:
        named = step.argval in code.co_varnames
        return code.co_varnames.index(step.argval) if named else step.argval
    return step.argval if step.opcode in _BY_NAME else step.arg


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    for step in dis.get_instructions(code):
        if isinstance(step.argval, tuple) and step.opcode in dis.haslocal:
            # Python 3.13 joins two loads where they stand in one line.
            for name, variable in zip(_LOCAL.findall(step.opname), step.argval, strict=True):
                yield step._replace(opname=name, opcode=dis.opmap[name], argval=variable)
        elif step.opname != "CACHE":
            yield step


def constant(value: Any) -> str:
    """Return a constant of a code object as text, with its type.

    >>> constant((1, True, 1.0, frozenset({"b", "a"})))
    "(int:1, bool:True, float:1.0, {str:'a', str:'b'})"
    """
    if isinstance(value, CodeType):
        return f"<{digest(value)}>"
    if isinstance(value, tuple):
        return f"({', '.join(map(constant, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(constant, value)))}}}"
    return f"{type(value).__name__}:{value!r}"


@functools.lru_cache(maxsize=4096)
def use(code: CodeType) -> Use:
    """Return what a function reads and changes."""
    inner = [use(value) for value in code.co_consts if isinstance(value, CodeType)]
    hidden = {*code.co_cellvars}
    reads = {pair for used in inner for pair in used.reads if pair[0] not in hidden}
    imports = {name for used in inner for name in used.imports}
    changes = {name for used in inner for name in used.changes} - hidden
    attributes = {name for used in inner for name in used.attributes}
    first = code.co_varnames[0] if code.co_argcount else None
    passes = "super" in code.co_names or any((first, ()) in used.reads for used in inner)
    all_steps = list(_steps(code))
    steps = [step for step in all_steps if step.opname not in _IDLE]
    for place, (step, after) in enumerate(zip(steps, [*steps[1:], steps[-1]], strict=True)):
        name = step.argval
        is_mutated = after.opname in _ATTRIBUTE and after.argval in _CHANGING
        if step.opname in _VARIABLE and name not in _PLACE:
            chain = tuple(_taken(steps, place + 1))
            passes = passes or (name == first and not chain)
            reads.update([(name, chain)] * (name not in hidden))
            changes.update([name] * (is_mutated and name not in hidden))
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
            step.opname == "STORE_DEREF" and name in code.co_freevars
        ):
            changes.add(name)
        elif step.opname in ("STORE_ATTR", "DELETE_ATTR") or (
            step.opname in _ATTRIBUTE and is_mutated
        ):
            attributes.add(name)
        elif step.opname == "IMPORT_NAME":
            level, taken = (item.argval for item in steps[place - 2 : place])
            module = "." * level + name
            imports.add(module or ".")
            imports.update(f"{module}{'.' if name else ''}{item}" for item in taken or ())
        elif step.opname.startswith("LOAD_FAST") and name == first:
            # An augmented assignment copies it first.
            is_taken = after.opname.endswith(("_ATTR", "_METHOD"))
            passes = passes or not (is_taken or after.opname in ("COPY", "DUP_TOP"))
    for held in _filled(all_steps):
        (attributes if held.opname in _ATTRIBUTE else changes).add(str(held.argval))
    return Use(
        tuple(sorted(reads)),
        tuple(sorted(imports)),
        frozenset(changes),
        frozenset(attributes),
        frozenset(code.co_names).union(*(used.names for used in inner)),
        passes,
    )


def _taken(steps: list[dis.Instruction], place: int) -> Iterator[str]:
    """Yield the attributes, or items by text, that are taken in a row."""
    for step, after in zip(steps[place:], [*steps[place + 1 :], steps[-1]], strict=True):
        is_item = after.opname == "BINARY_SUBSCR" or after.argrepr == "[]"
        if step.opname in _ATTRIBUTE:
            yield f".{step.argval}"
        elif step.opname == "LOAD_CONST" and isinstance(step.argval, str) and is_item:
            yield f"[{step.argval!r}]"
        elif step.opname != "BINARY_SUBSCR" and step.argrepr != "[]":
            return


def _filled(steps: list[dis.Instruction]) -> Iterator[dis.Instruction]:
    """Yield what loads containers to which an item is assigned."""
    for place, step in enumerate(steps):
        twice = step.opname == "COPY" and step.arg == 2
        augmented = step.opname == "DUP_TOP_TWO" or (twice and steps[place - 1].opname != "COPY")
        if step.opname not in ("STORE_SUBSCR", "DELETE_SUBSCR") and not augmented:
            continue
        # Backwards over what gave the index.
        height = 0
        while place > 0 and height < 1:
            place -= 1
            earlier = steps[place]
            height += dis.stack_effect(earlier.opcode, earlier.arg, jump=False)
        held = steps[place - 1]
        if height == 1 and place > 0 and held.opname in (*_VARIABLE, "LOAD_ATTR"):
            yield held
