"""Asynchronous SGD with a parameter server: replicas of a model on any number of machines.

::

    replica: the user's loop ─ step ─ step … every n_push ─► sum of lr × gradient ─►┐
                                             every n_pull ◄─ parameters ◄───────────┤ Server
    replica: the user's loop ─ step ─ step …  ◄────────────────────────────────────►┘ (or several,
                                                                                     a part each)

Each replica trains on samples of its own and moves its own copy of the parameters meanwhile; nobody
waits for anybody, so the numbers depend on who was faster. What a replica pushes is the sum, over
its last `n_push` steps, of gradients times the learning rate of their step and parameter group, so
that LR schedules of torch work on a replica as on any optimizer. Buffers (running statistics of
BatchNorm) are no parameters: each replica has its own.

A replica that dies is missed by nobody: what it had not pushed is lost, and another may take its
place at any time. That is why the numbers travel over plain TCP (`asynckfold.training.frames`) and
not over ``torch.distributed``. Measured with its gloo backend (torch 2.15, a timeout of 8 s, kill
-9 of a replica): a server that receives from anybody is not told of the death, and waited the whole
8 s for its last replica; a new process of the same rank could not join (``connectFullMesh failed``,
after 40 s), since all ranks are counted and connected with each other at the start. Here the kernel
tells the server at once, and who comes is welcome.

Whoever can reach the port can change the parameters: listen in a network that you trust.

References
----------
.. [1] Dean et al. (2012). Large scale distributed deep networks. NIPS 25: Downpour SGD, section 4.1
   and the pseudo-code of the appendix.
.. [2] Zhang, Gupta, Lian, Liu (2016). Staleness-aware async-SGD for distributed deep learning.
   IJCAI.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import nn

from asynckfold.errors import PeerLostError, Problem, refuse
from asynckfold.files import write_whole
from asynckfold.training import frames
from asynckfold.training.flattened import Layout

ACCEPT_SECONDS = 0.1
"""Between two looks of a server at whether all replicas have left."""

Floats = npt.NDArray[np.floating[Any]]


def default_address() -> str:
    """Return where a server and its replicas meet that are told nothing: where torchrun says.

    ``MASTER_ADDR`` and ``MASTER_PORT`` of the environment; without them, torch's own port on this
    machine.
    """
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '29500')}"


def _bytes(values: Floats) -> memoryview:
    return values.data.cast("B")


@dataclass(frozen=True)
class Served:
    """What a server did.

    Parameters
    ----------
    replicas : int
        How many came.
    lost : tuple of str
        One line for each that ended without saying so.
    refused : tuple of str
        One line for each that had another model, or was no replica.
    pushes : int
        Updates that were applied.
    mean_staleness, max_staleness : float, int
        Of an update: how many others were applied since its replica fetched the parameters.
    """

    replicas: int
    lost: tuple[str, ...]
    refused: tuple[str, ...]
    pushes: int
    mean_staleness: float
    max_staleness: int


class Server:
    """Holds the parameters of a model, or a part of them, and applies what replicas push.

    It listens from the start; replicas that come are served from `serve` on. The parameters are
    those of the model then, and the model has them again when `serve` returns.

    Parameters
    ----------
    model : nn.Module
        On the CPU; a replica must have parameters of the same names and shapes.
    address : str, optional
        ``"host:port"`` of this machine, port 0 for any that is free; by default ``MASTER_ADDR`` and
        ``MASTER_PORT`` of the environment, else 127.0.0.1:29500.
    shard : (int, int)
        Which of how many parts of the parameters it holds, from 0: ``(1, 3)`` is the second of
        three servers.
    staleness_aware : bool
        Divide the learning rate of a push by its staleness, the number of pushes of others that
        came between its parameters and it [2]_; at least by 1.
    timeout_s : float
        How long it waits, while no replica is there, for one that is expected.

    Attributes
    ----------
    address : str
        Where it listens, ``"host:port"``.

    Raises
    ------
    InputError
        The address is in use or not of this machine, or another argument cannot be.

    References
    ----------
    .. [1] Dean et al. (2012). Large scale distributed deep networks. NIPS 25.
    .. [2] Zhang, Gupta, Lian, Liu (2016). Staleness-aware async-SGD for distributed deep learning.
       IJCAI.

    Examples
    --------
    >>> with Server(nn.Linear(2, 1), address="127.0.0.1:0") as server:
    ...     server.address.startswith("127.0.0.1:")
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        address: str | None = None,
        shard: tuple[int, int] = (0, 1),
        staleness_aware: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        self._layout = Layout.of(model)
        refuse([*_shard_problems(shard, self._layout.total), *_timeout_problems(timeout_s)])
        self.model, self.shard, self.staleness_aware = model, shard, staleness_aware
        self.timeout_s = timeout_s
        self._part = self._layout.part(*shard)
        self._lock = threading.Lock()
        self._lines: dict[socket.socket, str] = {}
        self._values: Floats = np.empty(0)
        self._came = 0
        self._lost: list[str] = []
        self._refused: list[str] = []
        self._pushes = self._staleness = self._max_staleness = 0
        self._listener = frames.listen(default_address() if address is None else address)
        self._listener.settimeout(ACCEPT_SECONDS)
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def serve(self, replicas: int = 1) -> Served:
        """Serve, once, until so many replicas have come and all that came have left.

        More may come, in place of those that died. Where nobody is there for `timeout_s`, those
        that are still missing are waited for no longer; a replica that is there is, however long it
        takes for a step.

        Parameters
        ----------
        replicas : int
            How many are expected.

        Returns
        -------
        Served
            What was done.

        Raises
        ------
        PeerLostError
            Nobody came.
        """
        refuse(_count_problems(replicas=replicas))
        with torch.no_grad():
            vector = self._layout.empty()
            self._copy(self.model.parameters(), self._layout.views(vector))
            self._values = vector.numpy()[self._part].copy()
        threads: list[threading.Thread] = []
        try:
            self._accept(replicas, threads)
        finally:
            self.close()
            for thread in threads:
                thread.join()
            with torch.no_grad():
                vector.numpy()[self._part] = self._values
                self._copy(self._layout.views(vector), self.model.parameters())
        return Served(
            self._came,
            tuple(self._lost),
            tuple(self._refused),
            self._pushes,
            self._staleness / max(1, self._pushes),
            self._max_staleness,
        )

    @staticmethod
    def _copy(values: Iterable[torch.Tensor], to: Iterable[torch.Tensor]) -> None:
        for value, place in zip(values, to, strict=True):
            place.copy_(value)

    def _accept(self, replicas: int, threads: list[threading.Thread]) -> None:
        somebody = time.monotonic()
        while True:
            with self._lock:
                present, came = len(self._lines), self._came
            if came >= replicas and not present:
                return
            if present:
                somebody = time.monotonic()
            elif time.monotonic() - somebody > self.timeout_s:
                if came:
                    return
                raise PeerLostError(
                    f"no replica came to {self.address} within {self.timeout_s:g} s. Start them "
                    "with this address, or pass a greater timeout_s"
                )
            try:
                line, place = self._listener.accept()
            except (TimeoutError, ConnectionError):
                continue
            except OSError:
                if self._listener.fileno() < 0:
                    return  # somebody called `close`
                raise
            line.settimeout(None)
            with self._lock:
                self._lines[frames.prepared(line)] = f"{place[0]}:{place[1]}"
            threads.append(threading.Thread(target=self._attend, args=(line,)))
            threads[-1].start()

    def _attend(self, line: socket.socket) -> None:
        """In a thread: serve one replica until it leaves, in whatever way."""
        ends, end = self._refused, ""
        try:
            seen = self._admit(line)
            ends = self._lost
            self._obey(line, seen)
        except OSError as error:
            end = f"{self._lines[line]}: {error.strerror or error}"
        finally:
            with self._lock:
                if end:
                    ends.append(end)
                del self._lines[line]
            line.close()

    def _admit(self, line: socket.socket) -> int:
        """Give a replica the parameters, unless it has another model, and wait until it begins."""
        line.settimeout(self.timeout_s)
        header, _ = frames.receive(line)
        difference = self._layout.difference(Layout.from_json(header.get("model")))
        if difference:
            frames.send(line, {"kind": "refused", "difference": difference})
            raise frames.FrameError(f"another model, {difference}")
        seen = self._give(line, np.empty_like(self._values))
        # It may find that the servers are not all parts of one model.
        frames.receive(line)
        line.settimeout(None)
        with self._lock:
            self._came += 1
        return seen

    def _obey(self, line: socket.socket, seen: int) -> None:
        room = np.empty_like(self._values)
        while True:
            header, size = frames.receive(line)
            kind = header.get("kind")
            if kind == "push":
                frames.fill(line, _bytes(room), size)
                with self._lock:
                    self._apply(room, self._pushes - seen)
                # Its own parameters moved along with what it pushed.
                seen += 1
            elif kind == "pull":
                seen = self._give(line, room)
            elif kind == "leave":
                frames.send(line, {"kind": "left"})
                return
            else:
                raise frames.FrameError(f"a message of unknown kind {kind!r:.40}")

    def _give(self, line: socket.socket, room: Floats) -> int:
        """Send the parameters; return how many pushes are in them."""
        with self._lock:
            seen = self._pushes
            np.copyto(room, self._values)
        frames.send(line, {"kind": "values", "shard": self.shard}, _bytes(room))
        return seen

    def _apply(self, update: Floats, staleness: int) -> None:
        self._pushes += 1
        self._staleness += staleness
        self._max_staleness = max(self._max_staleness, staleness)
        if self.staleness_aware:
            update /= max(1, staleness)
        # By NumPy, in this thread alone: torch would start threads of its own for each of ours.
        np.subtract(self._values, update, out=self._values)

    def close(self) -> None:
        """Listen no longer, and part from all replicas, which then raise `PeerLostError`."""
        self._listener.close()
        with self._lock:
            for line in self._lines:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Hogwild(torch.optim.Optimizer):
    """SGD of one replica, whose parameters are those of a `Server` every now and then [1]_.

    It connects when it is made, and gives the model the server's parameters. From then on the
    training loop is an ordinary one. Leave with `close`, or use it in a ``with`` statement: a
    replica that only ends counts as lost, and what it has not pushed is.

    Parameters
    ----------
    params : iterable
        Parameters or parameter groups, all of them `model`'s.
    lr : float
        Learning rate; LR schedules change it as that of any optimizer.
    n_push : int
        After how many steps their sum is pushed.
    n_pull : int
        After how many steps the parameters are fetched.
    model : nn.Module
        What is trained; its parameters have the names, shapes and order of the server's.
    address : str or sequence of str, optional
        ``"host:port"`` of the server; of all of them, where each holds a part. By default
        ``MASTER_ADDR`` and ``MASTER_PORT`` of the environment, else 127.0.0.1:29500.
    accumulate : int
        Calls of `step` whose gradients are averaged into one step, as for a batch so many times as
        large. `n_push` and `n_pull` count such steps.
    checkpoint : str or Path, optional
        Where the model's ``state_dict`` is written, as safetensors, when a server is lost.
    timeout_s : float
        How long a server may take to begin to answer, and later for each answer.

    Raises
    ------
    InputError
        An argument cannot be, the server has another model, or the servers are not all the parts of
        one.
    PeerLostError
        A server does not answer in time; from `step`, `pull` and `close`: it answers no more.

    Notes
    -----
    With one replica and ``n_push = n_pull = 1`` the steps are those of ``torch.optim.SGD`` to
    rounding.

    References
    ----------
    .. [1] Dean et al. (2012). Large scale distributed deep networks. NIPS 25, section 4.1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        n_push: int,
        n_pull: int,
        model: nn.Module,
        *,
        address: str | Sequence[str] | None = None,
        accumulate: int = 1,
        checkpoint: str | Path | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(params, {"lr": lr})
        refuse(
            [
                *_count_problems(n_push=n_push, n_pull=n_pull, accumulate=accumulate),
                *_lr_problems(self.param_groups),
                *_timeout_problems(timeout_s),
                *_membership_problems(self._trained(), model),
                *_folder_problems(checkpoint),
            ]
        )
        self.n_push, self.n_pull, self.accumulate = n_push, n_pull, accumulate
        self.model = model
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self._calls = self._steps = self._unpushed = 0
        self._layout = Layout.of(model)
        self._vector = self._layout.empty()
        given = default_address() if address is None else address
        self._addresses = [given] if isinstance(given, str) else list(given)
        self._lines: list[socket.socket] = []
        try:
            self._join(timeout_s)
        except BaseException:
            self._hang_up()
            raise

    def _trained(self) -> list[torch.Tensor]:
        return [item for group in self.param_groups for item in group["params"]]

    def _join(self, timeout_s: float) -> None:
        count = len(self._addresses)
        for number, address in enumerate(self._addresses):
            self._lines.append(frames.connect(address, timeout_s))
            with self._telling(number):
                frames.send(self._lines[number], {"model": self._layout.to_json()})
        shards: list[Any] = []
        for number, line in enumerate(self._lines):
            with self._telling(number):
                header, size = frames.receive(line)
                refuse(_difference_problems(header))
                shards.append(header.get("shard"))
                refuse(_parts_problems(shards, count))
                part = self._layout.part(*shards[number])
                frames.fill(line, _bytes(self._vector.numpy()[part]), size)
        # In the order of their parts, whatever the order of their addresses.
        order = sorted(range(count), key=lambda number: int(shards[number][0]))
        self._lines = [self._lines[number] for number in order]
        self._addresses = [self._addresses[number] for number in order]
        for number, line in self._open():
            with self._telling(number):
                frames.send(line, {"kind": "begin"})
        self._take_up()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Add the gradients to what will be pushed, and move this replica's own parameters.

        Parameters
        ----------
        closure : callable, optional
            Evaluates the model again and returns the loss.

        Raises
        ------
        PeerLostError
            A server ended or answers no more; where asked for, the model was saved before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._calls += 1
            for parameter in self._trained() if self.accumulate > 1 else ():
                if parameter.grad is not None:
                    mean = self._kept(parameter, "gradient")
                    mean.add_(parameter.grad, alpha=1 / self.accumulate)
            if self._calls % self.accumulate == 0:
                self._move()
        return loss

    def _kept(self, parameter: torch.Tensor, what: str) -> torch.Tensor:
        """What comes together for a parameter: the gradient of a step, the update of a push."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        if what not in state:
            state[what] = torch.zeros_like(parameter, dtype=self._vector.dtype)
        return state[what]

    def _move(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                whole = self.accumulate == 1
                gradient = parameter.grad if whole else self._kept(parameter, "gradient")
                if gradient is None:
                    continue
                parameter.add_(gradient, alpha=-group["lr"])
                self._kept(parameter, "update").add_(gradient, alpha=group["lr"])
                if not whole:
                    gradient.zero_()
        self._steps += 1
        self._unpushed += 1
        if self._steps % self.n_push == 0:
            self.push()
        if self._steps % self.n_pull == 0:
            self.pull()

    @torch.no_grad()
    def push(self) -> None:
        """Push now what has come together; nobody waits until it is applied.

        Raises
        ------
        PeerLostError
            As `step`.
        """
        self._unpushed = 0
        self._vector.zero_()
        for parameter, view in self._pairs():
            if parameter in self.state:
                update = self._kept(parameter, "update")
                view.copy_(update)
                update.zero_()
        for number, line in self._open():
            with self._telling(number):
                frames.send(line, {"kind": "push"}, self._piece(number))

    @torch.no_grad()
    def pull(self) -> None:
        """Fetch the parameters now; steps of this replica that it did not push yet are not in them.

        Raises
        ------
        PeerLostError
            As `step`.
        """
        for number, line in self._open():
            with self._telling(number):
                frames.send(line, {"kind": "pull"})
        for number, line in self._open():
            with self._telling(number):
                _, size = frames.receive(line)
                frames.fill(line, self._piece(number), size)
        self._take_up()

    @torch.no_grad()
    def _take_up(self) -> None:
        for parameter, view in self._pairs():
            parameter.copy_(view)

    def _pairs(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        return zip(self.model.parameters(), self._layout.views(self._vector), strict=True)

    def _piece(self, number: int) -> memoryview:
        """The part of the vector that a server holds, as bytes."""
        return _bytes(self._vector.numpy()[self._layout.part(number, len(self._lines))])

    def _open(self) -> list[tuple[int, socket.socket]]:
        if not self._lines:
            raise PeerLostError(
                "this replica has left its server. Make another Hogwild to go on training"
            )
        return list(enumerate(self._lines))

    @contextlib.contextmanager
    def _telling(self, number: int) -> Iterator[None]:
        """Where a server is lost meanwhile, save the model where asked, and say so."""
        try:
            yield
        except OSError as error:
            self._hang_up()
            text = (
                f"the parameter server at {self._addresses[number]} ended or answers no more "
                f"({error.strerror or error}): "
            )
            if self.checkpoint is None or not self._steps:
                hint = "" if self.checkpoint else "; checkpoint=PATH keeps the model in such a case"
                raise PeerLostError(
                    text + "nothing of this replica was saved. Start the server and its replicas "
                    f"again{hint}"
                ) from error
            save_model(self.model, self.checkpoint)
            raise PeerLostError(
                text + f"the model was saved in {self.checkpoint}. Load it with "
                "model.load_state_dict(safetensors.torch.load_file(PATH)) and start the server "
                "with it"
            ) from error

    def close(self) -> None:
        """Push the steps that are left, and leave; gradients of no whole step are dropped.

        When it returns, all that this replica pushed is in the server's parameters.

        Raises
        ------
        PeerLostError
            As `step`.
        """
        if self._lines:
            if self._unpushed:
                self.push()
            for number, line in self._open():
                with self._telling(number):
                    frames.send(line, {"kind": "leave"})
                    frames.receive(line)
            self._hang_up()

    def _hang_up(self) -> None:
        for line in self._lines:
            line.close()
        self._lines = []

    def __enter__(self) -> Hogwild:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        # After an exception, the replica is lost as one that was killed is.
        if kind is None:
            self.close()
        else:
            self._hang_up()


def save_model(model: nn.Module, path: Path) -> None:
    """Write the tensors of a model's ``state_dict`` as safetensors, whole or not at all.

    Raises
    ------
    StorageError
        The disk refused.
    """
    # Copies: safetensors refuses tensors that share memory, such as tied weights.
    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    write_whole(path, safetensors.torch.save(tensors))


def _count_problems(**counts: object) -> Iterator[Problem]:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Problem(
                f"{name} must be a whole number of at least 1", repr(value), f"Pass {name}=1."
            )


def _lr_problems(groups: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    for group in groups:
        lr = group["lr"]
        if not isinstance(lr, (int, float)) or not 0 <= lr < math.inf:
            yield Problem("lr must be a number of at least 0", repr(lr), "Pass for instance 0.1.")


def _timeout_problems(timeout_s: float) -> Iterator[Problem]:
    if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
        yield Problem("timeout_s must be a number above 0", repr(timeout_s), "Pass seconds.")


def _shard_problems(shard: object, total: int) -> Iterator[Problem]:
    if not _is_part(shard, total):
        yield Problem(
            "shard must be (index, count), index from 0 to count - 1, and each part must have "
            f"one of the model's {total} numbers",
            repr(shard),
            "Pass (0, 2) for the first of two servers.",
        )


def _is_part(shard: object, total: int) -> bool:
    return (
        isinstance(shard, (tuple, list))
        and len(shard) == 2
        and all(type(number) is int for number in shard)
        and 0 <= shard[0] < shard[1] <= total
    )


def _membership_problems(trained: Sequence[torch.Tensor], model: nn.Module) -> Iterator[Problem]:
    known = set(map(id, model.parameters()))
    foreign = sum(id(item) not in known for item in trained)
    if foreign:
        yield Problem(
            "params must be parameters of the model",
            f"{foreign} that are not",
            "Pass model.parameters().",
        )


def _folder_problems(checkpoint: str | Path | None) -> Iterator[Problem]:
    if checkpoint is not None and not Path(checkpoint).absolute().parent.is_dir():
        yield Problem(
            "the folder of checkpoint must exist",
            str(checkpoint),
            "Make it, or pass another.",
        )


def _difference_problems(header: dict[str, Any]) -> Iterator[Problem]:
    if header.get("kind") == "refused":
        yield Problem(
            "a replica must have the model of its server",
            f"{header.get('difference')!s:.200}",
            "Build both from the same code with the same arguments.",
        )


def _parts_problems(shards: Sequence[Any], count: int) -> Iterator[Problem]:
    """Refuse servers that hold no part of as many, or a part twice."""
    fit = all(_is_part(shard, count) and shard[1] == count for shard in shards)
    if not fit or len({shard[0] for shard in shards}) < len(shards):
        yield Problem(
            f"{count} addresses must be those of servers with shard=(0, {count}) to "
            f"({count - 1}, {count})",
            f"shards {', '.join(map(str, shards))}",
            "Pass the addresses of all servers of the model.",
        )
