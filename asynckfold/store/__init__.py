"""The run on disk: one SQLite file with one writer, and checkpoints beside it.

::

    root_dir/
      run.lock      the process that holds the run has an flock on it
      run.db        plan, jobs, attempts, epochs, results, checkpoints, events, load samples
      splits.npz    the samples of every fold, and the targets

      Model/schedule/fold-0/         checkpoints and log of one job, written by its worker

The process that runs the sweep holds the run and is its only writer. Everyone else can read at any
time, also while it runs. A result is acknowledged after its transaction is on the disk
(``synchronous=EXTRA``): a crash can cost progress, never a result. Each row has a checksum, so a
file that was changed or damaged is refused.

::

    run_store   RunStore writes         reader      RunReader reads
    opening     open a run, or say what is wrong with the folder or the plan
    run_file    transactions            database    tables and checksums
    upkeep      the folder of a run     lock        who holds the run
    records     values in run.db        layout      names on disk
    splits      splits.npz
"""

from __future__ import annotations

from asynckfold.store.layout import job_folder
from asynckfold.store.opening import open_run, refuse_other
from asynckfold.store.reader import RunReader
from asynckfold.store.records import Attempt, Event, Interim, Sample, SessionTimes, WaitReasons
from asynckfold.store.run_store import RunStore

__all__ = [
    "Attempt",
    "Event",
    "Interim",
    "RunReader",
    "RunStore",
    "Sample",
    "SessionTimes",
    "WaitReasons",
    "job_folder",
    "open_run",
    "refuse_other",
]
