"""What a function computes, as text that no harmless edit changes.

::

    def f(x):                            LOAD_FAST 0
        # a comment                      LOAD_CONST int:2
        return x * 2        ────────►    BINARY_OP 5
                                         RETURN_VALUE

The loaded code is read, not its source: a file may have changed since its import, and lambdas of a
console have none. Left out are line numbers, file names, docstrings, names of local variables, the
order of blocks and the interpreter's specialisations. Code is followed as it would run.

Bytecode differs between versions of Python; `PYTHON` names the version.
"""

from __future__ import annotations

import dis
import hashlib
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

PYTHON = "{}-{}.{}".format(sys.implementation.name, *sys.version_info[:2]) + (
    "-O" if sys.flags.optimize else ""
)
"""Of which Python the forms are; with ``-O`` the asserts are gone."""

_IDLE = {"NOP", "CACHE", "RESUME", "EXTENDED_ARG", "PRECALL"}
_JUMPS = {
    *("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP"),
    "JUMP_NO_INTERRUPT",
}
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_OR_POP = {"JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP"}
_DECIDING = {*_OR_POP, "POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE"}
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


@dataclass(frozen=True)
class Use:
    """What a function reads and changes, including functions defined inside it.

    Reads pair a name with the attributes or items taken in a row: ``(".models", ".width")``,
    ``("['lr']",)``.
    """

    reads: tuple[tuple[str, tuple[str, ...]], ...]  # globals, sorted
    free: tuple[tuple[str, tuple[str, ...]], ...]  # closure variables
    imports: tuple[tuple[str, int], ...]  # (module, level of a relative import), sorted
    changes: frozenset[str]  # globals and closure variables that it assigns or mutates
    attributes: frozenset[str]  # of its first argument that it assigns or mutates
    methods: frozenset[str]  # attributes of its first argument that it reads
    passes: bool  # it uses its first argument otherwise, so others may read more of it

    def chains(self, name: str) -> list[tuple[str, ...]]:
        """Return what is read of a variable, each time."""
        return [chain for known, chain in (*self.reads, *self.free) if known == name]


@lru_cache(maxsize=4096)
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
    return "\n".join([repr(head), *_lines(code)])


def _lines(code: CodeType) -> Iterator[str]:
    steps = _Steps(code)
    order = list(steps.order())
    labels = {place: number for number, place in enumerate(order) if place >= 0}
    for number, place in enumerate(order):
        if place < 0:
            yield f"goto {labels[-1 - place]}"
            continue
        name, target = steps.jump(place)
        text = steps.argument(steps.kept[place]) if target is None else f"to {labels[target]}"
        handler = steps.handler(place)
        caught = "" if handler is None else f" caught {labels[handler]}"
        yield f"{number} {name} {text}{caught}"


class _Steps:
    """The instructions of a code object, in the order in which they are reached."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        found = [step for step in dis.get_instructions(code) if step.opname not in _IDLE]
        self.kept = list(_without_labels(found))
        self.locals = {name: place for place, name in enumerate(code.co_varnames)}
        offsets = [step.offset for step in self.kept]
        self.places = {}
        place = 0
        for offset in range(len(code.co_code) + 1):
            # What was left out stands for what comes after it.
            while place < len(offsets) and offsets[place] < offset:
                place += 1
            self.places[offset] = place
        table = getattr(dis.Bytecode(code), "exception_entries", ())
        self.caught: dict[int, int] = {}
        for entry in table:
            for offset in range(entry.start, entry.end):
                self.caught[offset] = entry.target

    def order(self) -> Iterator[int]:
        """Yield positions as they are reached; -1 - position for a jump back."""
        seen: set[int] = set()
        starts = deque([0])
        while starts:
            place = self.thread(starts.popleft())
            if place in seen:
                continue
            while place < len(self.kept):
                if place in seen:
                    yield -1 - place
                    break
                seen.add(place)
                yield place
                for other in (self.jump(place)[1], self.handler(place)):
                    if other is not None:
                        starts.append(other)
                if self.kept[place].opname in _ENDS:
                    break
                place = self.thread(place + 1)

    def thread(self, place: int) -> int:
        """Follow unconditional jumps from a position."""
        passed = set()
        while place < len(self.kept) and self.kept[place].opname in _JUMPS:
            if place in passed:
                break  # a loop without content
            passed.add(place)
            place = self.places[int(self.kept[place].argval)]
        return place

    def jump(self, place: int) -> tuple[str, int | None]:
        """Return the name of an instruction, and its target if it jumps.

        A conditional jump to another one on the same value goes where both together go, as
        compilers do, except across lines.
        """
        step = self.kept[place]
        name = _plain(step.opname)
        if step.opcode not in dis.hasjrel and step.opcode not in dis.hasjabs:
            return name, None
        if step.opname in _JUMPS:
            return name, place  # a loop without content
        target = self.thread(self.places[int(step.argval)])
        for _ in self.kept:
            met = self.kept[target] if target < len(self.kept) else step
            if name not in _OR_POP or _plain(met.opname) not in _DECIDING:
                break
            beyond = self.thread(self.places[int(met.argval)])
            alike = ("TRUE" in name) == ("TRUE" in met.opname)
            if not (alike and _plain(met.opname) == name):
                name = "POP_" + name.removesuffix("_OR_POP")
            target = beyond if alike else self.thread(target + 1)
        return name, target

    def handler(self, place: int) -> int | None:
        """Return the position of the exception handler."""
        offset = self.caught.get(self.kept[place].offset)
        return None if offset is None else self.thread(self.places[offset])

    def argument(self, step: dis.Instruction) -> str:
        """Return the argument of an instruction, without table indices."""
        if step.arg is None:
            return ""
        if step.opname == "KW_NAMES":
            return constant(self.code.co_consts[step.arg])
        if step.opcode in dis.hasconst:
            return constant(step.argval)
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if "FAST" in step.opname and all(name in self.locals for name in names):
            return " ".join(str(self.locals[name]) for name in names)
        known = (*dis.hasname, *dis.hasfree, *dis.haslocal, *dis.hascompare)
        return str(step.argval) if step.opcode in known else str(step.arg)


def _plain(name: str) -> str:
    return name.replace("_FORWARD_", "_").replace("_BACKWARD_", "_")


def _without_labels(steps: list[dis.Instruction]) -> Iterator[dis.Instruction]:
    """Leave out where a class body stores its docstring and location."""
    skip = False
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if skip:
            skip = False
        elif (
            after is not None
            and step.opname.startswith("LOAD_")
            and after.opname == "STORE_NAME"
            and after.argval in _LABELS
        ):
            skip = True
        elif not (
            # Up to Python 3.10, the qualified name of a function that is made.
            after is not None
            and after.opname == "MAKE_FUNCTION"
            and step.opname == "LOAD_CONST"
            and isinstance(step.argval, str)
        ):
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


@lru_cache(maxsize=4096)
def use(code: CodeType) -> Use:
    """Return what a function reads and changes."""
    reads: set[tuple[str, tuple[str, ...]]] = set()
    inner_reads: set[tuple[str, tuple[str, ...]]] = set()
    imports: set[tuple[str, int]] = set()
    changes: set[str] = set()
    attributes: set[str] = set()
    methods: set[str] = set()
    passes = False
    free = set(code.co_freevars)
    first = code.co_varnames[0] if code.co_argcount else None
    steps = [step for step in dis.get_instructions(code) if step.opname not in _IDLE]
    for names in _filled(code):
        if names[0] == first and len(names) == 2:
            attributes.add(names[1])
        elif len(names) == 1:
            changes.add(names[0])
    for place, step in enumerate(steps):
        name = step.argval
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name not in _PLACE:
            reads.add((name, tuple(_taken(steps, place + 1))))
        if step.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            inner_reads.add((name, tuple(_taken(steps, place + 1))))
        if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
            if _is_changed(steps, place + 1):
                changes.add(name)
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
            step.opname == "STORE_DEREF" and name in free
        ):
            changes.add(name)
        elif step.opname == "IMPORT_NAME":
            level = steps[place - 2].argval if place > 1 else 0
            imports.add((name, level if isinstance(level, int) else 0))
        elif step.opname in ("LOAD_FAST", "LOAD_FAST_BORROW") and name == first:
            after, *later = [*steps[place + 1 : place + 3], step]
            if after.opname in ("STORE_ATTR", "DELETE_ATTR"):
                attributes.add(after.argval)
            elif after.opname in ("COPY", "DUP_TOP") and later[0].opname == "LOAD_ATTR":
                attributes.add(later[0].argval)  # self.seen += 1
                methods.add(later[0].argval)
            elif after.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                methods.add(after.argval)
                if _is_changed(steps, place + 2):
                    attributes.add(after.argval)
            else:
                passes = True
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found = use(inner)
            reads.update(found.reads)
            inner_reads.update(found.free)
            imports.update(found.imports)
            changes.update(found.changes - set(inner.co_cellvars))
    for name, chain in inner_reads:
        # Where a comprehension or an inner function uses it, too.
        if name == first and chain and chain[0].startswith("."):
            methods.add(chain[0][1:])
        elif name == first:
            passes = True
    passes = passes or any(name == "super" for name, _ in reads)
    return Use(
        tuple(sorted(reads)),
        tuple(sorted(inner_reads)),
        tuple(sorted(imports)),
        frozenset(changes),
        frozenset(attributes),
        frozenset(methods),
        passes,
    )


def _taken(steps: list[dis.Instruction], place: int) -> Iterator[str]:
    """Yield the attributes, or items by text, that are taken in a row."""
    while place < len(steps):
        step, after = steps[place], steps[place + 1 : place + 2]
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield f".{step.argval}"
            place += 1
        elif (
            step.opname == "LOAD_CONST"
            and isinstance(step.argval, str)
            and after
            and (after[0].opname == "BINARY_SUBSCR" or after[0].argrepr == "[]")
        ):
            yield f"[{step.argval!r}]"
            place += 2
        else:
            return


def _is_changed(steps: list[dis.Instruction], place: int) -> bool:
    """Whether a mutating method of the loaded container is taken."""
    ahead = steps[place : place + 1]
    return (
        bool(ahead)
        and ahead[0].opname in ("LOAD_ATTR", "LOAD_METHOD")
        and (ahead[0].argval in _CHANGING)
    )


def _filled(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Yield containers to which an item is assigned: a name, or a name and its attribute."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    for place, step in enumerate(steps):
        twice = step.opname == "COPY" and step.arg == 2
        augmented = step.opname == "DUP_TOP_TWO" or (twice and steps[place - 1].opname != "COPY")
        if step.opname not in ("STORE_SUBSCR", "DELETE_SUBSCR") and not augmented:
            continue
        # Backwards over what gave the index.
        height = 0
        while place > 0 and height < 1:
            place -= 1
            found = steps[place]
            height += dis.stack_effect(found.opcode, found.arg, jump=False)
        if height != 1 or place < 1:
            continue
        held, owner = steps[place - 1], steps[max(place - 2, 0)]
        if held.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"):
            yield (str(held.argval),)
        elif held.opname == "LOAD_ATTR" and owner.opname.startswith("LOAD_FAST"):
            yield str(owner.argval), str(held.argval)
