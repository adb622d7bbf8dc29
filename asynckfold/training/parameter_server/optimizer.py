"""A replica: an optimizer that exchanges its parameters with a server."""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from asynckfold.errors import PeerLostError, Problem, refuse
from asynckfold.system.files import write_whole
from asynckfold.training.checkpoint import separate
from asynckfold.training.parameter_server.flat_parameters import (
    ParameterLayout,
    as_bytes,
    refuse_counts,
    refuse_other_model,
    refuse_shards,
)
from asynckfold.training.parameter_server.wire import (
    Wire,
    connect,
    default_address,
    has_group,
    server_address,
)
from asynckfold.training.process_group.shared_tensors import copy_each


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
        refuse_counts(n_push=n_push, n_pull=n_pull, accumulate=accumulate)
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.n_push, self.n_pull, self.accumulate = n_push, n_pull, accumulate
        self.model = model
        refuse(self._problems())
        self._calls = self._steps = self._unpushed = 0
        self._layout = ParameterLayout.of(model)
        self._vector = self._layout.empty()
        in_group = address is None and has_group()
        if in_group:
            address = server_address(timeout_s)
        elif address is None:
            address = default_address()
        self._addresses = [address] if isinstance(address, str) else list(address)
        self._wires: list[Wire] = []
        try:
            self._join(timeout_s)
        except BaseException:
            self._hang_up()
            raise
        if in_group:
            atexit.register(self._end)

    def _problems(self) -> Iterator[Problem]:
        trained = [item for group in self.param_groups for item in group["params"]]
        if foreign := sum(id(item) not in map(id, self.model.parameters()) for item in trained):
            received = f"{foreign} that are not"
            rule = "params must be parameters of the model"
            yield Problem(rule, received, "Pass model.parameters().")
        for group in self.param_groups:
            if not group["lr"] >= 0:
                rule = "lr must be a number of at least 0"
                yield Problem(rule, repr(group["lr"]), "Pass for instance 0.1.")
        if self.checkpoint is not None and not self.checkpoint.absolute().parent.is_dir():
            rule = "the folder of checkpoint must exist"
            yield Problem(rule, str(self.checkpoint), "Make it, or pass another.")

    def _join(self, timeout_s: float) -> None:
        count = len(self._addresses)
        self._wires = [connect(address, timeout_s) for address in self._addresses]
        with self._asking() as wires:
            shards = []
            for wire in wires:
                shard, entries = json.loads(wire.receive())
                refuse_other_model(self._layout, entries)
                shards.append(shard)
            refuse_shards(shards, count)
            # By part, in whatever order the addresses were given.
            order = sorted(range(count), key=lambda number: shards[number][0])
            self._wires = [wires[number] for number in order]
            self._fill()
            for wire in wires:
                wire.send("begin")

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
            for group in self.param_groups if self.accumulate > 1 else ():
                for parameter in group["params"]:
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
        views = self._layout.views(self._vector)
        for parameter, view in zip(self.model.parameters(), views, strict=True):
            if parameter in self.state:
                update = self._kept(parameter, "update")
                view.copy_(update)
                update.zero_()
        with self._asking() as wires:
            for number, wire in enumerate(wires):
                wire.send("push", self._piece(number))

    def pull(self) -> None:
        """Fetch the parameters; steps of this replica that are not pushed yet are not in them."""
        with self._asking() as wires:
            for wire in wires:
                wire.send("pull")
            self._fill()

    def _fill(self) -> None:
        """Receive the parameters from all servers."""
        for number, wire in enumerate(self._wires):
            wire.receive()
            wire.fill(self._piece(number))
        copy_each(self.model.parameters(), self._layout.views(self._vector))

    def _piece(self, number: int) -> memoryview:
        """Return the part of the vector that a server holds, as bytes."""
        return as_bytes(self._vector.numpy()[self._layout.part(number, len(self._wires))])

    @contextlib.contextmanager
    def _asking(self) -> Iterator[list[Wire]]:
        """Yield the connections; if one is lost, save the model where `checkpoint` says, raise."""
        if not self._wires:
            raise PeerLostError(
                "this replica has left its server. Make another Hogwild to continue training"
            )
        try:
            yield self._wires
        except (OSError, json.JSONDecodeError) as error:
            self._hang_up()
            lost = (
                f"the parameter server at {', '.join(self._addresses)} has ended or does not "
                f"answer ({getattr(error, 'strerror', None) or error}): "
            )
            if self.checkpoint is None or not self._steps:
                raise PeerLostError(
                    f"{lost}nothing of this replica was saved. Start the server and its replicas "
                    "again; checkpoint=PATH saves the model in such a case"
                ) from error
            # Copies: safetensors refuses tensors that share memory, such as tied weights.
            state = self.model.state_dict().items()
            tensors = {key: value for key, value in state if isinstance(value, torch.Tensor)}
            write_whole(self.checkpoint, safetensors.torch.save(separate(tensors)))
            raise PeerLostError(
                f"{lost}the model was saved in {self.checkpoint}. Load it with "
                "model.load_state_dict(safetensors.torch.load_file(PATH)) and start the server "
                "with it"
            ) from error

    def close(self) -> None:
        """Push the remaining steps, and leave; gradients of an incomplete step are dropped.

        When it returns, the server has applied all pushes of this replica.
        """
        if self._wires:
            if self._unpushed:
                self.push()
            with self._asking() as wires:
                for wire in wires:
                    wire.send("leave")
                    wire.receive()
            self._hang_up()

    def _end(self) -> None:
        """Leave at the end of the process, unless an exception ended it."""
        if hasattr(sys, "last_value"):
            self._hang_up()
        else:
            self.close()

    def _hang_up(self) -> None:
        atexit.unregister(self._end)
        for wire in self._wires:
            wire.close()
        self._wires = []

    def __enter__(self) -> Hogwild:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        # After an exception, the replica counts as lost, like a killed one.
        if kind is None:
            self.close()
        else:
            self._hang_up()
