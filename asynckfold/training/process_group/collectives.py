"""Tensors between the ranks of one job, each of which has a GPU: by torch.distributed.

::

    rank 0     join ─ spread ─ its part ─ collect ─ sum, step ─ spread …
    rank 1 …   join ─ spread ─ its part ─ offer ─────────────── spread …

NCCL moves tensors from GPU to GPU; gloo moves them through the host, for slices of one GPU (MIG)
and for CPUs. Neither of them adds: the order of their sums depends on how the GPUs are connected.
Rank 0 gathers the parts and adds them in the order of the ranks, so that no bit depends on backend
or wiring. It receives n - 1 parts, where a ring would receive two.

A rank that dies closes its pipe, and rank 0 looks at the pipes before it waits for a collective. A
kernel of NCCL waits for a rank that died later, though: no call fails, and the next one that needs
the GPU's numbers waits, too. `ProcessGroup.watch` then ends the worker. Aborting the communicator
would instead let rank 0 go on with gradients that it never received.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from asynckfold.errors import Problem
from asynckfold.system.network import interface_of
from asynckfold.training.process_group.meeting import JOIN_TIMEOUT
from asynckfold.training.process_group.shared_tensors import ALIGNMENT, copy_each


def backend_problems(backend: str) -> Iterator[Problem]:
    """Yield why torch cannot use a backend; an empty one is not needed."""
    if backend and not _is_available(backend):
        yield Problem(
            f"all-reduce on several GPUs needs a torch with {_NAMES[backend]}",
            f"torch {torch.__version__} without it",
            "Install a torch for CUDA (https://pytorch.org/get-started), or pass devices='cpu' for "
            "processes on cores.",
        )


def described(backend: str) -> str:
    """Return a backend with its version: ``"NCCL 2.27.5"``, ``"gloo"``."""
    if backend != "nccl" or not _is_available(backend):
        return _NAMES[backend]
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return f"NCCL {'.'.join(map(str, version))}"


_NAMES = {"nccl": "NCCL", "gloo": "gloo"}


def _is_available(backend: str) -> bool:
    if not dist.is_available():
        return False
    return dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and restore them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Packed:
    """Tensors side by side in one piece of memory, to be sent as bytes.

    ``views`` have the shapes, types and strides of the dense tensors `like`.

    Examples
    --------
    >>> packed = Packed([torch.ones(2), torch.ones((), dtype=torch.float64)], torch.device("cpu"))
    >>> packed.raw.shape, [view.dtype for view in packed.views]
    (torch.Size([128]), [torch.float32, torch.float64])
    """

    def __init__(self, like: Sequence[torch.Tensor], device: torch.device) -> None:
        sizes = [math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT for tensor in like]
        self.raw = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self.views = [
            part[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, _strides(tensor))
            for part, tensor in zip(torch.split(self.raw, sizes), like, strict=True)
        ]


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    # Dense in any order of the dimensions, as a clone is.
    return torch.empty_like(tensor, device="meta").stride()


class Collectives:
    """What the ranks of one job send each other.

    It is made before the ranks are forked; each of them joins afterwards. The ranks of a process
    meet in anonymous memory, which leaves no file behind.
    """

    def __init__(self, backend: str, ranks: int) -> None:
        self.backend, self.ranks = backend, ranks
        self.prepare()
        self._offered: Any = None
        self._moved: dict[int, Packed] = {}

    def prepare(self) -> None:
        """Make what the ranks must have before they are forked."""
        self._meeting = os.memfd_create("asynckfold-ranks")

    def join(self, rank: int) -> None:
        """Meet the other ranks; each calls this once, with its GPU as the current device."""
        hook = sys.excepthook
        with _environment(self.interfaces()):
            try:
                dist.init_process_group(
                    self.backend,
                    store=self.store(rank),
                    rank=rank,
                    world_size=self.ranks,
                    timeout=JOIN_TIMEOUT,
                )
            finally:
                # torch prefixes the lines of every traceback with the rank, for good.
                sys.excepthook = hook
            self.connect()

    def interfaces(self) -> dict[str, str]:
        """Return the variables that name the network interface."""
        # All ranks are on this machine: nobody else can reach them.
        return {"GLOO_SOCKET_IFNAME": "lo"}

    def connect(self) -> None:
        """Open connections that the backend would open later."""

    def store(self, rank: int) -> Any:
        """Return where the ranks find each other."""
        place = f"/proc/self/fd/{self._meeting}"
        return dist.FileStore(place, self.ranks)  # type: ignore[attr-defined]

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give the tensors of all ranks the values of rank 0."""
        packed = Packed(tensors, tensors[0].device)
        copy_each(packed.views, tensors)
        sent = self._sent(packed)
        dist.broadcast(sent, 0)
        if dist.get_rank():
            packed.raw.copy_(sent)
            copy_each(tensors, packed.views)

    def offer(self, part: Packed) -> None:
        """On ranks above 0: send a part to rank 0, without waiting for it."""
        self._offered = dist.gather(self._sent(part), dst=0, async_op=True)

    def settle(self) -> None:
        """On ranks above 0: wait until the last part may be overwritten."""
        if self._offered is not None:
            self._offered.wait()
            self._offered = None

    def collect(self, parts: Sequence[Packed]) -> None:
        """On rank 0: receive the parts of the other ranks; that of rank 0 stays."""
        sent = [self._sent(part) for part in parts]
        dist.gather(sent[0], [torch.empty_like(sent[0]), *sent[1:]], dst=0)
        for part, received in zip(parts[1:], sent[1:], strict=True):
            part.raw.copy_(received)

    def _sent(self, packed: Packed) -> torch.Tensor:
        """Return the bytes where the backend takes them: gloo's on the host."""
        return packed.raw.cpu() if self.backend == "gloo" else packed.raw

    def leave(self) -> None:
        """End the connections of rank 0, whose other ranks have ended."""
        # NCCL would wait for them. It ends with this process, which ends after its job; so does
        # the memory in which the ranks met, to which torch writes when it frees its store.
        if self.backend == "gloo" and dist.is_initialized():
            dist.destroy_process_group()


class NetworkCollectives(Collectives):
    """What the ranks of a job on several nodes send each other; on cores by gloo, the backend "".

    They meet at a port of rank 0, which has the listening socket; `here` is an address of this
    node that the others reach.
    """

    def __init__(
        self, backend: str, ranks: int, host: str, port: int, here: str, listener: int = -1
    ) -> None:
        super().__init__(backend or "gloo", ranks)
        self._place, self._here, self._listener = (host, port), here, listener

    def prepare(self) -> None:
        """Nothing: the port is known beforehand."""

    def interfaces(self) -> dict[str, str]:
        """Return the variables that name the network interface by which others reach this node."""
        name = interface_of(self._here)
        # NCCL would take all interfaces that begin with a name without "=".
        return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}" if name else ""}

    def connect(self) -> None:
        """Let NCCL connect, which reads its variable at the first collective only."""
        if self.backend == "nccl":
            dist.broadcast(torch.zeros(1, device="cuda"), 0)

    def store(self, rank: int) -> Any:
        """Return where the ranks find each other; rank 0 holds it."""
        listener, self._listener = self._listener, -1
        return dist.TCPStore(  # type: ignore[attr-defined]
            *self._place,
            self.ranks,
            is_master=rank == 0,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener if rank == 0 else None,
            use_libuv=False,  # which leaves pipes open for as long as its process lives
        )

    def leave(self) -> None:
        """End the connections, also where rank 0 has not met the others."""
        super().leave()
        if self._listener >= 0:
            os.close(self._listener)
            self._listener = -1
