"""Are a run's results reproducible, and if not, why not?

Equal plans give equal bits with equal software on an equal kind of processor. A run records the
software of each session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from asynckfold.jobs.plan import Plan

Software = Mapping[str, str]
"""What one session trained with, by name; empty where it was not recorded."""

TORCH, BUILD, CPU, ENVIRONMENT, THREADS = (
    "torch",
    "torch build",
    "CPU class",
    "thread environment",
    "threads per job",
)
CUDA, GPU, KERNELS = "CUDA", "GPU", "deterministic kernels"
DENORMALS = "denormal numbers"
ARITHMETIC = "asynckfold arithmetic"
NUMERICS, LEFT = "settings of torch", "left in the process"
NODES = "kinds of processor among the nodes"
"""Recorded of a cluster whose nodes differ."""

VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "BLIS_ARCH_TYPE",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_THREADING_LAYER",
    "NPY_DISABLE_CPU_FEATURES",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_DYNAMIC",
    "OMP_SCHEDULE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Variables that choose kernels or how work is divided among threads.

Not the numbers of threads: a job has those of its plan.
"""

DECISIVE = (
    TORCH,
    BUILD,
    "torchvision",
    "numpy",
    "scikit-learn",
    CPU,
    ENVIRONMENT,
    THREADS,
    CUDA,
    GPU,
    KERNELS,
    DENORMALS,
    ARITHMETIC,
    NUMERICS,
)
"""What bits depend on; everything else is recorded, and never compared."""


def differences(there: Software, here: Software) -> tuple[str, ...]:
    """Name what may change bits; nothing where either was not recorded.

    >>> differences({"torch": "2.6.0", "python": "3.10"}, {"torch": "2.7.1", "python": "3.12"})
    ('torch: 2.6.0 there, 2.7.1 here',)
    """
    return tuple(
        f"{name}: {there.get(name) or 'none'} there, {here.get(name) or 'none'} here"
        for name in DECISIVE
        if there and here and there.get(name, "") != here.get(name, "")
    )


_WITHOUT_ORDER = {
    "hogwild": "updated each model without locks",
    "parameter_server": "pushed to the server of each model when they were ready",
}
"""What the processes of a job do, by trainer."""


def _reasons(plan: Plan, sessions: Sequence[Software]) -> Iterator[str]:
    """Yield why a run is not reproducible."""
    if not all(sessions):
        yield "the software that some of its jobs were trained with was not recorded"
    for session in sessions[1:] if all(sessions) else ():
        if changed := differences(sessions[0], session):
            changes = "; ".join(changed).replace(" there, ", " at first, ")
            changes = changes.replace(" here", " later")
            yield f"its sessions trained with different software: {changes}"
    for session in sessions:
        if session.get(NODES):
            yield f"its nodes have different kinds of processor: {session[NODES]}"
    if plan.device == "cuda" and not all(item.get(KERNELS) == "yes" for item in sessions):
        yield "CUDA was used without deterministic kernels (torch.use_deterministic_algorithms)"
    count, trainer = plan.params.processes, plan.params.trainer
    if count > 1 and trainer in _WITHOUT_ORDER:
        yield (
            f"{count} processes {_WITHOUT_ORDER[trainer]} ({trainer}), so the order of their "
            "updates was left to chance"
        )
    for session in sessions:
        if session.get(LEFT):
            yield (
                "jobs were trained in a process in which earlier jobs had changed settings that "
                f"could not be restored: {session[LEFT]}"
            )


@dataclass(frozen=True)
class Reproducibility:
    """Whether the run is reproducible, and each reason why not.

    >>> print(Reproducibility(()))
    reproducible
    >>> print(Reproducibility(("the weather was bad",)))
    not reproducible: the weather was bad
    """

    reasons: tuple[str, ...]
    claimed: bool = field(init=False)  # there are none; a key of JSON files, hence the name

    def __post_init__(self) -> None:
        object.__setattr__(self, "claimed", not self.reasons)

    def __str__(self) -> str:
        if self.claimed:
            return "reproducible"
        return f"not reproducible: {'; '.join(self.reasons)}"


def reproducibility_of(plan: Plan, sessions: Sequence[Software]) -> Reproducibility:
    """Return the verdict on a plan and the software of each session, the first one first."""
    return Reproducibility(tuple(dict.fromkeys(_reasons(plan, sessions))))


def with_left(software: Software, text: str) -> dict[str, str]:
    """Return what a session trains with, where one job may have changed it for the next."""
    texts = [item for item in software.get(LEFT, "").split("; ") if item]
    return {**software, LEFT: "; ".join(dict.fromkeys([*texts, text]))}
