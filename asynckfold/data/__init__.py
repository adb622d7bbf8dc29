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

================= ======================================================================
`prepare`         `prepare`: opens, checks, divides and reads a dataset
`materialize`     reads it into shared arrays, or says why that cannot be
`range_reader`    what runs a dataset's code: looks at samples, reads a range of them
`views`           the train view and the eval view
`dataset`         a dataset taken apart: samples, transform, labels
`known_datasets`  datasets whose arrays or files can be had without reading sample by sample
`target_encoding` raw labels of a random dataset, in the form of its targets
`labels`          class indices or regression targets
`batches`         what a worker does: batches by sample number
`train_valid`     two parts of one data set: trained on, and scored on
`shared_arrays`   arrays without a name
`duplicates`      copies of training samples among the validation samples
`arrays`          what users pass, as plain arrays; what float32 loses of it
================= ======================================================================
"""
