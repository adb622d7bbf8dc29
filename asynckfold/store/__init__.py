"""The run on disk: everything that happened, in one SQLite file with one writer.

::

    root_dir/
      run.lock      an flock on this file's open descriptor says who holds the run
      run.db        plan, jobs, attempts, epochs, results, checkpoints, events, load samples
      splits.npz    the indices of every fold, and the targets

      Model/schedule/fold-0/         checkpoints and log of one job, written by its worker

The process that runs the sweep holds the run and is its only writer. Everyone else reads, at any
time, also while it runs. A result is acknowledged only after its transaction is on the disk
(``synchronous=EXTRA``); what can be lost in a crash is progress, never a result. Each row carries a
checksum of its values: a file that was changed by anyone else is refused, never read as other
numbers.

::

    run_store   RunStore: hold, begin, record, flush
    reader      what everyone may read          recovery   what a crash left is put right
    database    opening run.db, its faults      splits     splits.npz
    integrity   checksums, SQLite's own check       lock       who holds the run
    records     the rows as values              layout, schema   names on disk, tables
    refusing    another plan in the folder         aside    an earlier run makes room
"""

from __future__ import annotations

from asynckfold.store.layout import job_folder
from asynckfold.store.reader import RunReader
from asynckfold.store.records import (
    Attempt,
    CheckpointRef,
    Event,
    Placed,
    Sample,
    SessionTimes,
    Waiting,
)
from asynckfold.store.refusing import refuse_other
from asynckfold.store.run_store import RunStore

__all__ = [
    "Attempt",
    "CheckpointRef",
    "Event",
    "Placed",
    "RunReader",
    "RunStore",
    "Sample",
    "SessionTimes",
    "Waiting",
    "job_folder",
    "refuse_other",
]
