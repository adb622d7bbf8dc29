"""Asynchronous SGD with a parameter server: replicas of a model on several machines.

::

    replica: the user's loop ─ step ─ step … every n_push ─► sum of lr × gradient ─►┐
                                             every n_pull ◄─ parameters ◄───────────┤ Server
    replica: the user's loop ─ step ─ step …  ◄────────────────────────────────────►┘ (or several,
                                                                                     a part each)

Each replica trains on its samples and moves its copy of the parameters; no replica waits
for another, so results depend on timing. A replica pushes the sum, over its last `n_push` steps, of
gradients times the learning rate of their step and parameter group, so that torch's LR schedules
work on a replica as on any optimizer. Buffers (running statistics of BatchNorm) are not parameters:
each replica keeps its buffers.

A replica may die: what it had not pushed is lost, and another may take its place at any time. This
is why replicas use plain TCP (`wire`) and not ``torch.distributed``: over its gloo backend a server
did not notice the death of a replica for 8 s, and no new process could take its rank. Here the
kernel reports the death at once.

The TCP connection is unauthenticated: use it in trusted networks only.

References
----------
.. [1] Dean et al. (2012). Large scale distributed deep networks. NIPS 25: Downpour SGD, section 4.1
   and the pseudo-code of the appendix.
.. [2] Zhang, Gupta, Lian, Liu (2016). Staleness-aware async-SGD for distributed deep learning.
   IJCAI.
"""

from asynckfold.training.parameter_server.optimizer import Hogwild
from asynckfold.training.parameter_server.server import Server, ServerSummary

__all__ = ["Hogwild", "ServerSummary", "Server"]
