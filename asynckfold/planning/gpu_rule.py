"""The rule for GPUs: seconds of a step, how many jobs share a GPU, what fused jobs gain. Pure.

A step of a small model keeps the CPU busy with launches and the GPU nearly idle::

    host  ├ launch ┼ launch ┼ launch ┼ … ┤   seconds by number of products
    GPU   ├─┤      ├─┤      ├─┤              seconds by number of products and operations

So jobs are fused, which shares the launches; those that cannot be share a GPU until their kernels
fill it: by the rule, until the first of them measures it. On one H100 (torch 2.11, batches of 64,
float32, Adam): a step of an MLP 1024-256-10 (5 products) took 1.07 ms, of which its kernels took
0.12 ms; LeNet with BatchNorm (15 products) 1.70 and 0.36 ms. Five loops of LeNet side by side were
no slower than one. Fused steps of 10 jobs took 1.12 and 2.70 ms.
"""

from __future__ import annotations

from asynckfold.jobs.cost import Cost
from asynckfold.jobs.placement import FULL_SHARE, GPU_CONTEXT_BYTES, Placement
from asynckfold.planning.flop_model import POINTS

HOST_SECONDS, PRODUCT_SECONDS = 0.75e-3, 63e-6
"""Seconds of the host per step, and per product: a dozen kernels and what Python does for them."""

KERNEL_SECONDS = 24e-6
"""Least seconds of the GPU per product."""

GPU_FLOPS, GROUPED_FLOPS = 1e13, 1.6e12
"""Operations per second of a GPU in float32, and of the further jobs of a fused step."""

FUSED_HOST = 1.5
"""Seconds of the host for a fused step / for a separate one."""

MOST_SHARING = 8
"""Largest number of jobs on one GPU: each has a process and a CUDA context."""

WORKSPACE_BYTES = 1 << 30
"""Memory of a job for activations and the workspaces of cuBLAS and cuDNN, on the safe side. A model
whose kernels leave the GPU idle has small activations."""

START_SECONDS = 1.0
"""Seconds until a GPU is open, and its libraries are loaded. Workers take 5; a sweep for which that
is much trains in the process of the caller (H200)."""


OPENING_SECONDS = 0.7
"""Until a worker, a new process, has opened a GPU and loaded its first kernels (H200)."""


def gpu_cost(
    flops: int, eval_ratio: float = 1.0, products: int | None = None, memory: int = 0
) -> Cost:
    """Return the cost of a model on a GPU: launches or operations, whichever take longer.

    `flops` and `products` are those of a training step, `eval_ratio` is evaluation batch size /
    training batch size, `memory` the bytes of parameters, gradients and optimizer state.

    >>> [round(1000 * gpu_cost(flops, 1.0, 15).step_seconds[1], 2) for flops in (10**8, 10**11)]
    [1.69, 10.36]
    """
    count = POINTS[2].products if products is None else max(1, products)
    host = HOST_SECONDS + count * PRODUCT_SECONDS
    kernels = count * KERNEL_SECONDS
    step = max(host, kernels + flops / GPU_FLOPS)
    # A layer has three products (output, input gradient, weight gradient); evaluation needs one.
    evaluation = max(host, kernels + flops * eval_ratio / GPU_FLOPS) / 3
    return Cost(
        {1: step},
        {1: evaluation},
        flops,
        memory,
        gpu_memory=2 * memory + WORKSPACE_BYTES,
        gpu_seconds=kernels + flops / GPU_FLOPS,
    )


def jobs_per_gpu(cost: Cost, memory: int, cores: int) -> int:
    """Return how many jobs of a model share a GPU, until one has measured what it takes.

    `memory` are the bytes of the smallest GPU; 0 if unknown, then one job has it. `cores` are those
    for each GPU: every job needs one.

    >>> lenet, vgg = gpu_cost(145_000_000, 1.0, 15), gpu_cost(58_000_000_000, 1.0, 27)
    >>> [jobs_per_gpu(lenet, 80 << 30, cores) for cores in (1, 16)]
    [1, 4]
    >>> jobs_per_gpu(vgg, 80 << 30, 16)
    1
    """
    idle = int(cost.step_seconds[1] / cost.gpu_seconds)
    fitting = memory // (cost.gpu_memory + GPU_CONTEXT_BYTES)
    return max(1, min(MOST_SHARING, idle, fitting, cores))


def fused_gain(cost: Cost, jobs: int) -> float:
    """Return the speed-up of fused steps over separate ones on a GPU.

    >>> [round(fused_gain(gpu_cost(145_000_000, 1.0, 15), jobs), 1) for jobs in (1, 5, 10)]
    [1.0, 3.3, 6.7]
    """
    if jobs == 1:
        return 1.0
    step = cost.step_seconds[1]
    together = cost.gpu_seconds + (jobs - 1) * cost.flops / GROUPED_FLOPS
    return jobs * step / max(FUSED_HOST * step, together)


def why_not_fused(cost: Cost) -> str:
    """Return why jobs are not fused on a GPU; empty if their steps are launches rather than work.

    The work is that of one more job in a fused step.

    >>> lenet, resnet18 = gpu_cost(145_000_000, 1.0, 15), gpu_cost(58_000_000_000, 1.0, 63)
    >>> why_not_fused(lenet), why_not_fused(resnet18)
    ('', 'on a GPU, a fused step takes 37.8 ms for each further job, a separate step 7.3')
    """
    separate = cost.step_seconds[1]
    work = cost.gpu_seconds + cost.flops / GROUPED_FLOPS - cost.flops / GPU_FLOPS
    if work < separate:
        return ""
    return (
        f"on a GPU, a fused step takes {1e3 * work:.1f} ms for each further job, a separate step "
        f"{1e3 * separate:.1f}"
    )


def shared(cost: Cost, jobs: int) -> Cost:
    """Return the cost of one of `jobs` jobs that share a GPU."""
    return cost.scaled(max(cost.step_seconds[1], jobs * cost.gpu_seconds))


def memory_share(total: int, placement: Placement) -> float:
    """Return the largest share of a GPU's memory for the tensors of a job.

    If others may share the GPU, it is what the job reserved, without its context. So a job that
    grows runs out of memory itself, instead of the others.

    >>> memory_share(8 << 30, Placement(("a",), (0,), gpu_memory=2 << 30, gpu_share=0.2))
    0.1875
    """
    if placement.gpu_share >= FULL_SHARE or total <= 0:
        return 1.0
    return min(1.0, max(0, placement.gpu_memory - GPU_CONTEXT_BYTES) / total)
