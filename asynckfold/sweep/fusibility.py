"""Compares fused and separate jobs of a model on a GPU, before the plan is written."""

from __future__ import annotations

from dataclasses import dataclass

from asynckfold.engines.engine import Engine
from asynckfold.errors import UnpackError, WorkerDiedError
from asynckfold.jobs.messages import Fusibility
from asynckfold.jobs.placement import Placement
from asynckfold.jobs.plan import Plan
from asynckfold.scheduling.reservations import emptiest
from asynckfold.sweep.dry_run import ATTEMPTS
from asynckfold.sweep.single_task import ask, room
from asynckfold.system.signals import Interruption


@dataclass(frozen=True, eq=False)
class FusibilityOnGpu:
    """Checks models on the emptiest GPU."""

    engine: Engine
    plan: Plan
    signals: Interruption
    max_wait: float | None = None

    def __call__(self, model: str) -> Fusibility:
        """Return whether the jobs of a model can be fused there."""
        job = next(job.id for job in self.plan.jobs if job.model == model)
        reason = "no GPU is there now"
        # The plan must not depend on a process that somebody killed.
        for _ in range(ATTEMPTS):
            load = room(self.engine, self.max_wait, self.signals, on_gpu=True)
            if not load.gpus:
                break
            gpu = min(load.gpus, key=lambda gpu: (gpu.busy, *emptiest(gpu)))
            core = (*load.idle, *load.cores)[:1]
            placement = Placement(
                (job,),
                core,
                gpu=gpu.index,
                trainer="fusibility",
                gpu_uuid=gpu.uuid,
                node=load.node,
            )
            try:
                found: Fusibility = ask(self.engine, placement, self.max_wait, self.signals)
            except UnpackError as error:
                return Fusibility(f"its check on a GPU failed: {error}")
            except WorkerDiedError as death:
                reason = f"its check on a GPU failed: {death}"
                if death.outcome != "died":
                    break
            else:
                return found
        return Fusibility(reason)
