"""A small sweep on a joblib backend, as a process of its own: ``joblib_sweep.py BACKEND ROOT``."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import joblib
import torch
from joblib.parallel import ParallelBackendBase
from torch import nn

from asynckfold import AsyncKFold
from tests.toy import Tiny, adam, samples


class Own(ParallelBackendBase):
    """A backend of the user's own, over `concurrent.futures`."""

    supports_retrieve_callback = True

    def effective_n_jobs(self, n_jobs: int) -> int:
        return 2

    def configure(self, n_jobs: int = 1, parallel: Any = None, **kwargs: Any) -> int:
        self.pool = ProcessPoolExecutor(2, get_context("spawn"))
        return 2

    def submit(self, func: Any, callback: Any) -> Future[Any]:
        future = self.pool.submit(func)
        future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        return out.result()

    def terminate(self) -> None:
        self.pool.shutdown()


joblib.register_parallel_backend("own", Own)


class Killed(Tiny):
    """Kills its process once, when there is a checkpoint."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        kill = Path(os.environ.get("KILL_ONCE", "none"))
        if kill.is_file() and [*Path(os.environ["KILL_IN"]).glob("net/*/*/checkpoint*")]:
            kill.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        print("a word for the log")
        time.sleep(float(os.environ.get("SLOW", "0")))
        return super().forward(inputs)


def main(backend: str, root: str) -> None:
    """Train, and print the fingerprint."""
    engine = backend if backend in ("process", "serial") else "joblib"
    context = joblib.parallel_config(backend if engine == "joblib" else "loky", n_jobs=2)
    settings = {"verbose": 0, "baseline": None, "threads_per_job": 1, "fuse": False}
    with context:
        kfold = AsyncKFold(
            3, samples(), root, nn.CrossEntropyLoss(), 10, engine=engine, n_jobs=None, **settings
        )
        results = kfold({"net": Killed}, ["cosine", "step"], adam, {"epochs": 4})
    print(results.fingerprint, results.counts["done"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
