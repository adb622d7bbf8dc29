"""Are a run's results reproducible, and if not, why not?

Equal plans give equal bits with equal software on an equal kind of processor. A run records the
software of each session; each rule is a pure function from these records to reasons. A new reason
is a new rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from asynckfold.jobs.plan import Plan

Software = Mapping[str, str]
"""What one session trained with, by name; empty where it was not recorded."""

Rule = Callable[[Plan, Sequence[Software]], Iterator[str]]

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


def _one_software(plan: Plan, sessions: Sequence[Software]) -> Iterator[str]:
    if not all(sessions):
        yield "the software that some of its jobs were trained with was not recorded"
        return
    for session in sessions[1:]:
        changed = differences(sessions[0], session)
        if changed:
            changes = "; ".join(changed).replace(" there, ", " at first, ")
            changes = changes.replace(" here", " later")
            yield f"its sessions trained with different software: {changes}"


def _deterministic_kernels(plan: Plan, sessions: Sequence[Software]) -> Iterator[str]:
    if plan.device == "cuda" and not all(item.get(KERNELS) == "yes" for item in sessions):
        yield "CUDA was used without deterministic kernels (torch.use_deterministic_algorithms)"


_WITHOUT_ORDER = {
    "hogwild": "updated each model without locks",
    "parameter_server": "pushed to the server of each model when they were ready",
}
"""What the processes of a job do, by trainer."""


def _one_process(plan: Plan, sessions: Sequence[Software]) -> Iterator[str]:
    count, trainer = plan.params.processes, plan.params.trainer
    if count > 1 and trainer in _WITHOUT_ORDER:
        yield (
            f"{count} processes {_WITHOUT_ORDER[trainer]} ({trainer}), so the order of their "
            "updates was left to chance"
        )


def _nothing_left(plan: Plan, sessions: Sequence[Software]) -> Iterator[str]:
    for session in sessions:
        if session.get(LEFT):
            yield (
                "jobs were trained in a process in which earlier jobs had changed settings that "
                f"could not be restored: {session[LEFT]}"
            )


def _one_kind_of_node(plan: Plan, sessions: Sequence[Software]) -> Iterator[str]:
    for session in sessions:
        if session.get(NODES):
            yield f"its nodes have different kinds of processor: {session[NODES]}"


RULES: tuple[Rule, ...] = (
    _one_software,
    _one_kind_of_node,
    _deterministic_kernels,
    _one_process,
    _nothing_left,
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
    """Apply all rules to the plan and the software of each session, the first one first."""
    reasons = (reason for rule in RULES for reason in rule(plan, sessions))
    return Reproducibility(tuple(dict.fromkeys(reasons)))


def with_left(software: Software, text: str) -> dict[str, str]:
    """Return what a session trains with, where one job may have changed it for the next."""
    texts = [item for item in software.get(LEFT, "").split("; ") if item]
    return {**software, LEFT: "; ".join(dict.fromkeys([*texts, text]))}
