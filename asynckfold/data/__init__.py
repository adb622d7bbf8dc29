"""From a dataset to arrays that all workers share: read once, gathered by index, two views.

::

    dataset ─ prepare() ─ Prepared ─ handle() ─┬─ pickled ──────────────┐
              reads once  (parent)             └─ file descriptors ─────┤ DataHandle.open()
                                                                     Batches  (each worker)
                                                 .train(indices, seed, epoch)   .eval(indices)

The arrays are anonymous memory known by file descriptor only, so nothing is left behind however the
processes end. Samples of different length, for a `collate_fn`, are held as records with
offsets. Those that cannot be held (other structures, too large) are read one by one in the
workers, and `Prepared.notes` says so.

Read `prepare` first; `views` divides transforms, `batches` runs in a worker.
"""
