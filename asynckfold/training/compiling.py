"""torch.compile, where it was asked for: a model whole, or an error before the sweep."""

from __future__ import annotations

import torch
from torch import nn

COMPILER = {"compile_threads": 1, "fx_graph_cache": False}
"""A job has its cores for itself, and none for further processes that compile. What was compiled
for another number of threads may lie in the cache of graphs, whose key older versions of torch make
without it; translated kernels are taken over all the same, by their text."""


def compile_whole(model: nn.Module) -> None:
    """Let a model compile itself, anew for each shape, at the first batch that has it.

    In one piece, so that whatever cannot be compiled raises in place of running uncompiled, with
    other bits. Without shapes that vary, and without what jobs before have compiled: the code for
    a batch depends on its shape alone, also where a job goes on in another process.

    Parameters
    ----------
    model : nn.Module
        Its tensors, names and class stay as they are.
    """
    torch.compiler.reset()
    model.compile(fullgraph=True, dynamic=False, options=COMPILER)
