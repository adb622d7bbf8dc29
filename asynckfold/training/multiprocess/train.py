"""The trainers of several processes, by their names in a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from asynckfold.data.batches import Batches
from asynckfold.jobs.messages import Task
from asynckfold.jobs.result import Result
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import loop, setup
from asynckfold.training.bundle import Bundle
from asynckfold.training.job_log import JobLog
from asynckfold.training.multiprocess.allreduce import AllReduce
from asynckfold.training.multiprocess.averaging import Averaging
from asynckfold.training.multiprocess.base import MultiprocessTraining
from asynckfold.training.multiprocess.downpour import Downpour
from asynckfold.training.multiprocess.hogwild import Hogwild
from asynckfold.training.process_group.gpu_handoff import GpuToTake
from asynckfold.training.training_run import Report

TRAINERS: dict[str, type[MultiprocessTraining]] = {
    "hogwild": Hogwild,
    "allreduce": AllReduce,
    "averaging": Averaging,
    "parameter_server": Downpour,
}


def train(
    bundle: Bundle,
    task: Task,
    data: Batches,
    cores: Sequence[int],
    report: Report,
    stop: Callable[[], bool],
    heartbeat: Heartbeat | None = None,
    gpu: GpuToTake | None = None,
) -> Result | None:
    """Train one job on as many processes as its plan says, and score its held-out fold.

    Parameters
    ----------
    bundle, task, report, stop, heartbeat
        As in `loop.train`; the plan names the trainer.
    data : Batches
        The samples, held in memory.
    cores : sequence of int
        One for each process; empty for no pinning.
    gpu : GpuToTake, optional
        What the last process computes on. This one must not have differentiated anything yet, nor
        may the model's pretraining, which comes before the last is forked.

    Returns
    -------
    Result or None
        None when it was asked to stop.

    Raises
    ------
    WorkerDiedError
        One of the other processes ended.
    """
    heartbeat = heartbeat or Heartbeat()
    heartbeat.begin_long_phase()
    with JobLog(bundle.root, task.job) as log:
        plain = setup.build(bundle, task, data, torch.device("cpu"), log, heartbeat, cores=cores)
        make = TRAINERS[bundle.plan.params.trainer]
        training = make(**vars(plain), cores=tuple(cores), gpu=gpu)
        try:
            training.enlist_ahead()
            return loop.train_to_end(training, report, stop)
        finally:
            training.close()
