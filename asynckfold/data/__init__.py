"""From a dataset to arrays that all workers share: read once, gathered by index, two views.

::

    dataset ─ prepare() ─ Prepared ─ handle() ─┬─ pickled ──────────────┐
              reads once  (parent)             └─ file descriptors ─────┤ DataHandle.open()
                                                                     Batches  (each worker)
                                                 .train(indices, seed, epoch)   .eval(indices)

The arrays have no name, neither in a file system nor in ``/dev/shm``: memory that is known by its
file descriptor only, so that nothing is left behind however the processes end. What cannot be held
(samples of several shapes, or too large for memory and disk) is read sample by sample in the
workers, and `Prepared.notes` says so.

=============== ======================================================================
`prepared`      `prepare`: opens, checks, divides and reads a dataset
`reading`       reads it into shared arrays, or says why that cannot be
`reader`        what runs a dataset's code: looks at samples, reads a range of them
`views`         the train view and the eval view
`opened`        a dataset taken apart: samples, transform, labels
`known`         datasets whose arrays or files can be had without reading sample by sample
`encoding`      raw labels of a random dataset, in the form of its targets
`labels`        class indices or regression targets
`batches`       what a worker does: batches by sample number
`joined`        two parts of one data set: trained on, and scored on
`shared`        arrays without a name
`duplicates`    copies of training samples among the validation samples
`arrays`        what users pass, as plain arrays; what float32 loses of it
=============== ======================================================================
"""

from asynckfold.data.arrays import (
    NOT_FINITE,
    Given,
    as_given,
    by_position,
    column_problems,
    exact,
    plain,
    rounded,
)
from asynckfold.data.batches import Batches, DataHandle, one_by_one
from asynckfold.data.dataset import OneByOne, Opened, open_inputs, open_source
from asynckfold.data.duplicates import copies_note, random_note
from asynckfold.data.labels import Labels, resolve_labels
from asynckfold.data.materialize import Here, Readers, Seen, Task, look_at, seen_by
from asynckfold.data.prepare import Prepared, prepare
from asynckfold.data.range_reader import Look, Looked
from asynckfold.data.shared_arrays import ArraySpec, SharedArray
from asynckfold.data.train_valid import evenly, joined, repeated
from asynckfold.data.views import Views, make_views

__all__ = [
    "NOT_FINITE",
    "ArraySpec",
    "Batches",
    "DataHandle",
    "Given",
    "Here",
    "Labels",
    "Look",
    "Looked",
    "OneByOne",
    "Opened",
    "Prepared",
    "Readers",
    "Seen",
    "SharedArray",
    "Task",
    "Views",
    "as_given",
    "by_position",
    "column_problems",
    "copies_note",
    "evenly",
    "exact",
    "joined",
    "look_at",
    "make_views",
    "one_by_one",
    "open_inputs",
    "open_source",
    "plain",
    "prepare",
    "random_note",
    "repeated",
    "resolve_labels",
    "rounded",
    "seen_by",
]
