"""A replica: an optimizer that exchanges its parameters with a server."""

from __future__ import annotations

import atexit
import contextlib
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from asynckfold.errors import PeerLostError, refuse
from asynckfold.system.files import write_whole
from asynckfold.training.parameter_server import discovery, wire
from asynckfold.training.parameter_server.flat_parameters import (
    ParameterLayout,
    as_bytes,
    count_problems,
    difference_problems,
    folder_problems,
    lr_problems,
    membership_problems,
    parts_problems,
    timeout_problems,
)


class Hogwild(torch.optim.Optimizer):
    """SGD of one replica, which exchanges its parameters with a `Server` every few steps [1]_.

    The constructor connects, and loads the server's parameters into the model; the training loop is
    an ordinary one. Leave with `close`, or use it in a ``with`` statement: a replica that just ends
    counts as lost, with the steps that it has not pushed. A rank of a torch process group finds the
    server through the group, and leaves when its script has come to its end.

    Parameters
    ----------
    params : iterable
        Parameters or parameter groups of `model`.
    lr : float
        Learning rate; LR schedules apply as to any optimizer.
    n_push : int
        Steps between pushes of their sum.
    n_pull : int
        Steps between fetches of the parameters.
    model : nn.Module
        Model to train; its parameters have the names, shapes and order of the server's.
    address : str or sequence of str, optional
        ``"host:port"`` of the server, or of all servers that hold a part. By default that of the
        rank of the torch process group that calls `Server.run`; without a group, ``MASTER_ADDR``
        and ``MASTER_PORT`` of the environment, else 127.0.0.1:29500.
    accumulate : int
        Calls of `step` whose gradients are averaged into one step, as for a larger batch. `n_push`
        and `n_pull` count such steps.
    checkpoint : str or Path, optional
        Safetensors file for the model's ``state_dict`` when a server is lost.
    timeout_s : float
        Limit on the connection to a server, and on each of its answers.

    Raises
    ------
    InputError
        An argument is invalid, the server has another model, or the servers do not hold all parts
        of one model.
    PeerLostError
        A server does not answer in time; also from `step`, `push`, `pull` and `close`.
    SystemExit
        Without an address, on the rank of a process group that has served it: such a script ends.

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
                *count_problems(n_push=n_push, n_pull=n_pull, accumulate=accumulate),
                *lr_problems(self.param_groups),
                *timeout_problems(timeout_s),
                *membership_problems(self._trained(), model),
                *folder_problems(checkpoint),
            ]
        )
        self.n_push, self.n_pull, self.accumulate = n_push, n_pull, accumulate
        self.model = model
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self._calls = self._steps = self._unpushed = 0
        self._layout = ParameterLayout.of(model)
        self._vector = self._layout.empty()
        in_group = address is None and discovery.has_group()
        servers = wire.default_address() if address is None else address
        if in_group:
            servers = discovery.server_address(timeout_s)
        self._addresses = [servers] if isinstance(servers, str) else list(servers)
        self._lines: list[socket.socket] = []
        try:
            self._join(timeout_s)
        except BaseException:
            self._hang_up()
            raise
        if in_group:
            atexit.register(self._end)

    def _trained(self) -> list[torch.Tensor]:
        return [item for group in self.param_groups for item in group["params"]]

    def _join(self, timeout_s: float) -> None:
        count = len(self._addresses)
        for number, address in enumerate(self._addresses):
            self._lines.append(wire.connect(address, timeout_s))
            with self._telling(number):
                wire.send(self._lines[number], {"model": self._layout.to_json()})
        shards: list[Any] = []
        for number, line in enumerate(self._lines):
            with self._telling(number):
                header, size = wire.receive(line)
                refuse(difference_problems(header))
                shards.append(header.get("shard"))
                refuse(parts_problems(shards, count))
                part = self._layout.part(*shards[number])
                wire.fill(line, as_bytes(self._vector.numpy()[part]), size)
        # By part, in whatever order the addresses were given.
        order = sorted(range(count), key=lambda number: int(shards[number][0]))
        self._lines = [self._lines[number] for number in order]
        self._addresses = [self._addresses[number] for number in order]
        for number, line in self._open():
            with self._telling(number):
                wire.send(line, {"kind": "begin"})
        self._take_up()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Add the gradients to the next push, and move this replica's parameters.

        Parameters
        ----------
        closure : callable, optional
            Evaluates the model again and returns the loss.

        Raises
        ------
        PeerLostError
            A server has ended or does not answer; with `checkpoint`, the model is saved first.
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
        """Return a parameter's sum: the gradient of a step, or the update of a push."""
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
        """Push the steps since the last push, without waiting until they are applied."""
        self._unpushed = 0
        self._vector.zero_()
        for parameter, view in self._pairs():
            if parameter in self.state:
                update = self._kept(parameter, "update")
                view.copy_(update)
                update.zero_()
        for number, line in self._open():
            with self._telling(number):
                wire.send(line, {"kind": "push"}, self._piece(number))

    @torch.no_grad()
    def pull(self) -> None:
        """Fetch the parameters; steps of this replica that are not pushed yet are not in them."""
        for number, line in self._open():
            with self._telling(number):
                wire.send(line, {"kind": "pull"})
        for number, line in self._open():
            with self._telling(number):
                _, size = wire.receive(line)
                wire.fill(line, self._piece(number), size)
        self._take_up()

    @torch.no_grad()
    def _take_up(self) -> None:
        for parameter, view in self._pairs():
            parameter.copy_(view)

    def _pairs(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        return zip(self.model.parameters(), self._layout.views(self._vector), strict=True)

    def _piece(self, number: int) -> memoryview:
        """Return the part of the vector that a server holds, as bytes."""
        return as_bytes(self._vector.numpy()[self._layout.part(number, len(self._lines))])

    def _open(self) -> list[tuple[int, socket.socket]]:
        if not self._lines:
            raise PeerLostError(
                "this replica has left its server. Make another Hogwild to continue training"
            )
        return list(enumerate(self._lines))

    @contextlib.contextmanager
    def _telling(self, number: int) -> Iterator[None]:
        """When a server is lost, save the model if `checkpoint` is set, and raise."""
        try:
            yield
        except OSError as error:
            self._hang_up()
            text = (
                f"the parameter server at {self._addresses[number]} has ended or does not answer "
                f"({error.strerror or error}): "
            )
            if self.checkpoint is None or not self._steps:
                hint = "" if self.checkpoint else "; checkpoint=PATH saves the model in such a case"
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
        """Push the remaining steps, and leave; gradients of an incomplete step are dropped.

        When it returns, the server has applied all pushes of this replica.
        """
        if self._lines:
            if self._unpushed:
                self.push()
            for number, line in self._open():
                with self._telling(number):
                    wire.send(line, {"kind": "leave"})
                    wire.receive(line)
            self._hang_up()

    def _end(self) -> None:
        """Leave at the end of the process, unless an exception ended it."""
        if hasattr(sys, "last_value"):
            self._hang_up()
        else:
            self.close()

    def _hang_up(self) -> None:
        atexit.unregister(self._end)
        for line in self._lines:
            line.close()
        self._lines = []

    def __enter__(self) -> Hogwild:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        # After an exception, the replica counts as lost, like a killed one.
        if kind is None:
            self.close()
        else:
            self._hang_up()


def save_model(model: nn.Module, path: Path) -> None:
    """Write the tensors of a model's ``state_dict`` as safetensors, atomically."""
    # Copies: safetensors refuses tensors that share memory, such as tied weights.
    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    write_whole(path, safetensors.torch.save(tensors))
