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
place at any time. That is why the numbers travel over plain TCP (`wire`) and not over
``torch.distributed``. Measured with its gloo backend (torch 2.15, a timeout of 8 s, kill -9 of a
replica): a server that receives from anybody is not told of the death, and waited the whole 8 s for
its last replica; a new process of the same rank could not join (``connectFullMesh failed``, after
40 s), since all ranks are counted and connected with each other at the start. Here the kernel tells
the server at once, and who comes is welcome.

Whoever can reach the port can change the parameters: listen in a network that you trust.

References
----------
.. [1] Dean et al. (2012). Large scale distributed deep networks. NIPS 25: Downpour SGD, section 4.1
   and the pseudo-code of the appendix.
.. [2] Zhang, Gupta, Lian, Liu (2016). Staleness-aware async-SGD for distributed deep learning.
   IJCAI.
"""

from asynckfold.training.parameter_server.optimizer import Hogwild
from asynckfold.training.parameter_server.server import Served, Server

__all__ = ["Hogwild", "Served", "Server"]
