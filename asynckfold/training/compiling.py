"""torch.compile of a whole model, or an error before the sweep."""

from __future__ import annotations

import torch
from torch import nn

COMPILER = {"compile_threads": 1, "fx_graph_cache": False}
"""A job has no cores for further compiler processes. The graph cache is off: in older versions of
torch its key lacks the number of threads. Compiled kernels are cached all the same, by their text.
"""


def compile_whole(model: nn.Module) -> None:
    """Let a model compile itself in place, anew for each shape, at the first batch of that shape.

    As one graph: code that cannot be compiled raises instead of running uncompiled with other bits.
    Without dynamic shapes or results of earlier jobs: the code for a batch depends on its shape
    alone, also when a job continues in another process.
    """
    torch.compiler.reset()
    model.compile(fullgraph=True, dynamic=False, options=COMPILER)
