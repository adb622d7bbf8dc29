"""Which states a disk may be in after the power went, given what a process really did.

The model is that of Pillai et al. (2014), "All File Systems Are Not Created Equal": what was not
fsynced may be lost, kept or torn, each write for itself; a name that was made, changed or removed
is durable only after an fsync of its folder, whatever happened to the file.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SECTOR = 512
DATA = ("write", "truncate")


@dataclass(frozen=True)
class Op:
    """One thing that was done.

    ``kind`` is ``write`` (`inode`, `offset`, `data`), ``truncate`` (`inode`, `offset`), ``sync``
    (`inode`), ``link`` (`folder`, `name` → `inode`), ``unlink``, ``rename`` (`old` → `name`),
    ``sync folder``, or ``acknowledge`` (`data`). A folder's inode is its path.
    """

    kind: str
    inode: str = ""
    folder: str = ""
    name: str = ""
    old: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass
class Recording:
    """Operations of a trace of ``strace -y``, inside one folder and on its own name."""

    root: Path
    ops: list[Op] = field(default_factory=list)
    _inodes: dict[str, str] = field(default_factory=dict)
    _open: dict[str, tuple[str, int]] = field(default_factory=dict)

    def read(self, trace: Path) -> list[Op]:
        """Return what the process did."""
        pattern = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+)(?:<[^>]*>)?", re.DOTALL)
        for line in trace.read_text().splitlines():
            match = pattern.match(line)
            if match and not match[3].startswith("-"):
                act = getattr(self, f"_{match[1]}", None)
                assert act is not None, line
                act(match[2], match[3])
        return self.ops

    def _ours(self, path: str) -> bool:
        return path == str(self.root) or path.startswith(f"{self.root}/")

    def _openat(self, arguments: str, result: str) -> None:
        path = _paths(arguments)[0]
        if path == f"{self.root}.acknowledged":
            self._open[result] = ("acknowledge", 0)
            return
        if not self._ours(path) and path != str(self.root.parent):
            self._open.pop(result, None)
            return
        if "O_CREAT" in arguments and path not in self._inodes:
            self._inodes[path] = f"{path}#{len(self.ops)}"
            self._name("link", path, self._inodes[path])
        self._open[result] = (self._inodes.get(path, path), 0)

    def _mkdir(self, arguments: str, result: str) -> None:
        path = _paths(arguments)[0]
        if self._ours(path):
            self._name("link", path, path)

    _mkdirat = _mkdir

    def _write(self, arguments: str, result: str) -> None:
        descriptor, data = _descriptor(arguments), _strings(arguments)[0]
        inode, position = self._open.get(descriptor, ("", 0))
        if inode == "acknowledge":
            self.ops.append(Op("acknowledge", data=_bytes(data)))
        elif inode:
            written = _bytes(data)[: int(result)]
            self.ops.append(Op("write", inode, offset=position, data=written))
            self._open[descriptor] = (inode, position + len(written))

    def _pwrite64(self, arguments: str, result: str) -> None:
        inode, _ = self._open.get(_descriptor(arguments), ("", 0))
        offset = int(arguments.rsplit(",", 1)[1])
        if inode:
            data = _bytes(_strings(arguments)[0])[: int(result)]
            self.ops.append(Op("write", inode, offset=offset, data=data))

    def _ftruncate(self, arguments: str, result: str) -> None:
        inode, _ = self._open.get(_descriptor(arguments), ("", 0))
        if inode:
            self.ops.append(Op("truncate", inode, offset=int(arguments.rsplit(",", 1)[1])))

    def _fsync(self, arguments: str, result: str) -> None:
        inode, _ = self._open.get(_descriptor(arguments), ("", 0))
        if inode:
            is_file = "#" in inode
            self.ops.append(Op("sync", inode) if is_file else Op("sync folder", folder=inode))

    _fdatasync = _fsync

    def _rename(self, arguments: str, result: str) -> None:
        old, new = _paths(arguments)
        inode = self._inodes.pop(old)
        self._inodes[new] = inode
        folder, _, name = new.rpartition("/")
        assert folder == old.rpartition("/")[0], "a rename between folders"
        self.ops.append(Op("rename", inode, folder, name, old.rpartition("/")[2]))

    _renameat = _renameat2 = _rename

    def _unlink(self, arguments: str, result: str) -> None:
        path = _paths(arguments)[0]
        if self._ours(path):
            self._name("unlink", path, self._inodes.pop(path))

    _unlinkat = _unlink

    def _name(self, kind: str, path: str, inode: str) -> None:
        folder, _, name = path.rpartition("/")
        self.ops.append(Op(kind, inode, folder, name))


def _strings(arguments: str) -> list[str]:
    return re.findall(r'"((?:[^"\\]|\\.)*)"', arguments)


def _paths(arguments: str) -> list[str]:
    """Return the paths in a call, whole: ``-y`` shows the folder that a name is relative to."""
    found = re.findall(r'(?:(?:\d+|AT_FDCWD)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"', arguments)
    return [str(Path(folder, _text(name))) for folder, name in found]


def _bytes(shown: str) -> bytes:
    return shown.encode("latin-1").decode("unicode_escape").encode("latin-1")


def _text(shown: str) -> str:
    return _bytes(shown).decode()


def _descriptor(arguments: str) -> str:
    return re.split(r"[<,)]", arguments, maxsplit=1)[0]


def durable(ops: list[Op]) -> list[bool]:
    """Return which operations certainly survive a power loss after the last of them."""
    synced: set[str] = set()
    found = []
    for op in reversed(ops):
        if op.kind == "sync":
            synced.add(op.inode)
        elif op.kind == "sync folder":
            synced.add(f"{op.folder}/")
        found.append((op.inode if op.kind in DATA else f"{op.folder}/") in synced)
    return found[::-1]


def everything(ops: list[Op], root: Path) -> dict[str, bytes | None]:
    """Return the state in which nothing was lost."""
    return _apply(ops, [True] * len(ops), lambda op: True, None, root)


Survive = Callable[[Op], bool]


def states(
    ops: list[Op], root: Path, seed: int, random_states: int
) -> Iterator[tuple[int, dict[str, bytes | None]]]:
    """Yield (operations done, what is on the disk), each state once for each number of operations.

    For every moment: nothing that may be lost is kept, everything is, only names, only data; and
    so many random choices, in which writes may be torn at a sector's end too.
    """
    generator = random.Random(seed)
    seen: set[int] = set()
    for count in range(1, len(ops) + 1):
        if ops[count - 1].kind == "acknowledge":
            seen = set()
        done = ops[:count]
        sure = durable(done)
        choices: list[Survive] = [
            lambda op: False,
            lambda op: True,
            lambda op: op.kind not in DATA,
            lambda op: op.kind in DATA,
            *[lambda op: generator.random() < 0.5] * random_states,
        ]
        for number, survives in enumerate(choices):
            torn = generator if number > 3 else None
            state = _apply(done, sure, survives, torn, root)
            key = hash(tuple(sorted(state.items())))
            if key not in seen:
                seen.add(key)
                yield count, state


def _apply(
    ops: list[Op], sure: list[bool], survives: Survive, torn: random.Random | None, root: Path
) -> dict[str, bytes | None]:
    """Return the files that can be reached, by path below the root; None is a folder."""
    contents: dict[str, bytearray] = {}
    names: dict[str, dict[str, str]] = {}
    for op, certain in zip(ops, sure, strict=True):
        if not (certain or survives(op)):
            continue
        folder = names.setdefault(op.folder, {})
        if op.kind == "write":
            data = op.data
            if torn is not None and not certain and torn.random() < 0.5:
                data = data[: torn.randrange(0, len(data) + SECTOR, SECTOR)]
            content = contents.setdefault(op.inode, bytearray())
            content.extend(bytes(max(0, op.offset + len(data) - len(content))))
            content[op.offset : op.offset + len(data)] = data
        elif op.kind == "truncate":
            content = contents.setdefault(op.inode, bytearray())
            del content[op.offset :]
        elif op.kind == "link":
            folder[op.name] = op.inode
        elif op.kind == "unlink" and folder.get(op.name) == op.inode:
            del folder[op.name]
        elif op.kind == "rename":
            if folder.get(op.old) == op.inode:
                del folder[op.old]
            folder[op.name] = op.inode
    found: dict[str, bytes | None] = {}
    _walk(str(root.parent), root.name, names, contents, "", found)
    return found


def _walk(
    folder: str,
    name: str,
    names: dict[str, dict[str, str]],
    contents: dict[str, bytearray],
    shown: str,
    found: dict[str, bytes | None],
) -> None:
    inode = names.get(folder, {}).get(name)
    if inode is None:
        return
    if "#" in inode:
        found[shown] = bytes(contents.get(inode, b""))
        return
    found[shown] = None
    for inner in sorted(names.get(inode, {})):
        _walk(inode, inner, names, contents, f"{shown}/{inner}".lstrip("/"), found)


def materialise(state: dict[str, bytes | None], root: Path) -> None:
    """Put a state on a real disk."""
    for shown, content in state.items():
        if content is None:
            (root / shown).mkdir(parents=True, exist_ok=True)
        else:
            (root / shown).write_bytes(content)
