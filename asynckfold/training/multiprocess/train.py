"""Train one job on several processes, by the trainer that its plan names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import torch

from asynckfold.data.batches import Batches
from asynckfold.jobs.messages import Task
from asynckfold.jobs.result import Result
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import loop, setup
from asynckfold.training.bundle import Bundle
from asynckfold.training.job_log import JobLog
from asynckfold.training.multiprocess.base import MultiprocessTraining
from asynckfold.training.process_group.gpu_handoff import HiddenGpu
from asynckfold.training.training_run import Report

TRAINERS = {
    "hogwild": ("hogwild", "HogwildTraining"),
    "allreduce": ("allreduce", "AllReduceTraining"),
    "averaging": ("averaging", "AveragingTraining"),
    "parameter_server": ("downpour", "DownpourTraining"),
}
"""Module and class of each trainer; only the one that is used is imported."""


def train(
    bundle: Bundle,
    task: Task,
    data: Batches,
    cores: Sequence[int],
    report: Report,
    stop: Callable[[], bool],
    heartbeat: Heartbeat | None = None,
    gpu: HiddenGpu | None = None,
) -> Result | None:
    """Train one job on the processes of its plan, and score its held-out fold.

    Parameters
    ----------
    bundle, task, data, report, stop, heartbeat
        As in `loop.train`, with the samples in memory; None is returned when `stop` ended it.
    cores : sequence of int
        One for each process; empty for no pinning.
    gpu : HiddenGpu, optional
        The GPU of the last ranks. Neither this process nor the model's pretraining may have run a
        backward pass before.

    Raises
    ------
    WorkerDiedError
        Another rank ended.
    """
    heartbeat = heartbeat or Heartbeat()
    heartbeat.begin_long_phase()
    with JobLog(bundle.root, task.job) as log:
        plain = setup.build(bundle, task, data, torch.device("cpu"), log, heartbeat, cores=cores)
        module, name = TRAINERS[bundle.plan.params.trainer]
        make: type[MultiprocessTraining] = getattr(import_module(f"{__package__}.{module}"), name)
        training = make(**vars(plain), cores=tuple(cores), gpu=gpu)
        try:
            training.fork_ahead()
            result: Result | None = loop.with_gpu_memory(
                loop.train_to_end(training, report, stop), training.device
            )
            return result
        finally:
            training.close()
